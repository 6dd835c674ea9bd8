"""AutoSync's predefined cost model: seconds and features of a plan (its supplement, sections 1 to 3).

    T = max(T_comp, T_sync)                                         (Eq. 1)  `compute_seconds`, `sync_seconds`
    T_PS(v) = Σ_k I_d(j,k) r_k c(m)/b_jk  +  φ Σ_k I_d(j,k) r_k  +  δ             (Eq. 2)  `_server_features`
    T_CC(v) = (I1 2(w−1)/w + I2 (w−1)/w + I3) c(m)/b_m  +  w φ  +  δ              (Eq. 3)  `_collective_features`
    z = max over v of z_v ⊕ mean over v of z_v, for PS and CC apart                        `features`

j is the server's machine, k the workers' machines with r_k replicas each (1 where they reduce among themselves first),
I_d whether they differ; b_m is the slowest hop of the ring. z_v = [network transfer, coefficient of φ, coefficient of
δ]. A variable here is what travels as one: a message of the plan. Eq. 2 is taken once up, with the gradient's bytes,
and once back, with the parameters'; servers work at the same time, so the busiest one counts, while collectives follow
one another. An all-gather's c(m) is what all ranks put in together, so that Eq. 3 agrees with `Task.link_bytes`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.cluster import ClusterSpec
from offbeat.cost.tables import closed_form
from offbeat.errors import OffbeatError
from offbeat.plan.model import Message, Plan, Task
from offbeat.strategy.model import SERVERS


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients of the model's counts."""

    phi_seconds: float = 50e-6
    """φ, the network overhead of one participant: by default the latency of ordinary Ethernet."""
    delta_seconds: float = 20e-6
    """δ, launch and copy of one message: by default that of a few GPU kernels."""
    transfer_scale: float = 1.0
    """Measured over nominal transfer time: above 1 if links do not reach their bandwidth."""


class MessageFeatures(NamedTuple):
    """z of one message, and who owns it."""

    transfer_seconds: float
    network_overheads: float
    """How often φ is paid."""
    kernel_latencies: float
    """How often δ is paid."""
    server: int | None
    """Rank that owns it; None for collectives."""


def compute_seconds(plan: Plan) -> float:
    """T_comp: all segments one after another, on the slowest device that holds a replica."""
    nodes = {plan.cluster.node_of(rank): plan.cluster.device_of(rank) for rank in plan.replicas}
    return max(
        sum(segment.estimate(node.peak_flops, node.memory_bandwidth) for segment in plan.segments)
        for node in nodes.values()
    )


def sync_seconds(entries: Iterable[MessageFeatures], coefficients: Coefficients) -> tuple[float, float]:
    """(all collectives one after another, the busiest server); T_sync is their sum."""
    collectives, servers = 0.0, defaultdict[int, float](float)
    for transfer, overheads, latencies, server in entries:
        seconds = coefficients.transfer_scale * transfer + coefficients.phi_seconds * overheads
        seconds += coefficients.delta_seconds * latencies
        if server is None:
            collectives += seconds
        else:
            servers[server] += seconds
    return collectives, max(servers.values(), default=0.0)


def features(entries: Sequence[MessageFeatures]) -> NDArray[np.float64]:
    """z^PS ⊕ z^CC: for each the maxima of z, then the means; zeros for a family that the plan does not use."""
    vector: list[float] = []
    for served in (True, False):
        family = np.array([e[:3] for e in entries if (e.server is not None) == served] or [(0.0, 0.0, 0.0)])
        vector += [*family.max(axis=0), *family.mean(axis=0)]
    return np.array(vector)


def message_features(plan: Plan) -> list[MessageFeatures]:
    """z of every message, in the order of their indices."""
    tasks: dict[int, list[Task]] = defaultdict(list)
    for task in plan.communication:
        tasks[task.message].append(task)
    return [
        _server_features(message, plan)
        if message.synchronizer in SERVERS
        else _collective_features(tasks[message.index], plan.cluster)
        for message in plan.messages
    ]


def _server_features(message: Message, plan: Plan) -> MessageFeatures:
    """Eq. 2, up and back."""
    owner = message.owner
    assert owner is not None
    cluster = plan.cluster
    reduced_first = {cluster.node_of(rank) for rank in message.stations}
    ranks_on: dict[int, list[int]] = defaultdict(list)
    for rank in plan.replicas:
        ranks_on[cluster.node_of(rank)].append(rank)
    transfer, overheads = 0.0, 0.0
    for node, ranks in ranks_on.items():
        if node != cluster.node_of(owner):
            senders = 1 if node in reduced_first else len(ranks)
            size = message.gradient_bytes + message.parameter_bytes
            transfer += senders * size / cluster.bandwidth(owner, ranks[0])
            overheads += 2 * senders
    return MessageFeatures(transfer, overheads, 2.0, owner)


def _collective_features(tasks: Iterable[Task], cluster: ClusterSpec) -> MessageFeatures:
    """Eq. 3, for each collective that carries a part of the message."""
    shared = [task for task in tasks if len(task.ranks) > 1]
    # Relayed slices have different roots at once, so that the slowest link carries each once.
    sent = [task.wire_bytes if task.kind == "relay" else task.link_bytes for task in shared]
    transfer = sum((size / cluster.ring_bandwidth(t.ranks) for size, t in zip(sent, shared, strict=True)), 0.0)
    return MessageFeatures(transfer, float(sum(len(task.ranks) for task in shared)), float(len(shared)), None)


def fit_coefficients(cluster: ClusterSpec) -> Coefficients:
    """φ, δ and the transfer scale that fit the cluster's measured tables best, by least squares on relative errors.

    Tables of one group size cannot tell φ from δ: φ then stands for both.
    """
    rows: list[tuple[float, float, float]] = []
    times: list[float] = []
    for table in cluster.tables:
        group = table.groups[0]
        if len(table.groups) > 1 or len(group) < 2 or table.collective in ("send", "all_to_all"):
            continue
        per_byte = closed_form(table.collective, group, cluster).seconds_per_byte
        for size, seconds in zip(table.sizes_bytes, table.seconds, strict=True):
            if seconds > 0:
                rows.append((per_byte * size, float(len(group)), 1.0))
                times.append(seconds)
    # Takes 0.2 s to load, which no rank waits for that fits nothing.
    from scipy.optimize import nnls

    if not rows:
        raise OffbeatError(f"cluster {cluster.name!r} has no tables of collectives to fit φ and δ to")
    design = np.array(rows) / np.array(times)[:, None]
    if len({row[1] for row in rows}) == 1:
        design = design[:, :2]
    scale = np.linalg.norm(design, axis=0)
    solution = nnls(design / scale, np.ones(len(times)))[0] / scale
    transfer_scale, phi, delta = (*solution.tolist(), 0.0)[:3]
    return Coefficients(phi, delta, transfer_scale)
