"""Every number that the report, the live page and the command line show about one recording is the same number."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_whatif import write_job

from offbeat.cli import main
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


def test_strategies_have_one_step_each(
    folder: Path, report: Report, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = report.explanations[0]
    assert ran.measured
    assert ran.step_seconds == ran.ddp_seconds == report.step_seconds == session.rank(State())["step_seconds"]
    other = session.rank(State(strategy=ran.next_builder))["step_seconds"]
    assert other == pytest.approx(ran.next_builder_seconds)
    best = told(capsys, "optimize", str(folder), "--time-limit", "1")
    assert best["ddp_seconds"] == report.step_seconds
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
