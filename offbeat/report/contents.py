"""Collect every number and picture of the report page from a Profile or Timeline."""

import shlex
from dataclasses import dataclass, fields, replace
from typing import Any

from offbeat.cost.interval import Interval
from offbeat.errors import OffbeatError
from offbeat.profile.measure import Profile
from offbeat.profile.whatif import plan_known, replay_scale, trust_in, what_if
from offbeat.report.advice import WhatIfs, what_would_help
from offbeat.report.steps import PARTS, TimelineSteps, parts_of, with_marks
from offbeat.search.explain import Explanation, explain
from offbeat.search.frontier.model import Frontier
from offbeat.strategy import Strategy
from offbeat.timeline import Timeline
from offbeat.timeline.diagnosis import IDLE, Diagnosis, diagnose
from offbeat.units import format_seconds, format_speedup

MOST_STEPS_IN_PARTS = 200
"""For longer recordings only the duration of each step is shown, not its parts."""
MOST_BLAMED = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """The replay of the recorded job compared with the measurement."""

    predicted: Timeline
    interval: Interval
    """Of the predicted step."""
    measured_step_seconds: float
    predicted_step_seconds: float
    measured_parts: dict[str, float]
    predicted_parts: dict[str, float]

    @property
    def error(self) -> float:
        """0.02: the predicted step is 2% longer."""
        return self.predicted_step_seconds / self.measured_step_seconds - 1 if self.measured_step_seconds else 0.0

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """(what, measured, predicted) in seconds: the step, then its parts."""
        parts = [(label, self.measured_parts[key], self.predicted_parts[key]) for key, label in PARTS.items()]
        return [("step", self.measured_step_seconds, self.predicted_step_seconds), *parts]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        drawn = ("predicted", "interval")
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in drawn}
        return plain | self.interval.fields("predicted_step") | {"error": self.error}


@dataclass(frozen=True)
class Other:
    """Another recording to compare with."""

    title: str
    timeline: Timeline
    diagnosis: Diagnosis
    nodes: dict[int, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"title": self.title, "step_seconds": self.diagnosis.step_seconds, "parts": parts_of(self.diagnosis)}


@dataclass(frozen=True)
class Report:
    """The contents of a report. Times are seconds per step."""

    title: str
    timeline: Timeline
    nodes: dict[int, str]
    """Node of each rank; empty if unknown."""
    step_seconds: float
    """Median over steps."""
    steps: tuple[float, ...]
    """Seconds of each step: the mean over ranks."""
    step_parts: tuple[dict[str, float], ...]
    """Seconds of each step by key of `PARTS`; empty if there are too many steps."""
    diagnosis: Diagnosis
    comparison: Comparison | None
    help: WhatIfs | None
    explanations: tuple[Explanation, ...]
    """Explanations of the strategy that ran, and of the given one or the best one found."""
    strategy_given: bool
    frontier: Frontier | None
    trace: str
    """Path of the recording, for commands to copy; empty if unknown."""
    other: Other | None
    notes: tuple[str, ...]

    @property
    def parts(self) -> dict[str, float]:
        """Where the time of a step goes: the mean over ranks and steps."""
        return parts_of(self.diagnosis)

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands for the most effective free change; empty if there is none, or for a trace without names."""
        if self.help is None or self.help.free is None or not self.trace:
            return ()
        return (
            f"offbeat optimize {shlex.quote(self.trace)} -o strategy.json",
            'model, optimizer = offbeat.distribute(model, optimizer, strategy="strategy.json")',
        )

    @property
    def versus(self) -> list[tuple[str, float, float]]:
        """(what, here, in the other recording) in seconds: the step, the bound, then the step's parts."""
        if self.other is None:
            return []
        theirs = parts_of(self.other.diagnosis)
        bounds = self.diagnosis.ideal_seconds, self.other.diagnosis.ideal_seconds
        rows = [("step", self.step_seconds, self.other.diagnosis.step_seconds)]
        rows += [("bound", *bounds)] if None not in bounds else []  # type: ignore[list-item]
        return rows + [(label, self.parts[key], theirs[key]) for key, label in PARTS.items()]

    @property
    def headline(self) -> str:
        """The finding in two sentences."""
        total = sum(self.parts.values()) or 1.0
        shares = {key: seconds / total for key, seconds in self.parts.items()}
        text = f"{shares['compute']:.0%} of the step is compute"
        lost = max((key for key in PARTS if key != "compute"), key=lambda key: shares[key])
        if shares[lost] >= 0.01:
            text += f"; most of the rest, {shares[lost]:.0%} of the step, is {PARTS[lost]}"
        if lost == "idle" and self.diagnosis.idle_by_reason:
            text += f" {IDLE[next(iter(self.diagnosis.idle_by_reason))]}"
        rows = self.help.rows if self.help else ()
        if self.help is None or not rows:
            return f"{text}."
        best = self.help.free or rows[0]
        if best.speedup(self.step_seconds) < 1.01:
            return f"{text}. None of the replayed changes shortens it by more than 1%."
        words = best.label[0].lower() + best.label[1:]
        helps = "Most effective free change" if best.free else "Most effective change"
        faster = format_speedup(self.step_seconds, best.seconds)
        step = f"{format_seconds(best.seconds)} per step {best.interval.bounds}{best.interval.doubt(self.step_seconds)}"
        return f"{text}. {helps}: {words}, predicted {faster}: {step}."

    def to_dict(self) -> dict[str, Any]:
        """Every number of the page, ready for JSON."""
        frontier = [
            {"memory_bytes": point.memory_bytes, "time_seconds": point.time_seconds, "engine": point.name}
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
            "commands": list(self.commands),
            "compared_with": self.other.to_dict() if self.other else None,
            "notes": list(self.notes),
        }


def make_report(
    recording: Profile | Timeline,
    *,
    title: str = "report",
    predicted: Timeline | None = None,
    strategy: Strategy | None = None,
    frontier: Frontier | None = None,
    what_ifs: bool = True,
    trace: str = "",
    compare: tuple[str, Profile | Timeline] | None = None,
) -> Report:
    """Diagnoses, compares, and replays what-ifs, unless `what_ifs` is off.

    `predicted` is set beside a measured Timeline; a Profile is replayed for that. `strategy` is explained beside the
    recorded one, and `compare` is the name of another recording and the recording.
    """
    profile = recording if isinstance(recording, Profile) else None
    timeline = with_marks(recording.timeline if isinstance(recording, Profile) else recording)
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
        nodes=_nodes(recording),
        step_seconds=timeline.iteration_time,
        steps=tuple(timeline.step_seconds.tolist()),
        step_parts=_step_parts(timeline),
        diagnosis=diagnosis,
        comparison=_comparison(profile, timeline, diagnosis, predicted),
        help=helped,
        explanations=explanations,
        strategy_given=strategy is not None,
        frontier=frontier if frontier and frontier.points else None,
        trace=trace,
        other=None if compare is None else _other(*compare),
        notes=tuple(notes),
    )


def _other(title: str, recording: Profile | Timeline) -> Other:
    timeline = with_marks(recording.timeline if isinstance(recording, Profile) else recording)
    if not len(timeline):
        raise OffbeatError(f"{title}: the trace has no spans, so there is nothing to compare with")
    return Other(title, timeline, diagnose(timeline), _nodes(recording))


def _nodes(recording: Profile | Timeline) -> dict[int, str]:
    if isinstance(recording, Timeline):
        return {}
    cluster = recording.cluster
    return {rank: cluster.device_of(rank).name for rank in recording.timeline.ranks if rank < cluster.world_size}


def _step_parts(timeline: Timeline) -> tuple[dict[str, float], ...]:
    steps = TimelineSteps(timeline)
    if len(steps) > MOST_STEPS_IN_PARTS:
        return ()
    parts = [steps.part(step, step) for step in range(len(steps))]
    found = tuple(parts_of(diagnose(part)) for part in parts if part is not None)
    return found if len(found) == len(steps) else ()


def _comparison(
    profile: Profile | None, timeline: Timeline, diagnosis: Diagnosis, predicted: Timeline | None
) -> Comparison | None:
    measured = timeline.source == "measured"
    if measured and predicted is None and profile is not None and plan_known(profile):
        predicted = what_if(profile, ())[0]
    if not measured or predicted is None:
        return None
    return Comparison(
        predicted=predicted,
        interval=trust_in(profile or timeline).interval(predicted.iteration_time, "same"),
        measured_step_seconds=timeline.iteration_time,
        predicted_step_seconds=predicted.iteration_time,
        measured_parts=parts_of(diagnosis),
        predicted_parts=parts_of(diagnose(predicted)),
    )


def _explained(
    profile: Profile | None, helped: WhatIfs | None, strategy: Strategy | None
) -> tuple[tuple[Explanation, ...], list[str]]:
    """Explains the strategy that ran and the given or best one; also returns notes on what could not be explained."""
    if profile is None or not plan_known(profile) or profile.cluster.world_size == 1:
        return (), []
    asked, scale, trust = [profile.strategy], replay_scale(profile), trust_in(profile)
    if strategy is not None:
        asked.append(strategy.model_copy(update={"graph": "", "cluster": ""}))
    elif helped is not None and helped.best is not None:
        asked.append(helped.best.strategy.model_copy(update={"name": helped.best.name}))
    found, notes = [], []
    for each in asked:
        try:
            ran = profile.strategy, profile.step_seconds
            job = profile.graph, profile.cluster, profile.costs
            found.append(explain(each, *job, ran=ran, scale=scale, trust=trust))
        except OffbeatError as error:
            notes.append(f"strategy {each.name!r} is not explained: {error}")
    return tuple(found), notes
