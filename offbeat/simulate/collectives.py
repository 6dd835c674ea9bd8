"""Collectives on ranks and links → SEND tasks, step by step: the fine-grained topology of dPRO section 4.1.

A transmission is a SEND task that occupies the sender's outgoing link for bytes × seconds per byte; its end is seen one
latency later, which is the RECV. Where receivers are the bottleneck (many workers push to one server), `Links` has
incoming links too: then the message is cut into pieces, and a RECV task for each occupies the receiver's incoming link
once the piece has arrived. Sending and receiving overlap but for the first piece.

Every transmission carries a transaction (collective, chunk, step), the id by which dPRO pairs SEND and RECV.

Time of each on an idle network with equal links, w ranks, α seconds of latency, β seconds per byte, n bytes:

    ring_all_reduce         2 (w − 1) (α + n β / w)
    ring_reduce_scatter     (w − 1) (α + n β / w)
    ring_all_gather         (w − 1) (α + n β)                          n bytes put in by each rank
    broadcast, reduce       ⌈log2 w⌉ (α + n β)                         binomial tree; less if w is no power of 2
    chain_broadcast, chain_reduce   (w − 1) α + (w + chunks − 2) n β / chunks
    push                    α + n β / pieces + (w − 1) n β             incoming links; the server is one of w ranks
    pull                    α + n β / pieces + (w − 1) n β             the server's outgoing link carries everything
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import OffbeatError
from offbeat.simulate.taskgraph import TaskGraph

Tasks = NDArray[np.int64]
NO_TRANSACTION = -1
# Pieces of a message where the receiver's link is modelled: the error of not cutting bytes finer is 1/8 of one message.
PIECES = 8


@dataclass(frozen=True)
class Links:
    """Each rank's outgoing link as a device number, its speed, and its incoming link where that one matters."""

    outgoing: Tasks
    seconds_per_byte: NDArray[np.float64]
    latency_seconds: NDArray[np.float64]
    incoming: Tasks | None = None

    @classmethod
    def make(
        cls,
        outgoing: ArrayLike,
        seconds_per_byte: ArrayLike,
        latency_seconds: ArrayLike = 0.0,
        incoming: ArrayLike | None = None,
    ) -> "Links":
        """One value for all ranks or one for each; checked."""
        devices = np.asarray(outgoing, np.int64)
        if devices.ndim != 1:
            raise OffbeatError(f"outgoing: shape {devices.shape} is not one link per rank")
        speeds = {"seconds_per_byte": seconds_per_byte, "latency_seconds": latency_seconds}
        arrays = {}
        for name, values in speeds.items():
            array = np.asarray(values, np.float64)
            if array.shape not in ((), devices.shape):
                raise OffbeatError(f"{name}: shape {array.shape} does not fit {len(devices)} ranks")
            bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
            if len(bad):
                raise OffbeatError(f"{name}[{bad[0]}]: {array.flat[bad[0]]} is not a finite number of at least 0")
            arrays[name] = np.broadcast_to(array, devices.shape)
        arriving = None if incoming is None else np.asarray(incoming, np.int64)
        if arriving is not None and arriving.shape != devices.shape:
            raise OffbeatError(f"incoming: shape {arriving.shape} does not fit {len(devices)} ranks")
        return cls(devices, arrays["seconds_per_byte"], arrays["latency_seconds"], arriving)


class Transactions(NamedTuple):
    """For each task of a built graph the collective, chunk and step of its transmission; −1 for other tasks."""

    collective: NDArray[np.int32]
    chunk: NDArray[np.int32]
    step: NDArray[np.int32]


@dataclass
class GraphBuilder:
    """Collects blocks of tasks and edges; `build` joins them. Task ids are given out in the order of adding."""

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
        transaction: tuple[ArrayLike, ArrayLike, ArrayLike] = (NO_TRANSACTION,) * 3,
        piece: ArrayLike = 0,
    ) -> Tasks:
        """Adds as many tasks as the arguments, broadcast, have elements; returns their ids in that shape."""
        values = np.broadcast_arrays(duration_seconds, device, lag_seconds, priority, *transaction, piece)
        shape = values[0].shape
        ids = np.arange(self.count, self.count + values[0].size).reshape(shape)
        self.count += values[0].size
        self._blocks.append(tuple(value.ravel() for value in values))
        return ids

    def connect(self, before: ArrayLike, after: ArrayLike) -> None:
        """Makes each `after` wait for its `before`; the two are broadcast. Ids of −1 stand for nothing to wait for."""
        pairs = np.stack([side.ravel() for side in np.broadcast_arrays(before, after)], axis=1)
        self._edges.append(pairs[pairs[:, 0] >= 0].astype(np.int64, copy=False))

    def join(self, before: ArrayLike) -> int:
        """A task of no length on no device that waits for all of `before`."""
        joined = int(self.add(0.0, -1))
        self.connect(before, joined)
        return joined

    def build(self, prioritised: bool = False) -> tuple[TaskGraph, Transactions]:
        """The graph (first ready, first served, unless `prioritised`) and the transaction of each of its tasks."""
        made = self.columns()
        priority = made.priority if prioritised else None
        graph = TaskGraph.from_arrays(made.duration, made.device, made.edges, priority, made.lag, label=made.label)
        return graph, made.transactions

    def columns(self) -> "Columns":
        """All blocks joined, for who builds a larger graph of them."""
        kinds = (np.float64, np.int32, np.float64, np.float64, np.int32, np.int32, np.int32, np.int32)
        empty = (np.empty(0),) * len(kinds)
        columns = [
            np.concatenate(parts).astype(kind, copy=False)
            for parts, kind in zip(zip(*(self._blocks or [empty]), strict=True), kinds, strict=True)
        ]
        edges = np.concatenate(self._edges) if self._edges else np.empty((0, 2), np.int64)
        duration, device, lag, priority, collective, chunk, step, piece = columns
        # Tells alike tasks apart; what overflows only makes the label less telling.
        label = (collective + 1).astype(np.int64) << 44
        label += (step + 1).astype(np.int64) << 24
        label += ((chunk + 1).astype(np.int64) << 4) + piece
        return Columns(duration, device, lag, priority, label, edges, Transactions(collective, chunk, step))


class Columns(NamedTuple):
    """What a `GraphBuilder` has collected: one entry per task, and pairs of ids."""

    duration: NDArray[np.float64]
    device: NDArray[np.int32]
    lag: NDArray[np.float64]
    priority: NDArray[np.float64]
    label: NDArray[np.int64]
    edges: NDArray[np.int64]
    transactions: Transactions


def ring_all_reduce(
    builder: GraphBuilder, links: Links, bytes_per_rank: float, ready: ArrayLike, priority: float = 0.0
) -> Tasks:
    """Reduce-scatter and all-gather around the ring, in w chunks. `ready`: the task that each rank waits for, or −1.
    Returns, per rank, the task at whose end, seen after its lag, the rank has the result."""
    return _ring(builder, links, bytes_per_rank / max(1, len(links.outgoing)), 2, ready, priority)


def ring_reduce_scatter(
    builder: GraphBuilder, links: Links, bytes_per_rank: float, ready: ArrayLike, priority: float = 0.0
) -> Tasks:
    """Each rank puts in `bytes_per_rank` and ends with 1/w of the sum."""
    return _ring(builder, links, bytes_per_rank / max(1, len(links.outgoing)), 1, ready, priority)


def ring_all_gather(
    builder: GraphBuilder, links: Links, bytes_per_rank: float, ready: ArrayLike, priority: float = 0.0
) -> Tasks:
    """Each rank puts in `bytes_per_rank` and ends with w times as much."""
    return _ring(builder, links, bytes_per_rank, 1, ready, priority)


def _ring(
    builder: GraphBuilder, links: Links, chunk_bytes: float, rounds: int, ready: ArrayLike, priority: float
) -> Tasks:
    """rounds × (w − 1) steps; at each, rank r sends on what it received from r − 1 at the step before."""
    width = len(links.outgoing)
    waits = _ready(ready, width)
    if width == 1:
        return _joined(builder, waits[None])
    ranks, steps = np.arange(width), np.arange(rounds * (width - 1))[:, None]
    transaction = (_next_collective(builder), (ranks - steps) % width, steps)
    duration = chunk_bytes * links.seconds_per_byte
    sends = builder.add(duration, links.outgoing, links.latency_seconds, priority, transaction)
    builder.connect(np.roll(sends[:-1], 1, axis=1), sends[1:])
    # Until the reduction is complete, whatever arrives at a rank that is late waits there for the rank's own part.
    builder.connect(waits, sends[:width])
    arrivals = np.roll(sends[-1], 1)
    return arrivals if rounds == 2 else _joined(builder, np.stack([arrivals, waits]))


def broadcast(
    builder: GraphBuilder, links: Links, message_bytes: float, root: int, ready: ArrayLike, priority: float = 0.0
) -> Tasks:
    """Down a binomial tree: every rank that has the message sends it on, the furthest part of the tree first."""
    width, collective = len(links.outgoing), _next_collective(builder)
    _check_root(root, width)
    posted = _ready(ready, width)
    has, sent = posted.copy(), np.full(width, -1)
    for step, senders, receivers in _tree(width):
        sender, receiver = (senders + root) % width, (receivers + root) % width
        waits = np.stack([has[sender], posted[receiver], sent[sender]])
        sent[sender], has[receiver] = _transmit(
            builder, links, sender, receiver, message_bytes, waits, (collective, 0, step), priority
        )
    # A rank that only sends is done when it was ready; a task of its own keeps the caller's edges uniform.
    return _joined(builder, has[None])


def reduce(
    builder: GraphBuilder, links: Links, message_bytes: float, root: int, ready: ArrayLike, priority: float = 0.0
) -> Tasks:
    """Up a binomial tree: the steps of `broadcast` backwards. A rank is done when its part has arrived further up."""
    width, collective = len(links.outgoing), _next_collective(builder)
    _check_root(root, width)
    parts = [_ready(ready, width)]
    for step, senders, receivers in _backwards(_tree(width)):
        sender, receiver = (receivers + root) % width, (senders + root) % width
        waits = np.stack([part[sender] for part in parts])
        _, arrived = _transmit(builder, links, sender, receiver, message_bytes, waits, (collective, 0, step), priority)
        column = np.full(width, -1)
        column[receiver] = arrived
        column[sender] = arrived
        parts.append(column)
    return _joined(builder, np.stack(parts))


def chain_broadcast(
    builder: GraphBuilder,
    links: Links,
    message_bytes: float,
    root: int,
    ready: ArrayLike,
    chunks: int = 1,
    priority: float = 0.0,
) -> Tasks:
    """From the root from rank to rank around the ring, in chunks that follow each other."""
    width = len(links.outgoing)
    _check_root(root, width)
    return _chain(builder, links, message_bytes, (root + np.arange(width)) % width, ready, chunks, priority)


def chain_reduce(
    builder: GraphBuilder,
    links: Links,
    message_bytes: float,
    root: int,
    ready: ArrayLike,
    chunks: int = 1,
    priority: float = 0.0,
) -> Tasks:
    """Towards the root, which is the last on the chain; each rank adds its part to what passes."""
    width = len(links.outgoing)
    _check_root(root, width)
    return _chain(builder, links, message_bytes, (root + 1 + np.arange(width)) % width, ready, chunks, priority)


def push(
    builder: GraphBuilder, links: Links, message_bytes: float, server: int, ready: ArrayLike, priority: float = 0.0
) -> Tasks:
    """Every rank sends its gradient to the server. Returns, per rank, when its own has arrived; the server's: when all
    have."""
    width = len(links.outgoing)
    _check_root(server, width)
    waits = _ready(ready, width)
    workers = np.flatnonzero(np.arange(width) != server)
    done = np.full(width, -1)
    transaction = (_next_collective(builder), workers, 0)
    _, done[workers] = _transmit(
        builder,
        links,
        workers,
        np.full(len(workers), server),
        message_bytes,
        waits[workers][None],
        transaction,
        priority,
    )
    done[server] = builder.join(np.append(done[workers], waits[server]))
    return done


def pull(
    builder: GraphBuilder, links: Links, message_bytes: float, server: int, ready: ArrayLike, priority: float = 0.0
) -> Tasks:
    """The server sends the parameters to every rank once it and that rank are ready. Returns, per rank, the arrival."""
    width = len(links.outgoing)
    _check_root(server, width)
    waits = _ready(ready, width)
    workers = np.flatnonzero(np.arange(width) != server)
    done = np.full(width, -1)
    transaction = (_next_collective(builder), workers, 0)
    both = np.stack([np.full(len(workers), waits[server]), waits[workers]])
    _, done[workers] = _transmit(
        builder, links, np.full(len(workers), server), workers, message_bytes, both, transaction, priority
    )
    done[server] = builder.join(np.append(done[workers], waits[server]))
    return done


def _chain(
    builder: GraphBuilder,
    links: Links,
    message_bytes: float,
    ranks: Tasks,
    ready: ArrayLike,
    chunks: int,
    priority: float,
) -> Tasks:
    if chunks < 1:
        raise OffbeatError(f"chunks: {chunks} is not at least 1")
    waits = _ready(ready, len(ranks))
    collective = _next_collective(builder)
    done = np.full((chunks, len(ranks)), -1)
    arrived = np.full(chunks, -1)
    for hop, (sender, receiver) in enumerate(pairwise(ranks)):
        before = np.stack([arrived, np.full(chunks, waits[sender])])
        _, arrived = _transmit(
            builder,
            links,
            np.full(chunks, sender),
            np.full(chunks, receiver),
            message_bytes / chunks,
            before,
            (collective, np.arange(chunks), hop),
            priority,
        )
        done[:, receiver] = arrived
        if hop == 0:
            done[:, sender] = arrived
    return _joined(builder, np.concatenate([done, waits[None]]))


def _transmit(
    builder: GraphBuilder,
    links: Links,
    senders: Tasks,
    receivers: Tasks,
    message_bytes: float,
    waits: Tasks,
    transaction: tuple[ArrayLike, ArrayLike, ArrayLike],
    priority: float,
) -> tuple[Tasks, Tasks]:
    """One message from each sender to its receiver after all rows of `waits`; when each has been sent, and arrived."""
    piece = np.arange(1 if links.incoming is None else PIECES)[:, None]
    piece_bytes = message_bytes / len(piece)
    seconds = piece_bytes * links.seconds_per_byte[senders]
    sends = builder.add(seconds, links.outgoing[senders], 0.0, priority, transaction, piece)
    builder.connect(waits[:, None, :], sends)
    # The way is a task of its own, so that what the sender does next can wait for the SEND and not for its arrival.
    arrivals = builder.add(links.latency_seconds[senders], -1, 0.0, priority, transaction, piece)
    builder.connect(sends, arrivals)
    if links.incoming is None:
        return sends[0], arrivals[0]
    seconds = piece_bytes * links.seconds_per_byte[receivers]
    receives = builder.add(seconds, links.incoming[receivers], 0.0, priority, transaction, piece)
    builder.connect(arrivals, receives)
    return _joined(builder, sends), _joined(builder, receives)


def _tree(width: int) -> list[tuple[int, Tasks, Tasks]]:
    """Steps of a binomial tree rooted at 0: (step, senders, receivers); the number that have the message doubles."""
    steps: list[tuple[int, Tasks, Tasks]] = []
    reached = 1
    while reached < width:
        senders = np.arange(min(reached, width - reached))
        steps.append((len(steps), senders, senders + reached))
        reached *= 2
    return steps


def _backwards(steps: list[tuple[int, Tasks, Tasks]]) -> list[tuple[int, Tasks, Tasks]]:
    return [(number, senders, receivers) for number, (_, senders, receivers) in enumerate(reversed(steps))]


def _joined(builder: GraphBuilder, before: Tasks) -> Tasks:
    """One task of no length per column, which waits for all ids in that column."""
    joined = builder.add(np.zeros(before.shape[1]), -1)
    builder.connect(before, joined)
    return joined


def _ready(ready: ArrayLike, width: int) -> Tasks:
    tasks = np.asarray(ready, np.int64)
    if tasks.shape not in ((), (width,)):
        raise OffbeatError(f"ready: shape {tasks.shape} does not fit {width} ranks")
    return np.broadcast_to(tasks, (width,))


def _check_root(root: int, width: int) -> None:
    if not 0 <= root < width:
        raise OffbeatError(f"root: rank {root} is outside 0..{width - 1}")


def _next_collective(builder: GraphBuilder) -> int:
    builder.collectives += 1
    return builder.collectives - 1
