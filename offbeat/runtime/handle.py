"""`model.offbeat`: what Offbeat does with a distributed model."""

import os
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import OffbeatError
from offbeat.plan import Plan
from offbeat.timeline import Timeline

if TYPE_CHECKING:
    from offbeat.runtime.distribute import Runtime
    from offbeat.runtime.fsdp import FsdpRuntime

QUIET_VARIABLE = "OFFBEAT_QUIET"
"""If set, Offbeat does not print its decisions."""


@dataclass(frozen=True)
class Decision:
    """A plan that was tried during training, or why none was."""

    step: int
    what: str
    """In words: the plan, its step before and after, the prediction, and whether it was kept."""
    strategy: str = ""
    """Name of the tried strategy; empty if none was."""
    kept: bool = False
    predicted_seconds: float | None = None
    predicted_bytes: int | None = None
    """Peak memory of the fullest rank, where a memory limit chose the plan."""
    predicted_low_seconds: float | None = None
    predicted_high_seconds: float | None = None
    """Between which 9 of 10 such predictions turn out to be."""
    seconds_before: float | None = None
    seconds_after: float | None = None


class Handle:
    """The current plan, and the decisions that led to it."""

    def __init__(self, runtime: "Runtime | FsdpRuntime") -> None:
        self._runtime = runtime

    @property
    def plan(self) -> Plan:
        """The current plan."""
        return self._runtime.plan

    @property
    def mode(self) -> str:
        """'deferred' or 'barrier'."""
        return self._runtime.mode

    @property
    def settled(self) -> bool:
        """Whether no other plan is being searched for or tried; the same on every rank at the same step."""
        return self._runtime.settled

    @property
    def history(self) -> tuple[Decision, ...]:
        """The decisions so far, in order; on rank 0."""
        return tuple(self._runtime.history)

    def timeline(self) -> Timeline:
        """The predicted step of the current plan with the times recorded in this job; on rank 0, once "auto" has
        searched. The first call compiles for some seconds."""
        if self._runtime.predict is None:
            raise OffbeatError(
                "model.offbeat.timeline(): no step has been recorded here; only 'auto' records steps, on rank 0"
            )
        return self._runtime.predict(self.plan)

    def save_strategy(self, path: str | os.PathLike[str]) -> None:
        """Saves the current strategy, so that the next run can start with it."""
        self.plan.strategy.save(Path(path))

    def summary(self) -> str:
        """The current plan and its history, in words."""
        plan = self.plan
        size = sum(message.bytes for message in plan.messages)
        first = (
            f"strategy '{plan.strategy.name}' in {self.mode} mode on {len(plan.replicas)} ranks: "
            f"{len(plan.messages)} messages, {size / 1e6:.1f} MB of gradients"
        )
        return "\n".join([first, *(f"step {each.step}: {each.what}" for each in self.history)])

    def _repr_html_(self) -> str:
        """The summary, for notebooks."""
        first, *rest = map(escape, self.summary().splitlines())
        return f"<b>{first}</b><ul>{''.join(f'<li>{each}</li>' for each in rest)}</ul>"

    def __repr__(self) -> str:
        return f"<offbeat: {self.summary().splitlines()[0]}>"


def tell(runtime: "Runtime | FsdpRuntime", decision: Decision) -> None:
    """Stores a decision, and prints it once on rank 0."""
    runtime.history.append(decision)
    if runtime.world.rank == 0 and not (runtime.quiet or os.environ.get(QUIET_VARIABLE)):
        print(f"offbeat, step {decision.step}: {decision.what}", file=sys.stderr, flush=True)
