"""Costs as users give them → checked arrays, one per operator and one per pair of operators."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offbeat.errors import OffbeatError
from offbeat.search.frontier.algebra import Floats


def checked_ops(op_costs: Sequence[Any]) -> list[Floats]:
    """Each of shape (K, 2) with K ≥ 1, not negative and not NaN."""
    ops = []
    for index, costs in enumerate(op_costs):
        array = _array(costs, f"op_costs[{index}]")
        if array.ndim != 2 or array.shape[1] != 2 or array.shape[0] == 0:
            raise OffbeatError(f"op_costs[{index}] must have shape (configurations, 2), got {array.shape}")
        ops.append(array)
    return ops


def checked_edges(edge_costs: Mapping[tuple[int, int], Any], ops: list[Floats]) -> dict[tuple[int, int], Floats]:
    """The sum of all tables between two operators, (Kᵢ, Kⱼ, 2) with i < j: edge elimination of given costs."""
    edges: dict[tuple[int, int], Floats] = {}
    for key, value in edge_costs.items():
        i, j = _pair(key, len(ops))
        for number, costs in enumerate(_parallel(value)):
            name = f"edge_costs[({i}, {j})]" + (f"[{number}]" if number else "")
            array = _array(costs, name)
            expected = (len(ops[i]), len(ops[j]), 2)
            if array.shape != expected:
                raise OffbeatError(f"{name} must have shape {expected}, got {array.shape}")
            if i > j:
                array = array.transpose(1, 0, 2)
            pair = (min(i, j), max(i, j))
            edges[pair] = np.ascontiguousarray(edges[pair] + array if pair in edges else array)
    return edges


def _pair(key: Any, count: int) -> tuple[int, int]:
    if not isinstance(key, tuple) or len(key) != 2 or not all(isinstance(end, numbers.Integral) for end in key):
        raise OffbeatError(f"edge_costs: the key {key!r} is not a pair of operator indices")
    i, j = int(key[0]), int(key[1])
    for end in (i, j):
        if not 0 <= end < count:
            raise OffbeatError(f"edge_costs[({i}, {j})]: there is no operator {end} among {count}")
    if i == j:
        raise OffbeatError(f"edge_costs[({i}, {j})] joins operator {i} with itself")
    return i, j


def _parallel(value: Any) -> list[Any]:
    """One table, or a list of tables."""
    if isinstance(value, list | tuple):
        return [value] if value and np.ndim(value[0]) == 2 else list(value)
    return [value]


def _array(costs: Any, name: str) -> Floats:
    try:
        array = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError):
        raise OffbeatError(f"{name} is not an array of numbers") from None
    if np.isnan(array).any():
        raise OffbeatError(f"{name}[{_where(np.isnan(array))}] is NaN")
    if (array < 0).any():
        where = _where(array < 0)
        raise OffbeatError(f"{name}[{where}] must not be negative, got {float(array[array < 0].flat[0])!r}")
    total = float(np.max(array[np.isfinite(array)], initial=0.0))
    if not math.isfinite(total * 1e9):
        raise OffbeatError(f"{name} has a cost of {total!r}, too large to be summed")
    return array


def _where(wrong: Any) -> str:
    return ", ".join(str(int(axis[0])) for axis in np.nonzero(wrong))
