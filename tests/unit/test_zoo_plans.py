"""Every builder's strategy for every model of the zoo can be lowered on the papers' clusters."""

from functools import cache

import pytest
from cases import mostly_slow

from offbeat import zoo
from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph
from offbeat.plan import lower
from offbeat.strategy import build_strategy, builders

PRESETS = ("A2", "B7", "B9", "B12")
SMALL_SCALE = 0.05
# Thresholds for published sizes would leave the variables of a small model whole; these cut and fuse them as often.
SMALL_OPTIONS: dict[str, dict[str, object]] = {
    "byteps": {"partition": "16KiB"},
    "ddp": {"first_bucket": "4KiB", "bucket": "100KiB"},
    "overlap": {"bucket": "4KiB", "slice_bytes": "8KiB"},
    "partitioned_all_reduce": {"threshold": "16KiB"},
    "partitioned_ps": {"threshold": "4KiB"},
    "hierarchical_ps": {"threshold": "4KiB"},
    "poseidon": {"threshold": "8KiB"},
    "sharded": {"bucket": "100KiB"},
}


@cache
def captured(model: str, scale: float) -> ModelGraph:
    return zoo.capture(model, scale)


def lower_everywhere(graph: ModelGraph, builder: str, **options: object) -> None:
    if builder == "fsdp" and any(variable.sparse for variable in graph.variables):
        with pytest.raises(StrategyError, match="has a sparse gradient, which fully_shard cannot reduce"):
            build_strategy(builder, graph, ClusterSpec.preset("B7"), **options)
        return
    for preset in PRESETS:
        cluster = ClusterSpec.preset(preset)
        strategy = build_strategy(builder, graph, cluster, **options)
        plan = lower(graph, cluster, strategy)
        plan.check()
        assert {name for task in plan.tasks for name in task.delivers} == {v.name for v in graph.gradient_order}
        if preset == "B7":
            last = cluster.world_size - 1
            assert lower(graph, cluster, strategy, rank=last) == plan.for_rank(last)


def test_small_options_name_builders() -> None:
    assert SMALL_OPTIONS.keys() <= set(builders())


QUICK = ("vgg16", "bert_3l", "lm1b", "ncf_sparse")


# The model varies slowest, so that only one graph is in use at a time.
@pytest.mark.parametrize("builder", builders())
@pytest.mark.parametrize("model", mostly_slow(zoo.names(), QUICK))
def test_small_models_lower(model: str, builder: str) -> None:
    lower_everywhere(captured(model, SMALL_SCALE), builder, **SMALL_OPTIONS.get(builder, {}))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", zoo.names())
def test_full_models_lower(model: str) -> None:
    graph = zoo.capture(model)
    for builder in builders():
        lower_everywhere(graph, builder)
