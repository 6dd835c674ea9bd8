"""Optimizer state spread over ranks is saved as one device's and fits every strategy again."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import small_models
import torch
from in_memory import distance, distributed, fresh, run_ranks, run_to_end, train
from memory_job import MemoryJob, MemoryWorld
from reference import flat_parameters, graph_of, make_strategy, reference_run
from small_strategies import OPTIONS

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.strategy import Shard, Strategy, VariableConfig

RANKS = 4
CLUSTER = ClusterSpec.homogeneous(nodes=2, devices_per_node=2)
CHAIN = ("overlap", "ps_load_balanced", "parallax", "uneven_partitioned_ps", "sharded", "partitioned_all_reduce")
"""SGD's momentum of the table is sparse with some of them."""
HANDOVERS = [*pairwise((*CHAIN, CHAIN[0])), ("overlap", "dense"), ("dense", "parallax")]


def job(builder: str, kind: str, cluster: ClusterSpec = CLUSTER) -> tuple[Any, ClusterSpec, Any]:
    graph = graph_of("everything", torch.float64, kind)
    if builder == "dense":
        return graph, cluster, Strategy(variables={"table.weight": VariableConfig(shards=(Shard(),))})
    given = {"builder": builder, "options": OPTIONS.get(builder, {})}
    return graph, cluster, make_strategy(given, graph, cluster, None)


def saved(world: MemoryWorld, builder: str, kind: str, steps: int) -> dict[str, Any]:
    """Both state dicts after some steps; copies, because state dicts refer to live tensors."""
    model, optimizer = fresh(world, "everything", kind)
    with distributed(world, model, optimizer, job(builder, kind)):
        train(world, "everything", model, optimizer, range(steps))
        return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def load(states: dict[str, Any], model: Any, optimizer: Any) -> None:
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])


@pytest.mark.parametrize("builder", ["overlap", "ps_load_balanced", "uneven_partitioned_ps", "sharded", "mixed"])
def test_one_rank_saves_alone_or_learns_that_all_must(builder: str) -> None:
    """`if rank == 0: torch.save(optimizer.state_dict())`, as scripts for DDP have it."""
    graph, cluster, strategy = job("sharded" if builder == "mixed" else builder, "sgd")
    if builder == "mixed":
        # One shard with an owner spreads the state of its variable.
        shards = Shard(), Shard(synchronizer="parameter_server", placement=(1,))
        config = VariableConfig(partition=(2, 1), shards=shards)
        largest = max((v for v in graph.variables if not v.sparse), key=lambda variable: variable.bytes)
        strategy = Strategy(name="mixed", variables={largest.name: config})
    asked = []

    def saving(world: MemoryWorld) -> str:
        model, optimizer = fresh(world, "everything", "sgd")
        with distributed(world, model, optimizer, (graph, cluster, strategy)) as runtime:
            train(world, "everything", model, optimizer, range(2))
            optimizer.state_dict()
            asked.append(runtime.plan.whole_state)
            train(world, "everything", model, optimizer, range(2, 3))
            if not world.rank:
                optimizer.state_dict()
            train(world, "everything", model, optimizer, range(3, 4))
        return "trained"

    outcomes, errors = run_to_end(MemoryJob(RANKS), saving)
    if builder == "overlap":
        assert all(asked)
        assert outcomes == ["trained"] * RANKS
        return
    assert not any(asked)
    assert isinstance(outcomes[0], StrategyError)
    assert errors[0] is outcomes[0], "it ends before anyone waits in vain"
    assert f"goes on training, but strategy {strategy.name!r} spreads it over the ranks; call" in str(errors[0])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("builder", CHAIN)
def test_a_restored_run_repeats_the_unbroken_one(builder: str, kind: str) -> None:
    def unbroken(world: MemoryWorld) -> tuple[list[float], Any]:
        model, optimizer = fresh(world, "everything", kind)
        with distributed(world, model, optimizer, job(builder, kind)):
            train(world, "everything", model, optimizer, range(3))
            states = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            train(world, "everything", model, optimizer, range(3, 5))
            return flat_parameters(model).tolist(), states

    answers = run_ranks(RANKS, unbroken)

    def restored(world: MemoryWorld) -> list[float]:
        model, optimizer = fresh(world, "everything", kind, seed=7)
        with distributed(world, model, optimizer, job(builder, kind)):
            # Every rank loads what rank 0 saved.
            load(copy.deepcopy(answers[0][1]), model, optimizer)
            train(world, "everything", model, optimizer, range(3, 5))
            return flat_parameters(model).tolist()

    assert run_ranks(RANKS, restored) == [parameters for parameters, _ in answers]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(("first", "second"), HANDOVERS)
def test_another_strategy_goes_on_from_a_checkpoint(first: str, second: str, kind: str) -> None:
    states = run_ranks(RANKS, lambda world: saved(world, first, kind, 3))[-1]
    expected = reference_run("everything", kind, torch.float64, 5, RANKS, (1.0,) * RANKS, (4,) * RANKS)

    def rank(world: MemoryWorld) -> float:
        model, optimizer = fresh(world, "everything", kind, seed=7)
        with distributed(world, model, optimizer, job(second, kind)):
            load(copy.deepcopy(states), model, optimizer)
            train(world, "everything", model, optimizer, range(3, 5))
            return distance(model, expected)

    assert max(run_ranks(RANKS, rank)) <= 1e-10


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("builder", CHAIN)
def test_a_single_process_goes_on_from_a_checkpoint(builder: str, kind: str) -> None:
    states = run_ranks(RANKS, lambda world: saved(world, builder, kind, 3))[0]
    alone = small_models.make("everything", seed=5, sparse=kind != "adamw")
    optimizer = small_models.make_optimizer(kind, alone.parameters())
    load(states, alone, optimizer)
    for step in range(3, 5):
        optimizer.zero_grad()
        for each in range(RANKS):
            (alone(*small_models.batch("everything", step, each)) / RANKS).backward()
        optimizer.step()
    expected = reference_run("everything", kind, torch.float64, 5, RANKS, (1.0,) * RANKS, (4,) * RANKS)
    assert distance(alone, expected) <= 1e-10


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("builder", CHAIN)
def test_half_as_many_ranks_go_on_from_a_checkpoint(builder: str, kind: str) -> None:
    states = run_ranks(RANKS, lambda world: saved(world, builder, kind, 3))[0]
    fewer = ClusterSpec.homogeneous(nodes=2, devices_per_node=1)
    expected = reference_run("everything", kind, torch.float64, 5, RANKS, (1.0,) * RANKS, (4,) * RANKS)

    def rank(world: MemoryWorld) -> float:
        model, optimizer = fresh(world, "everything", kind, seed=7)
        with distributed(world, model, optimizer, job(builder, kind, fewer)):
            load(copy.deepcopy(states), model, optimizer)
            for step in range(3, 5):
                optimizer.zero_grad()
                # Each rank computes what two of the four did.
                with model.no_sync():
                    (model(*small_models.batch("everything", step, 2 * world.rank)) / 2).backward()
                (model(*small_models.batch("everything", step, 2 * world.rank + 1)) / 2).backward()
                optimizer.step()
            return distance(model, expected)

    assert max(run_ranks(2, rank)) <= 1e-10
