"""A Flight Recorder dump in JSON → its entries; a Kineto trace and the dump of the same rank → the trace with sequence
numbers and process groups.

Kineto's gloo ranges know when a collective ran but not its group or sequence number; the Flight Recorder knows those
but, on gloo, not when it ran. Both note when it was issued, on the same clock.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.profile.tracefile import Collective, Trace, collective_kind, product, rank_in_name
from offbeat.units import quote

_WHAT = "Flight Recorder dump"
_HOW = "torch._C._distributed_c10d._dump_fr_trace_json()"
_PICKLE = re.compile(rb"\x80[\x01-\x08]|\(dp|\(lp|\}q|\]q")
_NEAR_SECONDS = 0.05
"""Kineto's clock and the recorder's differ by less, as both follow the system's clock."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective or transfer that a rank issued."""

    group: str
    """Name of its process group."""
    sequence: int
    """Counts the collectives of its group, or the transfers between two ranks, equally on all participants."""
    kind: str
    elements: int
    created_ns: int
    """When it was issued, on the rank's clock."""
    transfer: bool
    state: str
    """'scheduled', 'started' or 'completed'."""


@dataclass(frozen=True)
class Dump:
    """The entries of one rank in the order in which they were issued."""

    rank: int | None
    """None where the file's name does not say it; the dump itself never does."""
    entries: tuple[Entry, ...]


def read_dump(path: str | os.PathLike[str], rank: int | None = None) -> Dump:
    """Reads a dump in JSON; pickles are refused, because opening one runs what it contains."""
    content = files.read_bytes(path, _WHAT)
    if _PICKLE.match(content):
        raise OffbeatError(
            f"{path}: this {_WHAT} is a pickle, which is not opened because that may run programs; "
            f"write it as JSON with {_HOW}"
        )
    document = files.parse_json(content, str(path), _WHAT)
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise OffbeatError(f"{path}: not a {_WHAT}: its field 'entries' is not a list; write one with {_HOW}")
    parsed = [_entry(entry, f"{path}: entries[{place}]") for place, entry in enumerate(entries)]
    named = rank_in_name(Path(path).name)
    return Dump(named if named is not None else rank, tuple(sorted(parsed, key=lambda entry: entry.created_ns)))


def join(trace: Trace, dump: Dump) -> Trace:
    """The trace with the sequence number, and the group where unknown, of each collective that the dump names too."""
    if dump.rank is not None and dump.rank != trace.rank:
        raise OffbeatError(f"{trace.path}: it is a trace of rank {trace.rank}, the {_WHAT} is of rank {dump.rank}")
    entries: dict[tuple[str, int], list[Entry]] = {}
    for entry in dump.entries:
        entries.setdefault((entry.kind, entry.elements), []).append(entry)
    events: dict[tuple[str, int], list[int]] = {}
    for place, event in sorted(enumerate(trace.collectives), key=lambda item: item[1].moment):
        if not np.isnan(event.queued):
            events.setdefault((event.kind, event.elements), []).append(place)
    joined = list(trace.collectives)
    for key, places in events.items():
        known = entries.get(key, [])
        issued = np.array([trace.origin_ns * 1e-9 + joined[place].queued for place in places])
        created = np.array([entry.created_ns * 1e-9 for entry in known])
        for place, number in zip(places, _matches(issued, created), strict=True):
            if number >= 0:
                joined[place] = _with(joined[place], known[number])
    missing = sum(event.sequence < 0 for event in joined)
    notes = list(trace.notes)
    if missing:
        notes.append(f"{trace.path}: {missing} of {len(joined)} communications are not in the {_WHAT}")
    return replace(trace, collectives=joined, notes=notes)


def _with(event: Collective, entry: Entry) -> Collective:
    return replace(event, sequence=entry.sequence, group=event.group or entry.group)


def _matches(issued: np.ndarray, created: np.ndarray) -> list[int]:
    """For each time in `issued` the position of its entry, or -1.

    Both lists hold the same collectives in the same order, but begin and end at different ones, so they differ by one
    shift: the one with the least median distance.
    """
    if not len(created):
        return [-1] * len(issued)
    middle = len(issued) // 2
    guess = int(np.searchsorted(created, issued[middle])) - middle
    best, shift = np.inf, guess
    for candidate in range(guess - 32, guess + 33):
        first, last = max(0, -candidate), min(len(issued), len(created) - candidate)
        if last - first < max(1, min(len(issued), len(created)) // 2):
            continue
        distance = float(np.median(np.abs(created[first + candidate : last + candidate] - issued[first:last])))
        if distance < best:
            best, shift = distance, candidate
    places = np.arange(len(issued)) + shift
    inside = (places >= 0) & (places < len(created))
    near = np.abs(created[np.clip(places, 0, len(created) - 1)] - issued) < _NEAR_SECONDS
    return np.where(inside & near, places, -1).tolist()


def _entry(entry: Any, where: str) -> Entry:
    if not isinstance(entry, dict):
        raise OffbeatError(f"{where}: it must be a mapping, got {quote(entry)}")
    transfer = entry.get("is_p2p") is True
    group = entry.get("process_group")
    name = entry.get("profiling_name")
    if not isinstance(name, str):
        raise OffbeatError(f"{where}.profiling_name: it must be a text, got {quote(name)}")
    kind = collective_kind(name.partition(":")[2].partition(" ")[0] or name)
    sizes = entry.get("input_sizes")
    return Entry(
        group=str(group[0]) if isinstance(group, list) and group else "",
        sequence=_integer(entry, "p2p_seq_id" if transfer else "collective_seq_id", where),
        kind=kind,
        elements=sum(product(size) for size in sizes) if isinstance(sizes, list) and kind != "barrier" else 0,
        created_ns=_integer(entry, "time_created_ns", where),
        transfer=transfer,
        state=str(entry.get("state", "")),
    )


def _integer(entry: dict[str, Any], field: str, where: str) -> int:
    value = entry.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise OffbeatError(f"{where}.{field}: it must be a whole number of at least 0, got {quote(value)}")
    return value
