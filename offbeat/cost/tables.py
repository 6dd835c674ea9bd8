"""Seconds of a collective from the cluster's measured tables, otherwise from its links.

TensorOpt (section 3.2) measures each collective under each device partitioning at sizes 2^i and interpolates the
*bandwidth* between two sizes, because latency rules small messages and groups contend for links (`interpolate`). Where
nothing was measured, a closed form counts what the busiest rank sends, as `Task.link_bytes` does after the AutoSync
supplement's Eq. 3, over the slowest hop, and one latency for each round (`closed_form`).

PACE (section III) describes an all-reduce by a linear model fitted to samples of the profiling stage. Samples span four
orders of magnitude and some are hit by other traffic, so the fit here minimises *relative* residuals under Huber's
loss instead of the paper's plain least squares, which the largest samples decide alone (`fit_linear`).

`bytes` is always what each participant puts in (`Task.wire_bytes`, `CollectiveTable.sizes_bytes`).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from offbeat.cluster import ClusterSpec, CollectiveTable
from offbeat.errors import OffbeatError
from offbeat.plan.model import sent_per_byte

_ONE_ROUND = ("reduce_scatter", "all_gather", "all_to_all", "gather", "reduce", "broadcast")
ROUNDS = {"all_reduce": 2, "relay": 2, **dict.fromkeys(_ONE_ROUND, 1)}
"""How often a message goes around the ring, or down the chain, of w ranks: each time it takes w − 1 latencies."""
HUBER = 1.345
"""Standard deviations up to which a residual counts in full: 95% efficient where the noise is normal (Huber 1964)."""
MAD_TO_SIGMA = 1.4826
"""Median absolute deviation → standard deviation of a normal distribution."""
MAX_ROUNDS = 100


class LinkFit(NamedTuple):
    """seconds = latency_seconds + seconds_per_byte × bytes."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, bytes: float) -> float:
        """Time of one collective of this many bytes; none at all for 0 bytes."""
        return self.latency_seconds + self.seconds_per_byte * bytes if bytes > 0 else 0.0


class Collectives:
    """Costs of one cluster's collectives; remembers what it found for each set of ranks."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self.table: Callable[..., CollectiveTable | None] = cache(partial(find_table, cluster=cluster))
        self.link: Callable[..., LinkFit] = cache(partial(closed_form, cluster=cluster))
        self.straight: Callable[..., LinkFit] = cache(partial(straight_link, cluster=cluster))

    def seconds(self, kind: str, ranks: Iterable[int], bytes: float, root: int | None = None) -> float:
        """Time of one collective alone on its links."""
        group = tuple(ranks)
        if not bytes >= 0:
            raise OffbeatError(f"{kind}: bytes must be at least 0, got {bytes}")
        if len(group) < 2 or bytes == 0 or kind == "update":
            return 0.0
        table = self.table(kind, group)
        return interpolate(table, bytes) if table is not None else self.link(kind, group, root=root).seconds(bytes)

    def constant(self, kind: str, ranks: tuple[int, ...], root: int | None = None) -> float:
        """The part of its time that does not depend on its bytes: the smallest measured one's, or the latency."""
        table = self.table(kind, ranks)
        return table.seconds[0] if table is not None else self.link(kind, ranks, root=root).latency_seconds


def find_table(kind: str, ranks: tuple[int, ...], cluster: ClusterSpec) -> CollectiveTable | None:
    """The table measured for these very ranks, or for as many ranks that are placed and linked alike."""
    if not cluster.tables or kind in ("gather", "relay", "update"):
        return None
    exact = cluster.table(kind, (ranks,))  # type: ignore[arg-type]
    single = (table for table in cluster.tables if table.collective == kind and len(table.groups) == 1)
    as_many = (table for table in single if len(table.groups[0]) == len(ranks))
    wanted = _placement(ranks, cluster)
    return exact or next((table for table in as_many if _placement(table.groups[0], cluster) == wanted), None)


def interpolate(table: CollectiveTable, bytes: float) -> float:
    """Seconds at any size: bandwidth is linear in the size between two measured ones, and exact at each.

    Below the smallest size only latency is left, so the time stays; above the largest the bandwidth stays.
    """
    sizes, seconds = table.sizes_bytes, table.seconds
    if bytes <= sizes[0]:
        return seconds[0]
    if bytes >= sizes[-1]:
        return seconds[-1] * bytes / sizes[-1]
    right = bisect_right(sizes, bytes)
    left = right - 1
    share = (bytes - sizes[left]) / (sizes[right] - sizes[left])
    if not seconds[left] or not seconds[right]:
        # A time below the clock's resolution has no bandwidth.
        return seconds[left] + share * (seconds[right] - seconds[left])
    slow, fast = sizes[left] / seconds[left], sizes[right] / seconds[right]
    return bytes / (slow + share * (fast - slow))


def closed_form(kind: str, ranks: tuple[int, ...], cluster: ClusterSpec, root: int | None = None) -> LinkFit:
    """Latency and seconds per byte of a collective that has its links to itself.

    All-reduce is a ring: 2(w−1)/w of the bytes over the slowest hop, 2(w−1) latencies. Reduce-scatter and all-gather
    are half of one; reduce and broadcast are a pipelined chain. A gather fills the root's links with what all the
    others send.
    """
    if len(ranks) < 2:
        return LinkFit(0.0, 0.0)
    if kind == "send":
        here, there = ranks[0], ranks[-1]
        return LinkFit(cluster.latency(here, there), 1.0 / cluster.bandwidth(here, there))
    if kind not in ROUNDS:
        raise OffbeatError(f"unknown collective {kind!r}; known: {', '.join(ROUNDS)}, send")
    latency = latency_steps(kind, len(ranks)) * cluster.ring_latency(ranks)
    if kind == "gather" and root is not None:
        if root not in ranks:
            raise OffbeatError(f"gather: root {root} is not one of its ranks {list(ranks)}")
        return LinkFit(latency, max(_straight_seconds_per_byte(ranks, root, rank, cluster) for rank in ranks))
    return LinkFit(latency, sent_per_byte(kind, len(ranks)) / cluster.ring_bandwidth(ranks))


def fit_linear(bytes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """The linear model closest to the samples in relative terms, with neither coefficient below 0.

    Iteratively reweighted least squares; the scale of the residuals is their median absolute deviation, so a minority
    of disturbed samples does not move the fit. Samples of one size alone give a fit without latency.
    """
    # Takes 0.2 s to load, which no rank waits for that fits nothing.
    from scipy.optimize import nnls

    sizes, times = np.asarray(bytes, np.float64), np.asarray(seconds, np.float64)
    # Rows divided by the measured time make the residuals relative; a zero latency is all one size can tell.
    one_size = float(np.ptp(sizes)) == 0
    design = np.stack([sizes / times] if one_size else [1.0 / times, sizes / times], axis=1)
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1.0
    weights = np.ones(len(times))
    solution = np.zeros(design.shape[1])
    for _ in range(MAX_ROUNDS):
        root = np.sqrt(weights)
        updated = nnls(design / scale * root[:, None], root)[0] / scale
        done = np.allclose(updated, solution, rtol=1e-10, atol=0.0)
        solution = updated
        residuals = np.abs(design @ solution - 1.0)
        limit = HUBER * MAD_TO_SIGMA * max(float(np.median(residuals)), 1e-9)
        weights = np.minimum(1.0, limit / np.maximum(residuals, 1e-300))
        if done:
            break
    return LinkFit(0.0, float(solution[0])) if one_size else LinkFit(*map(float, solution))


def latency_steps(kind: str, participants: int) -> int:
    """Messages one after another that a ring, or a chain, of `participants` ranks takes."""
    return ROUNDS.get(kind, 0) * (participants - 1)


def straight_link(ranks: tuple[int, ...], root: int, rank: int, cluster: ClusterSpec) -> LinkFit:
    """Of one participant's link, where all the others send straight to a root or it to them."""
    latency = max(cluster.latency(each, root) for each in ranks)
    return LinkFit(latency, _straight_seconds_per_byte(ranks, root, rank, cluster))


def _straight_seconds_per_byte(ranks: tuple[int, ...], root: int, rank: int, cluster: ClusterSpec) -> float:
    """Of a root's interface or its node's bus, which carry all bytes; of another's path, which carries its own."""
    if rank != root:
        return 1.0 / cluster.bandwidth(rank, root)
    far = sum(not cluster.one_node((each, root)) for each in ranks)
    node = cluster.node_of(root)
    return max(far / cluster.node_bandwidth(node), (len(ranks) - 1 - far) / cluster.nodes[node].intra_bandwidth)


def _placement(ranks: tuple[int, ...], cluster: ClusterSpec) -> tuple[object, ...]:
    """What decides a group's speed: ranks on each node, the slowest hop and the longest latency."""
    ring = tuple(sorted(ranks))
    per_node = Counter(cluster.node_of(rank) for rank in ring)
    return tuple(sorted(per_node.values())), cluster.ring_bandwidth(ring), cluster.ring_latency(ring)
