"""A unit and a fine mesh → all its configurations, as arrays; a configuration → OperatorConfig of each operator.

A configuration gives each fine axis one of the unit's labels, or none: the devices along it then compute the same
(redundantly). The fine axes of a label are neighbours, so that they are one axis of a device mesh and each tensor axis
is split by one mesh axis, as TensorOpt's tensor maps have it. Where a label is summed over, the partial sums are
completed by an all-reduce, or by a reduce-scatter that splits another axis of the result; what follows in the unit then
works on that split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import numpy as np
from numpy.typing import NDArray

from offbeat.search.frontier.units import Map, Unit
from offbeat.strategy.model import OperatorConfig

NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Configurations:
    """The configurations of a unit."""

    before: NDArray[np.int64]
    """(K, F) the label of each fine axis up to its head."""
    after: NDArray[np.int64]
    """(K, F) the same from the head's result on."""

    def __len__(self) -> int:
        return len(self.before)

    def symbols(self, unit: Unit, member: int, result: bool = False) -> NDArray[np.int64]:
        """(K, F) what splits a member's inputs, or its result."""
        return self.before if member < unit.head or (member == unit.head and not result) else self.after


def configurations(unit: Unit, factors: Sequence[int], levels: Sequence[int], most: int = 64) -> Configurations:
    """All configurations of a unit, or the `most` that come first.

    Where there are more than `most`, one order of labels stands for all among fine axes of one of the `levels`, which
    are linked alike; then those come first that use fewer mesh axes and repeat less work."""
    head = unit.members[unit.head].rule
    results = {label for labels in head.outputs[:1] for label in labels if label >= 0}
    rows: list[tuple[Map, Map]] = []
    for before in _assignments(unit.sizes, tuple(factors)):
        # What takes the place of a label that is summed over.
        completing = [NONE]
        if len(unit.sums.intersection(before)) == 1:
            parts = prod(factor for symbol, factor in zip(before, factors, strict=True) if symbol in unit.sums)
            completing += [new for new in sorted(results.difference(before)) if unit.sizes[new] % parts == 0]
        rows += [(before, tuple(new if symbol in unit.sums else symbol for symbol in before)) for new in completing]
    if len(rows) > most:
        # The head's labels as its result has them, then those it sums over, then none.
        axes = [label for labels in (*head.outputs[:1], *head.inputs, *head.variables) for label in labels]
        ordered = [*dict.fromkeys(label for label in (*axes, *range(len(unit.sizes))) if label >= 0), NONE]
        rows = [row for row in rows if _is_canonical(row[0], levels, ordered)]
    table = np.array(rows, np.int64)
    runs = (np.diff(table[:, 0]) != 0).sum(axis=1)
    repeated = np.where(table[:, 0] == NONE, np.array(factors, np.int64), 1).prod(axis=1)
    first = np.lexsort((repeated, runs))[:most]
    return Configurations(table[first, 0], table[first, 1])


def _is_canonical(before: tuple[int, ...], levels: Sequence[int], ordered: list[int]) -> bool:
    for axis in range(1, len(before)):
        first, second = before[axis - 1], before[axis]
        continued = axis > 1 and levels[axis - 2] != levels[axis - 1] and before[axis - 2] == first
        if levels[axis - 1] == levels[axis] and ordered.index(first) > ordered.index(second) and not continued:
            return False
    return True


def _assignments(sizes: Sequence[int], factors: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Labels for the fine axes: those of one label are neighbours, and its size is divided evenly."""
    found: list[tuple[int, ...]] = [()]
    for axis, factor in enumerate(factors):
        grown = []
        for chosen in found:
            grown.append((*chosen, NONE))
            for label, size in enumerate(sizes):
                parts = factor * prod(factors[earlier] for earlier in range(axis) if chosen[earlier] == label)
                if size % parts == 0 and (label not in chosen or chosen[-1] == label):
                    grown.append((*chosen, label))
        found = grown
    return found


def operator_configs(unit: Unit, configs: Configurations, index: int, factors: Sequence[int]) -> list[OperatorConfig]:
    """The device mesh and tensor maps of each member under one configuration."""
    both = list(zip(configs.before[index].tolist(), configs.after[index].tolist(), strict=True))
    # Neighbouring fine axes of one label are one axis of the mesh.
    joined = [list(axes) for _, axes in groupby(range(len(factors)), key=lambda axis: both[axis])]
    mesh = tuple(prod(factors[axis] for axis in axes) for axes in joined) or (1,)
    place = [number for number, axes in enumerate(joined) for _ in axes]

    def tensor_maps(maps: Sequence[Map], symbols: list[int]) -> tuple[Map, ...]:
        at = {NONE: NONE, **{symbol: place[symbols.index(symbol)] for symbol in symbols if symbol >= 0}}
        return tuple(tuple(at.get(label, NONE) for label in labels) for labels in maps)

    made = []
    for number, member in enumerate(unit.members):
        given, result = (configs.symbols(unit, number, side)[index].tolist() for side in (False, True))
        inputs = tensor_maps(member.rule.inputs + member.rule.variables, given)
        made.append(OperatorConfig(mesh=mesh, inputs=inputs, outputs=tensor_maps(member.rule.outputs, result)))
    return made
