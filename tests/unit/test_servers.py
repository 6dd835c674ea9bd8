"""Ranks that hold no replica serve parameters: training equals one process, and replay knows them."""

import copy
from collections import Counter
from typing import Any

import pytest
import small_models
import torch
from in_memory import TIMEOUT, distance, distributed, fresh, run_ranks
from memory_job import MemoryJob, MemoryWorld
from reference import flat_parameters, graph_of, make_strategy
from strategies import Layer, Weight, make_graph

from offbeat import zoo
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.cost.memory import peak_memory
from offbeat.errors import OffbeatError, StrategyError
from offbeat.plan import lower
from offbeat.plan.messages import root_shares
from offbeat.runtime.comm.channels import Commands
from offbeat.runtime.distribute import serve
from offbeat.search.auto.neighbours import vary
from offbeat.search.auto.sampler import Sampler, Space
from offbeat.search.optimize import optimize
from offbeat.simulate import simulate
from offbeat.strategy import Shard, Strategy, VariableConfig, build_strategy, transfer

WORKERS, SERVERS, STEPS = 2, 2, 6
CLUSTER = ClusterSpec(nodes=({"count": WORKERS}, {"count": SERVERS, "role": "server", "device": "cpu"}))
BUILDERS = ("ps", "ps_load_balanced", "partitioned_ps", "uneven_partitioned_ps", "byteps", "parallax", "fast_servers")
OPTIONS = {
    "byteps": {"partition": 1024},
    "partitioned_ps": {"threshold": 64},
    "fast_servers": {"threshold": 64, "shard": 1024},
}
SUMMED = ("byteps", "fast_servers")
"""Every replica applies the update; workers with fast links sum some of the gradients, too."""
TOLERANCE = 1e-10


def run_job(
    name: str,
    kind: str,
    strategy: Strategy,
    body: Any,
    cluster: ClusterSpec = CLUSTER,
    job: MemoryJob | None = None,
    staged: bool = False,
) -> list[Any]:
    """What `body(world, model, optimizer)` returns on each replica; the other ranks serve, and return None.

    `staged` sends tensors through host memory, as replicas on GPUs do.
    """
    graph = graph_of(name, torch.float64, kind)

    def rank(world: MemoryWorld) -> Any:
        model, optimizer = fresh(world, name, kind)
        if world.rank not in (strategy.replicas or cluster.workers):
            plan = lower(graph, cluster, strategy, rank=world.rank)
            serve(model, optimizer, plan, TIMEOUT, world)
            return None
        world.staged = staged
        with distributed(world, model, optimizer, (graph, cluster, strategy)):
            return body(world, model, optimizer)

    return run_ranks(cluster.world_size, rank, job)


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
@pytest.mark.parametrize(("kind", "staged"), [("sgd", False), ("adamw", False), ("adamw", True)])
@pytest.mark.parametrize("builder", BUILDERS)
def test_servers_apart_from_replicas_are_exact(builder: str, kind: str, staged: bool, mode: str) -> None:
    graph = graph_of("everything", torch.float64, kind)
    given = {"builder": builder, "options": OPTIONS.get(builder, {})}
    strategy = make_strategy(given, graph, CLUSTER, mode)
    messages = lower(graph, CLUSTER, strategy).messages
    serving = {rank for message in messages for rank in message.servers}
    assert serving
    assert serving >= set(CLUSTER.servers) if builder in SUMMED else serving <= set(CLUSTER.servers)
    expected = reference("everything", kind, WORKERS)

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> float:
        train(model, optimizer, "everything", world.rank, range(STEPS))
        return distance(model, expected)

    errors = run_job("everything", kind, strategy, body, staged=staged)
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


@pytest.mark.parametrize("seed", range(3))
def test_replicas_sum_for_each_other_whenever_messages_arrive(seed: int) -> None:
    """Without servers of their own, in any order of completion, and beside shards that others own."""
    cluster, graph = ClusterSpec.homogeneous(nodes=3), graph_of("everything", torch.float64, "adamw")
    base = build_strategy("overlap", graph, cluster, bucket=256, slice_bytes=1024, in_flight=3)
    variables = {name: config.summed for name, config in base.variables.items()}
    mixed = (
        Shard(synchronizer="summation_server", placement=(2,)),
        Shard(synchronizer="parameter_server", placement=(1,)),
    )
    variables["dense.2.weight"] = VariableConfig(partition=(2, 1), shards=mixed)
    strategy = base.model_copy(update={"variables": variables})
    roots = {task.root for task in lower(graph, cluster, strategy).tasks if task.kind == "relay"}
    assert roots == {0, 1, 2}
    expected = reference("everything", "adamw", 3)

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> float:
        train(model, optimizer, "everything", world.rank, range(STEPS))
        return distance(model, expected)

    job = MemoryJob(3, seed=seed)
    assert max(run_job("everything", "adamw", strategy, body, cluster, job)) <= TOLERANCE


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("builder", ["ps_load_balanced", "fast_servers"])
def test_what_is_applied_are_the_gradients_that_the_loop_has_clipped(builder: str, staged: bool) -> None:
    strategy = build_strategy(builder, graph_of("mlp", torch.float64, "sgd"), CLUSTER)
    expected = reference("mlp", "sgd", WORKERS, clip=0.05)

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> float:
        train(model, optimizer, "mlp", world.rank, range(STEPS), clip=0.05)
        return distance(model, expected)

    assert max(run_job("mlp", "sgd", strategy, body, staged=staged)[:WORKERS]) <= TOLERANCE


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("builder", ["ps_load_balanced", "fast_servers"])
def test_state_and_values_that_are_loaded_reach_the_servers(builder: str, staged: bool) -> None:
    strategy = build_strategy(builder, graph_of("mlp", torch.float64, "adamw"), CLUSTER)
    expected = reference("mlp", "adamw", WORKERS)

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> float:
        train(model, optimizer, "mlp", world.rank, range(2))
        state, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        train(model, optimizer, "mlp", world.rank, range(5, 7))
        optimizer.load_state_dict(state)
        model.load_state_dict(values)
        train(model, optimizer, "mlp", world.rank, range(2, STEPS))
        return distance(model, expected)

    assert max(run_job("mlp", "adamw", strategy, body, staged=staged)[:WORKERS]) <= TOLERANCE


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("field", [{"staleness": 1}, {"asynchronous": True}])
def test_relaxed_servers_without_replicas_train(field: dict[str, Any], staged: bool) -> None:
    graph = graph_of("mlp", torch.float64, "sgd")
    shard = Shard(synchronizer="parameter_server", placement=(2,), **field)
    strategy = Strategy(variables={each.name: VariableConfig(shards=(shard,)) for each in graph.variables})

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> float:
        before = flat_parameters(model)
        train(model, optimizer, "mlp", world.rank, range(STEPS))
        return distance(model, before)

    assert min(run_job("mlp", "sgd", strategy, body, staged=staged)[:WORKERS]) > 1e-6


def test_servers_are_told_only_values_that_the_loop_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a variable is spread over several servers, whose parts arrive one after another."""
    graph = graph_of("mlp", torch.float64, "sgd")
    strategy = build_strategy("partitioned_ps", graph, CLUSTER, threshold=64)
    told: list[set[str]] = []
    tell = Commands.tell

    def noted(self: Commands, command: str, **facts: Any) -> None:
        if command == "step":
            told.append(set(facts["values"]))
        tell(self, command, **facts)

    monkeypatch.setattr(Commands, "tell", noted)
    spread = next(name for name, config in strategy.variables.items() if len(config.shards) > 1)

    def body(world: MemoryWorld, model: Any, optimizer: Any) -> None:
        train(model, optimizer, "mlp", world.rank, range(3))
        with torch.no_grad():
            model.get_parameter(spread).mul_(0.5)
        train(model, optimizer, "mlp", world.rank, range(3, 5))

    run_job("mlp", "sgd", strategy, body)
    assert told == [set(), set(), set(), {spread}, set()]


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


def summed_bytes(cluster: ClusterSpec) -> dict[int, int]:
    """Bytes that each rank sums in a step."""
    graph = graph_of("everything", torch.float64, "sgd")
    held: dict[int, int] = {}
    for task in lower(graph, cluster, build_strategy("byteps", graph, cluster, partition=1024)).communication:
        if task.root is not None:
            held[task.root] = held.get(task.root, 0) + task.wire_bytes
    return held


def test_unequal_servers_sum_by_their_bandwidth() -> None:
    servers = ({"role": "server", "bandwidth": "3Gbit/s"}, {"role": "server", "bandwidth": "1Gbit/s"})
    held = summed_bytes(ClusterSpec(nodes=({"bandwidth": "0.1Gbit/s"}, {"bandwidth": "0.1Gbit/s"}, *servers)))
    assert held.keys() == {2, 3}
    assert 2 < held[2] / held[3] < 4.5


@pytest.mark.parametrize("builder", ["ps_load_balanced", "partitioned_ps", "poseidon", "parallax", "hierarchical_ps"])
def test_unequal_servers_keep_as_much_as_their_links_carry(builder: str) -> None:
    """The second server node's two ranks share a link of the same bandwidth as the first one's."""
    first, second = {"role": "server", "bandwidth": "4Gbit/s"}, {"role": "server", "devices": 2}
    cluster = ClusterSpec(nodes=({"count": WORKERS}, first, second | {"bandwidth": "4Gbit/s"}))
    layers = [Layer((Weight(f"l{i}.weight", (240, 64), sparse=builder == "parallax"),), 10**6) for i in range(20)]
    options = {"threshold": 64} if "part" in builder or "hier" in builder else {}
    plan = lower(graph := make_graph(layers), cluster, build_strategy(builder, graph, cluster, **options))
    held = dict.fromkeys(cluster.servers, 0)
    for message in plan.messages:
        assert message.owner is not None
        held[message.owner] += message.bytes
    assert held[2] == pytest.approx(2 * held[3], rel=0.2)
    assert held[2] == pytest.approx(2 * held[4], rel=0.2)


def test_nodes_of_several_servers_get_no_station() -> None:
    nodes = ({"devices": 2}, {"devices": 2}, {"devices": 2, "role": "server"})
    cluster, graph = ClusterSpec(nodes=nodes), graph_of("everything", torch.float64, "sgd")
    assert cluster.stations == (0, 2)
    plan = lower(graph, cluster, build_strategy("hierarchical_ps", graph, cluster, threshold=64))
    assert {message.stations for message in plan.messages if message.synchronizer == "parameter_server"} == {(0, 2)}
    drawn = Sampler(graph, cluster, space=Space(small_bytes=16)).sample(20)
    shards = [shard for each in drawn for config in each.variables.values() for shard in config.shards]
    assert {shard.stations for shard in shards} == {(), (0, 2)}
    summed = [each for each in drawn if any(message.roots for message in lower(graph, cluster, each).messages)]
    assert 0 < len(summed) < len(drawn)
    near = vary(Sampler(graph, cluster), summed[0], 10)
    assert all(lower(graph, cluster, each).messages for each in near)


def test_every_link_that_sums_is_taken_for_as_long() -> None:
    """BytePS's optimum, OSDI 2020: of n workers and k servers with equal links, each server sums 2(n − 1) / d and each
    worker (n − k) / d, where d = n² + kn − 2k. Slow workers sum nothing."""
    workers, servers = [{"bandwidth": "1Gbit/s"}] * 4, [{"bandwidth": "1Gbit/s", "role": "server"}] * 2
    shares = root_shares((), (0, 1, 2, 3), ClusterSpec(nodes=(*workers, *servers)))
    assert shares == pytest.approx({**dict.fromkeys(range(4), 2 / 20), **dict.fromkeys((4, 5), 6 / 20)})
    slow = [{"bandwidth": "0.5Gbit/s"}] * 2
    shares = root_shares((), (0, 1, 2, 3), ClusterSpec(nodes=(*slow, *workers[:2], *servers)))
    assert shares == pytest.approx({2: 1 / 6, 3: 1 / 6, 4: 1 / 3, 5: 1 / 3})
    assert root_shares((), (0, 1), ClusterSpec.local(2)) == {0: 1.0}
    assert root_shares((5,), (0, 1, 2, 3), ClusterSpec(nodes=(*slow, *workers[:2], *servers))) == {5: 1.0}


def test_sums_come_back_before_the_step_is_taken() -> None:
    """Replay: what servers sum is limited by the slowest link alone, a ring passes half as much again through it."""
    graph = zoo.capture("vgg16", scale=0.25, batch=8)
    links = ("0.5Gbit/s", "0.5Gbit/s", "1Gbit/s", "1Gbit/s")
    nodes = (*({"bandwidth": each} for each in links), *({"role": "server", "bandwidth": "1Gbit/s"} for _ in range(2)))
    cluster, costs = ClusterSpec(nodes=nodes), Costs(straight=True, portions=True)
    seconds = {}
    for builder in ("overlap", "fast_servers"):
        plan = lower(graph, cluster, build_strategy(builder, graph, cluster))
        seconds[builder] = simulate(plan, costs).iteration_time
        assert simulate(plan, costs, expand=True).iteration_time == pytest.approx(seconds[builder], rel=0.15)
    assert seconds["overlap"] > 1.4 * seconds["fast_servers"]


def test_what_forward_needs_first_shares_its_message_with_little_else() -> None:
    """An embedding's gradient is complete last and needed first: forward waits for all that travels with it."""
    graph = zoo.capture("bert_base", scale=0.25, batch=1)
    strategy = build_strategy("fast_servers", graph, CLUSTER, relayed="128KiB")
    for message in lower(graph, CLUSTER, strategy).messages:
        modules = Counter[str]()
        for piece in message.pieces:
            modules[piece.variable.rpartition(".")[0]] += 4 * piece.elements
        assert sum(sorted(modules.values())[:-1]) < 2**17, message.variables


def test_the_search_finds_servers_and_its_strategy_moves_to_other_clusters() -> None:
    graph = zoo.capture("vgg16", scale=0.25, batch=8)
    workers = [{"bandwidth": each} for each in ("0.5Gbit/s", "0.5Gbit/s", "1Gbit/s", "1Gbit/s")]
    server = {"role": "server", "bandwidth": "1Gbit/s"}
    cluster, costs = ClusterSpec(nodes=(*workers, server, server)), Costs(straight=True, portions=True)
    found = optimize(graph, cluster, costs=costs, rounds=0)
    plan = lower(graph, cluster, found)
    assert {4, 5} <= {rank for message in plan.messages for rank in message.roots}
    ring = lower(graph, cluster, build_strategy("overlap", graph, cluster))
    assert simulate(ring, costs).iteration_time > 1.4 * simulate(plan, costs).iteration_time
    other = ClusterSpec(nodes=(*reversed(workers), server))
    moved = lower(graph, other, transfer(found, graph, other))
    assert {rank for message in moved.messages for rank in message.roots} == {0, 1, 4}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(OffbeatError, match="every node is a server"):
        ClusterSpec(nodes=({"role": "server"},))
    graph = graph_of("mlp", torch.float64, "sgd")
    name = graph.variables[0].name
    shard = Shard(synchronizer="parameter_server", placement=(2,), stations=(3,))
    with pytest.raises(StrategyError, match="station 3 holds no replica"):
        lower(graph, CLUSTER, Strategy(variables={name: VariableConfig(shards=(shard,))}))
