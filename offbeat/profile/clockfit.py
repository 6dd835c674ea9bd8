"""Fit the offset and drift of every clock to ends of collectives that should coincide and to compared clocks.

The end of a collective on clock c is T + offset_c + drift_c * (T - middle) + noise, so the ends on two clocks differ by
a line in T. `compare_ends` fits it for each two clocks under Cauchy's loss, because delays of a process make the noise
heavy-tailed.

SENDs and RECVs of the same tensors tell it too (dPRO section 4.2): the RECVs of one tensor (a family) take equally long
once the time before the SEND began is cut off, so their variance O1 is least at the true difference of the two clocks
(`recv_variance`). O1 depends on that difference alone, so each pair of machines is searched by itself
(`_least_variance`). It is not convex, which is why no general convex solver is used; and the fastest 80% of each family
count, because a late transfer says nothing about the clocks.

`solve` joins all comparisons by least squares; `respect` moves the offsets to the nearest ones with which no effect
precedes its cause. Offsets are in seconds, drifts in seconds per half window.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from offbeat.units import format_seconds

DRIFT_PRIOR = 1e-4
"""Clocks drift by less than 100 ppm, which decides where a trace is too short to show their drift."""
LEAST_SCALE = 1e-6
_FASTEST_SHARE = 0.8
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


def recv_variance(seconds: Floats, since_send: Floats, family: Ints, difference: Floats) -> Floats:
    """dPRO's O1 for each candidate `difference` of the receiver's clock from the sender's, over the fastest transfers.

    `seconds` is each RECV's own span, `since_send` its end less the SEND's start, each on its own clock. The result is
    the sum of squared deviations from the family's mean, in s².
    """
    order = np.argsort(family, kind="stable")
    sizes = np.bincount(family)
    sizes = sizes[sizes > 0]
    row = np.repeat(np.arange(len(sizes)), sizes)
    column = np.arange(len(family)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    spans = np.full((len(sizes), int(sizes.max(initial=1)), len(difference)), np.inf)
    spans[row, column] = np.minimum(seconds[order, None], since_send[order, None] - difference)
    spans.sort(axis=1)
    kept = np.maximum(np.ceil(_FASTEST_SHARE * sizes), 1)
    inside = (np.arange(spans.shape[1]) < kept[:, None])[:, :, None]
    mean = np.where(inside, spans, 0).sum(axis=1) / kept[:, None]
    return (np.where(inside, spans - mean[:, None], 0) ** 2).sum(axis=(0, 1))


def compare_transfers(events: CommunicationEvents, window: Window) -> list[Pair]:
    """Compares each two clocks between which there are transfers, of which `events` has both sides and nothing else."""
    result = []
    for low, high, lead, rows in events.pairs():
        # Enough for one pair, and keeps 64 x 64 pairs quick.
        some = slice(None, None, max(1, len(rows) // 2000))
        sent = events.role[lead] == SEND
        sends, receives = np.where(sent, lead, rows)[some], np.where(sent, rows, lead)[some]
        result.append(_fit_pair(events, sends, receives, low, high, window))
    return result


def _fit_pair(events: CommunicationEvents, sends: Ints, receives: Ints, low: int, high: int, window: Window) -> Pair:
    """The offset at which the families vary least, then the drift from the transfers that waited for their SEND."""
    sign = np.where(events.rank[sends] == low, 1.0, -1.0)
    span = events.end[receives] - events.start[receives]
    since = events.end[receives] - events.start[sends]
    when = window.scaled(events.start[sends])
    family = np.unique(events.family[receives], return_inverse=True)[1].reshape(-1)
    drift, drift_deviation = 0.0, np.inf
    for _ in range(4):
        level = since - sign * drift * when
        offset, doubt = _least_variance(sign, span, level, family)
        taken = np.minimum(span, level - sign * offset)
        usual = np.array([np.median(taken[family == number]) for number in range(int(family.max()) + 1)])
        excess = since - sign * offset - usual[family]
        scale = max(1.4826 * float(np.median(np.abs(taken - usual[family]))), LEAST_SCALE)
        bound_by_send = (level - sign * offset <= span + scale) & (np.abs(excess - sign * drift * when) < 4 * scale)
        if np.count_nonzero(bound_by_send) < 8:
            drift, drift_deviation = 0.0, np.inf
            break
        moment, miss = when[bound_by_send], (sign * excess)[bound_by_send]
        weight = float(((moment - moment.mean()) ** 2).sum()) + (scale / (DRIFT_PRIOR * window.half)) ** 2
        before, drift = drift, float(((moment - moment.mean()) * miss).sum()) / weight
        drift_deviation = scale / np.sqrt(weight)
        if abs(drift - before) < 0.1 * drift_deviation:
            break
    level = since - sign * drift * when
    most = float(level[sign > 0].min(initial=np.inf)), float(level[sign < 0].min(initial=np.inf))
    information = np.diag([max(doubt, 2e-5) ** -2, drift_deviation**-2])
    return Pair(low, high, np.array([offset, drift]), information, most)


def _least_variance(sign: Floats, span: Floats, level: Floats, family: Ints) -> tuple[float, float]:
    """The middle of the differences with nearly the least O1, and half their range."""
    forth, back = sign > 0, sign < 0
    starts = sign * (level - span)
    most = float(level[forth].min()) if forth.any() else float(starts.max())
    least = -float(level[back].min()) if back.any() else float(starts.min())
    if least >= most:
        return (least + most) / 2, (least - most) / 2
    # Beyond the earliest start of either side O1 no longer changes.
    grid = np.unique(np.concatenate([np.linspace(least, most, 33), np.quantile(starts, np.linspace(0, 1, 32))]))
    grid = grid[(grid >= least) & (grid <= most)]
    tried, found = np.empty(0), np.empty(0)
    for _ in range(6):
        score = sum(
            recv_variance(span[side], level[side], family[side], way * grid)
            for side, way in ((forth, 1.0), (back, -1.0))
            if side.any()
        )
        tried, found = np.append(tried, grid), np.append(found, score)
        order = np.argsort(tried)
        tried, found = tried[order], found[order]
        best = int(np.argmin(found))
        near = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
        if near[1] - near[0] < 2e-6:
            break
        grid = np.linspace(*near, 19)[1:-1]
    # Differences that chance explains (a likelihood ratio of e²), or of less than 10 us, do not count.
    enough = found <= found[best] * np.exp(4 / len(span)) + len(span) * 1e-5**2
    first = best - int(np.argmin(enough[best::-1])) + 1 if not enough[: best + 1].all() else 0
    last = best + int(np.argmin(enough[best:])) - 1 if not enough[best:].all() else len(tried) - 1
    return float(tried[first] + tried[last]) / 2, float(tried[last] - tried[first]) / 2


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
