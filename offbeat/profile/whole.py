"""Time a training step as a whole, and predict it with some of its blocks computed in other ways.

    S' = S + max(H + sum_b h'_b - h_b, D + sum_b d'_b - d_b) - max(H, D)                            `StepTimes.changed`

S is the step as measured, H and D what it takes the host to launch it and the device to compute it; h and d are the
same of a block as it is, h' and d' in the other way (`BlockTimes`). Only differences of blocks count, so what lies
outside of them, and what all have in common, need not be known.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from offbeat.graph.model import BlockTimes, Way
from offbeat.profile.stopwatch import Timer, time_laps, wait_for

RUNS, STEPS = 5, 4
"""Of so many steps each, one after another."""


@dataclass(frozen=True)
class StepTimes:
    """One training step on one device."""

    seconds: float
    """Among others, which the host launches without waiting for the device."""
    host: float
    """Seconds of launching alone."""
    device: float
    """Seconds of the device's work alone."""

    def changed(self, changes: Iterable[tuple[BlockTimes, Way]]) -> float:
        """Predicted seconds with these blocks computed in these ways."""
        host, device = self.host, self.device
        for block, way in changes:
            before, after = block.seconds["eager"], block.seconds[way]
            device += sum(after) - sum(before)
            launching = block.host or block.seconds
            host += sum(launching[way]) - sum(launching["eager"])
        return self.seconds + max(host, device) - max(self.host, self.device)


def time_step(step: Callable[[Timer], Any], device: torch.device) -> StepTimes:
    """The times of a step, which makes its calls (forward, backward, update) through the timer it is given."""
    laps = time_laps(step, device)
    runs: list[float] = []
    for _ in range(RUNS):
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(STEPS):
            step(lambda call: call())
        wait_for(device)
        runs.append((time.perf_counter() - begin) / STEPS)
    return StepTimes(median(runs), sum(lap.host for lap in laps), sum(lap.device for lap in laps))
