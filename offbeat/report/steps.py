"""Divide a timeline into steps: the spans active in some of them, and the parts of a step."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.timeline import Timeline
from offbeat.timeline.diagnosis import Diagnosis, RankTime, name_ranks

PARTS = {"compute": "compute", "exposed": "exposed communication", "waiting": "waiting for other ranks", "idle": "idle"}
"""What each moment of a step is, and its label; the parts add up to the step."""


class TimelineSteps:
    """The steps of a timeline with marks."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.by_start = np.argsort(timeline.start, kind="stable")
        self.starts = timeline.start[self.by_start]
        self.reach = np.maximum.accumulate(timeline.end[self.by_start]) if len(timeline) else self.starts
        self.bounds = step_windows(timeline)

    def __len__(self) -> int:
        return len(self.bounds)

    def positions(self, first: int, last: int) -> NDArray[np.int64]:
        """Positions of the spans active from the beginning of step `first` to the end of step `last`, in order."""
        return np.sort(self._under_way(first, last))

    def part(self, first: int, last: int) -> Timeline | None:
        """A timeline of these steps alone; None if a rank has no span in them, so that its marks cannot be told."""
        part = self.timeline.select(self.positions(first, last))
        part = replace(part, critical=None, marks=self.timeline.marks[:, first : last + 2], notes=())
        return part if part.marked_ranks == self.timeline.marked_ranks else None

    def last(self, most_spans: int) -> Timeline | None:
        """A timeline of as many last steps as have at most `most_spans` spans; None if the last alone has more."""
        last = len(self) - 1
        fitting = takewhile(lambda first: len(self._under_way(first, last)) <= most_spans, range(last, -1, -1))
        first = min(fitting, default=None)
        return None if first is None else self.part(first, last)

    def _under_way(self, first: int, last: int) -> NDArray[np.int64]:
        """Positions in order of start; they may include spans that end before `first` but follow a longer one."""
        low = np.searchsorted(self.reach, self.bounds[first][0], side="right")
        return self.by_start[low : np.searchsorted(self.starts, self.bounds[last][1], side="left")]


def step_windows(timeline: Timeline) -> list[tuple[float, float]]:
    """When each step begins on the first rank and ends on the last, in seconds; empty without marks."""
    marks = timeline.marks
    if marks.ndim != 2 or marks.shape[0] == 0 or marks.shape[1] < 2:
        return []
    return list(zip(marks[:, :-1].min(axis=0).tolist(), marks[:, 1:].max(axis=0).tolist(), strict=True))


def with_marks(timeline: Timeline) -> Timeline:
    """The timeline, as one step if it has no marks."""
    if step_windows(timeline) or not len(timeline):
        return timeline
    first = [timeline.start[timeline.rank == rank].min() for rank in timeline.ranks]
    last = [timeline.end[timeline.rank == rank].max() for rank in timeline.ranks]
    note = "the trace does not tell where steps begin, so all of it counts as one step"
    return replace(timeline, marks=np.column_stack([first, last]), notes=(*timeline.notes, note))


def parts_legend() -> list[dict[str, str]]:
    """The parts of a step as the pages' charts name them."""
    return [{"key": key, "label": label} for key, label in PARTS.items()]


def parts_of(diagnosis: Diagnosis) -> dict[str, float]:
    """Seconds of each part of a step: the mean over ranks and steps."""
    return {key: diagnosis.mean(f"{key}_seconds") for key in PARTS}


def rank_rows(ranks: Sequence[RankTime]) -> list[dict[str, Any]]:
    """Seconds of each part of a step on each rank; ranks that spend their step alike share a row."""
    alike: dict[tuple[float, ...], tuple[dict[str, float], list[int]]] = {}
    for rank in ranks:
        parts = {key: getattr(rank, f"{key}_seconds") for key in PARTS}
        alike.setdefault(tuple(round(seconds, 7) for seconds in parts.values()), (parts, []))[1].append(rank.rank)
    return [{"label": name_ranks(same), "values": parts} for parts, same in alike.values()]
