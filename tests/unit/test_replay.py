"""Replay: the compiled kernel against its definition, independence of the listing, closed forms, and bad input."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_reference import replay_slowly

from offbeat.errors import OffbeatError
from offbeat.simulate import TaskGraph, replay
from offbeat.simulate import collectives as net

NO_EDGES = np.empty((0, 2), int)


@st.composite
def arrays(draw):
    """Small graphs in which ties, zero durations and shared devices are common."""
    tasks = draw(st.integers(1, 14))
    column = lambda values: np.array(draw(st.lists(values, min_size=tasks, max_size=tasks)))  # noqa: E731
    pair = st.tuples(st.integers(0, tasks - 1), st.integers(0, tasks - 1)).filter(lambda p: p[0] != p[1])
    edges = draw(st.lists(pair, max_size=2 * tasks)) if tasks > 1 else []
    return {
        "duration_seconds": column(st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 0.1, 1e-30])),
        "device": column(st.integers(-1, 2)),
        "edges": np.array([sorted(pair) for pair in edges], int).reshape(-1, 2),
        "priority": column(st.sampled_from([0.0, 1.0, 2.0])) if draw(st.booleans()) else None,
        "lag_seconds": column(st.sampled_from([0.0, 0.0, 0.5])) if draw(st.booleans()) else None,
    }


@given(arrays())
def test_kernel_equals_reference(given_arrays):
    graph = TaskGraph.from_arrays(**given_arrays)
    result = replay(graph)
    start, end = replay_slowly(graph)
    assert result.start.tolist() == start
    assert result.end.tolist() == end


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_kernel_equals_reference_on_long_queues(seed, prioritised):
    rng = np.random.default_rng(seed)
    tasks = 150
    edges = np.sort(rng.integers(0, tasks, (200, 2)), axis=1)
    graph = TaskGraph.from_arrays(
        rng.choice([0.25, 0.5, rng.random()], tasks),
        rng.integers(-1, 4, tasks),
        edges[edges[:, 0] != edges[:, 1]],
        rng.integers(0, 5, tasks) if prioritised else None,
        rng.choice([0.0, 0.3], tasks),
    )
    result = replay(graph)
    assert (result.start.tolist(), result.end.tolist()) == replay_slowly(graph)


@given(arrays(), st.randoms(use_true_random=False))
def test_result_does_not_depend_on_the_listing(given_arrays, random):
    """Tasks may swap times only with tasks that are symmetric to them, so each device sees the same times."""
    tasks = len(given_arrays["device"])
    listing = np.array(random.sample(range(tasks), tasks))
    place = np.argsort(listing)
    edges = place[given_arrays["edges"]]
    shuffled = {k: v[listing] if v is not None and k != "edges" else v for k, v in given_arrays.items()}
    shuffled["edges"] = edges[random.sample(range(len(edges)), len(edges))].reshape(-1, 2)
    graph = TaskGraph.from_arrays(**given_arrays)
    one, other = replay(graph), replay(TaskGraph.from_arrays(**shuffled))
    assert one.iteration_time == other.iteration_time
    hashes = graph.tie_keys["structure"].tolist()
    seen = sorted(zip(hashes, one.start.tolist(), one.end.tolist(), strict=True))
    assert seen == sorted(zip(hashes, other.start[place].tolist(), other.end[place].tolist(), strict=True))


def test_symmetric_choices_agree_across_devices():
    """a, a' on device 0 and b, b' on device 1 are alike; x needs a and b, x' needs a' and b'. Whatever the listing, the
    device that is second to choose must follow the first, so that one of x and x' can start at 1."""
    for swap in (False, True):
        edges = [(0, 4), (1, 5), (3 if swap else 2, 4), (2 if swap else 3, 5)]
        result = replay(TaskGraph.from_arrays([1, 1, 1, 1, 1, 1], [0, 0, 1, 1, -1, -1], edges))
        assert result.iteration_time == 3.0
        assert sorted(result.start[4:].tolist()) == [1.0, 2.0]


@given(arrays())
def test_critical_path_explains_the_iteration_time(given_arrays):
    graph = TaskGraph.from_arrays(**given_arrays)
    result = replay(graph)
    path = result.critical_path()
    seen = result.end + graph.lag_seconds
    assert seen[path[-1]] == result.iteration_time
    assert result.start[path[0]] == 0.0
    edges = set(map(tuple, given_arrays["edges"].tolist()))
    for before, after in zip(path[:-1].tolist(), path[1:].tolist(), strict=True):
        assert result.binding[after] == before
        if (before, after) in edges and seen[before] == result.start[after]:
            continue
        assert graph.device[before] == graph.device[after] >= 0
        assert result.end[before] == result.start[after]


def test_urgent_task_overtakes_what_was_ready_before_it():
    # Task 3 becomes ready at 1.5, while the device runs task 0; it is more urgent than tasks 1 and 2.
    graph = TaskGraph.from_arrays([2, 5, 5, 1, 1.5], [0, 0, 0, 0, 1], [(4, 3)], priority=[0, 1, 2, 0, 0])
    assert replay(graph).start.tolist() == [0, 3, 8, 2, 0]
    assert replay(graph).critical_path().tolist() == [0, 3, 1, 2]


def test_ready_at_the_very_moment_of_choice_counts():
    # Task 2 becomes ready exactly when device 0 is free, through a task that takes no time on another device.
    graph = TaskGraph.from_arrays([1, 1, 1, 1, 0], [0, 0, 0, 1, 2], [(3, 4), (4, 2)], priority=[0, 2, 1, 0, 0])
    assert replay(graph).start.tolist() == [0, 2, 1, 0, 1]


def test_longest_tail_goes_first():
    graph = TaskGraph.from_arrays([1, 1, 5], [0, 0, 1], [(1, 2)])
    assert replay(graph).start.tolist() == [1, 0, 1]


def test_lag_delays_successors_but_not_the_device():
    graph = TaskGraph.from_arrays([1, 1, 1], [0, 0, 1], [(0, 2)], lag_seconds=[0.5, 0, 0.25])
    result = replay(graph)
    assert result.start.tolist() == [0, 1, 1.5]
    assert result.iteration_time == 2.75


def test_no_device_is_unlimited():
    assert replay(TaskGraph.from_arrays([1, 2, 3], [-1, -1, -1], NO_EDGES)).iteration_time == 3.0


def test_empty_and_single():
    empty = replay(TaskGraph.from_arrays([], [], []))
    assert (empty.iteration_time, len(empty.start), len(empty.critical_path())) == (0.0, 0, 0)
    one = replay(TaskGraph.from_arrays([2.5], [7], NO_EDGES))
    assert (one.iteration_time, one.critical_path().tolist(), one.binding.tolist()) == (2.5, [0], [-1])


def test_device_numbers_may_have_gaps():
    assert replay(TaskGraph.from_arrays([1, 1, 1], [2_000_000_000, 5, 5], NO_EDGES)).iteration_time == 2.0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"duration_seconds": [1, float("nan"), 1]}, r"duration_seconds\[1\]: nan"),
        ({"duration_seconds": [1, 1, float("inf")]}, r"duration_seconds\[2\]: inf"),
        ({"duration_seconds": [1, 1, -0.5]}, r"duration_seconds\[2\]: -0.5"),
        ({"duration_seconds": [[1, 1, 1]]}, r"duration_seconds: shape \(1, 3\)"),
        ({"duration_seconds": ["a", "b", "c"]}, "duration_seconds: .* is not an array of numbers"),
        ({"duration_seconds": [1e308, 1e308, 1]}, "sum of all durations"),
        ({"device": [0, 1]}, "device: 2 values given for 3 tasks"),
        ({"device": [0, -2, 0]}, r"device\[1\]: -2"),
        ({"device": [0.5, 0, 0]}, "device: values of type float64"),
        ({"lag_seconds": [0, 0, -1]}, r"lag_seconds\[2\]: -1"),
        ({"lag_seconds": [0]}, "lag_seconds: 1 values given for 3 tasks"),
        ({"priority": [0, float("nan"), 0]}, r"priority\[1\]: nan"),
        ({"edges": [(0, 1), (1, 3)]}, r"edges\[1\]: \(1, 3\) names a task outside 0..2"),
        ({"edges": [(-1, 1)]}, r"edges\[0\]: \(-1, 1\)"),
        ({"edges": [(2, 2)]}, r"edges\[0\]: task 2 waits for itself"),
        ({"edges": [(0, 1, 2)]}, r"edges: shape \(1, 3\)"),
        ({"edges": [(0, 1), (1, 2), (2, 1)]}, r"edges: task [12] waits for itself through a cycle"),
    ],
)
def test_bad_input_is_named(change, sentence):
    good = {"duration_seconds": [1, 1, 1], "device": [0, 0, 0], "edges": [(0, 1)]}
    with pytest.raises(OffbeatError, match=sentence):
        TaskGraph.from_arrays(**(good | change))


def _network(width, incoming=False, alpha=1e-3, beta=1e-6):
    devices = np.arange(width)
    return net.GraphBuilder(), net.Links(devices, beta, alpha, devices + width if incoming else None)


def _time(builder):
    return replay(builder.build()).iteration_time


@pytest.mark.parametrize("width", [2, 3, 4, 7, 16])
def test_closed_forms(width):
    """Times on an idle network with equal links, as the module's docstring states them."""
    size, alpha, beta, chunks = 1_000_000, 1e-3, 1e-6, 5
    part = size * beta / net.PIECES
    chain = (width - 1) * alpha + (width + chunks - 2) * size * beta / chunks
    forms = [
        ("all_reduce", {}, 2 * (width - 1) * (alpha + size * beta / width)),
        ("reduce_scatter", {}, (width - 1) * (alpha + size * beta / width)),
        ("all_gather", {}, (width - 1) * (alpha + size * beta)),
        ("broadcast", {"root": 1, "chunks": chunks}, chain),
        ("reduce", {"root": 1, "chunks": chunks}, chain),
    ]
    for collective, options, seconds in forms:
        builder, links = _network(width)
        done = net.add_collective(builder, collective, links, size, ready=-1, **options)
        assert done.shape == (width,)
        assert _time(builder) == pytest.approx(seconds, rel=1e-12)
    for collective in ("push", "pull"):
        builder, links = _network(width, incoming=True)
        net.add_collective(builder, collective, links, size, ready=-1)
        assert _time(builder) == pytest.approx(alpha + part + (width - 1) * size * beta, rel=1e-12)


@pytest.mark.parametrize(
    ("collective", "options"),
    [
        ("all_reduce", {}),
        ("reduce_scatter", {}),
        ("all_gather", {}),
        ("broadcast", {"root": 2}),
    ],
)
def test_nobody_has_the_result_before_it_has_taken_part(collective, options):
    builder, links = _network(4)
    late = builder.add([0.0, 100.0, 0.0, 0.0], -1)
    done = net.add_collective(builder, collective, links, 1000, ready=late, **options)
    graph = builder.build()
    result = replay(graph)
    assert (result.end + graph.lag_seconds)[done[1]] >= 100.0
    of_late_rank = graph.device == 1
    if collective != "broadcast":
        assert result.start[of_late_rank].min() >= 100.0


def test_a_reduction_needs_everyone():
    builder, links = _network(5)
    late = builder.add([0.0, 0.0, 0.0, 100.0, 0.0], -1)
    done = net.add_collective(builder, "reduce", links, 1000, root=1, ready=late)
    assert replay(builder.build()).end[done[1]] > 100.0


def test_slowest_link_sets_the_pace_of_a_ring():
    width, size = 4, 1_000_000
    builder = net.GraphBuilder()
    links = net.Links(np.arange(width), [1e-6, 1e-6, 3e-6, 1e-6])
    net.add_collective(builder, "all_reduce", links, size, -1)
    # Its link sends 2 (w - 1) chunks back to back; the last is passed on to nobody.
    assert _time(builder) == pytest.approx(2 * (width - 1) * size / width * 3e-6)


def test_two_collectives_share_a_link():
    builder, links = _network(2, alpha=0.0)
    net.add_collective(builder, "all_reduce", links, 1000, -1)
    net.add_collective(builder, "all_reduce", links, 1000, -1)
    assert _time(builder) == pytest.approx(2 * 1000 * 1e-6)


def test_transactions_name_each_transmission_once():
    builder, links = _network(4)
    compute = builder.add(np.ones(4), np.arange(4) + 10)
    net.add_collective(builder, "all_reduce", links, 1000, compute)
    net.add_collective(builder, "all_reduce", links, 1000, compute)
    graph = builder.build()
    assert graph.label[:4].tolist() == [0, 0, 0, 0]
    sent = graph.label[4:].tolist()
    assert len(set(sent)) == len(sent) == len(graph) - 4 == 2 * 6 * 4
    # In the first half of the ring the sender of a chunk moves on by one rank at each step.
    assert ((graph.label[4:16] >> 4) % 2**20 - 1).tolist() == [0, 1, 2, 3, 3, 0, 1, 2, 2, 3, 0, 1]


def test_one_rank_has_nothing_to_send():
    for collective, options in [
        ("all_reduce", {}),
        ("reduce", {"root": 0}),
        ("push", {"root": 0}),
        ("pull", {"root": 0}),
    ]:
        builder, links = _network(1)
        ready = builder.add([3.0], 5)
        done = net.add_collective(builder, collective, links, 1000, ready=ready, **options)
        assert replay(builder.build()).end[done].tolist() == [3.0]


def test_a_million_tasks_are_quick():
    """A loose bound, which holds on a loaded machine; benchmarks/replay_speed.py measures."""
    script = (
        "import numpy as np, time; from offbeat.simulate import TaskGraph, replay\n"
        "n = 1_000_000; after = np.arange(64, n)\n"
        "graph = TaskGraph.from_arrays(np.full(n, 1e-3), np.arange(n) % 64, np.stack([after - 64, after], 1))\n"
        "replay(graph); begin = time.process_time(); result = replay(graph)\n"
        "assert abs(result.iteration_time - n / 64 * 1e-3) < 1e-6\n"
        "print(time.process_time() - begin)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=200)
    assert float(done.stdout) < 2.0
