"""Choices of configurations → their memory and time, what to keep for backward, and the Strategy of each.

`track` decides configurations with all re-scheduled tensors kept in one way. `expanded` then walks, for each strategy,
from keeping what is fast to keeping what is small, the tensors that cost least time per byte first; every step on the
way is a strategy of its own (TensorOpt's tensor reuse, section 4.2).
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from offbeat.search.frontier.algebra import Floats
from offbeat.search.frontier.configs import operator_configs
from offbeat.search.frontier.costs import KEEPS, Keep, Prices, preferred
from offbeat.search.frontier.model import FrontierPoint
from offbeat.strategy.model import OperatorConfig, Strategy

Reader = tuple[int, int]
"""A unit and one of its members."""


@dataclass(frozen=True, slots=True, eq=False)
class Expanded:
    """N ways to keep tensors under P choices, N ≥ P."""

    row: NDArray[np.int64]
    """(N,) the choices each belongs to."""
    steps: NDArray[np.int64]
    """(N,) how many readers, in the order of `order[row]`, keep what is small."""
    memory: Floats
    compute: Floats
    network: Floats
    order: NDArray[np.int64]
    """(P, R) readers, those first that save memory for the least time."""
    readers: list[Reader]
    keeps: NDArray[np.int64]
    """(2, R, P) index into KEEPS: fast, small."""

    @property
    def time(self) -> Floats:
        return self.compute + self.network


def expanded(prices: Prices, choices: NDArray[np.int64], walk: bool = True) -> Expanded:
    """The costs of each row of choices, keeping what is fast; with `walk` all steps from there to what is small."""
    rows = len(choices)
    costs = np.zeros((rows, 3))
    for unit, own in enumerate(prices.unit_costs):
        costs += own[choices[:, unit]]
    memory, compute, network = costs[:, 0] + prices.base_bytes, costs[:, 1], costs[:, 2]
    groups: dict[Reader, list[tuple[Floats, Floats]]] = defaultdict(list)
    for flow, passed in zip(prices.units.flows, prices.flow_costs, strict=True):
        source, target = choices[:, flow.source], choices[:, flow.target]
        network = network + passed.seconds[source, target] * flow.count
        if flow.kept_bytes:
            groups[flow.target, flow.reader].append(passed.options(source, target))
    readers = list(groups)
    saved, spent = np.zeros((len(readers), rows)), np.zeros((len(readers), rows))
    keeps = np.zeros((2, len(readers), rows), np.int64)
    columns = np.arange(rows)
    for index, reader in enumerate(readers):
        held, seconds = (np.sum(options, axis=0) for options in zip(*groups[reader], strict=True))
        keeps[:, index] = fast, small = preferred(held, seconds, False), preferred(held, seconds, True)
        memory = memory + held[fast, columns]
        network = network + seconds[fast, columns]
        saved[index] = held[fast, columns] - held[small, columns]
        spent[index] = seconds[small, columns] - seconds[fast, columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(saved > 0, spent / saved, np.inf)
    order = np.argsort(ratio, axis=0, kind="stable").T.reshape(rows, len(readers))
    useful = (saved > 0).sum(axis=0) if walk else np.zeros(rows, np.int64)
    row = np.repeat(np.arange(rows), useful + 1)
    steps = np.concatenate([np.arange(count + 1) for count in useful])
    memory = memory[row] - _summed(saved, order)[row, steps]
    network = network[row] + _summed(spent, order)[row, steps]
    return Expanded(row, steps, memory, compute[row], network, order, readers, keeps)


def _summed(table: Floats, order: NDArray[np.int64]) -> Floats:
    """(P, R + 1) what the first readers of each order change together, beginning with none."""
    changes = np.take_along_axis(table.T, order, axis=1)
    return np.concatenate([np.zeros((len(order), 1)), np.cumsum(changes, axis=1)], axis=1)


class Strategies:
    """Makes points of the frontier; equal parts of strategies are made once."""

    def __init__(self, prices: Prices, name: str) -> None:
        self.prices = prices
        graph, cluster = prices.graph, prices.mesh.cluster
        self._plain = Strategy(name=name, model=graph.name, graph=graph.signature, cluster=cluster.digest)
        self._part = cache(self._operators)

    def point(self, choices: NDArray[np.int64], found: Expanded, index: int) -> FrontierPoint:
        row = int(found.row[index])
        small = set(found.order[row, : found.steps[index]].tolist())
        keeps: dict[int, list[tuple[int, Keep]]] = defaultdict(list)
        for number, (unit, member) in enumerate(found.readers):
            keep = KEEPS[int(found.keeps[int(number in small), number, row])]
            if keep != "both":
                keeps[unit].append((member, keep))
        operators: dict[str, OperatorConfig] = {}
        for unit in range(len(self.prices.configs)):
            operators |= self._part(unit, int(choices[row, unit]), tuple(keeps[unit]))
        # A copy, because validating thousands of configurations that were validated when made would take seconds.
        strategy = self._plain.model_copy(update={"operators": operators})
        compute, network = float(found.compute[index]), float(found.network[index])
        chosen = tuple(int(choice) for choice in choices[row])
        return FrontierPoint(compute + network, float(found.memory[index]), compute, network, strategy, chosen)

    def _operators(self, unit: int, config: int, keeps: tuple[tuple[int, Keep], ...]) -> dict[str, OperatorConfig]:
        """One unit's operators under one configuration, with what some of its members keep."""
        prices = self.prices
        group = prices.units.units[unit]
        made = operator_configs(group, prices.configs[unit], config, prices.mesh.factors)
        for member, keep in keeps:
            made[member] = made[member].model_copy(update={"keep": keep})
        return {name: split for member, split in zip(group.members, made, strict=True) for name in member.names}
