"""Partitioner: partition vectors → pieces of variables, each with its shard's configuration."""

from itertools import pairwise, product

from offbeat.plan.draft import Draft
from offbeat.plan.model import Piece
from offbeat.strategy import VariableConfig


def partition(draft: Draft) -> None:
    """Cuts every variable that gets a gradient; operators go on reading the whole variable."""
    for variable in draft.graph.gradient_order:
        config = draft.strategy.config(variable.name)
        for index, box in enumerate(boxes(variable.shape, config)):
            draft.pieces.append((Piece(variable.name, box), config.shard(index)))


def boxes(shape: tuple[int, ...], config: VariableConfig) -> list[tuple[tuple[int, int], ...]]:
    """The box of each shard, in row-major order."""
    if not config.partition:
        return [tuple((0, length) for length in shape)]
    ranges = []
    for axis, (length, parts) in enumerate(zip(shape, config.partition, strict=True)):
        if config.cuts:
            edges = (0, *config.cuts[axis], length)
        else:
            # As torch.tensor_split: the first shards are one longer where the axis does not divide.
            edges = tuple(part * (length // parts) + min(part, length % parts) for part in range(parts + 1))
        ranges.append(list(pairwise(edges)))
    return [tuple(box) for box in product(*ranges)]
