"""PACE's scheduler, fusion and baselines: optimal where they say so, feasible everywhere, never worse than promised."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pace_baselines import bytescheduler_schedule, fifo_schedule, horovod_fusion, tictac_schedule
from pace_jobs import jobs_of
from pace_lp import solve
from strategies import Layer, Weight, make_graph

from offbeat.graph import ModelGraph, Operator, TensorSpec, Variable
from offbeat.search import pace
from offbeat.search.pace import LinkSchedule
from offbeat.search.pace.fusion import balanced_borders, max_min_sizes

Slices = list[tuple[int, float, float]]


def random_jobs(rng: random.Random, most: int) -> tuple[list[float], list[float], list[float]]:
    """Gradients as backward makes them: the later one is ready, the sooner it is needed, more or less."""
    count = rng.randint(1, most)
    ready = sorted(rng.uniform(0, 1) for _ in range(count))
    duration = [10 ** rng.uniform(-2.5, 0) * rng.choice((0.1, 0.5, 1)) for _ in range(count)]
    tail = [max(0.0, moment + rng.uniform(-0.5, 0.5)) for moment in ready]
    return ready, duration, tail


def check_feasible(
    schedule: LinkSchedule,
    ready: Sequence[float],
    duration: Sequence[float],
    tail: Sequence[float],
    overhead: float = 0.0,
) -> None:
    """Nothing overlaps or starts early, every job gets its seconds, and the makespan is what the slices say."""
    free = 0.0
    carried = [0.0] * len(ready)
    done = list(ready)
    previous = -1
    for job, start, end in schedule.slices:
        assert start >= free - 1e-12
        assert start >= ready[job]
        assert end > start + overhead
        assert overhead > 0 or job != previous or start > free
        carried[job] += end - start - overhead
        done[job] = end
        free, previous = end, job
    assert carried == pytest.approx(list(duration), rel=1e-9, abs=1e-12)
    assert list(schedule.completion) == pytest.approx(done, rel=1e-12)
    longest = max((end + after for end, after in zip(done, tail, strict=True)), default=0.0)
    assert schedule.makespan == pytest.approx(longest, rel=1e-12)


def any_order(
    rng: random.Random, ready: Sequence[float], duration: Sequence[float], tail: Sequence[float], overhead: float = 0.0
) -> float:
    """Makespan of a random schedule: whenever the link is free it takes any ready job, for all or part of the rest."""
    left = list(duration)
    now = longest = 0.0
    while any(left):
        able = [job for job, seconds in enumerate(left) if seconds and ready[job] <= now]
        if not able:
            now = min(ready[job] for job, seconds in enumerate(left) if seconds)
            continue
        job = rng.choice(able)
        part = left[job] if rng.random() < 0.5 else left[job] * rng.random()
        if part < 1e-6:
            part = left[job]
        left[job] = 0.0 if part == left[job] else left[job] - part
        now += overhead + part
        if not left[job]:
            longest = max(longest, now + tail[job])
    return longest


def test_cuts_where_a_more_urgent_gradient_becomes_ready() -> None:
    schedule = pace.preemptive_schedule([0, 1, 2], [3, 2, 1], [0, 2, 6])
    assert schedule.slices == ((0, 0, 1), (1, 1, 2), (2, 2, 3), (1, 3, 4), (0, 4, 6))
    assert schedule.makespan == 9
    assert schedule.completion == (6, 4, 3)


def test_ties_go_to_the_job_that_is_ready_first_then_to_the_lower_index() -> None:
    schedule = pace.preemptive_schedule([1, 0, 0], [1, 1, 1], [5, 5, 5])
    assert [job for job, _, _ in schedule.slices] == [1, 2, 0]


def test_a_job_without_seconds_takes_no_link_and_cuts_nothing() -> None:
    for overhead in (0.0, 0.25):
        schedule = pace.preemptive_schedule([0, 1], [2, 0], [0, 9], overhead)
        assert schedule.slices == ((0, 0, 2 + overhead),)
        assert schedule.completion == (2 + overhead, 1)
        assert schedule.makespan == 10
    assert pace.preemptive_schedule([], [], []) == LinkSchedule(0.0, (), ())


def test_equals_the_linear_programme_in_slotted_time() -> None:
    rng = random.Random(1)
    for case in range(500):
        count = rng.randint(1, 7)
        ready = [rng.randint(0, 9) for _ in range(count)]
        duration = [rng.randint(0, 4) for _ in range(count)]
        tail = [rng.randint(0, 12) for _ in range(count)]
        reference = solve(ready, duration, tail, lexicographic=case % 20 == 0)
        schedule = pace.preemptive_schedule(ready, duration, tail)
        assert schedule.makespan == reference.makespan, (ready, duration, tail)
        check_feasible(schedule, ready, duration, tail)
        for job, seconds in enumerate(duration):
            held = [slot for slot, holder in enumerate(reference.slots) if holder == job]
            assert len(held) == seconds
            assert all(slot >= ready[job] for slot in held)


def test_the_linear_programme_is_lexicographic() -> None:
    rng = random.Random(2)
    for _ in range(25):
        ready = [rng.randint(0, 2) for _ in range(3)]
        duration = [rng.randint(1, 2) for _ in range(3)]
        tail = [rng.randint(0, 4) for _ in range(3)]
        jobs = [job for job in range(3) for _ in range(duration[job])]
        horizon = max(ready) + len(jobs)
        vectors = (
            sorted((slot + 1 + tail[job] for job, slot in zip(jobs, slots, strict=True)), reverse=True)
            for slots in itertools.permutations(range(horizon), len(jobs))
            if all(slot >= ready[job] for job, slot in zip(jobs, slots, strict=True))
        )
        found = solve(ready, duration, tail)
        entries = sorted((slot + 1 + tail[job] for slot, job in enumerate(found.slots) if job >= 0), reverse=True)
        assert entries == min(vectors)


def test_never_worse_than_random_schedules_in_continuous_time() -> None:
    rng = random.Random(3)
    for _ in range(50):
        ready, duration, tail = random_jobs(rng, 12)
        schedule = pace.preemptive_schedule(ready, duration, tail)
        check_feasible(schedule, ready, duration, tail)
        for _ in range(20):
            assert schedule.makespan <= any_order(rng, ready, duration, tail) * (1 + 1e-9)


times = st.one_of(st.integers(0, 5).map(float), st.floats(0, 1), st.sampled_from((0.1, 0.2, 0.3, 0.7)))


@given(st.lists(st.tuples(times, times, times), max_size=12), st.sampled_from((0.0, 1e-3, 0.1, 1.0)))
def test_any_input_gives_a_feasible_schedule(jobs: list[tuple[float, float, float]], overhead: float) -> None:
    ready, duration, tail = ([job[field] for job in jobs] for field in range(3))
    duration = [seconds if seconds > 1e-9 else 0.0 for seconds in duration]
    check_feasible(pace.preemptive_schedule(ready, duration, tail, overhead), ready, duration, tail, overhead)
    check_feasible(fifo_schedule(ready, duration, tail, overhead), ready, duration, tail, overhead)
    check_feasible(tictac_schedule(ready, duration, tail, overhead), ready, duration, tail, overhead)


def test_with_overhead_a_cut_is_made_only_where_it_pays() -> None:
    # The urgent job arrives when a long one has just begun: worth a cut at a small overhead, not at a large one.
    ready, duration, tail = [0, 1], [10, 1], [0, 10]
    assert pace.preemptive_schedule(ready, duration, tail, 0.1).slices == ((0, 0, 1), (1, 1, 2.1), (0, 2.1, 11.3))
    assert len(pace.preemptive_schedule(ready, duration, tail, 20.0).slices) == 2
    # Nothing is gained if the urgent job can wait.
    assert len(pace.preemptive_schedule(ready, duration, [0, 0.1], 0.1).slices) == 2


def test_with_overhead_never_worse_than_any_order_without_cuts() -> None:
    rng = random.Random(4)
    for _ in range(200):
        ready, duration, tail = random_jobs(rng, 20)
        overhead = rng.choice((0.001, 0.01, 0.05, 0.3))
        schedule = pace.preemptive_schedule(ready, duration, tail, overhead)
        check_feasible(schedule, ready, duration, tail, overhead)
        assert schedule.makespan <= tictac_schedule(ready, duration, tail, overhead).makespan
        assert schedule.makespan <= fifo_schedule(ready, duration, tail, overhead).makespan
        assert schedule.makespan >= pace.preemptive_schedule(ready, duration, tail).makespan


def serve_with(
    rights: Sequence[bool],
    ready: Sequence[float],
    duration: Sequence[float],
    tail: Sequence[float],
    overhead: float,
) -> tuple[float, int]:
    """An independent, slow simulation: makespan and slices if only jobs with a right to cut may do so."""
    left = list(duration)
    now = longest = 0.0
    slices = 0
    while any(left):
        able = [job for job, seconds in enumerate(left) if seconds and ready[job] <= now]
        if not able:
            now = min(ready[job] for job, seconds in enumerate(left) if seconds)
            continue
        job = min(able, key=lambda job: (-tail[job], ready[job], job))
        finish = now + overhead + left[job]
        cuts = [
            max(ready[other], now + 2 * overhead)
            for other in range(len(ready))
            if rights[other] and left[other] and now < ready[other] < finish and tail[other] > tail[job]
        ]
        cut = min((moment for moment in cuts if moment + overhead <= finish), default=finish)
        left[job] = finish - cut
        now = cut
        slices += 1
        if cut == finish:
            longest = max(longest, now + tail[job])
    return longest, slices


def test_with_overhead_close_to_the_best_choice_of_cuts_and_no_cut_is_idle() -> None:
    rng = random.Random(5)
    optimal = 0
    for _ in range(100):
        ready, duration, tail = random_jobs(rng, 7)
        overhead = rng.choice((0.005, 0.02, 0.1))
        schedule = pace.preemptive_schedule(ready, duration, tail, overhead)
        choices = itertools.product((False, True), repeat=len(ready))
        best, _ = min(serve_with(choice, ready, duration, tail, overhead) for choice in choices)
        assert schedule.makespan <= best * 1.05
        optimal += schedule.makespan <= best * (1 + 1e-9)
        whole = serve_with([False] * len(ready), ready, duration, tail, overhead)
        if whole[1] < len(schedule.slices):
            assert schedule.makespan < whole[0]
    assert optimal >= 95


def test_a_cut_leaves_no_slice_below_the_minimum() -> None:
    rng = random.Random(6)
    cut_jobs = 0
    for _ in range(100):
        ready, duration, tail = random_jobs(rng, 15)
        overhead = rng.choice((0.01, 0.05))
        schedule = pace.preemptive_schedule(ready, duration, tail, overhead)
        pieces: dict[int, list[float]] = {}
        for job, start, end in schedule.slices:
            pieces.setdefault(job, []).append(end - start - overhead)
        for parts in pieces.values():
            cut_jobs += len(parts) > 1
            assert len(parts) == 1 or min(parts) >= overhead * (1 - 1e-9)
    assert cut_jobs > 20


def max_min_size(sizes: Sequence[int], groups: int) -> tuple[float, list[list[int]]]:
    """The paper's lines 11 to 23, by plain recursion."""

    def best(start: int, parts: int) -> tuple[float, list[list[int]]]:
        if parts == 1:
            return sum(sizes[start:]), [list(range(start, len(sizes)))]
        value, chosen = -1.0, []
        for end in range(start + 1, len(sizes) - parts + 2):
            rest, tail_groups = best(end, parts - 1)
            smallest = min(sum(sizes[start:end]), rest)
            if value < smallest:
                value, chosen = smallest, [list(range(start, end)), *tail_groups]
        return value, chosen

    return best(0, groups)


def balanced_fusion(sizes: Sequence[float], groups: int) -> list[list[int]]:
    """Indices of the sizes in runs of neighbours, by the package's MaxMinSize."""
    edges = np.append(0.0, np.cumsum(np.asarray(sizes, np.float64)))
    borders = balanced_borders(edges, max_min_sizes(edges, groups), groups)
    return [part.tolist() for part in np.split(np.arange(len(sizes)), np.flatnonzero(borders)[1:])]


def test_balanced_fusion_is_the_papers_optimum() -> None:
    rng = random.Random(7)
    for _ in range(300):
        sizes = [rng.choice((rng.randint(0, 5), rng.randint(1, 1000))) for _ in range(rng.randint(1, 8))]
        groups = rng.randint(1, len(sizes))
        value, expected = max_min_size(sizes, groups)
        found = balanced_fusion(sizes, groups)
        assert found == expected
        every = itertools.combinations(range(1, len(sizes)), groups - 1)
        edges = ([0, *cuts, len(sizes)] for cuts in every)
        assert value == max(min(sum(sizes[a:b]) for a, b in itertools.pairwise(edge)) for edge in edges)


def fused(
    groups: Sequence[Sequence[int]], ready: Sequence[float], sizes: Sequence[float], tail: Sequence[float], rate: float
) -> tuple[list[float], list[float], list[float]]:
    return (
        [max(ready[i] for i in group) for group in groups],
        [sum(sizes[i] for i in group) * rate for group in groups],
        [max(tail[i] for i in group) for group in groups],
    )


def test_search_over_fusions_is_never_worse_than_the_papers() -> None:
    rng = random.Random(8)
    shorter = 0
    for _ in range(60):
        ready, duration, tail = random_jobs(rng, 25)
        order = list(range(len(ready)))
        rng.shuffle(order)
        ready, duration, tail = ([values[i] for i in order] for values in (ready, duration, tail))
        overhead = rng.choice((0.002, 0.01, 0.05))
        sizes, rate = [seconds * 1e8 for seconds in duration], 1e-8
        found = pace.search_fusion(ready, sizes, tail, rate, overhead)
        jobs = fused(found.groups, ready, sizes, tail, rate)
        check_feasible(found, *jobs, overhead)
        assert [i for group in found.groups for i in group] == sorted(range(len(ready)), key=lambda i: ready[i])
        chain = sorted(range(len(ready)), key=lambda i: ready[i])
        paper = []
        for count in range(1, len(ready) + 1):
            groups = [[chain[i] for i in group] for group in balanced_fusion([sizes[i] for i in chain], count)]
            paper.append(pace.preemptive_schedule(*fused(groups, ready, sizes, tail, rate), overhead).makespan)
        assert found.makespan <= min(paper) * (1 + 1e-9)
        shorter += found.makespan < min(paper) * (1 - 1e-6)
    assert shorter >= 5


def test_search_over_fusions_nears_the_best_of_all_groupings() -> None:
    rng = random.Random(9)
    for _ in range(15):
        ready, sizes, tail = random_jobs(rng, 8)
        overhead = rng.choice((0.01, 0.05))
        lengths = []
        for cuts in itertools.product((False, True), repeat=len(ready) - 1):
            groups: list[list[int]] = [[0]]
            for index, cut in enumerate(cuts, 1):
                if cut:
                    groups.append([])
                groups[-1].append(index)
            lengths.append(pace.preemptive_schedule(*fused(groups, ready, sizes, tail, 1.0), overhead).makespan)
        assert pace.search_fusion(ready, sizes, tail, 1.0, overhead).makespan <= min(lengths) * 1.01


def test_without_overhead_fusion_gains_nothing() -> None:
    ready, sizes, tail = random_jobs(random.Random(10), 30)
    unfused = pace.preemptive_schedule(ready, sizes, tail).makespan
    assert pace.search_fusion(ready, sizes, tail, 1.0, 0.0).makespan == pytest.approx(unfused, rel=1e-12)
    assert pace.search_fusion([], [], [], 1.0, 0.0) == LinkSchedule(0.0, (), ())


def test_many_tensors_are_fused_in_bounded_time() -> None:
    rng = np.random.default_rng(11)
    ready, sizes, tail = np.sort(rng.random(700)), rng.random(700) / 350, np.sort(rng.random(700))
    found = pace.search_fusion(ready, sizes, tail, 1.0, 0.01)
    assert found.makespan < pace.preemptive_schedule(ready, sizes, tail, 0.01).makespan / 2


def test_fifo_and_tictac_send_whole_tensors() -> None:
    ready, duration, tail = [0, 1, 2], [3, 2, 1], [0, 2, 6]
    assert fifo_schedule(ready, duration, tail).slices == ((0, 0, 3), (1, 3, 5), (2, 5, 6))
    assert fifo_schedule(ready, duration, tail).makespan == 12
    assert tictac_schedule(ready, duration, tail).slices == ((0, 0, 3), (2, 3, 4), (1, 4, 6))
    assert tictac_schedule(ready, duration, tail, 0.5).makespan == 11


def test_horovod_fuses_what_is_ready_in_a_cycle_up_to_the_threshold() -> None:
    ready, sizes, tail = [0.5, 1.5, 1.6, 1.7, 6.5], [10, 10, 10, 90, 10], [1, 0, 7, 0, 0]
    found = horovod_fusion(ready, sizes, tail, 0.01, 0.1, threshold_bytes=50, cycle_seconds=1.0)
    assert found.groups == ((0,), (1, 2), (3,), (4,))
    # Cycles begin at 1, 2 (which lasts until 3.3) and 7.3, a whole number of cycles later.
    expected = [(0, 1.0, 1.2), (1, 2.0, 2.3), (2, 2.3, 3.3), (3, 7.3, 7.5)]
    assert [slice_[0] for slice_ in found.slices] == [row[0] for row in expected]
    assert [time for row in found.slices for time in row[1:]] == pytest.approx([t for row in expected for t in row[1:]])
    assert found.makespan == pytest.approx(9.3)
    alone = horovod_fusion(ready, sizes, tail, 0.01, 0.1, threshold_bytes=0, cycle_seconds=0.0)
    assert alone.groups == ((0,), (1,), (2,), (3,), (4,))
    assert alone.makespan == pytest.approx(fifo_schedule(ready, [0.1, 0.1, 0.1, 0.9, 0.1], tail, 0.1).makespan)


def test_bytescheduler_waits_for_what_was_handed_over() -> None:
    ready, duration, tail = [0, 0.5], [4, 1], [0, 9]
    one = bytescheduler_schedule(ready, duration, tail, partition_seconds=1, credit_seconds=1)
    assert one.slices == ((0, 0, 1), (1, 1, 2), (0, 2, 5))
    two = bytescheduler_schedule(ready, duration, tail, partition_seconds=1, credit_seconds=2)
    assert two.slices == ((0, 0, 2), (1, 2, 3), (0, 3, 5))
    costly = bytescheduler_schedule(ready, duration, tail, 0.5, partition_seconds=1, credit_seconds=1)
    assert costly.slices[:3] == ((0, 0, 1.5), (1, 1.5, 3.0), (0, 3.0, 4.5))
    assert len(costly.slices) == 5


def test_no_baseline_beats_the_optimum() -> None:
    rng = random.Random(12)
    for _ in range(100):
        ready, duration, tail = random_jobs(rng, 20)
        least = pace.preemptive_schedule(ready, duration, tail).makespan * (1 - 1e-9)
        parts = bytescheduler_schedule(ready, duration, tail, partition_seconds=0.03, credit_seconds=0.05)
        check_feasible(parts, ready, duration, tail)
        assert least <= parts.makespan
        horovod = horovod_fusion(ready, duration, tail, 1.0, threshold_bytes=0.2, cycle_seconds=0.01)
        check_feasible(horovod, *fused(horovod.groups, ready, duration, tail, 1.0))
        assert least <= horovod.makespan
        assert least <= fifo_schedule(ready, duration, tail).makespan
        assert least <= tictac_schedule(ready, duration, tail).makespan


def test_inputs_are_not_changed() -> None:
    ready, duration, tail = np.array([0.0, 0.5]), np.array([4.0, 1.0]), np.array([0.0, 9.0])
    pace.preemptive_schedule(ready, duration, tail)
    bytescheduler_schedule(ready, duration, tail, partition_seconds=1, credit_seconds=1)
    pace.search_fusion(ready, duration, tail, 1.0, 0.1)
    assert (ready.tolist(), duration.tolist(), tail.tolist()) == ([0.0, 0.5], [4.0, 1.0], [0.0, 9.0])


def test_jobs_of_a_chain_on_one_queue() -> None:
    graph = make_graph(
        [
            Layer((Weight("a", (10, 10)),), flops=100, seconds=3.0),
            Layer((Weight("b", (5, 5)), Weight("c", (5,))), flops=300, seconds=2.0),
        ]
    )
    # Backward takes the measured 2 s and 3 s; forward 1 s and 3 s at 100 FLOP/s; updates 200, 50 and 10 FLOP.
    jobs = jobs_of(graph, flops_per_second=100.0, bytes_per_second=1e9)
    assert jobs.names == ("b", "c", "a")
    assert jobs.sizes.tolist() == [100, 20, 400]
    assert jobs.ready.tolist() == [2, 2, 5]
    assert jobs.tail.tolist() == pytest.approx([3 + 0.1 + 0.5, 3 + 0.1, 1 + 2 + 3 + 0.1 + 0.5])
    assert jobs.compute_seconds == pytest.approx(5 + 4 + 2.6)
    free = pace.preemptive_schedule(jobs.ready, jobs.sizes * 0.0, jobs.tail)
    assert free.makespan == pytest.approx(jobs.compute_seconds)


def operator(
    name: str, phase: str, inputs: tuple[str, ...], seconds: float, variables: tuple[str, ...] = ()
) -> Operator:
    spec = (TensorSpec((1,), "float32"),)
    return Operator(name, "matmul", "op", phase, "", inputs, variables, spec, 0, 0, 0, 0, seconds)  # type: ignore[arg-type]


def test_jobs_of_a_branching_graph_by_longest_paths() -> None:
    graph = ModelGraph(
        name="fork",
        operators=(
            operator("left", "forward", (), 2.0, ("a",)),
            operator("right", "forward", (), 5.0, ("b",)),
            operator("join", "forward", ("left", "right"), 1.0, ("a",)),
            operator("d_join", "backward", ("join",), 1.0),
            operator("d_left", "backward", ("d_join", "left"), 3.0),
            operator("d_right", "backward", ("d_join",), 4.0),
            operator("update.a", "optimizer", ("d_left",), 0.25, ("a",)),
            operator("update.b", "optimizer", ("d_right",), 0.5, ("b",)),
        ),
        variables=(
            Variable("a", (1,), "float32", "left", "d_left"),
            Variable("b", (1,), "float32", "right", "d_right"),
        ),
    )
    parallel = jobs_of(graph, 1.0, 1.0, parallel=True)
    assert parallel.ready.tolist() == [4, 5]
    assert parallel.tail.tolist() == [3.25, 6.5]
    assert parallel.compute_seconds == 11.5
    serial = jobs_of(graph, 1.0, 1.0)
    assert serial.ready.tolist() == [4, 8]
    assert serial.tail.tolist() == [8.75, 6.5]
    assert serial.compute_seconds == 8 + 8.75
