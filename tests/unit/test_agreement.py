"""Every number that the report, the live page, the command line and the documents show about one recording is the same
number. (tests/browser compares what the two pages write.)"""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_whatif import write_job

from offbeat.cli import main
from offbeat.cli.profiling import _recorded
from offbeat.profile.measure import load_profile
from offbeat.report import make_report, render
from offbeat.report.contents import Report
from offbeat.report.live import Session, State
from offbeat.timeline.diagnosis import IDLE
from offbeat.units import format_seconds, format_speedup


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("agreement") / "job", job="ddp")


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return make_report(load_profile(folder), trace=str(folder))


@pytest.fixture(scope="module")
def session(folder: Path) -> Session:
    return Session.of_recording(folder)


class Words(HTMLParser):
    """The words of a page, without its script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.inside, self.parts = "", [""]
        self.feed(page)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.parts))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.parts.append(data)


def shown(seconds: float) -> str:
    return format_seconds(round(seconds, 9))


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_measured_step_its_bound_and_its_parts(
    folder: Path, report: Report, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    live, command = session.replay(State()), told(capsys, "replay", str(folder))
    diagnosis = command["diagnosis"]
    profile = load_profile(folder)
    assert live["measured"]
    for step in (report.diagnosis.step_seconds, live["step_seconds"], live["base_seconds"]):
        assert step == report.step_seconds == profile.step_seconds
    assert command["measured_step_seconds"] == diagnosis["step_seconds"] == report.step_seconds
    assert live["bound"]["seconds"] == diagnosis["ideal_seconds"] == report.diagnosis.ideal_seconds
    assert live["mean"] == report.parts
    assert live["idle"] == diagnosis["idle_by_reason"] == report.diagnosis.idle_by_reason
    assert sum(report.parts.values()) == pytest.approx(report.step_seconds)
    assert sum(live["idle"].values()) == pytest.approx(report.parts["idle"], abs=1e-9)
    assert set(live["idle"]) <= set(IDLE)
    assert _recorded(folder, 2)["step_seconds"] == report.step_seconds, "what offbeat profile prints"
    assert live["ranks"] == [
        {"label": "ranks 0–1", "values": {part: diagnosis["ranks"][0][f"{part}_seconds"] for part in report.parts}}
    ]
    about, comparison = session.about(), report.comparison
    assert comparison is not None
    assert comparison.error == pytest.approx(command["replay_error"])
    assert comparison.error == pytest.approx(about["replayed_seconds"] / about["measured_seconds"] - 1)


def test_predictions_are_relative_to_the_measured_step(
    folder: Path, report: Report, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.help is not None
    assert report.help.base_seconds == report.step_seconds
    rows = {row.about.partition(";")[0]: row.seconds for row in report.help.rows}
    for change, state in {
        "bandwidth=2x": State(bandwidth=2.0),
        "latency=0.5x": State(latency=0.5),
        "compute=2x": State(compute=2.0),
        "wire=fp16": State(wire="fp16"),
    }.items():
        live, command = session.replay(state), told(capsys, "replay", str(folder), "--what-if", change)
        assert live["step_seconds"] == pytest.approx(rows[change]), change
        assert command["predicted_step_seconds"] == pytest.approx(rows[change])
        assert command["speedup"] == pytest.approx(live["speedup"])
        assert command["speedup"] == pytest.approx(report.step_seconds / rows[change])
        predicted = command["predicted_diagnosis"]
        assert live["bound"]["seconds"] == pytest.approx(predicted["ideal_seconds"])
        assert live["idle"] == pytest.approx(predicted["idle_by_reason"])


def test_strategies_have_one_step_each(
    folder: Path, report: Report, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = report.explanations[0]
    assert ran.measured
    assert ran.step_seconds == ran.ddp_seconds == report.step_seconds == session.rank(State())["step_seconds"]
    assert report.help is not None
    assert report.help.best is not None
    names = [ran.strategy, report.help.best.name]
    assert [explanation.strategy for explanation in report.explanations] == names
    other = session.rank(State(strategy=ran.next_builder))["step_seconds"]
    assert other == pytest.approx(ran.next_builder_seconds)
    best = told(capsys, "optimize", str(folder), "--time-limit", "2")
    assert best["ddp_seconds"] == report.step_seconds
    assert "bound_seconds" not in best, "replay and the pages tell the one that was measured"
    assert best["step_seconds"] <= report.help.rows[-1].seconds
    free = next(row for row in report.help.rows if row.free)
    assert best["step_seconds"] <= 1.01 * free.seconds, "the command of the report finds what the report promises"
    assert report.explanations[1].step_seconds == pytest.approx(free.seconds)
    assert "limit" not in report.explanations[0].text(), "there is one bound, the measured one"
    assert best["speedup_over_ddp"] == pytest.approx(report.step_seconds / best["step_seconds"])


def test_the_pages_write_these_numbers(report: Report) -> None:
    page = render(report)
    for seconds in (report.step_seconds, report.diagnosis.ideal_seconds or 0.0):
        assert format_seconds(round(seconds, 9)) in page
    assert "% faster" not in page
    assert "% slower" not in page
    assert "as fast as DDP" not in report.explanations[0].text(), "it is DDP itself"
    free = report.help.free if report.help else None
    if free is not None:
        assert format_speedup(report.step_seconds, free.seconds) in report.headline
        assert all(command in page.replace("&#34;", '"') for command in report.commands)


def test_the_report_s_json_is_the_command_line_s(
    folder: Path, report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = told(capsys, "replay", str(folder))
    page = tmp_path / "report.html"
    made = told(capsys, "report", str(folder), "-o", str(page), "--compare", str(folder))
    theirs, ours = replay["diagnosis"], made["diagnosis"]
    for field in (set(theirs) | set(ours)) - {"blame", "notes"}:
        assert ours[field] == theirs[field], field
    assert ours["blame"][: len(theirs["blame"])] == theirs["blame"]
    assert made["step_seconds"] == made["what_ifs"]["base_seconds"] == replay["measured_step_seconds"]
    assert made["compared_with"]["step_seconds"] == made["step_seconds"]
    assert made["comparison"]["error"] == pytest.approx(replay["replay_error"])
    assert made["comparison"]["predicted_step_seconds"] == pytest.approx(replay["replayed_step_seconds"])
    assert made["strategies"][0]["step_seconds"] == made["step_seconds"]
    assert "bound_seconds" not in made["strategies"][0]


def test_the_terminal_and_the_page_write_the_same_words(
    folder: Path, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Words(render(report)).text
    assert main(["replay", str(folder)]) == 0
    terminal = re.sub(r"[ \t]+", " ", capsys.readouterr().out)
    diagnosis, comparison = report.diagnosis, report.comparison
    assert comparison is not None
    assert diagnosis.ideal_seconds is not None
    ratio = f"the step takes {report.step_seconds / diagnosis.ideal_seconds:.2f}× that"
    median = f"median of {len(report.steps)} steps"
    for words in (shown(report.step_seconds), shown(diagnosis.ideal_seconds), ratio, median):
        assert words in terminal, words
        assert words in page, words
    assert f"measured step {shown(report.step_seconds)}" in terminal
    assert f"replay error {comparison.error:+.1%}" in terminal
    assert f"{comparison.error:+.1%}".replace("-", "−") in page
    for reason, seconds in diagnosis.idle_by_reason.items():
        words = f"{shown(seconds)} {IDLE[reason]}"
        assert f"idle {words}" in terminal
        assert words.replace(" us ", " µs ") in page
    for blame in diagnosis.blame[:5]:
        assert f"{shown(blame.exposed_seconds)} exposed" in terminal
    assert main(["report", str(folder), "-o", str(folder.parent / "said.html")]) == 0
    said = capsys.readouterr().out
    assert shown(report.step_seconds) in said


def test_documents_repeat_what_the_tutorial_s_commands_printed() -> None:
    """README's times and speed-ups outside of what benchmarks/report.py writes, and the tutorial's own sentences."""
    root = Path(__file__).parents[2]
    tutorial, readme = ((root / name).read_text() for name in ("docs/tutorial.md", "README.md"))
    readme = re.sub(r"<!-- measured.*?end of measured -->", "", readme, flags=re.DOTALL)
    printed = "\n".join(re.findall(r"```text\n(.*?)```", tutorial, flags=re.DOTALL))
    sentences = re.sub(r"```.*?```", "", tutorial, flags=re.DOTALL)
    times = [float(number) for number in re.findall(r"([\d.]+) ms", printed)]
    for place, words in (("README", readme), ("tutorial", re.sub(r"```.*?```", "", sentences, flags=re.DOTALL))):
        for number in re.findall(r"([\d.]+) ms", words):
            assert any(abs(float(number) / each - 1) < 0.01 for each in times), f"{place}: {number} ms"
        for number in re.findall(r"(\d\.\d\d)(?: times as fast|×)", words):
            ratios = (before / after for before in times for after in times)
            assert any(abs(float(number) - ratio) < 0.006 for ratio in ratios), f"{place}: {number} times"
    measured = re.findall(r"(?:measured step(?: of)?|as DDP \()\s*([\d.]+ m?s)", printed)
    assert len(set(measured)) <= 1, "one recording has one measured step"
