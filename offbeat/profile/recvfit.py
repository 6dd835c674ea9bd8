"""Estimate the clock difference of each two machines from SENDs and RECVs of the same tensors.

dPRO section 4.2: the RECVs of one tensor (a family) take equally long once the time before the SEND began is cut off,
so their variance O1 is least at the true difference of the two clocks (`recv_variance`). O1 depends on that difference
alone, so each pair of machines is searched by itself (`_least_variance`). It is not convex, which is why no general
convex solver is used; and the fastest 80% of each family count, because a late transfer says nothing about the clocks.
"""

import numpy as np

from offbeat.profile.clockfit import DRIFT_PRIOR, LEAST_SCALE, SEND, CommunicationEvents, Floats, Ints, Pair, Window

_FASTEST_SHARE = 0.8


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
