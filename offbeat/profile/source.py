"""A path → what was recorded there: a Profile of a job that Offbeat's recorder saw, or the Timeline of any other trace.

A folder with rank0.jsonl, … is the recorder's. A folder of other JSON files holds torch.profiler's traces, one for each
rank, joined with Flight Recorder dumps where there are any. A file is a timeline that Offbeat saved, or one rank's
trace.
"""

import gzip
import zlib
from dataclasses import replace
from os import PathLike
from pathlib import Path

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.profile.align import apply, clock_offsets, communication_events
from offbeat.profile.flight import join, read_dump
from offbeat.profile.kineto import Trace, combine, load, read_trace
from offbeat.profile.measure import Profile, load_profile
from offbeat.timeline import Timeline

_PEEK_BYTES = 4096


def load_recording(path: str | PathLike[str]) -> Profile | Timeline:
    """Whatever is there, on one clock; `notes` of the timeline say what was left out."""
    place = Path(path)
    if not place.exists():
        raise OffbeatError(f"{path}: there is no such trace")
    if not place.is_dir():
        return Timeline.load(place) if _is_ours(place) else read_trace(place, rank=0)
    if any(place.glob("rank*.jsonl")):
        return load_profile(place)
    return load_kineto(place)


def load_kineto(folder: Path) -> Timeline:
    """All ranks' traces of torch.profiler on one clock."""
    paths = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))
    if not paths:
        raise OffbeatError(f"{folder}: there is no trace in it: neither rank0.jsonl, … nor files in JSON")
    traces: dict[int, Trace] = {}
    dumps, notes = [], []
    for path in paths:
        try:
            if _is_dump(path):
                dumps.append(read_dump(path))
                continue
            trace = load(path, 0 if len(paths) == 1 else None)
        except OffbeatError as error:
            notes.append(str(error))
            continue
        if trace.rank in traces:
            other = traces[trace.rank].path.name
            notes.append(f"{path}: left out, because {other} is a trace of rank {trace.rank} too")
        else:
            traces[trace.rank] = trace
    if not traces:
        more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        raise OffbeatError(f"{folder}: none of its traces can be used: {notes[0] if notes else 'there are none'}{more}")
    for dump in dumps:
        if dump.rank in traces:
            traces[dump.rank] = join(traces[dump.rank], dump)
        else:
            notes.append(f"{folder}: a Flight Recorder dump of rank {dump.rank} has no trace beside it")
    timeline = combine(traces.values())
    timeline = replace(timeline, notes=(*notes, *timeline.notes))
    return _aligned(timeline, {rank: trace.host for rank, trace in traces.items() if trace.host})


def _aligned(timeline: Timeline, machines: dict[int, str]) -> Timeline:
    if len(timeline.ranks) < 2:
        return timeline
    return apply(timeline, clock_offsets(communication_events(timeline), machines or None))


def _is_ours(path: Path) -> bool:
    """Whether Offbeat wrote this timeline: its own object comes first in the file."""
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as stream:
            return b'"offbeat":' in stream.read(64)
    except (OSError, EOFError, zlib.error):
        return False


def _is_dump(path: Path) -> bool:
    """Flight Recorder dumps have entries and no events."""
    if path.name.endswith(".gz"):
        return False
    try:
        with path.open("rb") as stream:
            head = stream.read(_PEEK_BYTES)
    except OSError:
        return False
    if b'"traceEvents"' in head or b'"pg_config"' not in head:
        return False
    try:
        return isinstance(files.read_json(path, "Flight Recorder dump").get("entries"), list)
    except (OffbeatError, AttributeError):
        return False
