"""Timeline: what every rank and link did in some steps, predicted or measured, on one clock.

Spans are kept as columns, so that a million of them stay small and quick; `Timeline.spans` shows them one by one. Times
are seconds since the timeline's own zero. A collective has one span on each participant, all with the same `task`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from os import PathLike
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.arguments import checked
from offbeat.errors import OffbeatError
from offbeat.units import format_seconds

Kind = Literal["forward", "backward", "optimizer", "communication", "update", "wait", "other"]
KINDS: tuple[Kind, ...] = ("forward", "backward", "optimizer", "communication", "update", "wait", "other")
"""Kinds of spans; 'update' is the optimizer step of one message, 'wait' is time in which a rank stood still."""

COLLECTIVES: tuple[str, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
COLLECTIVES += ("gather", "scatter", "send_recv", "send", "recv")
_COLLECTIVE = re.compile("|".join(kind.replace("_", "_?") for kind in COLLECTIVES), re.IGNORECASE)
_BY_LETTERS = {kind.replace("_", ""): kind for kind in COLLECTIVES}

COMPUTE = "compute"
NETWORK = "network"
COLUMNS = {"start": "f8", "end": "f8", "rank": "i4", "track": "i4", "kind": "i1"}
COLUMNS |= {"name": "i4", "step": "i4", "queued": "f8", "bytes": "i8", "task": "i4"}
"""The columns of a timeline, one entry per span, and their types."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one track of one rank."""

    rank: int
    track: str
    """'compute', 'network', or another queue of that rank, such as a second stream."""
    kind: Kind
    name: str
    start: float
    end: float
    step: int
    """Number of the step it belongs to; -1 if none."""
    queued: float | None
    """When a collective was ready to go; None where unknown."""
    bytes: int
    task: int
    """Number of the collective within its step, the same on every participant; -1 for compute."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Spans of all ranks on one clock, as columns of equal length."""

    names: tuple[str, ...] = ()
    tracks: tuple[str, ...] = (COMPUTE, NETWORK)
    start: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, COLUMNS["start"]))
    end: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, COLUMNS["end"]))
    rank: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, COLUMNS["rank"]))
    track: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, COLUMNS["track"]))
    """Index into `tracks`."""
    kind: NDArray[np.int8] = field(default_factory=lambda: np.empty(0, COLUMNS["kind"]))
    """Index into `KINDS`."""
    name: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, COLUMNS["name"]))
    """Index into `names`."""
    step: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, COLUMNS["step"]))
    queued: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, COLUMNS["queued"]))
    """NaN where unknown."""
    bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, COLUMNS["bytes"]))
    task: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, COLUMNS["task"]))
    marks: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    """Per rank, in order of `marked_ranks`, when its steps began and the last ended: shape (ranks, steps + 1)."""
    peak_memory: tuple[int, ...] = ()
    """Bytes per rank; empty where unknown."""
    critical: NDArray[np.int64] | None = None
    """Positions of the spans on the critical path, in time order, if replay has found it."""
    source: Literal["predicted", "measured"] = "measured"
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    def __post_init__(self) -> None:
        for column in COLUMNS:
            length = len(getattr(self, column))
            if length != len(self.start):
                raise OffbeatError(f"timeline: column {column!r} has {length} entries, 'start' has {len(self.start)}")

    def __len__(self) -> int:
        return len(self.start)

    def __repr__(self) -> str:
        step = f", {format_seconds(self.iteration_time)} a step" if self.marks.size else ""
        return f"<Timeline, {self.source}: {len(self)} spans of {len(self.ranks)} ranks{step}>"

    def _repr_html_(self) -> str:
        """Where the step goes, for notebooks."""
        from offbeat.timeline.diagnosis import diagnose, to_html

        return f"<b>{escape(repr(self))}</b>" + (to_html(diagnose(self)) if self.marks.size else "")

    def __getitem__(self, position: int) -> Span:
        values = {column: getattr(self, column)[position].item() for column in COLUMNS}
        values["track"], values["name"] = self.tracks[values["track"]], self.names[values["name"]]
        values["kind"] = KINDS[values["kind"]]
        values["queued"] = None if np.isnan(values["queued"]) else values["queued"]
        return Span(**values)

    @property
    def spans(self) -> Iterator[Span]:
        """All spans one by one, each with rank, track, kind, name, start, end, step and bytes."""
        return (self[position] for position in range(len(self)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have spans, in order."""
        return tuple(int(rank) for rank in np.unique(self.rank))

    @cached_property
    def marked_ranks(self) -> tuple[int, ...]:
        """Rank of each row of `marks`: those that have spans, in order; 0, 1, 2 and so on where some have none."""
        rows = len(self.marks)
        return self.ranks if len(self.ranks) == rows else tuple(range(rows))

    @cached_property
    def mark_rows(self) -> NDArray[np.int64]:
        """For each span the row of `marks` of its rank; -1 if it has none."""
        marked = np.array(self.marked_ranks, "i8")
        row = np.searchsorted(marked, self.rank)
        found = row < len(marked)
        found[found] = marked[row[found]] == self.rank[found]
        return np.where(found, row, -1)

    @cached_property
    def step_seconds(self) -> NDArray[np.float64]:
        """Seconds of each step: the mean over ranks."""
        return np.diff(self.marks, axis=1).mean(axis=0) if self.marks.size else np.empty(0)

    @property
    def iteration_time(self) -> float:
        """Seconds of a typical step: the median over steps."""
        if not len(self.step_seconds):
            raise OffbeatError("timeline: no step marks, so its iteration time is unknown")
        return float(np.median(self.step_seconds))

    def select(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> "Timeline":
        """The spans where `chosen` is true, or at these positions."""
        return replace(self, critical=None, **{column: getattr(self, column)[chosen] for column in COLUMNS})

    def scaled(self, factor: float) -> "Timeline":
        """The same with every time multiplied by a factor."""
        times = {column: factor * getattr(self, column) for column in ("start", "end", "queued", "marks")}
        return replace(self, **times)

    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that determines the length of the last step, in time order."""
        from offbeat.timeline.critical import critical_positions

        positions = self.critical if self.critical is not None else critical_positions(self)
        return tuple(self[int(position)] for position in positions)

    @checked
    def save(self, path: str | PathLike[str]) -> None:
        """Writes Chrome's trace format, which Perfetto opens too; '.gz' is compressed."""
        from offbeat.timeline.chrome import write

        write(self, path)

    @classmethod
    @checked
    def load(cls, path: str | PathLike[str]) -> "Timeline":
        """Reads what `save` wrote."""
        from offbeat.timeline.chrome import read

        return read(path)


def collective_kind(name: str) -> str:
    """'all_reduce' of 'm3.all_reduce[0:64]', 'c10d::allreduce_', 'ncclDevKernel_AllReduce'; 'collective' if unknown."""
    if "barrier" in name.lower():
        return "barrier"
    found = _COLLECTIVE.search(name)
    return _BY_LETTERS[found[0].lower().replace("_", "")] if found else "collective"


class Builder:
    """Collects spans one by one and makes the columns."""

    def __init__(self, tracks: tuple[str, ...] = (COMPUTE, NETWORK)) -> None:
        self.rows: list[tuple[float, float, int, int, int, int, int, float, int, int]] = []
        self.names: dict[str, int] = {}
        self.tracks: dict[str, int] = {track: number for number, track in enumerate(tracks)}

    def add(
        self,
        rank: int,
        track: str,
        kind: Kind,
        name: str,
        start: float,
        end: float,
        *,
        step: int = -1,
        queued: float = float("nan"),
        bytes: int = 0,
        task: int = -1,
    ) -> None:
        name_index = self.names.setdefault(name, len(self.names))
        track_index = self.tracks.setdefault(track, len(self.tracks))
        self.rows.append((start, end, rank, track_index, KINDS.index(kind), name_index, step, queued, bytes, task))

    def build(
        self,
        marks: NDArray[np.float64] | None = None,
        source: Literal["predicted", "measured"] = "measured",
        notes: tuple[str, ...] = (),
    ) -> Timeline:
        values = zip(*self.rows, strict=True) if self.rows else [()] * len(COLUMNS)
        columns: dict[str, Any] = {
            name: np.array(column, dtype) for (name, dtype), column in zip(COLUMNS.items(), values, strict=True)
        }
        columns |= {} if marks is None else {"marks": marks}
        return Timeline(tuple(self.names), tuple(self.tracks), **columns, source=source, notes=notes)
