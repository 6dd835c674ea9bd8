"""Encode a plan for learned simulators (AutoDist's Eq. 3: z_predefined ⊕ z_raw), without importing torch.

A node is a shard, in forward order. Its raw features are attributes of the variable and of its synchronisation; its
predefined ones are its message's z of the analytic model (`offbeat.cost.analytic`), shared out by bytes. Edges are the
model's own dataflow between variables, and what a plan adds: shards of one variable and members of one message.
Features of the whole plan are the domain-agnostic z^PS ⊕ z^CC, the analytic model's two times and the schedule. Times
and sizes enter as logarithms, because they span many orders of magnitude.

With `replay=True` the replayer's prediction is there as well, and its sensitivities: how much longer the step would be
if something the replayer has no measurement of were slower (`WHAT_IFS`). A job's true costs lie somewhere in between,
and a few trials suffice to tell where.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.analytic import Coefficients, compute_seconds, features, message_features, sync_seconds
from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.plan import Plan
from offbeat.plan.model import Message, Piece
from offbeat.simulate.fast import step_seconds
from offbeat.strategy import Schedule
from offbeat.strategy.model import SERVERS, Synchronizer

SYNCHRONIZERS = get_args(Synchronizer)
SHORTEST_SECONDS = 1e-6
_SCHEDULE = ("priority", "explicit", "barrier", "in_flight", "sliced", "slice_bytes", "credit", "credit_bytes")
RAW_NAMES = (
    *("bytes", "variable_bytes", "rows", "axes", "sparse", "item_bytes", "position", "depth"),
    *(f"by_{name}" for name in SYNCHRONIZERS),
    *("owner_bandwidth", "stations", "grouped", "message_bytes", "message_pieces", "encoded_share", "shards"),
    *_SCHEDULE,
)
PREDEFINED_NAMES = ("transfer_seconds", "network_overheads", "kernel_latencies", "message_transfer_seconds")
NODE_NAMES = RAW_NAMES + PREDEFINED_NAMES
_Z = tuple(f"{family}.{part}" for family in ("ps.max", "ps.mean", "cc.max", "cc.mean") for part in ("t", "n", "k"))
WHAT_IFS = ("calls", "servers", "collectives", "disturbance", "updates")
"""What is slower in turn: each collective by 1 ms; those to or from one rank, then all others, by half; computing by
0.3 while the link is busy; each update by 0.3 ms."""
WHOLE_NAMES = (
    *_Z,
    *("compute_seconds", "sync_seconds", "predefined_seconds"),
    *("messages", "tasks", "served_share", "busiest_server_seconds", "collective_seconds"),
    *_SCHEDULE,
    *(f"if_{name}" for name in WHAT_IFS),
)


@dataclass(frozen=True)
class Encoded:
    """One plan as arrays of float32."""

    nodes: NDArray[np.float32]
    """A row of `NODE_NAMES` for each shard, in forward order."""
    edges: NDArray[np.int64]
    """(2, count): from, to; both directions and from each node to itself."""
    whole: NDArray[np.float32]
    """`WHOLE_NAMES`."""
    base: float
    """Logarithm of the predicted seconds on which a learned model may build: the replayer's, else the analytic's."""


@dataclass(frozen=True)
class TrainingSchedule:
    """How a simulator is trained; the defaults are the paper's."""

    epochs: int = 200
    learning_rate: float = 1e-3
    decay: float = 0.3
    decay_epochs: tuple[int, ...] = (80, 160)
    clip: float = 0.25
    batch: int = 32
    """Plans in a batch; all pairs among them are compared."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 2:
            raise OffbeatError(f"schedule: {self.epochs} epochs with batches of {self.batch} plans train nothing")


@dataclass(frozen=True)
class Samples:
    """Plans of one domain with their measured seconds."""

    plans: Sequence[Encoded]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.plans) != len(self.seconds):
            raise OffbeatError(f"samples: {len(self.plans)} plans have {len(self.seconds)} times")
        if not all(0 < value < math.inf for value in self.seconds):
            raise OffbeatError("samples: every time must be positive and finite")


def rank_pairs(times: NDArray[np.float64], tie: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(faster, slower) positions of all pairs of times that differ by more than the share `tie`."""
    first, second = np.triu_indices(len(times), 1)
    apart = np.abs(times[first] - times[second]) > tie * np.minimum(times[first], times[second])
    first, second = first[apart], second[apart]
    swapped = times[first] > times[second]
    return np.where(swapped, second, first), np.where(swapped, first, second)


def encode(
    plan: Plan,
    *,
    replay: bool = False,
    what_ifs: bool = True,
    costs: Costs | None = None,
    coefficients: Coefficients | None = None,
) -> Encoded:
    """What the learned simulators read of a plan.

    `replay` puts the replayer's prediction in as well, and `what_ifs` its sensitivities, which take ten times as long.
    """
    place = plan.graph.variable_index
    pieces = ((message, piece) for message in plan.messages for piece in message.pieces)
    shards = sorted(pieces, key=lambda entry: (place[entry[1].variable], entry[1].box))
    coefficients = coefficients or Coefficients()
    entries = message_features(plan)
    collective, server = sync_seconds(entries, coefficients)
    computing, syncing = compute_seconds(plan), collective + server
    served = sum(message.bytes for message in plan.messages if message.synchronizer in SERVERS)
    total = sum(message.bytes for message in plan.messages)
    predicted = max(computing, syncing)
    seconds = step_seconds(plan, costs) if replay else predicted
    sensitivities = _sensitivities(plan, costs or Costs(), seconds) if replay and what_ifs else [0.0] * len(WHAT_IFS)
    whole = [
        *(_log(value) if part % 3 == 0 else math.log1p(value) for part, value in enumerate(features(entries).tolist())),
        *(_log(computing), _log(syncing), _log(predicted)),
        *(math.log1p(len(plan.messages)), math.log1p(len(plan.tasks)), served / max(1, total)),
        *(_log(server), _log(collective)),
        *_schedule(plan.strategy.schedule),
        *sensitivities,
    ]
    nodes = [_node(plan, message, piece, entries[message.index][:3]) for message, piece in shards]
    return Encoded(
        np.array(nodes, dtype=np.float32).reshape(len(shards), len(NODE_NAMES)),
        _edges(plan, shards),
        np.array(whole, dtype=np.float32),
        _log(seconds),
    )


def _sensitivities(plan: Plan, costs: Costs, seconds: float) -> list[float]:
    """For each of `WHAT_IFS` the logarithm of the step's time over what it takes at these costs."""
    slowed: dict[str, dict[str, Any]] = {
        "calls": {"call_seconds": 1e-3},
        "servers": {"factors": {"rooted": 1.5}},
        "collectives": {"factors": {"ring": 1.5}},
        "disturbance": {"interference": costs.interference + 0.3},
        "updates": {"update_call_seconds": costs.update_call_seconds + 3e-4},
    }
    times = [step_seconds(plan, replace(costs, **slowed[name])) for name in WHAT_IFS]
    return [_log(each) - _log(seconds) for each in times]


def _node(plan: Plan, message: Message, piece: Piece, z: tuple[float, float, float]) -> list[float]:
    variable = plan.graph.variable(piece.variable)
    share = piece.elements / max(1, message.elements)
    size = message.bytes * piece.elements / max(1, message.elements)
    position = plan.graph.variable_index[variable.name] / max(1, len(plan.graph.variables) - 1)
    owner, rows = message.owner, piece.shape[0] if piece.shape else 1
    bandwidth = 0.0 if owner is None else math.log10(plan.cluster.node_bandwidth(plan.cluster.node_of(owner)))
    raw = [
        *(math.log1p(size) / 10, math.log1p(variable.bytes) / 10, math.log1p(rows) / 10),
        *(len(variable.shape) / 4, float(variable.sparse), variable.bytes / max(1, variable.elements) / 4),
        *(position, math.log1p(len(plan.graph.variables)) / 5),
        *(float(message.synchronizer == name) for name in SYNCHRONIZERS),
        *(bandwidth / 10, len(message.stations) / 8, float(message.group is not None)),
        *(math.log1p(message.bytes) / 10, math.log1p(len(message.pieces)) / 5),
        *(message.gradient_bytes / max(1, message.bytes), variable.elements / max(1, piece.elements) / 8),
        *_schedule(plan.strategy.schedule),
    ]
    transfer, overheads, latencies = z
    pieces = len(message.pieces)
    return [*raw, _log(transfer * share), overheads / pieces / 8, latencies / pieces, _log(transfer)]


def _schedule(schedule: Schedule) -> tuple[float, ...]:
    cut, credit = schedule.slice_bytes, schedule.credit_bytes
    return (
        float(schedule.policy == "priority"),
        float(schedule.policy == "explicit"),
        float(schedule.mode == "barrier"),
        schedule.in_flight / 4,
        float(cut is not None),
        0.0 if cut is None else math.log2(cut) / 20,
        float(credit is not None),
        0.0 if credit is None else math.log2(credit) / 20,
    )


def _edges(plan: Plan, shards: Sequence[tuple[Message, Piece]]) -> NDArray[np.int64]:
    pairs = {(node, node) for node in range(len(shards))}
    members: dict[int, list[int]] = {}
    parts: dict[str, list[int]] = {}
    for node, (message, piece) in enumerate(shards):
        members.setdefault(message.index, []).append(node)
        parts.setdefault(piece.variable, []).append(node)
    # Chains instead of cliques: as connected, and linear in the number of shards.
    joined = [pair for chain in (*members.values(), *parts.values()) for pair in pairwise(chain)]
    for before, after in plan.graph.variable_edges:
        some, others = parts.get(before, ()), parts.get(after, ())
        longer = max(len(some), len(others)) if some and others else 0
        # Each shard of one with the shard at the same place of the other.
        joined += [(some[i * len(some) // longer], others[i * len(others) // longer]) for i in range(longer)]
    pairs |= {way for a, b in joined for way in ((a, b), (b, a))}
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2).T


def _log(seconds: float) -> float:
    return math.log(max(seconds, SHORTEST_SECONDS))
