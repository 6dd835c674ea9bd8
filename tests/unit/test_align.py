"""Clock alignment: artificial skews on realistic traces are found again, and impossible orders are removed."""

import time

import numpy as np
import pytest

from offbeat.errors import OffbeatError
from offbeat.profile.align import (
    RECEIVE,
    ROOTED,
    SEND,
    TOGETHER,
    CommunicationEvents,
    apply,
    clock_offsets,
    communication_events,
)
from offbeat.profile.clockfit import recv_variance
from offbeat.timeline import Builder, Timeline


class Clocks:
    """What each rank's clock shows: ahead by `offset` at time `middle`, gaining `drift` per second."""

    def __init__(self, offset: list[float], drift: list[float], middle: float = 100.0) -> None:
        self.offset, self.drift, self.middle = np.array(offset), np.array(drift), middle

    def read(self, rank: np.ndarray, true: np.ndarray) -> np.ndarray:
        return true + self.offset[rank] + self.drift[rank] * (true - self.middle)


def delays(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Ends late by about 200 us, and every twentieth by milliseconds."""
    usual = np.abs(rng.normal(0, 2e-4, shape))
    return usual + (rng.random(shape) < 0.05) * rng.pareto(1.5, shape) * 3e-3


def all_reduces(
    rng: np.random.Generator, clocks: Clocks, steps: int, per_step: int, step_seconds: float = 0.2, ranks: int = 0
) -> CommunicationEvents:
    ranks = ranks or len(clocks.offset)
    count = steps * per_step
    ready = 100 + np.arange(count)[:, None] * (step_seconds / per_step) + rng.exponential(5e-3, (count, ranks))
    end = ready.max(axis=1, keepdims=True) + rng.uniform(5e-4, 3e-3, (count, 1)) + delays(rng, count, ranks)
    rank = np.tile(np.arange(ranks), count)
    return CommunicationEvents(
        occurrence=np.repeat(np.arange(count), ranks),
        rank=rank,
        start=clocks.read(rank, ready.reshape(-1)),
        end=clocks.read(rank, end.reshape(-1)),
        role=np.full(count * ranks, TOGETHER),
        family=np.zeros(count * ranks, np.int64),
        ranks=tuple(range(len(clocks.offset))),
    )


def transfers(
    rng: np.random.Generator, clocks: Clocks, routes: list[tuple[int, int]], steps: int, tensors: int
) -> CommunicationEvents:
    """Each step every route carries `tensors` messages; sender and receiver are ready some ms apart, either first."""
    rows: list[tuple[int, int, float, float, int, int]] = []
    for step in range(steps):
        for route, (sender, receiver) in enumerate(routes):
            for tensor in range(tensors):
                begin = 100 + 0.2 * step + 0.2 * tensor / tensors
                sent, posted = begin + rng.uniform(0, 4e-3), begin + rng.uniform(0, 4e-3)
                end = max(sent, posted) + 1e-3 * (1 + tensor / tensors) + float(delays(rng, 1)[0]) / 2
                family = route * tensors + tensor
                rows.append((len(rows) // 2, sender, sent, end, SEND, family))
                rows.append((len(rows) // 2, receiver, posted, end, RECEIVE, family))
    occurrence, rank, start, end, role, family = (np.array(column) for column in zip(*rows, strict=True))
    return CommunicationEvents(
        occurrence,
        rank,
        clocks.read(rank, start),
        clocks.read(rank, end),
        role,
        family,
        tuple(range(len(clocks.offset))),
    )


def worst_error(events: CommunicationEvents, clocks: Clocks, machine: dict[int, str] | None = None) -> float:
    """Seconds by which an event's end, moved to rank 0's clock, is most wrong anywhere in the trace."""
    alignment = clock_offsets(events, machine)
    true = np.linspace(100, 100 + np.ptp(events.end[events.rank == 0]), 21)
    wrong = [
        alignment.clock(rank)(clocks.read(np.full(21, rank), true)) - clocks.read(np.zeros(21, np.int64), true)
        for rank in range(len(clocks.offset))
    ]
    return float(np.abs(wrong).max())


@pytest.mark.parametrize("largest", [0.05, 5.0])
@pytest.mark.parametrize(("steps", "per_step"), [(10, 20), (30, 100), (500, 20)])
def test_skew_and_drift_of_all_reduces_are_recovered(largest: float, steps: int, per_step: int) -> None:
    errors = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        clocks = Clocks([0, *rng.uniform(-largest, largest, 3)], [0, 5e-5, -5e-5, 2e-5])
        errors.append(worst_error(all_reduces(rng, clocks, steps, per_step), clocks))
    assert max(errors) < 2e-4


def test_drift_is_reported_in_parts_per_million() -> None:
    clocks = Clocks([0, 0.05], [0, 5e-5])
    alignment = clock_offsets(all_reduces(np.random.default_rng(0), clocks, 200, 20))
    assert alignment.offset_seconds[0] == 0
    assert alignment.drift_ppm == pytest.approx([0, 50], abs=3)
    assert alignment.notes == ()


@pytest.mark.parametrize("both_ways", [True, False])
def test_skew_and_drift_of_transfers_are_recovered(both_ways: bool) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        clocks = Clocks([0, *rng.uniform(-0.05, 0.05, 2)], [0, 5e-5, -5e-5])
        routes = [(0, 1), (1, 2)] + ([(1, 0), (2, 1)] if both_ways else [])
        assert worst_error(transfers(rng, clocks, routes, 20, 10), clocks) < 2e-4


def test_variance_of_a_recv_family_is_least_at_the_true_difference() -> None:
    rng = np.random.default_rng(1)
    sent, posted, ahead = rng.uniform(0, 5e-3, 60), rng.uniform(0, 5e-3, 60), 0.012
    end = np.maximum(sent, posted) + 1e-3
    candidates = ahead + np.linspace(-3e-3, 1e-3, 81)
    score = recv_variance(end - posted, end + ahead - sent, np.zeros(60, np.int64), candidates)
    assert candidates[np.argmin(score)] == pytest.approx(ahead, abs=5e-5)
    assert score.min() < 1e-9 < score[0]


def test_ranks_of_a_machine_share_a_clock() -> None:
    clocks = Clocks([0, 0, 0.03, 0.03], [0, 0, 5e-5, 5e-5])
    events = all_reduces(np.random.default_rng(2), clocks, 10, 20)
    alignment = clock_offsets(events, {0: "a", 1: "a", 2: "b", 3: "b"})
    assert alignment.offset_seconds[1] == 0
    assert alignment.offset_seconds[2] == alignment.offset_seconds[3] != 0
    assert worst_error(events, clocks, {0: "a", 1: "a", 2: "b", 3: "b"}) < 2e-4


def test_a_machine_shared_in_name_only_is_noticed() -> None:
    clocks = Clocks([0, 0.05], [0, 0])
    events = all_reduces(np.random.default_rng(3), clocks, 10, 20)
    alignment = clock_offsets(events, {0: "vm", 1: "vm"})
    assert alignment.offset_seconds[1] == pytest.approx(0.05, abs=2e-4)
    assert "machine 'vm' differ by 50" in alignment.notes[0]


def test_groups_that_overlap_are_chained() -> None:
    rng = np.random.default_rng(4)
    clocks = Clocks([0, 2.0, -1.0, 0.5], [0, 3e-5, -3e-5, 0])
    whole = all_reduces(rng, clocks, 20, 60)
    kind = whole.occurrence % 3
    inside = (whole.rank == kind) | (whole.rank == kind + 1)
    columns = [getattr(whole, name)[inside] for name in ("occurrence", "rank", "start", "end", "role", "family")]
    assert worst_error(CommunicationEvents(*columns, ranks=whole.ranks), clocks) < 2e-4


def test_mismatched_occurrences_do_no_harm() -> None:
    clocks = Clocks([0, 0.02, -0.04], [0, 5e-5, 0])
    events = all_reduces(np.random.default_rng(5), clocks, 20, 20)
    rows = np.flatnonzero((events.rank == 1) & (events.occurrence % 8 == 0))
    events.start[rows], events.end[rows] = events.start[np.roll(rows, 1)], events.end[np.roll(rows, 1)]
    assert worst_error(events, clocks) < 2e-4


def test_nobody_leaves_before_the_last_has_joined() -> None:
    """Rank 0 hears of each end up to 5 ms late, so the ends alone would put rank 1's clock 2.5 ms behind."""
    count = 100
    rng = np.random.default_rng(10)
    joined = 100 + np.arange(count) * 0.05
    start = np.stack([joined - 4e-3, joined], axis=1).reshape(-1)
    end = np.stack([joined + 1e-4 + rng.uniform(0, 5e-3, count), joined + 1e-4], axis=1).reshape(-1)
    rank, zeros = np.tile([0, 1], count), np.zeros(2 * count, np.int64)
    events = CommunicationEvents(np.repeat(np.arange(count), 2), rank, start, end, zeros + TOGETHER, zeros, (0, 1))
    alignment = clock_offsets(events)
    clocks = alignment.clock(0), alignment.clock(1)
    first, second = (np.stack([clock(at[rank == n]) for n, clock in enumerate(clocks)]) for at in (start, end))
    assert (first.max(axis=0) <= second.min(axis=0) + 2e-5).all()
    assert alignment.offset_seconds[1] == pytest.approx(0, abs=5e-4)


def test_orders_impossible_on_any_clock_are_noted() -> None:
    count = 20
    begin = np.arange(count) * 0.1
    rows = np.repeat(np.arange(count), 2)
    # Each of the two ends 10 ms before the other starts, in turn.
    first = np.where(np.arange(count) % 2 == 0, 0.0, 0.02)
    start = np.stack([begin + first, begin + 0.02 - first], axis=1).reshape(-1)
    end = start + 0.01
    role, family = np.full(2 * count, TOGETHER), np.zeros(2 * count, np.int64)
    notes = clock_offsets(CommunicationEvents(rows, np.tile([0, 1], count), start, end, role, family, (0, 1))).notes
    assert any("contradict each other by 10 ms" in note for note in notes)


def test_ranks_without_communication_keep_their_clock_and_get_a_note() -> None:
    clocks = Clocks([0, 0.05, 9.0], [0, 0, 0])
    alignment = clock_offsets(all_reduces(np.random.default_rng(6), clocks, 10, 20, ranks=2))
    assert alignment.offset_seconds[2] == 0
    assert alignment.offset_seconds[1] == pytest.approx(0.05, abs=2e-4)
    assert alignment.notes == ("clock alignment: rank 2 shares no communication with others; its offset is 0",)


def test_no_events_at_all() -> None:
    empty = np.empty(0, np.int64)
    alignment = clock_offsets(CommunicationEvents(empty, empty, empty / 1, empty / 1, empty, empty, (0, 1)))
    assert alignment.offset_seconds.tolist() == [0, 0]
    assert len(alignment.notes) == 1


def test_collectives_with_a_root_are_used_only_for_want_of_better_ones() -> None:
    clocks = Clocks([0, 0.05], [0, 0])
    events = all_reduces(np.random.default_rng(7), clocks, 20, 20)
    events.role[:] = ROOTED
    alignment = clock_offsets(events)
    assert alignment.offset_seconds[1] == pytest.approx(0.05, abs=1e-3)
    assert "only in collectives with a root" in alignment.notes[0]


def skewed_timeline(clocks: Clocks) -> Timeline:
    """Two ranks, three steps of one computation, one all-reduce in two slices and one transfer."""
    builder = Builder()
    marks = np.array([[100 + 0.1 * step for step in range(4)]] * 2)

    def local(rank: int, true: float) -> float:
        return float(clocks.read(np.array([rank]), np.array([true]))[0])

    for step in range(3):
        begin = 100 + 0.1 * step
        for rank, late in ((0, 0.0), (1, 0.02)):
            times = [local(rank, begin + late + moment) for moment in (0, 0.03)]
            builder.add(rank, "compute", "backward", "layer", *times, step=step)
            first, half, last = (local(rank, begin + moment) for moment in (0.03 + late, 0.055, 0.06))
            for start, end in ((first, half), (half, last)):
                builder.add(
                    rank,
                    "network",
                    "communication",
                    "all_reduce",
                    start,
                    end,
                    step=step,
                    queued=first,
                    bytes=64,
                    task=0,
                )
            verb, start = ("send", begin + 0.065) if rank == 0 else ("recv", begin + 0.06)
            span = local(rank, start), local(rank, begin + 0.07)
            builder.add(rank, "network", "communication", verb, *span, step=step, bytes=8, task=1)
    own = np.stack([clocks.read(np.full(4, rank), marks[rank]) for rank in range(2)])
    return builder.build(own)


def test_a_timeline_moves_to_one_clock_as_a_whole() -> None:
    clocks = Clocks([0, 0.75], [0, 5e-5])
    timeline = skewed_timeline(clocks)
    events = communication_events(timeline)
    assert len(events.rank) == 3 * 2 * 2
    assert sorted(set(events.role.tolist())) == [TOGETHER, SEND, RECEIVE]
    assert len(set(events.family[events.role == RECEIVE].tolist())) == 1

    alignment = clock_offsets(events)
    aligned, truth = apply(timeline, alignment), skewed_timeline(Clocks([0, 0], [0, 0]))
    for column in ("start", "end", "queued", "marks"):
        assert getattr(aligned, column) == pytest.approx(getattr(truth, column), abs=2e-5, nan_ok=True)


def test_alignment_of_other_ranks_is_refused() -> None:
    clocks = Clocks([0, 0.05, 0], [0, 0, 0])
    alignment = clock_offsets(all_reduces(np.random.default_rng(8), clocks, 5, 5))
    with pytest.raises(OffbeatError, match="3 ranks, but the timeline has step marks of 2"):
        apply(skewed_timeline(clocks), alignment)


@pytest.mark.timing
def test_64_ranks_with_10000_collectives_take_seconds() -> None:
    rng = np.random.default_rng(9)
    clocks = Clocks([0, *rng.uniform(-1, 1, 63)], [0, *rng.uniform(-5e-5, 5e-5, 63)])
    events = all_reduces(rng, clocks, 100, 100)
    begin = time.process_time()
    error = worst_error(events, clocks)
    assert time.process_time() - begin < 5
    assert error < 2e-4


@pytest.mark.timing
def test_transfers_between_all_of_64_ranks_take_seconds() -> None:
    rng = np.random.default_rng(11)
    clocks = Clocks([0, *rng.uniform(-1, 1, 63)], [0] * 64)
    routes = [(a, b) for a in range(64) for b in range(64) if a != b]
    events = transfers(rng, clocks, routes, 10, 1)
    begin = time.process_time()
    error = worst_error(events, clocks)
    assert time.process_time() - begin < 10
    assert error < 2e-4
