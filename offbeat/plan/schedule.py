"""Scheduler: messages and their stages → tasks in one issue order for all ranks.

The order is that of a single link which, whenever it is free, takes one of the jobs that are ready: the first to become
ready (fifo) or the one that the next forward needs first (priority). Ready times come from the segments' measured or
estimated durations. The order does not depend on the rank it is derived for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from offbeat.errors import StrategyError
from offbeat.graph.model import ITEM_BYTES
from offbeat.plan.draft import Draft, Stage
from offbeat.plan.model import Message, Segment, Task
from offbeat.strategy import Slice

_SLICED = ("all_reduce", "parameter_server", "sharded")


@dataclass(frozen=True, slots=True)
class Job:
    """One slice of one stage of one message."""

    message: int
    stage: int
    start: int
    stop: int


def schedule(draft: Draft) -> None:
    """Cuts messages into slices, puts them in order, and writes the tasks of each rank (or of the one asked for)."""
    writer = _TaskWriter(draft)
    for job in _issue_order(draft):
        writer.write(job)


def priority_order(
    ready: Sequence[float], duration: Sequence[float], urgency: Sequence[float], follows: Sequence[int]
) -> list[int]:
    """The order in which one link serves jobs that become ready at given seconds and last given seconds.

    Whenever the link is free it takes, of what is ready, the job with the smallest urgency number; ties go to the lower
    index. `follows[j]` is the job that must end before job j is ready, or -1.
    """
    dependants: dict[int, list[int]] = {}
    arrivals: list[tuple[float, int]] = []
    for job, before in enumerate(follows):
        if before >= 0:
            dependants.setdefault(before, []).append(job)
        else:
            heappush(arrivals, (ready[job], job))
    waiting: list[tuple[float, int]] = []
    order: list[int] = []
    now = 0.0
    while arrivals or waiting:
        if not waiting:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            job = heappop(arrivals)[1]
            heappush(waiting, (urgency[job], job))
        job = heappop(waiting)[1]
        order.append(job)
        now += duration[job]
        for dependant in dependants.get(job, ()):
            heappush(arrivals, (max(now, ready[dependant]), dependant))
    return order


def gradient_seconds(segments: Sequence[Segment], flops_per_second: float, bytes_per_second: float) -> dict[str, float]:
    """Seconds after the start of the step at which each variable's gradient is complete."""
    clock = 0.0
    ready = {}
    for segment in segments:
        clock += segment.estimate(flops_per_second, bytes_per_second)
        for name in segment.completes:
            ready[name] = clock
    return ready


def _issue_order(draft: Draft) -> list[Job]:
    jobs: list[Job] = []
    follows: list[int] = []
    explicit = _explicit_slices(draft)
    for message, stages in zip(draft.messages, draft.stages, strict=True):
        previous = -1
        for number, stage in enumerate(stages):
            ranges = _slices(draft, message, stage, explicit)
            jobs.extend(Job(message.index, number, start, stop) for start, stop in ranges)
            follows.extend([previous] * len(ranges))
            # A stage starts when the last slice of the one before has ended.
            previous = len(jobs) - 1
    node = min((draft.cluster.device_of(rank) for rank in draft.replicas), key=lambda node: node.peak_flops)
    ready_of = gradient_seconds(draft.segments, node.peak_flops, node.memory_bandwidth)
    ready = [max(ready_of[name] for name in draft.messages[job.message].variables) for job in jobs]
    rank_of = _explicit_ranks(draft, jobs, explicit)
    if rank_of is not None:
        urgency = rank_of
        # An explicit order is kept even where these estimates say that a job would not be ready.
        ready = [0.0] * len(jobs)
    elif draft.strategy.schedule.policy == "priority":
        first_use = draft.graph.variable_index
        urgency = [float(min(first_use[name] for name in draft.messages[job.message].variables)) for job in jobs]
    else:
        urgency = [float(job.message) for job in jobs]
    seconds = [_job_seconds(draft, job) for job in jobs]
    return [jobs[position] for position in priority_order(ready, seconds, urgency, follows)]


def _slices(draft: Draft, message: Message, stage: Stage, explicit: dict[int, list[Slice]]) -> list[tuple[int, int]]:
    elements = message.elements
    if stage.kind == "update" or message.synchronizer not in _SLICED or not message.encoder.sliceable:
        return [(0, elements)]
    if explicit:
        return sorted((item.start, item.stop) for item in explicit[message.index])
    limit = draft.strategy.schedule.slice_bytes
    count = 1 if limit is None else max(1, -(-message.bytes // limit))
    count = min(count, elements)
    edges = [part * (elements // count) + min(part, elements % count) for part in range(count + 1)]
    return list(pairwise(edges))


def _explicit_slices(draft: Draft) -> dict[int, list[Slice]]:
    """The slices an explicit schedule gives each message, checked to cover all of them."""
    order = draft.strategy.schedule.order
    if not order:
        return {}
    by_group: dict[int, list[Message]] = {}
    for message in draft.messages:
        if message.group is not None:
            by_group.setdefault(message.group, []).append(message)
    slices: dict[int, list[Slice]] = {}
    for item in order:
        messages = by_group.get(item.group, [])
        if len(messages) != 1:
            raise StrategyError(f"schedule.order: group {item.group} makes {len(messages)} messages, it must make one")
        slices.setdefault(messages[0].index, []).append(item)
    for message in draft.messages:
        covered = sorted((item.start, item.stop) for item in slices.get(message.index, ()))
        edges = [0, *(stop for _, stop in covered)]
        if edges[-1] != message.elements or any(s != e for (s, _), e in zip(covered, edges, strict=False)):
            raise StrategyError(
                f"schedule.order: group {message.group} has {message.elements} elements, "
                f"its slices {covered} do not cover them once"
            )
        if len(covered) > 1 and not (message.encoder.sliceable and message.synchronizer in _SLICED):
            raise StrategyError(f"schedule.order: group {message.group} cannot be cut into {len(covered)} slices")
    return slices


def _explicit_ranks(draft: Draft, jobs: list[Job], explicit: dict[int, list[Slice]]) -> list[float] | None:
    if not explicit:
        return None
    message_of_group = {draft.messages[index].group: index for index in explicit}
    place = {
        (message_of_group[item.group], item.start): float(position)
        for position, item in enumerate(draft.strategy.schedule.order)
    }
    # Later stages follow the first one as soon as the link is free.
    return [place.get((job.message, job.start), -1.0) if job.stage == 0 else -1.0 for job in jobs]


def _job_seconds(draft: Draft, job: Job) -> float:
    stage = draft.stages[job.message][job.stage]
    ranks, _ = max(stage.groups, key=lambda group: len(group[0]))
    if stage.kind == "update" or len(ranks) < 2:
        return 0.0
    probe = _task(draft, job, stage, ranks, None, index=0)
    slowest = draft.cluster.ring_bandwidth(ranks)
    return probe.link_bytes / slowest + draft.cluster.latency(ranks[0], ranks[-1])


class _TaskWriter:
    """Turns jobs in issue order into numbered tasks, one for each group of ranks in the job's stage."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.index = 0
        self.written: dict[tuple[int, int], list[Task]] = {}

    def write(self, job: Job) -> None:
        stage = self.draft.stages[job.message][job.stage]
        for ranks, root in stage.groups:
            index, self.index = self.index, self.index + 1
            if self.draft.rank is not None and self.draft.rank not in ranks:
                continue
            before = self.written.get((job.message, job.stage - 1), ())
            mine = frozenset(ranks)
            after = tuple(task.index for task in before if not mine.isdisjoint(task.ranks))
            if self.draft.rank is not None:
                after = tuple(task.index for task in before)
            task = _task(self.draft, job, stage, ranks, root, index=index, after=after)
            self.draft.tasks.append(task)
            self.written.setdefault((job.message, job.stage), []).append(task)


def _task(
    draft: Draft,
    job: Job,
    stage: Stage,
    ranks: tuple[int, ...],
    root: int | None,
    *,
    index: int,
    after: tuple[int, ...] = (),
) -> Task:
    message = draft.messages[job.message]
    last = job.stage == len(draft.stages[job.message]) - 1
    return Task(
        index=index,
        kind=stage.kind,  # type: ignore[arg-type]
        message=job.message,
        stage=job.stage,
        start=job.start,
        stop=job.stop,
        ranks=ranks,
        root=root,
        wire_bytes=_wire_bytes(message, stage, job, len(ranks)),
        waits_for=message.variables if job.stage == 0 else (),
        after=after,
        delivers=message.variables if last or stage.returns else (),
    )


def _wire_bytes(message: Message, stage: Stage, job: Job, participants: int) -> int:
    if stage.kind == "update":
        return 0
    share = job.stop - job.start
    if stage.returns:
        if message.synchronizer == "sharded":
            return -(-share // participants) * ITEM_BYTES[message.dtype]
        return round(message.parameter_bytes * share / message.elements)
    return round(message.gradient_bytes * share / message.elements)
