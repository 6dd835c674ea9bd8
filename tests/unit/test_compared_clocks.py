"""What aligns a recording: the round trips that compare clocks, or the job's own communication where they fail."""

from pathlib import Path

import pytest

from offbeat.profile.lines import Collective, RankTrace, Step
from offbeat.profile.traces import align

AHEAD = 2.0
"""Seconds by which the second machine's clock is ahead."""


def trace(rank: int, ticks: tuple[tuple[tuple[int, float, float], ...], ...], ahead: float, machine: str) -> RankTrace:
    steps = []
    for number in range(12):
        begin = 0.1 * number + ahead
        # Ranks join one after another and leave together.
        row = Collective(0, "all_reduce", "all_reduce.0", 4096, 3, *(begin + 0.01 + 0.002 * rank,) * 2, begin + 0.05)
        steps.append(Step(number, begin, begin + 0.1, (), (), (row,)))
    return RankTrace(
        rank=rank, world=3, job="other", machine=machine, modules=(), parameters=(), gradients=(),
        path=Path(f"rank{rank}"), steps=tuple(steps), ticks=ticks,
    )  # fmt: skip


def job(errors: tuple[tuple[float, float], tuple[float, float]], trip: tuple[float, float]) -> list[RankTrace]:
    """Ranks 1 and 2 on the second machine. In each exchange they read clocks that are off by `errors`, and a round
    trip takes `trip` seconds, all of the surplus over 1 ms on the way there."""
    sent = {rank: [[(at + 0.01 * rank + 0.1 * k) for k in range(2)] for at in (-1.0, 2.0)] for rank in (1, 2)}
    zero = tuple(tuple((r, at, at + trip[r - 1]) for r in (1, 2) for at in sent[r][part]) for part in range(2))
    traces = [trace(0, zero, 0.0, "here")]
    for rank in (1, 2):
        there = trip[rank - 1] - 5e-4
        own = tuple(
            tuple(
                (rank, *(at + there + AHEAD + error,) * 2) for at, error in zip(sent[rank][part], errors, strict=True)
            )
            for part, errors in enumerate(((0.0, errors[0][rank - 1]), (0.0, errors[1][rank - 1])))
        )
        traces.append(trace(rank, own, AHEAD, "there"))
    return traces


def test_ranks_of_a_machine_share_the_offset_of_the_fastest_round_trip() -> None:
    _, alignment = align(job(((0.0, 0.0), (0.0, 0.0)), trip=(1e-3, 9e-3)))
    assert alignment is not None
    assert not alignment.notes
    assert alignment.offset_seconds.tolist() == pytest.approx([0.0, AHEAD, AHEAD], abs=1e-9)


@pytest.mark.parametrize("errors", [((0.5, 0.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, -0.25))])
def test_comparisons_that_contradict_each_other_give_way_to_the_jobs_communication(
    errors: tuple[tuple[float, float], tuple[float, float]],
) -> None:
    """A clock that jumps within an exchange: no offset fits both round trips."""
    _, alignment = align(job(errors, trip=(1e-3, 1e-3)))
    assert alignment is not None
    assert any("contradict each other" in note for note in alignment.notes)
    assert alignment.offset_seconds.tolist() == pytest.approx([0.0, AHEAD, AHEAD], abs=1e-4)
