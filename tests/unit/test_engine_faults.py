"""When a rank stops or a collective fails, every other rank says so and ends."""

import re
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import small_models
import torch
import torch.distributed as dist
from in_memory import distributed, fresh, run_to_end, train
from memory_job import Collective, MemoryJob, MemoryWorld
from reference import graph_of, make_strategy
from small_strategies import OPTIONS

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.plan import lower
from offbeat.runtime.comm import CommunicationFailed, TorchWorld
from offbeat.runtime.distribute import _check_messages
from offbeat.runtime.faults import WorkerLost
from offbeat.strategy import Shard, Strategy, VariableConfig, build_strategy

RANKS, VICTIM = 4, 2
CLUSTER = ClusterSpec.homogeneous(nodes=2, devices_per_node=2)
KINDS = ("all_reduce", "overlap", "ddp", "ps_load_balanced", "sharded", "poseidon", "parallax")
TASK = r"task m\d+\.\w+\[\d+:\d+\] \([\w., …]+\) with ranks \[[\d, ]+\]"


def job(builder: str) -> tuple[Any, ClusterSpec, Strategy]:
    graph = graph_of("everything", torch.float64, "sgd")
    given = {"builder": builder, "options": OPTIONS.get(builder, {})}
    return graph, CLUSTER, make_strategy(given, graph, CLUSTER, None)


def train_forever(world: MemoryWorld, builder: str, timeout: timedelta = timedelta(seconds=20)) -> None:
    model, optimizer = fresh(world, "everything", "sgd")
    with distributed(world, model, optimizer, job(builder), timeout):
        train(world, "everything", model, optimizer, range(100))


class Stopped(Exception):
    """What ends the victim."""


def stops_after(model: torch.nn.Module, forwards: int) -> None:
    left = [None] * forwards

    def count(*_: Any) -> None:
        if not left:
            raise Stopped
        left.pop()

    model.register_forward_pre_hook(count)


@pytest.mark.parametrize("builder", KINDS)
def test_survivors_name_the_rank_that_stopped(builder: str) -> None:
    def rank(world: MemoryWorld) -> None:
        model, optimizer = fresh(world, "everything", "sgd")
        if world.rank == VICTIM:
            stops_after(model, 2)
        with distributed(world, model, optimizer, job(builder)):
            train(world, "everything", model, optimizer, range(100))

    outcomes, _ = run_to_end(MemoryJob(RANKS, seed=1), rank)
    assert isinstance(outcomes.pop(VICTIM), Stopped)
    for error in outcomes:
        assert isinstance(error, WorkerLost), error
        assert f": rank {VICTIM} gave no sign of life (" in str(error)
    assert any(re.search(rf"rank \d was waiting for {TASK}: ", str(error)) for error in outcomes)


def test_an_error_in_the_first_forward_is_the_models_own() -> None:
    """It is watched for uses of variables, which must not get between the error and the user."""

    def rank(world: MemoryWorld) -> None:
        model, optimizer = fresh(world, "everything", "sgd")
        stops_after(model.dense, 0)
        with distributed(world, model, optimizer, job("overlap")):
            train(world, "everything", model, optimizer, range(1))

    outcomes, _ = run_to_end(MemoryJob(RANKS), rank)
    assert [type(outcome) for outcome in outcomes] == [Stopped] * RANKS


def test_survivors_name_the_rank_that_hangs() -> None:
    over = threading.Event()

    def rank(world: MemoryWorld) -> None:
        model, optimizer = fresh(world, "everything", "sgd")
        if world.rank == VICTIM:
            model.register_forward_pre_hook(lambda *_: over.wait(20) and None)
        try:
            with distributed(world, model, optimizer, job("overlap"), timedelta(seconds=0.3)):
                train(world, "everything", model, optimizer, range(100))
        finally:
            over.set()

    outcomes, errors = run_to_end(MemoryJob(RANKS), rank)
    assert all(isinstance(outcome, WorkerLost) for index, outcome in enumerate(outcomes) if index != VICTIM)
    assert f": rank {VICTIM} gave no sign of life (timed out after 0.3 s" in str(errors[0])


@pytest.mark.parametrize("builder", KINDS)
def test_an_error_in_a_collective_ends_every_rank(builder: str) -> None:
    def breaks(collective: Collective) -> None:
        if "/up/" in collective.channel and collective.number > 20:
            raise OSError("no route to host")

    outcomes, errors = run_to_end(MemoryJob(RANKS, before=breaks), lambda world: train_forever(world, builder))
    assert all(isinstance(outcome, WorkerLost) for outcome in outcomes)
    assert re.fullmatch(rf"rank \d was waiting for {TASK}: a rank failed or left \(no route to host\)", str(errors[0]))


@pytest.mark.parametrize("about", ["model", "strategy"])
def test_ranks_that_disagree_are_refused_everywhere(about: str) -> None:
    def rank(world: MemoryWorld) -> None:
        odd = world.rank == 3
        name = "cnn" if odd and about == "model" else "mlp"
        graph = graph_of(name, torch.float64, "sgd")
        strategy = build_strategy("sharded" if odd and about == "strategy" else "overlap", graph, CLUSTER)
        model = small_models.make(name)
        optimizer = small_models.make_optimizer("sgd", model.parameters())
        with distributed(world, model, optimizer, (graph, CLUSTER, strategy)):
            raise AssertionError("nobody gets here")

    for name in ("mlp", "cnn"):
        graph_of(name, torch.float64, "sgd")
    outcomes, _ = run_to_end(MemoryJob(RANKS), rank)
    for error in outcomes:
        assert isinstance(error, StrategyError)
        assert str(error) == f"rank 3 has a different {about} than rank 0"


def test_asynchronous_servers_are_refused_on_gpus() -> None:
    graph = graph_of("mlp", torch.float64, "sgd")
    shard = Shard(synchronizer="parameter_server", placement=(0,), asynchronous=True)
    strategy = Strategy(variables={name.name: VariableConfig(shards=(shard,)) for name in graph.variables})
    plan = lower(graph, CLUSTER, strategy, rank=0)
    _check_messages(plan, torch.optim.SGD, torch.device("cpu"))
    refused = (
        r"^variable 'layers\.\d\.\w+' has an asynchronous parameter server on rank 0, which computes on a GPU: NCCL"
    )
    with pytest.raises(StrategyError, match=refused):
        _check_messages(plan, torch.optim.SGD, torch.device("cuda"))


def test_a_rank_does_not_wait_for_word_from_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store would keep it waiting for minutes."""
    monkeypatch.setattr(sys.modules[TorchWorld.__module__], "FIRST_LOOK_SECONDS", 0.05)
    world = TorchWorld.__new__(TorchWorld)
    world.store = dist.HashStore()
    liveness: Any = SimpleNamespace(dead=lambda: [1], addresses={1: ()}, blame=lambda: [1])
    world.liveness = liveness
    with pytest.raises(CommunicationFailed, match="nobody is left to set trace") as raised:
        world.get("trace")
    assert raised.value.lost_ranks() == [1]
    world.set("told", b"before it died")
    assert world.get("told") == b"before it died"
