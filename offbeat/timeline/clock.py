"""Timestamps of a job on the clock of the device that does the work: the host or the GPU.

A host that trains on a GPU runs ahead of it. Its own clock says when work was put on a stream, not when that was done.
So a `DeviceClock` marks the stream with a CUDA event, whose time is known once the GPU has come to it. A mark takes
the host some microseconds, for which a GPU that waits for it waits too. So moments that need not be exact (`about_now`)
lie between two marks, by the host's clock. Both clocks give seconds of `time.perf_counter`.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch

ANCHORS = 5
"""Comparisons of a GPU's clock with the host's; the quickest one counts."""
BASE_MILLISECONDS = 500.0
"""CUDA gives the time between two events in single precision, so the one to count from must not be far away."""


FINE_SECONDS, COARSE_SECONDS = 2e-4, 1e-3
"""The host's seconds between marks for moments that need not be exact: while it is ahead of the GPU, and while not."""
HOST_LATE_SECONDS = 5e-5
"""A GPU that comes to a mark sooner than this after the host has put it there was waiting for the host."""


class DeviceMoment:
    """A mark on a stream: when the GPU comes to it, and when the host put it there."""

    unused: ClassVar[dict[int, list[torch.cuda.Event]]] = defaultdict(list)
    """Unused events of marks, by device. Creating one costs the host more than reusing one."""

    __slots__ = ("device", "event", "host", "seconds")

    def __init__(self) -> None:
        self.seconds: float | None = None
        """Once somebody has asked for it: CUDA takes its time to tell."""
        self.device = torch.cuda.current_device()
        try:
            self.event = self.unused[self.device].pop()
        except IndexError:
            self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()
        self.host = time.perf_counter()

    def __del__(self) -> None:
        self.unused[self.device].append(self.event)


@dataclass(eq=False, slots=True)
class Gap:
    """What lies between two marks on a stream; the second one may still be missing."""

    before: DeviceMoment
    after: DeviceMoment | None = None


@dataclass(eq=False, slots=True)
class BetweenMarks:
    """A moment of a stream at which there is no mark."""

    gap: Gap
    host: float


Moment = float | DeviceMoment | BetweenMarks
"""Seconds of the host's clock, or of a GPU's, known later."""


class Clock(Protocol):
    """Tells moments, and later their times."""

    def now(self) -> Moment:
        """This moment of the stream that computes."""

    def about_now(self) -> Moment:
        """The same, and cheaper, where its place among other moments may be a little off."""

    def reached(self, moment: Moment) -> bool:
        """Whether its time is known."""

    def wait(self, moment: Moment) -> None:
        """Blocks the host until it is."""

    def seconds(self, moment: Moment) -> float:
        """Its time, which must be known."""


class HostClock:
    """The clock of a job that computes on processors."""

    def now(self) -> float:
        return time.perf_counter()

    about_now = now

    def reached(self, moment: Moment) -> bool:
        return True

    def wait(self, moment: Moment) -> None:
        pass

    def seconds(self, moment: Moment) -> float:
        assert isinstance(moment, float)
        return moment


class DeviceClock:
    """The clock of one GPU."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            found = []
            for _ in range(ANCHORS):
                before = time.perf_counter()
                mark = DeviceMoment()
                mark.event.synchronize()
                after = time.perf_counter()
                found.append((after - before, (before + after) / 2, mark))
        _, self.base_seconds, self.base = min(found, key=lambda anchor: anchor[0])
        self.gap = Gap(self.base)
        """Behind the last mark."""

    def now(self) -> DeviceMoment:
        mark = DeviceMoment()
        self.gap.after = mark
        self.gap = Gap(mark)
        return mark

    def about_now(self) -> Moment:
        host, last = time.perf_counter(), self.gap.before
        passed = host - last.host
        if passed < FINE_SECONDS or (passed < COARSE_SECONDS and last.event.query()):
            return BetweenMarks(self.gap, host)
        return self.now()

    def reached(self, moment: Moment) -> bool:
        if isinstance(moment, BetweenMarks):
            return moment.gap.after is not None and moment.gap.after.event.query()
        return isinstance(moment, float) or moment.event.query()

    def wait(self, moment: Moment) -> None:
        if isinstance(moment, BetweenMarks):
            moment = moment.gap.after or self.now()
        if not isinstance(moment, float):
            moment.event.synchronize()

    def seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        if isinstance(moment, BetweenMarks):
            before, after = moment.gap.before, moment.gap.after
            if after is None or after.seconds is None:
                # Whoever knows that the GPU has come to this moment may not know it of the mark behind.
                self.wait(moment)
                after = moment.gap.after
            assert after is not None
            share = (moment.host - before.host) / max(after.host - before.host, 1e-9)
            start = self.seconds(before)
            return start + min(share, 1.0) * (self.seconds(after) - start)
        if moment.seconds is None:
            passed = self.base.event.elapsed_time(moment.event)
            moment.seconds = self.base_seconds + passed * 1e-3
            if passed > BASE_MILLISECONDS:
                self.base, self.base_seconds = moment, moment.seconds
        return moment.seconds


@cache
def clock_of(device: torch.device) -> Clock:
    """The clock by which work on a device is timed."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def in_seconds(value: Any, clock: Clock) -> Any:
    """The value with every mark in its lists, tuples and dicts replaced by its time."""
    if isinstance(value, DeviceMoment | BetweenMarks):
        return clock.seconds(value)
    if isinstance(value, list | tuple):
        return [in_seconds(each, clock) for each in value]
    if isinstance(value, dict):
        return {key: in_seconds(each, clock) for key, each in value.items()}
    return value


def host_late_seconds(moments: Sequence[Moment], clock: Clock) -> float:
    """Seconds, between consecutive marks on a stream, at whose end the GPU had nothing left to do."""
    late = 0.0
    for before, moment in pairwise(mark for mark in moments if isinstance(mark, DeviceMoment)):
        if clock.seconds(moment) - moment.host < HOST_LATE_SECONDS:
            late += clock.seconds(moment) - clock.seconds(before)
    return late
