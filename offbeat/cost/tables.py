"""A collective, its ranks and its bytes → seconds: from the cluster's measured tables, else from its links.

TensorOpt (section 3.2) measures each collective under each device partitioning at sizes 2^i and interpolates the
*bandwidth* between two sizes, because latency rules small messages and groups contend for links (`interpolate`). Where
nothing was measured, a closed form counts what the busiest rank sends, as `Task.link_bytes` does after the AutoSync
supplement's Eq. 3, over the slowest hop, and one latency for each round (`closed_form`).

`bytes` is always what each participant puts in (`Task.wire_bytes`, `CollectiveTable.sizes_bytes`).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable

from offbeat.cluster import ClusterSpec, CollectiveTable
from offbeat.cost.link import LinkFit
from offbeat.errors import OffbeatError
from offbeat.plan.model import Task

ROUNDS = {
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "all_to_all": 1,
    "gather": 1,
    "reduce": 1,
    "broadcast": 1,
}
"""How often a message goes around the ring, or down the chain, of w ranks: each time it takes w − 1 latencies."""


class Collectives:
    """Costs of one cluster's collectives; remembers what it found for each set of ranks."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self._tables: dict[tuple[str, tuple[int, ...]], CollectiveTable | None] = {}
        self._links: dict[tuple[str, tuple[int, ...], int | None], LinkFit] = {}
        self._straight: dict[tuple[tuple[int, ...], int, int], LinkFit] = {}

    def seconds(self, kind: str, ranks: Iterable[int], bytes: float, root: int | None = None) -> float:
        """Time of one collective alone on its links."""
        group = tuple(ranks)
        if not bytes >= 0:
            raise OffbeatError(f"{kind}: bytes must be at least 0, got {bytes}")
        if len(group) < 2 or bytes == 0 or kind == "update":
            return 0.0
        if (kind, group) not in self._tables:
            self._tables[kind, group] = find_table(kind, group, self.cluster)
        table = self._tables[kind, group]
        return interpolate(table, bytes) if table is not None else self.link(kind, group, root).seconds(bytes)

    def constant(self, kind: str, ranks: tuple[int, ...], root: int | None = None) -> float:
        """The part of its time that does not depend on its bytes: the smallest measured one's, or the latency."""
        self.seconds(kind, ranks, 1, root)
        table = self._tables[kind, ranks]
        return table.seconds[0] if table is not None else self.link(kind, ranks, root).latency_seconds

    def task_seconds(self, task: Task) -> float:
        """Time of a plan's task; updates use no link and take none."""
        return self.seconds(task.kind, task.ranks, task.wire_bytes, task.root)

    def link(self, kind: str, ranks: tuple[int, ...], root: int | None = None) -> LinkFit:
        """The closed form of this collective, whether or not it was measured."""
        key = (kind, ranks, root)
        if key not in self._links:
            self._links[key] = closed_form(kind, ranks, self.cluster, root)
        return self._links[key]

    def straight(self, ranks: tuple[int, ...], root: int, rank: int) -> LinkFit:
        """Of one participant's link, where all the others send straight to a root or it to them."""
        key = (ranks, root, rank)
        if key not in self._straight:
            latency = max(self.cluster.latency(each, root) for each in ranks)
            self._straight[key] = LinkFit(latency, _straight_seconds_per_byte(ranks, root, rank, self.cluster))
        return self._straight[key]


def collective_seconds(
    kind: str, ranks: Iterable[int], bytes: float, cluster: ClusterSpec, root: int | None = None
) -> float:
    """Time of one collective: the table's, if the cluster has one that fits, else the closed form's.

    For many calls with one cluster, keep a `Collectives`.
    """
    return Collectives(cluster).seconds(kind, ranks, bytes, root)


def find_table(kind: str, ranks: tuple[int, ...], cluster: ClusterSpec) -> CollectiveTable | None:
    """The table measured for these very ranks, or for as many ranks that are placed and linked alike."""
    if not cluster.tables or kind in ("gather", "update"):
        return None
    exact = cluster.table(kind, (ranks,))  # type: ignore[arg-type]
    if exact is not None:
        return exact
    wanted = _placement(ranks, cluster)
    alike = (
        table
        for table in cluster.tables
        if table.collective == kind
        and len(table.groups) == 1
        and len(table.groups[0]) == len(ranks)
        and _placement(table.groups[0], cluster) == wanted
    )
    return next(alike, None)


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
    others = len(ranks) - 1
    if others < 1:
        return LinkFit(0.0, 0.0)
    if kind == "send":
        here, there = ranks[0], ranks[-1]
        return LinkFit(cluster.latency(here, there), 1.0 / cluster.bandwidth(here, there))
    if kind not in ROUNDS:
        raise OffbeatError(f"no collective is called {kind!r}; there are {', '.join(ROUNDS)} and send")
    latency = latency_steps(kind, len(ranks)) * cluster.ring_latency(ranks)
    if kind == "gather" and root is not None:
        return LinkFit(latency, _gather_seconds_per_byte(ranks, root, cluster))
    return LinkFit(latency, _sent_per_byte(kind, others) / cluster.ring_bandwidth(ranks))


def latency_steps(kind: str, participants: int) -> int:
    """Messages one after another that a ring, or a chain, of so many ranks takes."""
    return ROUNDS.get(kind, 0) * (participants - 1)


def _sent_per_byte(kind: str, others: int) -> float:
    match kind:
        case "all_reduce":
            return 2 * others / (others + 1)
        case "reduce_scatter" | "all_to_all":
            return others / (others + 1)
        case "all_gather" | "gather":
            return float(others)
        case _:
            return 1.0


def _gather_seconds_per_byte(ranks: tuple[int, ...], root: int, cluster: ClusterSpec) -> float:
    """The slowest of the root's interface, its own node's bus, and each sender's own path."""
    if root not in ranks:
        raise OffbeatError(f"gather: root {root} is not one of its ranks {list(ranks)}")
    return max(_straight_seconds_per_byte(ranks, root, rank, cluster) for rank in ranks)


def _straight_seconds_per_byte(ranks: tuple[int, ...], root: int, rank: int, cluster: ClusterSpec) -> float:
    """Of a root's interface or its node's bus, which carry all bytes; of another's path, which carries its own."""
    if rank != root:
        return 1.0 / cluster.bandwidth(rank, root)
    far = sum(not cluster.same_node(each, root) for each in ranks)
    node = cluster.node_of(root)
    return max(far / cluster.node_bandwidth(node), (len(ranks) - 1 - far) / cluster.nodes[node].intra_bandwidth)


def _placement(ranks: tuple[int, ...], cluster: ClusterSpec) -> tuple[object, ...]:
    """What decides a group's speed: ranks on each node, the slowest hop and the longest latency."""
    ring = tuple(sorted(ranks))
    per_node = Counter(cluster.node_of(rank) for rank in ring)
    return tuple(sorted(per_node.values())), cluster.ring_bandwidth(ring), cluster.ring_latency(ring)
