"""Time passes → how much of the machine's processors others took, and how much work it did.

A virtual machine's processors are shared with neighbours, whose work shows up as stolen time. What was measured
meanwhile is measured again; which measurement counts is decided by the theft alone, never by what was measured.
"""

import os
from pathlib import Path

QUIET = 0.02
"""Share of the processors' time below which a measurement counts as undisturbed."""
_WORKING = (0, 1, 2, 5, 6)
"""user, nice, system, interrupts: the columns of /proc/stat that are work."""
_STOLEN = 7


class Theft:
    """Begins to look at once; where the kernel does not say, nothing is stolen."""

    def __init__(self) -> None:
        self.before = _ticks()

    def share(self) -> float:
        """Of all processors' time since then, what was stolen."""
        passed = self._passed()
        return passed[_STOLEN] / max(1, sum(passed))

    def busy_seconds(self) -> float:
        """Processor time that the whole machine, kernel included, has spent on work since then."""
        passed = self._passed()
        return sum(passed[index] for index in _WORKING) / os.sysconf("SC_CLK_TCK")

    def _passed(self) -> list[int]:
        return [now - before for now, before in zip(_ticks(), self.before, strict=True)]


def _ticks() -> list[int]:
    try:
        counted = [int(value) for value in Path("/proc/stat").read_text().partition("\n")[0].split()[1 : _STOLEN + 2]]
    except (OSError, ValueError):
        counted = []
    # Some sandboxes have fewer columns.
    return counted + [0] * (_STOLEN + 1 - len(counted))
