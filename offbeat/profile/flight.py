"""Read Flight Recorder dumps in JSON, and add their sequence numbers and process groups to a rank's Kineto trace.

Kineto's gloo ranges know when a collective ran but not its group or sequence number; the Flight Recorder knows those
but, on gloo, not when it ran. Both note when it was issued, on the same clock.
"""

import os
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, StrictBool, StrictStr, ValidationError

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.profile.tracefile import Trace, product
from offbeat.timeline.model import collective_kind

_WHAT = "Flight Recorder dump"
_HOW = "torch._C._distributed_c10d._dump_fr_trace_json()"
_PICKLE = re.compile(rb"\x80[\x01-\x08]|\(dp|\(lp|\}q|\]q")
_NEAR_SECONDS = 0.05
"""Kineto's clock and the Flight Recorder's differ by less, as both follow the system's clock."""

Number = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class Entry(BaseModel):
    """One collective or transfer that a rank issued."""

    profiling_name: StrictStr
    process_group: Any = None
    """A list that begins with the group's name."""
    collective_seq_id: Number
    """Its number among its group's collectives; the same on all participants."""
    is_p2p: StrictBool = False
    p2p_seq_id: Number = 0
    """Its number among the transfers between two ranks."""
    input_sizes: Any = None
    time_created_ns: Number
    """When it was issued, on the rank's clock."""

    @property
    def key(self) -> tuple[str, int]:
        """Its kind and its number of elements."""
        kind = collective_kind(self.profiling_name)
        sizes = self.input_sizes if isinstance(self.input_sizes, list) and kind != "barrier" else []
        return kind, sum(product(size) for size in sizes)

    @property
    def group(self) -> str:
        return str(self.process_group[0]) if isinstance(self.process_group, list) and self.process_group else ""


class _Dump(BaseModel):
    entries: list[Entry]


def is_dump(path: Path) -> bool:
    """Flight Recorder dumps begin with their groups and have no events."""
    try:
        with path.open("rb") as stream:
            head = stream.read(4096)
    except OSError:
        return False
    return b'"pg_config"' in head and b'"traceEvents"' not in head


def read_dump(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries in the order of their issue; pickles are refused, because opening one runs what it holds."""
    content = files.read_bytes(path, _WHAT)
    if _PICKLE.match(content):
        raise OffbeatError(
            f"{path}: this {_WHAT} is a pickle, which is not opened because it may run code; "
            f"write it as JSON with {_HOW}"
        )
    try:
        entries = _Dump.model_validate(files.parse_json(content, str(path), _WHAT)).entries
    except ValidationError as error:
        raise OffbeatError(f"{path}: not a {_WHAT}: {files.first_problem(error)}; write one with {_HOW}") from None
    return sorted(entries, key=lambda entry: entry.time_created_ns)


def join(trace: Trace, dump: list[Entry]) -> Trace:
    """The trace with the sequence number, and the group where unknown, of each collective that the dump names too."""
    entries, events = defaultdict(list), defaultdict(list)
    for entry in dump:
        entries[entry.key].append(entry)
    for place, event in enumerate(trace.collectives):
        if not np.isnan(event.queued):
            events[event.kind, event.elements].append(place)
    joined = list(trace.collectives)
    for key in events.keys() & entries.keys():
        places, known = events[key], entries[key]
        issued = np.array([trace.origin_ns * 1e-9 + joined[place].queued for place in places])
        created = np.array([entry.time_created_ns * 1e-9 for entry in known])
        for place, number in zip(places, _matches(issued, created), strict=True):
            if number >= 0:
                event, entry = joined[place], known[number]
                sequence = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
                joined[place] = replace(event, sequence=sequence, group=event.group or entry.group)
    missing = sum(event.sequence < 0 for event in joined)
    note = f"{trace.path}: {missing} of {len(joined)} communications are not in the {_WHAT}"
    return replace(trace, collectives=joined, notes=[*trace.notes, note] if missing else trace.notes)


def _matches(issued: np.ndarray, created: np.ndarray) -> list[int]:
    """For each time in `issued` the position of its entry, or -1.

    Both lists hold the same collectives in the same order but begin at different ones: the shift between them is the
    one with the least median distance.
    """
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
