"""Write the plans that an Offbeat job follows into its trace, and read them back.

An engine may rebuild its issue order during a run, and a job may switch to another strategy. The recorder writes the
plan before the first step that follows it; a profile replays its steps with that plan (`Profile.plan`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from offbeat.plan import Piece, Plan
from offbeat.strategy import Strategy

ANYWHERE = {"graph": "", "cluster": ""}
"""A strategy that ran fits the graph measured while it did, whatever it was made for."""


@dataclass(frozen=True)
class RecordedPlan:
    """The plan in force during some steps, as one rank or all of them recorded it."""

    strategy: Strategy
    messages: tuple[tuple[Piece, ...], ...]
    order: tuple[tuple[int, int], ...]
    """The slices of gradients in the order in which they left: message and first element of each."""

    def applied_to(self, plan: Plan) -> Plan:
        """The plan with its gradients in the recorded order.

        The plan may number its messages otherwise, because its graph was measured. A variable that got no gradient
        while the job was recorded is missing there; slices of its message then go where the message's first one went.
        """
        message_of = {piece: number for number, pieces in enumerate(self.messages) for piece in pieces}
        place = {piece: number for number, piece in enumerate(self.order)}
        first = {message: number for (message, _), number in reversed(place.items())}
        known = [
            next((message_of[piece] for piece in message.pieces if piece in message_of), -1)
            for message in plan.messages
        ]

        def recorded_place(piece: tuple[int, int]) -> int:
            message, start = known[piece[0]], piece[1]
            return place.get((message, start), first.get(message, len(place)))

        return plan.reordered(sorted(plan.issue_order, key=recorded_place))


def of_all_ranks(plans: Sequence[RecordedPlan]) -> RecordedPlan:
    """One plan from those of several ranks, each of which knows only the slices that it sends."""
    place: dict[tuple[int, int], float] = {}
    for plan in plans:
        for number, piece in enumerate(plan.order):
            place.setdefault(piece, number / len(plan.order))
    return replace(plans[0], order=tuple(sorted(place, key=lambda piece: place[piece])))


class PlanWriter:
    """Tells what has changed about the plan in force since it was last asked."""

    def __init__(self) -> None:
        self.seen: tuple[Plan, str] | None = None
        self.written: dict[str, Any] = {}

    def changes(self, plan: Plan, mode: Literal["deferred", "barrier"]) -> dict[str, Any]:
        """The fields of a plan line that differ from the line before; empty if none does. `mode` is the engine's."""
        if self.seen is not None and self.seen[0] is plan and self.seen[1] == mode:
            return {}
        self.seen = (plan, mode)
        strategy = plan.strategy
        if mode == "barrier":
            # The training loop or the optimizer may need one, whatever the strategy says.
            strategy = strategy.model_copy(update={"schedule": strategy.schedule.model_copy(update={"mode": mode})})
        fields = {
            "strategy": strategy.model_dump(mode="json", exclude_defaults=True),
            "messages": [[(piece.variable, piece.box) for piece in message.pieces] for message in plan.messages],
            "order": plan.issue_order,
        }
        changed = {name: value for name, value in fields.items() if self.written.get(name) != value}
        self.written = fields
        return changed
