"""Frontier: the non-dominated (time, memory) points of a search, each with a strategy → the one that fits a budget."""

import math
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from os import PathLike
from typing import Annotated, Literal

import numpy as np
import orjson
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.strategy.model import ENGINES, Engine, Strategy
from offbeat.units import format_bytes, format_seconds, parse_bytes, quote

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@checked_dataclass(frozen=True, slots=True, config={"extra": "forbid"})
class FrontierPoint:
    """One non-dominated way to run a training step."""

    time_seconds: Amount
    """Of one step."""
    memory_bytes: Amount
    """Peak, of the fullest device."""
    compute_seconds: Amount
    network_seconds: Amount
    """What communication adds to the compute."""
    strategy: Strategy | None = None
    """None while only the choices are known."""
    choices: tuple[int, ...] = ()
    """The configuration of each operator."""
    engine: Engine = "split"
    """What runs it."""

    @property
    def name(self) -> str:
        """Its engine, with what is done beside to save memory."""
        return " + ".join((self.engine, *self.savings))

    @property
    def savings(self) -> tuple[str, ...]:
        """Of 'recompute' and 'accumulate' what its strategy does."""
        made = self.strategy
        done = {"recompute": made and made.recompute, "accumulate": made and made.accumulation > 1}
        return tuple(name for name, value in done.items() if value)


@checked_dataclass(config={"extra": "forbid"})
class _File:
    format: Literal[1]
    points: tuple[FrontierPoint, ...]
    title: str = ""


@dataclass(frozen=True, repr=False)
class Frontier:
    """Points by memory upwards, and so by time downwards."""

    points: tuple[FrontierPoint, ...]
    margin: float = 0.0
    """Share of a memory limit that is left free, for what the estimate does not count."""
    saved_title: str = field(default="", compare=False)

    def __repr__(self) -> str:
        ends = (self.points[0], self.points[-1]) if self.points else ()
        span = " to ".join(f"{format_bytes(p.memory_bytes)} in {format_seconds(p.time_seconds)}" for p in ends)
        return f"<{type(self).__name__}: {len(self.points)} points{f', {span}' if span else ''}>"

    def _repr_html_(self) -> str:
        """The picture, for notebooks."""
        from offbeat.search.frontier.picture import svg

        return svg(self) if self.points else escape(repr(self))

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Those that have points, in the order of `offbeat.strategy.model.ENGINES`."""
        return tuple(engine for engine in ENGINES if any(point.engine == engine for point in self.points))

    @property
    def title(self) -> str:
        """What a picture of it is called."""
        return self.saved_title or "Memory and time of one training step"

    def fastest_within(self, memory: str | int) -> FrontierPoint | None:
        """The point with the least time that leaves the margin free in `memory`, such as '16GiB'; None if none fits."""
        limit = parse_bytes(memory, "memory") * (1 - self.margin)
        fitting = (point for point in self.points if point.memory_bytes <= limit)
        return min(fitting, key=lambda point: point.time_seconds, default=None)

    def point_within(self, memory: str | int) -> FrontierPoint:
        """As `fastest_within`, with an error if none fits."""
        point = self.fastest_within(memory)
        if point is None:
            raise too_little(memory, self.points, self.margin)
        return point

    def min_time(self, memory: str | int) -> Strategy:
        """The strategy with the least time among those that need at most `memory`."""
        point = self.point_within(memory)
        if point.strategy is None:
            raise OffbeatError(
                f"the frontier's point of {format_bytes(point.memory_bytes)} has no strategy, only choices"
            )
        return point.strategy

    @property
    def turning_point(self) -> FrontierPoint:
        """Where more memory stops buying much time: the knee of the frontier.

        It is the point farthest below the straight line between both ends, with memory and time as logarithms and each
        range scaled to 1. With no point below the line, it is the end of least time."""
        if not self.points:
            raise OffbeatError("the frontier has no points")
        memory = _scaled_log([point.memory_bytes for point in self.points])
        time = _scaled_log([point.time_seconds for point in self.points])
        below = 1.0 - memory - time
        best = int(np.argmax(below))
        return self.points[best] if len(self.points) > 2 and below[best] > 1e-12 else self.points[-1]

    def to_json(self) -> bytes:
        return orjson.dumps(
            _File(1, self.points, self.title), default=lambda strategy: orjson.loads(strategy.to_json())
        )

    @staticmethod
    def from_json(content: bytes | str, origin: str = "frontier") -> "Frontier":
        """Validates everything; the error names `origin`, the field and the value."""
        with files.problems_named(f"{origin}: not a frontier"):
            parsed = TypeAdapter(_File).validate_python(files.parse_json(content, origin, "frontier"))
        for index, (point, after) in enumerate(pairwise(parsed.points), 1):
            if after.memory_bytes <= point.memory_bytes or after.time_seconds >= point.time_seconds:
                raise OffbeatError(
                    f"{origin}: points[{index}] must need more memory and less time than the point before it"
                )
        return Frontier(parsed.points, saved_title=parsed.title)

    def save(self, path: str | PathLike[str]) -> None:
        files.write_atomic(path, self.to_json(), "frontier")

    @staticmethod
    def load(path: str | PathLike[str]) -> "Frontier":
        return Frontier.from_json(files.read_bytes(path, "frontier"), origin=str(path))


def too_little(memory: str | int, points: tuple[FrontierPoint, ...], margin: float, where: str = "") -> OffbeatError:
    """The error that says how much memory the smallest of these points needs."""
    if not points:
        return OffbeatError("the frontier has no points")
    least = math.ceil(min(point.memory_bytes for point in points) / (1 - margin))
    return OffbeatError(
        f"no strategy{where} fits in memory={quote(memory)}: the least that one needs is {format_bytes(least)} "
        f"({least} bytes), with a margin of {margin:.0%}"
    )


def _scaled_log(values: list[float]) -> np.ndarray:
    """Logarithms scaled to 0..1; values of 0 count as a millionth of the largest."""
    array = np.asarray(values, dtype=np.float64)
    logs = np.log(np.maximum(array, 1e-6 * array.max()))
    span = logs.max() - logs.min()
    return (logs - logs.min()) / (span or 1.0)
