"""The step as a value: what a program says of plans whose steps are known, and orders made from measured times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Layer, Weight, make_graph, random_graphs, random_strategies

from offbeat.cluster import ClusterSpec
from offbeat.errors import PlanError
from offbeat.plan import Plan, lower
from offbeat.plan.schedule import retimed
from offbeat.simulate import simulate
from offbeat.strategy import Schedule, Shard, Slice, Strategy, VariableConfig, build_strategy
from offbeat.timeline import KINDS

CLUSTER = ClusterSpec.homogeneous(nodes=2, devices_per_node=1, bandwidth="1Gbit/s", latency="50us", memory="16GiB")
GRAPH = make_graph([Layer((Weight(f"layers.{i}.weight", (size,)),)) for i, size in enumerate((10240, 2048, 4096))])
UNEVEN = ClusterSpec(nodes=[{"devices": 3}, {"devices": 1}, {"devices": 2}])
NAMES = [f"layers.{i}.weight" for i in range(3)]


def planned(schedule: Schedule | None = None, rank: int | None = None, **shards: Shard) -> Plan:
    configs = {name: VariableConfig(shards=(shards.get(f"v{number}", Shard()),)) for number, name in enumerate(NAMES)}
    return lower(GRAPH, CLUSTER, Strategy(variables=configs, schedule=schedule or Schedule(mode="deferred")), rank)


def test_gradients_leave_after_the_slot_that_completes_them_and_forward_waits_where_it_reads_them():
    program = planned().program
    assert [slot.phase for slot in program.slots] == ["forward"] * program.ahead + ["backward"] * 3
    for send in program.sends:
        assert program.slots[send.slot].segment == max(program.uses[name].completed for name in send.task.waits_for)
    # Backward completes the last layer first; forward needs the first layer first.
    assert [send.task.waits_for for send in program.sends] == [(name,) for name in reversed(NAMES)]
    read = [program.components[number].messages for number in program.settles]
    assert read == [(2,), (1,), (0,)]
    assert [program.components[number].slot for number in program.settles] == sorted(
        component.slot for component in program.components
    )
    assert program.replicated
    assert not program.tail


def test_a_barrier_leaves_everything_to_one_optimizer_call():
    program = planned(Schedule(mode="barrier", slice_bytes=4096)).program
    assert program.barrier
    assert program.whole == (0, 1, 2)
    assert not any(component.slices for component in program.components)


def test_slices_of_plain_all_reduces_are_applied_as_they_arrive():
    sliced = Schedule(mode="deferred", slice_bytes=4096)
    plain = planned(sliced).program
    assert [[task.start for task in component.slices] for component in plain.components] == [
        [0, 1024, 2048, 3072],
        [0, 1024],
        list(range(0, 10240, 1024)),
    ]
    stale = planned(sliced, v0=Shard(staleness=1)).program
    assert stale.components[2].slices == ()
    assert stale.components[2].staleness == 1
    other = lower(GRAPH.with_optimizer("LBFGS", 0), CLUSTER, planned(sliced).strategy).program
    assert not any(component.slices for component in other.components)


def test_slices_that_come_out_of_order_are_applied_at_once():
    plan = planned(Schedule(mode="deferred", slice_bytes=4096))
    assert plan.program.components[1].slices
    other = plan.reordered(sorted(plan.issue_order, key=lambda piece: (piece[0], -piece[1])))
    assert not any(component.slices for component in other.program.components)


def test_owners_apply_in_the_tail_what_no_replica_applies():
    program = planned(v1=Shard(synchronizer="parameter_server", placement=(1,))).program
    assert [(later.task.kind, later.regime) for later in program.tail] == [
        ("update", "synchronous"),
        ("broadcast", "synchronous"),
    ]
    assert [send.task.lane for send in program.sends] == ["up"] * 3
    assert program.tail[-1].task.lane == "back"
    assert program.components[1].applied == ()
    assert program.whole == (0, 2)
    assert not program.replicated


def test_stale_and_asynchronous_messages_keep_out_of_the_step_they_were_made_in():
    served = {"synchronizer": "parameter_server", "placement": (0,)}
    program = planned(v0=Shard(staleness=2), v1=Shard(asynchronous=True, **served)).program
    regimes = {send.task.message: send.regime for send in program.sends}
    assert regimes == {0: "synchronous", 1: "asynchronous", 2: "stale"}
    assert [task.message for task in program.order] == [0, 2]
    assert {task.message for task in program.tail_of("asynchronous")} == {1}
    assert program.tail_of("synchronous") == ()
    assert program.components[1].asynchronous
    assert program.whole == (0, 2)


def test_micro_batches_and_recomputation_lie_behind_the_first_forward():
    once = planned().program
    strategy = planned().strategy.model_copy(update={"accumulation": 2, "recompute": ("layers.1",)})
    program = lower(GRAPH, CLUSTER, strategy).program
    assert program.ahead == once.ahead
    assert len(program.slots) == 2 * (len(once.slots) + 1)
    assert {slot.phase for slot in program.slots[program.ahead :]} == {"forward", "backward"}
    assert min(send.slot for send in program.sends) > len(once.slots)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_task_of_any_plan_has_one_place_in_its_program(data):
    graph = data.draw(random_graphs())
    plan = lower(graph, CLUSTER, data.draw(random_strategies(graph, CLUSTER)))
    program = plan.program
    assert sorted(slot.segment for slot in program.slots) == list(range(len(plan.segments)))
    assert sorted(program.settles) == list(range(len(program.components)))
    assert sorted(m for component in program.components for m in component.messages) == list(range(len(plan.messages)))
    replicated = [t for t in plan.tasks if t.stage > 0 and plan.messages[t.message].replicated]
    placed = [send.task for send in program.sends] + [later.task for later in program.tail] + replicated
    assert sorted(task.index for task in placed) == sorted(task.index for task in plan.tasks)
    rank = plan.replicas[-1]
    assert plan.for_rank(rank).program == lower(graph, CLUSTER, plan.strategy, rank=rank).program


def test_a_retimed_order_is_a_new_plan_and_the_same_on_every_rank():
    plan = planned(Schedule(mode="deferred", policy="priority", slice_bytes=4096))
    use_order = {name: place for place, name in enumerate(NAMES)}
    # By the estimates the last layer is ready first; here all are ready at once, so the first layer's goes first.
    new = retimed(plan, [1.0, 1.0, 1.0], lambda size: 0.1, use_order)
    assert [message for message, _ in new.issue_order] == sorted((m for m, _ in plan.issue_order), reverse=True)
    assert sorted(task.index for task in new.tasks) == [task.index for task in plan.tasks]
    for rank in range(CLUSTER.world_size):
        mine = retimed(plan.for_rank(rank), [1.0, 1.0, 1.0], lambda size: 0.1, use_order)
        assert mine == new.for_rank(rank)
    late = retimed(plan, [0.0, 0.0, 9.0], lambda size: 0.1, use_order)
    assert late.issue_order[-10:] == tuple((2, start) for start in range(0, 10240, 1024))


def test_the_simulator_follows_a_plan_whose_order_was_changed():
    plan = planned(Schedule(mode="deferred", slice_bytes=4096))
    other = plan.reordered(reversed(plan.issue_order))
    for each in (plan, other):
        timeline = simulate(each, memory=False)
        sent = np.flatnonzero((timeline.kind == KINDS.index("communication")) & (timeline.rank == 0))
        last = [span for span in sent[np.argsort(timeline.start[sent])] if timeline.step[span] == 1]
        first_stage = [task.name for task in each.tasks if task.stage == 0]
        assert [timeline.names[timeline.name[span]] for span in last] == first_stage


def test_first_come_first_served_stays_so_when_retimed():
    plan = lower(GRAPH, CLUSTER, build_strategy("wfbp", GRAPH, CLUSTER))
    assert plan.strategy.schedule.policy == "fifo"
    new = retimed(plan, [0.3, 0.1, 0.2], lambda size: 1.0, {name: place for place, name in enumerate(NAMES)})
    assert new.issue_order == ((1, 0), (2, 0), (0, 0))


def test_an_explicit_order_is_retimed_with_its_own_slices():
    configs = {name: VariableConfig(shards=(Shard(group=place),)) for place, name in enumerate(NAMES)}
    elements = [GRAPH.variable(name).elements for name in NAMES]
    halves = [(group, *cut) for group, all_of in enumerate(elements) for cut in ((0, 16), (16, all_of))]
    order = tuple(Slice(group=group, start=start, stop=stop) for group, start, stop in reversed(halves))
    plan = lower(GRAPH, CLUSTER, Strategy(variables=configs, schedule=Schedule(policy="explicit", order=order)))
    use_order = {name: place for place, name in enumerate(NAMES)}
    place = {message.index: use_order[message.variables[0]] for message in plan.messages}

    def sent(each):
        return [(place[message], start) for message, start in each.issue_order]

    assert sent(plan) == [(group, start) for group, start, _ in reversed(halves)]
    together = retimed(plan, [1.0] * len(plan.messages), lambda size: 0.1, use_order)
    assert sent(together) == [(group, start) for group, start, _ in halves]
    assert {task.index for task in together.tasks} == {task.index for task in plan.tasks}
    late = retimed(plan, [9.0 if place[m] == 0 else 0.0 for m in sorted(place)], lambda size: 0.1, use_order)
    assert [group for group, _ in sent(late)][-2:] == [0, 0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_that_agree_on_the_times_agree_on_the_order(data):
    """Also where some ranks reduce among themselves first, and others take part in fewer collectives."""
    graph = data.draw(random_graphs())
    plan = lower(graph, UNEVEN, data.draw(random_strategies(graph, UNEVEN)))
    ready = np.random.default_rng(data.draw(st.integers(0, 99))).uniform(0, 1e-3, len(plan.messages)).tolist()
    numbers = (ready, lambda size: size * 1e-6, graph.variable_index)
    new = retimed(plan, *numbers)
    assert set(new.tasks) == set(plan.tasks)
    for rank in plan.replicas:
        assert retimed(plan.for_rank(rank), *numbers) == new.for_rank(rank)


def test_an_order_must_name_every_slice_once():
    plan = planned()
    with pytest.raises(PlanError, match="an order of 2 slices does not name each of the plan's 3 once"):
        plan.reordered(plan.issue_order[:2])
