"""Frontiers as flat arrays → their products, unions and reductions, each point with the two points it came from.

Notation of TensorOpt, section 3.1: `frontier_reduce` is Algorithm 1, `frontier_product` is F ⊗ F', `frontier_union` is
F ∪ F'; the latter two always reduce. FT applies them to whole tables of frontiers, one per (pair of) configurations:
`combine` computes target[c] = ∪ₖ a[cₐ + k·sₐ] ⊗ b[c_b + k·s_b] for all cells c of a table at once.
"""

from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.search.frontier.kernels import combine_cells

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

_WORK_PER_THREAD = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """One frontier per cell; cell c holds the points start[c] ≤ p < start[c + 1], by memory upwards."""

    start: Ints
    memory: Floats
    time: Floats
    left: Ints | None = None
    """Point of the first table a combination took, for each point; None in a table of given costs."""
    right: Ints | None = None
    """As `left`, for the second table."""
    thinned: bool = False
    """A cell, here or in a table this one was made of, was cut to a number of points."""

    @property
    def cells(self) -> int:
        return len(self.start) - 1

    def cell_of(self, points: Ints) -> Ints:
        """The cell that holds each of the given points."""
        return np.searchsorted(self.start, points, side="right") - 1

    def pointers(self) -> "Table":
        """The same table without costs: all that unrolling needs."""
        nothing = np.empty(0)
        return Table(self.start, nothing, nothing, self.left, self.right, self.thinned)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which cells of two tables are paired for each cell of a target with three axes (unused ones have length 1)."""

    shape: tuple[int, int, int]
    a_strides: tuple[int, int, int]
    b_strides: tuple[int, int, int]
    terms: int = 1
    a_step: int = 0
    b_step: int = 0
    b_first: int = 0


UNIT = Table(np.array([0, 1]), np.zeros(1), np.zeros(1))
"""The neutral element of the product: one cell, one point, no cost."""


def table_of(costs: Floats) -> Table:
    """One cell per (memory, time) in row-major order; an infinite cost leaves its cell empty."""
    flat = np.ascontiguousarray(costs.reshape(-1, 2))
    possible = np.isfinite(flat).all(axis=1)
    start = np.concatenate(([0], np.cumsum(possible)))
    return Table(start, flat[possible, 0].copy(), flat[possible, 1].copy())


def combine(
    a: Table, b: Table, pattern: Pattern, cap: int = 0, threads: int = 1, pool: Executor | None = None
) -> Table:
    """The table of reduced unions of products that `pattern` describes. The result is the same for any `threads`."""
    axes = np.zeros((5, 3), np.int64)
    axes[0], axes[1], axes[2] = pattern.shape, pattern.a_strides, pattern.b_strides
    axes[3, :2] = 0, pattern.a_step
    axes[4, :2] = pattern.b_first, pattern.b_step
    cells = int(np.prod(pattern.shape))
    first, second = (a.start, a.memory, a.time), (b.start, b.memory, b.time)
    work = cells * pattern.terms * (len(a.memory) / a.cells) * (len(b.memory) / b.cells)
    parts = min(threads, cells, int(work // _WORK_PER_THREAD)) if pool is not None else 1
    if pool is None or parts < 2:
        pieces = [combine_cells(first, second, axes, pattern.terms, 0, cells, cap)]
    else:
        bounds = [cells * part // (4 * parts) for part in range(4 * parts + 1)]
        jobs = [
            pool.submit(combine_cells, first, second, axes, pattern.terms, low, high, cap)
            for low, high in pairwise(bounds)
            if high > low
        ]
        pieces = [job.result() for job in jobs]
    counts, memory, time, left, right = (
        pieces[0][part] if len(pieces) == 1 else np.concatenate([piece[part] for piece in pieces]) for part in range(5)
    )
    start = np.concatenate(([0], np.cumsum(counts)))
    thinned = a.thinned or b.thinned or any(piece[5] for piece in pieces)
    return Table(start, memory, time, left, right, thinned)


def frontier_reduce(points: ArrayLike) -> Ints:
    """Indices of the non-dominated (memory, time) points, by memory upwards; of equal points the first."""
    given = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    order = np.lexsort((given[:, 1], given[:, 0]))
    time = given[order, 1]
    before = np.concatenate(([np.inf], np.minimum.accumulate(time)[:-1])) if len(time) else time
    return order[time < before]


def frontier_product(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Ints, Ints]:
    """The frontier of all sums of a point of `first` and one of `second`, with the indices of both.

    Both must be frontiers, by memory upwards."""
    result = combine(_cell(first), _cell(second), Pattern((1, 1, 1), (0, 0, 0), (0, 0, 0)))
    return _points(result), _pointer(result.left), _pointer(result.right)


def frontier_union(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Ints]:
    """The frontier of the points of both, with indices into `first` followed by `second`; both must be frontiers."""
    one, two = _cell(first), _cell(second)
    start = np.array([0, one.start[1], one.start[1] + two.start[1]])
    both = Table(start, np.concatenate((one.memory, two.memory)), np.concatenate((one.time, two.time)))
    result = combine(both, UNIT, Pattern((1, 1, 1), (0, 0, 0), (0, 0, 0), terms=2, a_step=1))
    return _points(result), _pointer(result.left)


def hypervolume(points: ArrayLike, reference: ArrayLike) -> float:
    """Area that the points dominate below the reference (memory, time): larger is better."""
    given = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    memory, time = (float(value) for value in np.asarray(reference, dtype=np.float64))
    inside = given[(given[:, 0] < memory) & (given[:, 1] < time)]
    front = inside[frontier_reduce(inside)]
    widths = np.diff(np.append(front[:, 0], memory))
    return float(np.sum(widths * (time - front[:, 1])))


def _cell(points: ArrayLike) -> Table:
    given = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    return Table(np.array([0, len(given)]), given[:, 0].copy(), given[:, 1].copy())


def _points(table: Table) -> Floats:
    return np.column_stack((table.memory, table.time))


def _pointer(pointer: Ints | None) -> Ints:
    assert pointer is not None
    return pointer
