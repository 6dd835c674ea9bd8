"""The strategy sampler: every draw fits and lowers, and keeps the two constraints."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Layer, Weight, make_graph, random_graphs

from offbeat.cluster import ClusterSpec, Node
from offbeat.errors import OffbeatError
from offbeat.plan import lower
from offbeat.search.auto.neighbours import as_drawn, vary
from offbeat.search.auto.sampler import Sampler, Space, balance_loads, merge_adjacent
from offbeat.strategy import Shard, VariableConfig, build_strategy
from offbeat.strategy.model import SERVERS


def chain(layers: int = 8, width: int = 256):
    return make_graph(
        [Layer((Weight(f"l{i}.weight", (width, width)), Weight(f"l{i}.bias", (width,))), 10**6) for i in range(layers)]
    )


def cluster(bandwidths=("1Gbit/s",) * 4, devices=1) -> ClusterSpec:
    nodes = tuple(
        Node(
            device="cpu", devices=devices, memory=2**30, peak_flops=1e10, bandwidth=each, latency="50us",
            intra_bandwidth="10Gbit/s", intra_latency="5us",
        )
        for each in bandwidths
    )  # fmt: skip
    return ClusterSpec(name="test", nodes=nodes)


def test_the_seed_decides_everything():
    first = Sampler(chain(), cluster(), seed=3).sample(20)
    assert first == Sampler(chain(), cluster(), seed=3).sample(20)
    assert first != Sampler(chain(), cluster(), seed=4).sample(20)
    assert len({strategy.digest for strategy in first}) == 20


@settings(max_examples=30)
@given(random_graphs(), st.integers(0, 99), st.sampled_from((1, 2)))
def test_every_draw_and_every_neighbour_lowers(graph, seed, devices):
    here = cluster(("1Gbit/s", "2Gbit/s", "1Gbit/s"), devices)
    if not graph.gradient_order:
        with pytest.raises(OffbeatError, match="nothing to synchronise"):
            Sampler(graph, here, seed)
        return
    sampler = Sampler(graph, here, seed, Space(small_bytes=16, large_bytes=256, sharded_share=0.2))
    for strategy in sampler.sample(3):
        lower(graph, here, strategy)
        for neighbour in vary(sampler, strategy, 2):
            assert neighbour.digest != strategy.digest
            lower(graph, here, neighbour)


def test_neighbours_of_builders_lower():
    graph, here = chain(), cluster(devices=2)
    for name in ("ddp", "overlap", "partitioned_ps", "hierarchical_ps", "uneven_partitioned_ps", "parallax"):
        for neighbour in vary(Sampler(graph, here, 0), build_strategy(name, graph, here), 4):
            lower(graph, here, neighbour)


def test_neighbours_keep_what_they_do_not_change():
    """A group that no draw would make, of the first and the last layer, survives in neighbours of its strategy."""
    graph, here = chain(), cluster()
    strategy = build_strategy("overlap", graph, here, bucket="300KiB")
    odd = strategy.model_copy(
        update={
            "variables": {
                name: VariableConfig(shards=(Shard(group=0),)) if name[:2] in ("l0", "l7") else VariableConfig()
                for name in strategy.variables
            }
        }
    )
    sampler = Sampler(graph, here, 0)
    assert as_drawn(sampler, odd).variables == odd.variables
    near = vary(sampler, odd, 40)
    same = [s for s in near if s.variables == odd.variables]
    assert same, "some change the schedule alone"
    assert all(s.schedule != odd.schedule for s in same)
    counts = [len({c.shards[0].group for c in s.variables.values()}) for s in near if s.schedule == odd.schedule]
    assert min(counts) < max(counts)
    served = build_strategy("ps_load_balanced", graph, here)
    assert as_drawn(sampler, served).variables == served.variables


def test_size_thresholds_rule_partitioning():
    graph = make_graph([Layer((Weight("small", (8, 8)),)), Layer((Weight("large", (4096, 64)),))])
    for strategy in Sampler(graph, cluster(), 0, Space(small_bytes=1024, large_bytes=2**19)).sample(30):
        assert strategy.config("small").shard_count == 1
        assert strategy.config("large").shard_count > 1


def test_loads_follow_bandwidths():
    sizes = [1000] * 300
    owners = balance_loads(sizes, [1.0, 1.0, 2.0], np.random.default_rng(0))
    shares = np.bincount(owners) / 300
    assert shares == pytest.approx([0.25, 0.25, 0.5], abs=0.03)
    again = balance_loads(sizes, [1.0, 1.0, 2.0], np.random.default_rng(1))
    assert owners != again, "the draw is random among balanced servers"


def test_the_largest_shards_are_spread_first():
    owners = balance_loads([1, 1, 1, 10**6, 10**6], [1.0, 1.0], np.random.default_rng(5))
    assert owners[3] != owners[4]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 12))
def test_groups_are_adjacent_and_balanced(sizes, count):
    groups = merge_adjacent(sizes, count)
    assert groups == sorted(groups)
    assert max(groups) < count
    average = sum(sizes) / count
    for _, members in itertools.groupby(zip(groups, sizes, strict=True), key=lambda pair: pair[0]):
        held = [size for _, size in members]
        assert sum(held[:-1]) < average, "a group that is full takes no more"


def test_zero_groups_leave_every_shard_alone():
    assert merge_adjacent([5, 5, 5], 0) == [None, None, None]


def test_groups_follow_the_order_of_backward():
    graph, here = chain(6), cluster()
    space = Space(collectives_only_share=1.0, small_bytes=2**30, large_bytes=2**30)
    place = {variable.name: position for position, variable in enumerate(graph.variables)}
    for strategy in Sampler(graph, here, 0, space).sample(10):
        numbers = [
            strategy.config(name).shards[0].group
            for name in sorted(place, key=place.__getitem__)
            if strategy.config(name).shards[0].synchronizer == "all_reduce"
        ]
        by_layer = [number for number, _ in itertools.groupby(numbers)]
        assert len(by_layer) == len(set(by_layer)), numbers


def test_both_architectures_and_schedules_are_drawn():
    strategies = Sampler(chain(), cluster(), 0).sample(60)
    kinds = [{c.shards[0].synchronizer for c in s.variables.values()} for s in strategies]
    assert {"all_reduce"} in kinds
    assert {"parameter_server"} in kinds
    assert {"all_reduce", "parameter_server"} in kinds
    assert {s.schedule.mode for s in strategies} == {"auto", "barrier"}
    owners = {shard.owner for s in strategies for c in s.variables.values() for shard in c.shards}
    assert owners == {None, 0, 1, 2, 3}
    assert any(shard.synchronizer in SERVERS for s in strategies for c in s.variables.values() for shard in c.shards)


def test_all_of_autosyncs_space_is_drawn():
    """Several axes of one variable, sharded updates and sufficient factors, beside all-reduce and servers."""
    graph = make_graph(
        [Layer((Weight(f"l{i}.weight", (256, 256)), Weight(f"l{i}.bias", (256,))), 10**6) for i in range(6)]
    )
    dense = tuple(replace(v, factor_rows=4) if len(v.shape) == 2 else v for v in graph.variables)
    graph, here = replace(graph, variables=dense), cluster()
    strategies = Sampler(graph, here, 0).sample(60)
    configs = [config for strategy in strategies for config in strategy.variables.values()]
    kinds = {shard.synchronizer for config in configs for shard in config.shards}
    assert kinds == {"all_reduce", "sharded", "parameter_server", "factor_broadcast"}
    several = [config for config in configs if sum(parts > 1 for parts in config.partition) > 1]
    assert several
    assert max(config.shard_count for config in several) <= Space().max_shards
    assert len({strategy.schedule.credit_bytes for strategy in strategies}) > 1
    mixed = [{config.shards[0].synchronizer for config in s.variables.values()} for s in strategies]
    assert any({"all_reduce", "sharded"} <= kinds for kinds in mixed), "one strategy may have both"
    for strategy in strategies[:10]:
        lower(graph, here, strategy)
        near = vary(Sampler(graph, here, 1), strategy, 8)
        assert all(neighbour.digest != strategy.digest for neighbour in near)
    assert as_drawn(Sampler(graph, here, 0), strategies[0]).variables == strategies[0].variables


def test_factors_are_not_drawn_where_they_are_larger():
    graph = make_graph([Layer((Weight("w", (64, 64)),))])
    graph = replace(graph, variables=(replace(graph.variables[0], factor_rows=512),))
    for strategy in Sampler(graph, cluster(), 0, Space(factor_share=1.0)).sample(20):
        assert strategy.config("w").shards[0].synchronizer != "factor_broadcast"
