"""find_frontier: from a captured model to strategies, their costs and the options users choose by.

What is TensorOpt's is tested with operator splits alone.
"""

import math
from functools import partial
from math import prod

import numpy as np
import pytest
import torch
from torch import nn

from offbeat import zoo
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.graph import capture
from offbeat.search.frontier.baselines import baselines, data_parallel, mesh_tensorflow, optcnn, tofu
from offbeat.search.frontier.costs import preferred
from offbeat.search.frontier.evaluate import expanded
from offbeat.search.frontier.find import find_frontier, profile_devices
from offbeat.search.frontier.model import Frontier
from offbeat.search.frontier.picture import _round_ticks, svg
from offbeat.search.frontier.track import total_costs
from offbeat.units import format_bytes, format_seconds

splits = partial(find_frontier, engines=("split",))
split_profile = partial(profile_devices, engines=("split",))


class Wide(nn.Module):
    """Two layers with far more weights than activations."""

    def __init__(self, width: int = 512):
        super().__init__()
        self.first = nn.Linear(64, width, bias=False)
        self.second = nn.Linear(width, 64, bias=False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).square().mean()


@pytest.fixture(scope="module")
def wide():
    return capture(Wide(), (torch.randn(16, 64),), name="wide")


@pytest.fixture(scope="module")
def machine():
    return ClusterSpec.homogeneous(nodes=1, devices_per_node=4, bandwidth="10Gbit/s", latency="10us")


@pytest.fixture(scope="module")
def bert():
    return zoo.capture("bert_3l", scale=0.1, batch=16)


@pytest.fixture(scope="module")
def found(bert):
    return splits(bert, ClusterSpec.preset("tensoropt"), devices=8)


def test_points_trade_memory_for_time(found):
    memory = [point.memory_bytes for point in found.points]
    seconds = [point.time_seconds for point in found.points]
    assert len(found.points) > 5
    assert memory == sorted(memory)
    assert seconds == sorted(seconds, reverse=True)
    for point in found.points:
        assert point.time_seconds == pytest.approx(point.compute_seconds + point.network_seconds)


def test_strategies_name_forward_operators_with_maps_of_their_tensors(found, bert):
    forward = {operator.name: operator for operator in bert.phase("forward")}
    for point in (found.points[0], found.points[-1]):
        assert point.strategy.graph == bert.signature
        assert set(point.strategy.operators) <= set(forward)
        heads = {name for name, operator in forward.items() if operator.kind in ("matmul", "attention", "embedding")}
        assert heads <= set(point.strategy.operators)
        for name, config in point.strategy.operators.items():
            operator = forward[name]
            assert prod(config.mesh) == 8
            shapes = [bert.operator(source).outputs[0].shape for source in operator.inputs]
            shapes += [bert.variable(variable).shape for variable in operator.variables]
            for shape, split in zip(shapes, config.inputs, strict=True):
                assert all(axis < 0 or size % config.mesh[axis] == 0 for size, axis in zip(shape, split, strict=True))
            for output, split in zip(operator.outputs, config.outputs, strict=True):
                assert len(split) == len(output.shape)


def test_strategies_and_frontier_survive_a_file(found, tmp_path):
    found.save(tmp_path / "f.json")
    loaded = Frontier.load(tmp_path / "f.json")
    assert [p.memory_bytes for p in loaded.points] == [p.memory_bytes for p in found.points]
    assert loaded.points[0].strategy == found.points[0].strategy


def test_the_walk_ends_agree_with_the_tables_that_were_tracked(found):
    """Keeping what is fast, or what is small, everywhere costs what FT summed."""
    prices = found.prices
    rng = np.random.default_rng(0)
    choices = np.stack([rng.integers(0, len(configs), 6) for configs in prices.configs], axis=1)
    walked = expanded(prices, choices)
    ends = {False: np.flatnonzero(walked.steps == 0), True: np.append(np.flatnonzero(walked.steps == 0)[1:] - 1, -1)}
    for small, places in ends.items():
        ops, edges = prices.tables(small)
        totals = total_costs(ops, edges, choices)
        np.testing.assert_allclose(walked.time[places], totals[:, 1], rtol=1e-6)
        np.testing.assert_allclose(walked.memory[places] - prices.base_bytes, totals[:, 0], rtol=1e-9)


def test_one_device_needs_everything_and_sends_nothing(wide, machine):
    frontier = splits(wide, machine, devices=1)
    (point,) = frontier.points
    assert point.network_seconds == 0
    weights = 2 * sum(variable.bytes for variable in wide.variables)
    assert point.memory_bytes == weights + wide.activation_bytes + sum(t.bytes for t in wide.inputs)


def test_splitting_weights_over_all_devices_needs_a_fraction_of_the_memory(wide, machine):
    alone = splits(wide, machine, devices=1).points[0].memory_bytes
    frontier = splits(wide, machine)
    assert frontier.points[0].memory_bytes == pytest.approx(alone / 4, rel=0.1)


def test_data_parallelism_is_priced_by_hand(wide, machine):
    """All weights everywhere, a quarter of the batch each, one all-reduce of the gradients and one of the loss."""
    frontier = splits(wide, machine)
    point = data_parallel(frontier.prices)
    weights = sum(variable.bytes for variable in wide.variables)
    kept = wide.activation_bytes / 4 + sum(t.bytes for t in wide.inputs) / 4
    assert point.memory_bytes == pytest.approx(2 * weights + kept, rel=0.02)
    mesh = frontier.prices.mesh
    gradients = mesh.seconds("all_reduce", (0, 1), weights)
    loss = mesh.seconds("all_reduce", (0, 1), 4)
    assert point.network_seconds == pytest.approx(gradients + loss, rel=1e-3)


def test_gradients_are_priced_in_the_buckets_in_which_they_are_summed(machine):
    """Four layers of 1 MiB fill a bucket, one of 16 MiB is longer than one."""
    layers = [nn.Linear(512, 512, bias=False) for _ in range(8)] + [nn.Linear(512, 8192, bias=False)]

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return self.layers(x).square().mean()

    prices = splits(capture(Stack(), (torch.randn(16, 512),), name="stack"), machine).prices
    seconds, sent = prices.mesh.seconds, data_parallel(prices).network_seconds
    buckets = 2 * seconds("all_reduce", (0, 1), 4 * 2**20) + seconds("all_reduce", (0, 1), 16 * 2**20)
    assert sent == pytest.approx(buckets + seconds("all_reduce", (0, 1), 4), rel=1e-3)


def test_baselines_stand_where_the_paper_puts_them(found):
    prices = found.prices
    assert optcnn(prices).time_seconds == pytest.approx(found.points[-1].time_seconds, rel=0.02)
    smallest = found.points[0]
    split = tofu(prices)
    assert split.memory_bytes <= 1.2 * smallest.memory_bytes
    assert split.time_seconds > found.turning_point.time_seconds
    for point in (*mesh_tensorflow(prices), data_parallel(prices), split):
        better = [p for p in found.points if p.memory_bytes <= point.memory_bytes * (1 + 1e-9)]
        assert better[-1].time_seconds <= point.time_seconds * 1.02


def test_min_time_leaves_the_margin_free(bert):
    frontier = splits(bert, ClusterSpec.preset("tensoropt"), devices=4, margin=0.25)
    limit = math.ceil(frontier.points[-1].memory_bytes)
    assert frontier.point_within(limit).memory_bytes <= 0.75 * limit
    with pytest.raises(OffbeatError, match="least that one needs"):
        frontier.min_time(memory="1KiB")


def test_min_devices_takes_as_few_as_fit(wide, machine):
    frontier = splits(wide, machine)
    alone = splits(wide, machine, devices=1).points[0].memory_bytes
    assert frontier.min_devices(memory=math.ceil(alone)).devices == 1
    assert frontier.min_devices(memory=math.ceil(alone) - 1).devices == 2
    assert frontier.min_devices(memory=math.ceil(0.3 * alone)).devices == 4
    with pytest.raises(OffbeatError, match="1 or 2 or 4 devices"):
        frontier.min_devices(memory=1000)


def test_profiling_prices_each_number_of_devices(wide, machine):
    rows = split_profile(wide, machine, (1, 2, 4), "16GiB", price_per_device_hour=3.6)
    assert [row.devices for row in rows] == [1, 2, 4]
    for row in rows:
        assert row.dollars_per_step == pytest.approx(row.devices * row.point.time_seconds / 1000)
    assert split_profile(wide, machine, (1,), "1KiB")[0].point is None


def test_a_memory_limit_that_cannot_be_read_is_refused(wide, machine):
    with pytest.raises(OffbeatError, match="'16 bananas' has the unknown unit"):
        splits(wide, machine).min_devices(memory="16 bananas")
    with pytest.raises(OffbeatError, match="'16 bananas' has the unknown unit"):
        split_profile(wide, machine, (1,), "16 bananas")


def test_other_objectives(found, bert):
    quiet = splits(bert, ClusterSpec.preset("tensoropt"), devices=8, objectives=("memory", "communication"))
    assert min(p.network_seconds for p in quiet.points) <= min(p.network_seconds for p in found.points)
    with pytest.raises(OffbeatError, match="objectives"):
        splits(bert, ClusterSpec.preset("tensoropt"), objectives=("memory", "beauty"))


@pytest.mark.parametrize(("option", "value"), [("devices", 17), ("devices", 0), ("margin", 1.0), ("points", 1)])
def test_bad_options_are_named(wide, option, value):
    with pytest.raises(OffbeatError, match=option):
        splits(wide, ClusterSpec.preset("tensoropt"), **{option: value})


def test_devices_that_are_no_power_of_two(wide):
    cluster = ClusterSpec.homogeneous(nodes=1, devices_per_node=6)
    frontier = splits(wide, cluster)
    assert all(prod(config.mesh) == 6 for config in frontier.points[0].strategy.operators.values())


def test_recurrent_steps_share_one_configuration():
    graph = zoo.capture("seq2seq", scale=0.02, batch=8)
    frontier = splits(graph, ClusterSpec.preset("tensoropt"), devices=4)
    shared: dict[tuple[str, ...], set[str]] = {}
    for name, config in frontier.points[-1].strategy.operators.items():
        operator = graph.operator(name)
        if operator.kind == "matmul" and operator.variables:
            key = (operator.module, operator.target, *operator.variables)
            shared.setdefault(key, set()).add(config.model_dump_json())
    assert max(len(configs) for configs in shared.values()) == 1


def test_what_is_small_and_what_is_fast_differ():
    memory = np.array([[0.0], [-5.0], [10.0]])
    seconds = np.array([[2.0], [3.0], [0.0]])
    assert preferred(memory, seconds, small=True).tolist() == [1]
    assert preferred(memory, seconds, small=False).tolist() == [2]


def test_the_picture_marks_every_system(found, tmp_path):
    found.plot(tmp_path / "frontier.svg")
    text = (tmp_path / "frontier.svg").read_text()
    for label in ("frontier", "of it network", "turning point", "data parallel", "OptCNN", "ToFu", "Mesh-TensorFlow"):
        assert f">{label}<" in text
    assert text == svg(found, baselines(found.prices))
    assert found.graph.name in found.title
    assert f", batch {found.about['batch']}, float32, on {found.devices} devices of {found.cluster.name}" in found.title
    assert f">{found.title}<" in text
    assert text.count("a step") > len(found.points), "every point says its strategy"
    found.plot(tmp_path / "frontier.html")
    page = (tmp_path / "frontier.html").read_text()
    assert f"<title>{found.title}</title>" in page
    assert page.count("split over devices;") == len(found.points), "the table has the words too"
    assert Frontier.from_json(found.to_json()).title == found.title, "a saved frontier is drawn with its title"
    with pytest.raises(OffbeatError, match=r"\.svg"):
        found.plot(tmp_path / "frontier.png")


@pytest.mark.parametrize("ratio", [1.3, 2.5, 7.0, 40.0, 900.0, 1e5])
@pytest.mark.parametrize(("base", "first"), [(10.0, 3.7e-4), (10.0, 0.91), (10.0, 1.0), (2.0, 1024.0), (2.0, 7.7e9)])
def test_ticks_are_round(base, first, ratio):
    ticks = _round_ticks(first, first * ratio, base)
    assert 3 <= len(ticks) <= 8
    assert ticks == sorted(ticks)
    assert first * (1 - 1e-6) <= ticks[0] < ticks[-1] <= first * ratio * (1 + 1e-6)
    for tick in ticks:
        label = (format_bytes(tick) if base == 2 else format_seconds(tick)).split()[0]
        digits = label.replace(".", "").strip("0")
        assert len(digits) <= (2 if ratio > 2 else 3) or math.log2(float(label)).is_integer(), label


class Shifted(nn.Module):
    """A bias that is viewed before it is added, after the product that begins the unit."""

    def __init__(self):
        super().__init__()
        self.product = nn.Linear(64, 64, bias=False)
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return (self.product(x) + self.shift.view(1, 64)).square().mean()


def test_the_gradient_of_a_viewed_bias_is_summed_over_the_batch(machine):
    graph = capture(Shifted(), (torch.randn(16, 64),), name="shifted")
    frontier = splits(graph, machine)
    mesh = frontier.prices.mesh
    gradients = mesh.seconds("all_reduce", (0, 1), sum(variable.bytes for variable in graph.variables))
    loss = mesh.seconds("all_reduce", (0, 1), 4)
    assert data_parallel(frontier.prices).network_seconds == pytest.approx(gradients + loss, rel=1e-3)
