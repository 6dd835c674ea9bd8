"""FT finds the frontier: the points of brute force and FT-Elimination, with choices that cost what the points say."""

import itertools

import numpy as np
import pytest
from frontier_reference import brute_force, eliminate_only

from offbeat.search.frontier import eliminate, track
from offbeat.search.frontier.algebra import GRID, UNIT, Combiner, Pattern, Table, frontier_reduce
from offbeat.search.frontier.track import total_costs, useful_configurations


def cell(points):
    """A table of one cell with a frontier's points."""
    given = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    return Table(np.array([0, len(given)]), given[:, 0].copy(), given[:, 1].copy())


def frontier_product(first, second):
    """F ⊗ F', and for each point the indices of the two it is the sum of."""
    result = Combiner()(cell(first), cell(second), Pattern((1, 1, 1), (0, 0, 0), (0, 0, 0)))
    return np.column_stack((result.memory, result.time)), result.left, result.right


def frontier_union(first, second):
    """F ∪ F', and for each point its index in `first` followed by `second`."""
    one, two = cell(first), cell(second)
    start = np.array([0, one.start[1], one.start[1] + two.start[1]])
    both = Table(start, np.concatenate((one.memory, two.memory)), np.concatenate((one.time, two.time)))
    result = Combiner()(both, UNIT, Pattern((1, 1, 1), (0, 0, 0), (0, 0, 0), terms=2, a_step=1))
    return np.column_stack((result.memory, result.time)), result.left


def hypervolume(points, reference):
    """Area that the points dominate below the reference (memory, time): larger is better."""
    given = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    memory, time = reference
    inside = given[(given[:, 0] < memory) & (given[:, 1] < time)]
    front = inside[frontier_reduce(inside)]
    widths = np.diff(np.append(front[:, 0], memory))
    return float(np.sum(widths * (time - front[:, 1])))


def random_graph(seed):
    """Up to 7 operators of up to 4 configurations; the density runs from mostly isolated to nearly complete."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    sizes = rng.integers(1, 5, count)
    density = rng.choice([0.1, 0.25, 0.5, 0.9])

    def draw(*shape):
        # Whole numbers sum without rounding, and make ties.
        return rng.integers(0, 20, shape).astype(float) if seed % 2 else rng.random(shape)

    ops = [draw(size, 2) for size in sizes]
    edges = {}
    for i, j in itertools.combinations(range(count), 2):
        if rng.random() < density:
            edges[i, j] = draw(sizes[i], sizes[j], 2)
    return ops, edges


def sharded(rng, count, size, residual=0, period=0):
    """A chain of operators whose configurations shard more or less: memory against time, and resharding on edges."""
    ways = 2.0 ** (np.arange(size) % 4)

    def op():
        parameters, work = rng.lognormal(0, 1, 2)
        memory = parameters / ways * (1 + 0.3 * rng.random(size))
        time = work * (1 + 0.4 * np.log2(ways) + 0.2 * rng.random(size))
        return np.stack([memory, time], axis=1)

    def edge():
        distance = np.abs(np.log2(ways)[:, None] - np.log2(ways)[None]) * 0.2 * rng.random()
        return np.stack([np.zeros_like(distance), distance * (1 + 0.1 * rng.random((size, size)))], axis=2)

    own = [op() for _ in range(period or count)]
    joined = [edge() for _ in range(period or count)]
    skip = [edge() for _ in range(period or count)]
    ops = [own[i % len(own)] for i in range(count)]
    edges = {(i, i + 1): joined[i % len(joined)] for i in range(count - 1)}
    if residual:
        edges |= {(i, i + residual): skip[i % len(skip)] for i in range(0, count - residual, residual)}
    return ops, edges


def lost(points, exact):
    """Share of the exact frontier's hypervolume that the points miss, within the exact frontier's own ranges."""
    low, high = exact.min(axis=0), exact.max(axis=0)
    scale = np.where(high > low, high - low, 1.0)
    reference = (1.1, 1.1)
    whole = hypervolume((exact - low) / scale, reference)
    return 1 - hypervolume((points - low) / scale, reference) / whole


def check_form(result, ops, edges):
    assert np.all(np.diff(result.points[:, 0]) > 0)
    assert np.all(np.diff(result.points[:, 1]) < 0)
    assert result.choices.shape == (len(result.points), len(ops))
    costs = total_costs(ops, edges, result.choices)
    assert np.array_equal(costs, result.points)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_exact_equals_brute_force(first):
    for seed in range(first, first + 50):
        ops, edges = random_graph(seed)
        expected = brute_force(ops, edges)
        result = track(ops, edges, cap=0, threads=1)
        check_form(result, ops, edges)
        assert result.points.shape == expected.points.shape, seed
        assert np.allclose(result.points, expected.points, rtol=1e-12, atol=0), seed


def test_elimination_alone_equals_brute_force():
    for seed in range(60):
        ops, edges = random_graph(seed)
        expected = brute_force(ops, edges)
        result = eliminate_only(ops, edges)
        check_form(result, ops, edges)
        assert np.allclose(result.points, expected.points, rtol=1e-12, atol=0), seed


def test_brute_force_by_hand():
    ops = [np.array([[1.0, 5], [2, 1]]), np.array([[1.0, 4], [3, 3]])]
    edges = {(0, 1): np.array([[[0.0, 0], [0, 2]], [[0, 3], [0, 0]]])}
    for method in (brute_force, eliminate_only, track):
        result = method(ops, edges)
        assert result.points.tolist() == [[2, 9], [3, 8], [5, 4]]
        assert result.choices.tolist() == [[0, 0], [1, 0], [1, 1]]


def test_longer_exact_equals_elimination_alone():
    rng = np.random.default_rng(3)
    ops, edges = sharded(rng, 11, 4, residual=3)
    expected = eliminate_only(ops, edges)
    result = track(ops, edges, cap=0)
    assert len(result.points) == len(expected.points) > 50
    assert np.allclose(result.points, expected.points, rtol=1e-9)


def test_bounded_loses_less_than_three_percent():
    rng = np.random.default_rng(0)
    for residual in (0, 3, 4):
        ops, edges = sharded(rng, 16, 5, residual)
        exact = track(ops, edges, cap=0)
        bounded = track(ops, edges, cap=64)
        check_form(bounded, ops, edges)
        assert len(exact.points) > 100
        assert len(bounded.points) <= 64
        assert lost(bounded.points, exact.points) < 0.03
        # The two ends are never dropped.
        assert np.allclose(bounded.points[[0, -1]], exact.points[[0, -1]])


def test_bounded_is_exact_on_small_graphs():
    for seed in range(60):
        ops, edges = random_graph(seed)
        expected = brute_force(ops, edges)
        assert lost(track(ops, edges, threads=1).points, expected.points) < 0.03, seed


def test_heuristic_elimination(monkeypatch):
    """A grid cannot be simplified by node and edge elimination."""
    monkeypatch.setattr(eliminate, "_MERGED_CONFIGURATIONS", 1)
    rng = np.random.default_rng(5)
    ops, edges = sharded(rng, 9, 4)
    step = edges[0, 1]
    edges = {}
    for row, column in itertools.product(range(3), range(3)):
        if column < 2:
            edges[3 * row + column, 3 * row + column + 1] = step * rng.random()
        if row < 2:
            edges[3 * row + column, 3 * row + column + 3] = step * rng.random()
    decided = []
    original = eliminate.Elimination._fix
    monkeypatch.setattr(eliminate.Elimination, "_fix", lambda run, node: (decided.append(node), original(run, node)))
    exact = track(ops, edges, cap=0)
    assert not decided
    bounded = track(ops, edges)
    assert decided
    check_form(bounded, ops, edges)
    assert 0 <= lost(bounded.points, exact.points) < 0.03


def test_hub_of_a_long_chain_needs_no_heuristic(monkeypatch):
    """An attention mask read by every layer: the fan is eliminated from its end."""
    monkeypatch.delattr(eliminate.Elimination, "_fix")
    rng = np.random.default_rng(8)
    ops, edges = sharded(rng, 24, 6)
    edges |= {(i, 23): edges[0, 1].transpose(1, 0, 2) * 0.5 for i in range(0, 21, 3)}
    result = track(ops, edges)
    check_form(result, ops, edges)


def test_repeated_layers_are_solved_once(monkeypatch):
    computed = []
    original = Combiner._combined

    def counted(combiner, a, b, pattern):
        if pattern.terms > 1 and min(pattern.shape[1:], default=1) > 1:
            computed.append(pattern)
        return original(combiner, a, b, pattern)

    monkeypatch.setattr(Combiner, "_combined", counted)
    counts = []
    for layers in (6, 12):
        computed.clear()
        ops, edges = sharded(np.random.default_rng(1), 6 * layers + 1, 6, residual=6, period=6)
        track(ops, edges, threads=1)
        counts.append(len(computed))
    assert counts[0] == counts[1] > 0


def test_same_result_every_time_and_for_any_threads():
    rng = np.random.default_rng(2)
    ops, edges = sharded(rng, 30, 16, residual=5)
    one, again, three = (track(ops, edges, threads=threads) for threads in (1, 1, 3))
    for other in (again, three):
        assert np.array_equal(one.points, other.points)
        assert np.array_equal(one.choices, other.choices)


def test_disconnected_isolated_single_and_empty():
    nothing = track([], {})
    assert nothing.points.tolist() == [[0, 0]]
    assert nothing.choices.shape == (1, 0)
    one = track([np.array([[3.0, 1], [1, 3], [3, 3], [2, 2]])], {})
    assert one.points.tolist() == [[1, 3], [2, 2], [3, 1]]
    assert one.choices.tolist() == [[1], [3], [0]]
    two = track([np.array([[0.0, 1], [1, 0]]), np.array([[0.0, 10], [10, 0]])], {})
    assert two.points.tolist() == [[0, 11], [1, 10], [10, 1], [11, 0]]
    assert two.choices.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_dropped_configurations_are_not_needed(seed):
    """The frontier over the kept configurations alone is the whole frontier."""
    ops, edges = random_graph(seed + 1)
    kept = useful_configurations(ops, edges)
    fewer = brute_force(
        [costs[keep] for costs, keep in zip(ops, kept, strict=True)],
        {(i, j): costs[np.ix_(kept[i], kept[j])] for (i, j), costs in edges.items()},
    )
    assert np.array_equal(fewer.points, brute_force(ops, edges).points)


def test_a_worse_configuration_is_dropped():
    edge = np.array([[[0, 0], [0, 1]], [[0, 1], [0, 0]]], float)
    near, far = np.array([[1.0, 1], [1.0, 1.5]]), np.array([[1.0, 1], [1.0, 2.5]])
    kept_near = useful_configurations([near, near[::-1].copy()], {(0, 1): edge})
    kept_far = useful_configurations([far, far.copy()], {(0, 1): edge})
    assert [keep.tolist() for keep in kept_near] == [[0, 1], [0, 1]]
    assert [keep.tolist() for keep in kept_far] == [[0], [0]]


def naive_frontier(points):
    points = np.asarray(points)
    return sorted({tuple(p) for p in points.tolist() if not any(np.all(q <= p) and np.any(q < p) for q in points)})


@pytest.mark.parametrize("seed", range(20))
def test_product_and_union_against_all_pairs(seed):
    rng = np.random.default_rng(seed)
    both = []
    # Some products are small enough to be sorted at once, some are not.
    for size in rng.integers(1, 120, 2):
        memory = rng.integers(0, 300, size)
        points = np.stack([memory, 330.0 - memory + rng.integers(0, 30, size)], axis=1)
        # Most points of real frontiers crowd where memory is least.
        points[:, 0] = points[:, 0] ** rng.choice([1, 3])
        both.append(points[frontier_reduce(points)])
    first, second = both
    points, left, right = frontier_product(first, second)
    sums = (first[:, None] + second[None]).reshape(-1, 2)
    assert np.array_equal(points, sums[frontier_reduce(sums)])
    assert np.array_equal(points, first[left] + second[right])
    points, origin = frontier_union(first, second)
    assert [tuple(p) for p in points.tolist()] == naive_frontier(np.concatenate(both))
    assert np.array_equal(points, np.concatenate(both)[origin])


def test_product_of_more_points_than_buckets():
    memory = np.arange(3.0 * GRID)
    first = np.stack([memory, memory[::-1]], axis=1)
    second = np.array([[0.0, 0.5], [0.5, 0.0]])
    points, _, _ = frontier_product(first, second)
    assert len(points) == 2 * len(first)
    assert np.all(points.sum(axis=1) == 3 * GRID - 0.5)


def test_reduce_and_hypervolume_by_hand():
    points = [[2, 2], [1, 3], [2, 2], [3, 2], [1, 4], [3, 1]]
    assert frontier_reduce(points).tolist() == [1, 0, 5]
    assert naive_frontier(points) == [(1, 3), (2, 2), (3, 1)]
    assert frontier_reduce(np.empty((0, 2))).tolist() == []
    assert hypervolume(points, (4, 4)) == 1 * 1 + 1 * 2 + 1 * 3
    assert hypervolume(points, (2.5, 2.5)) == 0.25
    assert hypervolume(points, (1, 1)) == 0
