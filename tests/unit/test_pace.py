"""PACE's scheduler, fusion and baselines: optimal where they say so, feasible everywhere, never worse than promised."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pace_baselines import bytescheduler_schedule, fifo_schedule, horovod_fusion, tictac_schedule
from pace_lp import solve
from strategies import Layer, Weight, make_graph, random_graphs
from torch import nn

from offbeat import OffbeatError, zoo
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.graph import ModelGraph, Operator, TensorSpec, Variable
from offbeat.graph.skeleton import skeleton
from offbeat.plan import lower
from offbeat.search import pace
from offbeat.search.pace import LinkSchedule, jobs_of
from offbeat.search.pace.fusion import balanced_borders, max_min_sizes
from offbeat.search.pace.paths import gradient_paths, list_schedule
from offbeat.search.pace.strategy import operator_seconds, pace_strategy
from offbeat.simulate.fast.gradients import gradients_of
from offbeat.strategy import build_strategy

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
    for streams in (None, 2):
        parallel = jobs_of(graph, 1.0, 1.0, streams=streams)
        assert parallel.ready.tolist() == [4, 5]
        assert parallel.tail.tolist() == [3.25, 6.5]
        assert parallel.compute_seconds == 11.5
    serial = jobs_of(graph, 1.0, 1.0)
    assert serial.ready.tolist() == [4, 8]
    assert serial.tail.tolist() == [8.75, 6.5]
    assert serial.compute_seconds == 8 + 8.75


@st.composite
def branching_graphs(draw: st.DrawFn) -> ModelGraph:
    """A random DAG of forward operators and its mirror image, whole seconds, some variables with several readers."""
    count = draw(st.integers(1, 7))
    seconds = st.integers(0, 4).map(float)
    reads = [draw(st.sets(st.integers(0, place - 1), max_size=3)) if place else set() for place in range(count)]
    variables = {f"v{n}": sorted(draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2))) for n in range(5)}
    forward = [
        operator(
            f"f{place}",
            "forward",
            tuple(f"f{n}" for n in sorted(reads[place])),
            draw(seconds),
            tuple(name for name, readers in variables.items() if place in readers),
        )
        for place in range(count)
    ]
    backward = [
        operator(
            f"b{place}",
            "backward",
            (f"f{place}", *(f"b{later}" for later in range(count) if place in reads[later])),
            draw(seconds),
        )
        for place in reversed(range(count))
    ]
    updates = [
        operator(f"update.{name}", "optimizer", (f"b{readers[0]}",), draw(seconds), (name,))
        for name, readers in variables.items()
    ]
    return ModelGraph(
        name="branching",
        operators=(*forward, *backward, *updates),
        variables=tuple(
            Variable(name, (draw(st.integers(1, 4)),), "float32", f"f{readers[0]}", f"b{readers[0]}")
            for name, readers in sorted(variables.items(), key=lambda item: item[1])
        ),
    )


def seconds_of(graph: ModelGraph) -> dict[str, float]:
    return {op.name: op.seconds or 0.0 for op in graph.operators}


def all_paths(edges: dict[str, list[str]], start: str) -> list[list[str]]:
    """Every path from a node to one that has no edges."""
    ways = [way for name in edges.get(start, []) for way in all_paths(edges, name)]
    return [[start, *way] for way in ways] or [[start]]


@given(branching_graphs())
def test_without_a_limit_ready_times_and_tails_are_the_longest_of_all_paths(graph: ModelGraph) -> None:
    took = seconds_of(graph)
    forward = {op.name: op for op in graph.phase("forward")}
    into = {op.name: [name for name in op.inputs if name not in forward] for op in graph.phase("backward")}
    out_of = {name: [op.name for op in forward.values() if name in op.inputs] for name in forward}
    jobs = jobs_of(graph, 1.0, 1.0, streams=None)
    for name, ready, tail in zip(jobs.names, jobs.ready.tolist(), jobs.tail.tolist(), strict=True):
        ways = all_paths(into, graph.variable(name).gradient_from or "")
        assert ready == max(sum(took[each] for each in way) for way in ways)
        starts = [op.name for op in forward.values() if name in op.variables]
        ways = [way for start in starts for way in all_paths(out_of, start)]
        assert tail == took[f"update.{name}"] + max(sum(took[each] for each in way) for way in ways)


@given(branching_graphs(), st.sampled_from((1, 2, 3, None)))
def test_streams_run_no_more_at_once_than_they_are_and_nothing_early(graph: ModelGraph, streams: int | None) -> None:
    took = seconds_of(graph)
    inputs = {op.name: op.inputs for op in graph.operators}
    order = [op.name for op in graph.operators]
    ends = list_schedule(order, inputs, took, streams)
    begins = {name: end - took[name] for name, end in ends.items()}
    for name in order:
        assert begins[name] >= max((ends[each] for each in inputs[name]), default=0.0)
        running = [each for each in order if begins[each] <= begins[name] < ends[each]]
        assert len(running) <= (streams or len(order))
    if streams == 1:
        assert list(ends.values()) == np.cumsum([took[name] for name in order]).tolist()
    assert list_schedule(order, inputs, took, len(order)) == list_schedule(order, inputs, took, None)


@given(branching_graphs())
def test_on_a_dag_the_schedule_is_the_linear_programmes_and_ends_when_constraint_5_says(graph: ModelGraph) -> None:
    took = seconds_of(graph)
    for streams in (1, 2, None):
        jobs = jobs_of(graph, 1.0, 1.0, streams=streams)
        slots = [values.astype(int).tolist() for values in (jobs.ready, jobs.sizes / 4, jobs.tail)]
        schedule = pace.preemptive_schedule(*slots)
        assert schedule.makespan == solve(*slots, lexicographic=False).makespan
        check_feasible(schedule, *slots)
        assert pace.search_fusion(jobs.ready, jobs.sizes, jobs.tail, 0.25, 0.0).makespan == schedule.makespan
    # The last one, without a limit: z_j = f_j + max(z_k, y_v), where an update stands between v and its readers.
    updated = {name: end + took[f"update.{name}"] for name, end in zip(jobs.names, schedule.completion, strict=True)}
    ends: dict[str, float] = {}
    for op in graph.phase("forward"):
        waited = [ends[name] for name in op.inputs] + [updated[name] for name in op.variables]
        ends[op.name] = took[op.name] + max(waited, default=0.0)
    dependent = max(schedule.completion[i] + jobs.tail[i] for i in range(len(jobs.names)))
    assert max(*ends.values(), *updated.values()) == max(dependent, *forward_alone(graph).values())


def forward_alone(graph: ModelGraph) -> dict[str, float]:
    """When forward operators end that wait for no variable."""
    return list_schedule(
        [op.name for op in graph.phase("forward")],
        {op.name: op.inputs for op in graph.phase("forward")},
        seconds_of(graph),
        None,
    )


CLUSTER = ClusterSpec.homogeneous(nodes=4, devices_per_node=1, bandwidth="1Gbit/s", latency="50us", memory="16GiB")


@pytest.fixture(scope="module")
def inception() -> ModelGraph:
    """On a device that takes about as long to compute as the cluster to send."""
    graph = zoo.capture("inception_v3", 0.25)
    return graph.with_seconds({op.name: op.estimate(3e10, 3e9) for op in graph.operators})


@pytest.mark.parametrize("coarsen", [True, False])
def test_one_stream_is_the_chain_that_replay_knows(inception: ModelGraph, coarsen: bool) -> None:
    costs = Costs(compute_scale={1: 1.5}, interference=0.2)
    plan = lower(inception, CLUSTER, build_strategy("wfbp", inception, CLUSTER))
    chain = gradients_of(plan, costs, coarsen=coarsen)
    assert chain is not None
    seconds = operator_seconds(plan, chain.slots)
    ready, tail, _ = gradient_paths(inception, seconds, chain.names, chain.update, 1)
    assert ready == pytest.approx(chain.ready, rel=1e-9)
    assert tail == pytest.approx(chain.tail, rel=1e-9)


@given(random_graphs(), st.integers(1, 3))
def test_one_stream_is_the_chain_of_any_model(graph: ModelGraph, passes: int) -> None:
    """Also with variables that nobody reads, tied ones, and several passes before one update."""
    graph = replace(graph, passes=passes)
    plan = lower(graph, CLUSTER, build_strategy("wfbp", graph, CLUSTER))
    chain = gradients_of(plan, Costs(), coarsen=False)
    if chain is None:
        return
    ready, tail, _ = gradient_paths(graph, operator_seconds(plan, chain.slots), chain.names, chain.update, 1)
    assert ready == pytest.approx(chain.ready, rel=1e-9)
    assert tail == pytest.approx(chain.tail, rel=1e-9)


def test_branches_of_inception_shorten_tails_and_change_the_order(inception: ModelGraph) -> None:
    chain, dag = (jobs_of(inception, 1.0, 1.0, streams=streams) for streams in (1, None))
    assert (dag.tail <= chain.tail).all()
    assert (dag.ready <= chain.ready).all()
    # In one block, a branch of one convolution is less urgent than the first of a branch of three, on a DAG only.
    place = {name: number for number, name in enumerate(chain.names)}
    short, long = (place[f"body.0.branches.{branch}.weight"] for branch in ("0.0", "2.0.0"))
    assert chain.tail[short] > chain.tail[long]
    assert dag.tail[short] < dag.tail[long]
    # Where branches run side by side, the step is shorter, and shorter with their own tails than with the chain's.
    duration = dag.sizes * 1.2e-8
    best = pace.preemptive_schedule(dag.ready, duration, dag.tail).makespan
    misled = pace.preemptive_schedule(dag.ready, duration, chain.tail).completion
    assert best < 0.85 * pace.preemptive_schedule(chain.ready, duration, chain.tail).makespan
    assert best < (np.array(misled) + dag.tail).max()
    one, many = (pace_strategy(inception, CLUSTER, streams=streams) for streams in (1, None))
    assert one == pace_strategy(inception, CLUSTER)
    assert many.schedule.order != one.schedule.order
    assert lower(inception, CLUSTER, many).messages


@pytest.mark.parametrize("streams", [0, -1, True, 1.5])
def test_impossible_streams_are_refused(streams: int) -> None:
    graph = make_graph([Layer((Weight("a", (2, 2)),))])
    with pytest.raises(OffbeatError, match=r"streams: .* must be a whole number, at least 1, or None"):
        jobs_of(graph, 1.0, 1.0, streams=streams)
    with pytest.raises(OffbeatError, match="has no dataflow; capture it with example inputs"):
        jobs_of(skeleton(nn.Linear(2, 2)), 1.0, 1.0, streams=2)
