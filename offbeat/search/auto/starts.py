"""Graph + cluster → the strategies a search begins with: known systems at the settings people tune them to.

A search that has these among its candidates returns nothing slower than what tuning one of those systems by hand would
have found, as far as trials can tell.
"""

from collections.abc import Iterator

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph
from offbeat.strategy import Strategy, build_strategy

STARTS: tuple[tuple[str, tuple[dict[str, object], ...]], ...] = (
    (
        "overlap",
        (
            {},
            {"bucket": "256KiB", "slice_bytes": "512KiB"},
            {"bucket": "512KiB", "slice_bytes": "1MiB"},
            {"bucket": "512KiB", "slice_bytes": "1MiB", "in_flight": 2},
            {"bucket": "1MiB", "slice_bytes": "2MiB", "in_flight": 2},
            {"bucket": "4MiB", "slice_bytes": "4MiB"},
            {"bucket": "16MiB", "slice_bytes": "4MiB"},
        ),
    ),
    ("fast_servers", ({}, {"in_flight": 2}, {"shard": "256KiB"})),
    ("all_reduce", tuple({"chunk": chunk} for chunk in (1, 4, 16, 64))),
    ("horovod", tuple({"fusion_bytes": size} for size in ("1MiB", "4MiB", "64MiB"))),
    ("ddp", tuple({"bucket": size} for size in ("512KiB", "1MiB", "2MiB", "4MiB", "25MiB"))),
    ("ps_load_balanced", ({},)),
    ("partitioned_ps", tuple({"threshold": size} for size in ("64KiB", "256KiB", "1MiB"))),
    ("uneven_partitioned_ps", ({},)),
    ("parallax", ({},)),
)
"""Builders and their settings; those of one builder are one family."""


def starting_strategies(graph: ModelGraph, cluster: ClusterSpec) -> list[Strategy]:
    """Each different one once; builders that do not fit the model or the cluster are left out."""
    return list({strategy.digest: strategy for strategy in _built(graph, cluster)}.values())


def _built(graph: ModelGraph, cluster: ClusterSpec) -> Iterator[Strategy]:
    for name, choices in STARTS:
        for settings in choices:
            try:
                yield build_strategy(name, graph, cluster, **settings)
            except StrategyError:
                continue
