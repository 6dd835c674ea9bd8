"""Find what would help a recorded job most: replay one change at a time, shortest step first.

Where the job's plan is known, the changed plan is simulated with the measured costs. Other traces are replayed span by
span on other links and devices; of long ones, only the last steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from offbeat.cost.interval import Interval, Trust, kind_of_strategy
from offbeat.cost.outcomes import Kind
from offbeat.errors import OffbeatError
from offbeat.profile.measure import Profile
from offbeat.profile.whatif import changed, plan_known, replay_scale, trust_in, what_if
from offbeat.report.steps import TimelineSteps
from offbeat.search.optimize import candidates
from offbeat.search.passes import Candidate
from offbeat.simulate import step_seconds
from offbeat.timeline import Timeline
from offbeat.timeline.diagnosis import Diagnosis, name_ranks
from offbeat.timeline.model import KINDS

MOST_REPLAYED_SPANS = 150_000
"""Of longer traces, only the last steps are replayed, which takes a few seconds."""
SHOWN_STRATEGIES = 3
_COMMUNICATION = KINDS.index("communication")
_LINKS = (("Links with twice the bandwidth", "bandwidth=2x"), ("Links with half the latency", "latency=0.5x"))
_LEVELS = (
    ("Links between nodes with twice the bandwidth", "inter_bandwidth=2x"),
    ("Links within nodes with twice the bandwidth", "intra_bandwidth=2x"),
)
_DEVICES = ("Devices that compute twice as fast", "compute=2x")
_WORTHWHILE = 1.01
"""A speed-up below this is not worth a change."""

Predict = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Advice:
    """One change and the resulting step time."""

    label: str
    about: str
    interval: Interval
    free: bool = False
    """Whether it needs no other hardware and rounds no gradients: another strategy."""

    @property
    def seconds(self) -> float:
        return self.interval.seconds

    def to_dict(self, base_seconds: float) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = {"label": self.label, "about": self.about, "seconds": self.seconds, "free": self.free}
        return plain | self.interval.shown(base_seconds) | {"speedup": self.speedup(base_seconds)}

    def speedup(self, base_seconds: float) -> float:
        """1.25: the recorded step is 1.25 times as long."""
        return base_seconds / self.seconds if self.seconds > 0 else 1.0


@dataclass(frozen=True)
class WhatIfs:
    """Changes, shortest step first, and the strategies found by search."""

    base_seconds: float
    """The measured step; predictions are relative to it."""
    rows: tuple[Advice, ...]
    best: Candidate | None
    """The best strategy found by search."""
    notes: tuple[str, ...]

    @property
    def free(self) -> Advice | None:
        """The free change that helps most, if one does."""
        found = next((row for row in self.rows if row.free), None)
        return found if found and found.speedup(self.base_seconds) >= _WORTHWHILE else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        rows = [row.to_dict(self.base_seconds) for row in self.rows]
        return {"base_seconds": self.base_seconds, "rows": rows, "notes": list(self.notes)}


def what_would_help(recording: Profile | Timeline, diagnosis: Diagnosis) -> WhatIfs:
    """Replays the recording unchanged, then with each change; `notes` names what could not be replayed."""
    if isinstance(recording, Profile) and plan_known(recording):
        return _of_plan(recording)
    return _of_trace(recording.timeline if isinstance(recording, Profile) else recording, diagnosis)


def _of_plan(profile: Profile) -> WhatIfs:
    scale = replay_scale(profile)
    tried: list[tuple[str, str, Predict]] = []
    if profile.cluster.world_size > 1:
        both = 1 < len(profile.cluster.nodes) < profile.cluster.world_size
        links = (*_LINKS, *_LEVELS) if both else _LINKS
        tried += [(label, change, partial(_step, profile, change)) for label, change in links]
        about = "wire=fp16; gradients are rounded"
        tried.append(("Gradients sent as fp16", about, partial(_step, profile, "wire=fp16")))
    tried.append((*_DEVICES, partial(_step, profile, _DEVICES[1])))
    slower = sorted(rank for rank, scale in profile.costs.compute_scale.items() if scale > 1)
    if slower:
        about = "all ranks compute as fast as the median"
        tried.append((f"No straggler ({name_ranks(slower)})", about, partial(_without_stragglers, profile)))
    trust = trust_in(profile)
    rows, notes = _predicted(tried, scale, trust)
    found = list(_strategies(profile, notes)) if profile.cluster.world_size > 1 else []
    for each in found:
        kind = kind_of_strategy(each.strategy, profile.graph, profile.strategy)
        interval = trust.interval(scale * each.seconds, kind)
        rows.append(Advice(f"Another strategy ({each.name})", "found by search", interval, free=True))
    rows.sort(key=lambda row: row.seconds)
    return WhatIfs(profile.step_seconds, tuple(rows), found[0] if found else None, tuple(notes))


def _of_trace(timeline: Timeline, diagnosis: Diagnosis) -> WhatIfs:
    steps = TimelineSteps(timeline)
    part = steps.last(MOST_REPLAYED_SPANS)
    if part is None:
        note = f"what-ifs are left out: the last step alone has more than {MOST_REPLAYED_SPANS} spans to replay"
        return WhatIfs(timeline.iteration_time, (), None, (note,))
    changes = [*_LINKS, _DEVICES] if (part.kind == _COMMUNICATION).any() else [_DEVICES]
    tried: list[tuple[str, str, Predict]] = [(label, change, partial(_step, part, change)) for label, change in changes]
    straggler = diagnosis.straggler
    if straggler is not None and straggler.reason == "compute":
        own = next(each.compute_seconds for each in diagnosis.ranks if each.rank == straggler.rank)
        change = f"straggler={straggler.rank}:{(own - straggler.seconds) / own:.6g}x"
        label = f"No straggler ({name_ranks([straggler.rank])})"
        tried.append((label, "computing as fast as the median of the others", partial(_step, part, change)))
    rows, notes = _predicted(tried, replay_scale(part) * timeline.iteration_time / part.iteration_time, trust_in(part))
    rows.sort(key=lambda row: row.seconds)
    kept = part.marks.shape[1] - 1
    if kept < len(steps):
        notes.append(f"what-ifs are replays of the last {kept} of {len(steps)} steps")
    notes.append("the trace does not tell the job's plan, so other strategies and encodings cannot be replayed")
    return WhatIfs(timeline.iteration_time, tuple(rows), None, tuple(notes))


def _step(recording: Profile | Timeline, *changes: str) -> float:
    return what_if(recording, changes)[0].iteration_time


def _without_stragglers(profile: Profile) -> float:
    plan, costs = changed(profile, ())
    capped = {rank: min(scale, 1.0) for rank, scale in costs.compute_scale.items()}
    return step_seconds(plan, replace(costs, compute_scale=capped))


def _strategies(profile: Profile, notes: list[str]) -> Iterator[Candidate]:
    """The best strategies with different names and step times, best first."""
    try:
        found = candidates(profile.graph, profile.cluster, profile.costs, profile.strategy)
    except OffbeatError as error:
        notes.append(f"other strategies are left out: {error}")
        return
    seen: set[object] = {"present"}
    shown = 0
    for candidate in found:
        traits = {candidate.name, round(candidate.seconds, 6)}
        if shown < SHOWN_STRATEGIES and not traits & seen:
            shown += 1
            yield candidate
        seen |= traits


def _predicted(tried: list[tuple[str, str, Predict]], scale: float, trust: Trust) -> tuple[list[Advice], list[str]]:
    rows, notes = [], []
    for label, about, predict in tried:
        kind: Kind = "strategy" if about.startswith("wire") else "link"
        try:
            rows.append(Advice(label, about, trust.interval(scale * predict(), kind)))
        except OffbeatError as error:
            notes.append(f"{label}: could not be replayed: {error}")
    return rows, notes
