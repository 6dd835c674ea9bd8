"""Read and write Chakra execution traces (MLCommons), one file `PREFIX.RANK.et` per rank.

A file is a sequence of protobuf messages of package ChakraProtoMsg, each behind its length as a varint: one
GlobalMetadata, then Nodes. The few message types are encoded here, so that no protobuf package is needed:

    Node            1 id, 2 name, 3 type, 4 ctrl_deps, 5 data_deps, 6 start_time_micros, 7 duration_micros, 10 attr
    GlobalMetadata  1 version, 2 attr
    AttributeProto  1 name, then one value: 7 int32, 9 int64, 11 uint32, 13 uint64, 27 bool, 29 string, or a list
                    of these, which has the next number and holds its items in field 1; other types are passed over

Computing becomes COMP_NODE, a collective COMM_COLL_NODE with `comm_type` and `comm_size`, a wait METADATA_NODE, which
is no work. A node's `data_deps` are what it followed: computing, the computing before it and, behind a wait, the
collective that ended the wait; a collective, the computing that completed its gradients. Chakra's times are whole
microseconds; attributes `offbeat_…`, which other readers pass over, keep nanoseconds and the rest of a span.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.timeline.model import COMPUTE, KINDS, NETWORK, Builder, Timeline, collective_kind
from offbeat.units import quote

VERSION = "0.0.4"
"""The schema's version, as Chakra's own converters write it."""
METADATA, COMPUTING, SENDING, RECEIVING, COLLECTIVE = 1, 4, 5, 6, 7
"""NodeType; all other types are read as other work."""
COLLECTIVES = {"all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5}
COLLECTIVES |= {"all_to_all": 6, "reduce_scatter": 7, "barrier": 9}
"""CollectiveCommType by the name of a collective."""
_PREFIX = "offbeat_"
_TOLERANCE_SECONDS = 1e-6
_VALUE_FIELDS = {"int32": 7, "int64": 9, "uint32": 11, "uint64": 13, "bool": 27, "string": 29}


@dataclass(frozen=True)
class Node:
    """One node of an execution trace."""

    id: int
    name: str
    type: int
    deps: tuple[int, ...] = ()
    start_micros: int = 0
    duration_micros: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)


def write(timeline: Timeline, prefix: str | PathLike[str]) -> list[Path]:
    """Writes one file per rank and returns their paths, in order of ranks."""
    zero = float(timeline.start.min()) if len(timeline) else 0.0
    place = {} if timeline.critical is None else {int(at): n for n, at in enumerate(timeline.critical)}
    written = []
    for rank in timeline.ranks:
        positions = [int(at) for at in np.flatnonzero(timeline.rank == rank)]
        parts = [_delimited(_metadata(timeline, rank))]
        for position, deps in _dependencies(timeline, positions):
            parts.append(_delimited(_node(timeline, position, deps, zero, place.get(position, -1))))
        path = Path(f"{prefix}.{rank}.et")
        files.write_atomic(path, b"".join(parts), "execution trace")
        written.append(path)
    return written


def read(prefix: str | PathLike[str]) -> Timeline:
    """The timeline of all files `PREFIX.RANK.et`, of Offbeat or of other tools."""
    folder = Path(prefix).parent
    pattern = re.compile(re.escape(Path(prefix).name) + r"\.(\d+)\.et")
    found = sorted((int(match[1]), path) for path in folder.glob("*.et") if (match := pattern.fullmatch(path.name)))
    if not found:
        raise OffbeatError(f"{prefix}: no such execution trace; its files end in .0.et, .1.et, …")
    heads, nodes = [], []
    for rank, path in found:
        head, mine = read_file(path)
        heads.append(head)
        nodes += [(rank, node) for node in mine]
    try:
        if all(_PREFIX + "kind" in node.attributes for _, node in nodes):
            return _own_timeline(nodes, heads)
        return _foreign_timeline(nodes, str(prefix))
    except OffbeatError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise OffbeatError(f"{prefix}: the execution trace has damaged attributes ({error})") from None


def read_file(path: str | PathLike[str]) -> tuple[dict[str, Any], list[Node]]:
    """One rank's file: the attributes of the whole trace, and its nodes."""
    content = files.read_bytes(path, "execution trace")
    try:
        messages = list(_messages(content))
        if not messages:
            raise ValueError("it is empty")
        return dict(map(_attribute, _decode(messages[0])[2])), list(map(_parse_node, messages[1:]))
    except (ValueError, IndexError) as error:
        raise OffbeatError(f"{path}: not a Chakra execution trace ({error})") from None


def _metadata(timeline: Timeline, rank: int) -> bytes:
    row = timeline.marked_ranks.index(rank) if rank in timeline.marked_ranks else -1
    marks = [_nanoseconds(mark) for mark in timeline.marks[row]] if row >= 0 else []
    peak = timeline.peak_memory[row] if 0 <= row < len(timeline.peak_memory) else -1
    attributes = [
        _attr("source", "string", timeline.source),
        _attr("tracks", "string", list(timeline.tracks)),
        _attr("notes", "string", list(timeline.notes)),
        _attr("marks_ns", "int64", marks),
        _attr("peak_memory", "int64", peak),
    ]
    return _field(1, VERSION) + b"".join(_field(2, attribute) for attribute in attributes)


def _node(timeline: Timeline, position: int, deps: tuple[int, ...], zero: float, place: int) -> bytes:
    span = timeline[position]
    # Both ends are rounded, so that spans which met still meet.
    start, end = round((span.start - zero) * 1e6), round((span.end - zero) * 1e6)
    attributes = [_attr("is_cpu_op", "bool", False, prefix="")]
    type_ = METADATA if span.kind == "wait" else COMPUTING
    if span.kind == "communication":
        type_ = COLLECTIVE
        number = COLLECTIVES.get(collective_kind(span.name), COLLECTIVES["all_reduce"])
        sent = {"comm_type": number, "comm_size": span.bytes}
        attributes += [_attr(name, "int64", value, prefix="") for name, value in sent.items()]
    queued = [] if span.queued is None else [_nanoseconds(span.queued)]
    attributes += [
        _attr("kind", "string", span.kind),
        _attr("track", "string", span.track),
        _attr("times_ns", "int64", [_nanoseconds(span.start), _nanoseconds(span.end), *queued]),
        _attr("numbers", "int64", [span.step, span.bytes, span.task, place]),
    ]
    content = _field(1, position + 1) + _field(2, span.name) + _field(3, type_)
    content += _field(5, b"".join(_varint(at + 1) for at in deps)) if deps else b""
    content += _field(6, start) + _field(7, end - start)
    return content + b"".join(_field(10, attribute) for attribute in attributes)


def _dependencies(timeline: Timeline, positions: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """One rank's spans in the order of their starts, each with those it depends on."""
    order = sorted(positions, key=lambda at: (timeline.start[at], timeline.end[at]))
    communication, wait = KINDS.index("communication"), KINDS.index("wait")
    sent = sorted((float(timeline.end[at]), at) for at in order if timeline.kind[at] == communication)
    done: list[tuple[float, int]] = []
    """Ends of computing so far, ascending."""
    last: dict[int, int] = {}
    waiting_since: float | None = None
    for at in order:
        start = float(timeline.start[at])
        deps: list[int] = []
        if timeline.kind[at] == communication:
            queued = float(timeline.queued[at])
            ready = min(start, start if np.isnan(queued) else queued)
            found = bisect_right(done, (ready + _TOLERANCE_SECONDS, len(timeline)))
            deps += [done[found - 1][1]] if found else []
        elif timeline.kind[at] == wait:
            waiting_since = start if waiting_since is None else waiting_since
        else:
            track = int(timeline.track[at])
            deps += [last[track]] if track in last else []
            if waiting_since is not None:
                found = bisect_right(sent, (start + _TOLERANCE_SECONDS, len(timeline)))
                if found and sent[found - 1][0] >= waiting_since and timeline.start[sent[found - 1][1]] < start:
                    deps.append(sent[found - 1][1])
                waiting_since = None
            last[track] = at
            end = max(float(timeline.end[at]), done[-1][0] if done else -np.inf)
            done.append((end, at))
        yield at, tuple(deps)


def _own_timeline(nodes: list[tuple[int, Node]], heads: list[dict[str, Any]]) -> Timeline:
    first = heads[0]
    builder = Builder(tuple(first[_PREFIX + "tracks"]))
    path = {}
    for rank, node in sorted(nodes, key=lambda item: item[1].id):
        facts = {name.removeprefix(_PREFIX): value for name, value in node.attributes.items()}
        times, (step, size, task, place) = [t / 1e9 for t in facts["times_ns"]], facts["numbers"]
        if place >= 0:
            path[place] = len(builder.rows)
        if facts["kind"] not in KINDS:
            raise OffbeatError(f"execution trace: offbeat_kind: {quote(facts['kind'])} is none of {', '.join(KINDS)}")
        more = {"step": step, "bytes": size, "task": task} | ({"queued": times[2]} if len(times) > 2 else {})
        builder.add(rank, facts["track"], facts["kind"], node.name, *times[:2], **more)
    marks = [head[_PREFIX + "marks_ns"] for head in heads]
    peaks = tuple(head[_PREFIX + "peak_memory"] for head in heads)
    source, notes = first[_PREFIX + "source"], tuple(first[_PREFIX + "notes"])
    timeline = builder.build(np.array(marks, "f8") / 1e9 if any(marks) else None, source, notes)
    critical = np.array([path[place] for place in sorted(path)], "i8") if path else None
    return replace(timeline, peak_memory=peaks if min(peaks) >= 0 else (), critical=critical)


def _foreign_timeline(nodes: list[tuple[int, Node]], origin: str) -> Timeline:
    """Collectives are numbered in each rank's order, which is the same on all participants."""
    if not any(node.duration_micros for _, node in nodes):
        raise OffbeatError(f"{origin}: the execution trace has no durations, so it gives no timeline")
    builder = Builder()
    numbers: defaultdict[int, count[int]] = defaultdict(count)
    for rank, node in sorted(nodes, key=lambda item: (item[0], item[1].start_micros)):
        if node.type == METADATA:
            continue
        start, end = node.start_micros / 1e6, (node.start_micros + node.duration_micros) / 1e6
        if node.type not in (COLLECTIVE, SENDING, RECEIVING):
            builder.add(rank, COMPUTE, "other", node.name, start, end)
            continue
        size = int(node.attributes.get("comm_size", 0))
        builder.add(rank, NETWORK, "communication", node.name, start, end, bytes=size, task=next(numbers[rank]))
    return builder.build(notes=(f"{origin}: the trace has no marks of steps",))


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a message: a number as a varint, a text or another message behind its length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _delimited(value.encode() if isinstance(value, str) else value)


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _nanoseconds(seconds: float) -> int:
    return round(float(seconds) * 1e9)


def _attr(name: str, kind: Literal["bool", "int64", "string"], value: Any, prefix: str = _PREFIX) -> bytes:
    head, number = _field(1, prefix + name), _VALUE_FIELDS[kind]
    if not isinstance(value, list):
        return head + _field(number, value)
    items = [_field(1, item) for item in value] if kind == "string" else [_field(1, b"".join(map(_varint, value)))]
    return head + _field(number + 1, b"".join(items))


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


def _messages(content: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        length, at = _read_varint(content, at)
        if at + length > len(content):
            raise ValueError(f"it ends in the middle of a message of {length} bytes")
        yield content[at : at + length]
        at += length


def _decode(message: bytes) -> dict[int, list[int | bytes]]:
    """The values of each field by its number: numbers for varints, else bytes."""
    values: dict[int, list[int | bytes]] = defaultdict(list)
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _read_varint(message, at)
            values[number].append(value)
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"field {number} has the unknown wire type {wire}")
        length, at = _read_varint(message, at) if wire == 2 else (8 if wire == 1 else 4, at)
        if at + length > len(message):
            raise ValueError(f"field {number} is cut off")
        values[number].append(message[at : at + length])
        at += length
    return values


def _attribute(content: int | bytes) -> tuple[str, Any]:
    fields = _decode(_as_bytes(content))
    value = None
    for number in _VALUE_FIELDS.values():
        if fields[number]:
            value = _value(number, fields[number][-1])
        elif fields[number + 1]:
            items = _decode(_as_bytes(fields[number + 1][-1]))[1]
            numbers = items if number == _VALUE_FIELDS["string"] else [n for raw in items for n in _unpacked(raw)]
            value = [_value(number, item) for item in numbers]
    return _text(fields[1]), value


def _unpacked(raw: int | bytes) -> Iterator[int]:
    """Numbers of a list may be packed into one field or stand in a field each."""
    if isinstance(raw, int):
        yield raw
        return
    at = 0
    while at < len(raw):
        value, at = _read_varint(raw, at)
        yield value


def _value(field_number: int, raw: int | bytes) -> Any:
    if field_number == _VALUE_FIELDS["string"]:
        return _text([raw])
    if isinstance(raw, bytes):
        raise ValueError("an attribute of a number's type is not a number")
    signed = field_number in (_VALUE_FIELDS["int32"], _VALUE_FIELDS["int64"])
    return raw - 2**64 if signed and raw >= 2**63 else raw


def _as_bytes(raw: int | bytes) -> bytes:
    if isinstance(raw, int):
        raise ValueError(f"found the number {raw} instead of a text or a message")
    return raw


def _text(values: list[int | bytes]) -> str:
    return _as_bytes(values[-1]).decode() if values else ""


def _parse_node(message: bytes) -> Node:
    fields = _decode(message)
    id_, type_, start, duration = (next((v for v in fields[n][::-1] if isinstance(v, int)), 0) for n in (1, 3, 6, 7))
    deps = tuple(number for raw in (*fields[4], *fields[5]) for number in _unpacked(raw))
    return Node(id_, _text(fields[2]), type_, deps, start, duration, dict(map(_attribute, fields[10])))
