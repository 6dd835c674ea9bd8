"""Frontiers as flat arrays → their products, unions and reductions, each point with the two points it came from.

Notation of TensorOpt, section 3.1: `frontier_reduce` is Algorithm 1. F ⊗ F' and F ∪ F' are applied to whole tables of
frontiers, one per (pair of) configurations: `Combiner` computes target[c] = ∪ₖ a[cₐ + k·sₐ] ⊗ b[c_b + k·s_b] for all
cells c of a table at once, reduced. That one operation is every elimination of FT and every step of LDP; only the cells
that are paired differ.

It is compiled, releases the GIL and does not sort all sums. Memory is cut into GRID buckets and `stair[b]` holds the
least time of any sum seen in a bucket before b. A sum whose time is not below its stair is dominated, and so is a whole
row or a whole pair of cells when its best corner is. Only what survives is sorted. Nothing on the frontier is lost by
this. Cells of at most FEW sums are sorted at once.
"""

from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

GRID = 1024
FEW = 256
_WORK_PER_THREAD = 20_000
_POINTS_PER_TABLE = 65_536
_LEAST_CAP = 16
_POINT = np.dtype([("memory", np.float64), ("time", np.float64), ("left", np.int32), ("right", np.int32)])
"""A sum, and the points of both tables that it is the sum of."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """One frontier per cell; cell c holds the points start[c] ≤ p < start[c + 1], by memory upwards."""

    start: Ints
    memory: Floats
    time: Floats
    left: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    """Point of the first table a combination took, for each point; empty in a table of given costs."""
    right: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    """As `left`, for the second table."""

    @property
    def cells(self) -> int:
        return len(self.start) - 1


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which cells of two tables are paired for each cell of a target."""

    shape: tuple[int, ...]
    a_strides: tuple[int, ...]
    b_strides: tuple[int, ...]
    terms: int = 1
    a_step: int = 0
    b_step: int = 0
    b_first: int = 0


UNIT = Table(np.array([0, 1]), np.zeros(1), np.zeros(1))
"""The neutral element of the product: one cell, one point, no cost."""


def table_of(costs: Floats) -> Table:
    """One cell per (memory, time) in row-major order."""
    memory, time = costs.reshape(-1, 2).T.copy()
    return Table(np.arange(len(memory) + 1), memory, time)


@dataclass(slots=True)
class Combiner:
    """Combines tables, each combination once. The result is the same for any number of threads."""

    cap: int = 0
    """Points a cell keeps at most; 0: all."""
    threads: int = 1
    pool: Executor | None = None
    known: dict[tuple[Table, Table, Pattern], Table] = field(default_factory=dict)

    def __call__(self, a: Table, b: Table, pattern: Pattern, remember: bool = True) -> Table:
        """The table of reduced unions of products that `pattern` describes."""
        key = (a, b, pattern)
        if key in self.known:
            return self.known[key]
        result = self._combined(a, b, pattern)
        if remember:
            self.known[key] = result
        return result

    def _combined(self, a: Table, b: Table, pattern: Pattern) -> Table:
        cells = prod(pattern.shape)
        places = np.indices(pattern.shape).reshape(-1, cells)
        a_cells = np.array(pattern.a_strides, np.int64) @ places
        b_cells = np.array(pattern.b_strides, np.int64) @ places + pattern.b_first
        steps = (pattern.a_step, pattern.b_step, pattern.terms)
        # Tables over pairs of configurations have many cells, of which each needs few points.
        cap = max(_LEAST_CAP, min(self.cap, _POINTS_PER_TABLE // cells)) if self.cap else 0
        first, second = (a.start, a.memory, a.time), (b.start, b.memory, b.time)
        part_of = partial(_combine_cells, first, second, a_cells, b_cells, steps, cap)
        work = cells * pattern.terms * (len(a.memory) / a.cells) * (len(b.memory) / b.cells)
        parts = min(self.threads, cells, int(work // _WORK_PER_THREAD))
        bounds = sorted({cells * part // (4 * parts) for part in range(4 * parts + 1)}) if parts > 1 else [0, cells]
        pieces = list((self.pool.map if self.pool and parts > 1 else map)(part_of, bounds[:-1], bounds[1:]))
        counts, points = (np.concatenate([piece[part] for piece in pieces]) for part in range(2))
        start = np.concatenate(([0], np.cumsum(counts)))
        return Table(start, *(np.ascontiguousarray(points[name]) for name in _POINT.names or ()))


def frontier_reduce(points: ArrayLike) -> Ints:
    """Indices of the non-dominated (memory, time) points, by memory upwards; of equal points the first."""
    given = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    order = np.lexsort((given[:, 1], given[:, 0]))
    time = given[order, 1]
    before = np.concatenate(([np.inf], np.minimum.accumulate(time)[:-1])) if len(time) else time
    return order[time < before]


@compiled(nogil=True)
def _combine_cells(a, b, a_cells, b_cells, steps, cap, first, last):
    """The target cells first..last of one combination: the number of points of each, and all points.

    `a` and `b` are (start, memory, time). A target cell's first term pairs its `a_cells` and `b_cells`; `steps` are the
    steps to the next term in `a` and in `b`, and the number of terms. With `cap` above 0, cells keep at most `cap`."""
    counts = np.zeros(last - first, np.int64)
    out = np.empty(max(64, 4 * (last - first)), _POINT)
    found = np.empty(4 * FEW, _POINT)
    stair = np.empty(GRID + 1, np.float64)
    used = 0
    for cell in range(first, last):
        pairs = (a_cells[cell], steps[0], b_cells[cell], steps[1], steps[2])
        found, size = _frontier_of_sums(a, b, pairs, stair, found)
        if cap > 0 and size > cap:
            size = _thin(found, size, cap)
        if used + size > len(out):
            out = _grown(out, used, 2 * (used + size))
        out[used : used + size] = found[:size]
        used += size
        counts[cell - first] = size
    return counts, out[:used]


@compiled(nogil=True)
def _grown(old, used, size):
    new = np.empty(size, _POINT)
    new[:used] = old[:used]
    return new


@compiled(nogil=True, inline="always")
def _spans(a, b, pairs, k):
    """The points of the k-th pair of cells; `pairs` is (cell of a, step, cell of b, step, terms)."""
    a_cell = pairs[0] + k * pairs[1]
    b_cell = pairs[2] + k * pairs[3]
    return a[0][a_cell], a[0][a_cell + 1], b[0][b_cell], b[0][b_cell + 1]


@compiled(nogil=True)
def _extent(a, b, pairs):
    """The two ends of the frontier (least memory, and memory of the least-time sum), and the scale of `_bucket`."""
    low = np.inf
    high = np.inf
    least = np.inf
    for k in range(pairs[4]):
        a0, a1, b0, b1 = _spans(a, b, pairs, k)
        low = min(low, a[1][a0] + b[1][b0])
        memory = a[1][a1 - 1] + b[1][b1 - 1]
        time = a[2][a1 - 1] + b[2][b1 - 1]
        if time < least or (time == least and memory < high):
            least = time
            high = memory
    scale = (GRID - 1.0) ** 2 / (high - low) if high > low else 0.0
    return low, high, scale if np.isfinite(scale) else 0.0


@compiled(nogil=True)
def _bucket(memory, extent):
    """Buckets widen with memory: time falls steeply where memory is least, and many points lie there."""
    return int(np.sqrt((memory - extent[0]) * extent[2]))


@compiled(nogil=True)
def _seed(a, b, pairs, extent, stair):
    """Sets the stairs by a few sums of each row, so that the full pass drops most of the others early."""
    stair[:] = np.inf
    for k in range(pairs[4]):
        a0, a1, b0, b1 = _spans(a, b, pairs, k)
        stride = max(1, (b1 - b0) // 2)
        for i in range(a0, a1):
            for j in range(b0, b1, stride):
                memory = a[1][i] + b[1][j]
                if memory > extent[1]:
                    break
                bucket = _bucket(memory, extent)
                stair[bucket + 1] = min(stair[bucket + 1], a[2][i] + b[2][j])
    for q in range(1, GRID + 1):
        stair[q] = min(stair[q], stair[q - 1])


@compiled(nogil=True)
def _frontier_of_sums(a, b, pairs, stair, found):
    """Fills `found` with the frontier of one target cell; returns it (it may have grown) and the number of points."""
    sums = 0
    for k in range(pairs[4]):
        a0, a1, b0, b1 = _spans(a, b, pairs, k)
        sums += (a1 - a0) * (b1 - b0)
    if sums <= FEW:
        return found, _settle(found, _add_all(a, b, pairs, found))
    extent = _extent(a, b, pairs)
    _seed(a, b, pairs, extent, stair)
    size = 0
    for k in range(pairs[4]):
        a0, a1, b0, b1 = _spans(a, b, pairs, k)
        if _behind(a[1][a0] + b[1][b0], a[2][a1 - 1] + b[2][b1 - 1], extent, stair):
            continue
        for i in range(a0, a1):
            if _behind(a[1][i] + b[1][b0], a[2][i] + b[2][b1 - 1], extent, stair):
                continue
            if size + b1 - b0 > len(found):
                size = _settle(found, size)
                if 2 * (size + b1 - b0) > len(found):
                    found = _grown(found, size, 4 * (size + b1 - b0))
            size = _add_row(a, b, i, b0, b1, extent, stair, found, size)
    return found, _settle(found, size)


@compiled(nogil=True)
def _add_all(a, b, pairs, found):
    size = 0
    for k in range(pairs[4]):
        a0, a1, b0, b1 = _spans(a, b, pairs, k)
        for i in range(a0, a1):
            for j in range(b0, b1):
                size = _put(found, size, a[1][i] + b[1][j], a[2][i] + b[2][j], i, j)
    return size


@compiled(nogil=True, inline="always")
def _put(found, size, memory, time, i, j):
    """Appends a point; returns how many there are."""
    found[size].memory = memory
    found[size].time = time
    found[size].left = i
    found[size].right = j
    return size + 1


@compiled(nogil=True, inline="always")
def _behind(memory, time, extent, stair):
    """A sum with no more memory and time than this is known."""
    return memory > extent[1] or stair[_bucket(memory, extent)] <= time


@compiled(nogil=True, inline="always")
def _add_row(a, b, i, b0, b1, extent, stair, found, size):
    """Appends the sums of point i of `a` with points of `b` that are not known to be dominated."""
    for j in range(b0, b1):
        memory = a[1][i] + b[1][j]
        if memory > extent[1]:
            break
        time = a[2][i] + b[2][j]
        bucket = _bucket(memory, extent)
        if stair[bucket] <= time:
            continue
        q = bucket + 1
        while q <= GRID and stair[q] > time:
            stair[q] = time
            q += 1
        size = _put(found, size, memory, time, i, j)
    return size


@compiled(nogil=True)
def _settle(found, size):
    """Sorts the first `size` points by memory and keeps the non-dominated (Algorithm 1); returns how many."""
    if size < 2:
        return size
    order = np.argsort(found.memory[:size], kind="mergesort")
    chosen = np.empty(size, np.int64)
    kept = 0
    for p in order:
        if kept > 0:
            last = chosen[kept - 1]
            if found[p].time >= found[last].time:
                continue
            if found[p].memory == found[last].memory:
                kept -= 1
        chosen[kept] = p
        kept += 1
    found[:kept] = found[chosen[:kept]]
    return kept


@compiled(nogil=True)
def _thin(found, size, cap):
    """Keeps at most `cap` points of a frontier: both ends, and of each of cap - 2 equal pieces the point nearest the
    lower convex hull; returns how many.

    A point's place is its share of the memory range plus its share of the time range. Both grow along a frontier, so
    every dropped point has a kept one within 2 / (cap - 2) of the ranges. Hull points go first because the hull of a
    sum is the sum of the hulls: they are what later sums are made of."""
    memory, time = found.memory, found.time
    memory_scale = 1.0 / (memory[size - 1] - memory[0])
    time_scale = 1.0 / (time[0] - time[size - 1])
    hull = np.empty(size, np.int64)
    depth = 0
    for p in range(size):
        while depth > 1:
            q, o = hull[depth - 1], hull[depth - 2]
            turn = (memory[q] - memory[o]) * memory_scale * (time[p] - time[o]) * time_scale
            if turn > (time[q] - time[o]) * time_scale * (memory[p] - memory[o]) * memory_scale:
                break
            depth -= 1
        hull[depth] = p
        depth += 1
    chosen = np.empty(cap, np.int64)
    chosen[0] = 0
    kept = 1
    piece = -1
    best = np.inf
    side = 0
    for p in range(1, size - 1):
        while hull[side + 1] < p:
            side += 1
        o, q = hull[side], hull[side + 1]
        dx = (memory[q] - memory[o]) * memory_scale
        dy = (time[q] - time[o]) * time_scale
        distance = abs(dx * (time[p] - time[o]) * time_scale - dy * (memory[p] - memory[o]) * memory_scale)
        distance /= np.sqrt(dx * dx + dy * dy)
        place = 0.5 * ((memory[p] - memory[0]) * memory_scale + (time[0] - time[p]) * time_scale)
        its_piece = min(int(place * (cap - 2)), cap - 3)
        if its_piece != piece:
            piece = its_piece
            kept += 1
        elif distance >= best:
            continue
        best = distance
        chosen[kept - 1] = p
    chosen[kept] = size - 1
    found[: kept + 1] = found[chosen[: kept + 1]]
    return kept + 1
