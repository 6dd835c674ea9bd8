"""Fit the offset and drift of every clock to ends of collectives that should coincide and to compared clocks.

The end of a collective on clock c is T + offset_c + drift_c * (T - middle) + noise, so the ends on two clocks differ by
a line in T. `compare_ends` fits it for each two clocks under Cauchy's loss, because delays of a process make the noise
heavy-tailed; `solve` joins all comparisons by least squares; `respect` moves the offsets to the nearest ones with which
no effect precedes its cause. Offsets are in seconds, drifts in seconds per half window.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from offbeat.units import format_seconds

DRIFT_PRIOR = 1e-4
"""Clocks drift by less than 100 ppm, which decides where a trace is too short to show their drift."""
LEAST_SCALE = 1e-6
OUTLIER = 4.685
"""Standard deviations beyond which an end does not count (Tukey's constant)."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """The trace's middle, and half its length, in seconds; drifts are fitted in seconds per half window."""

    middle: float
    half: float

    def scaled(self, seconds: Floats) -> Floats:
        return (seconds - self.middle) / self.half


TOGETHER, ROOTED, SEND, RECEIVE = range(4)
"""Roles of an event: in a barrier-like collective, in one with a root, and the two sides of a transfer."""


@dataclass(frozen=True, eq=False)
class CommunicationEvents:
    """One row per participant of each occurrence of a collective or transfer, as columns of equal length."""

    occurrence: Ints
    rank: Ints
    """The rank, or the number of the clock that it reads."""
    start: Floats
    """Seconds on the rank's own clock, as is `end`."""
    end: Floats
    role: Ints
    family: Ints
    """Equal for RECVs of the same tensor between the same ranks in different steps; unused for other roles."""
    ranks: tuple[int, ...]
    """All ranks of the job, also those without communication."""

    def ends(self, *roles: int) -> "CommunicationEvents":
        """The events of these roles, with ends that should coincide: a RECV ends shortly after its SEND begins."""
        events = replace(self, end=np.where(self.role == SEND, self.start, self.end))
        rows = np.isin(self.role, roles)
        columns = ("occurrence", "rank", "start", "end", "role", "family")
        return replace(events, **{column: getattr(events, column)[rows] for column in columns})

    def pairs(self) -> list[tuple[int, int, Ints, Ints]]:
        """Each two clocks and their rows, (low, high, rows of low, of high), where `low` is an occurrence's lowest."""
        order = np.lexsort((self.rank, self.occurrence))
        fresh = changes(self.occurrence[order])
        lead = order[np.flatnonzero(fresh)[np.cumsum(fresh) - 1]]
        apart = self.rank[order] != self.rank[lead]
        rows, lead = order[apart], lead[apart]
        low, high = self.rank[lead], self.rank[rows]
        by_pair = np.lexsort((high, low))
        begins = np.flatnonzero(changes(low[by_pair], high[by_pair]))
        parts = np.split(by_pair, begins[1:]) if len(rows) else []
        return [(int(low[part[0]]), int(high[part[0]]), lead[part], rows[part]) for part in parts]


@dataclass(frozen=True)
class Pair:
    """How far the clock `high` is ahead of the clock `low`."""

    low: int
    high: int
    ahead: Floats
    """Difference of the offsets, and of the drifts."""
    information: Floats
    """Inverse of their covariance, 2 x 2, in 1/s²."""
    most: tuple[float, float] = (np.inf, np.inf)
    """Seconds by which `high` can be ahead of `low`, and `low` of `high`, at most."""


def changes(*columns: Ints) -> NDArray[np.bool_]:
    """True where any of the columns differs from the row before."""
    differs = np.diff(np.stack(columns)).any(axis=0)
    return np.append(True, differs)[: len(columns[0])]


def median_edges(ends: CommunicationEvents) -> list[tuple[int, int, float]]:
    """(a, b, how far b's clock is ahead of a's), by the median."""
    pairs = ends.pairs()
    return [(low, high, float(np.median(ends.end[rows] - ends.end[lead]))) for low, high, lead, rows in pairs]


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


def compare_ends(ends: CommunicationEvents, window: Window) -> tuple[list[Pair], NDArray[np.bool_]]:
    """The pairs of clocks, and which ends are no outliers."""
    pairs, kept = [], np.ones(len(ends.end), bool)
    for low, high, lead, rows in ends.pairs():
        when, ahead = window.scaled(ends.end[lead]), ends.end[rows] - ends.end[lead]
        design = np.stack([np.ones(len(rows)), when], axis=1)
        line, scale = _robust_line(design, ahead)
        kept[rows] = np.abs(ahead - design @ line) < OUTLIER * scale
        pairs.append(Pair(low, high, line, design.T @ design / scale**2))
    return pairs, kept


def _robust_line(design: Floats, ahead: Floats) -> tuple[Floats, float]:
    """The line through `ahead` under Cauchy's loss, and the scale of the noise."""
    line: Floats = np.linalg.lstsq(design, ahead)[0].astype(np.float64)
    for _ in range(3):
        scale = max(1.4826 * float(np.median(np.abs(ahead - design @ line))), LEAST_SCALE)
        line = least_squares(
            lambda line, scale: (design @ line - ahead) / scale,
            line,
            lambda _, scale: design / scale,
            x_scale="jac",
            loss="cauchy",
            args=(scale,),
        ).x
    return line, scale


def solve(pairs: list[Pair], count: int, free: Ints, window: Window) -> tuple[Floats, Floats, Floats]:
    """Offsets and drifts of all clocks by least squares, and the Hessian of the free ones' offsets, in 1/s²."""
    hessian, slope = np.zeros((2, count, 2, count)), np.zeros((2, count))
    for pair in pairs:
        low, high = pair.low, pair.high
        for one, other in ((low, high), (high, low)):
            hessian[:, one, :, one] += pair.information
            hessian[:, one, :, other] -= pair.information
        slope[:, high] += pair.information @ pair.ahead
        slope[:, low] -= pair.information @ pair.ahead
    hessian[1, range(count), 1, range(count)] += 1 / (DRIFT_PRIOR * window.half) ** 2
    found = np.zeros((2, count))
    if len(free):
        matrix = hessian[:, free][:, :, :, free].reshape(2 * len(free), -1)
        found[:, free] = np.linalg.lstsq(matrix, slope[:, free].reshape(-1), rcond=1e-13)[0].reshape(2, -1)
    return found[0], found[1], hessian[0, free][:, 0, free]


def end_bounds(ends: CommunicationEvents, drift: Floats, kept: NDArray[np.bool_], window: Window) -> Floats:
    """[low, high]: how far a clock may be ahead of another so that no rank leaves a collective before another joins."""
    moved = drift[ends.rank] * window.scaled(ends.end)
    occurrence, clock = ends.occurrence[kept], ends.rank[kept]
    start, end = (ends.start - moved)[kept], (ends.end - moved)[kept]
    most = np.full((len(drift), len(drift)), np.inf)
    for low in range(len(drift)):
        mine, joined = clock == low, np.full(int(ends.occurrence.max(initial=0)) + 1, -np.inf)
        np.maximum.at(joined, occurrence[mine], start[mine])
        np.minimum.at(most[low], clock, end - joined[occurrence])
    return most


def respect(fitted: Floats, hessian: Floats, free: Ints, bounds: Floats, notes: list[str]) -> Floats:
    """The offsets nearest to the fitted ones, in the metric of their Hessian, that keep all bounds.

    A penalised quadratic problem, solved by an active set: bounds that contradict each other are violated as little as
    possible, with a note.
    """
    low, high = np.nonzero(np.isfinite(bounds) & ~np.eye(len(fitted), dtype=bool))
    most = bounds[low, high]
    if not len(free) or (fitted[high] - fitted[low] <= most).all():
        return fitted
    clocks = np.arange(len(fitted))
    matrix = ((high[:, None] == clocks).astype(float) - (low[:, None] == clocks))[:, free]
    curve = hessian + np.eye(len(free)) * 1e-9 * np.trace(hessian)
    stiff = 1e4 * float(np.diag(curve).max())
    offset = fitted.copy()
    active = np.zeros(len(most), bool)
    for _ in range(60):
        now = matrix @ offset[free] > most
        if (now == active).all():
            break
        active = now
        side_matrix = matrix[active]
        right = curve @ fitted[free] + stiff * side_matrix.T @ most[active]
        offset[free] = np.linalg.solve(curve + stiff * side_matrix.T @ side_matrix, right)
    broken = float((matrix @ offset[free] - most).max())
    if broken > 1e-4:
        notes.append(
            f"clock alignment: some collectives contradict each other by {format_seconds(broken)}; "
            "a rank left one before another rank had joined it on any choice of clocks"
        )
    return offset
