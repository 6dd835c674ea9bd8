"""Pairs of cells of two tables → the non-dominated sums of their points, in compiled code that releases the GIL.

A table is flat: cell c holds the points start[c] ≤ p < start[c + 1], sorted by memory upwards and so by time downwards.
`combine_cells` computes for each target cell the union over `terms` pairs of cells of the product of the two cells,
reduced to a frontier (TensorOpt's union, product and Algorithm 1 in one). That one operation is every elimination of FT
and every step of LDP; only the cells that are paired differ.

It does not sort all sums. Memory is cut into GRID buckets and `stair[b]` holds the least time of any sum seen in a
bucket before b. A sum whose time is not below its stair is dominated, and so is a whole row or a whole pair of cells
when its best corner is. Only what survives is sorted. Nothing on the frontier is lost by this. Cells of at most FEW
sums are sorted at once.
"""

import numpy as np
from numba import njit

GRID = 1024
FEW = 256


@njit(cache=True, nogil=True)
def combine_cells(a, b, axes, terms, first, last, cap):
    """The target cells first..last of one combination, as (counts, memory, time, left, right, thinned).

    `a` and `b` are (start, memory, time). `axes` has one row per number that locates a cell: the shape of the target's
    three axes, the strides of those axes in `a`, in `b`, and then (first cell, step per term) in `a` and in `b`. `left`
    and `right` are the points of `a` and `b` that sum to each point. With `cap` above 0, cells keep at most `cap`."""
    counts = np.zeros(last - first, np.int64)
    out = _buffers(max(64, 4 * (last - first)))
    found = _buffers(4 * FEW)
    stair = np.empty(GRID + 1, np.float64)
    used = 0
    thinned = False
    for cell in range(first, last):
        z = cell % axes[0, 2]
        y = cell // axes[0, 2] % axes[0, 1]
        x = cell // (axes[0, 2] * axes[0, 1])
        a_cell = axes[3, 0] + x * axes[1, 0] + y * axes[1, 1] + z * axes[1, 2]
        b_cell = axes[4, 0] + x * axes[2, 0] + y * axes[2, 1] + z * axes[2, 2]
        found, size = _frontier_of_sums(a, b, (a_cell, axes[3, 1], b_cell, axes[4, 1], terms), stair, found)
        if cap > 0 and size > cap:
            size = _thin(found, size, cap)
            thinned = True
        if used + size > len(out[0]):
            out = _grown(out, used, 2 * (used + size))
        for p in range(size):
            _copy(found, p, out, used + p)
        used += size
        counts[cell - first] = size
    out = _grown(out, used, used)
    return counts, out[0], out[1], out[2], out[3], thinned


@njit(cache=True, nogil=True)
def _buffers(size):
    return np.empty(size, np.float64), np.empty(size, np.float64), np.empty(size, np.int32), np.empty(size, np.int32)


@njit(cache=True, nogil=True)
def _grown(old, used, size):
    new = _buffers(size)
    for p in range(used):
        _copy(old, p, new, p)
    return new


@njit(cache=True, nogil=True, inline="always")
def _spans(a, b, pairs, k):
    """The points of the k-th pair of cells; `pairs` is (cell of a, step, cell of b, step, terms)."""
    a_cell = pairs[0] + k * pairs[1]
    b_cell = pairs[2] + k * pairs[3]
    return a[0][a_cell], a[0][a_cell + 1], b[0][b_cell], b[0][b_cell + 1]


@njit(cache=True, nogil=True)
def _extent(a, b, pairs):
    """The two ends of the frontier (least memory, and memory of the least-time sum), and the scale of `_bucket`."""
    low = np.inf
    high = np.inf
    least = np.inf
    for k in range(pairs[4]):
        a0, a1, b0, b1 = _spans(a, b, pairs, k)
        if a0 == a1 or b0 == b1:
            continue
        low = min(low, a[1][a0] + b[1][b0])
        memory = a[1][a1 - 1] + b[1][b1 - 1]
        time = a[2][a1 - 1] + b[2][b1 - 1]
        if time < least or (time == least and memory < high):
            least = time
            high = memory
    scale = (GRID - 1.0) ** 2 / (high - low) if high > low else 0.0
    return low, high, scale if np.isfinite(scale) else 0.0


@njit(cache=True, nogil=True)
def _bucket(memory, extent):
    """Buckets widen with memory: time falls steeply where memory is least, and many points lie there."""
    return int(np.sqrt((memory - extent[0]) * extent[2]))


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
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
        if a0 == a1 or b0 == b1 or _behind(a[1][a0] + b[1][b0], a[2][a1 - 1] + b[2][b1 - 1], extent, stair):
            continue
        for i in range(a0, a1):
            if _behind(a[1][i] + b[1][b0], a[2][i] + b[2][b1 - 1], extent, stair):
                continue
            if size + b1 - b0 > len(found[0]):
                size = _settle(found, size)
                if 2 * (size + b1 - b0) > len(found[0]):
                    found = _grown(found, size, 4 * (size + b1 - b0))
            size = _add_row(a, b, i, b0, b1, extent, stair, found, size)
    kept = 0
    for p in range(size):
        if not _behind(found[0][p], found[1][p], extent, stair):
            _copy(found, p, found, kept)
            kept += 1
    return found, _settle(found, kept)


@njit(cache=True, nogil=True)
def _add_all(a, b, pairs, found):
    size = 0
    for k in range(pairs[4]):
        a0, a1, b0, b1 = _spans(a, b, pairs, k)
        for i in range(a0, a1):
            for j in range(b0, b1):
                found[0][size] = a[1][i] + b[1][j]
                found[1][size] = a[2][i] + b[2][j]
                found[2][size] = i
                found[3][size] = j
                size += 1
    return size


@njit(cache=True, nogil=True, inline="always")
def _behind(memory, time, extent, stair):
    """A sum with no more memory and time than this is known."""
    return memory > extent[1] or stair[_bucket(memory, extent)] <= time


@njit(cache=True, nogil=True, inline="always")
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
        found[0][size] = memory
        found[1][size] = time
        found[2][size] = i
        found[3][size] = j
        size += 1
    return size


@njit(cache=True, nogil=True, inline="always")
def _copy(source, p, target, q):
    target[0][q] = source[0][p]
    target[1][q] = source[1][p]
    target[2][q] = source[2][p]
    target[3][q] = source[3][p]


@njit(cache=True, nogil=True)
def _settle(found, size):
    """Sorts the first `size` points by memory and keeps the non-dominated (Algorithm 1); returns how many."""
    if size < 2:
        return size
    order = np.argsort(found[0][:size], kind="mergesort")
    chosen = np.empty(size, np.int64)
    kept = 0
    for p in order:
        if kept > 0:
            last = chosen[kept - 1]
            if found[1][p] >= found[1][last]:
                continue
            if found[0][p] == found[0][last]:
                kept -= 1
        chosen[kept] = p
        kept += 1
    sorted_points = _buffers(kept)
    for p in range(kept):
        _copy(found, chosen[p], sorted_points, p)
    for p in range(kept):
        _copy(sorted_points, p, found, p)
    return kept


@njit(cache=True, nogil=True)
def _thin(found, size, cap):
    """Keeps at most `cap` points of a frontier: both ends, and of each of cap - 2 equal pieces the point nearest the
    lower convex hull; returns how many.

    A point's place is its share of the memory range plus its share of the time range. Both grow along a frontier, so
    every dropped point has a kept one within 2 / (cap - 2) of the ranges. Hull points go first because the hull of a
    sum is the sum of the hulls: they are what later sums are made of."""
    memory, time = found[0], found[1]
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
    for target in range(kept + 1):
        _copy(found, chosen[target], found, target)
    return kept + 1
