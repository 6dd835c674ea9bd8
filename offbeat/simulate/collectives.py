"""Expand collectives into SEND tasks, step by step: the fine-grained topology of dPRO section 4.1.

A transmission is a SEND task that occupies the sender's outgoing link for bytes × seconds per byte; its end is seen one
latency later, which is the RECV. Where receivers are the bottleneck (many workers push to one server), `Links` has
incoming links too: then the message is cut into pieces, and a RECV task for each occupies the receiver's incoming link
once the piece has arrived. Sending and receiving overlap but for the first piece.

Every transmission is labelled by its transaction (collective, chunk, step), the id by which dPRO pairs SEND and RECV.

Time of each on an idle network with equal links, w ranks, α seconds of latency, β seconds per byte, n bytes:

    all_reduce            2 (w − 1) (α + n β / w)                   a ring, in w chunks
    reduce_scatter        (w − 1) (α + n β / w)                     a ring
    all_gather            (w − 1) (α + n β)                         a ring; n bytes put in by each rank
    broadcast, reduce     (w − 1) α + (w + chunks − 2) n β / chunks a chain from the root or towards it
    push                  α + n β / pieces + (w − 1) n β            incoming links; the root is one of w ranks
    pull                  α + n β / pieces + (w − 1) n β            the root's outgoing link carries everything
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import OffbeatError
from offbeat.simulate.taskgraph import TaskGraph

Ids = NDArray[np.int64]
# Pieces of a message where the receiver's link is modelled: the error of not cutting bytes finer is 1/8 of one message.
PIECES = 8


class Links(NamedTuple):
    """Each rank's outgoing link as a device number, its speed, and its incoming link where that one matters.

    One speed or one latency may stand for all ranks."""

    outgoing: Ids
    seconds_per_byte: ArrayLike
    latency_seconds: ArrayLike = 0.0
    incoming: Ids | None = None


@dataclass
class GraphBuilder:
    """Collects blocks of tasks and edges; `build` joins them. Task ids are assigned in insertion order."""

    count: int = 0
    collectives: int = 0
    _blocks: list[tuple[NDArray, ...]] = field(default_factory=list)
    _edges: list[NDArray[np.int64]] = field(default_factory=list)

    def add(
        self,
        duration_seconds: ArrayLike,
        device: ArrayLike,
        lag_seconds: ArrayLike = 0.0,
        priority: ArrayLike = 0.0,
        label: ArrayLike = 0,
    ) -> Ids:
        """Adds as many tasks as the arguments, broadcast, have elements; returns their ids in that shape."""
        values = np.broadcast_arrays(duration_seconds, device, lag_seconds, priority, label)
        ids = np.arange(self.count, self.count + values[0].size).reshape(values[0].shape)
        self.count += values[0].size
        self._blocks.append(tuple(value.ravel() for value in values))
        return ids

    def connect(self, before: ArrayLike, after: ArrayLike) -> None:
        """Makes each `after` wait for its `before`; the two are broadcast. An id of −1 means no dependency."""
        pairs = np.stack([side.ravel() for side in np.broadcast_arrays(before, after)], axis=1)
        self._edges.append(pairs[pairs[:, 0] >= 0].astype(np.int64, copy=False))

    def join(self, before: Ids) -> Ids:
        """Adds one task of no length on no device per column, which waits for all ids in that column."""
        joined = self.add(np.zeros(before.shape[1]), -1)
        self.connect(before, joined)
        return joined

    def build(self) -> TaskGraph:
        """The graph: first ready, first served."""
        duration, device, lag, _, label = self.columns()
        return TaskGraph.from_arrays(duration, device, self.edges(), None, lag, label=label)

    def columns(self) -> list[NDArray]:
        """Duration, device, lag, priority and label of all tasks."""
        kinds = (np.float64, np.int32, np.float64, np.float64, np.int64)
        columns = zip(*(self._blocks or [(np.empty(0),) * len(kinds)]), strict=True)
        return [np.concatenate(parts).astype(kind, copy=False) for parts, kind in zip(columns, kinds, strict=True)]

    def edges(self) -> NDArray[np.int64]:
        """All pairs of ids, the one before first."""
        return np.concatenate(self._edges) if self._edges else np.empty((0, 2), np.int64)


def add_collective(
    builder: GraphBuilder,
    kind: str,
    links: Links,
    size: float,
    ready: ArrayLike,
    root: int = 0,
    chunks: int = 1,
    priority: float = 0.0,
) -> Ids:
    """Adds a collective of one of the kinds in the module's docstring, to which each rank brings `size` bytes.

    `ready` has the task that each rank waits for, or −1; a chain sends `chunks` that follow each other. Returns, per
    rank, the task at whose end, seen after its lag, the rank has its result, or has sent what it has to send.
    """
    width = len(links.outgoing)
    given = ready, links.seconds_per_byte, links.latency_seconds
    waits, per_byte, latency = (np.broadcast_to(each, (width,)) for each in given)
    added = _Collective(builder, links, per_byte, latency, waits, priority, builder.collectives)
    builder.collectives += 1
    match kind:
        case "all_reduce":
            return added.ring(size / width, 2)
        case "reduce_scatter":
            return added.ring(size / width, 1)
        case "all_gather":
            return added.ring(size, 1)
        case "broadcast":
            return added.chain((root + np.arange(width)) % width, size, chunks)
        case "reduce":
            # The root is the last on the chain; each rank adds its part to what passes.
            return added.chain((root + 1 + np.arange(width)) % width, size, chunks)
        case "push" | "pull":
            return added.star(root, size, inward=kind == "push")
    raise OffbeatError(f"unknown collective {kind!r}")


@dataclass(frozen=True)
class _Collective:
    builder: GraphBuilder
    links: Links
    per_byte: NDArray[np.float64]
    latency: NDArray[np.float64]
    waits: Ids
    priority: float
    number: int

    def ring(self, chunk_bytes: float, rounds: int) -> Ids:
        """rounds × (w − 1) steps; at each, rank r forwards what it received from r − 1 at the step before."""
        width = len(self.waits)
        if width == 1:
            return self.builder.join(self.waits[None])
        ranks, steps = np.arange(width), np.arange(rounds * (width - 1))[:, None]
        label = self._label((ranks - steps) % width, steps)
        duration = chunk_bytes * self.per_byte
        sends = self.builder.add(duration, self.links.outgoing, self.latency, self.priority, label)
        self.builder.connect(np.roll(sends[:-1], 1, axis=1), sends[1:])
        # Until the reduction is complete, whatever arrives at a rank that is late waits there for the rank's own part.
        self.builder.connect(self.waits, sends[:width])
        arrivals = np.roll(sends[-1], 1)
        return arrivals if rounds == 2 else self.builder.join(np.stack([arrivals, self.waits]))

    def chain(self, ranks: Ids, size: float, chunks: int) -> Ids:
        """From rank to rank, in chunks that follow each other."""
        done = np.full((chunks, len(ranks)), -1)
        arrived = np.full(chunks, -1)
        for hop, (sender, receiver) in enumerate(pairwise(ranks)):
            before = np.stack([arrived, np.full(chunks, self.waits[sender])])
            ends = np.full(chunks, sender), np.full(chunks, receiver)
            arrived = self._transmit(*ends, size / chunks, before, self._label(np.arange(chunks), hop))
            done[:, receiver] = arrived
            if hop == 0:
                done[:, sender] = arrived
        return self.builder.join(np.concatenate([done, self.waits[None]]))

    def star(self, root: int, size: float, inward: bool) -> Ids:
        """Every rank to the root, whose own result is the last arrival; or the root to every rank that is ready."""
        workers = np.flatnonzero(np.arange(len(self.waits)) != root)
        center = np.full(len(workers), root)
        senders, receivers = (workers, center) if inward else (center, workers)
        before = self.waits[workers][None] if inward else np.stack([self.waits[center], self.waits[workers]])
        done = np.full(len(self.waits), -1)
        done[workers] = self._transmit(senders, receivers, size, before, self._label(workers, 0))
        done[root] = self.builder.join(np.append(done[workers], self.waits[root])[:, None])[0]
        return done

    def _label(self, chunk: ArrayLike, step: ArrayLike) -> Ids:
        """Distinguishes equal transmissions; an overflow only makes the label less specific."""
        chunk, step = np.asarray(chunk, np.int64), np.asarray(step, np.int64)
        return (np.int64(self.number + 1) << 44) + (step + 1 << 24) + (chunk + 1 << 4)

    def _transmit(self, senders: Ids, receivers: Ids, size: float, waits: Ids, label: Ids) -> Ids:
        """One message of `size` bytes from each sender to its receiver after all rows of `waits` → its arrival."""
        links, add = self.links, self.builder.add
        piece = np.arange(1 if links.incoming is None else PIECES)[:, None]
        piece_bytes, label = size / len(piece), label + piece
        seconds = piece_bytes * self.per_byte[senders]
        sends = add(seconds, links.outgoing[senders], 0.0, self.priority, label)
        self.builder.connect(waits[:, None, :], sends)
        arrivals = add(self.latency[senders], -1, 0.0, self.priority, label)
        self.builder.connect(sends, arrivals)
        if links.incoming is None:
            return arrivals[0]
        seconds = piece_bytes * self.per_byte[receivers]
        receives = add(seconds, links.incoming[receivers], 0.0, self.priority, label)
        self.builder.connect(arrivals, receives)
        return self.builder.join(receives)
