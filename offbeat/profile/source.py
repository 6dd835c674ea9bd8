"""Load a recording: a Profile for Offbeat's own traces, a Timeline for any other trace.

A folder with rank0.jsonl, … is the recorder's. A folder of other JSON files holds torch.profiler's traces, one for each
rank, joined with Flight Recorder dumps where there are any. A file is a timeline that Offbeat saved, or one rank's
trace.
"""

from dataclasses import replace
from os import PathLike
from pathlib import Path

from offbeat.errors import OffbeatError
from offbeat.profile.align import apply, clock_offsets, communication_events
from offbeat.profile.kineto import combine, load_folder
from offbeat.profile.measure import Profile, load_profile
from offbeat.profile.tracefile import load
from offbeat.timeline import Timeline
from offbeat.timeline.stream import EventStream


def load_recording(path: str | PathLike[str]) -> Profile | Timeline:
    """Whatever is there, on one clock; `notes` of the timeline say what was left out."""
    place = Path(path)
    if not place.exists():
        raise OffbeatError(f"{path}: no such trace")
    if not place.is_dir():
        # In a timeline that Offbeat wrote, its own object comes before the events.
        stream = EventStream(place, ("offbeat",))
        next(iter(stream), None)
        return Timeline.load(place) if "offbeat" in stream.header else combine([load(place, rank=0)])
    if any(place.glob("rank*.jsonl")):
        return load_profile(place)
    traces, notes = load_folder(place)
    timeline = combine(traces)
    timeline = replace(timeline, notes=(*notes, *timeline.notes))
    if len(timeline.ranks) < 2:
        return timeline
    machines = {trace.rank: trace.host for trace in traces if trace.host}
    return apply(timeline, clock_offsets(communication_events(timeline), machines or None))
