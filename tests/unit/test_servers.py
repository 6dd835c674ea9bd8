"""Ranks that hold no replica serve parameters: training equals one process, and replay knows them."""

from typing import Any

import pytest
import small_models
import torch
from in_memory import TIMEOUT, distance, distributed, fresh, run_ranks
from memory_job import MemoryJob, MemoryWorld
from reference import flat_parameters, graph_of, make_strategy

from offbeat.cluster import ClusterSpec
from offbeat.cost.memory import peak_memory
from offbeat.errors import OffbeatError, StrategyError
from offbeat.plan import lower
from offbeat.runtime.distribute import serve
from offbeat.simulate import simulate
from offbeat.strategy import Shard, Strategy, VariableConfig, build_strategy

WORKERS, SERVERS, STEPS = 2, 2, 4
CLUSTER = ClusterSpec(nodes=({"count": WORKERS}, {"count": SERVERS, "role": "server", "device": "cpu"}))
BUILDERS = ("ps", "ps_load_balanced", "partitioned_ps", "uneven_partitioned_ps", "byteps", "parallax", "fast_servers")
OPTIONS = {
    "byteps": {"partition": 256},
    "partitioned_ps": {"threshold": 64},
    "fast_servers": {"threshold": 64, "shard": 1024},
}
TOLERANCE = 1e-10


def run_job(name: str, kind: str, strategy: Strategy, body: Any, cluster: ClusterSpec = CLUSTER) -> list[Any]:
    """What `body(world, model, optimizer)` returns on each replica; the other ranks serve, and return None."""
    graph = graph_of(name, torch.float64, kind)

    def rank(world: MemoryWorld) -> Any:
        model, optimizer = fresh(world, name, kind)
        if world.rank not in (strategy.replicas or cluster.workers):
            plan = lower(graph, cluster, strategy, rank=world.rank)
            serve(model, optimizer, plan, TIMEOUT, world)
            return None
        with distributed(world, model, optimizer, (graph, cluster, strategy)):
            return body(world, model, optimizer)

    return run_ranks(cluster.world_size, rank, MemoryJob(cluster.world_size))


def train(model: Any, optimizer: Any, name: str, place: int, steps: range, clip: float | None = None) -> None:
    """Trains on the batches of one replica, with a learning rate that falls."""
    for step in steps:
        optimizer.zero_grad()
        model(*small_models.batch(name, step, place)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def reference(name: str, kind: str, workers: int, clip: float | None = None) -> torch.Tensor:
    """One process that averages the replicas' gradients, with the same learning rates."""
    model = small_models.make(name, torch.float64, sparse=kind != "adamw")
    optimizer = small_models.make_optimizer(kind, model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for place in range(workers):
            (model(*small_models.batch(name, step, place)) / workers).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return flat_parameters(model)


@pytest.mark.parametrize("mode", ["barrier", "auto"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_servers_apart_from_replicas_are_exact(builder: str, kind: str, mode: str) -> None:
    graph = graph_of("everything", torch.float64, kind)
    given = {"builder": builder, "options": OPTIONS.get(builder, {})}
    strategy = make_strategy(given, graph, CLUSTER, mode)
    owners = {shard.owner for config in strategy.variables.values() for shard in config.shards} - {None}
    assert owners
    assert owners <= set(CLUSTER.servers)
    expected = reference("everything", kind, WORKERS)

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> float:
        train(model, optimizer, "everything", world.rank, range(STEPS))
        return distance(model, expected)

    errors = run_job("everything", kind, strategy, body)
    assert max(errors[:WORKERS]) <= TOLERANCE
    assert errors[WORKERS:] == [None] * SERVERS


@pytest.mark.parametrize("replicas", [(0, 2), (3, 1)])
@pytest.mark.parametrize("builder", ["all_reduce", "ps_load_balanced", "sharded"])
def test_replicas_may_be_a_part_of_the_ranks(builder: str, replicas: tuple[int, ...]) -> None:
    cluster = ClusterSpec.homogeneous(nodes=4)
    strategy = build_strategy(builder, graph_of("mlp", torch.float64, "sgd"), cluster).model_copy(
        update={"replicas": replicas}
    )

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> torch.Tensor:
        train(model, optimizer, "mlp", replicas.index(world.rank), range(STEPS))
        return flat_parameters(model)

    answers = run_job("mlp", "sgd", strategy, body, cluster)
    model = small_models.make("mlp", torch.float64, seed=replicas[0])
    optimizer = small_models.make_optimizer("sgd", model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for place in range(2):
            (model(*small_models.batch("mlp", step, place)) / 2).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    expected = flat_parameters(model)
    assert [answer is None for answer in answers] == [rank not in replicas for rank in range(4)]
    assert all(torch.allclose(answers[rank], expected, atol=TOLERANCE, rtol=0) for rank in replicas)


def test_a_server_applies_the_gradients_that_the_loop_has_clipped() -> None:
    strategy = build_strategy("ps_load_balanced", graph_of("mlp", torch.float64, "sgd"), CLUSTER)
    expected = reference("mlp", "sgd", WORKERS, clip=0.05)

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> float:
        train(model, optimizer, "mlp", world.rank, range(STEPS), clip=0.05)
        return distance(model, expected)

    assert max(run_job("mlp", "sgd", strategy, body)[:WORKERS]) <= TOLERANCE


def test_state_and_values_that_are_loaded_reach_the_servers() -> None:
    strategy = build_strategy("ps_load_balanced", graph_of("mlp", torch.float64, "adamw"), CLUSTER)
    expected = reference("mlp", "adamw", WORKERS)

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> float:
        train(model, optimizer, "mlp", world.rank, range(2))
        state, values = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        train(model, optimizer, "mlp", world.rank, range(5, 7))
        optimizer.load_state_dict(state)
        model.load_state_dict(values)
        train(model, optimizer, "mlp", world.rank, range(2, STEPS))
        return distance(model, expected)

    assert max(run_job("mlp", "adamw", strategy, body)[:WORKERS]) <= TOLERANCE


@pytest.mark.parametrize("field", [{"staleness": 1}, {"asynchronous": True}])
def test_relaxed_servers_without_replicas_train(field: dict[str, Any]) -> None:
    graph = graph_of("mlp", torch.float64, "sgd")
    shard = Shard(synchronizer="parameter_server", placement=(2,), **field)
    strategy = Strategy(variables={each.name: VariableConfig(shards=(shard,)) for each in graph.variables})

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> float:
        before = flat_parameters(model)
        train(model, optimizer, "mlp", world.rank, range(STEPS))
        return distance(model, before)

    assert min(run_job("mlp", "sgd", strategy, body)[:WORKERS]) > 1e-6


def test_replay_prices_servers_by_their_own_links() -> None:
    graph = graph_of("mlp", torch.float32, "sgd")
    seconds = []
    for bandwidth in ("1Gbit/s", "10Mbit/s"):
        servers = {"count": SERVERS, "role": "server", "bandwidth": bandwidth}
        cluster = ClusterSpec(nodes=({"count": WORKERS, "bandwidth": "1Gbit/s"}, servers))
        plan = lower(graph, cluster, build_strategy("ps_load_balanced", graph, cluster))
        timeline = simulate(plan)
        seconds.append(timeline.iteration_time)
        assert len(timeline.marks) == WORKERS + SERVERS
        assert peak_memory(plan, 3).activations == 0
        folded, whole = simulate(plan).iteration_time, simulate(plan, fold=False).iteration_time
        assert folded == pytest.approx(whole)
    assert seconds[1] > 5 * seconds[0]


def test_unequal_servers_get_bytes_by_their_bandwidth() -> None:
    servers = ({"role": "server", "bandwidth": "3Gbit/s"}, {"role": "server", "bandwidth": "1Gbit/s"})
    cluster = ClusterSpec(nodes=({"count": 2}, *servers))
    graph = graph_of("everything", torch.float64, "sgd")
    held = {2: 0, 3: 0}
    for message in lower(graph, cluster, build_strategy("byteps", graph, cluster, partition=64)).messages:
        assert message.owner is not None
        held[message.owner] += message.bytes
    assert 2 < held[2] / held[3] < 4.5


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(OffbeatError, match="every node is a server"):
        ClusterSpec(nodes=({"role": "server"},))
    graph = graph_of("mlp", torch.float64, "sgd")
    name = graph.variables[0].name
    shard = Shard(synchronizer="parameter_server", placement=(2,), stations=(3,))
    with pytest.raises(StrategyError, match="station 3 holds no replica"):
        lower(graph, CLUSTER, Strategy(variables={name: VariableConfig(shards=(shard,))}))
