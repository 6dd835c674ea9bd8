"""Replay a TaskGraph: when each task starts and ends (dPRO section 4.3, driven by events).

Each device has a queue and a clock. The paper picks the device whose clock is smallest and runs the head of its queue;
with priorities that is wrong, because a more urgent task may become ready before the device is free. Here time never
goes back: at time t a free device takes, among the tasks ready by t, the one with the lowest priority number, then the
earliest ready, then by the graph's tie keys. All that becomes ready at t is known before any device chooses: a task
that takes no time ends at t, so such tasks run first, in rounds in which every free device whose choice is one of them
runs it. `tests/unit/replay_reference.py` says the same in plain Python.

One heap holds the devices by the next moment at which each can start something (an event that an earlier one has
replaced is skipped); each device has a heap of its tasks by ready time and, if there are priorities, one of those that
are ready by now. Tasks on no device need no event: their times are known as soon as those of all they wait for are.
"""

# ruff: noqa: PLR0917 - compiled code passes many arrays one by one for free, and in a tuple at a high price

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from numba.core.options import DefaultOptions
except ImportError:
    DefaultOptions = None

from offbeat.compiled import compiled
from offbeat.simulate.taskgraph import TIE_KEYS, Floats, Ints, TaskGraph


def _uncounted(function: Any, **options: bool) -> Any:
    """Numba without reference counts: counting the arrays that helpers pass on takes four fifths of the time, and they
    allocate nothing. The option is not documented; where it is missing, the kernel is slower and otherwise the same."""
    if hasattr(DefaultOptions, "_nrt"):
        options["_nrt"] = False
    return compiled(function, **options)


def _inlined(function: Any) -> Any:
    """Each array is seven machine words, so that calling a helper with a dozen of them costs more than what it does."""
    return _uncounted(function, forceinline=True)


# Rows of structures, not one array per field: what the loop reads of a task or a device then shares a cache line.
_TASK = np.dtype(
    [("ready", "f8"), ("duration", "f8"), ("lag", "f8"), ("priority", "f8"), ("waits_for", "i4"), ("device", "i4")]
)
# `choice` is when a device chooses next: -inf while it is choosing, inf while nothing is queued for it.
_DEVICE = np.dtype([("free", "f8"), ("choice", "f8"), ("base", "i8"), ("later", "i4"), ("now", "i4")])
# Entries of a heap: a device's tasks by ready time or by priority; devices by the time of an event.
_QUEUED = np.dtype([("key", "f8"), ("task", "i4"), ("_", "i4")])
# Entries of the kernel's counters: events in the heap, tasks started, whether a tie was left open.
_EVENTS, _STARTED, _OPEN = 0, 1, 2
# How a queue orders ties: not at all, by giving up, by tie_keys, by separated_keys.
_ANY, _NONE, _KEYS, _SEPARATED = -1, 0, 1, 2


@dataclass(frozen=True, eq=False)
class Replay:
    """When each task of a graph runs, in seconds from the start of the step."""

    graph: TaskGraph
    start: Floats
    end: Floats
    order: Ints
    """Tasks in the order in which they were started on their devices; those of one device follow each other in time."""

    @cached_property
    def iteration_time(self) -> float:
        """Seconds until the last task has ended and its successors would know."""
        return float((self.end + self.graph.lag_seconds).max(initial=0.0))

    @cached_property
    def binding(self) -> Ints:
        """For each task the one that fixed its start: the dependency seen last, or the task before it on its device if
        it was ready earlier; -1 if it started at once."""
        graph, devices = self.graph, len(self.graph.device_first) - 1
        tasks = graph.first_edge, graph.successor, graph.dense_device, graph.duration_seconds, graph.lag_seconds
        return _bind(*tasks, self.start, self.end, self.order, devices)

    def critical_path(self) -> Ints:
        """Tasks in time order, each of which fixed the start of the next; the last is the last to end."""
        if not len(self.graph):
            return np.empty(0, np.int32)
        path = [int(np.argmax(self.end + self.graph.lag_seconds))]
        while (cause := int(self.binding[path[-1]])) >= 0:
            path.append(cause)
        return np.array(path[::-1], np.int32)


def replay(graph: TaskGraph) -> Replay:
    """The step as it would run. The result does not depend on the order in which tasks and edges were listed."""
    start, end, order = np.zeros(len(graph)), np.zeros(len(graph)), np.zeros(len(graph), np.int32)
    later, now = (np.empty(length, _QUEUED) for length in (len(graph), 0 if graph.priority is None else len(graph)))
    # A device gets an event when a task is queued for it, and another when it has started one.
    events, stack = np.empty(2 * len(graph), _QUEUED), np.empty(max(1, len(graph)), np.int32)
    batch = np.empty((2, len(graph.device_first)), np.int32)
    edges = graph.first_edge, graph.successor
    for level, keys in _levels(graph):
        tasks, devices = np.zeros(len(graph), _TASK), np.zeros(len(graph.device_first) - 1, _DEVICE)
        tasks["duration"], tasks["lag"] = graph.duration_seconds, graph.lag_seconds
        tasks["waits_for"], tasks["device"] = graph.indegree, graph.dense_device
        tasks["priority"] = 0.0 if graph.priority is None else graph.priority
        devices["base"], devices["choice"] = graph.device_first[:-1], np.inf
        counters = np.zeros(3, np.int64)
        sources, loose = np.flatnonzero(graph.indegree == 0), _ANY if len(now) else level
        _begin(sources, *edges, tasks, devices, later, events, loose, keys, start, end, stack, counters)
        _run(*edges, tasks, devices, later, now, events, level, keys, start, end, order, stack, counters, batch)
        if not counters[_OPEN]:
            break
    return Replay(graph, start, end, order[: counters[_STARTED]])


def _levels(graph: TaskGraph) -> Iterator[tuple[int, NDArray[np.void]]]:
    """Ways to order ties, each tried if the one before leaves one open. Keys cost more than a replay, so they are made
    only when a tie shows up, and kept."""
    known = vars(graph)
    if "tie_keys" not in known:
        yield _NONE, np.empty(0, TIE_KEYS)
    if "separated_keys" not in known:
        yield _KEYS, graph.tie_keys
    yield _SEPARATED, graph.separated_keys


@_uncounted
def _breaks_tie(a, b, tasks, level, ties, counters):
    """Whether task a leaves a queue before task b of the same key (ready time or priority)."""
    if level == _ANY:
        return False
    if tasks[a].ready != tasks[b].ready:
        return tasks[a].ready < tasks[b].ready
    if level == _NONE:
        counters[_OPEN] = 1
        return False
    if ties[a].tail_seconds != ties[b].tail_seconds:
        return ties[a].tail_seconds > ties[b].tail_seconds
    if ties[a].structure != ties[b].structure:
        return ties[a].structure < ties[b].structure
    if ties[a].finest != ties[b].finest:
        if level == _KEYS:
            counters[_OPEN] = 1
        return ties[a].finest < ties[b].finest
    return a < b


@_inlined
def _push(queue, base, size, key, task, tasks, level, ties, counters):
    """Adds to the binary heap of `size` entries that lies in `queue` from `base` on."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        above = queue[base + parent]
        if above.key < key:
            break
        if above.key == key and not _breaks_tie(task, above.task, tasks, level, ties, counters):
            break
        queue[base + at].key = above.key
        queue[base + at].task = above.task
        at = parent
    queue[base + at].key = key
    queue[base + at].task = task


@_inlined
def _pop(queue, base, size, tasks, level, ties, counters):
    """Takes the first task out of a heap of `size` entries."""
    first = queue[base].task
    last = size - 1
    if last <= 0:
        return first
    key, task = queue[base + last].key, queue[base + last].task
    at, child = 0, 1
    while child < last:
        if child + 1 < last:
            left, right = queue[base + child], queue[base + child + 1]
            if right.key < left.key or (
                right.key == left.key and _breaks_tie(right.task, left.task, tasks, level, ties, counters)
            ):
                child += 1
        least = queue[base + child]
        if least.key > key:
            break
        if least.key == key and not _breaks_tie(least.task, task, tasks, level, ties, counters):
            break
        queue[base + at].key = least.key
        queue[base + at].task = least.task
        at = child
        child = 2 * at + 1
    queue[base + at].key = key
    queue[base + at].task = task
    return first


@_inlined
def _wake(device, time, tasks, devices, events, ties, counters):
    """Lets a device choose at `time`, unless it does so now or earlier. A later event of the device becomes void."""
    if time < devices[device].choice:
        devices[device].choice = time
        _push(events, 0, counters[_EVENTS], time, device, tasks, _ANY, ties, counters)
        counters[_EVENTS] += 1


@_inlined
def _enqueue(task, moment, tasks, devices, later, events, level, ties, counters):
    device = tasks[task].device
    _push(later, devices[device].base, devices[device].later, moment, task, tasks, level, ties, counters)
    devices[device].later += 1
    _wake(device, max(moment, devices[device].free), tasks, devices, events, ties, counters)


@_inlined
def _release(task, first_edge, successor, tasks, devices, later, events, level, ties, start, end, stack, counters):
    """Updates the successors of a task whose times are known; those on no device get their times at once."""
    stack[0] = task
    height = 1
    while height:
        height -= 1
        i = stack[height]
        seen = end[i] + tasks[i].lag
        for e in range(first_edge[i], first_edge[i + 1]):
            s = successor[e]
            moment = max(tasks[s].ready, seen)
            tasks[s].ready = moment
            left = tasks[s].waits_for - 1
            tasks[s].waits_for = left
            if left == 0:
                if tasks[s].device >= 0:
                    _enqueue(s, moment, tasks, devices, later, events, level, ties, counters)
                else:
                    start[s] = moment
                    end[s] = moment + tasks[s].duration
                    stack[height] = s
                    height += 1


@_inlined
def _head(device, moment, tasks, devices, later, now, level, ties, counters):
    """The task that a device free at `moment` would start, or -1."""
    base = devices[device].base
    if len(now) == 0:
        return later[base].task if devices[device].later and later[base].key <= moment else -1
    while devices[device].later and later[base].key <= moment:
        task = _pop(later, base, devices[device].later, tasks, _ANY, ties, counters)
        devices[device].later -= 1
        _push(now, base, devices[device].now, tasks[task].priority, task, tasks, level, ties, counters)
        devices[device].now += 1
    return now[base].task if devices[device].now else -1


@_inlined
def _take(device, moment, tasks, devices, later, now, level, ties, start, end, order, counters):
    """Starts the head of a device's queue."""
    if len(now) == 0:
        task = _pop(later, devices[device].base, devices[device].later, tasks, level, ties, counters)
        devices[device].later -= 1
    else:
        task = _pop(now, devices[device].base, devices[device].now, tasks, level, ties, counters)
        devices[device].now -= 1
    start[task] = moment
    end[task] = moment + tasks[task].duration
    devices[device].free = end[task]
    order[counters[_STARTED]] = task
    counters[_STARTED] += 1
    return task


@_uncounted
def _gather(moment, batch, count, events, tasks, devices, ties, counters):
    """Moves the devices that choose at `moment` from the events to the batch; returns how many it holds then."""
    while counters[_EVENTS] and events[0].key <= moment:
        time = events[0].key
        device = _pop(events, 0, counters[_EVENTS], tasks, _ANY, ties, counters)
        counters[_EVENTS] -= 1
        if devices[device].choice == time:
            devices[device].choice = -np.inf
            batch[count] = device
            count += 1
    return count


@_uncounted
def _begin(sources, first_edge, successor, tasks, devices, later, events, level, ties, start, end, stack, counters):
    """Queues the tasks that wait for nothing."""
    for i in sources:
        if tasks[i].device >= 0:
            _enqueue(i, 0.0, tasks, devices, later, events, level, ties, counters)
        else:
            start[i], end[i] = 0.0, tasks[i].duration
            _release(i, first_edge, successor, tasks, devices, later, events, level, ties, start, end, stack, counters)


@_uncounted
def _run(
    first_edge, successor, tasks, devices, later, now, events, level, ties, start, end, order, stack, counters, batch
):
    """Fills start, end and order, or stops and sets _OPEN at a tie that this level does not order.

    All devices that choose at the earliest moment do; choices that take no time go first, in rounds."""
    loose = _ANY if len(now) else level  # With priorities, those decide.
    while counters[_EVENTS] and not counters[_OPEN]:
        moment = events[0].key
        count, instant = 0, True
        while instant:
            count = _gather(moment, batch[0], count, events, tasks, devices, ties, counters)
            chosen, instant = 0, False
            for k in range(count):
                head = _head(batch[0, k], moment, tasks, devices, later, now, level, ties, counters)
                takes_none = head >= 0 and moment + tasks[head].duration == moment
                if takes_none and not instant:
                    chosen, instant = 0, True
                if head >= 0 and takes_none == instant:
                    batch[1, chosen] = batch[0, k]
                    chosen += 1
            for k in range(chosen):
                device = batch[1, k]
                batch[1, k] = _take(
                    device, moment, tasks, devices, later, now, level, ties, start, end, order, counters
                )
            for k in range(chosen):
                i = batch[1, k]
                _release(
                    i, first_edge, successor, tasks, devices, later, events, loose, ties, start, end, stack, counters
                )
        for k in range(count):
            device = batch[0, k]
            devices[device].choice = np.inf
            if devices[device].now:
                _wake(device, devices[device].free, tasks, devices, events, ties, counters)
            elif devices[device].later:
                queued = later[devices[device].base].key
                _wake(device, max(devices[device].free, queued), tasks, devices, events, ties, counters)


@compiled
def _bind(first_edge, successor, device, duration, lag, start, end, order, device_count):
    tasks = len(duration)
    binding = np.full(tasks, -1, np.int32)
    for p in range(tasks):
        seen = end[p] + lag[p]
        for e in range(first_edge[p], first_edge[p + 1]):
            s = successor[e]
            if seen == start[s]:
                b = binding[s]
                # Among equals the longest, so that the choice does not hang on the listing.
                if b < 0 or (duration[p], device[p]) > (duration[b], device[b]):
                    binding[s] = p
    last = np.full(device_count, -1, np.int32)
    for k in range(len(order)):
        i = order[k]
        if binding[i] < 0 and start[i] > 0.0:
            binding[i] = last[device[i]]
        last[device[i]] = i
    return binding
