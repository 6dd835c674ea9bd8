"""Where the time of a step goes, against a reference that looks at every moment."""

from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import OffbeatError
from offbeat.timeline import COMPUTE, NETWORK, Builder, Timeline
from offbeat.timeline.diagnosis import diagnose

FOUR = ("compute_seconds", "exposed_seconds", "waiting_seconds", "idle_seconds")


def job(compute_seconds: list[float], transfer_seconds: float = 0.030, steps: int = 3) -> Timeline:
    """Each rank computes, then all-reduces with the others, then updates for 5 ms; nothing overlaps."""
    builder, clock = Builder(), 0.0
    marks = [[0.0] for _ in compute_seconds]
    for step in range(steps):
        done = clock + max(compute_seconds) + transfer_seconds
        for rank, seconds in enumerate(compute_seconds):
            ready = clock + seconds
            builder.add(rank, "compute", "backward", "backward", clock, ready, step=step)
            builder.add(rank, "network", "communication", "grads", ready, done, step=step, bytes=1000, task=0)
            builder.add(rank, "compute", "wait", "grads", ready, done, step=step)
            builder.add(rank, "compute", "optimizer", "update", done, done + 0.005, step=step)
            marks[rank].append(done + 0.005)
        clock = done + 0.005
    return builder.build(np.array(marks))


def test_step_is_split_into_compute_exposed_waiting_and_idle():
    diagnosis = diagnose(job([0.060, 0.060, 0.100, 0.060]))
    fast, slow = diagnosis.ranks[0], diagnosis.ranks[2]
    assert [getattr(fast, field) for field in FOUR] == pytest.approx([0.065, 0.030, 0.040, 0.0])
    assert [getattr(slow, field) for field in FOUR] == pytest.approx([0.105, 0.030, 0.0, 0.0], abs=1e-9)
    assert diagnosis.step_seconds == pytest.approx(0.135)
    assert diagnosis.ideal_seconds == pytest.approx(0.105)
    assert diagnosis.mean("waiting_seconds") == pytest.approx(0.030)
    assert diagnosis.steps == 3
    assert diagnosis.communication_seen


def test_slow_rank_is_the_straggler():
    straggler = diagnose(job([0.060, 0.060, 0.100, 0.060])).straggler
    assert straggler is not None
    assert (straggler.rank, straggler.reason) == (2, "compute")
    assert straggler.seconds == pytest.approx(0.040)


def test_equal_ranks_have_no_straggler():
    assert diagnose(job([0.060, 0.0605, 0.060])).straggler is None
    assert diagnose(job([0.060])).straggler is None


def test_rank_that_is_late_without_computing_is_the_straggler():
    builder = Builder()
    for rank, late in enumerate((0.0, 0.050, 0.0)):
        builder.add(rank, "compute", "forward", "forward", late, late + 0.020, step=0)
        builder.add(rank, "network", "communication", "grads", late + 0.020, 0.100, step=0, task=0)
    diagnosis = diagnose(builder.build(np.array([[0.0, 0.1]] * 3)))
    assert diagnosis.straggler is not None
    assert (diagnosis.straggler.rank, diagnosis.straggler.reason) == (1, "lateness")
    assert diagnosis.straggler.seconds == pytest.approx(0.050)
    assert diagnosis.ranks[1].blamed_seconds == pytest.approx(0.050)
    assert diagnosis.ranks[1].idle_seconds == pytest.approx(0.050)


def test_hidden_communication_is_overlap_and_not_exposed():
    builder = Builder()
    builder.add(0, "compute", "backward", "backward", 0.0, 0.080, step=0)
    builder.add(0, "network", "communication", "early", 0.010, 0.070, step=0, task=0)
    builder.add(0, "network", "communication", "last", 0.070, 0.100, step=0, bytes=64, task=1)
    diagnosis = diagnose(builder.build(np.array([[0.0, 0.110]])))
    rank = diagnosis.ranks[0]
    assert rank.overlap_seconds == pytest.approx(0.070)
    assert rank.network_seconds == pytest.approx(0.090)
    assert [getattr(rank, field) for field in FOUR] == pytest.approx([0.080, 0.020, 0.0, 0.010], abs=1e-9)
    assert diagnosis.ideal_seconds == pytest.approx(0.090)
    assert [(blame.name, blame.bytes) for blame in diagnosis.blame] == [("last", 64)]
    assert diagnosis.blame[0].exposed_seconds == pytest.approx(0.020)


def test_collectives_under_way_together_share_the_blame():
    builder = Builder()
    builder.add(0, "network", "communication", "long", 0.0, 0.030, task=0)
    builder.add(0, "network", "communication", "short", 0.010, 0.020, task=1)
    diagnosis = diagnose(builder.build(np.array([[0.0, 0.030]])), most_blamed=1)
    assert [(b.name, b.exposed_seconds) for b in diagnosis.blame] == [("long", pytest.approx(0.025))]


def test_wait_inside_a_compute_span_is_not_compute():
    builder = Builder()
    builder.add(0, "compute", "forward", "block", 0.0, 0.100)
    builder.add(0, "compute", "wait", "weight", 0.020, 0.050)
    builder.add(0, "network", "communication", "weight", 0.010, 0.050, task=0)
    rank = diagnose(builder.build(np.array([[0.0, 0.100]]))).ranks[0]
    assert [getattr(rank, field) for field in FOUR] == pytest.approx([0.070, 0.030, 0.0, 0.0], abs=1e-9)


def test_wait_on_one_track_does_not_stop_another():
    builder = Builder()
    builder.add(0, "compute", "wait", "weight", 0.0, 0.100)
    builder.add(0, "side", "forward", "block", 0.0, 0.060)
    rank = diagnose(builder.build(np.array([[0.0, 0.100]]))).ranks[0]
    assert rank.compute_seconds == pytest.approx(0.060)
    assert rank.idle_seconds == pytest.approx(0.040)


def test_ranks_without_communication_spans_are_not_called_free_of_communication():
    timeline = job([0.060, 0.100])
    silent = timeline.select(timeline.track == 0)
    diagnosis = diagnose(silent)
    assert not diagnosis.communication_seen
    assert diagnosis.ideal_seconds is None
    assert any("communication is unknown, not zero" in note for note in diagnosis.notes)
    assert "NOT RECORDED" in diagnosis.text()
    partly = diagnose(timeline.select((timeline.track == 0) | (timeline.rank == 1)))
    assert partly.communication_seen
    assert any("no communication span was recorded on rank 0" in note for note in partly.notes)


def test_one_rank_without_communication_is_complete():
    timeline = job([0.060])
    diagnosis = diagnose(timeline.select(timeline.track == 0))
    assert not diagnosis.communication_seen
    assert diagnosis.ideal_seconds == pytest.approx(0.065)
    assert diagnosis.notes == ()


def test_collectives_without_number_are_noted():
    timeline = job([0.060, 0.100], steps=1)
    diagnosis = diagnose(replace(timeline, task=np.full(len(timeline), -1, "i4")))
    assert any("2 communication spans have no task number" in note for note in diagnosis.notes)
    assert diagnosis.ranks[0].waiting_seconds == 0
    assert diagnosis.ranks[0].exposed_seconds == pytest.approx(0.070)


def test_marks_belong_to_the_ranks_that_have_spans():
    timeline = job([0.060, 0.100])
    moved = replace(timeline, rank=np.where(timeline.rank == 1, 7, 3).astype("i4"))
    diagnosis = diagnose(moved)
    assert [rank.rank for rank in diagnosis.ranks] == [3, 7]
    assert diagnosis.straggler is not None
    assert diagnosis.straggler.rank == 7
    # The path ends on rank 3, the first of two that end together.
    assert diagnosis.critical_by_rank == {3: pytest.approx(5 / 135), 7: pytest.approx(130 / 135)}


def test_rank_without_marks_is_left_out_with_a_note():
    timeline = job([0.060, 0.100, 0.060])
    diagnosis = diagnose(replace(timeline, marks=timeline.marks[:2]))
    assert [rank.rank for rank in diagnosis.ranks] == [0, 1]
    assert any("rank 2 left out" in note for note in diagnosis.notes)


def test_critical_shares_add_up():
    diagnosis = diagnose(job([0.060, 0.100]))
    assert diagnosis.critical_by_kind == {
        "backward": pytest.approx(100 / 135),
        "communication": pytest.approx(30 / 135),
        "optimizer": pytest.approx(5 / 135),
    }
    assert sum(diagnosis.critical_by_rank.values()) == pytest.approx(1)


def test_without_marks_there_is_nothing_to_diagnose():
    timeline = job([0.060])
    for marks in (np.empty((0, 0)), timeline.marks[:, :1]):
        with pytest.raises(OffbeatError, match="no step marks"):
            diagnose(replace(timeline, marks=marks))
    with pytest.raises(OffbeatError, match="a step ends before it begins"):
        diagnose(replace(timeline, marks=timeline.marks[:, ::-1]))


def test_step_whose_earlier_communication_is_missing_is_left_out():
    builder = Builder()
    for step in range(3):
        builder.add(0, "compute", "backward", "backward", step * 0.1, step * 0.1 + 0.060, step=step)
        start = step * 0.1 + 0.060
        builder.add(0, "network", "communication", "grads", start, start + 0.100, step=step, bytes=64, task=0)
    timeline = builder.build(np.array([[0.0, 0.1, 0.2, 0.3]]))
    diagnosis = diagnose(timeline)
    assert diagnosis.steps == 3, "the median is over all steps, as everywhere else"
    assert diagnosis.ranks[0].network_seconds == pytest.approx(0.100)
    assert diagnosis.blame[0].bytes == 64
    assert any("the first step is left out" in note for note in diagnosis.notes)
    single = diagnose(replace(timeline, marks=timeline.marks[:, 2:]))
    assert single.steps == 1
    assert any("is not recorded" in note for note in single.notes)


def test_in_a_prediction_ranks_wait_for_a_straggler_and_are_not_idle():
    """The participants of a replayed collective start together: the others were ready before."""
    builder = Builder()
    for rank, ready in enumerate((1.0, 2.0)):
        builder.add(rank, "compute", "backward", "backward", 0.0, ready, step=0)
        builder.add(rank, "network", "communication", "grads", 2.0, 3.0, step=0, queued=ready, bytes=64, task=0)
    diagnosis = diagnose(replace(builder.build(np.array([[0.0, 3.0], [0.0, 3.0]])), source="predicted"))
    first, late = diagnosis.ranks
    assert (first.waiting_seconds, first.idle_seconds, first.exposed_seconds) == (1.0, 0.0, 1.0)
    assert (late.waiting_seconds, late.blamed_seconds, first.blamed_seconds) == (0.0, 1.0, 0.0)
    assert diagnosis.ideal_seconds == 2.0
    assert diagnosis.idle_by_reason == {}
    assert diagnosis.blame[0].waiting_seconds == 0.5


def test_timeline_with_marks_but_no_spans_is_idle():
    diagnosis = diagnose(Timeline(marks=np.array([[0.0, 1.0]])))
    assert diagnosis.ranks[0].idle_seconds == 1.0
    assert diagnosis.critical_by_kind == {}


def test_text_names_what_matters():
    text = diagnose(job([0.060, 0.060, 0.100])).text()
    assert "measured step of 135 ms on 3 ranks, median of 3 steps" in text
    assert "bound, with compute and network fully overlapped: 105 ms; the step takes 1.29× that" in text
    assert "straggler: rank 2 computes 40 ms longer than the others" in text
    assert "grads (1000 B): 30 ms exposed, 26.67 ms waiting" in text
    assert "critical path: backward 74%, communication 22%, optimizer 4%" in text
    many = diagnose(job([0.060] * 40)).text()
    assert "and 24 ranks with less compute" in many
    assert "straggler: none" in many


def test_plain_form_is_json():
    diagnosis = diagnose(job([0.060, 0.100]))
    content = orjson.loads(orjson.dumps(diagnosis.to_dict()))
    assert content["straggler"] == {"rank": 1, "seconds": pytest.approx(0.040), "reason": "compute"}
    assert content["ranks"][0]["waiting_seconds"] == pytest.approx(0.040)
    assert content["critical_by_rank"]["1"] > 0.9


CELLS = 24


@st.composite
def grids(draw):
    """Spans and marks at whole seconds."""
    builder = Builder()
    ranks = draw(st.integers(1, 3))
    for _ in range(draw(st.integers(0, 25))):
        start = draw(st.integers(0, CELLS - 1))
        kind = draw(st.sampled_from(["forward", "backward", "communication", "communication", "wait"]))
        builder.add(
            draw(st.integers(0, ranks - 1)),
            draw(st.sampled_from(["compute", "network"])),
            kind,
            draw(st.sampled_from(["a", "b", "c"])),
            float(start),
            float(draw(st.integers(start, CELLS))),
            step=draw(st.integers(0, 1)),
            task=draw(st.integers(-1, 2)),
        )
    cuts = st.lists(st.integers(0, CELLS), min_size=3, max_size=3).map(sorted)
    marks = [draw(cuts) for _ in range(ranks)]
    return builder.build(np.array(marks, "f8"))


def reference(timeline: Timeline, rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """Looks at each second of each step on its own: seconds of each sort, and exposed seconds by name."""
    spans = list(timeline.spans)
    sums = dict.fromkeys((*FOUR, "overlap_seconds"), 0.0)
    blame = dict.fromkeys(timeline.names, 0.0)
    row = timeline.marked_ranks.index(rank)
    for cell in range(int(timeline.marks[row, 0]), int(timeline.marks[row, -1])):
        now = [s for s in spans if s.rank == rank and s.start <= cell < s.end]
        stopped = {s.track for s in now if s.kind == "wait"}
        computing = any(s.kind in ("forward", "backward") and s.track not in stopped for s in now)
        running, waiting = [], []
        for span in (s for s in now if s.kind == "communication"):
            started = [span.start]
            if span.task >= 0:
                started += [
                    s.start
                    for s in spans
                    if s.kind == "communication" and (s.step, s.task) == (span.step, span.task) and s.start < span.end
                ]
            (running if cell >= max(started) else waiting).append(span)
        if computing:
            sums["compute_seconds"] += 1
            sums["overlap_seconds"] += bool(running)
        elif running:
            sums["exposed_seconds"] += 1
            for span in running:
                blame[span.name] += 1 / len(running)
        else:
            sums["waiting_seconds" if waiting else "idle_seconds"] += 1
    return sums, blame


@settings(deadline=None, max_examples=100)
@given(grids())
def test_diagnosis_agrees_with_looking_at_every_second(timeline):
    diagnosis = diagnose(timeline)
    counted = diagnosis.steps - any("the first step is left out" in note for note in diagnosis.notes)
    timeline = replace(timeline, marks=timeline.marks[:, -1 - counted :])
    mean = np.diff(timeline.marks, axis=1).mean()
    # All times are in proportion to the median step.
    steps = counted * (mean / diagnosis.step_seconds if mean and diagnosis.step_seconds else 1.0)
    if mean and not diagnosis.step_seconds:
        return
    exposed = dict.fromkeys(timeline.names, 0.0)
    for row, rank in enumerate(diagnosis.ranks):
        sums, blame = reference(timeline, rank.rank)
        for field, seconds in sums.items():
            assert getattr(rank, field) * steps == pytest.approx(seconds, abs=1e-9), field
        assert sum(getattr(rank, field) for field in FOUR) == pytest.approx(rank.step_seconds, abs=1e-9)
        assert rank.step_seconds * steps == pytest.approx(timeline.marks[row, -1] - timeline.marks[row, 0], abs=1e-9)
        for name, seconds in blame.items():
            exposed[name] += seconds / (steps * len(diagnosis.ranks))
    found = {blame.name: blame.exposed_seconds for blame in diagnosis.blame}
    for name, seconds in exposed.items():
        assert found.get(name, 0.0) == pytest.approx(seconds, abs=1e-9)


def test_idle_time_has_a_reason():
    builder = Builder()
    for start, end in ((0.2, 0.3), (0.35, 0.5)):
        builder.add(0, COMPUTE, "forward", "a", start, end)
    builder.add(0, NETWORK, "communication", "all_reduce", 0.6, 0.8, task=0)
    diagnosis = diagnose(builder.build(marks=np.array([[0.0, 1.0]])))
    assert diagnosis.idle_by_reason == pytest.approx({"steps": 0.4, "collectives": 0.1, "operators": 0.05})
    assert sum(diagnosis.idle_by_reason.values()) == pytest.approx(diagnosis.mean("idle_seconds"))
    assert "idle 400 ms between steps: data loading" in diagnosis.text()


def test_the_step_is_the_median_and_its_parts_add_up_to_it():
    builder = Builder()
    for step, start in enumerate((0.0, 1.0, 2.0)):
        builder.add(0, COMPUTE, "forward", "a", start, start + 0.5, step=step)
    timeline = builder.build(marks=np.array([[0.0, 1.0, 2.0, 6.0]]))
    diagnosis = diagnose(timeline)
    assert diagnosis.step_seconds == timeline.iteration_time == 1.0
    assert diagnosis.ranks[0].compute_seconds + diagnosis.ranks[0].idle_seconds == pytest.approx(1.0)
