"""Schedule the stages of all messages as tasks in one issue order for all ranks.

The order is that of a single link which, whenever it is free, takes one of the jobs that are ready: the first to become
ready (fifo) or the one that the next forward needs first (priority). Ready times come from the segments' measured or
estimated durations. The order does not depend on the rank it is derived for.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from offbeat.errors import StrategyError
from offbeat.plan.messages import even_ranges, root_shares
from offbeat.plan.model import Draft, Message, Plan, Stage, Task, Window, sent_per_byte
from offbeat.strategy import Shard

Ranges = list[tuple[int, int]]
"""(start, stop) of some slices."""
Slice = tuple[int, int]
"""The message that is cut, and where the slice starts."""
_SLICED = ("all_reduce", "parameter_server", "sharded", "summation_server")


def sliceable(carrier: Message | Shard) -> bool:
    """Whether a message that travels so may be cut into slices."""
    return carrier.synchronizer in _SLICED and carrier.encoder.sliceable


class Job(NamedTuple):
    """One slice of one stage of one message."""

    message: int
    stage: int
    start: int
    stop: int


def schedule(draft: Draft) -> None:
    """Cuts messages into slices, puts them in order, and writes the tasks of each rank (or of the one asked for).

    Every group of ranks in a job's stage has a task of its own; numbers count those of all ranks."""
    number, roots = count(), _Roots(draft)
    written: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for job in _issue_order(draft) if draft.strategy.fsdp is None else _order_of_units(draft):
        message, stages = draft.messages[job.message], draft.stages[job.message]
        stage, before = stages[job.stage], written[job.message, job.stage - 1]
        for ranks, root in stage.groups if stage.kind != "relay" else roots.take(job):
            index = next(number)
            if draft.rank is not None and draft.rank not in ranks:
                continue
            mine = frozenset(ranks)
            # What has a place of its own in the step waits for that, and only a sum over replicas for another task.
            follows = stage.window is None or stage.kind == "all_reduce"
            task = Task(
                index=index,
                kind=stage.kind,
                message=job.message,
                stage=job.stage,
                start=job.start,
                stop=job.stop,
                ranks=ranks,
                root=root,
                wire_bytes=_wire_bytes(message, stage, job, len(ranks)),
                waits_for=message.variables if job.stage == 0 else (),
                after=tuple(
                    t.index for t in before if follows and (draft.rank is not None or not mine.isdisjoint(t.ranks))
                ),
                delivers=message.variables if stage.returns or job.stage == len(stages) - 1 else (),
                window=stage.window,
            )
            draft.tasks.append(task)
            written[job.message, job.stage].append(task)


class _Roots:
    """Who sums each slice of a relayed message: in issue order, whoever has the least so far for its share."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.held: Counter[int] = Counter()
        self.shares: dict[tuple[int, ...], dict[int, float]] = {}

    def take(self, job: Job) -> tuple[tuple[tuple[int, ...], int], ...]:
        """The participants of one slice, the root last, and the root."""
        message, replicas = self.draft.messages[job.message], self.draft.replicas
        if message.roots not in self.shares:
            self.shares[message.roots] = root_shares(message.roots, replicas, self.draft.cluster)
        shares, size = self.shares[message.roots], job.stop - job.start
        root = min(shares, key=lambda rank: (self.held[rank] + size) / shares[rank])
        self.held[root] += size
        return (((*(rank for rank in replicas if rank != root), root), root),)


def priority_order(
    ready: Sequence[float],
    duration: Sequence[float],
    urgency: Sequence[float],
    follows: Sequence[int],
    sizes: Sequence[int] = (),
    credit: int | None = None,
) -> list[int]:
    """The order in which one link serves jobs that become ready at given seconds and last given seconds.

    Whenever the link is free it takes, of what is ready, the job with the smallest urgency number; ties go to the lower
    index. `follows[j]` is the job that must end before job j is ready, or -1. With a `credit` the link takes jobs
    before it is free, as long as those that have not ended hold no more bytes than that: ByteScheduler's order.
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
    taken: deque[tuple[float, int]] = deque()
    now = free = 0.0
    while arrivals or waiting:
        while arrivals and arrivals[0][0] <= now:
            job = heappop(arrivals)[1]
            heappush(waiting, (urgency[job], job))
        while taken and taken[0][0] <= now:
            taken.popleft()
        job = waiting[0][1] if waiting else -1
        fits = credit is not None and sum(size for _, size in taken) + sizes[job] <= credit
        if waiting and (fits or not taken):
            heappop(waiting)
            order.append(job)
            free = max(now, free) + duration[job]
            taken.append((free, sizes[job] if sizes else 0))
            for dependant in dependants.get(job, ()):
                heappush(arrivals, (max(free, ready[dependant]), dependant))
        else:
            # A job arrives, or one that has been taken ends.
            now = min([at for at, _ in arrivals[:1]] + [at for at, _ in list(taken)[:1] if waiting])
    return order


def gradient_slices(plan: Plan) -> dict[Slice, int]:
    """Bytes of each slice of the gradients, the same on every rank."""
    return {(task.message, task.start): task.wire_bytes for task in plan.communication if task.lane == "up"}


def retimed(plan: Plan, ready: Sequence[float], seconds: Callable[[int], float], use_order: Mapping[str, int]) -> Plan:
    """The plan with its gradients in the order that suits measured times.

    `ready` holds, for each message, the seconds after which its gradients are complete; `seconds` tells for how long so
    many bytes take the link; `use_order` is the place of each variable among those that forward uses. The policy
    'fifo' sends what is ready first, any other what forward uses first: an explicit order was best for the ready times
    that were predicted, and on one link this rule is PACE's for those that were measured. Slices stay as they are cut.
    All slices of the plan count, also those that other ranks reduce among themselves, so that ranks which agree on
    these numbers agree on the order.
    """
    size = gradient_slices(plan)
    held = [piece for piece in plan.issue_order if plan.messages[piece[0]].asynchronous]
    jobs = sorted(set(size) - set(held))
    if plan.strategy.schedule.policy == "fifo":
        urgency = [ready[message] for message, _ in jobs]
    else:
        unused = len(use_order)
        first_use = [min(use_order.get(name, unused) for name in message.variables) for message in plan.messages]
        urgency = [float(first_use[message]) for message, _ in jobs]
    taken = [seconds(size[job]) for job in jobs]
    sizes, credit = [size[job] for job in jobs], plan.strategy.schedule.credit_bytes
    order = priority_order([ready[message] for message, _ in jobs], taken, urgency, [-1] * len(jobs), sizes, credit)
    return plan.reordered([*(jobs[place] for place in order), *held])


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
    # Seconds after the start of the step at which each gradient is complete on the slowest device.
    node = min((draft.cluster.device_of(rank) for rank in draft.replicas), key=lambda node: node.peak_flops)
    clock, ready_of = 0.0, dict[str, float]()
    for segment in draft.segments:
        clock += segment.estimate(node.peak_flops, node.memory_bandwidth)
        ready_of |= dict.fromkeys(segment.completes, clock)
    ready = [max(ready_of[name] for name in draft.messages[job.message].variables) for job in jobs]
    if explicit:
        group_of = {draft.messages[index].group: index for index in explicit}
        order = draft.strategy.schedule.order
        place = {(group_of[item.group], item.start): float(number) for number, item in enumerate(order)}
        # Later stages follow the first one as soon as the link is free.
        urgency = [-1.0 if job.stage else place.get((job.message, job.start), -1.0) for job in jobs]
        # An explicit order is kept even where these estimates say that a job would not be ready.
        ready = [0.0] * len(jobs)
    elif draft.strategy.schedule.policy == "priority":
        first_use = draft.graph.variable_index
        urgency = [float(min(first_use[name] for name in draft.messages[job.message].variables)) for job in jobs]
    else:
        urgency = [float(job.message) for job in jobs]
    ranks, sizes = zip(*(_largest(draft, job) for job in jobs), strict=True) if jobs else ((), ())
    seconds = [_job_seconds(draft, *each) for each in zip(jobs, ranks, sizes, strict=True)]
    credit = draft.strategy.schedule.credit_bytes
    return [jobs[position] for position in priority_order(ready, seconds, urgency, follows, sizes, credit)]


def _order_of_units(draft: Draft) -> list[Job]:
    """The stages of fully sharded units as a step comes to them: before a segment what is gathered, behind it what is
    reduced, and the updates at the end."""
    placed: list[tuple[int, int, int, Job]] = []
    for message, stages in zip(draft.messages, draft.stages, strict=True):
        for number, stage in enumerate(stages):
            job = Job(message.index, number, 0, message.elements)
            window = stage.window or Window(len(draft.segments), 0, 0)
            placed.append((window.issued, int(not stage.returns), window.needed, job))
    return [job for *_, job in sorted(placed)]


def _slices(draft: Draft, message: Message, stage: Stage, explicit: dict[int, Ranges]) -> Ranges:
    elements = message.elements
    if stage.kind == "update" or not sliceable(message):
        return [(0, elements)]
    if explicit:
        return explicit[message.index]
    limit = draft.strategy.schedule.slice_bytes
    parts = min(1 if limit is None else max(1, -(-message.bytes // limit)), elements)
    return even_ranges(elements, parts)


def _explicit_slices(draft: Draft) -> dict[int, Ranges]:
    """The slices an explicit schedule gives each message, checked to cover all of them."""
    order = draft.strategy.schedule.order
    messages = Counter(message.group for message in draft.messages)
    by_group: dict[int | None, Ranges] = defaultdict(list)
    for item in order:
        if (made := messages[item.group]) != 1:
            raise StrategyError(f"schedule.order: group {item.group} makes {made} messages, it must make one")
        by_group[item.group].append((item.start, item.stop))
    slices: dict[int, Ranges] = {}
    for message in draft.messages if order else ():
        slices[message.index] = covered = sorted(by_group[message.group])
        edges = [0, *(stop for _, stop in covered)]
        if edges[-1] != message.elements or any(s != e for (s, _), e in zip(covered, edges, strict=False)):
            raise StrategyError(
                f"schedule.order: group {message.group} has {message.elements} elements, "
                f"its slices {covered} do not cover them once"
            )
        if len(covered) > 1 and not sliceable(message):
            raise StrategyError(f"schedule.order: group {message.group} cannot be cut into {len(covered)} slices")
    return slices


def _largest(draft: Draft, job: Job) -> tuple[tuple[int, ...], int]:
    """The most ranks that do a job together, and the bytes that each puts in."""
    stage = draft.stages[job.message][job.stage]
    ranks, _ = max(stage.groups, key=lambda group: len(group[0]))
    return ranks, _wire_bytes(draft.messages[job.message], stage, job, len(ranks))


def _job_seconds(draft: Draft, job: Job, ranks: tuple[int, ...], put_in: int) -> float:
    stage = draft.stages[job.message][job.stage]
    if stage.kind == "update" or len(ranks) < 2:
        return 0.0
    # Relayed slices have different roots, so that each takes a replica's link alone.
    sent = 1.0 if stage.kind == "relay" else sent_per_byte(stage.kind, len(ranks))
    seconds = put_in * sent / draft.cluster.ring_bandwidth(ranks)
    return seconds + draft.cluster.latency(ranks[0], ranks[-1])


def _wire_bytes(message: Message, stage: Stage, job: Job, participants: int) -> int:
    if stage.kind == "update":
        return 0
    share = job.stop - job.start
    if stage.returns and message.synchronizer == "sharded":
        return -(-share // participants) * message.parameter_bytes // message.elements
    if stage.kind == "all_reduce" and message.synchronizer == "sharded":
        # Over the replicas of a part that a group of ranks has reduced.
        return -(-message.gradient_bytes // len(stage.groups))
    return round((message.parameter_bytes if stage.returns else message.gradient_bytes) * share / message.elements)
