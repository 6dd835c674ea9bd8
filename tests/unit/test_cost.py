"""What communication costs: linear fits, measured tables, closed forms, and AutoSync's model."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Layer, Weight, make_graph

from offbeat.cluster import ClusterSpec, CollectiveTable
from offbeat.cost.analytic import Coefficients, features, fit_coefficients, message_features, sync_seconds
from offbeat.cost.tables import Collectives, closed_form, find_table, fit_linear, interpolate
from offbeat.errors import OffbeatError
from offbeat.plan import lower
from offbeat.plan.model import Task
from offbeat.strategy import Shard, Strategy, VariableConfig

SIZES = [2**i for i in range(10, 27, 2)]
GBIT = 1e9 / 8


def collective_seconds(kind, ranks, size, cluster, root=None):
    return Collectives(cluster).seconds(kind, ranks, size, root)


def test_a_fit_recovers_the_constants_it_was_made_from():
    fit = fit_linear(SIZES, [2e-3 + 4e-9 * size for size in SIZES])
    assert fit.latency_seconds == pytest.approx(2e-3, rel=1e-6)
    assert fit.seconds_per_byte == pytest.approx(4e-9, rel=1e-6)
    assert fit.seconds(2**20) == pytest.approx(2e-3 + 4e-9 * 2**20)
    assert fit.seconds(0) == 0.0


def test_disturbed_samples_do_not_move_the_fit():
    sizes = np.repeat(SIZES, 5)
    noise = np.random.default_rng(0).normal(1.0, 0.02, len(sizes))
    times = (1e-3 + 8e-9 * sizes) * noise
    times[::7] *= 6.0
    fit = fit_linear(sizes, times)
    assert fit.latency_seconds == pytest.approx(1e-3, rel=0.05)
    assert fit.seconds_per_byte == pytest.approx(8e-9, rel=0.05)
    slope, _ = np.polyfit(sizes, times, 1)
    assert abs(slope / 8e-9 - 1) > 0.2, "plain least squares would have done"


def test_small_samples_count_as_much_as_large_ones():
    times = np.array([1e-3 + 1e-8 * size for size in SIZES])
    times[-1] *= 1.05
    assert fit_linear(SIZES, times).latency_seconds == pytest.approx(1e-3, rel=0.02)


def test_no_coefficient_is_negative():
    fit = fit_linear([1000, 2000, 4000], [1e-3, 1e-3, 0.5e-3])
    assert fit.latency_seconds >= 0
    assert fit.seconds_per_byte >= 0


def test_one_size_gives_a_bandwidth():
    assert fit_linear([1e6, 1e6], [0.01, 0.01]).seconds(2e6) == pytest.approx(0.02)


TABLE = CollectiveTable(
    collective="all_reduce",
    groups=((0, 1, 2, 3),),
    sizes_bytes=(1024, 2048, 4096, 8192),
    seconds=(1e-3, 1.2e-3, 1.8e-3, 3.0e-3),
)


def test_a_table_is_exact_at_its_sizes():
    for size, seconds in zip(TABLE.sizes_bytes, TABLE.seconds, strict=True):
        assert interpolate(TABLE, size) == pytest.approx(seconds, rel=1e-12)


def test_between_sizes_bandwidth_is_interpolated():
    bandwidth = (2048 / 1.2e-3 + 4096 / 1.8e-3) / 2
    assert interpolate(TABLE, 3072) == pytest.approx(3072 / bandwidth)


def test_beyond_its_ends_a_table_keeps_latency_and_bandwidth():
    assert interpolate(TABLE, 16) == 1e-3
    assert interpolate(TABLE, 81920) == pytest.approx(30e-3)


@given(st.lists(st.floats(1, 1e5), min_size=2, max_size=30))
def test_more_bytes_never_take_less_time(sizes):
    times = [interpolate(TABLE, size) for size in sorted(sizes)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(times))


def cluster(**options):
    return ClusterSpec.homogeneous(**{"nodes": 4, "bandwidth": "1Gbit/s", "latency": "50us"} | options)


def test_a_cluster_with_tables_uses_them_whatever_the_order_of_ranks():
    measured = cluster().replace(tables=(TABLE,))
    assert collective_seconds("all_reduce", (3, 1, 0, 2), 2048, measured) == pytest.approx(1.2e-3)
    assert collective_seconds("broadcast", (0, 1, 2, 3), 2048, measured) != pytest.approx(1.2e-3)
    assert collective_seconds("all_reduce", (0, 1, 2), 2048, measured) != pytest.approx(1.2e-3)


def test_a_table_serves_ranks_that_are_placed_alike():
    table = TABLE.model_copy(update={"groups": ((0, 2),)})
    measured = cluster(nodes=4, devices_per_node=2).replace(tables=(table,))
    assert find_table("all_reduce", (4, 6), measured) == table, "two ranks on two nodes"
    assert find_table("all_reduce", (0, 1), measured) is None, "two ranks of one node"


@pytest.mark.parametrize(
    ("kind", "sent", "latencies"),
    [
        ("all_reduce", 1.5, 6),
        ("reduce_scatter", 0.75, 3),
        ("all_gather", 3, 3),
        ("gather", 3, 3),
        ("reduce", 1, 3),
        ("broadcast", 1, 3),
        ("all_to_all", 0.75, 3),
    ],
)
def test_closed_forms_count_what_the_busiest_rank_sends(kind, sent, latencies):
    size = 10**6
    seconds = collective_seconds(kind, range(4), size, cluster())
    assert seconds == pytest.approx(sent * size / GBIT + latencies * 50e-6)
    if kind != "all_to_all":
        task = Task(0, kind, 0, 0, 0, 1, (0, 1, 2, 3), 0, size, (), (), ())
        assert seconds == pytest.approx(task.link_bytes / GBIT + latencies * 50e-6)


def test_a_send_pays_one_latency():
    assert collective_seconds("send", (0, 3), 10**6, cluster()) == pytest.approx(10**6 / GBIT + 50e-6)


def test_the_slowest_hop_rules_a_ring_and_the_root_a_gather():
    two_nodes = cluster(nodes=2, devices_per_node=4, intra_bandwidth="10GB/s", intra_latency=0)
    ring = closed_form("all_reduce", tuple(range(8)), two_nodes)
    assert ring.seconds_per_byte == pytest.approx(2 * 7 / 8 / GBIT)
    gather = closed_form("gather", tuple(range(8)), two_nodes, root=0)
    assert gather.seconds_per_byte == pytest.approx(4 / GBIT), "four ranks share the root's interface"
    assert closed_form("gather", (0, 1), two_nodes, root=0).seconds_per_byte == pytest.approx(1e-10)


def test_alone_or_with_nothing_to_send_nothing_is_paid():
    assert collective_seconds("all_reduce", (2,), 10**6, cluster()) == 0
    assert collective_seconds("all_reduce", (0, 1), 0, cluster()) == 0
    assert collective_seconds("update", (0, 1), 10**6, cluster()) == 0


def test_an_unknown_collective_is_refused():
    with pytest.raises(OffbeatError, match="unknown collective 'scatter'"):
        collective_seconds("scatter", (0, 1), 1, cluster())
    with pytest.raises(OffbeatError, match="bytes must be at least 0, got -1"):
        collective_seconds("all_reduce", (0, 1), -1, cluster())
    with pytest.raises(OffbeatError, match=r"root 5 is not one of its ranks \[0, 1\]"):
        collective_seconds("gather", (0, 1), 1, cluster(nodes=8), root=5)


def layers(nodes, devices_per_node, shard, **options):
    graph = make_graph([Layer((Weight("a.weight", (256, 128)),)), Layer((Weight("b.weight", (1024, 256)),))])
    where = cluster(nodes=nodes, devices_per_node=devices_per_node)
    configs = {v.name: VariableConfig(shards=(shard(index),)) for index, v in enumerate(graph.variables)}
    return lower(graph, where, Strategy(variables=configs, **options))


A, B = 4 * 256 * 128, 4 * 1024 * 256
"""Bytes of the two weights."""
ONE_ONE = Coefficients(phi_seconds=1.0, delta_seconds=100.0)
"""Counts can be read off the seconds."""


def synchronised(plan, coefficients):
    return sum(sync_seconds(message_features(plan), coefficients))


def test_collectives_cost_what_equation_3_says():
    plan = layers(4, 1, lambda index: Shard())
    w, phi, delta = 4, 1e-4, 2e-5
    expected = sum(2 * (w - 1) / w * size / GBIT + w * phi + delta for size in (A, B))
    assert synchronised(plan, Coefficients(phi, delta)) == pytest.approx(expected)
    sharded = layers(4, 1, lambda index: Shard(synchronizer="sharded"))
    expected = sum(2 * ((w - 1) / w * size / GBIT + w * phi + delta) for size in (A, B))
    assert synchronised(sharded, Coefficients(phi, delta)) == pytest.approx(expected)


def test_servers_cost_what_equation_2_says_and_work_at_once():
    plan = layers(4, 2, lambda index: Shard(synchronizer="parameter_server", placement=(2 * index,)))
    first, second = message_features(plan)
    by_server = {entry.server: entry for entry in (first, second)}
    # Three other machines with two replicas each, up and back.
    assert by_server[0].transfer_seconds + by_server[2].transfer_seconds == pytest.approx(2 * 6 * (A + B) / GBIT)
    assert first.network_overheads == second.network_overheads == 12
    assert synchronised(plan, ONE_ONE) == pytest.approx(12 + 200 + 2 * 6 * B / GBIT), "the busier server alone"


def test_transfer_stations_send_once_for_their_machine():
    plain = layers(2, 4, lambda index: Shard(synchronizer="parameter_server", placement=(0,)))
    stations = layers(2, 4, lambda index: Shard(synchronizer="parameter_server", placement=(0,), stations=(0, 4)))
    for flat, hierarchical in zip(message_features(plain), message_features(stations), strict=True):
        assert flat.transfer_seconds == pytest.approx(4 * hierarchical.transfer_seconds)
        assert hierarchical.network_overheads == 2


def test_features_are_the_maximum_and_the_mean_of_each_family():
    mixed = layers(4, 1, lambda index: Shard() if index else Shard(synchronizer="parameter_server", placement=(0,)))
    served, collective = features(message_features(mixed)).reshape(2, 2, 3)
    assert served[0, 0] == served[1, 0] == pytest.approx(6 * A / GBIT)
    assert collective[0, 0] == pytest.approx(1.5 * B / GBIT)
    assert collective[0, 1] == 4
    served, collective = features(message_features(layers(4, 1, lambda index: Shard()))).reshape(2, 2, 3)
    assert collective[1, 0] == pytest.approx(1.5 * (A + B) / 2 / GBIT)
    assert collective[0, 0] == pytest.approx(1.5 * B / GBIT)
    assert served[0, 0] == 0


def measured_cluster(phi, delta, scale, worlds):
    plain = cluster(nodes=8)
    tables = []
    for world in worlds:
        for kind in ("all_reduce", "all_gather", "broadcast"):
            per_byte = closed_form(kind, tuple(range(world)), plain).seconds_per_byte
            seconds = tuple(scale * per_byte * size + world * phi + delta for size in SIZES)
            tables.append(
                CollectiveTable(
                    collective=kind, groups=(tuple(range(world)),), sizes_bytes=tuple(SIZES), seconds=seconds
                )
            )
    return plain.replace(tables=tuple(tables))


def test_coefficients_are_recovered_from_tables():
    found = fit_coefficients(measured_cluster(3e-5, 2e-4, 1.08, (2, 4, 8)))
    assert found.phi_seconds == pytest.approx(3e-5, rel=1e-4)
    assert found.delta_seconds == pytest.approx(2e-4, rel=1e-4)
    assert found.transfer_scale == pytest.approx(1.08, rel=1e-4)
    alone = fit_coefficients(measured_cluster(3e-5, 2e-4, 1.0, (4,)))
    assert 4 * alone.phi_seconds + alone.delta_seconds == pytest.approx(4 * 3e-5 + 2e-4, rel=1e-4)
    with pytest.raises(OffbeatError, match="has no tables of collectives"):
        fit_coefficients(cluster())
