"""When gradients really become ready → a better issue order, agreed by all ranks.

Estimates made before the job started know nothing of the load it runs under. So the first steps are timed in place:
when each parcel is complete, in which order forward uses variables, and what a collective costs (PACE's linear fit).
The order is rebuilt from that twice, because the first rebuild changes the load, and again whenever the times have
drifted.
"""

import logging
import time
from typing import TYPE_CHECKING

import torch

from offbeat.plan.schedule import priority_order
from offbeat.runtime.channel import Channel, wait

if TYPE_CHECKING:
    from offbeat.runtime.engine import Engine

log = logging.getLogger("offbeat")

REBUILD_AT = (4, 8)
"""Steps after which the order is rebuilt in any case."""
CHECK_EVERY = 50
"""Steps between two looks at whether the times have drifted."""
DRIFT = 0.15
"""Share of the backward time by which ready times may move before the order is rebuilt."""
LONG_ENOUGH_SECONDS = 0.02
SLACK_SECONDS = 1e-3
"""A task that is planned earlier than its gradient is ready stalls the whole queue, one planned later costs little."""


def fit_link(channel: Channel, device: torch.device) -> tuple[float, float]:
    """(seconds per all-reduce, seconds per byte) of a linear fit through a small and a large one, the slowest rank's.

    The large one grows until it takes long enough to time, because queues along the way swallow short bursts.
    """
    if channel.size == 1:
        return 0.0, 0.0
    small, large = 2**14, 2**18
    least, most = _time_all_reduce(channel, device, small), 0.0
    while most < LONG_ENOUGH_SECONDS and large < 2**26:
        large *= 4
        most = _time_all_reduce(channel, device, large)
    per_byte = max(0.0, (most - least) / (large - small))
    return max(0.0, least - per_byte * small), per_byte


def _time_all_reduce(channel: Channel, device: torch.device, size: int) -> float:
    tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)
    runs = []
    for _ in range(3):
        begin = time.perf_counter()
        wait(channel.all_reduce(tensor))
        _synchronise(device)
        runs.append(time.perf_counter() - begin)
    best = torch.tensor([min(runs)], dtype=torch.float64, device=device)
    return float(largest(channel, best)[0])


class Retimer:
    """Watches an engine's ready times and keeps its issue order fit for them."""

    def __init__(self, engine: "Engine", use_order: dict[str, int], device: torch.device) -> None:
        self.engine = engine
        self.use_order = use_order
        """Place of each variable in the order in which forward uses them."""
        self.device = device
        self.latency, self.per_byte = fit_link(engine.channels.control, device)
        self.seen: list[list[float]] = []
        self.planned: list[float] = []

    def after_step(self) -> None:
        engine = self.engine
        self.seen.append(list(engine.ready_seconds))
        if engine.steps in REBUILD_AT or (engine.steps > REBUILD_AT[-1] and engine.steps % CHECK_EVERY == 0):
            ready = self._agreed_ready()
            if self._drifted(ready):
                self._rebuild(ready)
            self.seen.clear()

    def _agreed_ready(self) -> list[float]:
        """Seconds after which each parcel was complete on the slowest rank, in the median of the steps seen."""
        median = torch.tensor(self.seen, dtype=torch.float64).median(dim=0).values.to(self.device)
        channel = self.engine.channels.control
        return largest(channel, median).tolist() if channel.size > 1 else median.tolist()

    def _drifted(self, ready: list[float]) -> bool:
        if not self.planned:
            return True
        moved = max(abs(now - then) for now, then in zip(ready, self.planned, strict=True))
        return self.engine.steps in REBUILD_AT or moved > DRIFT * max(ready)

    def _rebuild(self, ready: list[float]) -> None:
        self.planned = ready
        engine = self.engine
        tasks = sorted(engine.order, key=lambda task: (task.message, task.start))
        last = len(self.use_order)
        if engine.plan.strategy.schedule.policy == "fifo":
            urgency = [ready[task.message] for task in tasks]
        else:
            urgency = [
                float(min(self.use_order.get(name, last) for name in engine.plan.messages[task.message].variables))
                for task in tasks
            ]
        order = priority_order(
            [ready[task.message] + SLACK_SECONDS for task in tasks],
            [self.latency + self.per_byte * task.wire_bytes for task in tasks],
            urgency,
            [-1] * len(tasks),
        )
        engine.order = [tasks[position] for position in order]
        log.debug("offbeat rebuilt its issue order after step %d", engine.steps)


def largest(channel: Channel, tensor: torch.Tensor) -> torch.Tensor:
    """The largest value over all ranks, bit for bit the same on each."""
    gathered = tensor.new_empty(channel.size * tensor.numel())
    wait(channel.all_gather(gathered, tensor))
    return gathered.view(channel.size, -1).max(dim=0).values


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
