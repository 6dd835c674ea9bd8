"""What a user relies on when a plan is simulated: closed forms, monotony, and that folding changes nothing."""

import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from strategies import Layer, Weight, make_graph
from test_zoo_plans import SMALL_OPTIONS

import offbeat
from offbeat import zoo
from offbeat.cluster import ClusterSpec, CollectiveTable
from offbeat.cost.measured import CollectiveFit, Costs, in_a_row, network_seconds
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.plan import Plan, lower
from offbeat.simulate import replay, step_seconds
from offbeat.simulate.expand import ExpandedSteps
from offbeat.simulate.roles import find_roles
from offbeat.strategy import Schedule, Shard, Strategy, VariableConfig, build_strategy, builders

LAYERS = 4
ELEMENTS = 250_000
BYTES = 4 * ELEMENTS
LINK = 125e6
CLUSTERS = {
    "four nodes": ClusterSpec.homogeneous(nodes=4),
    "two by four": ClusterSpec.homogeneous(nodes=2, devices_per_node=4),
    "unequal": ClusterSpec.preset("B9"),
}


def hand_made(seconds: float) -> ModelGraph:
    """Equal layers of which each takes `seconds` forward and as much backward."""
    graph = make_graph([Layer((Weight(f"w{i}", (ELEMENTS,)),), seconds=seconds) for i in range(LAYERS)])
    timed = {operator.name: seconds for operator in graph.operators if operator.phase != "optimizer"}
    return graph.with_seconds(timed | {operator.name: 0.0 for operator in graph.phase("optimizer")})


def plan_of(seconds: float, ranks: int = 4, mode: str = "deferred", **shard: object) -> Plan:
    cluster = ClusterSpec.homogeneous(nodes=ranks, bandwidth=LINK, latency=0.0)
    configs = {f"w{i}": VariableConfig(shards=(Shard(**shard),)) for i in range(LAYERS)}  # type: ignore[arg-type]
    schedule = Schedule(policy="priority", mode=mode)  # type: ignore[arg-type]
    return lower(hand_made(seconds), cluster, Strategy(variables=configs, schedule=schedule))


def seconds_of(plan: Plan, costs: Costs | None = None, **options: bool) -> float:
    return offbeat.simulate(plan, costs, memory=False, **options).iteration_time


@cache
def captured(model: str) -> ModelGraph:
    return zoo.capture(model, 0.05)


@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_a_step_bound_by_the_network_takes_the_sum_of_its_collectives(ranks: int) -> None:
    plan = plan_of(1e-6, ranks)
    expected = LAYERS * 2 * (ranks - 1) / ranks * BYTES / LINK
    assert network_seconds(plan, Costs()) == pytest.approx(expected)
    assert seconds_of(plan) == pytest.approx(expected, rel=1e-3)


def test_a_step_bound_by_computing_takes_what_it_computes() -> None:
    plan = plan_of(0.1)
    # Backward ends with the first layer's gradient, which the next forward needs at once.
    assert seconds_of(plan) == pytest.approx(2 * LAYERS * 0.1 + 1.5 * BYTES / LINK, rel=1e-9)


def test_with_a_barrier_what_is_sent_after_backward_adds_up() -> None:
    transfer = 1.5 * BYTES / LINK
    plan = plan_of(2 * transfer, mode="barrier")
    # Each layer's all-reduce hides behind the next layer's backward; nothing is left to hide the last one.
    assert seconds_of(plan) == pytest.approx(2 * LAYERS * 2 * transfer + transfer, rel=1e-9)


@pytest.mark.parametrize("seconds", [1e-4, 3e-3, 6e-3, 1e-2, 3e-2])
def test_deferring_updates_is_never_slower(seconds: float) -> None:
    assert seconds_of(plan_of(seconds)) <= seconds_of(plan_of(seconds, mode="barrier")) * (1 + 1e-9)


@pytest.mark.parametrize("builder", builders())
@pytest.mark.parametrize(("model", "cluster"), [*(("mlp", name) for name in CLUSTERS), ("resnet50", "two by four")])
def test_folding_changes_nothing(model: str, builder: str, cluster: str) -> None:
    graph, spec = captured(model), CLUSTERS[cluster]
    plan = lower(graph, spec, build_strategy(builder, graph, spec, **SMALL_OPTIONS.get(builder, {})))
    folded, unfolded = (offbeat.simulate(plan, fold=fold, memory=False) for fold in (True, False))
    assert folded.iteration_time == pytest.approx(unfolded.iteration_time, rel=1e-9)
    assert folded.ranks == unfolded.ranks == tuple(range(spec.world_size))


@pytest.mark.timing
def test_ten_thousand_equal_ranks_take_less_than_a_second() -> None:
    plan = plan_of(1e-6, ranks=10_000)
    offbeat.simulate(plan_of(1e-6), memory=False)
    begin = time.perf_counter()
    timeline = offbeat.simulate(plan, memory=False)
    assert time.perf_counter() - begin < 1.0
    assert timeline.notes == ("10000 ranks in 1 roles: one rank of each is shown",)
    assert timeline.iteration_time == pytest.approx(LAYERS * 2 * 9999 / 10000 * BYTES / LINK, rel=1e-2)


@pytest.mark.parametrize("mode", ["deferred", "barrier"])
def test_all_wait_for_a_straggler(mode: str) -> None:
    plan = plan_of(0.05, mode=mode)
    usual, slowed = seconds_of(plan), offbeat.simulate(plan, Costs(compute_scale={2: 2.0}), memory=False)
    assert slowed.iteration_time == pytest.approx(usual + 2 * LAYERS * 0.05, rel=0.02)
    assert np.ptp(np.diff(slowed.marks, axis=1)) < 1e-6
    assert max({span.rank for span in slowed.critical_path()}) == 2


def test_interference_lengthens_what_overlaps() -> None:
    plan = plan_of(0.05)
    transfer = LAYERS * 1.5 * BYTES / LINK
    slowed = seconds_of(plan, Costs(interference=0.25))
    # While the link is busy a second of computing takes 1.25.
    assert slowed == pytest.approx(seconds_of(plan) + transfer * 0.25 / 1.25, rel=0.01)


def test_what_collectives_take_from_a_processor_does_not_depend_on_the_link() -> None:
    """A faster link takes the same processor time in less time; `interference` would take less."""
    costs = Costs(processor_seconds=1e-3, processor_seconds_per_byte=1e-9)
    taken = LAYERS * (1e-3 + 1.5 * BYTES * 1e-9)
    for bandwidth in (LINK, 4 * LINK):
        plan = plan_of(0.05)
        plan = lower(plan.graph, ClusterSpec.homogeneous(nodes=4, bandwidth=bandwidth, latency=0.0), plan.strategy)
        assert seconds_of(plan, costs) == pytest.approx(seconds_of(plan) + taken, rel=0.01)


def test_staleness_hides_what_a_barrier_shows() -> None:
    fresh, stale = plan_of(1e-3, mode="barrier"), plan_of(1e-3, mode="barrier", staleness=2)
    network = network_seconds(fresh, Costs())
    assert seconds_of(stale) < seconds_of(fresh)
    assert seconds_of(stale) == pytest.approx(max(network, 2 * LAYERS * 1e-3), rel=0.35)


@pytest.mark.parametrize(
    ("taken", "in_flight", "expected"),
    [
        # Small ones alone: one after the other leaves every overhead, as they did when it was measured.
        ([1.0, 1.0, 1.0, 1.0], 2, [1.0, 1.0, 1.0, 1.0]),
        # Behind bytes that take longer than its overhead a collective costs its own bytes only.
        ([6.0, 1.0, 6.0], 2, [6.0, 0.0, 7.0]),
        ([2.0, 2.0, 2.0], 2, [2.0, 1.0, 2.0]),
        # With a third in flight there are two to hide behind.
        ([2.0, 2.0, 2.0], 3, [2.0, 1.0, 1.0]),
        ([6.0, 1.0, 6.0], 1, [6.0, 1.0, 6.0]),
    ],
)
def test_what_precedes_a_collectives_bytes_hides_behind_those_in_flight(
    taken: list[float], in_flight: int, expected: list[float]
) -> None:
    assert in_a_row(taken, [1.0] * len(taken), in_flight) == pytest.approx(expected)


@pytest.mark.parametrize("straight", [False, True], ids=["ring", "servers"])
@pytest.mark.parametrize("seconds", [1e-4, 1e-2])
def test_a_credit_is_worth_as_many_messages_as_fit_into_it(seconds: float, straight: bool) -> None:
    fits = {(kind, 4): CollectiveFit(4e-3, 2e-3, 2e-9) for kind in ("all_reduce", "reduce", "broadcast")}
    costs = Costs(collectives=fits, straight=straight)
    owned = {"synchronizer": "parameter_server", "placement": (0,)} if straight else {}

    def step(in_flight: int, credit_bytes: int | None) -> float:
        plan = plan_of(seconds, **owned)
        limits = {"in_flight": in_flight, "credit_bytes": credit_bytes}
        schedule = plan.strategy.schedule.model_copy(update=limits)
        # The order stays.
        changed = replace(plan, strategy=plan.strategy.model_copy(update={"schedule": schedule}))
        assert step_seconds(changed, costs) == pytest.approx(seconds_of(changed, costs))
        return seconds_of(changed, costs)

    # Messages of equal size: so many bytes are so many messages.
    assert step(4, BYTES // 2) == pytest.approx(step(1, None))
    assert step(4, 2 * BYTES) == pytest.approx(step(2, None))
    assert step(4, 4 * BYTES) == pytest.approx(step(4, None))
    assert seconds > 1e-3 or step(4, None) < step(1, None)


def test_measured_collectives_count_instead_of_links() -> None:
    costs = Costs(collectives={("all_reduce", 4): CollectiveFit(1e-3, 0.0, 2e-9)})
    # The first pays its overhead; that of the others passes while the bytes before them are on the wire.
    assert seconds_of(plan_of(1e-6), costs) == pytest.approx(1e-3 + LAYERS * 2e-9 * BYTES, rel=1e-3)
    plan = plan_of(1e-6)
    single = plan.strategy.schedule.model_copy(update={"in_flight": 1})
    alone = lower(plan.graph, plan.cluster, plan.strategy.model_copy(update={"schedule": single}))
    assert seconds_of(alone, costs) == pytest.approx(LAYERS * (1e-3 + 2e-9 * BYTES), rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("mode", ["deferred", "barrier"])
def test_expanded_rings_take_what_the_closed_form_says(mode: str, ranks: int) -> None:
    plan = plan_of(1e-6, ranks, mode)
    assert seconds_of(plan, expand=True) == pytest.approx(seconds_of(plan), rel=1e-3)


@pytest.mark.parametrize("builder", ["ps", "hierarchical_ps", "sharded", "parallax", "poseidon"])
def test_every_kind_of_collective_can_be_expanded(builder: str) -> None:
    graph, spec = captured("mlp"), CLUSTERS["two by four"]
    plan = lower(graph, spec, build_strategy(builder, graph, spec, **SMALL_OPTIONS.get(builder, {})))
    timeline = offbeat.simulate(plan, expand=True, memory=False)
    computing = offbeat.simulate(plan, Costs(collectives=_free(plan)), memory=False)
    assert timeline.iteration_time >= computing.iteration_time * (1 - 1e-9)
    sent = [span for span in timeline.spans if span.kind == "communication" and span.step == 0]
    expected = sum(len(task.ranks) for task in plan.communication)
    assert len(sent) == expected
    assert {span.track for span in sent} == {"network"}


def _free(plan: Plan) -> dict[tuple[str, int], CollectiveFit]:
    return {(task.kind, len(task.ranks)): CollectiveFit(0.0, 0.0, 0.0) for task in plan.communication}


@pytest.mark.parametrize(
    ("kind", "shard"),
    [
        ("all_reduce", {}),
        ("reduce_scatter", {"synchronizer": "sharded"}),
        ("reduce", {"synchronizer": "parameter_server", "placement": (0,)}),
    ],
)
def test_an_expanded_collective_alone_takes_what_was_measured(kind: str, shard: dict[str, object]) -> None:
    plan = plan_of(0.0, **shard)
    only = plan.communication[0]
    assert only.kind == kind
    plan = replace(plan, tasks=(only,), messages=plan.messages)
    costs = Costs(collectives={(kind, 4): CollectiveFit(2e-3, 1e-3, 5e-9)})
    roles = find_roles(plan, {}, fold=False)
    expanded = ExpandedSteps(plan, costs, roles, 1)
    assert replay(expanded.graph()).iteration_time == pytest.approx(3e-3 + 5e-9 * only.wire_bytes, rel=1e-9)


def test_a_late_rank_delays_expanded_collectives() -> None:
    plan = plan_of(0.05)
    slowed = seconds_of(plan, Costs(compute_scale={1: 1.5}), expand=True)
    assert slowed == pytest.approx(seconds_of(plan, Costs(compute_scale={1: 1.5})), rel=0.02)


def test_one_ranks_plan_cannot_be_expanded() -> None:
    plan = plan_of(0.01).for_rank(1)
    assert seconds_of(plan) == pytest.approx(seconds_of(plan_of(0.01)))
    with pytest.raises(OffbeatError, match="the plan of rank 1 alone cannot be replayed: all ranks are expanded"):
        seconds_of(plan, expand=True)
    with pytest.raises(OffbeatError, match="steps: 1 is less than 2"):
        offbeat.simulate(plan, steps=1)


def test_a_clusters_measured_tables_are_what_replay_uses() -> None:
    """`offbeat calibrate` writes them; without them the links' figures count."""
    graph = zoo.capture("mlp", scale=0.1)
    plain = ClusterSpec.homogeneous(nodes=4, devices_per_node=1, bandwidth="10Gbit/s", latency="50us")
    sizes = tuple(2**power for power in range(10, 28))
    slow = CollectiveTable(
        collective="all_reduce", groups=((0, 1, 2, 3),), sizes_bytes=sizes, seconds=tuple(size * 1e-7 for size in sizes)
    )
    measured = plain.replace(tables=(slow,))
    taken = {
        name: offbeat.simulate(
            lower(graph, cluster, build_strategy("ddp", graph, cluster)), memory=False
        ).iteration_time
        for name, cluster in (("plain", plain), ("measured", measured))
    }
    assert taken["measured"] > graph.parameter_bytes * 1e-7 > taken["plain"]


def served(owners: tuple[int, ...], ranks: int = 4, seconds: float = 1e-6, **schedule: object) -> Plan:
    """Equal variables, each with its server, on links of which each is as fast as the others."""
    cluster = ClusterSpec.homogeneous(nodes=ranks, bandwidth=LINK, latency=0.0)
    configs = {
        f"w{i}": VariableConfig(shards=(Shard(synchronizer="parameter_server", placement=(owner,)),))
        for i, owner in enumerate(owners)
    }
    plan = Strategy(variables=configs, schedule=Schedule(policy="priority", **schedule))  # type: ignore[arg-type]
    return lower(hand_made(seconds), cluster, plan)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_server_receives_all_gradients_and_sends_all_parameters_over_its_own_link(ranks: int) -> None:
    """In opposite directions: what it receives of one variable may arrive while it sends another."""
    transfer = (ranks - 1) * BYTES / LINK
    plan = served((0,) * LAYERS, ranks)
    costs = Costs(straight=True)
    assert network_seconds(plan, costs) == pytest.approx(LAYERS * transfer)
    assert LAYERS * transfer <= seconds_of(plan, costs) <= (2 * LAYERS + 0.01) * transfer
    fits = {(kind, ranks): CollectiveFit(0.0, 0.0, (ranks - 1) / LINK) for kind in ("reduce", "broadcast")}
    assert seconds_of(plan, Costs(straight=True, collectives=fits)) == pytest.approx(seconds_of(plan, costs))


def test_servers_on_different_ranks_receive_at_the_same_time() -> None:
    """As many as are in flight; one server for all has to receive them one after another."""
    one, four = (seconds_of(served(owners, in_flight=4), Costs(straight=True)) for owners in ((0,) * 4, (0, 1, 2, 3)))
    transfer = 3 * BYTES / LINK
    assert one > LAYERS * transfer
    # Each rank's link carries a quarter of what one server's does.
    assert four < one / 2
    single = seconds_of(served((0, 1, 2, 3), in_flight=1), Costs(straight=True))
    assert single > four


def test_a_servers_slow_clients_keep_only_themselves_busy() -> None:
    """A root with a fast link takes gradients from a slow one as fast as that sends; a slow root receives them all."""
    fast, slow = 1e9, 1e8
    cluster = ClusterSpec.homogeneous(nodes=4, bandwidth=fast, latency=0.0)
    nodes = tuple(
        node.model_copy(update={"bandwidth": slow}) if i == 3 else node for i, node in enumerate(cluster.nodes)
    )
    unequal = cluster.model_copy(update={"nodes": nodes})
    plans = [
        lower(hand_made(1e-6), unequal, served((owner,) * LAYERS).strategy.model_copy(update={"cluster": ""}))
        for owner in (0, 3)
    ]
    near, far = (network_seconds(plan, Costs(straight=True)) for plan in plans)
    assert near == pytest.approx(LAYERS * BYTES / slow)
    assert far == pytest.approx(LAYERS * 3 * BYTES / slow)
    assert seconds_of(plans[0], Costs(straight=True)) < seconds_of(plans[1], Costs(straight=True))


def test_what_servers_leave_of_a_link_all_reduces_take() -> None:
    """An all-reduce takes both directions of every link, so that it can pass neither reduces nor broadcasts."""
    cluster = ClusterSpec.homogeneous(nodes=4, bandwidth=LINK, latency=0.0)
    shards = [Shard(synchronizer="parameter_server", placement=(0,)), Shard()]
    configs = {f"w{i}": VariableConfig(shards=(shards[i % 2],)) for i in range(LAYERS)}
    plan = lower(hand_made(1e-6), cluster, Strategy(variables=configs, schedule=Schedule(policy="priority")))
    costs = Costs(straight=True)
    least = LAYERS / 2 * (3 + 1.5) * BYTES / LINK
    assert network_seconds(plan, costs) == pytest.approx(least)
    assert seconds_of(plan, costs) >= least


@pytest.mark.parametrize("ranks", [2, 4])
def test_expanded_servers_that_are_reached_straight_take_about_as_long_as_closed_ones(ranks: int) -> None:
    plan = served((0,) * LAYERS, ranks)
    fits = {(kind, ranks): CollectiveFit(1e-4, 0.0, (ranks - 1) / LINK) for kind in ("reduce", "broadcast")}
    for costs in (Costs(straight=True), Costs(straight=True, collectives=fits)):
        assert seconds_of(plan, costs, expand=True) == pytest.approx(seconds_of(plan, costs), rel=0.15)


def test_costs_are_read_as_they_were_written() -> None:
    costs = Costs(collectives={("reduce", 2): CollectiveFit(1e-4, 2e-4, 1e-9)}, straight=True, gap_seconds=0.01)
    written = costs.to_dict()
    assert Costs.from_dict(written) == costs
    assert Costs.from_dict({key: value for key, value in written.items() if key != "straight"}).straight is False
    for wrong in (1, 0.0, None, "much"):
        with pytest.raises(OffbeatError, match="costs in a file: not a costs file: straight: "):
            Costs.from_dict(written | {"straight": wrong}, "costs in a file")


def test_a_servers_reduce_slows_computing_for_as_long_as_it_takes() -> None:
    plan = plan_of(0.5, ranks=2, synchronizer="parameter_server", placement=(0,))
    fits = {("reduce", 2): CollectiveFit(0.0, 0.0, 4e-7), ("broadcast", 2): CollectiveFit(0.0, 0.0, 0.0)}
    undisturbed, disturbed = (Costs(collectives=fits, straight=True, interference=slow) for slow in (0.0, 0.5))
    assert seconds_of(plan, disturbed) > seconds_of(plan, undisturbed)
    assert seconds_of(plan, disturbed) == pytest.approx(seconds_of(plan, replace(disturbed, straight=False)))
