"""Partition variables into pieces, group pieces into messages, and list the stages of each message.

Shards of one group number travel together as far as they can: same synchroniser, element type, owner, stations, ring,
encoder and staleness. Sparse gradients and sufficient factors have a shape of their own and always travel alone.
"""

from collections import Counter
from functools import lru_cache
from itertools import pairwise, product

from offbeat.cluster import ClusterSpec
from offbeat.plan.model import Draft, Message, Piece, Stage, TaskKind
from offbeat.strategy import Shard, VariableConfig

ALONE = ("sparse_all_gather", "sparse_parameter_server", "factor_broadcast")
"""Synchronisers whose messages hold one piece each."""
_FROM_SHARD = ("group", "synchronizer", "owner", "stations", "reduction_order", "encoder", "staleness", "asynchronous")
"""What a message takes from its shards."""
_HALVINGS, _NO_SHARE = 60, 1e-6
"""Steps of the search for the busiest link's time, and the share below which a rank sums nothing."""


def partition(draft: Draft) -> None:
    """Cuts every variable that gets a gradient; operators keep reading the whole variable."""
    for variable in draft.graph.gradient_order:
        config = draft.strategy.config(variable.name)
        for index, box in enumerate(boxes(variable.shape, config)):
            draft.pieces.append((Piece(variable.name, box), config.shard(index)))


def boxes(shape: tuple[int, ...], config: VariableConfig) -> list[tuple[tuple[int, int], ...]]:
    """The box of each shard, in row-major order."""
    if not config.partition:
        return [tuple((0, length) for length in shape)]
    ranges = (
        pairwise((0, *config.cuts[axis], length)) if config.cuts else even_ranges(length, parts)
        for axis, (length, parts) in enumerate(zip(shape, config.partition, strict=True))
    )
    return list(product(*ranges))


def even_ranges(length: int, parts: int) -> list[tuple[int, int]]:
    """(start, stop) of each part, as torch.tensor_split: the first ones are one longer where the length does not
    divide."""
    edges = [part * (length // parts) + min(part, length % parts) for part in range(parts + 1)]
    return list(pairwise(edges))


def synchronise(draft: Draft) -> None:
    """Merges pieces into messages in the order in which their gradients become ready, and gives each its stages."""
    ready = {variable.name: position for position, variable in enumerate(draft.graph.gradient_order)}
    merged: dict[object, list[tuple[Piece, Shard]]] = {}
    for number, (piece, shard) in enumerate(draft.pieces):
        dtype = draft.graph.variable(piece.variable).dtype
        alone = shard.group is None or shard.synchronizer in ALONE
        # Everything but the placement of replicated shards, which is all replicas whether written out or not.
        kept = shard.placement if shard.synchronizer == "summation_server" else (shard.owner,)
        signature = (shard.model_copy(update={"placement": kept}), dtype)
        merged.setdefault(number if alone else signature, []).append((piece, shard))
    parcels = sorted(merged.values(), key=lambda parcel: max(ready[piece.variable] for piece, _ in parcel))
    stages_of = lru_cache(maxsize=None)(lambda shard: make_stages(shard, draft.replicas, draft.cluster))
    for index, parcel in enumerate(parcels):
        first, shard = parcel[0]
        travels = {name: getattr(shard, name) for name in _FROM_SHARD}
        dtype = draft.graph.variable(first.variable).dtype
        if shard.synchronizer == "summation_server":
            travels["roots"] = tuple(root_shares(shard.placement, draft.replicas, draft.cluster))
        draft.messages.append(Message(index=index, pieces=tuple(p for p, _ in parcel), dtype=dtype, **travels))
        draft.stages.append(stages_of(shard))


def make_stages(shard: Shard, replicas: tuple[int, ...], cluster: ClusterSpec) -> tuple[Stage, ...]:
    """The stages of a message that travels as the shard says."""
    everyone = ((shard.reduction_order or replicas, None),)
    applied = Stage("update", ((replicas, None),))
    match shard.synchronizer:
        case "all_reduce":
            return Stage("all_gather" if shard.encoder.gathered else "all_reduce", everyone), applied
        case "sparse_all_gather" | "factor_broadcast":
            return Stage("all_gather", everyone), applied
        case "summation_server":
            # Which rank is the root is chosen slice by slice (`offbeat.plan.schedule`).
            return Stage("relay", ((replicas, None),)), applied
        case "sharded":
            return Stage("reduce_scatter", everyone), applied, Stage("all_gather", everyone, returns=True)
        case _:
            return _server_stages(shard, replicas, cluster)


def _server_stages(shard: Shard, replicas: tuple[int, ...], cluster: ClusterSpec) -> tuple[Stage, ...]:
    """Gradients go up to the owner, through the stations where there are any; parameters come back the same way.

    A node with a station and more than one replica reduces to it first; an owner with a replica is its own node's
    station. An owner without one adds nothing to the sum.
    """
    owner = shard.owner
    assert owner is not None
    on_node: dict[int, list[int]] = {}
    for rank in replicas:
        on_node.setdefault(cluster.node_of(rank), []).append(rank)
    station_of = {cluster.node_of(station): station for station in shard.stations}
    if owner in replicas and cluster.node_of(owner) in station_of:
        station_of[cluster.node_of(owner)] = owner
    local = tuple(
        (tuple(on_node[n]), station) for n, station in sorted(station_of.items()) if len(on_node.get(n, ())) > 1
    )
    through = {rank: station for ranks, station in local for rank in ranks}
    top = tuple(dict.fromkeys(through.get(rank, rank) for rank in (shard.reduction_order or replicas)))
    if owner not in replicas:
        top = (*top, owner)
    summed = shard.synchronizer == "parameter_server" and not shard.encoder.gathered
    up: TaskKind = "reduce" if summed else "gather"
    levels = [groups for groups in (local, ((top, owner),) if len(top) > 1 or not local else ()) if groups]
    return (
        *(Stage(up, groups) for groups in levels),
        Stage("update", (((owner,), None),)),
        *(Stage("broadcast", groups, returns=True) for groups in reversed(levels)),
    )


def root_shares(placement: tuple[int, ...], replicas: tuple[int, ...], cluster: ClusterSpec) -> dict[int, float]:
    """The share of the bytes that each rank sums, so that the busiest link is taken for as short as possible.

    A node with k of the n replicas sends k gradients up and k sums back; for the share s that it sums it hears from the
    n − k others, and k gradients fewer leave it: its link carries k + (n − 2k) s in each direction. All links that sum
    are taken for equally long, which for equal links is BytePS's optimum (Jiang et al., OSDI 2020); a link
    that is slower than that sums nothing. Without a placement the first rank of each node may sum.
    """
    first = {cluster.node_of(rank): rank for rank in reversed(placement or (*replicas, *cluster.servers))}
    on_node = Counter(cluster.node_of(rank) for rank in replicas)
    count = len(replicas)

    def shares(seconds: float) -> dict[int, float]:
        """What each root can sum while one gradient takes a link of 1 byte/s for a second."""
        found = {}
        for node, rank in first.items():
            left, more = seconds * cluster.node_bandwidth(node) - on_node[node], count - 2 * on_node[node]
            found[rank] = 0.0 if left <= 0 else min(1.0, left / more) if more > 0 else 1.0
        return found

    low, high = 0.0, count / min(cluster.node_bandwidth(node) for node in first)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(shares(middle).values()) >= 1 else (middle, high)
    found = shares(high)
    total = sum(found.values())
    if not total:
        # All replicas share a node, so that no link is taken.
        return {min(first.values()): 1.0}
    return {rank: share / total for rank, share in sorted(found.items()) if share > _NO_SHARE * total}
