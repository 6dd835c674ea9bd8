"""The problem of a search: evaluates candidates by step seconds and peak bytes.

And the open, ordered list of the passes that propose candidates (dPRO's Graph Pass Registry).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.cost.memory import peak_memory
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.plan import Plan, lower
from offbeat.search.arrange import arranged, rescheduled
from offbeat.simulate import step_seconds
from offbeat.simulate.fast.gradients import Arrangement, Gradients, gradients_of
from offbeat.simulate.roles import find_roles
from offbeat.strategy import Strategy
from offbeat.strategy.model import Engine

AMP = "amp"
"""What a user may allow in addition to encoders: autocast."""


@dataclass(frozen=True)
class Candidate:
    """A replayed strategy."""

    name: str
    """Its origin: a builder's or a pass's name."""
    strategy: Strategy
    seconds: float
    """Step time."""
    plan: Plan = field(repr=False)
    peak_bytes: int = 0
    """Of the fullest rank; 0 if memory is not limited."""
    decisions: tuple[str, ...] = ()
    """The names of all candidates it was derived from, and its own."""

    @property
    def kind(self) -> str:
        """What distinguishes it on real processors: few or many messages, updates at once or one by one."""
        if self.plan.mode == "barrier":
            return "barrier"
        return "few messages" if len(self.plan.messages) <= 8 else "many messages"


@dataclass
class Problem:
    """A model, a cluster, their costs, and what the search may do."""

    graph: ModelGraph
    cluster: ClusterSpec
    costs: Costs
    symmetry: bool = True
    """Whether ranks that behave alike are replayed once."""
    partial_replay: bool = True
    """Whether a step is evaluated by `offbeat.simulate.fast` where that is exact."""
    mode: Literal["auto", "deferred", "barrier"] = "auto"
    """Whether updates may overlap the next forward: 'auto' and 'deferred' allow it, 'barrier' does not."""
    memory_limit: int | None = None
    """Bytes per rank."""
    engines: Sequence[Engine] = ("replicated", "sharded")
    """What may run the strategy."""
    allow: Sequence[str] = ()
    """Encoders that gradients may be sent with ('bf16', 'powersgd:4'), without any they travel exact; and 'amp' for
    autocast."""
    whole_state: bool = False
    """Whether every replica must hold all of the optimizer's state, so that a script may save it on one of them."""
    micro_batches: bool = True
    """Whether the model returns its loss, so that a batch can be computed in parts."""
    coarsen: bool = True
    """Whether the variables of a module are moved together."""
    deadline: float | None = None
    """On time.monotonic()'s clock."""
    _gradients: tuple[Plan | None, Gradients | None] = field(default=(None, None), repr=False)
    """Of the plan that was last asked about."""

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "deferred", "barrier"):
            raise OffbeatError(f"mode: {self.mode!r} must be 'auto', 'deferred' or 'barrier'")

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def evaluate(self, strategy: Strategy, name: str, origin: Candidate | None = None) -> Candidate:
        """Replays a strategy in the requested mode."""
        if self.mode not in ("auto", strategy.schedule.mode):
            strategy = rescheduled(strategy, mode=self.mode)
        plan = lower(self.graph, self.cluster, strategy)
        peak = 0
        if self.memory_limit is not None:
            roles = find_roles(plan, self.costs.compute_scale)
            peak = max(peak_memory(plan, rank).total for rank in roles.representatives)
        seconds = step_seconds(plan, self.costs, fold=self.symmetry, compiled=self.partial_replay)
        return Candidate(name, strategy, seconds, plan, peak, (*(origin.decisions if origin else ()), name))

    def fits(self, candidate: Candidate) -> bool:
        if candidate.strategy.engine not in self.engines or (self.whole_state and not candidate.plan.whole_state):
            return False
        return self.memory_limit is None or candidate.peak_bytes <= self.memory_limit

    def gradients(self, candidate: Candidate) -> Gradients | None:
        """The candidate's gradients as units; None if it cuts them or updates them on servers."""
        if self._gradients[0] is not candidate.plan:
            self._gradients = candidate.plan, gradients_of(candidate.plan, self.costs, coarsen=self.coarsen)
        return self._gradients[1]

    def arrangement_seconds(self, gradients: Gradients, arrangement: Arrangement, base: Candidate) -> float:
        """Step time of an arrangement; without partial replay, by lowering and replaying all of it."""
        if self.partial_replay:
            return gradients.seconds(arrangement)
        return self.evaluate(arranged(gradients, arrangement, base.strategy), "trial").seconds


Propose = Callable[[Candidate, Problem], Iterable[Strategy]]
Aim = Literal["speed", "memory"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One optimisation technique. It proposes candidates; replay decides."""

    name: str
    propose: Propose
    aim: Aim
    order: int
    """Passes of one aim run from low to high."""


PASSES: dict[str, Pass] = {}


def register_pass(name: str, *, aim: Aim = "speed", order: int = 100) -> Callable[[Propose], Propose]:
    """Decorator: makes `propose(candidate, problem) -> strategies` a pass of every later `optimize`.

    A pass with the aim "memory" runs when a memory limit is exceeded; the others until none of them shortens the step.
    """

    def register(propose: Propose) -> Propose:
        if name in PASSES:
            raise OffbeatError(f"a pass named {name!r} already exists: {PASSES[name].propose.__module__}")
        PASSES[name] = Pass(name, propose, aim, order)
        return propose

    return register


def select_passes(names: Sequence[str] | None) -> list[Pass]:
    """The named passes (None: all), in the order in which they run."""
    if isinstance(names, str):
        raise OffbeatError(f"passes: {names!r} must be a list of names")
    ordered = sorted(PASSES.values(), key=lambda each: (each.aim, each.order, each.name))
    for name in names or ():
        if name not in PASSES:
            there = ", ".join(each.name for each in ordered)
            raise OffbeatError(f"passes: unknown pass {name!r}; known: {there}")
    return [each for each in ordered if names is None or each.name in names]
