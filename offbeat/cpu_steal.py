"""CPU steal: the share of the processors' time that other virtual machines on the same host took.

A measurement taken while much time was stolen is repeated. The steal alone decides which measurement counts, never the
measured value.
"""

from pathlib import Path

QUIET = 0.02
"""Share of the processors' time below which a measurement counts as undisturbed."""
_STEAL_COLUMN = 7


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
