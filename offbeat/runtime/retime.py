"""Build a better issue order from measured ready times, agreed by all ranks.

Estimates made before the job started know nothing of the load it runs under. So the first steps are timed in place:
when each message is complete, in which order forward uses variables, what a collective costs on an idle link (PACE's
linear fit), and how much more the job's own take. The order is rebuilt from that several times, because a rebuild
changes the load, and again whenever the times have drifted.
"""

import logging
import time
from collections.abc import Generator, Sequence
from math import inf
from statistics import median

import torch

from offbeat.plan import Task
from offbeat.plan.schedule import Slice, gradient_slices, retimed
from offbeat.runtime.comm import Channel
from offbeat.runtime.engine import Engine
from offbeat.timeline import Kind
from offbeat.timeline.clock import Clock, Moment

log = logging.getLogger("offbeat")

REBUILD_AT = (4, 8, 20)
"""Steps after which the order is rebuilt in any case."""
CHECK_EVERY = 50
"""Steps between two checks for drifted times."""
OBSERVED_STEPS = 4
"""Steps before every check, in which collectives are timed."""
DRIFT = 0.15
"""Share of the backward time by which ready times may move, and of their own by which collectives may become longer or
shorter, before the order is rebuilt."""
LONG_ENOUGH_SECONDS = 0.02
SLACK_SECONDS = 1e-3
"""A task that is planned earlier than its gradient is ready stalls the whole queue, one planned later costs little."""
UNKNOWN = -1.0
"""Less than the seconds of any collective."""
MOST_SLOWED = 4.0
"""Maximum factor by which the job's collectives are assumed to differ from those on an idle link."""


def fit_link(channel: Channel, device: torch.device) -> tuple[float, float]:
    """(seconds per all-reduce, seconds per byte): a linear fit through a small and a large one, of the slowest rank."""
    measuring = link_fit(channel, device)
    while True:
        try:
            next(measuring)
        except StopIteration as end:
            return end.value


def link_fit(channel: Channel, device: torch.device) -> Generator[None, None, tuple[float, float]]:
    """What `fit_link` does, one all-reduce at a time.

    The large one grows until it takes long enough to time, because queues along the way swallow short bursts.
    """
    if channel.size == 1:
        return 0.0, 0.0
    small, large = 2**14, 2**18
    least, most = (yield from _time_all_reduce(channel, device, small)), 0.0
    while most < LONG_ENOUGH_SECONDS and large < 2**26:
        large *= 4
        most = yield from _time_all_reduce(channel, device, large)
    per_byte = max(0.0, (most - least) / (large - small))
    return max(0.0, least - per_byte * small), per_byte


def _time_all_reduce(channel: Channel, device: torch.device, size: int) -> Generator[None, None, float]:
    tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)
    runs = []
    for _ in range(3):
        begin = time.perf_counter()
        channel.all_reduce(tensor).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        runs.append(time.perf_counter() - begin)
        yield
    best = torch.tensor([min(runs)], dtype=torch.float64, device=device)
    return float(largest(channel, best)[0])


class CollectiveTimings:
    """An engine's timekeeper: learns how long its gradients keep the link busy."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.spans: dict[int, list[tuple[Slice, Moment, Moment]]] = {}
        """By step: each slice, when it was issued, and when it had arrived."""

    def communication(self, step: int, task: Task, queued: Moment, issued: Moment, finished: Moment) -> None:
        if task.lane == "up":
            self.spans.setdefault(step, []).append(((task.message, task.start), issued, finished))

    def local(self, kind: Kind, messages: tuple[int, ...], start: Moment, end: Moment) -> None:
        """Only collectives on the link count here."""

    def busy(self, step: int, slices: Sequence[Slice], sent: int) -> list[float]:
        """Seconds by which each slice prolongs the time for which this rank waits for the link; infinite for others'
        slices, and `UNKNOWN` for all unless the `sent` slices of this rank have arrived."""
        # The backend's threads add to it meanwhile.
        spans = list(self.spans.get(step, ()))
        if len(spans) < sent or not all(self.clock.reached(arrived) for *_, arrived in spans):
            return [UNKNOWN] * len(slices)
        added, reached = dict.fromkeys(slices, inf), -inf
        for issued, arrived, each in sorted((self.clock.seconds(i), self.clock.seconds(a), s) for s, i, a in spans):
            added[each] = max(0.0, arrived - max(issued, reached))
            reached = max(reached, arrived)
        return [added[each] for each in slices]


def slowdown(busy: Sequence[Sequence[float]], expected: Sequence[float]) -> float | None:
    """Median of (seconds busy / seconds `expected`) over the steps of which every rank knows; None if there is none."""
    ratios = []
    for step in busy:
        sent = [place for place, seconds in enumerate(step) if seconds < inf]
        usual = sum(expected[place] for place in sent)
        if usual and UNKNOWN not in step:
            ratios.append(sum(step[place] for place in sent) / usual)
    return min(max(median(ratios), 1 / MOST_SLOWED), MOST_SLOWED) if ratios else None


class Retimer:
    """Watches an engine's ready times and keeps its issue order suited to them."""

    def __init__(
        self, engine: Engine, use_order: dict[str, int], device: torch.device, link: tuple[float, float]
    ) -> None:
        self.engine = engine
        self.use_order = use_order
        """Place of each variable in the order in which forward uses them."""
        self.device = device
        self.latency, self.per_byte = link
        self.slowdown = 1.0
        self.clock = engine.reports.clock
        self.timings = CollectiveTimings(self.clock)
        self.seen: list[tuple[Moment, list[Moment]]] = []
        """Of the steps observed: when backward began, and when each message was complete."""
        self.planned: list[float] = []
        self._observe()

    def after_step(self) -> None:
        engine = self.engine
        if engine.reports.timekeeper is not None:
            self.seen.append((engine.began, list(engine.ready)))
        if self._looks_after(engine.steps):
            ready, before = self._agreed_ready(), self.slowdown
            self._learn_slowdown()
            if self._drifted(ready, before):
                self._rebuild(ready)
            self.seen.clear()
        self._observe()

    def _looks_after(self, step: int) -> bool:
        return step in REBUILD_AT or (step > REBUILD_AT[-1] and step % CHECK_EVERY == 0)

    def _observe(self) -> None:
        """Times the collectives of the last steps before a check."""
        soon = any(self._looks_after(self.engine.steps + ahead) for ahead in range(1, OBSERVED_STEPS + 1))
        self.engine.reports.timekeeper = self.timings if soon else None

    def _agreed_ready(self) -> list[float]:
        """Seconds after which each message was complete on the slowest rank, as the median of the observed steps."""
        for moment in self.seen[-1][1]:
            # Later than these nothing must be known, and by then all collectives of the steps before have ended.
            self.clock.wait(moment)
        seconds = [
            [self.clock.seconds(moment) - self.clock.seconds(began) for moment in ready] for began, ready in self.seen
        ]
        usual = torch.tensor(seconds, dtype=torch.float64).median(dim=0).values.to(self.device)
        return largest(self.engine.channels.control, usual).tolist()

    def _drifted(self, ready: list[float], slowdown_before: float) -> bool:
        if not self.planned or self.engine.steps in REBUILD_AT:
            return True
        moved = max(abs(now - then) for now, then in zip(ready, self.planned, strict=True))
        return moved > DRIFT * max(ready) or abs(self.slowdown / slowdown_before - 1) > DRIFT

    def _learn_slowdown(self) -> None:
        """A collective begins on the wire when its last rank has issued it, so the rank that waited least counts."""
        engine, sizes = self.engine, gradient_slices(self.engine.plan)
        sent = sum(len(task.ranks) > 1 for task in engine.order)
        steps = range(engine.steps - OBSERVED_STEPS, engine.steps)
        mine = [self.timings.busy(step, list(sizes), sent) for step in steps]
        self.timings.spans.clear()
        waited = torch.tensor(mine, dtype=torch.float64, device=self.device)
        shortest = -largest(engine.channels.control, -waited.view(-1)).view_as(waited)
        expected = [self.latency + self.per_byte * size for size in sizes.values()]
        self.slowdown = slowdown(shortest.tolist(), expected) or self.slowdown

    def _rebuild(self, ready: list[float]) -> None:
        self.planned = ready

        def seconds(size: int) -> float:
            return self.slowdown * (self.latency + self.per_byte * size)

        late = [moment + SLACK_SECONDS for moment in ready]
        plan = retimed(self.engine.plan, late, seconds, self.use_order)
        self.engine.follow(plan)
        self.engine.owners.tell("order", order=plan.issue_order)
        took = "offbeat rebuilt its issue order after step %d; collectives take %.2f times what they do on an idle link"
        log.debug(took, self.engine.steps, self.slowdown)


def largest(channel: Channel, tensor: torch.Tensor) -> torch.Tensor:
    """The largest value over all ranks, bit for bit the same on each."""
    if channel.size == 1:
        return tensor
    gathered = tensor.new_empty(channel.size * tensor.numel())
    channel.all_gather(gathered, tensor).wait()
    return gathered.view(channel.size, -1).max(dim=0).values
