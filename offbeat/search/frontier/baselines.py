"""Prices → the points of the systems TensorOpt compares with (section 5.1), all under the same costs.

- `data_parallel`: every unit splits the first axis of its result over all devices.
- `optcnn`: the least time, whatever the memory.
- `tofu`: only configurations that hold least of every tensor, so that all are split over all devices where they can
  be; of these the least time, with one copy of each re-scheduled tensor.
- `mesh_tensorflow`: one mesh for all, and a logical dimension is split everywhere or nowhere. Dimensions are the labels
  that tensors between units connect; where one operator has a dimension twice, its result's axis is split.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from offbeat.search.frontier.algebra import frontier_reduce
from offbeat.search.frontier.configs import NONE, Configurations
from offbeat.search.frontier.costs import Prices
from offbeat.search.frontier.evaluate import Strategies, expanded
from offbeat.search.frontier.model import FrontierPoint
from offbeat.search.frontier.track import track
from offbeat.search.frontier.units import Map, Unit

_MOST_DIMENSIONS = 12
"""Logical dimensions Mesh-TensorFlow's search considers: those that most units have."""


def baselines(prices: Prices) -> dict[str, FrontierPoint]:
    """One point of each system; of Mesh-TensorFlow the fastest."""
    return {
        "data parallel": data_parallel(prices),
        "OptCNN": optcnn(prices),
        "ToFu": tofu(prices),
        "Mesh-TensorFlow": mesh_tensorflow(prices)[-1],
    }


def data_parallel(prices: Prices) -> FrontierPoint:
    """Each device has all weights and a part of the samples."""
    choices = [
        _closest(configs, [_first_label(unit)] * len(prices.mesh.factors))
        for unit, configs in zip(prices.units.units, prices.configs, strict=True)
    ]
    return _points(prices, np.array([choices], np.int64), "data_parallel")[0]


def optcnn(prices: Prices) -> FrontierPoint:
    """The fastest strategy."""
    return _points(prices, track(*prices.tables(False, ("time", "time"))).choices, "optcnn")[-1]


def tofu(prices: Prices) -> FrontierPoint:
    """The fastest strategy of those that split every tensor as far as it can be."""
    ops, edges = prices.tables(True)
    allowed = [_smallest(prices, index) for index in range(len(prices.configs))]
    ops = [costs[kept] for costs, kept in zip(ops, allowed, strict=True)]
    edges = {(i, j): costs[np.ix_(allowed[i], allowed[j])] for (i, j), costs in edges.items()}
    fastest = track(ops, edges).choices[-1]
    choices = np.array([[kept[choice] for kept, choice in zip(allowed, fastest, strict=True)]], np.int64)
    found = expanded(prices, choices)
    return Strategies(prices, "tofu").point(choices, found, len(found.row) - 1)


def mesh_tensorflow(prices: Prices) -> list[FrontierPoint]:
    """The frontier of strategies with one global map, by memory upwards."""
    dimension = _dimensions(prices)

    @cache
    def chosen(index: int, wanted: tuple[int, ...]) -> int:
        return _closest(prices.configs[index], wanted)

    common = [NONE, *(found for found, _ in Counter(dimension.values()).most_common(_MOST_DIMENSIONS))]
    fine = len(prices.mesh.factors)
    # For each fine axis a dimension or none: all meshes of one or two axes, all pairs of dimensions.
    maps = {
        (first,) * cut + (second,) * (fine - cut)
        for first, second in product(common, repeat=2)
        for cut in range(fine + 1)
    }
    rows = {
        tuple(chosen(i, _global_row(i, unit, symbols, dimension)) for i, unit in enumerate(prices.units.units))
        for symbols in maps
    }
    return _points(prices, np.array(sorted(rows), np.int64), "mesh_tensorflow")


def _points(prices: Prices, choices: NDArray[np.int64], name: str) -> list[FrontierPoint]:
    """The non-dominated points of these choices, keeping what is fast."""
    found = expanded(prices, choices, walk=False)
    strategies = Strategies(prices, name)
    best = frontier_reduce(np.stack([found.memory, found.time], axis=1))
    return [strategies.point(choices, found, int(index)) for index in best]


def _first_label(unit: Unit) -> int:
    """The label of the first axis of the head's result, or of what it reads where that has none."""
    rule = unit.members[unit.head].rule
    return next((labels[0] for labels in (*rule.outputs[:1], *rule.inputs) if labels and labels[0] >= 0), NONE)


def _closest(configs: Configurations, wanted: Sequence[int]) -> int:
    """The configuration that agrees with the wanted labels on most fine axes and splits nothing else."""
    asked = np.asarray(wanted, np.int64)
    agree = (configs.before == asked).sum(axis=1) * 2.0
    other = ((configs.before != asked) & (configs.before != NONE)).sum(axis=1)
    scattered = (configs.after != np.where(configs.after == NONE, NONE, configs.before)).any(axis=1)
    return int(np.argmax(agree - 100.0 * other - scattered))


def _smallest(prices: Prices, index: int) -> NDArray[np.int64]:
    """The configurations that hold the fewest bytes of all tensors of a unit together."""
    unit, configs = prices.units.units[index], prices.configs[index]
    held = np.zeros(len(configs))
    for number, member in enumerate(unit.members):
        operator = member.operator
        read = [prices.graph.operator(name).outputs[0].bytes for name in operator.inputs]
        read += [prices.graph.variable(name).bytes for name in operator.variables]
        made = [spec.bytes for spec in operator.outputs]
        sides = (made, member.rule.outputs, True), (read, member.rule.inputs + member.rule.variables, False)
        for sizes, maps, result in sides:
            symbols = configs.symbols(unit, number, result)
            for size, labels in zip(sizes, maps, strict=True):
                held += size * prices.share(symbols, labels)
    return np.flatnonzero(held <= held.min() * (1 + 1e-9))


def _dimensions(prices: Prices) -> dict[tuple[int, int], int]:
    """The logical dimension of each label of each unit: labels that a tensor between units connects are one."""
    labels = [(index, label) for index, unit in enumerate(prices.units.units) for label in range(len(unit.sizes))]
    place = {label: number for number, label in enumerate(labels)}
    joined = [
        (place[flow.source, first], place[flow.target, second])
        for flow in prices.units.flows
        for first, second in zip(flow.given, flow.taken, strict=True)
        if first >= 0 and second >= 0
    ]
    ends = tuple(np.array(joined, np.int64).reshape(-1, 2).T)
    _, dimension = connected_components(coo_matrix((np.ones(len(joined)), ends), shape=(len(labels),) * 2))
    return dict(zip(labels, dimension.tolist(), strict=True))


def _global_row(index: int, unit: Unit, symbols: Map, dimension: dict[tuple[int, int], int]) -> Map:
    """The unit's own labels for the global map."""
    labels = sorted(range(len(unit.sizes)), key=lambda label: label in unit.sums)
    return tuple(next((label for label in labels if dimension[index, label] == symbol), NONE) for symbol in symbols)
