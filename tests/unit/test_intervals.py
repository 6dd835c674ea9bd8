"""Every prediction's interval: it contains as many measurements as it says, learns from outcomes, and reads well."""

import json
import os
import random
import re
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from math import exp
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_whatif import write_job

from offbeat.cli import main
from offbeat.cli.tuning import _show
from offbeat.cluster import ClusterSpec
from offbeat.cost import outcomes
from offbeat.cost.interval import (
    KINDS,
    MOST_OF_A_JOB,
    SPREAD,
    UNMEASURED,
    Interval,
    Trust,
    error_of_median,
    hardest,
    scatter,
)
from offbeat.cost.measured import Costs
from offbeat.cost.outcomes import (
    HISTORY_VARIABLE,
    Expectation,
    Kind,
    Outcome,
    expectation_of,
    history_file,
    job_of,
    name_of,
    past_outcomes,
    remember,
)
from offbeat.graph import ModelGraph
from offbeat.online.expected import Watch
from offbeat.online.searcher import search
from offbeat.profile.measure import load_profile
from offbeat.report import make_report, render
from offbeat.report.live import Session, State
from offbeat.search.auto.store import Trial
from offbeat.search.auto.tune import Options, Progress, tune
from offbeat.search.optimize import predict
from offbeat.strategy import Strategy

GPU = "NVIDIA H200"


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state" / "outcomes.jsonl"
    monkeypatch.setenv(HISTORY_VARIABLE, str(path))
    return path


def outcome(ratio: float = 1.0, kind: Kind = "strategy", device: str = GPU, job: str = "job") -> Outcome:
    return Outcome(kind, device, job, 0.1, 0.1 * ratio)


def covered(draw: Callable[[random.Random], float], past: int, jobs: int = 1000) -> tuple[float, float]:
    """The share of measurements inside the interval, and its mean width, over many machines with such a history."""
    inside, widths = [], []
    numbers = random.Random(7)
    for _ in range(600):
        known = tuple(outcome(exp(draw(numbers)), job=str(number % jobs)) for number in range(past))
        made = Trust(GPU, "new", past=known).interval(1.0, "strategy")
        inside.append(made.low <= exp(draw(numbers)) <= made.high)
        widths.append(made.high - made.low)
    return fmean(inside), fmean(widths)


@pytest.mark.parametrize("past", [0, 5, 30, 200])
def test_nine_of_ten_measurements_lie_inside_where_noise_is_as_expected(past: int) -> None:
    share, _ = covered(lambda numbers: numbers.gauss(0, SPREAD["strategy"][0]), past)
    assert share == pytest.approx(0.9, abs=0.055)


@pytest.mark.parametrize("scale", [0.25, 4.0])
@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_nine_of_ten_lie_inside_once_a_machine_that_differs_is_known(scale: float, bias: float) -> None:
    spread = scale * SPREAD["strategy"][0]

    def draw(numbers: random.Random) -> float:
        return numbers.gauss(bias * spread, spread)

    share, width = covered(draw, 200)
    assert 0.87 <= share <= 0.99
    assert width < 6 * spread, "most of the prior is forgotten"
    if scale > 1:
        early = [covered(draw, past)[0] for past in (0, 5, 20)]
        assert early[0] < 0.6 < early[1] < early[2] > 0.8, "the prior is too narrow here, and is soon corrected"


def test_heavy_tails_are_covered_too() -> None:
    def draw(numbers: random.Random) -> float:
        return numbers.gauss(0, 0.03) * (4 if numbers.random() < 0.1 else 1)

    assert 0.87 <= covered(draw, 100)[0] <= 0.97


def test_history_shrinks_towards_the_prior() -> None:
    """One outcome moves the interval a little, many move it all the way."""
    nothing = Trust(GPU).interval(1.0, "strategy")
    made = [Trust(GPU, "job", past=(outcome(1.2),) * count).interval(1.0, "strategy") for count in (1, 4, 1000)]
    highs = [nothing.high, *(each.high for each in made)]
    assert highs[0] < highs[1]
    assert made[-1].high == pytest.approx(1.2, abs=0.03)
    assert made[0].low < nothing.low, "an outcome out of the ordinary also makes it wider"
    assert all(each.low <= 1.0 for each in made), "the prediction itself is inside"


def test_one_job_that_ran_often_does_not_speak_for_all() -> None:
    often = tuple(outcome(1.2) for _ in range(500))
    own, other = (Trust(GPU, job, past=often).interval(1.0, "strategy") for job in ("job", "another"))
    few = Trust(GPU, "another", past=often[: int(MOST_OF_A_JOB)]).interval(1.0, "strategy")
    assert other.high == pytest.approx(few.high)
    assert own.high - 1.2 < other.high - 1.2


def test_a_toy_model_does_not_spoil_later_intervals() -> None:
    """Its step is 0.2 ms of work and milliseconds of everything else."""
    toys = tuple(Outcome("same", GPU, f"toy{number}", 2e-4, 7e-3) for number in range(6))
    before = Trust(GPU, "job").interval(0.1, "same")
    assert Trust(GPU, "job", past=toys).interval(0.1, "same") == before


def test_kinds_and_devices_are_told_apart() -> None:
    past = tuple(outcome(1.2, kind="trial") for _ in range(50))
    assert Trust(GPU, past=past).interval(1.0, "strategy") == Trust(GPU).interval(1.0, "strategy")
    widths = {}
    for device in (GPU, "cpu"):
        made = [Trust(device).interval(1.0, kind) for kind in KINDS]
        widths[device] = [each.high - each.low for each in made]
        assert widths[device] == sorted(widths[device]), "what is harder to predict is wider"
    assert all(on_gpu <= on_cpu for on_gpu, on_cpu in zip(*widths.values(), strict=True))
    assert hardest("strategy", "link") == "link"
    assert hardest() == "same"


def test_noise_makes_it_wider_and_outcomes_of_noisy_runs_count_less() -> None:
    assert Trust(GPU, noise=0.1).interval(1.0, "same").high > Trust(GPU).interval(1.0, "same").high
    noisy = Outcome("same", GPU, "job", 0.1, 0.12, noise=0.2)
    quiet = Outcome("same", GPU, "job", 0.1, 0.12)
    highs = [Trust(GPU, past=(each,) * 5).interval(1.0, "same").high for each in (noisy, quiet)]
    assert highs[0] < highs[1]


def test_scatter_and_the_error_of_a_median() -> None:
    numbers = random.Random(1)
    samples = [exp(numbers.gauss(0, 0.05)) for _ in range(2000)]
    assert scatter(samples) == pytest.approx(0.05, rel=0.1)
    assert scatter([*samples, *[100.0] * 50]) == pytest.approx(0.05, rel=0.2), "outliers do not count"
    medians = [sorted(exp(numbers.gauss(0, 0.05)) for _ in range(15))[7] for _ in range(3000)]
    assert scatter(medians) == pytest.approx(error_of_median(samples[:15]) * 0.05 / scatter(samples[:15]), rel=0.1)
    assert scatter([1.0]) == error_of_median([]) == 0.0


def test_how_it_reads() -> None:
    assert str(Interval(0.375, 0.358, 0.396)) == "375 ms (358–396, 9 of 10)"
    assert str(Interval(1.5, 0.9994, 2.25)) == "1.5 s (0.999–2.25, 9 of 10)"
    assert str(Interval(2.5e-5, 2.31e-5, 1.2e-3)) == "25 us (23.1–1200, 9 of 10)"
    assert Interval(0.375, 0.358, 0.396).fields("step") == {"step_low_seconds": 0.358, "step_high_seconds": 0.396}
    assert str(Interval(0.0, 0.0, 0.0)) == "0 ns (0–0, 9 of 10)"


@given(st.floats(1e-8, 1e5), st.sampled_from(KINDS), st.sampled_from(["cpu", GPU]))
def test_every_prediction_lies_in_its_interval_and_can_be_written(seconds: float, kind: Kind, device: str) -> None:
    made = Trust(device).interval(seconds, kind)
    assert 0 < made.low <= seconds <= made.high
    assert "9 of 10" in str(made)
    ratio = Trust(device).interval(1.0, kind)
    assert made.high / seconds == pytest.approx(ratio.high), "it is relative to the time"


def test_a_gain_inside_the_interval_is_doubted() -> None:
    made = Interval(0.375, 0.358, 0.396)
    assert made.doubt(0.390) == "; the gain lies inside the interval"
    assert made.doubt(0.400) == ""
    assert made.doubt(0.370) == "", "no gain is promised"


def test_outcomes_are_kept_once_and_by_device(history: Path) -> None:
    for each in (outcome(1.1), outcome(1.1), outcome(0.9), outcome(1.0, device="cpu")):
        remember(each)
    assert past_outcomes(GPU) == (outcome(1.1), outcome(0.9))
    assert past_outcomes("cpu") == (outcome(1.0, device="cpu"),)
    assert Trust.here("generic").device == "cpu"
    Trust.here(GPU, "job", 0.01).remember("same", 0.2, 0.21)
    assert past_outcomes(GPU)[-1] == Outcome("same", GPU, "job", 0.2, 0.21, 0.01)
    Trust.here(GPU).remember("same", 0.0, 0.21)
    Trust.here(GPU).remember("same", 1e-9, 1.0)
    assert len(past_outcomes(GPU)) == 3, "what cannot be the same thing is left out"
    assert history.parent.stat().st_mode & 0o077 == 0, "it is nobody else's business"


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(HISTORY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "offbeat" / "outcomes.jsonl"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_file() == tmp_path / ".local/state/offbeat/outcomes.jsonl"
    monkeypatch.setenv(HISTORY_VARIABLE, os.devnull)
    remember(outcome())
    assert past_outcomes(GPU) == ()
    assert not Path(f"{os.devnull}.lock").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"not json\n{}\n[]\n1\n",
        b'{"kind":"same"}\n',
        b'{"kind":"other","device":"NVIDIA H200","job":"a","predicted":1,"measured":1,"noise":0}\n',
        b'{"kind":"same","device":"NVIDIA H200","job":[1],"predicted":1,"measured":1,"noise":0}\n',
        b'{"kind":"same","device":"NVIDIA H200","job":"a","predicted":"1","measured":1,"noise":0}\n',
        b'{"kind":"same","device":"NVIDIA H200","job":"a","predicted":1e-300,"measured":1e300,"noise":0}\n',
        b'{"kind":"same","device":"NVIDIA H200","job":"a","predicted":1,"measured":1,"noise":1e300}\n',
        b'{"kind":["same"],"device":"NVIDIA H200","job":"a","predicted":1,"measured":1,"noise":0}\n',
        b'{"kind":"same","device":"NVIDIA H200","job":"a","predicted":1,"meas',
    ],
)
def test_a_broken_history_is_no_history_and_grows_again(history: Path, content: bytes) -> None:
    history.parent.mkdir()
    history.write_bytes(content)
    assert past_outcomes(GPU) == ()
    assert expectation_of(Strategy(name="any"), 2) is None
    Trust.here(GPU).interval(1.0, "same")
    remember(outcome())
    assert past_outcomes(GPU) == (outcome(),)


@pytest.mark.parametrize("what", ["folder", "beneath a file"])
def test_where_it_cannot_be_written_nothing_happens(history: Path, what: str) -> None:
    if what == "folder":
        history.mkdir(parents=True)
    else:
        history.parent.write_text("")
    remember(outcome())
    assert past_outcomes(GPU) == ()


def test_a_locked_history_is_not_waited_for(history: Path) -> None:
    import fcntl

    remember(outcome(1.1))
    with open(history.with_name("outcomes.jsonl.lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remember(outcome(1.2))
    assert past_outcomes(GPU) == (outcome(1.1),)


def test_a_history_stays_small_and_keeps_the_latest(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "MOST_BYTES", 5000)
    for number in range(300):
        remember(outcome(1 + number / 1000))
        assert history.stat().st_size <= 5000
    kept = past_outcomes(GPU)
    assert kept == tuple(outcome(1 + number / 1000) for number in range(300 - len(kept), 300))
    assert len(kept) >= 15


def _write(first: int) -> None:
    for number in range(first, first + 100):
        remember(outcome(1 + number / 1000))


def test_concurrent_writers_leave_whole_lines(history: Path) -> None:
    with ProcessPoolExecutor(3) as pool:
        list(pool.map(_write, (0, 100, 200)))
    lines = history.read_bytes().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert 0 < len(lines) == len(set(lines)) == len(past_outcomes(GPU)), "a writer that finds it locked gives up"
    remember(outcome(0.5))
    assert past_outcomes(GPU)[-1] == outcome(0.5), "no lock is left behind"


def test_what_a_saved_strategy_is_expected_to_take(history: Path) -> None:
    strategy = Strategy(name="mine", graph="a" * 64, cluster="b" * 64)
    expected = Expectation(name_of(strategy), 4, "strategy", GPU, "job", 0.2, 0.01)
    remember(Expectation(name_of(strategy), 4, "strategy", GPU, "job", 0.3))
    remember(expected)
    assert expectation_of(strategy.model_copy(update={"cluster": ""}), 4) == expected, "the latest, wherever it runs"
    assert expectation_of(strategy, 2) is None
    assert expectation_of(Strategy(name="another"), 4) is None
    assert expected.outcome(0.25) == Outcome("strategy", GPU, "job", 0.2, 0.25, 0.01)
    assert past_outcomes(GPU) == (), "an expectation is no outcome"


def test_recordings_of_one_model_are_one_job(folder: Path) -> None:
    again = write_job(folder.with_name("again"), seconds=0.02)
    graphs = [load_profile(each).graph for each in (folder, again)]
    assert job_of(graphs[0]) == job_of(graphs[1]) != job_of(load_graph())


# What the commands and pages say


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_job(tmp_path / "job", job="ddp")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return re.sub(r"[ \t]+", " ", capsys.readouterr().out)


def test_replay_says_how_far_to_trust_it_and_learns(
    folder: Path, history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = told(capsys, "replay", str(folder), "--what-if", "bandwidth=1.02x")
    assert facts["replayed_step_low_seconds"] < facts["replayed_step_seconds"] < facts["replayed_step_high_seconds"]
    assert facts["predicted_step_low_seconds"] < facts["predicted_step_seconds"] < facts["predicted_step_high_seconds"]
    assert facts["gain_inside_interval"]
    (kept,) = past_outcomes("cpu")
    assert (kept.kind, kept.predicted, kept.measured) == (
        "same",
        facts["replayed_step_seconds"],
        facts["measured_step_seconds"],
    )
    words = said(capsys, "replay", str(folder), "--what-if", "bandwidth=1.02x")
    shown = Interval(*(facts[f"predicted_step{each}_seconds"] for each in ("", "_low", "_high")))
    assert f"predicted step {shown}" in words
    assert "×; the gain lies inside the interval" in words
    assert re.search(r"replayed step [\d.]+ ms \([\d.]+–[\d.]+, 9 of 10\)", words)
    assert len(past_outcomes("cpu")) == 1, "the same recording teaches once"
    faster = told(capsys, "replay", str(folder), "--what-if", "bandwidth=100x", "--what-if", "compute=10x")
    assert not faster["gain_inside_interval"]
    wider = told(capsys, "replay", str(folder), "--what-if", "workers=4")
    widths = [each["predicted_step_high_seconds"] / each["predicted_step_seconds"] for each in (facts, wider)]
    assert widths[0] < widths[1], "of another number of ranks less is known"


def test_pages_and_commands_show_the_same_interval(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = told(capsys, "replay", str(folder), "--what-if", "bandwidth=2x")
    report = make_report(load_profile(folder), trace=str(folder))
    assert report.help is not None
    row = next(row for row in report.help.to_dict()["rows"] if row["about"] == "bandwidth=2x")
    live = Session.of_recording(folder).replay(State(bandwidth=2.0))
    for bound in ("low_seconds", "high_seconds"):
        assert row[bound] == pytest.approx(facts[f"predicted_step_{bound}"]) == pytest.approx(live[bound])
    assert row["bounds"] == live["bounds"]
    assert row["bounds"] in render(report)
    assert report.comparison is not None
    assert report.comparison.to_dict()["predicted_step_low_seconds"] == facts["replayed_step_low_seconds"]
    best = report.help.free or report.help.rows[0]
    assert best.interval.bounds in report.headline
    assert "bounds" not in Session.of_recording(folder).replay(State()), "what was measured is not predicted"
    assert "low_seconds" in Session.of_recording(folder).rank(State(strategy="overlap"))


def test_optimize_says_how_far_to_trust_it_and_notes_what_it_expects(
    folder: Path, history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = tmp_path / "strategy.json"
    job = ["optimize", str(folder), "--time-limit", "1", "-o", str(chosen)]
    facts = told(capsys, *job)
    assert facts["step_low_seconds"] < facts["step_seconds"] < facts["step_high_seconds"]
    assert facts["kind"] == "strategy"
    assert facts["gain_inside_interval"] == (facts["step_seconds"] < facts["ddp_seconds"] <= facts["step_high_seconds"])
    expected = expectation_of(Strategy.load(chosen), 2)
    assert expected is not None
    assert expected.seconds == facts["step_seconds"]
    words = said(capsys, *job)
    assert re.search(r"predicted to take [\d.]+ ms \([\d.]+–[\d.]+, 9 of 10\): ", words)
    assert ("the gain lies inside the interval" in words) == facts["gain_inside_interval"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["plan", "mlp", "--cluster", "pace_10g"], "predicted_step"),
        (["explain", "ddp", "--model", "mlp", "--cluster", "pace_10g"], "step"),
        (["frontier", "mlp", "--cluster", "tensoropt", "--devices", "2", "--mini-time"], "time"),
    ],
)
def test_what_was_not_measured_is_called_an_estimate(
    command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = told(capsys, *command)
    low, seconds, high = (facts[f"{name}{each}_seconds"] for each in ("_low", "", "_high"))
    assert low < seconds
    assert high > 3 * seconds, "steps took 1.2 to 10 times the sum of their operators"
    words = said(capsys, *command)
    assert UNMEASURED in words
    assert "9 of 10" in words


def test_every_point_of_a_frontier_has_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["frontier", "mlp", "--cluster", "tensoropt", "--devices", "2"]
    facts = told(capsys, *command)
    assert all(
        point["time_low_seconds"] < point["time_seconds"] < point["time_high_seconds"] for point in facts["points"]
    )
    assert UNMEASURED in facts["notes"]
    words = said(capsys, *command)
    assert "9 of 10" in words
    assert UNMEASURED in words


def test_tune_shows_and_keeps_what_became_of_its_predictions(history: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trial = Trial(Strategy(name="mine"), "done", 0.2, predicted_seconds=0.21)
    graph, cluster = load_graph(), ClusterSpec.local(2)
    seen: list[Progress] = []

    def seconds_of(strategy: Strategy) -> float:
        return predict(graph, cluster, Costs(), strategy)

    def run(strategies: Any, _: Any) -> list[Trial]:
        return [Trial(strategy, "done", 1.1 * seconds_of(strategy)) for strategy in strategies]

    tune(graph, cluster, run, Options(trials=2, guide="replay", candidates=4), on_progress=seen.append)
    intervals = [each.interval for each in seen if each.interval is not None]
    assert intervals
    kept = past_outcomes("cpu")
    assert {each.kind for each in kept} == {"trial"}
    assert {each.predicted for each in kept} <= {each.seconds for each in intervals}
    _show(Progress(1, 2, trial, trial, 0.0, 0.0, 0.0, Interval(0.21, 0.2, 0.22)))
    assert "210 ms predicted (200–220, 9 of 10)" in capfd.readouterr().err


def load_graph() -> ModelGraph:
    from offbeat import zoo

    return zoo.capture("mlp", 0.1)


def test_a_job_that_runs_a_saved_strategy_adds_its_outcome(history: Path) -> None:
    """Timed once the order has settled, and only if the model is still the one that was predicted."""
    clock = SimpleNamespace(time=0.0, wait=lambda moment: None, seconds=lambda moment: moment)
    clock.now = lambda: clock.time
    reports = SimpleNamespace(reports=SimpleNamespace(clock=clock))
    expected = Expectation("name", 2, "strategy", GPU, "job", 0.1)
    for refitted in (True, False):
        runtime: Any = SimpleNamespace(engine=reports, step_hooks=[], refit_hooks=[])
        Watch(runtime, expected)
        for step in range(60):
            # The first steps, before the order has settled, are slow, and so is one in the middle.
            clock.time += 1.0 if step < 20 or step == 30 else 0.11
            for hook in list(runtime.step_hooks):
                hook()
            if refitted and step == 25:
                for refit in runtime.refit_hooks:
                    refit(None)
        assert runtime.step_hooks == []
        outcomes_kept = past_outcomes(GPU)
        assert len(outcomes_kept) == (not refitted)
    assert outcomes_kept[0].measured == pytest.approx(0.11)


def test_the_search_beside_a_job_gives_candidates_intervals(folder: Path) -> None:
    found = _answer(folder)
    for each in found["candidates"]:
        low, high = each["bounds"].values()
        assert low < each["seconds"] < high
        Trust(*each["trust"])


def _answer(folder: Path) -> dict[str, Any]:
    lines = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("rank*.jsonl"))
    ]
    packed = [zlib.compress(json.dumps(each).encode()).hex() for each in lines]
    graph = load_profile(folder).graph.to_json().decode()
    request = {
        "traces": packed,
        "link": (1e-3, 1e-9),
        "world": 2,
        "graph": graph,
        "barrier": True,
        "allow": [],
        "encoding": {},
    }
    *_, last = search(request)
    return last
