"""Plan: what each rank computes and sends in one step, and in which order.

Messages are what travels: pieces of variables laid one after another. Tasks are the collectives (and optimizer updates)
that move and apply them, in an issue order that is the same on every rank, so that nothing is negotiated at run time.
Segments are the compute between two events that communication cares about: the first use of a variable in forward, and
the completion of a gradient in backward.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from offbeat.cluster import ClusterSpec
from offbeat.errors import PlanError
from offbeat.graph import ModelGraph
from offbeat.graph.coarsen import Segment
from offbeat.graph.model import ITEM_BYTES
from offbeat.strategy import Encoder, Shard, Strategy
from offbeat.strategy.model import Synchronizer

if TYPE_CHECKING:
    from offbeat.plan.program import StepProgram

TaskKind = Literal["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "gather", "relay", "update"]
"""A relay sums at its root what the others send, and sends the sum back to them."""

REPLICATED: tuple[Synchronizer, ...] = ("all_reduce", "sparse_all_gather", "factor_broadcast", "summation_server")
"""Synchronisers after which every replica applies the update itself."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a variable: (start, stop) along each axis."""

    variable: str
    box: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces sent together, in their order in the message."""

    index: int
    group: int | None
    pieces: tuple[Piece, ...]
    dtype: str
    synchronizer: Synchronizer
    owner: int | None
    """Rank of the server that applies the update; None if every replica does."""
    stations: tuple[int, ...]
    reduction_order: tuple[int, ...]
    encoder: Encoder
    staleness: int
    asynchronous: bool
    gradient_bytes: int = 0
    """Encoded bytes of one replica's gradient."""
    parameter_bytes: int = 0
    """Bytes returned from a server to a replica."""
    roots: tuple[int, ...] = ()
    """Ranks that sum it for all replicas, each for some of its slices."""

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.pieces)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(piece.variable for piece in self.pieces))

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks that own or sum it; () if replicas exchange it among themselves."""
        return self.roots if self.owner is None else (self.owner,)

    @property
    def replicated(self) -> bool:
        """Every replica applies the update itself."""
        return self.synchronizer in REPLICATED


class Window(NamedTuple):
    """The place of a fully sharded unit's collective in the step, in numbers of segments."""

    issued: int
    """Parameters are gathered from the start of this segment, gradients reduced from its end."""
    needed: int
    """The segment that waits for it; the number of segments for `step()`."""
    freed: int
    """The segment after which gathered parameters are freed."""


@dataclass(frozen=True, slots=True)
class Task:
    """One collective on a range of a message, or the update of one message."""

    index: int
    """Identifies the task on every rank and in recordings: its position in lowering order."""
    kind: TaskKind
    message: int
    stage: int
    start: int
    stop: int
    """Range of the message's elements."""
    ranks: tuple[int, ...]
    """Participants, in ring order."""
    root: int | None
    wire_bytes: int
    """Encoded bytes that each participant contributes (for a broadcast, the root alone)."""
    waits_for: tuple[str, ...]
    """Variables whose gradients must be complete."""
    after: tuple[int, ...]
    """Tasks that must have finished on this rank."""
    delivers: tuple[str, ...]
    """Variables that are up to date here once every task that delivers them has finished."""
    window: Window | None = None
    """Its place in the step, if it belongs to a fully sharded unit."""

    @property
    def name(self) -> str:
        return f"m{self.message}.{self.kind}[{self.start}:{self.stop}]"

    @property
    def lane(self) -> Literal["up", "across", "back"]:
        """Gradients go up; what an owner returns comes back on a channel of its own, and so do parts of gradients
        between replicas."""
        if self.stage > 0 and self.kind == "all_reduce":
            return "across"
        return "back" if self.stage > 0 and self.delivers else "up"

    @property
    def halves(self) -> tuple["Task", ...]:
        """The two directions of a relay; any other task itself."""
        return (replace(self, kind="reduce"), replace(self, kind="broadcast")) if self.kind == "relay" else (self,)

    def fills_incoming(self, rank: int | None) -> bool:
        """Whether a reduce or broadcast that goes straight takes a participant's link towards it, not away from it."""
        return (rank == self.root) == (self.kind == "reduce")

    @property
    def link_bytes(self) -> float:
        """Bytes that the busiest participant sends."""
        return self.wire_bytes * sent_per_byte(self.kind, len(self.ranks))


def sent_per_byte(kind: str, participants: int) -> float:
    """Bytes that the busiest participant of a collective sends for each that one puts in (the AutoSync supplement's
    Eq. 3). The root of a gather or a relay is the busiest: its link carries what all the others send."""
    others = participants - 1
    match kind:
        case "all_reduce":
            return 2 * others / participants
        case "reduce_scatter" | "all_to_all":
            return others / participants
        case "all_gather" | "gather" | "relay":
            return float(others)
        case "reduce" | "broadcast":
            return float(others > 0)
        case _:
            return 0.0


@dataclass(frozen=True)
class Plan:
    """The lowered form of a strategy: for all ranks, or for one (`rank`)."""

    graph: ModelGraph
    cluster: ClusterSpec
    strategy: Strategy
    replicas: tuple[int, ...]
    weights: tuple[float, ...]
    """Share of each replica in the average; they sum to 1."""
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    tasks: tuple[Task, ...]
    """In issue order."""
    rank: int | None = None

    @cached_property
    def program(self) -> "StepProgram":
        """What a step does, for the runtime and the simulator; see `offbeat.plan.program`."""
        from offbeat.plan.program import program_of

        return program_of(self)

    @property
    def apart(self) -> tuple[int, ...]:
        """The ranks of the cluster that hold no replica."""
        return tuple(rank for rank in range(self.cluster.world_size) if rank not in self.replicas)

    @cached_property
    def participants(self) -> tuple[int, ...]:
        """The replicas, and the ranks without a replica that own or sum parts of messages."""
        serving = {rank for message in self.messages for rank in message.servers}
        return (*self.replicas, *sorted(serving - set(self.replicas)))

    @property
    def issue_order(self) -> tuple[tuple[int, int], ...]:
        """The slices of gradients in sending order: message and first element of each.

        Every rank knows all of them, even those that others first reduce among themselves.
        """
        sent = (task for task in self.communication if task.lane == "up")
        return tuple(dict.fromkeys((task.message, task.start) for task in sent))

    def reordered(self, order: Iterable[tuple[int, int]]) -> "Plan":
        """The same tasks with gradients sent in another order, given like `issue_order`."""
        place = {piece: number for number, piece in enumerate(order)}
        known = self.issue_order
        if set(place) != set(known):
            raise PlanError(f"an order of {len(place)} slices does not name each of the plan's {len(known)} once")
        first = sorted((t for t in self.tasks if t.stage == 0), key=lambda task: place[task.message, task.start])
        plan = replace(self, tasks=(*first, *(task for task in self.tasks if task.stage > 0)))
        plan.check()
        return plan

    def for_rank(self, rank: int) -> "Plan":
        """One rank's part; equal to what `lower(..., rank=rank)` derives alone."""
        mine = tuple(task for task in self.tasks if rank in task.ranks)
        known = {task.index for task in mine}
        tasks = tuple(replace(task, after=tuple(i for i in task.after if i in known)) for task in mine)
        return replace(self, tasks=tasks, rank=rank)

    def check(self) -> None:
        """Raises PlanError unless the plan can be executed; see `offbeat.plan.check`."""
        from offbeat.plan.check import check

        check(self)

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """Messages by index, grouped if they hold parts of the same variables and so are applied together."""
        leader = list(range(len(self.messages)))

        def find(index: int) -> int:
            while leader[index] != index:
                leader[index] = leader[leader[index]]
                index = leader[index]
            return index

        first: dict[str, int] = {}
        for message in self.messages:
            for name in message.variables:
                leader[find(message.index)] = find(first.setdefault(name, message.index))
        grouped: dict[int, list[int]] = {}
        for message in self.messages:
            grouped.setdefault(find(message.index), []).append(message.index)
        return tuple(map(tuple, grouped.values()))

    @property
    def communication(self) -> tuple[Task, ...]:
        """The tasks that use the network."""
        return tuple(task for task in self.tasks if task.kind != "update")

    @property
    def link_bytes(self) -> float:
        """Bytes that the busiest participants send in one step."""
        return sum(task.link_bytes for task in self.tasks)

    @property
    def mode(self) -> Literal["deferred", "barrier"]:
        barrier = self.strategy.fsdp is not None or self.strategy.schedule.mode == "barrier"
        return "barrier" if barrier else "deferred"

    @property
    def whole_state(self) -> bool:
        """Every replica updates all variables, and so holds all of the optimizer's state: one alone can save it."""
        return self.strategy.fsdp is None and all(message.replicated for message in self.messages)

    @property
    def shards(self) -> int:
        """Number of shards of each variable with fully_shard; 1 for other strategies."""
        return 1 if self.strategy.fsdp is None else len(self.replicas) // self.strategy.fsdp.replicas


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a message: the same operation in disjoint groups of ranks."""

    kind: TaskKind
    groups: tuple[tuple[tuple[int, ...], int | None], ...]
    """(participants, root) of each group."""
    returns: bool = False
    """Carries parameters back to the replicas rather than gradients to the updater."""
    window: Window | None = None


@dataclass
class Draft:
    """A plan under construction, filled in by the kernels of `offbeat.plan.lower`, in their order."""

    graph: ModelGraph
    cluster: ClusterSpec
    strategy: Strategy
    rank: int | None
    replicas: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    segments: list[Segment] = field(default_factory=list)
    pieces: list[tuple[Piece, Shard]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    stages: list[tuple[Stage, ...]] = field(default_factory=list)
    """Stages of each message."""
    tasks: list[Task] = field(default_factory=list)
