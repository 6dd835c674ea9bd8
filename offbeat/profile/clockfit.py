"""Ends of collectives that should coincide, and measured pairs of clocks → offset and drift of every clock.

The end of occurrence k on clock c is T_k + offset_c + drift_c * (T_k - middle) + noise. The T_k are eliminated and the
rest is solved by iteratively re-weighted least squares, Huber's weights first and Tukey's bisquare last, because delays
of a process make the noise heavy-tailed (`fit_ends`). `respect` then moves the offsets to the nearest ones with which
no effect precedes its cause. Offsets are in seconds, drifts in seconds per half window.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offbeat.units import format_seconds

DRIFT_PRIOR = 1e-4
"""Crystals are off by less than 100 ppm; holds the drift of traces too short to show it."""
LEAST_SCALE = 1e-6
_BLOCK = 16384

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """The trace's middle, and half its length, in seconds; drifts are fitted in seconds per half window."""

    middle: float
    half: float

    def scaled(self, seconds: Floats) -> Floats:
        return (seconds - self.middle) / self.half


@dataclass(frozen=True)
class Ends:
    """Events whose ends should coincide, sorted by occurrence; numbered 0, 1, ..."""

    occurrence: Ints
    clock: Ints
    start: Floats
    end: Floats
    strict: bool = True
    """Nobody ends before the last has started."""

    def on(self, clock: Ints) -> "Ends":
        return replace(self, clock=clock[self.clock])

    def shifted(self, coarse: Floats) -> "Ends":
        return replace(self, start=self.start - coarse[self.clock], end=self.end - coarse[self.clock])


@dataclass(frozen=True)
class Bound:
    """offset[high] - offset[low] <= most, in seconds."""

    low: int
    high: int
    most: float


@dataclass(frozen=True)
class Pair:
    """offset[high] - offset[low], and the same of the drifts, with standard deviations in seconds."""

    low: int
    high: int
    offset: float
    offset_deviation: float
    drift: float
    drift_deviation: float
    bounds: tuple[Bound, ...]


@dataclass(frozen=True)
class Fit:
    offset: Floats
    drift: Floats
    """Seconds per half window."""
    scale: float
    hessian: Floats
    """Of the free clocks' offsets, in 1/s²."""
    kept: NDArray[np.bool_]
    rejected: float


def changes(*columns: Ints) -> NDArray[np.bool_]:
    """True where any of the columns differs from the row before."""
    result = np.zeros(len(columns[0]), bool)
    result[:1] = True
    for column in columns:
        result[1:] |= column[1:] != column[:-1]
    return result


def median_edges(ends: Ends) -> list[tuple[int, int, float]]:
    """(a, b, how far b's clock is ahead of a's), by the median over the occurrences in which a is the lowest."""
    if not len(ends.end):
        return []
    order = np.lexsort((ends.clock, ends.occurrence))
    occurrence, clock, end = ends.occurrence[order], ends.clock[order], ends.end[order]
    lead = np.flatnonzero(changes(occurrence))
    lead = lead[np.cumsum(changes(occurrence)) - 1]
    low, ahead = clock[lead], end - end[lead]
    apart = clock != low
    low, high, ahead = low[apart], clock[apart], ahead[apart]
    order = np.lexsort((ahead, high, low))
    low, high, ahead = low[order], high[order], ahead[order]
    begins = np.flatnonzero(changes(low, high))
    middles = (begins + np.append(begins[1:], len(low)) - 1) // 2 if len(begins) else begins
    return [(int(low[i]), int(high[i]), float(ahead[i])) for i in middles]


def walk(count: int, edges: list[tuple[int, int, float]]) -> tuple[Floats, Ints]:
    """Offsets along a spanning tree from the lowest clock of each component, and that clock for every clock."""
    near: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for a, b, ahead in edges:
        near[a].append((b, ahead))
        near[b].append((a, -ahead))
    offset, component = np.zeros(count), np.full(count, -1, np.int64)
    for root in range(count):
        if component[root] >= 0:
            continue
        component[root], front = root, [root]
        for a in front:
            for b, ahead in near[a]:
                if component[b] < 0:
                    component[b], offset[b] = root, offset[a] + ahead
                    front.append(b)
    return offset, component


def fit_ends(ends: Ends, pairs: list[Pair], count: int, free: Ints, window: Window) -> Fit:
    """Offsets and drifts of all clocks by re-weighted least squares, with the pairs as further measurements."""
    offset, drift = np.zeros(count), np.zeros(count)
    occurrences = int(ends.occurrence.max(initial=-1)) + 1
    total = np.bincount(ends.occurrence, minlength=occurrences)
    when = window.scaled(np.bincount(ends.occurrence, ends.end, occurrences) / np.maximum(total, 1))
    tau, weight, scale = when[ends.occurrence], np.ones(len(ends.end)), np.nan
    hessian = np.zeros((2 * count, 2 * count))
    for turn in range(30):
        level = ends.end - offset[ends.clock] - drift[ends.clock] * tau
        heavy = np.maximum(np.bincount(ends.occurrence, weight, occurrences), 1e-9)
        miss = level - (np.bincount(ends.occurrence, weight * level, occurrences) / heavy)[ends.occurrence]
        if len(miss):
            scale = max(1.4826 * float(np.median(np.abs(miss))), LEAST_SCALE)
            weight = _weights(miss / scale, redescend=turn >= 8)
        hessian, slope = _normal_equations(ends, weight, level, when, count)
        unit = scale if len(miss) else 1.0
        hessian, slope = hessian / unit**2, slope / unit**2
        _add_prior(hessian, slope, pairs, offset, drift, window)
        rows = np.concatenate([free, free + count])
        change = np.linalg.lstsq(hessian[np.ix_(rows, rows)], slope[rows], rcond=1e-13)[0] if len(rows) else np.empty(0)
        offset[free] += change[: len(free)]
        drift[free] += change[len(free) :]
        if turn >= 10 and np.abs(change).max(initial=0) < 1e-8:
            break
    kept = weight > 0
    rejected = 1 - float(kept.mean()) if len(kept) else 0.0
    return Fit(offset, drift, scale, hessian[np.ix_(free, free)], kept, rejected)


def end_bounds(ends: Ends, fit: Fit, window: Window, count: int) -> list[Bound]:
    """For each two clocks, how far one can be ahead so that nobody leaves a collective before the other has joined."""
    if not ends.strict or not len(ends.end):
        return []
    moved = fit.drift[ends.clock] * window.scaled(ends.end)
    occurrence, clock = ends.occurrence[fit.kept], ends.clock[fit.kept]
    start, end = (ends.start - moved)[fit.kept], (ends.end - moved)[fit.kept]
    most = np.full((count, count), np.inf)
    for first in range(0, int(ends.occurrence.max()) + 1, _BLOCK):
        rows = slice(*np.searchsorted(occurrence, (first, first + _BLOCK)))
        cells = (occurrence[rows] - first, clock[rows])
        begin, finish = np.full((_BLOCK, count), -np.inf), np.full((_BLOCK, count), np.inf)
        np.maximum.at(begin, cells, start[rows])
        np.minimum.at(finish, cells, end[rows])
        used = int(cells[0].max(initial=-1)) + 1
        for low in range(count):
            gap = finish[:used] - begin[:used, low, None]
            most[low] = np.minimum(most[low], gap.min(axis=0, initial=np.inf))
    return [
        Bound(int(low), int(high), float(most[low, high]))
        for low, high in np.argwhere(np.isfinite(most))
        if low != high
    ]


def respect(fit: Fit, free: Ints, bounds: list[Bound], notes: list[str]) -> Floats:
    """The offsets nearest to the fitted ones, by its own curvature, that keep all bounds.

    Solved as a penalised quadratic problem by changing the active set, so that bounds that contradict each other give
    the least contradiction and a note, not a failure.
    """
    if not bounds or not len(free):
        return fit.offset
    low, high = (np.array([getattr(bound, side) for bound in bounds]) for side in ("low", "high"))
    most = np.array([bound.most for bound in bounds])
    if (fit.offset[high] - fit.offset[low] <= most).all():
        return fit.offset
    place = np.full(len(fit.offset), -1)
    place[free] = np.arange(len(free))
    matrix = np.zeros((len(bounds), len(free)))
    for side, way in ((high, 1.0), (low, -1.0)):
        rows = np.flatnonzero(place[side] >= 0)
        matrix[rows, place[side[rows]]] += way
    curve = fit.hessian + np.eye(len(free)) * 1e-9 * np.trace(fit.hessian)
    stiff = 1e4 * float(np.diag(curve).max())
    offset = fit.offset.copy()
    active = np.zeros(len(bounds), bool)
    for _ in range(60):
        now = matrix @ offset[free] > most
        if (now == active).all():
            break
        active = now
        side_matrix = matrix[active]
        right = curve @ fit.offset[free] + stiff * side_matrix.T @ most[active]
        offset[free] = np.linalg.solve(curve + stiff * side_matrix.T @ side_matrix, right)
    broken = float((matrix @ offset[free] - most).max())
    if broken > 1e-4:
        notes.append(
            f"clock alignment: some collectives contradict each other by {format_seconds(broken)}; "
            "a rank left one before another rank had joined it on any choice of clocks"
        )
    return offset


def _weights(deviation: Floats, redescend: bool) -> Floats:
    size = np.abs(deviation)
    if redescend:
        return np.where(size < 4.685, (1 - (size / 4.685) ** 2) ** 2, 0.0)
    return 1.345 / np.maximum(size, 1.345)


def _normal_equations(ends: Ends, weight: Floats, level: Floats, when: Floats, count: int) -> tuple[Floats, Floats]:
    """Hessian and descent direction in (offsets, drifts), each occurrence's common end eliminated."""
    hessian, slope = np.zeros((2, count, 2, count)), np.zeros((2, count))
    # Dense blocks: occurrences x clocks of all of a long trace would take gigabytes.
    for first in range(0, len(when), _BLOCK):
        last = min(first + _BLOCK, len(when))
        rows = slice(*np.searchsorted(ends.occurrence, (first, last)))
        cell = (ends.occurrence[rows] - first) * count + ends.clock[rows]
        shape = (last - first, count)
        mass = np.bincount(cell, weight[rows], (last - first) * count).reshape(shape)
        pull = np.bincount(cell, weight[rows] * level[rows], (last - first) * count).reshape(shape)
        heavy = np.maximum(mass.sum(axis=1), 1e-9)
        pull -= mass * (pull.sum(axis=1) / heavy)[:, None]
        for power in range(3):
            factor = when[first:last] ** power
            block = np.diag(factor @ mass) - mass.T @ (mass * (factor / heavy)[:, None])
            for a in range(2):
                if 0 <= power - a <= 1:
                    hessian[a, :, power - a, :] += block
            if power < 2:
                slope[power] += factor @ pull
    return hessian.reshape(2 * count, 2 * count), slope.reshape(2 * count)


def _add_prior(
    hessian: Floats, slope: Floats, pairs: list[Pair], offset: Floats, drift: Floats, window: Window
) -> None:
    """Adds the pairs' measurements and the belief that drifts are small, in place."""
    count = len(offset)
    prior = 1 / (DRIFT_PRIOR * window.half) ** 2
    diagonal = np.arange(count, 2 * count)
    hessian[diagonal, diagonal] += prior
    slope[count:] -= prior * drift
    for pair in pairs:
        measured = ((0, pair.offset, pair.offset_deviation, offset), (count, pair.drift, pair.drift_deviation, drift))
        for base, value, deviation, now in measured:
            if not np.isfinite(deviation):
                continue
            mass, low, high = 1 / deviation**2, base + pair.low, base + pair.high
            pull = mass * (value - (now[pair.high] - now[pair.low]))
            hessian[[low, high], [low, high]] += mass
            hessian[[low, high], [high, low]] -= mass
            slope[low] -= pull
            slope[high] += pull
