"""A ClusterSpec and a change → another ClusterSpec: fewer ranks, faster or slower links, ranks that only serve."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat import units
from offbeat.cluster.parts import Node
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.cluster.spec import ClusterSpec

Factors = tuple[float, float]
"""Of bandwidth and of latency."""
Spec = TypeVar("Spec", bound="ClusterSpec")


def subset(cluster: "ClusterSpec", ranks: int | Sequence[int]) -> "ClusterSpec":
    """The cluster of these ranks, or of the first `ranks` ones."""
    if isinstance(ranks, int):
        if isinstance(ranks, bool) or not 1 <= ranks <= cluster.world_size:
            raise OffbeatError(f"subset: {ranks!r} devices cannot be taken from a cluster of {cluster.world_size}")
        ranks = range(ranks)
    kept = sorted(set(ranks))
    if not kept or len(kept) != len(ranks):
        raise OffbeatError(f"subset: {units.quote(ranks)} must be one or more distinct ranks")
    for end in (kept[0], kept[-1]):
        cluster.node_of(end)
    if len(kept) == cluster.world_size:
        return cluster
    devices = Counter(cluster.node_of_rank[rank] for rank in kept)
    nodes = tuple(cluster.nodes[i].model_copy(update={"devices": devices[i]}) for i in sorted(devices))
    names = {node.name for node in nodes}
    renumbered = {rank: position for position, rank in enumerate(kept)}
    tables = tuple(
        table.renumbered(renumbered)
        for table in cluster.tables
        if all(rank in renumbered for group in table.groups for rank in group)
    )
    links = tuple(link for link in cluster.links if {link.a, link.b} <= names)
    return cluster.replace(nodes=nodes, links=links, tables=tables)


def with_links(cluster: Spec, between: Factors, within: Factors) -> Spec:
    """The cluster with every link's figures multiplied, `within` nodes and `between` them."""
    names = ("bandwidth", "latency", "intra_bandwidth", "intra_latency")
    factors = dict(zip(names, between + within, strict=True))
    return cluster.replace(
        nodes=tuple(_scaled(node, factors) for node in cluster.nodes),
        links=tuple(_scaled(link, factors) for link in cluster.links),
        tables=tuple(
            table.scaled(*(within if all(map(cluster.one_node, table.groups)) else between)) for table in cluster.tables
        ),
    )


def with_servers(cluster: "ClusterSpec", ranks: Iterable[int]) -> "ClusterSpec":
    """The cluster in which these ranks hold no replica."""
    serving = set(ranks)
    for rank in sorted(serving):
        cluster.node_of(rank)
    nodes: list[Node] = []
    for index, node in enumerate(cluster.nodes):
        kinds = [(role, len(list(run))) for role, run in groupby(rank in serving for rank in cluster.ranks_of(index))]
        for number, (serves, devices) in enumerate(kinds):
            changes = {"devices": devices, "role": "server" if serves else node.role}
            name = node.name if number == 0 else f"{node.name}-servers{number}"
            nodes.append(node.model_copy(update=changes | {"name": name}))
    return cluster.replace(nodes=tuple(nodes))


def _scaled(part: Any, factors: Mapping[str, float]) -> Any:
    """A node or a link with some of its figures multiplied, where it has them."""
    figures = {name: getattr(part, name, None) for name in factors}
    changed = {name: figure * factors[name] for name, figure in figures.items() if figure is not None}
    return part.model_copy(update=changed)
