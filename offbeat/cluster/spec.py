"""ClusterSpec: the machines a job runs on, and how fast any two of their devices can talk.

Devices are numbered node by node from 0; that number is the rank of the process that drives the device. Questions about
ranks are answered in constant time from tables built at the first one.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, groupby
from os import PathLike
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from offbeat import files, units
from offbeat.cluster import document, parts, presets, variants
from offbeat.cluster.parts import Collective, CollectiveTable, Groups, Label, Link, Node, canonical_groups
from offbeat.cluster.variants import Factors
from offbeat.errors import OffbeatError

MAX_DEVICES = 1_000_000


class ClusterSpec(BaseModel):
    """Nodes, the links that differ from what the nodes' interfaces give, and measured collectives.

    Immutable. `replace` makes a changed one, which is checked like any other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, title="Offbeat cluster")

    name: Label = "cluster"
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
    tables: tuple[CollectiveTable, ...] = ()

    def __init__(self, /, **fields: Any) -> None:
        with files.problems_named("not a cluster"):
            super().__init__(**fields)

    @field_validator("nodes")
    @classmethod
    def _name_all(cls, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        count = sum(node.count or 1 for node in nodes)
        if count > parts.MAX_NODES:
            raise OffbeatError(f"{count} nodes are more than the {parts.MAX_NODES} it may have")
        listed = chain.from_iterable(node.listed() for node in nodes)
        named = tuple(node if node.name else node.named(f"node{index}") for index, node in enumerate(listed))
        repeated = [name for name, count in Counter(node.name for node in named).items() if count > 1]
        if repeated:
            raise OffbeatError(f"two nodes have the name {units.quote(repeated[0])}")
        total = sum(node.devices for node in named)
        if total > MAX_DEVICES:
            raise OffbeatError(f"{total} devices are more than the {MAX_DEVICES} a cluster may have")
        if all(node.role == "server" for node in named):
            raise OffbeatError("every node is a server, and none is left to train")
        return named

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        parts.check_links(self.links, self.nodes)
        parts.check_tables(self.tables, self.nodes)
        return self

    @cached_property
    def node_of_rank(self) -> tuple[int, ...]:
        """The node index of every rank."""
        return tuple(index for index, node in enumerate(self.nodes) for _ in range(node.devices))

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        return tuple(accumulate((node.devices for node in self.nodes), initial=0))

    @cached_property
    def _link_between(self) -> Mapping[tuple[int, int], Link]:
        index = {node.name: position for position, node in enumerate(self.nodes)}
        ends = ((index[link.a], index[link.b], link) for link in self.links)
        return {pair: link for a, b, link in ends for pair in ((a, b), (b, a))}

    @cached_property
    def _table_of(self) -> Mapping[tuple[str, Groups], CollectiveTable]:
        return {(table.collective, canonical_groups(table.groups)): table for table in self.tables}

    @property
    def world_size(self) -> int:
        """Devices of all nodes."""
        return self._first_ranks[-1]

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """Ranks that train, unless a strategy names its replicas."""
        return tuple(rank for rank in range(self.world_size) if self.device_of(rank).role == "worker")

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """Ranks of the nodes that only keep parameters."""
        return tuple(rank for rank in range(self.world_size) if self.device_of(rank).role == "server")

    @cached_property
    def stations(self) -> tuple[int, ...]:
        """The first rank of every node with several workers, which may reduce among themselves first."""
        shared = [ranks for ranks in map(self.ranks_of, range(len(self.nodes))) if len(ranks) > 1]
        return tuple(ranks[0] for ranks in shared if self.device_of(ranks[0]).role == "worker")

    @cached_property
    def total_price_per_hour(self) -> float | None:
        """Dollars per hour of all nodes; None where one has no price."""
        prices = [node.price_per_hour for node in self.nodes]
        return None if None in prices else math.fsum(price for price in prices if price is not None)

    @cached_property
    def is_homogeneous(self) -> bool:
        """All nodes are equal but for name, address and price, and so is the path between any two of them."""
        plain = {"name": "", "address": None, "price_per_hour": None}
        return not self.links and len({node.model_copy(update=plain) for node in self.nodes}) == 1

    def node_of(self, rank: int) -> int:
        """The index of the node that has this rank."""
        nodes = self.node_of_rank
        if not 0 <= rank < len(nodes):
            raise OffbeatError(f"rank {rank} is outside the cluster, whose ranks are 0 to {len(nodes) - 1}")
        return nodes[rank]

    def device_of(self, rank: int) -> Node:
        """The node of this rank, which describes its device."""
        return self.nodes[self.node_of(rank)]

    def ranks_of(self, node_index: int) -> range:
        """The ranks of one node."""
        self._check_node(node_index)
        return range(self._first_ranks[node_index], self._first_ranks[node_index + 1])

    def one_node(self, ranks: Iterable[int]) -> bool:
        """Whether all these ranks share a node."""
        nodes = map(self.node_of, ranks)
        first = next(nodes)
        return all(node == first for node in nodes)

    def node_bandwidth(self, node_index: int) -> float:
        """Bytes per second of a node's network interface in each direction."""
        self._check_node(node_index)
        return self.nodes[node_index].bandwidth

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes per second that one connection from rank a to rank b reaches alone; infinite from a rank to itself."""
        here, there = self.node_of(a), self.node_of(b)
        if here == there:
            return math.inf if a == b else self.nodes[here].intra_bandwidth
        interfaces = min(self.nodes[here].bandwidth, self.nodes[there].bandwidth)
        return min(self._of_link(here, there, "bandwidth") or interfaces, self._flow_limit(here, there))

    def latency(self, a: int, b: int) -> float:
        """Seconds for the first byte from rank a to rank b; across nodes the slower end's, unless a link gives it."""
        here, there = self.node_of(a), self.node_of(b)
        if here == there:
            return 0.0 if a == b else self.nodes[here].intra_latency
        given = self._of_link(here, there, "latency")
        return max(self.nodes[here].latency, self.nodes[there].latency) if given is None else given

    def ring_bandwidth(self, ranks: Iterable[int]) -> float:
        """Bytes per second of the slowest hop of a ring: b_m of AutoSync's Eq. 3 (supplement).

        All hops run at once, so hops that leave (or enter) one node share its interface, and hops over one link share
        the link. Where the ring passes through each node once, that is the minimum of `bandwidth` over its hops. A ring
        of one rank has no hop and is infinitely fast.
        """
        ring = tuple(ranks)
        if len(set(ring)) != len(ring):
            raise OffbeatError(f"ring {units.quote(ring)}: a rank appears twice")
        hops = [(self.node_of(a), self.node_of(b)) for a, b in _hops(ring)]
        crossing = [(here, there) for here, there in hops if here != there]
        leaving, entering = Counter(here for here, _ in crossing), Counter(there for _, there in crossing)
        slowest = min((self.nodes[here].intra_bandwidth for here, there in hops if here == there), default=math.inf)
        for (here, there), count in Counter(crossing).items():
            if (link_bandwidth := self._of_link(here, there, "bandwidth")) is not None:
                share = link_bandwidth / count
            else:
                share = min(self.nodes[here].bandwidth / leaving[here], self.nodes[there].bandwidth / entering[there])
            slowest = min(slowest, share, self._flow_limit(here, there))
        return slowest

    def ring_latency(self, ranks: Iterable[int]) -> float:
        """Seconds of the slowest hop of a ring for its first byte; 0 for one rank."""
        return max((self.latency(a, b) for a, b in _hops(tuple(ranks))), default=0.0)

    def table(self, collective: Collective, groups: Iterable[Iterable[int]]) -> CollectiveTable | None:
        """The measured times of a collective under a device partitioning, whatever the order of groups and ranks."""
        return self._table_of.get((collective, canonical_groups(groups)))

    def subset(self, ranks: int | Sequence[int]) -> "ClusterSpec":
        """The cluster of these ranks, or of the first `ranks` ones; they are renumbered node by node.

        Links between the nodes that remain are kept, and so are tables that measure only remaining ranks.
        """
        return variants.subset(self, ranks)

    def replace(self, **changes: Any) -> Self:
        """The same cluster with other fields, checked."""
        return self.model_copy(update=changes)

    def with_links(self, bandwidth: float = 1.0, latency: float = 1.0, intra: Factors | None = None) -> Self:
        """The cluster with the bandwidth and the latency of every link multiplied, within nodes by `intra` if given.

        Of a measured collective the time of the smallest size counts as latency, the rest as bandwidth.
        """
        return variants.with_links(self, (bandwidth, latency), intra or (bandwidth, latency))

    def with_servers(self, ranks: Iterable[int]) -> "ClusterSpec":
        """The cluster in which these ranks hold no replica. A node that has both kinds becomes two."""
        return variants.with_servers(self, ranks)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        # Pydantic's own would keep the tables built for the old nodes and skip the checks.
        return type(self)(**({field: getattr(self, field) for field in type(self).model_fields} | dict(update or {})))

    @cached_property
    def digest(self) -> str:
        """Equal for clusters that cost the same: names and addresses do not count, all else does."""
        return document.digest(self)

    @classmethod
    def homogeneous(
        cls,
        nodes: int = 4,
        devices_per_node: int = 1,
        bandwidth: str | float = "10Gbit/s",
        latency: str | float = "50us",
        memory: str | float | None = None,
        device: str = "generic",
        peak_flops: str | float | None = None,
        memory_bandwidth: str | float | None = None,
        intra_bandwidth: str | float | None = None,
        intra_latency: str | float | None = None,
        *,
        name: str = "homogeneous",
    ) -> "ClusterSpec":
        """Equal nodes. What is None comes from the device catalogue, or is a node's default (16 GiB of memory)."""
        presets.check_node_count(nodes)
        figures = {
            "count": nodes,
            "device": device,
            "devices": devices_per_node,
            "bandwidth": bandwidth,
            "latency": latency,
            "memory": memory,
            "peak_flops": peak_flops,
            "memory_bandwidth": memory_bandwidth,
            "intra_bandwidth": intra_bandwidth,
            "intra_latency": intra_latency,
        }
        return cls(name=name, nodes=({figure: value for figure, value in figures.items() if value is not None},))

    @classmethod
    def of_ranks(cls, nodes: Sequence[str], **figures: Any) -> "ClusterSpec | None":
        """The cluster whose ranks share a node where `nodes` has the same name for them; None where the ranks of a node
        do not follow each other. All nodes have the same `figures`."""
        sizes = [(name, len(list(ranks))) for name, ranks in groupby(nodes)]
        if len({name for name, _ in sizes}) < len(sizes):
            return None
        return cls(name="job", nodes=tuple({**figures, "devices": size} for _, size in sizes))

    @classmethod
    def local(cls, world_size: int) -> "ClusterSpec":
        """Processes on this machine that talk over the loopback interface; its figures are rough."""
        return cls(name="local", nodes=(presets.LOCALHOST | {"devices": world_size},))

    @classmethod
    def preset(cls, name: str, nodes: int | None = None) -> "ClusterSpec":
        """A cluster by name; `nodes` changes how many nodes it has, where they are all of one kind."""
        listed, machines = presets.nodes_of(name, nodes)
        return cls(name=listed, nodes=machines)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The names `preset` knows."""
        return tuple(presets.PRESETS)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "ClusterSpec":
        """From a YAML or JSON file, told apart by content."""
        return cls._from_raw(document.parse_file(path), str(path))

    @classmethod
    def from_yaml(cls, text: str, origin: str = "cluster") -> "ClusterSpec":
        return cls._from_raw(files.parse_yaml(text, origin, document.WHAT), origin)

    @classmethod
    def from_json(cls, content: bytes | str, origin: str = "cluster") -> "ClusterSpec":
        return cls._from_raw(files.parse_json(content, origin, document.WHAT), origin)

    @classmethod
    def _from_raw(cls, raw: Any, origin: str) -> "ClusterSpec":
        if not isinstance(raw, dict):
            shown = "nothing" if raw is None else units.quote(raw)
            raise OffbeatError(f"{origin}: not a cluster: it must hold a mapping with 'nodes', got {shown}")
        try:
            return cls(**{str(field): value for field, value in raw.items()})
        except OffbeatError as error:
            raise OffbeatError(f"{origin}: {error}") from None

    def to_yaml(self) -> str:
        """Human units, equal nodes merged; `from_yaml` gives back exactly this cluster."""
        return document.render_yaml(self)

    def to_json(self) -> bytes:
        """Plain SI numbers, one entry per node."""
        return self.model_dump_json(exclude_none=True).encode()

    def save(self, path: str | PathLike[str]) -> None:
        """Writes YAML."""
        files.write_atomic(path, self.to_yaml().encode(), document.WHAT)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of a cluster file."""
        return cls.model_json_schema()

    def _of_link(self, here: int, there: int, figure: Literal["bandwidth", "latency"]) -> float | None:
        return getattr(self._link_between.get((here, there)), figure, None)

    def _flow_limit(self, here: int, there: int) -> float:
        return min(self.nodes[node].single_flow_bandwidth or math.inf for node in (here, there))

    def _check_node(self, node_index: int) -> None:
        if not 0 <= node_index < len(self.nodes):
            raise OffbeatError(f"node {node_index} is outside the cluster, whose nodes are 0 to {len(self.nodes) - 1}")


def _hops(ring: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(ring, ring[1:] + ring[:1], strict=True)) if len(ring) > 1 else []
