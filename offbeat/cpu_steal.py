"""Processor time: what other virtual machines on the same host took, and what this process got.

A measurement taken while much time was stolen is repeated. The steal alone decides which measurement counts, never the
measured value.
"""

import time
from pathlib import Path
from typing import NamedTuple

QUIET = 0.02
"""Share of the processors' time below which a measurement counts as undisturbed."""
_STEAL_COLUMN = 7


class ProcessorTime(NamedTuple):
    """Seconds since some moment in the past."""

    helpers: float
    """In which this process's other threads ran, such as those of gloo, and the kernel for them."""
    delayed: float
    """In which this thread could have run, but no processor was free; 0 where the kernel does not tell."""

    @classmethod
    def now(cls) -> "ProcessorTime":
        try:
            delayed = int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            delayed = 0.0
        return cls(time.process_time() - time.thread_time(), delayed)

    def since(self, before: "ProcessorTime") -> "ProcessorTime":
        """What has been added since then."""
        return ProcessorTime(self.helpers - before.helpers, max(0.0, self.delayed - before.delayed))


class CpuSteal:
    """Counts from its construction; zero if the kernel does not report steal."""

    def __init__(self) -> None:
        self.before = _ticks()

    def share(self) -> float:
        """Stolen share of all processors' time."""
        passed = self.ticks()
        return passed[_STEAL_COLUMN] / max(1, sum(passed))

    def ticks(self) -> list[int]:
        """Clock ticks by column of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal."""
        return [now - before for now, before in zip(_ticks(), self.before, strict=True)]


def _ticks() -> list[int]:
    columns = _STEAL_COLUMN + 1
    try:
        counted = [int(value) for value in Path("/proc/stat").read_text().partition("\n")[0].split()[1 : columns + 1]]
    except (OSError, ValueError):
        counted = []
    # Some sandboxes have fewer columns.
    return counted + [0] * (columns - len(counted))
