"""What each builder promises about the strategy it makes."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Layer, Weight, make_graph, random_graphs

from offbeat.cluster import ClusterSpec, Node
from offbeat.errors import OffbeatError, StrategyError
from offbeat.graph import ModelGraph
from offbeat.strategy import Encoder, Schedule, Strategy, build_strategy, builders, check_fits, register_builder
from offbeat.strategy import registry as registry_module

NAMES = (
    "all_reduce",
    "byteps",
    "ddp",
    "fast_servers",
    "fsdp",
    "hierarchical_ps",
    "horovod",
    "overlap",
    "parallax",
    "partitioned_all_reduce",
    "partitioned_ps",
    "poseidon",
    "ps",
    "ps_load_balanced",
    "random_axis_all_reduce",
    "sharded",
    "tictac",
    "uneven_partitioned_ps",
    "wfbp",
)
BY_VARIABLE = tuple(name for name in NAMES if name != "fsdp")
SERVED = ("byteps", "hierarchical_ps", "parallax", "partitioned_ps", "poseidon", "ps", "ps_load_balanced")
CLUSTERS = {
    "one rank": ClusterSpec.homogeneous(nodes=1),
    "four nodes": ClusterSpec.homogeneous(nodes=4),
    "two by two": ClusterSpec.homogeneous(nodes=2, devices_per_node=2),
    "unequal": ClusterSpec(
        nodes=(Node(bandwidth="10Gbit/s", devices=2), Node(bandwidth="10Gbit/s"), Node(bandwidth="1Gbit/s"))
    ),
}
FOUR, TWO_BY_TWO, UNEQUAL = CLUSTERS["four nodes"], CLUSTERS["two by two"], CLUSTERS["unequal"]
MIB = 2**20

MIXED = make_graph(
    [
        Layer((Weight("embedding", (50_000, 64), sparse=True),)),
        Layer((Weight("fc1.weight", (1024, 4096), factor_rows=8), Weight("fc1.bias", (1024,)))),
        Layer((Weight("norm", (1024,), "float16"),)),
        Layer((Weight("fc2.weight", (1009, 1024), factor_rows=8), Weight("fc2.bias", (1009,), "float16"))),
        Layer((Weight("scale", ()), Weight("frozen", (7,), trained=False))),
    ],
    unused=[Weight("unused", (5,))],
)


def stack(*sizes: int, dtype: str = "float32", seconds: float | None = None) -> ModelGraph:
    """One layer per size; the size is the number of elements of its only weight."""
    return make_graph([Layer((Weight(f"v{i}", (size,), dtype),), seconds=seconds) for i, size in enumerate(sizes)])


def groups(strategy: Strategy) -> list[set[str]]:
    """The fused messages, in the order of their numbers."""
    found: dict[int, set[str]] = {}
    for name, config in strategy.variables.items():
        for shard in config.shards:
            if shard.group is not None:
                found.setdefault(shard.group, set()).add(name)
    return [found[number] for number in sorted(found)]


def owners(strategy: Strategy, name: str) -> list[int | None]:
    return [shard.owner for shard in strategy.variables[name].shards]


def server_bytes(strategy: Strategy, graph: ModelGraph) -> Counter[int | None]:
    """Bytes each server owns, for strategies whose variables are whole."""
    loads: Counter[int | None] = Counter()
    for name in strategy.variables:
        loads[owners(strategy, name)[0]] += graph.variable(name).bytes
    return loads


def test_the_builders_are_these():
    assert tuple(name for name in builders() if not name.startswith("test_")) == NAMES


@pytest.mark.parametrize("name", BY_VARIABLE)
@given(graph=random_graphs(), where=st.sampled_from(sorted(CLUSTERS)))
@settings(max_examples=25, deadline=None)
def test_any_graph_gets_a_fitting_strategy(name: str, graph: ModelGraph, where: str):
    cluster = CLUSTERS[where]
    strategy = build_strategy(name, graph, cluster)
    assert list(strategy.variables) == [v.name for v in graph.variables if v.gradient_from is not None]
    assert (strategy.name, strategy.graph, strategy.cluster) == (name, graph.signature, cluster.digest)
    assert all(len({graph.variable(member).dtype for member in group}) == 1 for group in groups(strategy))
    assert Strategy.from_json(strategy.to_json()) == strategy


@pytest.mark.parametrize("name", BY_VARIABLE)
def test_sparse_gradients_stay_sparse(name: str):
    config = build_strategy(name, MIXED, FOUR).variables["embedding"]
    expected = "sparse_parameter_server" if name in (*SERVED, "uneven_partitioned_ps") else "sparse_all_gather"
    assert {shard.synchronizer for shard in config.shards} == {expected}


@pytest.mark.parametrize("name", BY_VARIABLE)
def test_a_builder_makes_the_same_strategy_every_time(name: str):
    assert build_strategy(name, MIXED, UNEQUAL) == build_strategy(name, MIXED, UNEQUAL)


@pytest.mark.parametrize("name", BY_VARIABLE)
def test_schedule(name: str):
    expected = {
        "horovod": Schedule(mode="barrier"),
        "ddp": Schedule(mode="barrier"),
        "wfbp": Schedule(mode="barrier"),
        "tictac": Schedule(policy="priority"),
        "byteps": Schedule(policy="priority"),
        "overlap": Schedule(policy="priority", slice_bytes=2 * 2**20),
        "fast_servers": Schedule(policy="priority", slice_bytes=2**19, in_flight=4),
    }
    assert build_strategy(name, MIXED, FOUR).schedule == expected.get(name, Schedule())


def test_all_reduce_merges_adjacent_variables_in_forward_order():
    strategy = build_strategy("all_reduce", stack(*[10] * 7), FOUR, chunk=3)
    assert groups(strategy) == [{"v0", "v1", "v2"}, {"v3", "v4", "v5"}, {"v6"}]


def test_all_reduce_encodes_dense_gradients_only():
    encoder = Encoder(name="topk", ratio=0.01)
    strategy = build_strategy("all_reduce", MIXED, FOUR, encoder=encoder)
    assert strategy.variables["fc1.weight"].shards[0].encoder == encoder
    assert strategy.variables["embedding"].shards[0].encoder == Encoder()
    assert build_strategy("all_reduce", MIXED, FOUR, encoder="fp16").variables["scale"].shards[0].encoder.name == "fp16"


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    halves=st.lists(st.booleans(), min_size=30, max_size=30),
    first=st.integers(1, 200),
    later=st.integers(1, 400),
)
@settings(deadline=None)
def test_ddp_buckets_are_torchs(sizes: list[int], halves: list[bool], first: int, later: int):
    layers = [
        Layer((Weight(f"v{i}", (size,), "float16" if half else "float32"),))
        for i, (size, half) in enumerate(zip(sizes, halves, strict=False))
    ]
    graph = make_graph(layers)
    ready = graph.gradient_order
    tensors = [torch.empty(variable.shape, dtype=getattr(torch, variable.dtype)) for variable in ready]
    indices, _ = dist._compute_bucket_assignment_by_size(
        tensors, [first, later], [False] * len(tensors), list(range(len(tensors)))
    )
    strategy = build_strategy("ddp", graph, FOUR, first_bucket=first, bucket=later)
    expected = [{ready[index].name for index in bucket} for bucket in indices]
    # torch appends unfilled buckets in the order of a hash table, so only the sets can be compared.
    assert sorted(map(sorted, groups(strategy))) == sorted(map(sorted, expected))


def test_ddp_starts_with_a_small_bucket():
    strategy = build_strategy("ddp", stack(*[MIB // 8] * 110), FOUR)
    sizes = [len(group) * MIB // 2 for group in groups(strategy)]
    assert sizes == [MIB, 25 * MIB, 25 * MIB, 4 * MIB]
    assert groups(strategy)[0] == {"v109", "v108"}


def test_ddps_buckets_may_grow():
    strategy = build_strategy("ddp", stack(*[MIB // 8] * 30), FOUR, first_bucket="1MiB", bucket="5MiB", growth=2)
    assert [len(group) * MIB // 2 for group in groups(strategy)] == [MIB, 2 * MIB, 4 * MIB, 5 * MIB, 3 * MIB]


def test_horovod_fuses_what_one_cycle_finds():
    graph = stack(*[1] * 7, seconds=0.0021)
    assert groups(build_strategy("horovod", graph, FOUR)) == [{"v6", "v5"}, {"v4", "v3"}, {"v2", "v1", "v0"}]
    assert groups(build_strategy("horovod", graph, FOUR, cycle="1s")) == [{f"v{i}" for i in range(7)}]


def test_horovod_estimates_ready_times_on_the_slowest_device():
    graph = make_graph([Layer((Weight(f"v{i}", (4,)),), flops=10**9) for i in range(3)])
    fast = Node(peak_flops="10TFLOP/s", memory_bandwidth="900GB/s")
    slow = Node(peak_flops="0.25TFLOP/s", memory_bandwidth="900GB/s")
    assert len(groups(build_strategy("horovod", graph, ClusterSpec(nodes=(fast, fast))))) == 1
    assert len(groups(build_strategy("horovod", graph, ClusterSpec(nodes=(fast, slow))))) == 3


def test_horovod_bounds_the_size_of_a_message():
    graph = stack(100, 10, 10, 10, seconds=0.0)
    found = groups(build_strategy("horovod", graph, FOUR, fusion_bytes=80))
    assert found == [{"v3", "v2"}, {"v1"}, {"v0"}]


def test_horovod_looks_past_a_small_tensor_of_another_dtype():
    weights = [Weight("c", (10,)), Weight("b", (2,), "float16"), Weight("a", (10,))]
    graph = make_graph([Layer((weight,), seconds=0.0) for weight in weights])
    assert groups(build_strategy("horovod", graph, FOUR)) == [{"a", "c"}, {"b"}]


@pytest.mark.parametrize("name", ["wfbp", "tictac"])
def test_each_gradient_travels_alone(name: str):
    strategy = build_strategy(name, MIXED, FOUR)
    assert groups(strategy) == []
    assert all(config.shard_count == 1 for config in strategy.variables.values())


def test_ps_puts_everything_on_one_rank():
    strategy = build_strategy("ps", MIXED, FOUR, server=2)
    assert {owner for name in strategy.variables for owner in owners(strategy, name)} == {2}


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40))
@settings(deadline=None)
def test_balanced_loads_differ_by_at_most_the_largest_variable(sizes: list[int]):
    graph = stack(*sizes)
    strategy = build_strategy("ps_load_balanced", graph, FOUR)
    loads = server_bytes(strategy, graph)
    assert max(loads.values()) - min(loads[rank] for rank in range(4)) <= max(sizes) * 4


def test_servers_are_one_per_node_or_every_rank():
    graph = stack(*[10] * 8)
    assert set(server_bytes(build_strategy("ps_load_balanced", graph, TWO_BY_TWO), graph)) == {0, 2}
    every = build_strategy("ps_load_balanced", graph, TWO_BY_TWO, servers="ranks")
    assert server_bytes(every, graph) == dict.fromkeys(range(4), 80)


def test_partitioned_ps_spreads_large_variables_over_all_servers():
    strategy = build_strategy("partitioned_ps", MIXED, FOUR)
    assert strategy.variables["fc1.weight"].partition == (4, 1)
    assert sorted(owners(strategy, "fc1.weight")) == [0, 1, 2, 3]
    assert strategy.variables["fc1.bias"].shard_count == 1
    few = build_strategy("partitioned_ps", MIXED, FOUR, threshold=0, max_shards=2)
    assert {config.shard_count for name, config in few.variables.items() if name != "scale"} == {2}
    flat = make_graph([Layer((Weight("wide", (2, MIB)),))])
    assert build_strategy("partitioned_ps", flat, FOUR).variables["wide"].partition == (2, 1)


def test_large_variables_are_kept_where_links_are_fast():
    strategy = build_strategy("fast_servers", MIXED, UNEQUAL, threshold="1MiB", shard="512KiB")
    assert {name for name, config in strategy.variables.items() if config.shards[0].owner is not None} == {
        "fc1.weight",
        "fc2.weight",
    }
    assert strategy.variables["fc1.weight"].partition == (32, 1)
    owners = Counter(shard.owner for shard in strategy.variables["fc1.weight"].shards)
    assert owners == {0: 16, 2: 16}


def test_uneven_shards_are_uneven():
    strategy = build_strategy("uneven_partitioned_ps", MIXED, FOUR)
    assert strategy.variables["fc1.weight"].partition == (3, 1)
    assert strategy.variables["fc2.weight"].partition == (2, 1)
    for name, config in strategy.variables.items():
        if name != "scale":
            assert MIXED.variable(name).shape[0] % config.partition[0] != 0
    assert strategy.variables["scale"].partition == ()


def test_uneven_shards_follow_the_bandwidth_of_their_servers():
    graph = make_graph([Layer((Weight("a", (12, 100)),)), Layer((Weight("b", (12, 100)),))])
    config = build_strategy("uneven_partitioned_ps", graph, UNEQUAL, servers="ranks").variables["a"]
    assert config.partition == (5, 1)
    servers = [shard.owner for shard in config.shards]
    lengths = [b - a for a, b in zip((0, *config.cuts[0]), (*config.cuts[0], 12), strict=True)]
    slow = UNEQUAL.world_size - 1
    assert sum(lengths) == 12
    assert all(length == 1 for length, rank in zip(lengths, servers, strict=True) if rank == slow)
    assert min(length for length, rank in zip(lengths, servers, strict=True) if rank != slow) >= 2


def test_hierarchical_ps_has_a_station_on_each_node_of_many_ranks():
    strategy = build_strategy("hierarchical_ps", MIXED, UNEQUAL)
    assert {shard.stations for shard in strategy.variables["fc1.weight"].shards} == {(0,)}
    assert {shard.stations for shard in strategy.variables["embedding"].shards} == {()}
    two = build_strategy("hierarchical_ps", MIXED, TWO_BY_TWO)
    assert two.variables["fc1.weight"].shards[0].stations == (0, 2)
    flat = build_strategy("hierarchical_ps", MIXED, FOUR)
    assert flat.variables == build_strategy("partitioned_ps", MIXED, FOUR).variables


def test_partitioned_all_reduce_cuts_large_variables_by_rows():
    strategy = build_strategy("partitioned_all_reduce", MIXED, FOUR, threshold="1MiB")
    assert strategy.variables["fc1.weight"].partition == (16, 1)
    assert strategy.variables["fc2.weight"].partition == (4, 1)
    assert strategy.variables["fc1.bias"].partition == ()
    assert build_strategy("partitioned_all_reduce", MIXED, FOUR, threshold="1MiB", max_shards=3).variables[
        "fc1.weight"
    ].partition == (3, 1)
    assert groups(strategy) == []


def test_random_axis_depends_on_the_seed_alone():
    graph = make_graph([Layer((Weight(f"v{i}", (6, 35, 1)),)) for i in range(20)])
    strategy = build_strategy("random_axis_all_reduce", graph, FOUR, seed=3)
    partitions = {config.partition for config in strategy.variables.values()}
    assert partitions == {(2, 1, 1), (1, 5, 1)}
    assert strategy == build_strategy("random_axis_all_reduce", graph, FOUR, seed=3)
    assert strategy != build_strategy("random_axis_all_reduce", graph, FOUR, seed=4)
    prime = build_strategy("random_axis_all_reduce", stack(1009), FOUR, max_shards=8)
    assert prime.variables["v0"].partition == (8,)


def test_parallax_chooses_by_the_kind_of_gradient():
    strategy = build_strategy("parallax", MIXED, FOUR)
    assert strategy.variables["embedding"].partition == (4, 1)
    assert sorted(owners(strategy, "embedding")) == [0, 1, 2, 3]
    dense = [config for name, config in strategy.variables.items() if name != "embedding"]
    assert {shard.synchronizer for config in dense for shard in config.shards} == {"all_reduce"}
    assert len(groups(strategy)) == 2


@pytest.mark.parametrize(("batch", "chosen"), [(32, "factor_broadcast"), (4096, "parameter_server")])
def test_poseidon_sends_factors_only_where_they_are_smaller(batch: int, chosen: str):
    graph = make_graph([Layer((Weight("fc", (4096, 4096), factor_rows=batch), Weight("bias", (4096,))))])
    strategy = build_strategy("poseidon", graph, FOUR)
    assert {shard.synchronizer for shard in strategy.variables["fc"].shards} == {chosen}
    assert strategy.variables["bias"].shards[0].synchronizer == "parameter_server"


def test_poseidon_switches_where_the_bytes_are_equal():
    def kind(batch: int) -> str:
        graph = make_graph([Layer((Weight("fc", (512, 512), factor_rows=batch),))])
        return build_strategy("poseidon", graph, FOUR).variables["fc"].shards[0].synchronizer

    # K (P−1) (M+N) = 2 MN (P−1)/P at K = 128 for M = N = 512 and P = 4.
    assert (kind(127), kind(128)) == ("factor_broadcast", "parameter_server")


def test_sharded_buckets_follow_the_gradients():
    strategy = build_strategy("sharded", stack(*[100] * 5), FOUR, bucket=800)
    assert groups(strategy) == [{"v4", "v3"}, {"v2", "v1"}, {"v0"}]
    assert {shard.synchronizer for config in strategy.variables.values() for shard in config.shards} == {"sharded"}


def test_byteps_partitions_are_small_and_spread():
    strategy = build_strategy("byteps", MIXED, FOUR)
    assert strategy.variables["fc1.weight"].partition == (4, 1)
    assert sorted(owners(strategy, "fc1.weight")) == [0, 1, 2, 3]
    fine = build_strategy("byteps", MIXED, FOUR, partition="1KiB")
    assert fine.variables["fc1.weight"].partition == (1024, 1)
    assert set(Counter(owners(fine, "fc1.weight")).values()) == {256}


@pytest.mark.parametrize(
    ("name", "option", "value", "sentence"),
    [
        ("all_reduce", "chunk", 0, "chunk: 0 is not a whole number of at least 1"),
        ("all_reduce", "chunk", True, "chunk: True is not a whole number of at least 1"),
        ("all_reduce", "encoder", "zip", "encoder: 'zip' is neither an Encoder nor one of none, fp16"),
        ("all_reduce", "encoder", "topk", "encoder: encoder 'topk' needs a ratio; pass an Encoder"),
        ("ddp", "bucket", "25 MeB", "bucket: '25 MeB' has the unknown unit 'MeB'"),
        ("ddp", "first_bucket", 0, "first_bucket: 0 is less than 1 bytes"),
        ("ddp", "growth", 1, "growth: 1 is not a whole number of at least 2"),
        ("horovod", "cycle", "0ms", "cycle: '0ms' must be more than 0 seconds"),
        ("horovod", "fusion_bytes", -1, "fusion_bytes: -1 must be finite and not negative"),
        ("ps", "server", 4, "server: rank 4 is outside the cluster of 4 ranks"),
        ("ps", "server", -1, "server: -1 is not a whole number of at least 0"),
        ("ps_load_balanced", "servers", "racks", "servers: 'racks' is neither 'nodes' nor 'ranks'"),
        ("partitioned_ps", "max_shards", 0, "max_shards: 0 is not a whole number of at least 1"),
        ("random_axis_all_reduce", "seed", "x", "seed: 'x' is not a whole number of at least 0"),
        ("fast_servers", "shard", "1B", "shard: '1B' is less than 1024 bytes"),
        ("byteps", "partition", "big", "partition: 'big' is not a number with a unit"),
        ("all_reduce", "bucket", 1, "builder 'all_reduce' has no option 'bucket'; it has chunk, encoder"),
        ("wfbp", "chunk", 1, "builder 'wfbp' has no option 'chunk'; it has none"),
    ],
)
def test_a_bad_option_is_named_in_one_sentence(name: str, option: str, value: object, sentence: str):
    with pytest.raises(OffbeatError) as caught:
        build_strategy(name, MIXED, FOUR, **{option: value})
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_an_unknown_builder_is_answered_with_the_known_ones():
    with pytest.raises(StrategyError, match="unknown builder 'al_reduce'; known: all_reduce, byteps, ddp"):
        build_strategy("al_reduce", MIXED, FOUR)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch):
    builders()
    monkeypatch.setattr(registry_module, "_builders", dict(registry_module._builders))


@pytest.mark.usefixtures("registered")
def test_a_custom_builder_is_one_decorated_function():
    @register_builder("test_custom")
    def build(graph: ModelGraph, cluster: ClusterSpec, *, groups: int) -> Strategy:
        return Strategy(accumulation=groups)

    assert "test_custom" in builders()
    strategy = build_strategy("test_custom", MIXED, FOUR, groups=3)
    assert (strategy.name, strategy.accumulation, strategy.graph) == ("test_custom", 3, MIXED.signature)
    check_fits(strategy, MIXED, FOUR)
    with pytest.raises(StrategyError, match="builder 'test_custom' needs the option 'groups'"):
        build_strategy("test_custom", MIXED, FOUR)
    with pytest.raises(StrategyError, match=r"builder 'test_custom': accumulation: .* got 0"):
        build_strategy("test_custom", MIXED, FOUR, groups=0)


@pytest.mark.usefixtures("registered")
def test_a_builder_returns_a_strategy():
    register_builder("test_wrong")(lambda graph, cluster: {})
    with pytest.raises(StrategyError, match="builder 'test_wrong' returned dict, not a Strategy"):
        build_strategy("test_wrong", MIXED, FOUR)


@pytest.mark.usefixtures("registered")
def test_a_builders_name_is_taken_once():
    with pytest.raises(StrategyError, match="a builder named 'ddp' already exists"):
        register_builder("ddp")(lambda graph, cluster: Strategy())


def test_overlap_fuses_small_modules_and_spares_large_ones_a_message_of_little():
    sizes = {"a": 64, "b": 512, "c": 256, "d": 64, "e": 512, "f": 64}
    weights = {n: (Weight(f"{n}.weight", (side, side)), Weight(f"{n}.bias", (side,))) for n, side in sizes.items()}
    graph = make_graph([Layer(pair) for pair in weights.values()])
    strategy = build_strategy("overlap", graph, FOUR, bucket="512KiB")
    groups: dict[int | None, set[str]] = {}
    for name, config in strategy.variables.items():
        groups.setdefault(config.shards[0].group, set()).add(name)
    modules = [{name.partition(".")[0] for name in group} for group in groups.values()]
    assert sorted(modules, key=sorted) == [{"a"}, {"b"}, {"c", "d"}, {"e", "f"}]
