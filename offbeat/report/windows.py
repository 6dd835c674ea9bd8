"""Timeline → the spans that are under way in one of its steps, or in several, without looking at all the others."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from offbeat.timeline import Timeline

_COLUMNS = ("start", "end", "rank", "track", "kind", "name", "step", "queued", "bytes", "task")


class Windows:
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
        """Of the spans under way between the beginning of step `first` and the end of step `last`, in order."""
        return np.sort(self.by_start[self._range(first, last)])

    def part(self, first: int, last: int) -> Timeline | None:
        """A timeline of these steps alone; None if a rank has no span in them, so that its marks cannot be told."""
        chosen = self.positions(first, last)
        columns = {column: getattr(self.timeline, column)[chosen] for column in _COLUMNS}
        marks = self.timeline.marks[:, first : last + 2]
        part = replace(self.timeline, critical=None, marks=marks, notes=(), **columns)
        return part if part.marked_ranks == self.timeline.marked_ranks else None

    def last_with(self, most_spans: int) -> int | None:
        """The first of the last steps that together have at most so many spans; None if the last alone has more."""
        first = None
        for step in reversed(range(len(self))):
            chosen = self._range(step, len(self) - 1)
            if chosen.stop - chosen.start > most_spans:
                break
            first = step
        return first

    def _range(self, first: int, last: int) -> slice:
        """In order of start; some of these may end before the step begins, where longer ones do not."""
        low = int(np.searchsorted(self.reach, self.bounds[first][0], side="right"))
        return slice(low, max(low, int(np.searchsorted(self.starts, self.bounds[last][1], side="left"))))


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
