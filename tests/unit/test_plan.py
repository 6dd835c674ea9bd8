"""Lowering: what every plan promises, and what each part of a strategy does to it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Layer, Weight, make_graph, random_graphs, random_strategies

from offbeat.cluster import ClusterSpec
from offbeat.errors import PlanError, StrategyError
from offbeat.plan import lower
from offbeat.plan.schedule import priority_order
from offbeat.strategy import Encoder, Schedule, Shard, Slice, Strategy, VariableConfig, build_strategy, builders

CLUSTERS = [
    ClusterSpec.homogeneous(nodes=1, devices_per_node=1),
    ClusterSpec.homogeneous(nodes=3, devices_per_node=1),
    ClusterSpec.homogeneous(nodes=2, devices_per_node=4),
    ClusterSpec.preset("B9"),
]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_strategies_lower_to_plans_that_pass_check(data):
    graph = data.draw(random_graphs())
    cluster = data.draw(st.sampled_from(CLUSTERS))
    strategy = data.draw(random_strategies(graph, cluster))
    plan = lower(graph, cluster, strategy)
    plan.check()
    carried = [name for message in plan.messages for name in message.variables]
    assert set(carried) == {variable.name for variable in graph.gradient_order}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_each_rank_derives_its_part_alone(data):
    graph = data.draw(random_graphs())
    cluster = data.draw(st.sampled_from(CLUSTERS))
    strategy = data.draw(random_strategies(graph, cluster))
    whole = lower(graph, cluster, strategy)
    for rank in whole.replicas:
        assert lower(graph, cluster, strategy, rank=rank) == whole.for_rank(rank)


@pytest.fixture
def graph():
    return make_graph(
        [
            Layer((Weight("a.weight", (64, 32)), Weight("a.bias", (64,)))),
            Layer((Weight("b.weight", (128, 64)), Weight("b.bias", (128,)))),
            Layer((Weight("c.weight", (10, 128)),)),
        ]
    )


@pytest.fixture
def cluster():
    return ClusterSpec.homogeneous(nodes=2, devices_per_node=2)


@pytest.mark.parametrize("name", builders())
def test_every_builder_lowers_for_every_rank(name, graph, cluster):
    strategy = build_strategy(name, graph, cluster)
    plan = lower(graph, cluster, strategy)
    assert all(lower(graph, cluster, strategy, rank=rank) == plan.for_rank(rank) for rank in range(4))


def test_fifo_sends_in_gradient_order_and_priority_prefers_what_forward_needs_first(graph, cluster):
    order = {}
    for policy in ("fifo", "priority"):
        strategy = Strategy(schedule=Schedule(policy=policy))
        # Slow compute makes all gradients wait behind the first, so that the policy decides.
        slow = cluster.replace(nodes=tuple(node.model_copy(update={"bandwidth": 1e3}) for node in cluster.nodes))
        plan = lower(graph, slow, strategy)
        order[policy] = [plan.messages[task.message].variables[0] for task in plan.communication]
    assert order["fifo"] == [variable.name for variable in graph.gradient_order]
    first = order["priority"][0]
    assert first == graph.gradient_order[0].name
    assert order["priority"][1:] == [v.name for v in graph.variables if v.name != first]


def test_slices_cover_large_messages_and_leave_small_ones_whole(graph, cluster):
    plan = lower(graph, cluster, Strategy(schedule=Schedule(slice_bytes=8192)))
    of_b = [task for task in plan.communication if plan.messages[task.message].variables == ("b.weight",)]
    assert [(task.start, task.stop) for task in of_b] == [(0, 2048), (2048, 4096), (4096, 6144), (6144, 8192)]
    assert sum(plan.messages[task.message].variables == ("a.bias",) for task in plan.communication) == 1


def test_explicit_order_is_followed_and_must_cover_every_message(graph, cluster):
    groups = {variable.name: index for index, variable in enumerate(graph.variables)}
    configs = {name: VariableConfig(shards=(Shard(group=group),)) for name, group in groups.items()}
    whole = [Slice(group=groups[v.name], start=0, stop=v.elements) for v in graph.variables]
    cut = [
        Slice(group=whole[0].group, start=0, stop=100),
        *whole[1:],
        Slice(group=whole[0].group, start=100, stop=2048),
    ]
    plan = lower(graph, cluster, Strategy(variables=configs, schedule=Schedule(policy="explicit", order=tuple(cut))))
    issued = [(plan.messages[t.message].group, t.start, t.stop) for t in plan.communication]
    assert issued == [(item.group, item.start, item.stop) for item in cut]
    short = Schedule(policy="explicit", order=tuple(cut[:-1]))
    with pytest.raises(StrategyError, match="do not cover them once"):
        lower(graph, cluster, Strategy(variables=configs, schedule=short))


def test_groups_split_only_where_messages_cannot_merge(graph, cluster):
    shard = Shard(group=1)
    encoded = Shard(group=1, encoder=Encoder(name="fp16"))
    configs = {
        "a.weight": VariableConfig(shards=(shard,)),
        "a.bias": VariableConfig(shards=(shard,)),
        "b.weight": VariableConfig(shards=(encoded,)),
    }
    plan = lower(graph, cluster, Strategy(variables=configs))
    merged = next(message for message in plan.messages if len(message.pieces) == 2)
    assert set(merged.variables) == {"a.weight", "a.bias"}
    half = next(message for message in plan.messages if message.encoder.name == "fp16")
    assert half.gradient_bytes == half.bytes // 2


def test_hierarchical_server_reduces_on_each_node_first(graph, cluster):
    shard = Shard(synchronizer="parameter_server", placement=(3,), stations=(0, 2))
    plan = lower(graph, cluster, Strategy(variables={"b.weight": VariableConfig(shards=(shard,))}))
    tasks = [task for task in plan.tasks if plan.messages[task.message].variables == ("b.weight",)]
    shown = [(task.kind, task.ranks, task.root) for task in tasks]
    assert shown == [
        ("reduce", (0, 1), 0),
        ("reduce", (2, 3), 3),
        ("reduce", (0, 3), 3),
        ("update", (3,), None),
        ("broadcast", (0, 3), 3),
        ("broadcast", (0, 1), 0),
        ("broadcast", (2, 3), 3),
    ]


def test_link_bytes_carry_the_ring_factor(graph, cluster):
    plan = lower(graph, cluster, Strategy())
    bytes_ = sum(variable.bytes for variable in graph.variables)
    assert plan.link_bytes == pytest.approx(bytes_ * 2 * 3 / 4)


def test_accumulation_repeats_compute_and_synchronises_once(graph, cluster):
    one = lower(graph, cluster, Strategy())
    four = lower(graph, cluster, Strategy(accumulation=4))
    assert len(four.segments) == 4 * len(one.segments)
    assert sum(s.flops for s in four.segments) == pytest.approx(sum(s.flops for s in one.segments))
    assert four.communication == one.communication
    assert all(not s.completes for s in four.segments if s.microbatch < 3)
    assert all(not s.reads for s in four.segments if s.microbatch > 0)


def test_passes_of_the_training_loop_are_whole_batches(graph, cluster):
    """The loop's own accumulation: each pass computes a batch, the updates of a step come once."""
    one = lower(graph, cluster, Strategy())
    six = lower(replace(graph, passes=3), cluster, Strategy(accumulation=2))
    assert six.communication == one.communication
    for phase, times in (("forward", 3), ("backward", 3), ("optimizer", 1)):
        flops = [sum(s.flops for s in plan.segments if s.phase == phase) for plan in (one, six)]
        assert flops[1] == pytest.approx(times * flops[0])
    assert {s.microbatch for s in six.segments if s.completes} == {5}
    assert {s.microbatch for s in six.segments if s.reads} == {0}


def test_recomputation_trades_activations_for_a_second_forward(graph, cluster):
    graph = replace(
        graph,
        operators=tuple(replace(op, activation_bytes=1000) if op.phase == "forward" else op for op in graph.operators),
    )
    kept = lower(graph, cluster, Strategy())
    again = lower(graph, cluster, Strategy(recompute=("layers.1",)))
    held = [sum(s.activation_bytes for s in plan.segments if s.phase == "forward") for plan in (kept, again)]
    assert held[1] < held[0]
    extra = [s for s in again.segments if s.recomputed]
    assert [s.name for s in extra] == ["recompute.layers.1"]
    position = again.segments.index(extra[0])
    assert "b.weight" in {name for s in again.segments[position:] for name in s.completes}


def test_fusion_delays_gradients_to_the_end_of_the_region(graph, cluster):
    apart = lower(graph, cluster, Strategy())
    fused = lower(graph, cluster, Strategy(fusion=(("layers.1", "layers.2"),)))
    assert len(fused.segments) < len(apart.segments)
    last = next(s for s in fused.segments if s.phase == "backward" and "c.weight" in s.completes)
    assert "b.weight" in last.completes


def test_check_catches_broken_plans(graph, cluster):
    plan = lower(graph, cluster, Strategy(schedule=Schedule(slice_bytes=8192)))
    tasks, messages = plan.tasks, plan.messages
    broken = {
        "does not cover it once|covers": replace(
            plan, tasks=tuple(replace(t, stop=4000) if t.stop == 4096 else t for t in tasks)
        ),
        "do not cover": replace(
            plan, messages=messages[:-1], tasks=tuple(t for t in tasks if t.message != len(messages) - 1)
        ),
        "of a task before it": replace(plan, tasks=(tasks[0], replace(tasks[1], index=tasks[0].index), *tasks[2:])),
        "not issued before": replace(plan, tasks=(replace(tasks[0], after=(5,)), *tasks[1:])),
        "hold no replica": replace(plan, tasks=(replace(tasks[0], ranks=(0, 9)), *tasks[1:])),
        "gradients of": replace(
            plan, tasks=tuple(replace(t, ranks=(0, 1)) if t.message == 0 and t.kind != "update" else t for t in tasks)
        ),
        "no segment completes": replace(plan, segments=()),
    }
    for sentence, bad in broken.items():
        with pytest.raises(PlanError, match=sentence):
            bad.check()


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        # The urgent job 2 comes while job 0 is on the link, and goes next unless more has been handed over.
        (None, [0, 2, 1, 3]),
        (1, [0, 2, 1, 3]),
        (20, [0, 1, 2, 3]),
        (30, [0, 1, 3, 2]),
    ],
)
def test_what_the_credit_has_handed_over_is_not_overtaken(credit: int | None, expected: list[int]) -> None:
    ready, urgency = [0.0, 0.0, 0.5, 0.1], [1.0, 2.0, 0.0, 3.0]
    assert priority_order(ready, [1.0] * 4, urgency, [-1] * 4, [10] * 4, credit) == expected


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 3), st.integers(0, 5)), min_size=1, max_size=12),
)
def test_priority_order_never_idles_while_a_job_is_ready_and_takes_the_most_urgent(jobs):
    ready, duration, urgency = (list(column) for column in zip(*jobs, strict=True))
    order = priority_order(ready, duration, urgency, [-1] * len(jobs))
    assert sorted(order) == list(range(len(jobs)))
    now = 0.0
    left = set(order)
    for job in order:
        open_jobs = [j for j in left if ready[j] <= now]
        if open_jobs:
            assert ready[job] <= now
            assert urgency[job] == min(urgency[j] for j in open_jobs)
        else:
            assert ready[job] == min(ready[j] for j in left)
        now = max(now, ready[job]) + duration[job]
        left.remove(job)
