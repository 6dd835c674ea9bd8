"""A recording (a trace folder, Profile, Timeline or Plan) → Report: every number and picture that the page shows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.plan import Plan
from offbeat.profile.measure import Profile
from offbeat.profile.source import load_recording
from offbeat.profile.whatif import plan_known, what_if
from offbeat.report.advice import WhatIfs, what_would_help
from offbeat.report.windows import Windows, with_marks
from offbeat.search.explain import Explanation, explain
from offbeat.search.frontier.model import Frontier
from offbeat.search.frontier.picture import svg
from offbeat.simulate.predict import simulate
from offbeat.strategy import Strategy
from offbeat.timeline import Timeline
from offbeat.timeline.diagnosis import Diagnosis, diagnose
from offbeat.units import format_seconds

Recording = str | PathLike[str] | Profile | Timeline | Plan

PARTS = {
    "compute": "computing",
    "exposed": "communication that nothing hides",
    "waiting": "waiting for other ranks",
    "idle": "idle",
}
"""What each moment of a step is; the parts add up to the step."""
MOST_STEPS_IN_PARTS = 200
"""Of more steps only the lengths are shown, not where each goes."""
MOST_BLAMED = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """What replay predicted of the recorded job, beside what was measured."""

    predicted: Timeline
    measured_step_seconds: float
    predicted_step_seconds: float
    measured_parts: dict[str, float]
    predicted_parts: dict[str, float]

    @property
    def error(self) -> float:
        """0.02 means that the predicted step is 2% longer."""
        return self.predicted_step_seconds / self.measured_step_seconds - 1 if self.measured_step_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "measured_step_seconds": self.measured_step_seconds,
            "predicted_step_seconds": self.predicted_step_seconds,
            "error": self.error,
            "measured_parts": self.measured_parts,
            "predicted_parts": self.predicted_parts,
        }


@dataclass(frozen=True)
class Report:
    """What a report says. Times are seconds per step."""

    title: str
    timeline: Timeline
    nodes: dict[int, str]
    """Node of each rank; empty where unknown."""
    step_seconds: float
    """Median over steps."""
    steps: tuple[float, ...]
    """Seconds of each step: the mean over ranks."""
    step_parts: tuple[dict[str, float], ...]
    """Where each step goes, by key of `PARTS`; empty where there are too many steps."""
    diagnosis: Diagnosis
    comparison: Comparison | None
    help: WhatIfs | None
    explanations: tuple[Explanation, ...]
    """Of the strategy that ran, and of the given or else the best one found."""
    strategy_given: bool
    frontier: Frontier | None
    notes: tuple[str, ...]

    @property
    def parts(self) -> dict[str, float]:
        """Where a step goes: the mean over ranks and steps."""
        return parts_of(self.diagnosis)

    @property
    def headline(self) -> str:
        """The finding in two sentences."""
        total = sum(self.parts.values()) or 1.0
        shares = {key: seconds / total for key, seconds in self.parts.items()}
        text = f"{shares['compute']:.0%} of the step is computing"
        lost = max((key for key in PARTS if key != "compute"), key=lambda key: shares[key])
        if shares[lost] >= 0.01:
            text += f"; most of the rest, {shares[lost]:.0%} of the step, is {PARTS[lost]}"
        best = self.help.rows[0] if self.help and self.help.rows else None
        if self.help is None or best is None:
            return f"{text}."
        gain = best.speedup(self.help.base_seconds) - 1
        if gain < 0.01:
            return f"{text}. None of the changes that were replayed shortens it by more than 1%."
        words = best.label[0].lower() + best.label[1:]
        return f"{text}. What would help most: {words}, {gain:.0%} faster ({format_seconds(best.seconds)} per step)."

    @property
    def frontier_svg(self) -> str:
        return "" if self.frontier is None else svg(self.frontier, title="Memory and time of one training step")

    def to_dict(self) -> dict[str, Any]:
        """Every number of the page, ready for JSON."""
        frontier = [
            {"memory_bytes": point.memory_bytes, "time_seconds": point.time_seconds}
            for point in (self.frontier.points if self.frontier else ())
        ]
        return {
            "title": self.title,
            "source": self.timeline.source,
            "headline": self.headline,
            "ranks": len(self.timeline.ranks),
            "nodes": len(set(self.nodes.values())) or None,
            "spans": len(self.timeline),
            "step_seconds": self.step_seconds,
            "parts": self.parts,
            "steps": [
                {"seconds": seconds, "parts": self.step_parts[number] if self.step_parts else None}
                for number, seconds in enumerate(self.steps)
            ],
            "diagnosis": self.diagnosis.to_dict(),
            "peak_memory_bytes": list(self.timeline.peak_memory),
            "comparison": self.comparison.to_dict() if self.comparison else None,
            "what_ifs": self.help.to_dict() if self.help else None,
            "strategies": [explanation.to_dict() for explanation in self.explanations],
            "frontier": frontier or None,
            "notes": list(self.notes),
        }


def make_report(
    recording: Recording,
    *,
    title: str = "",
    costs: Costs | None = None,
    predicted: Timeline | None = None,
    strategy: Strategy | None = None,
    frontier: Frontier | None = None,
    nodes: Mapping[int, str] | None = None,
    what_ifs: bool = True,
) -> Report:
    """Reads or simulates, diagnoses, and replays what-ifs.

    `recording` is a trace folder or file, a Profile, a Timeline, or a Plan, which is simulated with `costs`.
    `predicted` is set beside a measured Timeline; a Profile is replayed for that. `strategy` is explained beside the
    recorded one. `nodes` names the node of each rank where the recording has no cluster. `what_ifs` off saves the time
    they take.
    """
    title = title or _title(recording)
    opened = _opened(recording, costs)
    profile = opened if isinstance(opened, Profile) else None
    timeline = with_marks(profile.timeline if profile else opened)  # type: ignore[arg-type] # a Timeline if no Profile
    if not len(timeline):
        raise OffbeatError(f"{title}: the trace has no spans, so there is nothing to report")
    if profile is not None:
        profile = replace(profile, timeline=timeline)
    diagnosis = diagnose(timeline, MOST_BLAMED)
    helped = what_would_help(profile or timeline, diagnosis) if what_ifs else None
    explanations, unexplained = _explained(profile, helped, strategy)
    notes = dict.fromkeys((*diagnosis.notes, *(helped.notes if helped else ()), *unexplained))
    return Report(
        title=title,
        timeline=timeline,
        nodes=_nodes(profile, timeline) if nodes is None else dict(nodes),
        step_seconds=timeline.iteration_time,
        steps=tuple(timeline.step_seconds.tolist()),
        step_parts=_step_parts(timeline),
        diagnosis=diagnosis,
        comparison=_comparison(profile, timeline, diagnosis, predicted),
        help=helped,
        explanations=explanations,
        strategy_given=strategy is not None,
        frontier=frontier if frontier and frontier.points else None,
        notes=tuple(notes),
    )


def parts_of(diagnosis: Diagnosis) -> dict[str, float]:
    """Seconds of each part of a step: the mean over ranks and steps."""
    return {key: diagnosis.mean(f"{key}_seconds") for key in PARTS}


def _title(recording: Recording) -> str:
    if isinstance(recording, Plan):
        return f"{recording.strategy.name} on {recording.cluster.name}"
    if isinstance(recording, Profile):
        return f"{recording.job} job on {recording.cluster.name}"
    if isinstance(recording, Timeline):
        return f"{recording.source} timeline"
    return Path(fspath(recording)).resolve().name


def _opened(recording: Recording, costs: Costs | None) -> Profile | Timeline:
    if isinstance(recording, (Profile, Timeline)):
        return recording
    if not isinstance(recording, Plan):
        return load_recording(recording)
    costs = costs or Costs()
    return Profile(
        timeline=simulate(recording, costs),
        graph=recording.graph,
        cluster=recording.cluster,
        strategy=recording.strategy,
        costs=costs,
        job="offbeat",
        notes=(),
    )


def _nodes(profile: Profile | None, timeline: Timeline) -> dict[int, str]:
    if profile is None:
        return {}
    cluster = profile.cluster
    ranks = [rank for rank in timeline.ranks if rank < cluster.world_size]
    return {rank: str(cluster.nodes[cluster.node_of(rank)].name) for rank in ranks}


def _step_parts(timeline: Timeline) -> tuple[dict[str, float], ...]:
    windows = Windows(timeline)
    if len(windows) > MOST_STEPS_IN_PARTS:
        return ()
    found = []
    for step in range(len(windows)):
        part = windows.part(step, step)
        if part is None:
            return ()
        found.append(parts_of(diagnose(part)))
    return tuple(found)


def _comparison(
    profile: Profile | None, timeline: Timeline, diagnosis: Diagnosis, predicted: Timeline | None
) -> Comparison | None:
    if timeline.source != "measured":
        return None
    if predicted is None and profile is not None and plan_known(profile):
        predicted = what_if(profile, ())[0]
    if predicted is None:
        return None
    return Comparison(
        predicted=predicted,
        measured_step_seconds=timeline.iteration_time,
        predicted_step_seconds=predicted.iteration_time,
        measured_parts=parts_of(diagnosis),
        predicted_parts=parts_of(diagnose(predicted)),
    )


def _explained(
    profile: Profile | None, helped: WhatIfs | None, strategy: Strategy | None
) -> tuple[tuple[Explanation, ...], list[str]]:
    """Of the strategy that ran and of the given or best one; and what could not be explained."""
    if profile is None or not plan_known(profile) or profile.cluster.world_size == 1:
        return (), []
    asked = [profile.strategy]
    if strategy is not None:
        asked.append(strategy.model_copy(update={"graph": "", "cluster": ""}))
    elif helped is not None and helped.best is not None:
        asked.append(helped.best.strategy)
    found, notes = [], []
    for each in asked:
        try:
            found.append(explain(each, profile.graph, profile.cluster, profile.costs))
        except OffbeatError as error:
            notes.append(f"strategy {each.name!r} is not explained: {error}")
    return tuple(found), notes
