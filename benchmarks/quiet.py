"""Which of repeated measurements count: those with the least CPU steal (offbeat.cpu_steal)."""

import os

from offbeat import cpu_steal

QUIET = cpu_steal.QUIET
_WORKING = (0, 1, 2, 5, 6)
"""Columns of /proc/stat that are work: user, nice, system, irq, softirq."""


class CpuSteal(cpu_steal.CpuSteal):
    """CPU steal on which all ranks of a process group agree."""

    def busy_seconds(self) -> float:
        """Processor time that the whole machine, kernel included, has spent on work."""
        ticks = self.ticks()
        return sum(ticks[column] for column in _WORKING) / os.sysconf("SC_CLK_TCK")

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
