"""Costs of operators and edges → for each operator the configurations that can be on the frontier.

Configuration k of operator i can be dropped when some k' costs no more whatever all others choose:

    op[k] − op[k'] + Σⱼ min over s of (edge[k, s] − edge[k', s]) ≥ 0, in memory and in time

with the sum over the neighbours j and s their configurations (the dead-end elimination criterion of Goldstein, here for
two objectives). Replacing k by k' then never makes a strategy worse, so no point of the frontier is lost.
"""

from hashlib import blake2b

import numpy as np
from numba import njit
from numpy.typing import NDArray

from offbeat.search.frontier.algebra import Floats

_ROUNDS = 4
_REMEMBERED = 256


def useful_configurations(ops: list[Floats], edges: dict[tuple[int, int], Floats]) -> list[NDArray[np.int64]]:
    """Indices of the configurations to keep, for each operator; edges are (Kᵢ, Kⱼ, 2) with i < j."""
    kept = [np.arange(len(costs)) for costs in ops]
    incident: list[list[tuple[int, int]]] = [[] for _ in ops]
    for pair in edges:
        incident[pair[0]].append(pair)
        incident[pair[1]].append(pair)
    gaps: dict[tuple[object, ...], Floats] = {}
    pending = set(range(len(ops)))
    for _ in range(_ROUNDS):
        touched: set[int] = set()
        for node in sorted(pending):
            alive = _alive(node, ops, edges, incident[node], kept, gaps)
            if not alive.all():
                kept[node] = kept[node][alive]
                touched.update(end for pair in incident[node] for end in pair if end != node)
        pending = touched
        if not pending:
            break
    return kept


def _alive(
    node: int,
    ops: list[Floats],
    edges: dict[tuple[int, int], Floats],
    incident: list[tuple[int, int]],
    kept: list[NDArray[np.int64]],
    gaps: dict[tuple[object, ...], Floats],
) -> NDArray[np.bool_]:
    own = ops[node][kept[node]]
    if len(own) == 1:
        return np.ones(1, np.bool_)
    # Infinite costs forbid a configuration; it is dropped first, since differences with it have no value.
    gap = np.where(np.isfinite(own), own, 0.0)
    gap = gap[:, None, :] - gap[None, :, :]
    for pair in incident:
        edge = edges[pair][np.ix_(kept[pair[0]], kept[pair[1]])]
        if pair[1] == node:
            edge = edge.transpose(1, 0, 2)
        edge = np.ascontiguousarray(edge)
        key = (edge.shape, blake2b(edge.data).digest())
        if key not in gaps:
            if len(gaps) >= _REMEMBERED:
                gaps.clear()
            gaps[key] = _least_gap(edge)
        with np.errstate(invalid="ignore"):  # ∞ − ∞ decides nothing, and compares as such
            gap = gap + gaps[key]
    possible = np.isfinite(own).all(axis=1)
    if not possible.any():
        return np.ones(len(own), np.bool_)
    return _undominated(gap, possible)


@njit(cache=True, nogil=True)
def _least_gap(edge):
    """(K, K, 2): the least of edge[k, s] − edge[k', s] over the s that k can be joined with."""
    size, others, _ = edge.shape
    gap = np.empty((size, size, 2))
    for k in range(size):
        for other in range(size):
            memory = np.inf
            time = np.inf
            for s in range(others):
                if edge[k, s, 0] != np.inf and edge[k, s, 1] != np.inf:
                    memory = min(memory, edge[k, s, 0] - edge[other, s, 0])
                    time = min(time, edge[k, s, 1] - edge[other, s, 1])
            gap[k, other, 0] = memory
            gap[k, other, 1] = time
    return gap


@njit(cache=True, nogil=True)
def _undominated(gap, possible):
    alive = possible.copy()
    for k in range(len(gap)):
        if not alive[k]:
            continue
        for other in range(len(gap)):
            if other != k and alive[other] and gap[k, other, 0] >= 0.0 and gap[k, other, 1] >= 0.0:
                alive[k] = False
                break
    return alive
