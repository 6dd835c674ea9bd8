"""The report's numbers, its packed timeline and its page, without a browser."""

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Layer, Weight, make_graph
from test_whatif import write_job

from offbeat.cli import main
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.plan import Plan, lower
from offbeat.profile.measure import Profile, load_profile
from offbeat.profile.whatif import what_if
from offbeat.report import advice as advice_module
from offbeat.report import make_report, render, write_report
from offbeat.report.scene import MOST_LANES, critical_by_step, levels, make_scene, pack_timeline
from offbeat.search.frontier.model import Frontier, FrontierPoint
from offbeat.simulate import simulate
from offbeat.strategy import build_strategy
from offbeat.timeline import COMPUTE, KINDS, NETWORK, Builder, Timeline
from offbeat.timeline.critical import critical_positions

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&"


def small_plan(nodes: int = 2) -> Plan:
    layers = [Layer((Weight(f"layers.{i}.weight", (256, 1024)),), flops=2 * 10**9) for i in range(4)]
    cluster = ClusterSpec.homogeneous(nodes=nodes, devices_per_node=2, bandwidth="1Gbit/s")
    graph = make_graph(layers, name="chain")
    return lower(graph, cluster, build_strategy("ddp", graph, cluster))


def simulated(plan: Plan, costs: Costs) -> Profile:
    return Profile(simulate(plan, costs), plan.graph, plan.cluster, plan.strategy, costs, job="offbeat")


def two_ranks(slow: float = 1.0, name: str = "piece", steps: int = 3) -> Timeline:
    """Compute, then an all-reduce that starts when the slower rank (1) is there."""
    builder = Builder()
    marks = np.zeros((2, steps + 1))
    for step in range(steps):
        begin = marks[0, step]
        for rank, seconds in enumerate((1e-3, 1e-3 * slow)):
            builder.add(rank, COMPUTE, "forward", name, begin, begin + seconds, step=step)
            ready, sent = begin + seconds, begin + 1e-3 * max(1.0, slow)
            builder.add(
                rank, NETWORK, "communication", "grad", ready, sent + 5e-4, step=step, queued=ready, bytes=4096, task=0
            )
        marks[:, step + 1] = begin + 1e-3 * max(1.0, slow) + 5e-4
    return builder.build(marks)


def unpack(packed: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What the page's decoder does."""
    content = gzip.decompress(packed)
    length = int.from_bytes(content[:4], "little")
    header, offset, columns = json.loads(content[4 : 4 + length]), 4 + length, {}
    for name, width, count in header["columns"]:
        planes = np.frombuffer(content, "u1", width * count, offset).reshape(width, count)
        columns[name] = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(-1).astype("i8")
        offset += width * count
    assert offset == len(content)
    return header, columns


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    builder = Builder()
    for number in range(draw(st.integers(1, 60))):
        start = draw(st.integers(0, 400))
        builder.add(
            draw(st.integers(0, 2)),
            draw(st.sampled_from([COMPUTE, NETWORK])),
            draw(st.sampled_from(KINDS)),
            f"span{number}",
            start * 1e-6,
            (start + draw(st.integers(0, 60))) * 1e-6,
            bytes=draw(st.integers(0, 2**40)),
        )
    return builder.build()


@given(timelines())
def test_packed_spans_are_the_timeline_s(timeline: Timeline) -> None:
    header, columns = unpack(pack_timeline(timeline))
    row_of = np.repeat(np.arange(len(columns["rows"])), columns["rows"])
    first = np.concatenate([[0], np.cumsum(columns["rows"])[:-1]])
    rows = zip(first.tolist(), columns["rows"].tolist(), strict=True)
    start = np.concatenate([np.cumsum(columns["start"][at : at + size]) for at, size in rows])
    zero = timeline.start.min()
    tracks = {"compute": COMPUTE, "network": NETWORK}
    found = sorted(
        (
            header["rows"][row][4],
            tracks[header["rows"][row][3]],
            header["names"][columns["name"][i]],
            round((start[i] * header["tick"] + zero) * 1e9),
            round(columns["length"][i] * header["tick"] * 1e9),
            int(columns["bytes"][i]),
            KINDS[columns["kind"][i]],
        )
        for i, row in enumerate(row_of)
    )
    expected = sorted(
        (span.rank, span.track, span.name, round(span.start * 1e9), round(span.seconds * 1e9), span.bytes, span.kind)
        for span in timeline.spans
    )
    assert found == expected


@given(timelines())
def test_rows_do_not_overlap_and_levels_merge_only_neighbours(timeline: Timeline) -> None:
    scene = make_scene(timeline)
    for number, row in enumerate(scene.rows):
        own = scene.row == number
        assert (np.diff(scene.start[own]) >= 0).all()
        if row.lane < MOST_LANES - 1:
            assert (scene.start[own][1:] >= scene.end[own][:-1]).all()
    for resolution, runs in levels(scene):
        assert runs.sum() == len(scene)
        first = np.concatenate([[0], np.cumsum(runs)[:-1]])
        for at, count in zip(first.tolist(), runs.tolist(), strict=True):
            part = slice(at, at + count)
            assert len(set(scene.row[part].tolist())) == 1
            if count > 1:
                assert (scene.end[part] - scene.start[part] < resolution).all()
                assert len(set((scene.start[part] // resolution).tolist())) == 1


def test_overlapping_collectives_get_lanes_and_ranks_stand_by_node() -> None:
    builder = Builder()
    for rank in (0, 1, 2):
        builder.add(rank, COMPUTE, "forward", "a", 0.0, 1.0)
    builder.add(0, NETWORK, "communication", "x", 0.0, 1.0)
    builder.add(0, NETWORK, "communication", "y", 0.5, 1.5)
    scene = make_scene(builder.build(), {0: "east", 1: "west", 2: "east"})
    shown = [(row.label, row.group, row.lane) for row in scene.rows]
    assert shown == [
        ("rank 0 compute", "east", 0),
        ("rank 0 link", "east", 0),
        ("rank 0 link", "east", 1),
        ("rank 2 compute", "east", 0),
        ("rank 1 compute", "west", 0),
    ]


def test_a_scene_too_large_is_merged_and_says_so() -> None:
    random = np.random.default_rng(3)
    count = 50_000
    length = random.exponential(1e-6, count)
    end = np.cumsum(length)
    timeline = Timeline(
        names=tuple(f"name{number}" for number in range(count)),
        start=end - length,
        end=end,
        rank=np.zeros(count, "i4"),
        track=np.zeros(count, "i4"),
        kind=np.zeros(count, "i1"),
        name=np.arange(count, dtype="i4"),
        step=np.zeros(count, "i4"),
        queued=np.full(count, np.nan),
        bytes=np.ones(count, "i8"),
        task=np.full(count, -1, "i4"),
    )
    whole = pack_timeline(timeline)
    small = pack_timeline(timeline, most_bytes=20_000)
    assert len(whole) > 20_000 >= len(small)
    header, columns = unpack(small)
    assert header["total"] == count == columns["count"].sum() == columns["bytes"].sum()
    assert len(columns["start"]) < count
    busy = (columns["length"] - columns["idle"]).sum() * header["tick"]
    assert busy == pytest.approx(length.sum(), rel=1e-2)


def test_a_million_random_spans_stay_below_the_limit() -> None:
    random = np.random.default_rng(5)
    count, ranks = 1_000_000, 64
    length = random.exponential(2e-5, (ranks, count // ranks))
    end = np.cumsum(length + random.exponential(1e-5, length.shape), axis=1)
    timeline = Timeline(
        names=tuple(f"module.{number}" for number in range(3000)),
        start=(end - length).ravel(),
        end=end.ravel(),
        rank=np.repeat(np.arange(ranks, dtype="i4"), count // ranks),
        track=np.zeros(count, "i4"),
        kind=random.integers(0, 3, count).astype("i1"),
        name=random.integers(0, 3000, count).astype("i4"),
        step=np.zeros(count, "i4"),
        queued=np.full(count, np.nan),
        bytes=random.integers(0, 2**24, count),
        task=np.full(count, -1, "i4"),
    )
    packed = pack_timeline(replace(timeline, critical=np.arange(1000)))
    assert len(packed) * 4 / 3 < 17.5e6
    header, columns = unpack(packed)
    assert columns["count"].sum() == count
    # At every zoom some level has few blocks in each cell of its width.
    for number, resolution in enumerate(header["resolutions"]):
        blocks = len(columns[f"level{number}"])
        assert blocks <= 2 * len(header["rows"]) * (header["seconds"] / resolution + 1)
    assert len(columns[f"level{len(header['resolutions']) - 1}"]) < 50_000


def test_critical_paths_of_all_steps_are_those_of_single_steps() -> None:
    timeline = two_ranks(slow=1.4)
    for step, positions in critical_by_step(timeline):
        single = replace(timeline, marks=timeline.marks[:, step : step + 2])
        assert positions.tolist() == critical_positions(single).tolist()
    assert [step for step, _ in critical_by_step(timeline)] == [0, 1, 2]
    scene = make_scene(timeline)
    path = [(step, scene.rows[row].label) for step, row, _, _ in scene.critical.tolist()]
    assert [label for step, label in path if step == 1] == ["rank 1 compute", "rank 1 link"]


def test_parts_add_up_to_each_step() -> None:
    report = make_report(two_ranks(slow=1.5))
    assert report.step_seconds == pytest.approx(2e-3)
    assert sum(report.parts.values()) == pytest.approx(2e-3)
    assert report.parts == pytest.approx({"compute": 1.25e-3, "exposed": 5e-4, "waiting": 2.5e-4, "idle": 0.0})
    for seconds, parts in zip(report.steps, report.step_parts, strict=True):
        assert sum(parts.values()) == pytest.approx(seconds)
        assert parts == pytest.approx(report.parts)


def test_a_straggler_s_absence_is_replayed() -> None:
    report = make_report(two_ranks(slow=1.5))
    assert report.help is not None
    seconds = {row.label: row.seconds for row in report.help.rows}
    assert report.help.base_seconds == pytest.approx(2e-3)
    assert seconds["No straggler (rank 1)"] == pytest.approx(1.5e-3)
    assert seconds["Devices that compute twice as fast"] == pytest.approx(1.25e-3)
    assert seconds["Links with twice the bandwidth"] == pytest.approx(1.75e-3)
    assert [row.seconds for row in report.help.rows] == sorted(seconds.values())
    assert "devices that compute twice as fast, predicted 1.60× as fast" in report.headline
    assert any("does not tell the job's plan" in note for note in report.notes)


def test_a_long_trace_is_replayed_in_its_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice_module, "MOST_REPLAYED_SPANS", 9)
    report = make_report(two_ranks(slow=1.5, steps=6))
    assert report.help is not None
    assert report.help.base_seconds == pytest.approx(2e-3)
    assert "what-ifs are replays of the last 2 of 6 steps" in report.notes
    monkeypatch.setattr(advice_module, "MOST_REPLAYED_SPANS", 2)
    report = make_report(two_ranks(slow=1.5))
    assert report.help is not None
    assert report.help.rows == ()
    assert any("the last step alone has more than 2 spans" in note for note in report.notes)


def test_a_recorded_job_is_compared_explained_and_replayed(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job")
    profile = load_profile(folder)
    report = make_report(profile)
    assert report.comparison is not None
    same = what_if(profile, ())[0].iteration_time
    assert report.comparison.predicted_step_seconds == pytest.approx(same)
    assert report.comparison.error == pytest.approx(same / profile.step_seconds - 1)
    assert report.help is not None
    seconds = {row.label: row.seconds for row in report.help.rows}
    for label, change in (
        ("Links with twice the bandwidth", "bandwidth=2x"),
        ("Links with half the latency", "latency=0.5x"),
        ("Devices that compute twice as fast", "compute=2x"),
        ("Gradients sent as fp16", "wire=fp16"),
    ):
        relative = profile.step_seconds / same * what_if(profile, [change])[0].iteration_time
        assert seconds[label] == pytest.approx(relative)
    assert sum(label.startswith("Another strategy (") for label in seconds) == advice_module.SHOWN_STRATEGIES
    assert len(report.explanations) == 2
    assert report.explanations[0].step_seconds == pytest.approx(same, rel=0.01)
    assert report.help.best is not None
    assert report.explanations[1].strategy == report.help.best.strategy.name


def test_a_simulated_job_is_reported_without_a_comparison() -> None:
    plan = small_plan()
    report = make_report(simulated(plan, Costs()), what_ifs=False)
    assert report.timeline.source == "predicted"
    assert report.step_seconds == pytest.approx(simulate(plan).iteration_time)
    assert report.comparison is None
    assert report.help is None
    assert len(set(report.nodes.values())) == 2
    assert report.to_dict()["peak_memory_bytes"] == list(simulate(plan).peak_memory)
    slower = make_report(simulated(plan, Costs(compute_scale={1: 4.0})))
    assert slower.step_seconds > report.step_seconds
    assert slower.help is not None
    assert any(row.label == "No straggler (rank 1)" for row in slower.help.rows)


def test_a_prediction_can_be_given() -> None:
    measured = two_ranks(slow=1.5)
    report = make_report(measured, predicted=replace(two_ranks(slow=1.2), source="predicted"), what_ifs=False)
    assert report.comparison is not None
    assert report.comparison.error == pytest.approx(1.7 / 2.0 - 1)


def test_traces_without_steps_or_spans() -> None:
    report = make_report(replace(two_ranks(), marks=np.empty((0, 0))), what_ifs=False)
    assert len(report.steps) == 1
    assert any("counts as one step" in note for note in report.notes)
    with pytest.raises(OffbeatError, match="empty: the trace has no spans"):
        make_report(Timeline(), title="empty")
    timeline = two_ranks()
    broken = replace(timeline, end=np.where(np.arange(len(timeline)) == 2, np.inf, timeline.end))
    with pytest.raises(OffbeatError, match="timeline: end: a span has a time that is not finite"):
        make_scene(broken)


class Page(HTMLParser):
    """Tags, attributes that load something, and the texts of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.contents: dict[str, list[str]] = {"script": [], "style": [], "title": [], "h1": []}
        self.policy = ""
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.loads += [str(given[name]) for name in ("src", "href", "data", "action") if name in given]
        self.handlers += [name for name in given if name.startswith("on")]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(given["content"])
        self.inside = tag
        if tag in self.contents:
            self.contents[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in self.contents:
            self.contents[self.inside][-1] += data


def hostile_page() -> str:
    timeline = replace(two_ranks(name=HOSTILE), notes=(HOSTILE,), names=(HOSTILE, HOSTILE + "grad"))
    return render(replace(make_report(timeline, title=HOSTILE), nodes={0: HOSTILE, 1: HOSTILE}))


def test_nothing_of_a_trace_becomes_markup() -> None:
    text = hostile_page()
    page = Page(text)
    assert "img" not in page.tags
    assert page.handlers == []
    assert page.contents["h1"][0] == HOSTILE
    assert page.contents["title"][0].startswith(HOSTILE)
    assert page.tags.count("script") == 3
    assert "<img" not in text


def test_the_page_loads_nothing_and_allows_only_its_own_code() -> None:
    text = hostile_page()
    page = Page(text)
    assert set(page.loads) == {"#timeline-section"}
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in page.policy
    assert "unsafe" not in page.policy
    for directive, content in (("script-src", page.contents["script"][-1]), ("style-src", page.contents["style"][0])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in page.policy


def test_the_frontier_is_drawn_in_the_page() -> None:
    points = (FrontierPoint(2.0, 1e9, 1.5, 0.5), FrontierPoint(1.0, 2e9, 0.7, 0.3))
    report = make_report(two_ranks(), frontier=Frontier(points), what_ifs=False)
    text = render(report)
    assert Page(text).tags.count("svg") == 1
    assert text.count('<g class="point"') == 2
    assert report.to_dict()["frontier"] == [
        {"memory_bytes": 1e9, "time_seconds": 2.0, "engine": "split"},
        {"memory_bytes": 2e9, "time_seconds": 1.0, "engine": "split"},
    ]
    assert "svg" not in Page(render(make_report(two_ranks(), what_ifs=False))).tags


def test_command_writes_the_page_and_prints_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, output = tmp_path / "trace.json", tmp_path / "report.html"
    two_ranks(slow=1.5).save(trace)
    assert main(["report", str(trace), "-o", str(output), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("output") == str(output)
    assert printed.pop("output_bytes") == output.stat().st_size
    again = tmp_path / "again.html"
    assert printed == json.loads(json.dumps(write_report(again, Timeline.load(trace), title=trace.name).to_dict()))
    assert again.read_bytes() == output.read_bytes()

    assert main(["report", str(trace), "-o", str(output), "--no-what-ifs"]) == 0
    shown = capsys.readouterr().out
    assert "2 ms" in shown
    assert "of the step is compute" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere: no such trace"),
        (["trace.json", "-o", "no/folder/r.html"], "no/folder/r.html: cannot write the report: no folder"),
        (["trace.json", "--frontier", "trace.json"], "trace.json: "),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    two_ranks().save("trace.json")
    assert main(["report", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"offbeat: {sentence}")
    assert captured.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json"]
