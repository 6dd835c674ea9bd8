"""A recording keeps the plans that were in force, and replay follows them: four ranks in memory, the real engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import orjson
import pytest
import torch
from in_memory import distributed, fresh, run_ranks, train
from memory_job import MemoryWorld
from reference import graph_of

from offbeat.cli import main
from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.plan import Plan, lower
from offbeat.profile.lines import RankTrace
from offbeat.profile.measure import Profile, load_profile, profile_in_place
from offbeat.profile.plans import RecordedPlan, of_all_ranks
from offbeat.profile.recorder import MemoryRecorder
from offbeat.profile.traces import read_traces
from offbeat.profile.whatif import what_if
from offbeat.runtime.distribute import Runtime
from offbeat.runtime.retime import Retimer
from offbeat.strategy import Schedule, Shard, Slice, Strategy, VariableConfig, build_strategy

RANKS = 4
CLUSTER = ClusterSpec.homogeneous(nodes=2, devices_per_node=2)
FIFO = Schedule(policy="fifo", slice_bytes=1024)
Pieces = list[tuple[tuple[str, ...], int]]


def graph() -> ModelGraph:
    return graph_of("mlp", torch.float64, "sgd")


def record(
    folder: Path, strategy: Strategy, steps: int, between: Callable[[int, Runtime], None] = lambda step, runtime: None
) -> Path:
    """Writes the traces of a job in which `between` is called on every rank after each step."""

    def rank(world: MemoryWorld) -> list[dict[str, Any]]:
        model, optimizer = fresh(world, "mlp", "sgd")
        with distributed(world, model, optimizer, (graph(), CLUSTER, strategy)) as runtime:
            with MemoryRecorder(runtime) as recorder:
                for step in range(steps):
                    train(world, "mlp", model, optimizer, range(step, step + 1))
                    recorder.step()
                    between(step, runtime)
                runtime.engine.settle_all()
            assert runtime.engine.reports.observer is None
            return recorder.lines

    folder.mkdir(exist_ok=True)
    for number, lines in enumerate(run_ranks(RANKS, rank)):
        path = folder / f"rank{number}.jsonl"
        path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return folder


def pieces(plan: Plan) -> Pieces:
    """The issue order in words that do not depend on how messages are numbered."""
    return [(tuple(sorted(plan.messages[message].variables)), start) for message, start in plan.issue_order]


def recorded_pieces(trace: RankTrace, step: int) -> Pieces:
    plan = trace.steps[step].plan
    assert plan is not None
    names = [tuple(sorted({piece.variable for piece in message})) for message in plan.messages]
    return [(names[message], start) for message, start in plan.order]


def replayed_pieces(profile: Profile) -> Pieces:
    """The order in which slices leave in the replay of what was recorded."""
    # Spans keep their tasks' names here, by which they are found.
    with mock.patch("offbeat.profile.whatif.with_tensor_names", lambda timeline, _: timeline):
        predicted, _ = what_if(profile, ())
    spans = [s for s in predicted.spans if s.kind == "communication" and s.rank == 0 and s.step == 0]
    tasks = {task.name: task for task in profile.plan.tasks}
    sent = [tasks[span.name] for span in sorted(spans, key=lambda span: span.start)]
    return [(tuple(sorted(profile.plan.messages[task.message].variables)), task.start) for task in sent]


def test_replay_follows_an_order_that_was_rebuilt_during_the_run(tmp_path: Path) -> None:
    """The retimer rebuilds the order after the fourth step; here it believes that the last gradients come first."""
    strategy = Strategy(name="own", schedule=FIFO)
    planned = lower(graph(), CLUSTER, strategy)
    last_first = [0.1 * (len(planned.messages) - index) for index in range(len(planned.messages))]
    rebuilt = sorted(planned.issue_order, key=lambda piece: (-piece[0], piece[1]))
    with mock.patch.object(Retimer, "_agreed_ready", return_value=last_first):
        folder = record(tmp_path / "trace", strategy, 9)
    traces, _ = read_traces(folder)
    for trace in traces:
        # The first step is cut, because the model is found in its forward.
        assert [recorded_pieces(trace, step) for step in range(3)] == [pieces(planned)] * 3
        assert [recorded_pieces(trace, step) for step in range(3, 8)] == [pieces(planned.reordered(rebuilt))] * 5
    profile = load_profile(folder)
    assert profile.recorded is not None
    assert profile.strategy == strategy
    assert pieces(lower(profile.graph, profile.cluster, profile.strategy)) != pieces(profile.plan)
    assert pieces(profile.plan) == replayed_pieces(profile) == pieces(planned.reordered(rebuilt))
    # On other links it is the same plan; another strategy has an order of its own.
    assert pieces(profile.with_links(bandwidth=2.0).plan) == pieces(profile.plan)
    assert what_if(profile, ["strategy=wfbp"])[0].iteration_time > 0


@pytest.mark.parametrize("pinned", [False, True])
def test_an_explicit_order_is_rebuilt_as_a_new_plan_unless_it_is_pinned(tmp_path: Path, pinned: bool) -> None:
    names = [v.name for v in graph().gradient_order]
    configs = {name: VariableConfig(shards=(Shard(group=group),)) for group, name in enumerate(names)}
    order = tuple(Slice(group=g, start=0, stop=graph().variable(name).elements) for g, name in enumerate(names))
    strategy = Strategy(name="own", variables=configs, schedule=Schedule(policy="explicit", order=order, pinned=pinned))
    with mock.patch.object(Retimer, "_agreed_ready", return_value=[0.1] * len(names)):
        traces, _ = read_traces(record(tmp_path / "trace", strategy, 7))
    assert all(recorded_pieces(trace, 0) == [((name,), 0) for name in names] for trace in traces)
    uses = [v.name for v in graph().variables]
    rebuilt = names if pinned else uses
    assert names != uses
    assert all(recorded_pieces(trace, -1) == [((name,), 0) for name in rebuilt] for trace in traces)


def test_a_prediction_in_place_follows_the_rebuilt_order(tmp_path: Path) -> None:
    strategy = Strategy(name="own", schedule=FIFO)
    planned = lower(graph(), CLUSTER, strategy)
    backwards = planned.reordered(reversed(planned.issue_order))

    def rebuild(step: int, runtime: Runtime) -> None:
        if step == 0:
            runtime.engine.follow(runtime.plan.reordered(backwards.issue_order))

    folder = record(tmp_path, strategy, 4, rebuild)
    lines = [orjson.loads(line) for line in (folder / "rank0.jsonl").read_bytes().splitlines()]
    profile = profile_in_place([lines], None, RANKS, graph())
    assert pieces(profile.plan) == replayed_pieces(profile) == pieces(backwards)


@pytest.mark.parametrize(("before", "after", "followed"), [(4, 3, "second"), (7, 2, "first")])
def test_replay_follows_the_plan_of_most_steps_when_the_job_switched(
    before: int, after: int, followed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Besides the steps under the other plan, three steps of warm-up are left out."""
    first = Strategy(name="first", schedule=FIFO)
    servers = build_strategy("partitioned_ps", graph(), CLUSTER)
    second = servers.model_copy(update={"name": "second", "graph": "", "cluster": ""})

    def switch(step: int, runtime: Runtime) -> None:
        if step == before:
            runtime.switch(lower(graph(), CLUSTER, second, rank=runtime.plan.rank))

    folder = record(tmp_path / "trace", first, before + after + 1, switch)
    traces, _ = read_traces(folder)
    for trace in traces:
        names = [step.plan.strategy.name for step in trace.steps if step.plan is not None]
        assert names == ["first"] * before + ["second"] * after
    profile = load_profile(folder)
    steps, kept = before + after - 3, max(before - 3, after)
    assert profile.strategy == {"first": first, "second": second}[followed]
    assert profile.timeline.marks.shape[1] - 1 == kept
    assert f"{steps - kept} of {steps} steps followed another plan and are left out" in profile.timeline.notes
    assert pieces(profile.plan) == recorded_pieces(traces[0], 3 if followed == "first" else -1)
    assert main(["replay", str(folder)]) == 0
    assert "ms" in capsys.readouterr().out


def test_a_loop_that_needs_a_barrier_is_replayed_with_one(tmp_path: Path) -> None:
    """The strategy would have allowed deferred updates."""

    def clip(step: int, runtime: Runtime) -> None:
        if step == 0:
            runtime.engine.need_barrier("this test wants it")

    assert load_profile(record(tmp_path / "deferred", Strategy(), 5)).plan.mode == "deferred"
    assert load_profile(record(tmp_path / "barrier", Strategy(), 5, clip)).plan.mode == "barrier"


def test_a_switch_after_the_first_step_does_not_hide_a_step(tmp_path: Path) -> None:
    """The new engine counts its steps from zero."""

    def switch(step: int, runtime: Runtime) -> None:
        if step == 0:
            runtime.switch(lower(graph(), CLUSTER, Strategy(name="other"), rank=runtime.plan.rank))

    traces, _ = read_traces(record(tmp_path, Strategy(), 4, switch))
    assert [[len(step.passes) for step in trace.steps] for trace in traces] == [[1, 1, 1]] * RANKS


def test_slices_that_only_some_ranks_send_keep_their_places() -> None:
    """Behind transfer stations a rank sees its own node's slices only."""
    orders = (((0, 0), (2, 0)), ((0, 0), (1, 0), (2, 0)))
    assert of_all_ranks([RecordedPlan(Strategy(), (), order) for order in orders]).order == orders[1]


def test_a_recorded_order_fits_a_plan_without_an_unused_variable() -> None:
    """A variable that got no gradient while the job was recorded is missing in the measured graph."""
    config = VariableConfig(shards=(Shard(group=0),))
    together = dict.fromkeys(("layers.0.weight", "layers.0.bias"), config)
    plan = lower(graph(), CLUSTER, Strategy(variables=together, schedule=FIFO))
    order = tuple(reversed(plan.issue_order))
    recorded = RecordedPlan(plan.strategy, tuple(message.pieces for message in plan.messages), order)
    assert recorded.applied_to(plan).issue_order == order
    variables = (replace(v, gradient_from=None) if v.name == "layers.0.bias" else v for v in graph().variables)
    measured = lower(replace(graph(), variables=tuple(variables)), CLUSTER, plan.strategy)
    applied = recorded.applied_to(measured)

    def sent(plan: Plan) -> list[set[str]]:
        leaving = dict.fromkeys(message for message, _ in plan.issue_order)
        return [{*plan.messages[message].variables} - {"layers.0.bias"} for message in leaving]

    assert sent(applied) == sent(plan.reordered(order)) != sent(measured)
