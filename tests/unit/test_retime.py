"""What the engine learns of its own collectives, and how calibration tells their overhead."""

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat import cpu_steal
from offbeat.cost.measured import in_a_row
from offbeat.profile import calibrate
from offbeat.runtime.retime import MOST_SLOWED, CollectiveTimings, slowdown
from offbeat.timeline.clock import HostClock


def seen(*spans: tuple[float, float]) -> CollectiveTimings:
    """What one rank saw of a step: when each slice of message 0 was issued and when it had arrived."""
    timings = CollectiveTimings(HostClock())
    for number, (issued, arrived) in enumerate(spans):
        task: Any = SimpleNamespace(lane="up", message=0, start=number)
        timings.communication(7, task, issued, issued, arrived)
    return timings


def busy(*spans: tuple[float, float]) -> list[float]:
    return seen(*spans).busy(7, [(0, number) for number in range(len(spans))], len(spans))


def test_collectives_that_take_as_long_as_on_an_idle_link_are_not_slowed() -> None:
    assert slowdown([busy((0.0, 0.011))], [0.011]) == pytest.approx(1.0)


def test_what_waits_behind_another_is_not_counted_twice() -> None:
    assert busy((0.0, 0.022), (0.001, 0.044), (1.0, 1.022)) == pytest.approx([0.022] * 3)
    assert busy((0.0, 0.05), (0.001, 0.01)) == pytest.approx([0.05, 0.0])


def test_waiting_for_another_rank_does_not_keep_the_link_busy() -> None:
    """Each rank is late once: the link is busy from then on only, whatever the other one saw."""
    early, late = busy((0.0, 0.031), (0.050, 0.061)), busy((0.020, 0.031), (0.032, 0.061))
    shortest = [min(pair) for pair in zip(early, late, strict=True)]
    assert shortest == pytest.approx([0.011, 0.011])
    assert slowdown([shortest], [0.011, 0.011]) == pytest.approx(1.0)


def test_a_step_that_is_still_under_way_says_nothing() -> None:
    under_way = seen((2.0, 2.9)).busy(7, [(0, 0), (0, 1)], 2)
    assert slowdown([[0.011, 0.011], under_way], [0.011, 0.011]) == pytest.approx(1.0)
    assert slowdown([under_way], [0.011, 0.011]) is None
    assert slowdown([seen().busy(7, [(0, 0)], 1)], [0.011]) is None


def test_slices_that_no_rank_sends_do_not_count() -> None:
    assert slowdown([[0.022, inf]], [0.011, 5.0]) == pytest.approx(2.0)


def test_a_stall_is_believed_only_so_far() -> None:
    assert slowdown([busy((0.0, 60.0))], [0.011]) == MOST_SLOWED


@pytest.mark.parametrize("overhead", [0.0, 2e-4, 9e-4, 4e-3])
@pytest.mark.parametrize("per_byte", [1e-9, 5e-9, 5e-8])
def test_calibration_finds_the_overhead_that_replay_would_show(overhead: float, per_byte: float) -> None:
    """The same model in both directions: rows made with an overhead are fitted with it."""
    wire = [per_byte * 2**12] * calibrate.SMALL_IN_A_ROW + [per_byte * calibrate.LARGE_BYTES]
    taken = in_a_row([seconds + overhead for seconds in wire * 5], [overhead] * len(wire) * 5, 2)[len(wire) :]
    each = (sum(taken) / 4 - wire[-1]) / calibrate.SMALL_IN_A_ROW
    samples = [(2**12, 1.0, each), *((size, 1.0, per_byte * size) for size in (2**18, 2**20))]
    fitted = calibrate.fit(samples)
    assert fitted.seconds_per_byte == pytest.approx(per_byte)
    assert fitted.overhead_seconds == pytest.approx(overhead, abs=2e-6, rel=0.01)


def test_what_goes_straight_is_fitted_to_what_one_takes_alone() -> None:
    """A bucket along the way lets small ones pass for nothing; only what a larger one takes longer counts."""
    samples = [(2**12, 4e-4, 9.0), (2**16, 4e-4, 9.0), *((size, 1e-8 * size - 1e-4, 9.0) for size in (2**18, 2**20))]
    fitted = calibrate.fit_alone(samples)
    assert fitted.seconds_per_byte == pytest.approx(1e-8)
    assert (fitted.overhead_seconds, fitted.latency_seconds) == (4e-4, 0.0)
    assert calibrate.fit_alone(samples[:3]).seconds_per_byte == pytest.approx(1e-8, rel=0.05)


@pytest.mark.parametrize(
    ("stolen", "kept"), [((0.0,), 1), ((0.01,), 1), ((0.3, 0.0), 2), ((0.3, 0.1), 2), ((0.1, 0.3), 1)]
)
def test_a_calibration_that_neighbours_disturbed_is_made_once_more(
    monkeypatch: pytest.MonkeyPatch, stolen: tuple[float, ...], kept: int
) -> None:
    """The least disturbed one counts, whatever it measured."""
    left, attempts = list(stolen), []

    class Known:
        def __init__(self) -> None:
            attempts.append(len(attempts) + 1)

        def share(self) -> float:
            return left.pop(0)

    monkeypatch.setattr(calibrate, "CpuSteal", Known)
    monkeypatch.setattr(calibrate, "largest", lambda channel, share: share)
    monkeypatch.setattr(calibrate, "measure", lambda channel, kind, device: [(attempts[-1], 0.0, 0.0)])
    samples = calibrate._least_disturbed(None, torch.device("cpu"))  # type: ignore[arg-type] # nothing is sent
    assert [size for size, _, _ in samples["reduce"]] == [kept]
    assert not left


def test_steal_is_what_the_kernel_counts_as_stolen(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter([[100, 0, 50, 800, 0, 0, 0, 10], [140, 0, 60, 820, 0, 0, 0, 40]])
    monkeypatch.setattr(cpu_steal, "_ticks", lambda: next(counted))
    assert cpu_steal.CpuSteal().share() == pytest.approx(0.3)


@pytest.mark.parametrize("text", ["", "cpu", "cpu  1 2 3\nintr 5", "cpu  no numbers at all"])
def test_where_the_kernel_does_not_say_nothing_is_stolen(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(cpu_steal.Path, "read_text", lambda path: text)
    assert cpu_steal.CpuSteal().share() == 0.0
