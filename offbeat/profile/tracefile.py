"""Read one torch.profiler file as a Trace: a rank's steps, computation and communication, on its own clock.

Computation is what kept the device busy: kernels where a trace has any, else the outermost operators of each thread.
Communication is the nccl kernels, and the ranges gloo records in its own threads; those do not say when they were asked
for, so they are joined with the operator that issued them (`_gloo`).
"""

import os
import re
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.timeline import KINDS, Kind, Timeline
from offbeat.timeline.model import COLUMNS, collective_kind
from offbeat.timeline.stream import EventStream

_HEADER = ("distributedInfo", "host_name", "baseTimeNanoseconds")
_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_RANK = re.compile(r"(?:rank|worker)[_.\-]?(\d{1,6})", re.IGNORECASE)
_RANK_TEXT = re.compile(r"[0-9]{1,9}")
_LAST_NUMBER = re.compile(r"(\d{1,6})(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$")
_UPDATE = re.compile(r"Optimizer\.step#(\w+)\.step")
_RANGE = re.compile(r"(?:gloo|mpi|ucc):(\w+)")
MOST_ELEMENTS = 2**56
"""Limit on a tensor's elements: their bytes, summed over a trace, still fit 64 bits."""
_ITEM_BYTES = {"double": 8, "long": 8, "long int": 8, "int64": 8, "float": 4, "int": 4, "int32": 4, "half": 2}
_ITEM_BYTES |= {"bfloat16": 2, "short": 2, "byte": 1, "char": 1, "bool": 1, "unsigned char": 1, "signed char": 1}
_ITEM_BYTES |= {"complexfloat": 8, "complexdouble": 16, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication of one rank; times in seconds since the trace's origin."""

    start: float
    end: float
    queued: float
    """When it was issued; NaN where unknown."""
    kind: str
    elements: int
    bytes: int
    lane: int
    """Stream or thread it ran on."""
    group: str = ""
    """Process group, '' where unknown."""
    peer: int = -1
    """The other rank of a send or recv, -1 where unknown."""
    sequence: int = -1
    """Its number within its group, the same on all participants; -1 where unknown, see `kineto.join`."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The end of autograd's work for one parameter, in seconds since the trace's origin."""

    host: float
    shape: tuple[int, ...] | None
    """None where the profiler did not record shapes."""
    dtype: str


@dataclass(eq=False)
class Trace:
    """What one file holds; times in seconds since `origin_ns`."""

    path: Path
    rank: int
    world: int
    """Number of ranks the job had; 0 where the file does not say."""
    host: str
    origin_ns: int
    """Of the rank's own clock."""
    steps: dict[int, tuple[float, float]]
    """Start and end of each ProfilerStep."""
    work: Timeline
    """Computation; a track is a stream or a thread."""
    launched: NDArray[np.float64]
    """When the host began the operator that each part of `work` belongs to."""
    gradients: list[Gradient]
    """In the order in which the host completed them."""
    on_device: bool
    """Whether `work` are kernels, which run later than the host launches them."""
    collectives: list[Collective]
    """In the order of their issue, or start where that is unknown."""
    backend: str = ""
    optimizer: str = ""
    """The class of the optimizer whose step was seen last."""
    notes: list[str] = field(default_factory=list)


def load(path: str | os.PathLike[str], rank: int | None = None) -> Trace:
    """Reads one file in little memory; `rank` counts where neither the file nor its name says which it is."""
    stream = EventStream(path, _HEADER)
    collector = _Collector()
    for batch in stream:
        collector.add(batch)
    if not collector.timed:
        raise OffbeatError(f"{path}: cannot read the trace: no event has a start and a duration")
    info = stream.header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    told = (info.get("rank"), rank_in_name(Path(path).name), rank)
    rank = next((number for number in told if _is_rank(number)), None)
    if rank is None:
        raise OffbeatError(f"{path}: the trace's rank is unknown: neither its distributedInfo nor its name has it")
    base = _number(stream.header.get("baseTimeNanoseconds"), 0)
    world = info.get("world_size")
    first = collector.first
    work, launched = _work(collector, int(rank))
    faulty = f"{path}: {collector.faulty} events with negative or non-finite times were left out"
    return Trace(
        path=Path(path),
        rank=int(rank),
        world=int(world or 0) if _is_rank(world) else 0,
        host=str(stream.header.get("host_name", "")),
        origin_ns=base + round(first * 1000),
        steps={number: ((a - first) * 1e-6, (b - first) * 1e-6) for number, (a, b) in sorted(collector.steps.items())},
        work=work,
        launched=launched,
        gradients=sorted(_gradients(collector), key=lambda each: each.host),
        on_device=bool(collector.kernels),
        collectives=sorted(
            [*_gloo(collector), *_nccl(collector)],
            key=lambda each: each.start if np.isnan(each.queued) else each.queued,
        ),
        backend=str(info.get("backend", "")),
        optimizer=collector.updated_by,
        notes=[faulty] if collector.faulty else [],
    )


class _Collector:
    """Collects what the timeline needs of each event; times in microseconds as in the file."""

    def __init__(self) -> None:
        self.first, self.timed, self.faulty = np.inf, 0, 0
        self.names: dict[str, int] = {}
        self.lanes: dict[object, int] = {}
        self.steps: dict[int, tuple[float, float]] = {}
        self.operators, self.kernels = array("d"), array("d")
        """Flat: start, duration, lane, External id and name of each."""
        self.optimizer: list[tuple[float, float]] = []
        self.updated_by = ""
        self.gradients: list[tuple[float, dict[str, Any]]] = []
        self.ranges: list[tuple[float, float, int, str, dict[str, Any]]] = []
        self.issued: list[tuple[float, str, dict[str, Any]]] = []
        self.described: dict[int, tuple[float, dict[str, Any]]] = {}
        self.nccl: list[tuple[float, float, int, str, dict[str, Any]]] = []

    def add(self, batch: list[Any]) -> None:
        for event in batch:
            if not isinstance(event, dict) or event.get("ph") != "X":
                continue
            start: Any = event.get("ts")
            duration: Any = event.get("dur", 0)
            name = event.get("name")
            if not isinstance(name, str) or not _is_time(start) or not _is_time(duration) or duration < 0:
                self.faulty += 1
                continue
            self.timed += 1
            self.first = min(self.first, start)
            self._sort(event, name, float(start), float(duration))

    def _sort(self, event: dict[str, Any], name: str, start: float, duration: float) -> None:
        category, where, args = event.get("cat"), (event.get("pid"), event.get("tid")), event.get("args")
        args = args if isinstance(args, dict) else {}
        if category == "kernel" and "nccl" in name.lower():
            self.nccl.append((start, duration, self._lane(args.get("stream", where)), name, args))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            lane = self._lane(args.get("stream", where))
            self.kernels.extend((start, duration, lane, _number(args.get("External id")), self._name(name)))
        elif category in ("cpu_op", "user_annotation") and (match := _RANGE.fullmatch(name)):
            self.ranges.append((start, duration, self._lane(where), match[1], args))
            if match[1] not in ("send", "recv"):
                # Operators inside this range, in gloo's own thread, are communication; transfers run in the user's.
                self.operators.extend((start, duration, self._lane(where), -1, self._name(name)))
        elif category == "cpu_op":
            if name == "record_param_comms":
                self.described[_number(args.get("External id"))] = (start, args)
            elif name == "torch::autograd::AccumulateGrad":
                self.gradients.append((start + duration, args))
            elif name.startswith("c10d::") and (kind := collective_kind(name)) != "collective":
                self.issued.append((start, kind, args))
            number = _number(args.get("External id"))
            self.operators.extend((start, duration, self._lane(where), number, self._name(name)))
        elif category == "user_annotation" and (step := _STEP.fullmatch(name)):
            self.steps[int(step[1])] = (start, start + duration)
        elif category == "user_annotation" and name.startswith("Optimizer."):
            self.optimizer.append((start, start + duration))
            if match := _UPDATE.fullmatch(name):
                self.updated_by = match[1]

    def collective(self, start: float, duration: float, asked: float, dtype: object, **what: Any) -> Collective:
        size = what["elements"] * _ITEM_BYTES.get(str(dtype).lower().removeprefix("c10::"), 4)
        begin, queued = (start - self.first) * 1e-6, (asked - self.first) * 1e-6
        return Collective(start=begin, end=begin + duration * 1e-6, queued=queued, bytes=size, **what)

    def _name(self, name: str) -> int:
        return self.names.setdefault(name[:200], len(self.names))

    def _lane(self, lane: object) -> int:
        return self.lanes.setdefault(str(lane), len(self.lanes))


def _columns(flat: "array[float]", first: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Start and end in seconds since `first`, and (lane, External id, name) of each event."""
    rows = np.array(flat).reshape(-1, 5)
    start = (rows[:, 0] - first) * 1e-6
    return start, start + rows[:, 1] * 1e-6, rows[:, 2:].T.astype(np.int64)


def _work(collector: _Collector, rank: int) -> tuple[Timeline, NDArray[np.float64]]:
    """Kernels, each of the kind of the outermost operator that launched it; without any, the outermost operators.

    And when the host began the operator that launched each.
    """
    start, end, (lane, number, name) = _columns(collector.operators, collector.first)
    outermost, kind = _outermost(start, end, lane), _operator_kinds(collector, start, name)
    ranges = np.array([_RANGE.fullmatch(text) is not None for text in collector.names], bool)
    rows, launched = (outermost == np.arange(len(start))) & ~ranges[name], start
    if collector.kernels:
        kinds, known, order, begun = kind[outermost], number, np.argsort(number, kind="stable"), start
        start, end, (lane, launcher, name) = _columns(collector.kernels, collector.first)
        rows, kind = np.ones(len(start), bool), np.full(len(start), KINDS.index("other"), np.int8)
        launched = start.copy()
        if len(order):
            place = order[np.minimum(np.searchsorted(known[order], launcher), len(order) - 1)]
            found = (known[place] == launcher) & (launcher >= 0)
            kind[found], launched[found] = kinds[place[found]], begun[place[found]]
    others = {"rank": rank, "step": -1, "queued": np.nan, "bytes": 0, "task": -1}
    columns: Any = {column: np.full(len(start), value, COLUMNS[column]) for column, value in others.items()}
    every = Timeline(tuple(collector.names), start=start, end=end, track=lane, kind=kind, name=name, **columns)
    return every.select(rows), launched[rows]


def _outermost(start: NDArray[np.float64], end: NDArray[np.float64], lane: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each operator the outermost one that encloses it, or itself."""
    order = np.lexsort((-end, start, lane))
    result = np.arange(len(start))
    for rows in np.split(order, np.flatnonzero(np.diff(lane[order])) + 1) if len(order) else []:
        latest = np.maximum.accumulate(end[rows])
        inside = np.append(False, start[rows[1:]] < latest[:-1])
        result[rows] = rows[np.maximum.accumulate(np.where(inside, 0, np.arange(len(rows))))]
    return result


def _operator_kinds(collector: _Collector, start: NDArray[np.float64], name: NDArray[np.int64]) -> NDArray[np.int8]:
    """'backward' for what the autograd engine runs, 'optimizer' inside Optimizer ranges, else 'forward'."""
    kind_of_name: list[Kind] = [
        "backward" if name.startswith("autograd::") else "other" if name.startswith("c10d::") else "forward"
        for name in collector.names
    ]
    kind = np.array([KINDS.index(kind) for kind in kind_of_name], np.int8)[name]
    if collector.optimizer:
        ranges = (np.array(sorted(collector.optimizer)) - collector.first) * 1e-6
        place = np.searchsorted(ranges[:, 0], start, side="right") - 1
        kind[(place >= 0) & (start < ranges[np.maximum(place, 0), 1])] = KINDS.index("optimizer")
    return kind


def _gradients(collector: _Collector) -> Iterator[Gradient]:
    for end, args in collector.gradients:
        dims, types = args.get("Input Dims"), args.get("Input type")
        sizes = dims[0] if isinstance(dims, list) and dims else None
        shape = tuple(map(_number, sizes)) if isinstance(sizes, list) else None
        if shape is not None and not all(0 <= size < MOST_ELEMENTS for size in shape):
            shape = None
        dtype = types[0] if isinstance(types, list) and types else "float"
        yield Gradient((end - collector.first) * 1e-6, shape, str(dtype))


def _gloo(collector: _Collector) -> Iterator[Collective]:
    """gloo's ranges joined with the operators that issued them.

    gloo serves its queue in order, so the n-th range of a kind and size belongs to the n-th such operator, if that one
    was issued before it.
    """
    issued: defaultdict[tuple[str, int], deque[tuple[float, Any]]] = defaultdict(deque)
    for start, kind, args in sorted(collector.issued, key=lambda item: item[0]):
        issued[kind, _elements(kind, args)].append((start, args.get("Concrete Inputs")))
    for start, duration, lane, kind, args in sorted(collector.ranges, key=lambda item: item[0]):
        elements, types = _elements(kind, args), args.get("Input type")
        waiting = issued[kind, elements]
        asked, given = waiting.popleft() if waiting and waiting[0][0] <= start else (np.nan, [])
        # send(tensors, group, destination, tag), and the same for recv.
        transfer = kind in ("send", "recv") and isinstance(given, list) and len(given) > 2
        peer = int(given[2]) if transfer and _RANK_TEXT.fullmatch(str(given[2])) else -1
        dtype = next(filter(None, types), None) if isinstance(types, list) else None
        yield collector.collective(start, duration, asked, dtype, kind=kind, elements=elements, lane=lane, peer=peer)


def _nccl(collector: _Collector) -> Iterator[Collective]:
    """nccl's kernels; older versions describe them only on the launching side."""
    for start, duration, lane, name, args in sorted(collector.nccl, key=lambda item: item[0]):
        asked, described = collector.described.get(_number(args.get("External id")), (np.nan, {}))
        about = described | args
        kind = collective_kind(str(about.get("Collective name") or name))
        elements = min(max(0, _number(about.get("In msg nelems"), 0)), MOST_ELEMENTS)
        group = f"{about.get('Process Group Name', '')} {about.get('Process Group Ranks', '')}".strip()
        peer = _number(about.get("Dst Rank" if kind == "send" else "Src Rank")) if kind in ("send", "recv") else -1
        what = {"kind": kind, "group": group, "elements": elements, "lane": lane, "peer": peer}
        yield collector.collective(start, duration, asked, about.get("dtype"), **what)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e18 < value < 1e18


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def rank_in_name(name: str) -> int | None:
    """The rank that a file's name gives, as in 'rank3.json' or 'host_12.pt.trace.json'."""
    match = _RANK.search(name) or _LAST_NUMBER.search(name)
    return int(match[1]) if match else None


def _number(value: object, otherwise: int = -1) -> int:
    return value if isinstance(value, int) and -(2**62) < value < 2**62 else otherwise


def _elements(kind: str, args: dict[str, Any]) -> int:
    """Elements of the first input that has a shape; a list of tensors counts as one."""
    # A barrier's operator has a tensor argument that is not sent.
    dims = args.get("Input Dims") if kind != "barrier" else None
    for shape in dims if isinstance(dims, list) else []:
        if isinstance(shape, list) and shape:
            parts = shape if isinstance(shape[0], list) else [shape]
            return min(sum(product(part) for part in parts), MOST_ELEMENTS)
    return 0


def product(shape: object) -> int:
    """Elements of a tensor of this shape."""
    result = 1
    for size in shape if isinstance(shape, list) else []:
        result = min(result * max(0, _number(size, 0)), MOST_ELEMENTS)
    return result
