"""Frontier: the non-dominated (time, memory) points of a search, each with a strategy → the one that fits a budget."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.search.frontier.algebra import frontier_reduce
from offbeat.strategy.model import Strategy
from offbeat.units import format_bytes, parse_bytes, quote


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One non-dominated way to run a training step."""

    time_seconds: float
    """Of one step."""
    memory_bytes: float
    """Peak, of the fullest device."""
    compute_seconds: float
    network_seconds: float
    strategy: Strategy | None = None
    """None while only the choices are known."""
    choices: tuple[int, ...] = ()
    """The configuration of each operator."""


@dataclass(frozen=True)
class Frontier:
    """Points by memory upwards, and so by time downwards."""

    points: tuple[FrontierPoint, ...]

    def __post_init__(self) -> None:
        for index, point in enumerate(self.points):
            for name in ("time_seconds", "memory_bytes", "compute_seconds", "network_seconds"):
                value = getattr(point, name)
                if not (math.isfinite(value) and value >= 0):
                    raise OffbeatError(f"frontier: points[{index}].{name} must be a number from 0, got {value!r}")
        for index, (point, after) in enumerate(zip(self.points, self.points[1:], strict=False), 1):
            if after.memory_bytes <= point.memory_bytes or after.time_seconds >= point.time_seconds:
                raise OffbeatError(
                    f"frontier: points[{index}] must need more memory and less time than the point before it"
                )

    @classmethod
    def of(cls, points: Iterable[FrontierPoint]) -> "Frontier":
        """The non-dominated of any points."""
        given = tuple(points)
        kept = frontier_reduce([(point.memory_bytes, point.time_seconds) for point in given])
        return cls(tuple(given[index] for index in kept))

    def point_within(self, memory: str | int) -> FrontierPoint:
        """The point with the least time among those that need at most `memory`, such as '16GiB'."""
        limit = parse_bytes(memory, "memory")
        if not self.points:
            raise OffbeatError("the frontier has no points")
        fitting = [point for point in self.points if point.memory_bytes <= limit]
        if not fitting:
            least = self.points[0].memory_bytes
            raise OffbeatError(
                f"no strategy fits in memory={quote(memory)}: the least that one needs is {format_bytes(least)} "
                f"({math.ceil(least)} bytes)"
            )
        return fitting[-1]

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
        if len(self.points) < 3:
            return self.points[-1]
        memory = _scaled_log([point.memory_bytes for point in self.points])
        time = _scaled_log([point.time_seconds for point in self.points])
        below = 1.0 - memory - time
        best = int(np.argmax(below))
        return self.points[best] if below[best] > 1e-12 else self.points[-1]

    def to_json(self) -> bytes:
        points = [
            {
                "time_seconds": point.time_seconds,
                "memory_bytes": point.memory_bytes,
                "compute_seconds": point.compute_seconds,
                "network_seconds": point.network_seconds,
                "strategy": None if point.strategy is None else orjson.loads(point.strategy.to_json()),
                "choices": list(point.choices),
            }
            for point in self.points
        ]
        return orjson.dumps({"format": 1, "points": points})

    @classmethod
    def from_json(cls, content: bytes | str, origin: str = "frontier") -> "Frontier":
        """Validates everything; the error names `origin`, the field and the value."""
        data = files.parse_json(content, origin, "frontier")
        try:
            parsed = TypeAdapter(_File).validate_python(data)
        except ValidationError as error:
            raise OffbeatError(f"{origin}: not a frontier: {files.first_problem(error)}") from None
        if parsed.format != 1:
            raise OffbeatError(f"{origin}: format must be 1, got {parsed.format}")
        points = []
        for index, raw in enumerate(parsed.points):
            strategy = None
            if raw.strategy is not None:
                strategy = Strategy.from_json(orjson.dumps(raw.strategy), f"{origin}: points[{index}].strategy")
            costs = (raw.time_seconds, raw.memory_bytes, raw.compute_seconds, raw.network_seconds)
            points.append(FrontierPoint(*costs, strategy, raw.choices))
        try:
            return cls(tuple(points))
        except OffbeatError as error:
            raise OffbeatError(f"{origin}: {error}") from None

    def save(self, path: str | PathLike[str]) -> None:
        files.write_atomic(path, self.to_json(), "frontier")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Frontier":
        return cls.from_json(files.read_bytes(path, "frontier"), origin=str(path))


@checked_dataclass(config={"extra": "forbid"})
class _FilePoint:
    time_seconds: float
    memory_bytes: float
    compute_seconds: float
    network_seconds: float
    strategy: dict[str, Any] | None = None
    choices: tuple[int, ...] = ()


@checked_dataclass(config={"extra": "forbid"})
class _File:
    format: int
    points: list[_FilePoint]


def _scaled_log(values: list[float]) -> np.ndarray:
    """Logarithms scaled to 0..1; values of 0 count as a millionth of the largest."""
    array = np.asarray(values, dtype=np.float64)
    logs = np.log(np.maximum(array, 1e-6 * array.max()))
    span = logs.max() - logs.min()
    return (logs - logs.min()) / (span or 1.0)
