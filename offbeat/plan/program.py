"""StepProgram: what one training step computes, sends, waits for and applies, as one flat value.

The runtime's engine walks a program, and `offbeat.simulate` walks the same one, so that what is simulated is what is
run. A step is a row of compute *slots*: first the forward that precedes all backward, then everything behind it
(backward, recomputation, further micro-batches). A gradient task leaves when the slot that completes its last gradient
has ended, in the issue order. A *component* is waited for as a whole, because its messages hold parts of the same
variables; the program says before which slot, and what is applied there: one update, slices as they arrive, or nothing,
because owners have applied it in the *tail*. With a barrier, `step()` waits for everything instead.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offbeat.graph.model import ELEMENTWISE, ModelGraph
from offbeat.plan.model import Message, Plan, Task
from offbeat.strategy import Shard

Regime = Literal["synchronous", "stale", "asynchronous"]
"""How a message keeps up: applied in its own step, up to some steps later, or whenever its server comes to it."""


class Slot(NamedTuple):
    """One stretch of compute that no communication event interrupts."""

    segment: int
    """Its place in the plan's segments."""
    phase: Literal["forward", "backward"]
    name: str


class Issue(NamedTuple):
    """A task and when the step issues it. Stale and asynchronous gradients, and the whole tail, wait for `step()`."""

    task: Task
    regime: Regime
    slot: int = -1
    """For a gradient task, the slot that completes the last gradient it carries."""


class Placed(NamedTuple):
    """A collective of a fully sharded unit, which has its own place in the step."""

    task: Task
    slot: int
    """A gather is issued before this slot, a reduction behind it."""
    needed: int
    """The slot that waits for it; the number of slots for `step()`."""


class Use(NamedTuple):
    """When a step needs one variable. Sorts by first use."""

    read: int
    """The first slot that reads it; the first of all where none does."""
    place: int
    """Among the variables first read in that slot."""
    completed: int
    """The slot after which its gradient is complete."""


@dataclass(frozen=True, slots=True)
class Component:
    """Messages that are waited for together, and the update that follows."""

    messages: tuple[int, ...]
    slot: int
    """Waits for the component, in deferred mode."""
    applied: tuple[int, ...]
    """Messages whose update every replica applies here; owners have applied the others."""
    slices: tuple[Task, ...]
    """If not empty, the update is applied slice by slice, in this order, as these tasks end."""
    staleness: int
    asynchronous: bool
    """No slot waits for it."""


@dataclass(frozen=True)
class StepProgram:
    """One step of a plan: of all ranks, or of the plan's own."""

    slots: tuple[Slot, ...]
    ahead: int
    """How many of the slots are the forward before the first backward."""
    uses: Mapping[str, Use]
    """By variable, of those that get a gradient."""
    sends: tuple[Issue, ...]
    """The gradient tasks, in issue order."""
    components: tuple[Component, ...]
    settles: tuple[int, ...]
    """Components in the order in which slots wait for them."""
    tail: tuple[Issue, ...]
    """Further stages, owners' updates and returns, in issue order."""
    barrier: bool
    """`step()` waits for everything and applies `whole` in one optimizer call."""
    whole: tuple[int, ...]
    """Messages of which every replica applies the update, asynchronous ones excepted."""
    carriers: Mapping[str, tuple[int, ...]]
    """Messages that carry parts of each variable."""
    awaited: tuple[int, ...]
    """Of each message, the number of variables whose gradients it waits for."""
    placed: tuple[Placed, ...] = ()
    """Every collective of a step whose variables are fully sharded, in issue order."""
    reductions: int = 0
    """Of these, the reductions that may be in flight when the next one begins: backward waits for the others."""

    @property
    def order(self) -> tuple[Task, ...]:
        """The gradient tasks that backward issues, in order."""
        return tuple(send.task for send in self.sends if send.regime != "asynchronous")

    def tail_of(self, regime: Regime) -> tuple[Task, ...]:
        """The tail's tasks of one regime, in order."""
        return tuple(later.task for later in self.tail if later.regime == regime)

    @property
    def replicated(self) -> bool:
        """Every replica applies every update, each in its own step."""
        return not (self.tail or self.placed) and not any(
            each.staleness or each.asynchronous for each in self.components
        )


def applied_as_it_arrives(graph: ModelGraph, carrier: Message | Shard) -> bool:
    """Whether every replica can apply any part of the gradient alone: it travels as it is, and the optimizer treats
    each element by itself."""
    plain = carrier.synchronizer in ("all_reduce", "summation_server") and carrier.encoder.name == "none"
    return plain and not (carrier.staleness or carrier.asynchronous) and graph.optimizer in ELEMENTWISE


def program_of(plan: Plan) -> StepProgram:
    """The plan's step; `Plan.program` keeps it."""
    behind = [s.phase != "forward" or s.recomputed or s.microbatch > 0 for s in plan.segments]
    slots = tuple(
        Slot(number, "forward" if segment.phase == "forward" else "backward", segment.name)
        for number, segment in sorted(enumerate(plan.segments), key=lambda item: behind[item[0]])
    )
    uses = _uses(plan, slots)
    sends = tuple(
        Issue(task, _regime(plan, task), max((uses[name].completed for name in task.waits_for), default=0))
        for task in plan.tasks
        if task.stage == 0
    )
    carriers: dict[str, tuple[int, ...]] = {}
    for message in plan.messages:
        for name in message.variables:
            carriers[name] = (*carriers.get(name, ()), message.index)
    first = [min(uses[name] for i in group for name in plan.messages[i].variables) for group in plan.components]
    slices = _slices(plan, sends)
    # In fully sharded units every rank applies the update of its own part, all at once.
    own = [message.replicated or plan.strategy.fsdp is not None for message in plan.messages]
    return StepProgram(
        slots=slots,
        ahead=behind.count(False),
        uses=uses,
        sends=sends,
        components=tuple(
            Component(
                messages=group,
                slot=use.read,
                applied=tuple(index for index in group if own[index]),
                slices=slices.get(group[0], ()),
                staleness=max(plan.messages[index].staleness for index in group),
                asynchronous=any(plan.messages[index].asynchronous for index in group),
            )
            for group, use in zip(plan.components, first, strict=True)
        ),
        # By the first slot that reads any of their variables, and by the variable's place there.
        settles=tuple(sorted(range(len(first)), key=lambda number: first[number][:2])),
        tail=tuple(Issue(task, _regime(plan, task)) for task in plan.tasks if task.stage > 0 and not own[task.message]),
        barrier=plan.mode == "barrier",
        whole=tuple(m.index for m in plan.messages if own[m.index] and not m.asynchronous),
        carriers=carriers,
        awaited=tuple(len(message.variables) for message in plan.messages),
        placed=_placed(plan, slots),
        # On a CPU torch's reduce-scatter returns when it has ended; elsewhere one buffer may be in flight.
        reductions=int(plan.cluster.device_of(plan.replicas[0]).device != "cpu"),
    )


def _placed(plan: Plan, slots: tuple[Slot, ...]) -> tuple[Placed, ...]:
    slot_of = {slot.segment: number for number, slot in enumerate(slots)}
    return tuple(
        Placed(task, slot_of[task.window.issued], slot_of.get(task.window.needed, len(slots)))
        for task in plan.communication
        if task.window is not None
    )


def _uses(plan: Plan, slots: tuple[Slot, ...]) -> dict[str, Use]:
    completed: dict[str, int] = {}
    read: dict[str, tuple[int, int]] = {}
    for number, slot in enumerate(slots):
        segment = plan.segments[slot.segment]
        completed |= dict.fromkeys(segment.completes, number)
        for place, name in enumerate(segment.reads):
            read.setdefault(name, (number, place))
    # What no slot reads is waited for by the first one, behind its own.
    unread = (0, len(plan.graph.variables))
    return {name: Use(*read.get(name, unread), number) for name, number in completed.items()}


def _regime(plan: Plan, task: Task) -> Regime:
    message = plan.messages[task.message]
    return "asynchronous" if message.asynchronous else "stale" if message.staleness else "synchronous"


def _slices(plan: Plan, sends: tuple[Issue, ...]) -> dict[int, tuple[Task, ...]]:
    """Messages that are applied slice by slice, and their tasks in issue order."""
    tasks: dict[int, list[Task]] = defaultdict(list)
    for send in sends if plan.mode != "barrier" else ():
        tasks[send.task.message].append(send.task)
    return {
        index: tuple(found)
        for index, found in tasks.items()
        if len(found) > 1
        and all(piece.shape == plan.graph.variable(piece.variable).shape for piece in plan.messages[index].pieces)
        and [task.start for task in found] == [0, *(task.stop for task in found[:-1])]
        and applied_as_it_arrives(plan.graph, plan.messages[index])
    }
