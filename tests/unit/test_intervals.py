"""Every prediction's interval: it contains as many measurements as it says, learns from outcomes, and reads well."""

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from math import exp
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.cost import outcomes
from offbeat.cost.interval import KINDS, MOST_OF_A_JOB, SPREAD, Interval, Trust, error_of_median, hardest, scatter
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
    assert 100 <= len(lines) == len(past_outcomes(GPU)) <= 300


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


def test_recordings_of_one_model_are_one_job() -> None:
    from offbeat import zoo

    graph = zoo.capture("ncf", 0.02)
    again = graph.replace(name="recorded") if hasattr(graph, "replace") else graph
    assert job_of(graph) == job_of(again) != job_of(zoo.capture("ncf", 0.03))
