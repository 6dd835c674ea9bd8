"""Staleness is bounded and exact, and asynchronous servers keep nobody waiting."""

import threading
import time
from collections import deque
from typing import Any

import pytest
import small_models
import torch
from in_memory import distance, distributed, fresh, run_ranks, run_to_end, train
from memory_job import MemoryJob, MemoryWorld
from reference import flat_parameters, graph_of

from offbeat.cluster import ClusterSpec
from offbeat.runtime.faults import WorkerLost
from offbeat.strategy import Shard, Strategy, VariableConfig

RANKS = 4
CLUSTER = ClusterSpec.homogeneous(nodes=RANKS, devices_per_node=1)


def relaxed(synchronizer: str, **fields: Any) -> Strategy:
    """Every variable of the MLP synchronised this way, servers in turn."""
    configs = {}
    for number, (name, _) in enumerate(small_models.make("mlp").named_parameters()):
        placement = (number % RANKS,) if synchronizer == "parameter_server" else ()
        configs[name] = VariableConfig(shards=(Shard(synchronizer=synchronizer, placement=placement, **fields),))
    return Strategy(variables=configs)


def job(strategy: Strategy) -> tuple[Any, ClusterSpec, Strategy]:
    return graph_of("mlp", torch.float64, "sgd"), CLUSTER, strategy


@pytest.mark.parametrize("staleness", [1, 3])
def test_stale_servers_apply_gradients_exactly_so_many_steps_late(staleness: int) -> None:
    steps = 8
    model = small_models.make("mlp")
    optimizer = small_models.make_optimizer("sgd", model.parameters())
    flying: deque[list[torch.Tensor]] = deque()

    def apply() -> None:
        for parameter, gradient in zip(model.parameters(), flying.popleft(), strict=True):
            parameter.grad = gradient
        optimizer.step()

    for step in range(steps):
        optimizer.zero_grad()
        for each in range(RANKS):
            (model(*small_models.batch("mlp", step, each)) / RANKS).backward()
        flying.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        if len(flying) > staleness:
            apply()
    while flying:
        apply()
    expected = flat_parameters(model)

    def rank(world: MemoryWorld) -> float:
        model, optimizer = fresh(world, "mlp", "sgd")
        with distributed(world, model, optimizer, job(relaxed("parameter_server", staleness=staleness))):
            train(world, "mlp", model, optimizer, range(steps))
            model.flush()
            return distance(model, expected)

    assert max(run_ranks(RANKS, rank, MemoryJob(RANKS, seed=staleness))) <= 1e-10


@pytest.mark.parametrize(("synchronizer", "staleness"), [("all_reduce", 1), ("all_reduce", 3), ("parameter_server", 2)])
def test_no_replica_is_more_than_k_steps_ahead(synchronizer: str, staleness: int) -> None:
    steps = 20
    begun = [0] * RANKS
    """Backward passes that each rank has begun."""

    def rank(world: MemoryWorld) -> tuple[int, list[float]]:
        model, optimizer = fresh(world, "mlp", "sgd")
        optimizer.param_groups[0].update(lr=0.05, momentum=0.0)
        leads = []
        with distributed(world, model, optimizer, job(relaxed(synchronizer, staleness=staleness))):
            for step in range(steps):
                leads.append(step - min(begun))
                optimizer.zero_grad()
                loss = model(*small_models.batch("mlp", step % 4, world.rank))
                if world.rank == step // 4 % RANKS:
                    # Long enough for the others to begin their next step, on a busy machine too.
                    time.sleep(0.04)
                begun[world.rank] += 1
                loss.backward()
                optimizer.step()
            model.flush()
            return max(leads), flat_parameters(model).tolist()

    answers = run_ranks(RANKS, rank)
    assert max(lead for lead, _ in answers) <= staleness
    # The bound is used, or the test would prove nothing.
    assert max(lead for lead, _ in answers) >= 1
    # Every replica has applied the same sums once all have arrived.
    assert all(parameters == answers[0][1] for _, parameters in answers)


@pytest.mark.parametrize("synchronizer", ["all_reduce", "parameter_server"])
def test_staleness_zero_is_synchronous_bit_for_bit(synchronizer: str) -> None:
    def rank(world: MemoryWorld, strategy: Strategy) -> list[float]:
        model, optimizer = fresh(world, "mlp", "sgd")
        with distributed(world, model, optimizer, job(strategy)):
            train(world, "mlp", model, optimizer, range(5))
            return flat_parameters(model).tolist()

    stale, plain = relaxed(synchronizer, staleness=0), relaxed(synchronizer)
    assert run_ranks(RANKS, lambda world: rank(world, stale)) == run_ranks(RANKS, lambda world: rank(world, plain))


def test_an_asynchronous_server_keeps_nobody_waiting_for_the_slowest() -> None:
    """Rank 0 takes one step and the next when all others have ended their last; it serves them meanwhile."""
    steps = 12
    others = threading.Barrier(RANKS)

    def rank(world: MemoryWorld) -> None:
        model, optimizer = fresh(world, "mlp", "sgd")
        optimizer.param_groups[0].update(momentum=0.0)
        with distributed(world, model, optimizer, job(relaxed("parameter_server", asynchronous=True))) as runtime:
            train(world, "mlp", model, optimizer, range(1))
            if world.rank == 0:
                owned = [each for each in runtime.engine.synchronisers if each.message.owner == 0]
                before = [each.values.clone() for each in owned]
                others.wait(10)
                assert not any(torch.equal(*pair) for pair in zip(before, [p.values for p in owned], strict=True))
            train(world, "mlp", model, optimizer, range(1, steps))
            if world.rank:
                others.wait(10)

    run_ranks(RANKS, rank)


def test_survivors_of_an_asynchronous_job_name_the_rank_that_stopped() -> None:
    def rank(world: MemoryWorld) -> None:
        model, optimizer = fresh(world, "mlp", "sgd")
        with distributed(world, model, optimizer, job(relaxed("parameter_server", asynchronous=True))):
            train(world, "mlp", model, optimizer, range(2 if world.rank == 2 else 10**6))
            raise KeyError("stopped")

    outcomes, _ = run_to_end(MemoryJob(RANKS), rank)
    assert isinstance(outcomes.pop(2), KeyError)
    for error in outcomes:
        assert isinstance(error, WorkerLost)
        assert "was waiting for the parameters of asynchronous servers: rank 2 gave no sign of life" in str(error)


def test_asynchronous_servers_apply_every_gradient_once() -> None:
    """One step of each replica, all from the same parameters, moves them as one synchronous step."""
    start = small_models.make("mlp")
    reference = small_models.make_optimizer("sgd", start.parameters())
    reference.param_groups[0].update(momentum=0.0)
    for each in range(RANKS):
        (start(*small_models.batch("mlp", 0, each)) / RANKS).backward()
    reference.step()
    expected = dict(start.named_parameters())
    everybody = threading.Barrier(RANKS)

    def rank(world: MemoryWorld) -> float:
        model, optimizer = fresh(world, "mlp", "sgd")
        optimizer.param_groups[0].update(momentum=0.0)
        with distributed(world, model, optimizer, job(relaxed("parameter_server", asynchronous=True))) as runtime:
            model(*small_models.batch("mlp", 0, world.rank)).backward()
            everybody.wait(10)
            optimizer.step()
            engine = runtime.engine
        # Every rank has said farewell: what this one owns is final.
        owned = [each for each in engine.synchronisers if each.message.owner == world.rank]
        names = [name for each in owned for name in each.message.variables]
        assert names
        values = torch.cat([each.values for each in owned])
        return float((values - torch.cat([expected[name].detach().reshape(-1) for name in names])).abs().max())

    assert max(run_ranks(RANKS, rank)) <= 1e-10
