"""Timelines on disk, and the critical path found in their times."""

import gzip
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import OffbeatError
from offbeat.timeline import KINDS, Builder, Timeline
from offbeat.timeline.critical import critical_positions, last_to_start

MS = 1e-3


def two_ranks() -> Timeline:
    """Rank 1 computes longer, so rank 0 waits in the all-reduce; two collectives are under way at once."""
    builder = Builder()
    builder.add(0, "compute", "forward", "fc.forward", 0.0, 0.010, step=0)
    builder.add(0, "compute", "backward", "fc.backward", 0.010, 0.020, step=0)
    builder.add(1, "compute", "forward", "fc.forward", 0.0, 0.010, step=0)
    builder.add(1, "compute", "backward", "fc.backward", 0.010, 0.050, step=0)
    for rank, start in ((0, 0.020), (1, 0.050)):
        builder.add(
            rank, "network", "communication", "fc.weight", start, 0.060, step=0, queued=start, bytes=4096, task=0
        )
        builder.add(rank, "network", "communication", "fc.bias", start + 0.001, 0.061, step=0, bytes=64, task=1)
        builder.add(rank, "compute", "wait", "fc.weight", start, 0.061, step=0)
        builder.add(rank, "compute", "optimizer", "update", 0.061, 0.065, step=0)
    marks = np.array([[0.0, 0.065], [0.0, 0.065]])
    return builder.build(marks, notes=("rank 2 sent nothing",))


def same(one: Timeline, other: Timeline) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one.spans, other.spans, strict=True):
        for field in ("rank", "track", "kind", "name", "step", "bytes", "task"):
            assert getattr(mine, field) == getattr(theirs, field)
        assert theirs.start == pytest.approx(mine.start, abs=1e-9)
        assert theirs.end == pytest.approx(mine.end, abs=1e-9)
        assert (mine.queued is None) == (theirs.queued is None)
        assert mine.queued is None or theirs.queued == pytest.approx(mine.queued, abs=1e-9)
    np.testing.assert_allclose(one.marks, other.marks, atol=1e-9)
    assert one.marks.shape == other.marks.shape
    for field in ("tracks", "peak_memory", "source", "notes"):
        assert getattr(one, field) == getattr(other, field)
    assert (one.critical is None) == (other.critical is None)
    assert one.critical is None or one.critical.tolist() == other.critical.tolist()


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_saved_timeline_is_loaded_as_it_was(tmp_path, name):
    timeline = replace(two_ranks(), critical=np.array([2, 3, 9]), peak_memory=(2**40, 7), source="predicted")
    timeline.save(tmp_path / name)
    same(timeline, Timeline.load(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b" if name.endswith("gz") else b"{")


def test_empty_timeline_survives_the_disk(tmp_path):
    Timeline().save(tmp_path / "t.json")
    loaded = Timeline.load(tmp_path / "t.json")
    assert len(loaded) == 0
    assert loaded.marks.size == 0


@st.composite
def timelines(draw):
    time = st.floats(0, 1e5)
    builder = Builder()
    for _ in range(draw(st.integers(0, 12))):
        start = draw(time)
        builder.add(
            draw(st.integers(0, 3)),
            draw(st.sampled_from(["compute", "network", "copy engine"])),
            draw(st.sampled_from(KINDS)),
            draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=8)),
            start,
            start + draw(st.floats(0, 1e5)),
            step=draw(st.integers(-1, 2**31 - 1)),
            queued=draw(st.one_of(time, st.just(math.nan))),
            bytes=draw(st.integers(0, 2**63 - 1)),
            task=draw(st.integers(-1, 2**31 - 1)),
        )
    marks = draw(st.lists(st.lists(time, min_size=3, max_size=3), max_size=3))
    return builder.build(np.array(marks) if marks else None)


@settings(deadline=None, max_examples=60)
@given(timelines())
def test_any_timeline_survives_the_disk(tmp_path_factory, timeline):
    path = tmp_path_factory.mktemp("trace") / "t.json"
    timeline.save(path)
    loaded = Timeline.load(path)
    same(timeline, loaded)
    first = path.read_bytes()
    loaded.save(path)
    assert path.read_bytes() == first


def test_chrome_events_say_what_viewers_need(tmp_path):
    two_ranks().save(tmp_path / "t.json")
    trace = orjson.loads((tmp_path / "t.json").read_bytes())
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert set(names.values()) == {"compute", "network", "network (2)"}
    sent = next(e for e in events if e["ph"] == "X" and e["name"] == "fc.weight" and e["cat"] == "communication")
    assert (sent["ts"], sent["dur"]) == (20000, 40000)
    assert sent["args"] == {"kind": "communication", "step": 0, "bytes": 4096, "task": 0, "queued": 20000}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 15)), max_size=40))
def test_events_of_a_thread_are_nested_or_disjoint(tmp_path_factory, spans):
    builder = Builder()
    for start, length in spans:
        builder.add(0, "network", "communication", "t", start * MS, (start + length) * MS)
    path = tmp_path_factory.mktemp("trace") / "t.json"
    builder.build().save(path)
    events = [e for e in orjson.loads(path.read_bytes())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(spans)
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        by_thread.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for intervals in by_thread.values():
        for a, b in intervals:
            for c, d in intervals:
                assert not a < c < b < d


def test_more_overlap_than_lanes_is_still_written_and_read(tmp_path):
    builder = Builder()
    for number in range(100):
        builder.add(0, "network", "communication", f"t{number}", number * MS, 1 + number * MS)
    builder.build().save(tmp_path / "t.json")
    same(builder.build(), Timeline.load(tmp_path / "t.json"))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("start", math.nan, "start: nan"),
        ("end", math.inf, "end: inf"),
        ("end", -1.0, "ends before it starts"),
        ("name", 99, "name: the column must hold"),
        ("bytes", -5, "bytes: the column must hold"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path, column, value, message):
    timeline = two_ranks()
    getattr(timeline, column)[0] = value
    with pytest.raises(OffbeatError, match=message):
        timeline.save(tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_name_that_is_no_text_leaves_the_old_file(tmp_path):
    two_ranks().save(tmp_path / "t.json")
    builder = Builder()
    builder.add(0, "compute", "forward", "\ud800", 0.0, 1.0)
    with pytest.raises(OffbeatError, match="cannot be written as JSON"):
        builder.build().save(tmp_path / "t.json")
    assert len(Timeline.load(tmp_path / "t.json")) == len(two_ranks())


def _first(trace):
    return next(event for event in trace["traceEvents"] if event["ph"] == "X")


def _set(field, value):
    def change(trace):
        *path, last = field.split(".")
        target = _first(trace) if path[:1] != ["offbeat"] and field not in trace else trace
        for key in path:
            target = target[key]
        target[last] = value

    return change


def _drop(field):
    def change(trace):
        *path, last = field.split(".")
        target = trace if field in trace else _first(trace)
        for key in path:
            target = target[key]
        del target[last]

    return change


SPOILED = [
    (_set("dur", -1), r"traceEvents\[\d+\]\.dur: .*greater than or equal to 0, got -1"),
    (_set("dur", "3"), r"traceEvents\[\d+\]\.dur: .*valid number, got '3'"),
    (_set("dur", True), r"\.dur: .*valid number, got True"),
    (_set("dur", None), r"\.dur: .*valid number, got None"),
    (_set("ts", 1e300), r"\.ts: .*less than or equal to"),
    (_set("name", 5), r"\.name: .*valid string, got 5"),
    (_set("pid", 1.5), r"\.pid: .*valid integer, got 1\.5"),
    (_set("pid", 2**40), r"\.pid: .*less than"),
    (_set("tid", -1), r"\.tid: .*greater than or equal to 0"),
    (_set("tid", 2**63), r"\.tid: .*less than"),
    (_set("args", []), r"\.args: it must be a mapping"),
    (_set("args.kind", "sleep"), r"\.args\.kind: .*'forward', .* got 'sleep'"),
    (_set("args.bytes", 2**64 - 1), r"\.args\.bytes: .*less than"),
    (_set("args.queued", "soon"), r"\.args\.queued: .*valid number, got 'soon'"),
    (_drop("dur"), r"traceEvents\[\d+\]\.dur: it is required but not given"),
    (_drop("args.step"), r"\.args\.step: it is required but not given"),
    (_drop("offbeat"), "offbeat: it is required but not given"),
    (_drop("traceEvents"), "no field 'traceEvents'"),
    (_set("traceEvents", {}), "'traceEvents' is not a list"),
    (_set("offbeat", 3), "offbeat"),
    (_set("offbeat.marks", [[0.0, 1.0], [0.0]]), "offbeat.marks: every rank must have equally many"),
    (_set("offbeat.marks", [["0"]]), r"offbeat\.marks\[0\]\[0\]: .* got '0'"),
    (_set("offbeat.critical", [10**6]), "offbeat.critical: no span 1000000"),
    (_set("offbeat.tracks", []), r"tid|offbeat\.tracks"),
    (_set("offbeat.format", 2), "offbeat.format: .* got 2"),
    (_set("offbeat.source", "guessed"), "offbeat.source: .* got 'guessed'"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_spoiled_trace_is_refused_by_file_and_field(tmp_path, spoil, message):
    path = tmp_path / "t.json"
    two_ranks().save(path)
    trace = orjson.loads(path.read_bytes())
    spoil(trace)
    path.write_bytes(orjson.dumps(trace))
    with pytest.raises(OffbeatError, match=message) as caught:
        Timeline.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"\xff\xfe", "not JSON"),
        (b'{"traceEvents": [', "cut off"),
        (b'{"traceEvents": NaN}', "not a list"),
        (b"[" * 100_000, "nested deeper"),
        (b"[1, 2]", "offbeat: it is required"),
        (gzip.compress(b"", mtime=0), "it is empty"),
        (gzip.compress(b"{}" * 999, mtime=0)[:-9], "damaged or cut off"),
        (b"\x1f\x8b" + bytes(40), "damaged or cut off"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, message):
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    with pytest.raises(OffbeatError, match=message) as caught:
        Timeline.load(path)
    assert str(path) in str(caught.value)


def test_gzip_bomb_is_refused(tmp_path):
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b" " * (80 * 2**20), compresslevel=9))
    assert path.stat().st_size < 2**17
    with pytest.raises(OffbeatError, match="unpacks to more than 400 times"):
        Timeline.load(path)


def test_missing_file_and_folder_are_one_sentence(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(OffbeatError, match="cannot read the trace"):
            Timeline.load(path)


def path_of(timeline: Timeline, **options) -> list[tuple[int, str]]:
    found = critical_positions(timeline, **options)
    return [(timeline[int(position)].rank, timeline[int(position)].name) for position in found]


def test_late_rank_is_on_the_critical_path():
    # The two ranks end together; the path runs through rank 1, which the collective waited for.
    assert path_of(two_ranks()) == [
        (1, "fc.forward"),
        (1, "fc.backward"),
        (1, "fc.bias"),
        (0, "update"),
    ]


def test_queue_of_collectives_is_on_the_critical_path():
    builder = Builder()
    builder.add(0, "compute", "backward", "b1", 0.0, 0.010)
    builder.add(0, "compute", "backward", "b2", 0.010, 0.020)
    builder.add(0, "network", "communication", "c1", 0.010, 0.050, queued=0.010, task=0)
    builder.add(0, "network", "communication", "c2", 0.050, 0.060, queued=0.020, task=1)
    builder.add(0, "compute", "optimizer", "update", 0.060, 0.061)
    timeline = builder.build(np.array([[0.0, 0.061]]))
    assert [name for _, name in path_of(timeline)] == ["b1", "c1", "c2", "update"]


def test_hidden_communication_is_not_on_the_critical_path():
    builder = Builder()
    builder.add(0, "compute", "backward", "b1", 0.0, 0.010)
    builder.add(0, "compute", "backward", "b2", 0.010, 0.040)
    builder.add(0, "network", "communication", "c1", 0.010, 0.0400001, task=0)
    builder.add(0, "compute", "optimizer", "update", 0.0400002, 0.050)
    timeline = builder.build(np.array([[0.0, 0.050]]))
    assert [name for _, name in path_of(timeline)] == ["b1", "b2", "update"]


def test_clock_noise_does_not_break_the_chain():
    builder = Builder()
    noise = 4e-6
    builder.add(0, "compute", "backward", "b", 0.0, 0.020)
    builder.add(0, "network", "communication", "c", 0.020 - noise, 0.050 + noise, task=0)
    builder.add(0, "compute", "optimizer", "update", 0.050, 0.060)
    timeline = builder.build(np.array([[0.0, 0.060]]))
    assert [name for _, name in path_of(timeline)] == ["b", "c", "update"]
    assert [name for _, name in path_of(timeline, tolerance_seconds=0.0)] != ["b", "c", "update"]


def test_the_path_is_that_of_the_last_step():
    builder = Builder()
    for step in range(3):
        builder.add(0, "compute", "forward", f"f{step}", step * 1.0, step + 1.0, step=step)
    timeline = builder.build(np.array([[0.0, 1.0, 2.0, 3.0]]))
    assert path_of(timeline) == [(0, "f2")]


def test_without_marks_the_whole_timeline_is_one_step():
    timeline = replace(two_ranks(), marks=np.empty((0, 0)))
    assert path_of(timeline)[0] == (1, "fc.forward")
    assert critical_positions(Timeline()).tolist() == []


def test_replayed_path_is_taken_as_it_is():
    timeline = replace(two_ranks(), critical=np.array([0, 1]))
    assert [span.name for span in timeline.critical_path()] == ["fc.forward", "fc.backward"]


def test_participant_that_starts_after_the_end_is_not_to_blame():
    builder = Builder()
    builder.add(0, "network", "communication", "push", 0.0, 1.0, step=0, task=0)
    builder.add(1, "network", "communication", "push", 2.0, 3.0, step=0, task=0)
    builder.add(2, "network", "communication", "push", 0.5, 2.5, step=0, task=0)
    builder.add(2, "network", "communication", "push", 0.7, 2.5, step=1, task=0)
    assert last_to_start(builder.build()).tolist() == [2, 1, 1, 3]


@st.composite
def crowded(draw):
    """Spans on a coarse grid of times, so that ties, nesting and spans without length abound."""
    builder = Builder()
    for _ in range(draw(st.integers(1, 40))):
        start, rank = draw(st.integers(0, 12)), draw(st.integers(0, 2))
        kind = draw(st.sampled_from(["forward", "backward", "communication", "wait"]))
        builder.add(
            rank,
            draw(st.sampled_from(["compute", "network"])),
            kind,
            kind,
            float(start),
            float(start + draw(st.integers(0, 4))),
            step=0,
            task=draw(st.integers(-1, 3)) if kind == "communication" else -1,
            queued=float(draw(st.integers(0, start))) if draw(st.booleans()) else math.nan,
        )
    return builder.build(np.array([[0.0, 16.0]] * 3))


@settings(deadline=None, max_examples=100)
@given(crowded(), st.sampled_from([0.0, 0.5, 1.0, 100.0]))
def test_path_ends_and_goes_forward_in_time(timeline, tolerance):
    path = critical_positions(timeline, tolerance_seconds=tolerance)
    assert (np.diff(timeline.start[path]) >= 0).all()
    assert len(set(path.tolist())) == len(path)
    assert "wait" not in {timeline[int(position)].kind for position in path}
    assert len(path) or not ((timeline.end > 0) & (timeline.kind != KINDS.index("wait"))).any()
    for before, after in pairwise(path.tolist()):
        one, two = timeline[before], timeline[after]
        # The last participant of a collective may end later than the one that was waited for.
        assert one.end <= two.start + tolerance or one.kind == "communication"


def test_path_of_many_spans_in_one_step_is_quick():
    count = 200_000
    start = np.arange(count, dtype="f8")
    zeros = np.zeros(count, "i4")
    timeline = Timeline(
        names=("op",),
        start=start,
        end=start + 1,
        rank=zeros,
        track=zeros,
        kind=zeros.astype("i1"),
        name=zeros,
        step=zeros,
        queued=np.full(count, np.nan),
        bytes=zeros.astype("i8"),
        task=zeros - 1,
        marks=np.array([[0.0, float(count)]]),
    )
    assert critical_positions(timeline).tolist() == list(range(count))
