"""Draft: the plan while the kernels work on it."""

from dataclasses import dataclass, field

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.plan.model import Message, Piece, Segment, Task
from offbeat.strategy import Shard, Strategy


@dataclass(frozen=True, slots=True)
class Stage:
    """One step in the life of a message: the same operation in disjoint groups of ranks."""

    kind: str
    groups: tuple[tuple[tuple[int, ...], int | None], ...]
    """(participants, root) of each group."""
    returns: bool = False
    """Carries parameters back to the replicas rather than gradients to the updater."""


@dataclass
class Draft:
    """Filled in by the kernels of `offbeat.plan.lower`, in their order."""

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
