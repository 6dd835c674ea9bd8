"""Prices → the points of the systems TensorOpt compares with (section 5.1), all under the same costs.

- `data_parallel`: every unit splits the first axis of its result over all devices.
- `optcnn`: the least time, whatever the memory.
- `tofu`: only configurations that hold least of every tensor, so that all are split over all devices where they can
  be; of these the least time, with one copy of each re-scheduled tensor.
- `mesh_tensorflow`: one mesh for all, and a logical dimension is split everywhere or nowhere. Dimensions are the labels
  that tensors between units connect; where one operator has a dimension twice, its result's axis is split.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from offbeat.search.frontier.algebra import frontier_reduce
from offbeat.search.frontier.configs import NONE, Configurations
from offbeat.search.frontier.costs import Prices
from offbeat.search.frontier.evaluate import Strategies, expanded
from offbeat.search.frontier.model import FrontierPoint
from offbeat.search.frontier.track import track
from offbeat.search.frontier.units import Unit

_MOST_DIMENSIONS = 12
"""Logical dimensions Mesh-TensorFlow's search considers: those that most units have."""


def baselines(prices: Prices) -> dict[str, FrontierPoint]:
    """One point of each system; of Mesh-TensorFlow the fastest."""
    return {
        "data parallel": data_parallel(prices),
        "OptCNN": optcnn(prices),
        "ToFu": tofu(prices),
        "Mesh-TensorFlow": min(mesh_tensorflow(prices), key=lambda point: point.time_seconds),
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
    ops, edges = prices.tables(False, ("time", "time"))
    found = track([_blind(costs) for costs in ops], {pair: _blind(costs) for pair, costs in edges.items()})
    points = _points(prices, found.choices, "optcnn")
    return min(points, key=lambda point: point.time_seconds)


def tofu(prices: Prices) -> FrontierPoint:
    """The fastest strategy of those that split every tensor as far as it can be."""
    ops, edges = prices.tables(True)
    allowed = [
        _smallest(unit, configs, prices) for unit, configs in zip(prices.units.units, prices.configs, strict=True)
    ]
    ops = [costs[kept] for costs, kept in zip(ops, allowed, strict=True)]
    edges = {(i, j): costs[np.ix_(allowed[i], allowed[j])] for (i, j), costs in edges.items()}
    found = track(ops, edges)
    fastest = found.choices[-1:]
    choices = np.array([[kept[choice] for kept, choice in zip(allowed, row, strict=True)] for row in fastest], np.int64)
    return _points(prices, choices, "tofu", small=True)[0]


def mesh_tensorflow(prices: Prices) -> list[FrontierPoint]:
    """The frontier of strategies with one global map, by memory upwards."""
    dimension = _dimensions(prices)
    known: dict[tuple[int, ...], int] = {}
    rows = set()
    for symbols in _global_maps(prices, dimension):
        row = []
        for index, (unit, configs) in enumerate(zip(prices.units.units, prices.configs, strict=True)):
            wanted = _global_row(index, unit, symbols, dimension)
            key = (index, *wanted)
            if key not in known:
                known[key] = _closest(configs, wanted)
            row.append(known[key])
        rows.add(tuple(row))
    choices = np.array(sorted(rows), np.int64)
    points = _points(prices, choices, "mesh_tensorflow")
    kept = frontier_reduce([(point.memory_bytes, point.time_seconds) for point in points])
    return [points[index] for index in kept]


def _points(prices: Prices, choices: NDArray[np.int64], name: str, small: bool = False) -> list[FrontierPoint]:
    found = expanded(prices, choices, walk=small)
    strategies = Strategies(prices, name)
    if not small:
        best = np.asarray(frontier_reduce(np.stack([found.memory, found.time], axis=1)), np.int64)
        return [strategies.point(choices, found, int(index)) for index in best]
    last = [int(np.flatnonzero(found.row == row)[-1]) for row in range(len(choices))]
    return [strategies.point(choices, found, index) for index in last]


def _blind(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.zeros(costs.shape[:-1]), costs[..., 1]], axis=-1)


def _first_label(unit: Unit) -> int:
    """The label of the first axis of the head's result, or of what it reads where that has none."""
    rule = unit.members[unit.head].rule
    firsts = [labels[0] for labels in (*rule.outputs[:1], *rule.inputs) if labels and labels[0] >= 0]
    return firsts[0] if firsts else NONE


def _closest(configs: Configurations, wanted: list[int]) -> int:
    """The configuration that agrees with the wanted labels on most fine axes and splits nothing else."""
    asked = np.asarray(wanted, np.int64)
    agree = (configs.before == asked).sum(axis=1) * 2.0
    other = ((configs.before != asked) & (configs.before != NONE)).sum(axis=1)
    scattered = (configs.after != np.where(configs.after == NONE, NONE, configs.before)).any(axis=1)
    return int(np.argmax(agree - 100.0 * other - scattered))


def _smallest(unit: Unit, configs: Configurations, prices: Prices) -> NDArray[np.int64]:
    """The configurations that hold the fewest bytes of all tensors of a unit together."""
    factors = np.array(prices.mesh.factors, np.float64)
    held = np.zeros(len(configs))
    for number, member in enumerate(unit.members):
        operator = member.operator
        outputs = [(spec.bytes, labels) for spec, labels in zip(operator.outputs, member.rule.outputs, strict=True)]
        variables = [
            (prices.graph.variable(name).bytes, labels)
            for name, labels in zip(operator.variables, member.rule.variables, strict=True)
        ]
        inputs = [
            (prices.graph.operator(name).outputs[0].bytes, labels)
            for name, labels in zip(operator.inputs, member.rule.inputs, strict=True)
        ]
        for tensors, result in ((outputs, True), (variables + inputs, False)):
            symbols = configs.symbols(unit, number, result)
            for size, labels in tensors:
                split = np.isin(symbols, [label for label in labels if label >= 0])
                held += size * np.prod(np.where(split, 1.0 / factors, 1.0), axis=1)
    return np.flatnonzero(held <= held.min() * (1 + 1e-9))


def _dimensions(prices: Prices) -> dict[tuple[int, int], int]:
    """The logical dimension of each label of each unit: labels that a tensor between units connects are one."""
    parent: dict[tuple[int, int], tuple[int, int]] = {
        (index, label): (index, label)
        for index, unit in enumerate(prices.units.units)
        for label in range(len(unit.sizes))
    }

    def find(node: tuple[int, int]) -> tuple[int, int]:
        while parent[node] != node:
            node = parent[node]
        return node

    for flow in prices.units.flows:
        for first, second in zip(flow.given, flow.taken, strict=True):
            if first >= 0 and second >= 0:
                parent[find((flow.source, first))] = find((flow.target, second))
    roots: dict[tuple[int, int], int] = {}
    return {node: roots.setdefault(find(node), len(roots)) for node in parent}


def _global_maps(prices: Prices, dimension: dict[tuple[int, int], int]) -> list[list[int]]:
    """For each fine axis a dimension or none: all meshes of one or two axes, all pairs of dimensions."""
    common = [found for found, _ in Counter(dimension.values()).most_common(_MOST_DIMENSIONS)]
    fine = len(prices.mesh.factors)
    maps = [[NONE] * fine]
    for first in common:
        maps.append([first] * fine)
        for cut in range(1, fine):
            maps += [[first] * cut + [second] * (fine - cut) for second in (NONE, *common) if second != first]
            maps.append([NONE] * cut + [first] * (fine - cut))
    return maps


def _global_row(index: int, unit: Unit, symbols: list[int], dimension: dict[tuple[int, int], int]) -> list[int]:
    """The unit's own labels for the global map."""
    labels = sorted(range(len(unit.sizes)), key=lambda label: label in unit.sums)
    return [next((label for label in labels if dimension[index, label] == symbol), NONE) for symbol in symbols]
