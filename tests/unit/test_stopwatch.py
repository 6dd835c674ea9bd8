"""When a trial has timed enough steps: neighbours that take the processors meanwhile must not decide a search."""

import itertools
from contextlib import suppress

import pytest

from offbeat.search.auto import job

TASK = {"warm_up": 2, "timed": 4, "early_steps": 2, "stop_above_seconds": None}
"""As a trial's process is given it."""


def watch_of(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], stolen: list[float], **task: object
) -> job.Stopwatch:
    """A stopwatch that has seen steps of these seconds, one block after another, until it had enough."""
    clock = itertools.accumulate([0.0, *(each for each in seconds for _ in range(4))])
    shares = iter(stolen)

    class Known:
        def share(self) -> float:
            return next(shares)

    monkeypatch.setattr(job.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(job, "CpuSteal", Known)
    watch = job.Stopwatch({**TASK, **task})
    with suppress(job._Ended):
        while True:
            watch.after_step()
    return watch


@pytest.mark.parametrize(
    ("stolen", "blocks", "kept"),
    [([0.0], 1, 1.0), ([0.2, 0.0], 2, 2.0), ([0.2, 0.3, 0.1], 3, 3.0), ([0.1, 0.3, 0.2], 3, 1.0)],
)
def test_steps_are_timed_again_while_neighbours_disturb_them(
    monkeypatch: pytest.MonkeyPatch, stolen: list[float], blocks: int, kept: float
) -> None:
    watch = watch_of(monkeypatch, [1.0, 2.0, 3.0], stolen)
    assert len(watch.blocks) == blocks
    assert watch.steps == [kept] * 4
    assert watch.later == 4 * (blocks - kept)
    assert not watch.stopped


def test_a_trial_is_not_given_up_for_what_neighbours_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks slow after two steps, while a third of the processors is stolen; undisturbed it is not."""
    watch = watch_of(monkeypatch, [9.0, 1.0], [0.3, 0.3, 0.0, 0.0], stop_above_seconds=2.0)
    assert not watch.stopped
    assert watch.steps[-1] == 1.0
    slow = watch_of(monkeypatch, [9.0, 1.0], [0.0], stop_above_seconds=2.0)
    assert slow.stopped
    assert len(slow.steps) == 2
