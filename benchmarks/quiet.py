"""How much of the machine others, and we ourselves, took while something was measured.

A virtual machine's processors are shared with neighbours, whose work shows up as stolen time. Measurements made
meanwhile are repeated; which of them count is decided by the theft alone, never by what was measured.
"""

import os
from pathlib import Path

WORKING = (0, 1, 2, 5, 6)
"""user, nice, system, interrupts: the columns of /proc/stat that are work."""
QUIET = 0.02
"""Share of the processors' time below which a measurement counts as undisturbed."""


class Theft:
    """Begins to look at once; `share()` is what was stolen since then."""

    def __init__(self) -> None:
        self.before = _ticks()

    def share(self) -> float:
        passed = [now - before for now, before in zip(_ticks(), self.before, strict=True)]
        return passed[7] / max(1, sum(passed))

    def busy_seconds(self) -> float:
        """Processor time that the whole machine, kernel included, has spent on work since then."""
        passed = [now - before for now, before in zip(_ticks(), self.before, strict=True)]
        return sum(passed[index] for index in WORKING) / os.sysconf("SC_CLK_TCK")

    def agreed_share(self) -> float:
        """Rank 0's, on every rank of the process group, so that all decide alike."""
        import torch
        import torch.distributed as dist

        share = torch.tensor([self.share()])
        dist.broadcast(share, 0)
        return float(share)


def quietest(measured: list[tuple[float, float]], count: int) -> list[float]:
    """Of (stolen share, value) the values of the `count` least disturbed."""
    return [value for _, value in sorted(measured, key=lambda pair: pair[0])[:count]]


def enough(blocks: dict[str, list[tuple[float, float]]], count: int) -> bool:
    """Whether every variant has been measured often enough, undisturbed or twice as often."""
    return all(
        len(measured) >= 2 * count or sum(share < QUIET for share, _ in measured) >= count
        for measured in blocks.values()
    )


def _ticks() -> list[int]:
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return [0] * 8
    return [int(value) for value in first]
