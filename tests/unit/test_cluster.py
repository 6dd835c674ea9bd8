"""Clusters: files round-trip exactly, ranks and paths are right, and each mistake gives one sentence."""

import copy
import json
import math
import pickle
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from offbeat.cluster import ClusterSpec, CollectiveTable, Link, Node, find_device
from offbeat.errors import OffbeatError

GBIT = 1e9 / 8

labels = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda t: t.isprintable() and t.strip())
rates = st.one_of(st.floats(min_value=1e-3, max_value=1e18), st.integers(1, 10**6).map(lambda n: n * GBIT))
times = st.one_of(st.floats(min_value=0, max_value=1e3), st.integers(0, 1000).map(lambda n: n / 1e6))
sizes = st.one_of(st.integers(1, 2**60), st.integers(0, 40).map(lambda i: 2**i))


@st.composite
def nodes(draw):
    return Node(
        address=draw(st.none() | labels),
        device=draw(st.sampled_from(["T4", "H100"]) | labels),
        devices=draw(st.integers(1, 8)),
        memory=draw(sizes),
        peak_flops=draw(rates),
        memory_bandwidth=draw(rates),
        bandwidth=draw(rates),
        latency=draw(times),
        intra_bandwidth=draw(rates),
        intra_latency=draw(times),
        single_flow_bandwidth=draw(st.none() | rates),
        price_per_hour=draw(st.none() | st.floats(0, 1000)),
    )


@st.composite
def clusters(draw):
    kinds = draw(st.lists(nodes(), min_size=1, max_size=3))
    members = [node for node in kinds for _ in range(draw(st.integers(1, 3)))]
    naming = draw(st.sampled_from(["position", "stem", "free"]))
    if naming == "stem":
        stem = draw(labels)
        members = [node.named(f"{stem}-{index}") for index, node in enumerate(members)]
    elif naming == "free":
        names = draw(st.lists(labels, min_size=len(members), max_size=len(members), unique=True))
        members = [node.named(name) for node, name in zip(members, names, strict=True)]
    spec = ClusterSpec(name=draw(labels), nodes=members)
    links = ()
    if len(members) > 1 and draw(st.booleans()):
        ends = spec.nodes[0].name, spec.nodes[-1].name
        links = (Link(a=ends[0], b=ends[1], bandwidth=draw(rates), latency=draw(st.none() | times)),)
    tables = ()
    if draw(st.booleans()):
        ranks = draw(st.permutations(range(spec.world_size)))
        cut = draw(st.integers(0, len(ranks) - 1))
        groups = tuple(tuple(part) for part in (ranks[:cut], ranks[cut:]) if part)
        ascending = sorted(draw(st.sets(sizes, min_size=1, max_size=4)))
        seconds = [draw(st.floats(1e-9, 1e3)) for _ in ascending]
        tables = (CollectiveTable(collective="all_reduce", groups=groups, sizes_bytes=ascending, seconds=seconds),)
    return spec.replace(links=links, tables=tables)


@given(clusters())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_round_trips_are_exact(spec):
    for again in (ClusterSpec.from_yaml(spec.to_yaml()), ClusterSpec.from_json(spec.to_json())):
        assert again == spec
        assert again.digest == spec.digest


@given(clusters(), st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_ranks_and_paths_agree(spec, data):
    assert spec.world_size == sum(node.devices for node in spec.nodes)
    ranks = [rank for index in range(len(spec.nodes)) for rank in spec.ranks_of(index)]
    assert ranks == list(range(spec.world_size))
    a, b = (data.draw(st.integers(0, spec.world_size - 1)) for _ in range(2))
    assert a in spec.ranks_of(spec.node_of(a))
    assert spec.device_of(a) is spec.nodes[spec.node_of(a)]
    assert spec.one_node((a, b)) == (spec.node_of(a) == spec.node_of(b))
    assert spec.bandwidth(a, b) == spec.bandwidth(b, a) > 0
    assert spec.latency(a, b) == spec.latency(b, a) >= 0
    # In node order, a ring passes through each node once, so no interface is shared.
    hops = zip(ranks, ranks[1:] + ranks[:1], strict=True)
    assert spec.ring_bandwidth(ranks) == min(spec.bandwidth(x, y) for x, y in hops)


@given(clusters(), st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_subset_keeps_devices_and_paths(spec, data):
    ranks = data.draw(st.lists(st.integers(0, spec.world_size - 1), min_size=1, unique=True))
    part = spec.subset(ranks)
    assert part.world_size == len(ranks)
    for new_a, a in enumerate(sorted(ranks)):
        assert part.device_of(new_a).name == spec.device_of(a).name
        for new_b, b in enumerate(sorted(ranks)):
            assert part.bandwidth(new_a, new_b) == spec.bandwidth(a, b)
            assert part.latency(new_a, new_b) == spec.latency(a, b)


def test_the_smallest_file():
    spec = ClusterSpec.from_yaml("nodes: [{devices: 4, bandwidth: 10Gbit/s}]")
    (node,) = spec.nodes
    assert (spec.name, spec.world_size, node.name, node.device) == ("cluster", 4, "node0", "generic")
    assert (node.bandwidth, node.latency, node.memory) == (1.25e9, 50e-6, 16 * 2**30)
    assert (node.peak_flops, node.memory_bandwidth) == (10e12, 500e9)
    assert (node.intra_bandwidth, node.intra_latency) == (15.75e9, 5.7e-6)
    assert node.single_flow_bandwidth is None
    assert node.price_per_hour is None


def test_units_and_count_in_a_file():
    spec = ClusterSpec.from_yaml(
        """
        nodes:
        - {name: gpu, count: 3, device: T4, devices: 2, bandwidth: 25 Gbps, latency: 0.1ms, memory: 15GiB}
        - {count: 2, peak_flops: 65TFLOP/s, single_flow_bandwidth: 10Gbit/s, price_per_hour: 2}
        - {name: one, count: 1, address: 10.0.0.7}
        links: [{a: gpu-0, b: node4, bandwidth: 1Gbit/s}, {a: gpu-0, b: gpu-1, latency: 2ms}]
        """
    )
    assert [node.name for node in spec.nodes] == ["gpu-0", "gpu-1", "gpu-2", "node3", "node4", "one-0"]
    assert spec.nodes[1] == spec.nodes[0].named("gpu-1")
    assert (spec.nodes[0].memory, spec.nodes[0].latency, spec.nodes[0].bandwidth) == (15 * 2**30, 1e-4, 25 * GBIT)
    assert (spec.nodes[3].peak_flops, spec.nodes[3].single_flow_bandwidth) == (65e12, 10 * GBIT)
    assert spec.bandwidth(0, 7) == 1 * GBIT
    assert (spec.bandwidth(0, 2), spec.latency(0, 2), spec.latency(0, 7)) == (25 * GBIT, 2e-3, 1e-4)
    assert ClusterSpec.from_yaml(spec.to_yaml()) == spec


def test_a_known_device_brings_its_figures_and_a_file_may_override_them():
    spec = ClusterSpec.from_yaml("nodes: [{device: tesla v100-sxm2-32gb}, {device: T4, memory: 15GiB}]")
    v100, t4 = spec.nodes
    assert (v100.memory, v100.peak_flops, v100.intra_bandwidth) == (32 * 2**30, 15.7e12, 150e9)
    assert (t4.memory, t4.peak_flops, t4.memory_bandwidth) == (15 * 2**30, 8.1e12, 320e9)


def test_yaml_is_readable():
    text = ClusterSpec.preset("B7").to_yaml()
    assert text == (
        "name: B7\nnodes:\n- name: g4dn.12xlarge\n  count: 4\n  device: T4\n  devices: 4\n  memory: 16GiB\n"
        "  peak_flops: 8.1TFLOP/s\n  memory_bandwidth: 320GB/s\n  bandwidth: 50Gbit/s\n  latency: 50us\n"
        "  intra_bandwidth: 15.75GB/s\n  intra_latency: 5.7us\n  single_flow_bandwidth: 10Gbit/s\n"
        "  price_per_hour: 3.912\n"
    )


def test_numbers_without_a_short_text_are_written_plainly():
    spec = ClusterSpec(nodes=[Node(bandwidth=1e9 / 3)])
    assert "bandwidth: 333333333.3333333\n" in spec.to_yaml()
    assert ClusterSpec.from_yaml(spec.to_yaml()) == spec


def test_save_and_load(tmp_path):
    spec = ClusterSpec.preset("B11")
    spec.save(tmp_path / "c.yaml")
    assert ClusterSpec.load(tmp_path / "c.yaml") == spec
    (tmp_path / "any").write_bytes(b"\xef\xbb\xbf \n" + spec.to_json())
    assert ClusterSpec.load(str(tmp_path / "any")) == spec
    (tmp_path / "flow").write_text("{nodes: [{devices: 4, bandwidth: 10Gbit/s}]}")
    assert ClusterSpec.load(tmp_path / "flow").world_size == 4


def test_load_names_the_file(tmp_path):
    def refused(content):
        path = tmp_path / "c"
        path.write_bytes(content)
        with pytest.raises(OffbeatError) as caught:
            ClusterSpec.load(path)
        return str(caught.value).removeprefix(f"{path}: ")

    whole = ClusterSpec.preset("B9").to_json()
    assert refused(whole[:-20]).startswith("not a cluster: it is not valid JSON (")
    assert refused(b"nodes: [{devices: 0}]").startswith("not a cluster: nodes[0].devices: ")
    assert refused(b"nodes: [{name: a}, {name: a}]") == "not a cluster: nodes: two nodes have the name 'a'"
    assert refused(b"\x00\x01").startswith("not a cluster: it is not valid YAML")
    assert refused(b"a: &a [1]\nb: *a") == "YAML aliases are not allowed in a cluster"
    with pytest.raises(OffbeatError, match="none: cannot read the cluster: No such file"):
        ClusterSpec.load(tmp_path / "none")


TWO = "nodes: [{name: a, devices: 2}, {name: b, devices: 2}]\n"
TABLE = TWO + "tables: [{collective: %s, groups: %s, sizes_bytes: %s, seconds: %s}]"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it must hold a mapping with 'nodes', got nothing"),
        ("[1, 2]", "it must hold a mapping with 'nodes', got [1, 2]"),
        ("name: x", "nodes: it is required but not given"),
        ("nodes: []", "nodes: it has too few items, got []"),
        ("nodes: 5", "nodes: it must be a list, got 5"),
        ("nodes: [5]", "nodes[0]: it must be a mapping, got 5"),
        ("nodes: [{name: a}, {name: a}]", "nodes: two nodes have the name 'a'"),
        ("nodes: [{name: node1}, {}]", "nodes: two nodes have the name 'node1'"),
        ("nodes: [{devices: 0}]", "nodes[0].devices: input should be greater than or equal to 1, got 0"),
        ("nodes: [{}, {devices: -3}]", "nodes[1].devices: input should be greater than or equal to 1, got -3"),
        ("nodes: [{devices: 2.0}]", "nodes[0].devices: input should be a valid integer, got 2.0"),
        ("nodes: [{devices: true}]", "nodes[0].devices: input should be a valid integer, got True"),
        ("nodes: [{bandwidth: 0Gbit/s}]", "nodes[0].bandwidth: '0Gbit/s' must be more than zero"),
        ("nodes: [{bandwidth: -5}]", "nodes[0].bandwidth: -5 must be finite and not negative"),
        ("nodes: [{intra_bandwidth: 0}]", "nodes[0].intra_bandwidth: 0 must be more than zero"),
        ("nodes: [{single_flow_bandwidth: 0}]", "nodes[0].single_flow_bandwidth: 0 must be more than zero"),
        (
            "nodes: [{bandwidth: 10furlong}]",
            "nodes[0].bandwidth: '10furlong' has the unknown unit 'furlong'; write it like '10Gbit/s'",
        ),
        ("nodes: [{latency: 5GB}]", "nodes[0].latency: '5GB' has the unknown unit 'GB'; write it like '50us'"),
        ("nodes: [{bandwidth: .nan}]", "nodes[0].bandwidth: nan is not a number with a unit such as '10Gbit/s'"),
        ("nodes: [{latency: .inf}]", "nodes[0].latency: inf is not a number with a unit such as '50us'"),
        ("nodes: [{price_per_hour: .nan}]", "nodes[0].price_per_hour: input should be a finite number, got nan"),
        ("nodes: [{memory: 1e400}]", "nodes[0].memory: '1e400' must be finite and not negative"),
        ("nodes: [{memory: null}]", "nodes[0].memory: None is not a number or a text such as '16GiB'"),
        ("nodes: [{peak_flops: 0}]", "nodes[0].peak_flops: 0 must be more than zero"),
        ("nodes: [{bandwidh: 3}]", "nodes[0].bandwidh: no such field, got 3"),
        ("nodes: [{}]\nnode: 1", "node: no such field, got 1"),
        ("nodes: [{name: ' '}]", "nodes[0].name: ' ' must be 1 to 200 printable characters"),
        ('nodes: [{device: "a\\nb"}]', "nodes[0].device: 'a\\nb' must be 1 to 200 printable characters"),
        ("nodes: [{name: 3}]", "nodes[0].name: input should be a valid string, got 3"),
        ("nodes: [{address: x, count: 3}]", "nodes[0].count: 3 nodes cannot share the address 'x'"),
        ("nodes: [{count: 0}]", "nodes[0].count: input should be greater than or equal to 1, got 0"),
        ("nodes: [{count: 100000}, {}]", "nodes: 100001 nodes are more than the 100000 it may have"),
        (
            "nodes: [{count: 20000, devices: 100}]",
            "nodes: 2000000 devices are more than the 1000000 a cluster may have",
        ),
        (TWO + "links: [{a: a, b: z, latency: 1ms}]", "links[0].b: no node has the name 'z'"),
        (TWO + "links: [{a: q, b: b, latency: 1ms}]", "links[0].a: no node has the name 'q'"),
        (
            TWO + "links: [{a: a, b: a, latency: 1ms}]",
            "links[0].b: 'a' is the same node as a, and a link joins two nodes",
        ),
        (TWO + "links: [{a: a, b: b}]", "links[0]: neither bandwidth nor latency is given for 'a' to 'b'"),
        (TWO + "links: [{a: a, b: b, bandwidth: 0}]", "links[0].bandwidth: 0 must be more than zero"),
        (
            TWO + "links: [{a: a, b: b, latency: 1ms}, {a: b, b: a, latency: 1ms}]",
            "links[1]: 'b' to 'a' is given twice",
        ),
        (
            TABLE % ("all_reduce", "[[0, 4]]", "[1]", "[1s]"),
            "tables[0].groups: rank 4 is outside the cluster's ranks 0 to 3",
        ),
        (
            TABLE % ("all_reduce", "[[0, 1], [1, 2]]", "[1]", "[1s]"),
            "tables[0].groups: rank 1 appears twice, and the groups must be disjoint",
        ),
        (TABLE % ("all_reduce", "[[-1]]", "[1]", "[1s]"), "input should be greater than or equal to 0, got -1"),
        (TABLE % ("all_reduce", "[[]]", "[1]", "[1s]"), "tables[0].groups[0]: it has too few items, got []"),
        (TABLE % ("all_reduce", "[[0]]", "[2, 2]", "[1, 1]"), "sizes_bytes: the sizes must ascend, got 2 after 2"),
        (TABLE % ("all_reduce", "[[0]]", "[1, 2]", "[1]"), "tables[0].seconds: 1 times are given for 2 sizes"),
        (TABLE % ("all_reduce", "[[0]]", "[1]", "[0]"), "tables[0].seconds[0]: 0 must be more than zero"),
        (TABLE % ("allreduce", "[[0]]", "[1]", "[1]"), "tables[0].collective: input should be 'all_reduce', "),
    ],
)
def test_mistakes_are_one_sentence_with_file_field_and_value(text, sentence):
    with pytest.raises(OffbeatError) as caught:
        ClusterSpec.from_yaml(text, "c.yaml")
    message = str(caught.value)
    assert message.startswith("c.yaml: not a cluster: ")
    assert sentence in message
    assert "more)" not in message
    assert "\n" not in message


def test_mistakes_in_python_are_offbeat_errors():
    with pytest.raises(OffbeatError, match="nodes: two nodes have the name 'a'"):
        ClusterSpec(nodes=[Node(name="a"), Node(name="a")])
    with pytest.raises(OffbeatError, match=r"nodes\[0\].devices: .* got 0"):
        ClusterSpec(nodes=[{"devices": 0}])
    with pytest.raises(OffbeatError, match="bandwidth: 'fast' is not a number"):
        ClusterSpec.homogeneous(bandwidth="fast")
    with pytest.raises(OffbeatError, match="nodes: 0 must be a whole number from 1 to"):
        ClusterSpec.homogeneous(nodes=0)
    with pytest.raises(OffbeatError, match=r"nodes\[0\].devices: .* got 0"):
        ClusterSpec.local(0)
    table = CollectiveTable(collective="send", groups=((0, 1),), sizes_bytes=(1,), seconds=(1.0,))
    again = CollectiveTable(collective="send", groups=((1, 0),), sizes_bytes=(2,), seconds=(1.0,))
    with pytest.raises(OffbeatError, match=r"tables\[1\]: send for these groups is given twice"):
        ClusterSpec.local(2).replace(tables=(table, again))


def test_ranks_outside_the_cluster():
    spec = ClusterSpec.preset("B9")
    for call in (
        spec.node_of,
        spec.device_of,
        lambda rank: spec.bandwidth(0, rank),
        lambda rank: spec.latency(rank, 0),
    ):
        for rank in (-1, 5):
            with pytest.raises(OffbeatError, match=f"rank {rank} is outside the cluster, whose ranks are 0 to 4"):
                call(rank)
    with pytest.raises(OffbeatError, match="node 2 is outside the cluster, whose nodes are 0 to 1"):
        spec.ranks_of(2)
    with pytest.raises(OffbeatError, match="node -1 is outside"):
        spec.node_bandwidth(-1)


PRESETS = {  # AutoSync supplement, Table 2; the other papers' testbeds: devices per node, interface in Gbit/s
    "A1": ([1] * 16, [40] * 16),
    "A2": ([1] * 11, [40] * 11),
    "B1": ([4] * 2, [25] * 2),
    "B2": ([4] * 3, [25] * 3),
    "B3": ([4] * 4, [25] * 4),
    "B4": ([4], [50]),
    "B5": ([4] * 2, [50] * 2),
    "B6": ([4] * 3, [50] * 3),
    "B7": ([4] * 4, [50] * 4),
    "B8": ([4] * 8, [50] * 8),
    "B9": ([1, 4], [10, 25]),
    "B10": ([4, 4], [25, 50]),
    "B11": ([4] * 4, [25, 25, 50, 50]),
    "B12": ([1, 4], [25, 50]),
    "pace": ([2] * 8, [25] * 8),
    "pace_10g": ([2] * 6, [10] * 6),
    "dpro": ([8] * 16, [100] * 16),
    "dpro_16": ([8] * 2, [100] * 2),
    "tensoropt": ([8] * 2, [100] * 2),
    "tensoropt_8": ([8], [100]),
    "h100": ([8] * 4, [400] * 4),
    "a100": ([8] * 4, [200] * 4),
    "t4": ([4] * 4, [50] * 4),
    "a10g": ([4] * 4, [40] * 4),
}


def test_all_presets_are_listed():
    assert set(ClusterSpec.presets()) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name):
    spec = ClusterSpec.preset(name)
    devices, gigabits = PRESETS[name]
    assert spec.name == name
    assert [node.devices for node in spec.nodes] == devices
    assert [node.bandwidth / GBIT for node in spec.nodes] == gigabits
    assert spec.is_homogeneous == (name not in {"B9", "B10", "B11", "B12"})
    aws = name.startswith("B") or name in {"t4", "a10g"}
    assert all((node.single_flow_bandwidth == 10 * GBIT) if aws else True for node in spec.nodes)
    assert all((node.price_per_hour is not None) == aws for node in spec.nodes)
    assert all(find_device(node.device).memory == node.memory for node in spec.nodes)
    assert ClusterSpec.from_yaml(spec.to_yaml()) == ClusterSpec.from_json(spec.to_json()) == spec
    assert ClusterSpec.preset(name.lower()).digest == spec.digest


def test_preset_figures():
    b7 = ClusterSpec.preset("B7")
    assert {node.device for node in b7.nodes} == {"T4"}
    assert b7.total_price_per_hour == pytest.approx(4 * 3.912)
    assert (b7.world_size, b7.nodes[0].memory) == (16, 16 * 2**30)
    assert ClusterSpec.preset("A1").nodes[0].device == "TITAN X"
    assert ClusterSpec.preset("A1").total_price_per_hour is None
    assert ClusterSpec.preset("pace_10g").world_size == 12
    dpro = ClusterSpec.preset("dpro")
    assert (dpro.world_size, dpro.nodes[0].memory, dpro.nodes[0].peak_flops) == (128, 32 * 2**30, 15.7e12)
    assert ClusterSpec.preset("tensoropt").nodes[0].memory == 16 * 2**30
    h100 = ClusterSpec.preset("h100").nodes[0]
    assert (h100.peak_flops, h100.intra_bandwidth, h100.memory) == (989e12, 450e9, 80 * 2**30)


def test_heterogeneous_paths():
    """AWS caps one connection at 10 Gbit/s, so the cap rules until it is lifted."""
    b9, b10, b12 = (ClusterSpec.preset(name) for name in ("B9", "B10", "B12"))
    for spec in (b9, b10, b12):
        assert spec.bandwidth(0, spec.world_size - 1) == 10 * GBIT
    assert [b9.node_of(rank) for rank in range(5)] == [0, 1, 1, 1, 1]
    assert [b10.device_of(rank).device for rank in (3, 4)] == ["M60", "T4"]
    assert (b9.node_bandwidth(0), b9.node_bandwidth(1)) == (10 * GBIT, 25 * GBIT)

    def uncapped(spec):
        lifted = tuple(node.model_copy(update={"single_flow_bandwidth": None}) for node in spec.nodes)
        return spec.replace(nodes=lifted)

    expected = {b9: 10, b10: 25, b12: 25}
    for spec, gigabits in expected.items():
        assert uncapped(spec).bandwidth(0, spec.world_size - 1) == gigabits * GBIT
        assert uncapped(spec).bandwidth(spec.world_size - 1, 0) == gigabits * GBIT
        assert spec.bandwidth(spec.world_size - 2, spec.world_size - 1) == 15.75e9


def test_latency_is_the_slower_end_s():
    spec = ClusterSpec(nodes=[{"latency": "10us"}, {"latency": "1ms", "devices": 2, "intra_latency": 0}])
    assert (spec.latency(0, 1), spec.latency(1, 0), spec.latency(1, 2), spec.latency(2, 2)) == (1e-3, 1e-3, 0, 0)
    assert spec.ring_latency([0, 1, 2]) == 1e-3
    assert spec.ring_latency([1]) == 0


def test_a_ring_that_leaves_a_node_twice_shares_its_interface():
    spec = ClusterSpec.homogeneous(nodes=2, devices_per_node=2, bandwidth="10Gbit/s")
    assert spec.ring_bandwidth([0, 1, 2, 3]) == 10 * GBIT
    assert spec.ring_bandwidth([0, 2, 1, 3]) == 5 * GBIT
    assert spec.ring_bandwidth([0, 1]) == spec.nodes[0].intra_bandwidth
    assert spec.ring_bandwidth([0]) == math.inf
    linked = spec.replace(links=[{"a": "node0", "b": "node1", "bandwidth": "4Gbit/s"}])
    assert linked.ring_bandwidth([0, 1, 2, 3]) == 4 * GBIT
    assert linked.ring_bandwidth([0, 2, 1, 3]) == 2 * GBIT
    # Several capped connections still fit into the interface.
    aws = ClusterSpec.preset("B5")
    assert aws.ring_bandwidth([0, 4, 1, 5]) == 10 * GBIT
    with pytest.raises(OffbeatError, match="a rank appears twice"):
        spec.ring_bandwidth([0, 1, 0])


def test_tables_are_found_whatever_the_order():
    table = CollectiveTable(collective="all_gather", groups=((2, 3), (1, 0)), sizes_bytes=(1024,), seconds=(1e-5,))
    spec = ClusterSpec.homogeneous(nodes=2, devices_per_node=2).replace(tables=(table,))
    assert spec.table("all_gather", [[0, 1], [3, 2]]) is table
    assert spec.table("all_gather", [[0, 1]]) is None
    assert spec.table("all_reduce", [[0, 1], [2, 3]]) is None


def test_subset():
    tables = tuple(
        CollectiveTable(collective="all_reduce", groups=groups, sizes_bytes=(1,), seconds=(1.0,))
        for groups in (((0, 1),), ((4, 5),), ((0, 4),))
    )
    spec = ClusterSpec.preset("B7").replace(
        links=[{"a": "g4dn.12xlarge-0", "b": f"g4dn.12xlarge-{end}", "latency": "1ms"} for end in (1, 2)], tables=tables
    )
    six = spec.subset(6)
    assert [node.devices for node in six.nodes] == [4, 2]
    assert len(six.links) == 1
    assert six.tables == tables
    assert spec.subset(5).tables == (tables[0], tables[2])
    part = spec.subset([4, 5, 12])
    assert [node.name for node in part.nodes] == ["g4dn.12xlarge-1", "g4dn.12xlarge-3"]
    assert part.links == ()
    assert [table.groups for table in part.tables] == [((0, 1),)]
    assert spec.subset(16) is spec
    for wrong in (0, 17, True, [], [1, 1]):
        with pytest.raises(OffbeatError, match="subset: "):
            spec.subset(wrong)
    with pytest.raises(OffbeatError, match="rank 99 is outside"):
        spec.subset([0, 99])


def test_digest_ignores_labels_only():
    spec = ClusterSpec.preset("B10")
    assert spec.replace(name="other").digest == spec.digest
    moved = [node.model_copy(update={"name": f"n{i}", "address": f"10.0.0.{i}"}) for i, node in enumerate(spec.nodes)]
    assert spec.replace(nodes=moved).digest == spec.digest
    one = {"a": spec.nodes[0].name, "b": spec.nodes[1].name, "latency": 1e-3}
    assert spec.replace(links=[one]).digest == spec.replace(links=[one | {"a": one["b"], "b": one["a"]}]).digest
    table = CollectiveTable(collective="send", groups=((0, 1),), sizes_bytes=(1,), seconds=(1.0,))
    slower = [node.model_copy(update={"latency": 1.0}) for node in spec.nodes]
    changed = [spec.replace(**change) for change in ({"links": [one]}, {"tables": [table]}, {"nodes": slower})]
    assert len({spec.digest, spec.subset(3).digest, *(other.digest for other in changed)}) == 5
    assert ClusterSpec.preset("B7").digest == ClusterSpec.preset("t4").digest


def test_digest_is_stable_across_versions():
    """Strategy files name clusters by it, so it may change only on purpose."""
    assert ClusterSpec(nodes=[Node(devices=2)]).digest == "fe75aa4ca483581f"


def test_homogeneous():
    spec = ClusterSpec.homogeneous(
        nodes=4, devices_per_node=1, bandwidth="10Gbit/s", latency="50us", memory="16GiB", peak_flops="20TFLOP/s"
    )
    assert (spec.world_size, spec.bandwidth(0, 3), spec.latency(0, 3)) == (4, 1.25e9, 50e-6)
    assert (spec.nodes[2].name, spec.nodes[0].memory, spec.nodes[0].peak_flops) == ("node2", 16 * 2**30, 20e12)
    assert ClusterSpec.homogeneous().nodes[0].memory == 16 * 2**30
    assert ClusterSpec.homogeneous(device="H100", intra_latency="1us").nodes[0].intra_bandwidth == 450e9
    assert spec.is_homogeneous
    assert not spec.replace(links=[{"a": "node0", "b": "node1", "latency": 1}]).is_homogeneous


def test_local():
    spec = ClusterSpec.local(3)
    assert (spec.world_size, len(spec.nodes), spec.nodes[0].address) == (3, 1, "127.0.0.1")
    assert spec.bandwidth(0, 2) == 2.5e9


def test_unknown_presets_list_the_known_ones():
    with pytest.raises(OffbeatError, match=r"unknown cluster preset 'B13'; known: A1, .*, a10g$"):
        ClusterSpec.preset("B13")
    with pytest.raises(OffbeatError, match="nodes: 3 does not fit preset 'B9', whose nodes are of several kinds"):
        ClusterSpec.preset("B9", nodes=3)
    for wrong in (0, -1, True, 2.5, 10**9):
        with pytest.raises(OffbeatError, match="must be a whole number from 1 to 100000"):
            ClusterSpec.preset("h100", nodes=wrong)


@pytest.mark.timing
def test_ten_thousand_devices_are_fast():
    started = time.perf_counter()
    spec = ClusterSpec.preset("h100", nodes=1250)
    assert spec.world_size == 10_000
    assert spec.bandwidth(0, 9_999) == 400 * GBIT
    wide = ClusterSpec.homogeneous(nodes=10_000)
    assert wide.bandwidth(0, 9_999) == 1.25e9
    assert time.perf_counter() - started < 1
    assert len(spec.to_yaml()) < 500
    assert ClusterSpec.from_yaml(spec.to_yaml()) == spec

    def lookups(cluster):
        def once():
            begun = time.perf_counter()
            for rank in range(5_000):
                cluster.bandwidth(rank % 16, (rank * 7) % 16)
            return time.perf_counter() - begun

        return min(once() for _ in range(5))

    assert lookups(spec) < 5 * lookups(ClusterSpec.preset("h100", nodes=2))


def test_values_are_immutable_and_copies_are_checked():
    spec = ClusterSpec.preset("B9")
    with pytest.raises(ValidationError, match="frozen"):
        spec.name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        spec.nodes[0].devices = 3
    assert spec.world_size == 5
    assert spec.model_copy(update={"nodes": spec.nodes[:1]}).world_size == 1
    with pytest.raises(OffbeatError, match="too few items"):
        spec.model_copy(update={"nodes": ()})
    assert copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(ClusterSpec.preset("B9"))


def test_json_schema_describes_what_people_write():
    schema = ClusterSpec.json_schema()
    json.dumps(schema, allow_nan=False)
    node = schema["$defs"]["Node"]
    assert {"count", "bandwidth", "devices", "price_per_hour"} <= set(node["properties"])
    assert {kind["type"] for kind in node["properties"]["bandwidth"]["anyOf"]} == {"number", "string"}
    assert schema["required"] == ["nodes"]
    assert schema["additionalProperties"] is node["additionalProperties"] is False


def test_device_catalogue():
    for name in ("TITAN X", "M60", "T4", "GTX 1080 Ti", "V100-16GB", "A100-80GB", "H100", "A10G"):
        kind = find_device(name)
        assert kind.name == name
        assert kind.fp32_flops <= kind.training_flops
        assert kind.memory_bandwidth > kind.intra_bandwidth > 10e9
    reported = {"Tesla T4": "T4", "NVIDIA H100 80GB HBM3": "H100", "Tesla V100-SXM2-32GB": "V100-32GB"}
    reported |= {"NVIDIA GeForce GTX 1080 Ti": "GTX 1080 Ti", "NVIDIA A100-SXM4-40GB": "A100-40GB"}
    assert {text: find_device(text).name for text in reported} == reported
    assert find_device("abacus") is None
    assert find_device("") is None


def test_scaled_links_reach_nodes_links_and_tables() -> None:
    table = {"collective": "all_reduce", "groups": [[0, 1]], "sizes_bytes": [1024, 2048], "seconds": [1e-3, 3e-3]}
    spec = ClusterSpec(
        nodes=[{"name": "a", "bandwidth": "1Gbit/s", "latency": "10us"}, {"name": "b"}],
        links=[{"a": "a", "b": "b", "bandwidth": "2Gbit/s"}],
        tables=[table],
    )
    scaled = spec.with_links(bandwidth=4, latency=0.5)
    node, before = scaled.nodes[0], spec.nodes[0]
    assert node.bandwidth == 4 * before.bandwidth
    assert node.latency == before.latency / 2
    assert (node.intra_bandwidth, node.intra_latency) == (4 * before.intra_bandwidth, before.intra_latency / 2)
    assert scaled.links[0].bandwidth == 4 * spec.links[0].bandwidth
    assert scaled.links[0].latency is None
    assert scaled.tables[0].seconds == pytest.approx((0.5e-3, 1e-3))
    assert spec.with_links() == spec
