"""TaskGraph: the checked global dataflow graph of dPRO section 4.1, from plain arrays (durations, devices, edges).

A task occupies one device: a worker, a server, or one direction of a link. Successors lie in compressed rows
(`successor[first_edge[i]:first_edge[i + 1]]`), so that millions of tasks are a few flat arrays.

Two tasks that are ready on one device at the same moment, with the same priority, are ordered by `tie_keys`, which do
not depend on the order in which tasks were listed: the longer tail (seconds from the task's start to the end of the
longest path behind it) goes first, then comes a structural hash of Weisfeiler and Lehman's kind. What a hash cannot
tell apart is symmetric, but choices among symmetric tasks must agree with each other on all devices; `separate` makes
them agree by marking one task of a symmetric class and hashing again, as canonical labelling does. Its work is bounded
(`SEPARATION_WORK`): in a huge graph with many symmetries, give tasks a `label`, which settles all of this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.compiled import compiled
from offbeat.errors import OffbeatError
from offbeat.units import quote

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Hashes = NDArray[np.uint64]

MOST_TASKS = 2**31 - 2
# What orders tasks of equal priority and ready time: the longer tail, then the lower hash, then the lower `finest`.
TIE_KEYS = np.dtype([("tail_seconds", "f8"), ("structure", "u8"), ("finest", "u8")])
# Tasks and edges that `separate` may visit. Beyond it, what is left of a symmetry is broken by the listing.
SEPARATION_WORK = 10_000_000
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Tasks, the devices they occupy and what they wait for. Build with `from_arrays`, which checks everything."""

    duration_seconds: Floats
    device: Ints
    """-1: no device; the task runs as soon as it is ready."""
    lag_seconds: Floats
    """A task's device is free at its end; its successors see the end this much later."""
    priority: Floats | None
    """Lower goes first; None: first ready, first served."""
    first_edge: Ints
    successor: Ints
    indegree: Ints
    topological: Ints
    """Tasks in topological order."""
    label: NDArray[np.int64] | None = None
    """Distinguishes otherwise equal tasks, such as by chunk number; part of the structural hash."""

    @classmethod
    def from_arrays(
        cls,
        duration_seconds: ArrayLike,
        device: ArrayLike,
        edges: ArrayLike,
        priority: ArrayLike | None = None,
        lag_seconds: ArrayLike | None = None,
        label: ArrayLike | None = None,
    ) -> "TaskGraph":
        """N durations and devices, E pairs (before, after); raises OffbeatError naming the first bad value."""
        duration = _column(duration_seconds, "duration_seconds", None)
        tasks = len(duration)
        if tasks > MOST_TASKS:
            raise OffbeatError(f"duration_seconds: {tasks} tasks are more than the {MOST_TASKS} that fit")
        lag = np.zeros(tasks) if lag_seconds is None else _column(lag_seconds, "lag_seconds", tasks)
        with np.errstate(over="ignore"):
            if not np.isfinite(duration.sum() + lag.sum()):
                raise OffbeatError("duration_seconds: the sum of all durations and lags is not a finite number")
        priorities = None if priority is None else _column(priority, "priority", tasks)
        devices = _column(device, "device", tasks)
        pairs = _pairs(edges, tasks)
        outdegree, indegree = (np.bincount(ends, minlength=tasks).astype(np.int32) for ends in pairs.T)
        first_edge = np.concatenate(([0], np.cumsum(outdegree))).astype(np.int32)
        successor = _successors(pairs, first_edge)
        topological = np.empty(tasks, np.int32)
        sorted_tasks = _sort(first_edge, successor, indegree.copy(), topological)
        if sorted_tasks < tasks:
            _raise_cycle(first_edge, successor, indegree, topological[:sorted_tasks])
        labels = None if label is None else np.ascontiguousarray(_column(label, "label", tasks))
        rows = first_edge, successor, indegree, topological
        return cls(duration, np.ascontiguousarray(devices, np.int32), lag, priorities, *rows, labels)

    def __len__(self) -> int:
        return len(self.duration_seconds)

    @cached_property
    def dense_device(self) -> Ints:
        """Devices numbered without gaps, so that one array entry per device is affordable."""
        if not len(self) or int(self.device.max()) < max(1024, 4 * len(self)):
            return self.device
        result = np.full(len(self), -1, np.int32)
        result[self.device >= 0] = np.unique(self.device[self.device >= 0], return_inverse=True)[1]
        return result

    @cached_property
    def device_first(self) -> NDArray[np.int64]:
        """Where each (dense) device's tasks begin, if tasks are laid out device by device."""
        counts = np.bincount(self.dense_device[self.dense_device >= 0])
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])

    @cached_property
    def tie_keys(self) -> NDArray[np.void]:
        """TIE_KEYS of each task; `finest` is equal only for twins: tasks with the same neighbours, interchangeable."""
        keys = np.zeros(len(self), TIE_KEYS)
        edges = (self.first_edge, self.successor)
        keys["tail_seconds"] = _tails(*edges, self.topological, self.duration_seconds, self.lag_seconds)
        seeds: Hashes = np.zeros(len(self), np.uint64)
        columns = self.duration_seconds, self.lag_seconds, self.device.astype(np.int64), self.priority, self.label
        for column in columns:
            if column is not None:
                seeds = _mix(seeds + column.view(np.uint64))
        keys["structure"] = _refine(*edges, self.topological, seeds)
        keys["finest"] = _twins(*edges, len(self))
        return keys

    @cached_property
    def separated_keys(self) -> NDArray[np.void]:
        """TIE_KEYS whose `finest` also orders symmetric tasks, consistently across the graph; see `separate`."""
        keys = self.tie_keys.copy()
        keys["finest"] = separate(self)
        return keys


def separate(graph: TaskGraph) -> Hashes:
    """Ranks that order all tasks which share a structural hash and are not twins.

    In each round one class is split by marking one of its members (and its twins), and what is nearer to the mark goes
    first: what works towards the same task as the one chosen on another device. The class is the one with the smallest
    hash, and its members are symmetric, so that every listing leads to the same times."""
    hashes, twins = graph.tie_keys["structure"].copy(), graph.tie_keys["finest"].copy()
    ranks = np.zeros(len(graph), np.uint64)
    candidates = np.flatnonzero(graph.device >= 0)
    for round_number in range(1, 1 + SEPARATION_WORK // max(1, len(graph) + len(graph.successor))):
        order = candidates[np.argsort(hashes[candidates], kind="stable")]
        same = hashes[order[1:]] == hashes[order[:-1]]
        mixed = np.flatnonzero(same & (twins[order[1:]] != twins[order[:-1]]))
        if not len(mixed):
            break
        one = order[mixed[0]]
        marked = (hashes == hashes[one]) & (twins == twins[one])
        seeds = hashes.copy()
        seeds[marked] = _mix(seeds[marked] + np.uint64(round_number))
        hashes = _refine(graph.first_edge, graph.successor, graph.topological, seeds)
        hops = _hops(graph.first_edge, graph.successor, graph.topological, marked)
        order = np.lexsort((hashes, hops, ranks))
        rises = np.zeros(len(order), bool)
        for column in (hashes, hops, ranks):
            rises[1:] |= column[order[1:]] != column[order[:-1]]
        ranks[order] = np.cumsum(rises)
    return ranks


_SECONDS = lambda given: np.isfinite(given) & (given >= 0), "is not a finite number of seconds of at least 0"
_RULES: dict[str, tuple[Callable[[NDArray[Any]], NDArray[np.bool_]], str]] = {
    "duration_seconds": _SECONDS,
    "lag_seconds": _SECONDS,
    "priority": (lambda given: ~np.isnan(given), "cannot be compared with other priorities"),
    "device": (
        lambda values: (values >= -1) & (values <= MOST_TASKS),
        "is not -1 (no device) or a device number from 0",
    ),
}
"""By column: which values are allowed, and what is wrong with others."""


def _column(values: ArrayLike, field: str, length: int | None) -> NDArray[Any]:
    """One number for each task; the error quotes the first that is not allowed, and what is wrong with it."""
    array = _numbers(values, field, integers=field in ("device", "label"))
    if array.ndim != 1:
        raise OffbeatError(f"{field}: shape {array.shape} has {array.ndim} dimensions, not one")
    if length is not None and len(array) != length:
        raise OffbeatError(f"{field}: {len(array)} values given for {length} tasks")
    if field in _RULES:
        allowed, wrong = _RULES[field]
        bad = np.flatnonzero(~allowed(array))
        if len(bad):
            raise OffbeatError(f"{field}[{bad[0]}]: {array[bad[0]]} {wrong}")
    # A zero added turns -0.0 into 0.0: the two hash differently.
    return array + 0


def _numbers(values: ArrayLike, field: str, integers: bool) -> NDArray[Any]:
    """An array of int64 or float64."""
    try:
        array = np.asarray(values) if integers else np.ascontiguousarray(values, np.float64)
    except (TypeError, ValueError):
        kind = "integers" if integers else "numbers"
        raise OffbeatError(f"{field}: {quote(values)} is not an array of {kind}") from None
    if integers and array.size and array.dtype.kind not in "iu":
        raise OffbeatError(f"{field}: values of type {array.dtype} are not integers")
    return array.astype(np.int64, copy=False) if integers else array


def _pairs(edges: ArrayLike, tasks: int) -> NDArray[np.integer[Any]]:
    array = _numbers(edges, "edges", integers=True)
    if not array.size:
        return np.empty((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2:
        raise OffbeatError(f"edges: shape {array.shape} is not (edges, 2)")
    if len(array) > MOST_TASKS:
        raise OffbeatError(f"edges: {len(array)} edges are more than the {MOST_TASKS} that fit")
    before, after = array.T
    outside = (np.minimum(before, after) < 0) | (np.maximum(before, after) >= tasks)
    for at in np.flatnonzero(outside | (before == after))[:1]:
        if before[at] == after[at]:
            raise OffbeatError(f"edges[{at}]: task {before[at]} waits for itself")
        raise OffbeatError(f"edges[{at}]: ({before[at]}, {after[at]}) names a task outside 0..{tasks - 1}")
    return array


def _raise_cycle(first_edge: Ints, successor: Ints, indegree: Ints, done: Ints) -> None:
    """Names a task of a cycle: walking back through tasks that never became ready must return to one of them."""
    stuck = np.ones(len(indegree), bool)
    stuck[done] = False
    sources = np.repeat(np.arange(len(indegree)), np.diff(first_edge))
    inside = stuck[sources] & stuck[successor]
    cause = np.full(len(indegree), -1)
    cause[successor[inside]] = sources[inside]
    task, seen = int(np.flatnonzero(stuck)[0]), set[int]()
    while task not in seen:
        seen.add(task)
        task = int(cause[task])
    raise OffbeatError(f"edges: task {task} waits for itself through a cycle of dependencies")


@compiled
def _successors(edges, first_edge):
    successor = np.empty(edges.shape[0], np.int32)
    place = first_edge[:-1].copy()
    for e in range(edges.shape[0]):
        before = edges[e, 0]
        successor[place[before]] = edges[e, 1]
        place[before] += 1
    return successor


@compiled
def _sort(first_edge, successor, waiting, topological):
    """Kahn's algorithm; returns how many tasks could be sorted, fewer than all if there is a cycle."""
    count = 0
    for i in range(len(waiting)):
        if waiting[i] == 0:
            topological[count] = i
            count += 1
    at = 0
    while at < count:
        i = topological[at]
        at += 1
        for e in range(first_edge[i], first_edge[i + 1]):
            s = successor[e]
            waiting[s] -= 1
            if waiting[s] == 0:
                topological[count] = s
                count += 1
    return count


@compiled
def _tails(first_edge, successor, topological, duration, lag):
    tail = np.zeros(len(topological))
    for at in range(len(topological) - 1, -1, -1):
        i = topological[at]
        longest = 0.0
        for e in range(first_edge[i], first_edge[i + 1]):
            longest = max(longest, tail[successor[e]])
        tail[i] = duration[i] + (lag[i] + longest)
    return tail


@compiled(inline="always")
def _mix(x):
    """The finaliser of SplitMix64, for a number or an array."""
    x = x + _ODD
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


@compiled
def _refine(first_edge, successor, topological, seeds):
    """Each task's hash takes in all its ancestors and descendants; the second pass, also theirs, sideways."""
    for _ in range(2):
        down, up = seeds.copy(), seeds.copy()
        for at in range(len(topological)):
            i = topological[at]
            passed = _mix(down[i])
            for e in range(first_edge[i], first_edge[i + 1]):
                down[successor[e]] += passed
        for at in range(len(topological) - 1, -1, -1):
            i = topological[at]
            for e in range(first_edge[i], first_edge[i + 1]):
                up[i] += _mix(up[successor[e]] ^ _ODD)
        seeds = _mix(down + _mix(up))
    return seeds


@compiled
def _hops(first_edge, successor, topological, marked):
    """Edges between each task and the nearest marked one, on paths that change direction at most thrice."""
    hops = np.full(len(marked), len(marked), np.int32)
    hops[marked] = 0
    for sweep in range(4):
        for at in range(len(topological)):
            i = topological[at if sweep % 2 == 0 else len(topological) - 1 - at]
            for e in range(first_edge[i], first_edge[i + 1]):
                s = successor[e]
                if sweep % 2 == 0:
                    hops[s] = min(hops[s], hops[i] + 1)
                else:
                    hops[i] = min(hops[i], hops[s] + 1)
    return hops


@compiled
def _twins(first_edge, successor, tasks):
    keys = np.zeros(tasks, np.uint64)
    for i in range(tasks):
        for e in range(first_edge[i], first_edge[i + 1]):
            s = successor[e]
            keys[i] += _mix(np.uint64(s))
            keys[s] += _mix(np.uint64(i) ^ _ODD)
    return keys
