"""The frontier over all engines: what each has on it, which one a memory limit asks for, and what a job takes."""

from types import SimpleNamespace

import orjson
import pytest

import offbeat
from offbeat import zoo
from offbeat.cluster import ClusterSpec
from offbeat.cost.memory import peak_memory
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.graph.share import batch_share
from offbeat.plan import lower
from offbeat.search import within
from offbeat.search.frontier.baselines import data_parallel
from offbeat.search.frontier.find import ModelFrontier, find_frontier, profile_devices
from offbeat.search.frontier.model import Frontier, FrontierPoint
from offbeat.search.frontier.picture import svg
from offbeat.search.frontier.rehearse import rehearsed
from offbeat.simulate import step_seconds
from offbeat.strategy import Strategy, build_strategy

FOUR = ClusterSpec.homogeneous(nodes=4, devices_per_node=1, bandwidth="10Gbit/s", device="A100")
BATCH = 16
REPLICAS = ("replicated", "sharded", "fsdp")


def gpt2(batch: int) -> ModelGraph:
    return zoo.capture("gpt2", 0.15, batch=batch).with_optimizer("AdamW", 2)


@pytest.fixture(scope="module")
def whole() -> ModelGraph:
    return gpt2(BATCH)


@pytest.fixture(scope="module")
def part() -> ModelGraph:
    """What one of four ranks computes."""
    return gpt2(BATCH // 4)


@pytest.fixture(scope="module")
def found(whole: ModelGraph) -> ModelFrontier:
    return find_frontier(whole, FOUR)


@pytest.mark.parametrize(
    ("name", "scale"), [("mlp", 0.2), ("bert_3l", 0.1), ("vgg16", 0.1), ("seq2seq", 0.02), ("transformer", 0.1)]
)
def test_a_share_of_the_batch_is_what_capturing_less_of_it_gives(name: str, scale: float):
    shared = batch_share(zoo.capture(name, scale, batch=16), 4)
    captured = zoo.capture(name, scale, batch=4)
    assert shared.inputs == captured.inputs
    assert shared.variables == captured.variables
    for field in ("flops", "bytes_read", "bytes_written", "activation_bytes"):
        totals = [sum(getattr(operator, field) for operator in graph.operators) for graph in (shared, captured)]
        assert totals[0] == pytest.approx(totals[1], rel=1e-3), field
    plans = [lower(graph, FOUR, build_strategy("ddp", graph, FOUR)) for graph in (shared, captured)]
    assert peak_memory(plans[0], 0).total == pytest.approx(peak_memory(plans[1], 0).total, rel=0.01)
    assert step_seconds(plans[0]) == pytest.approx(step_seconds(plans[1]), rel=0.01)


def test_a_batch_that_cannot_be_shared_leaves_operator_splits():
    graph = zoo.capture("mlp", 0.2, batch=6)
    frontier = find_frontier(graph, FOUR)
    assert frontier.engines == ("split",)
    assert "a batch of 6 cannot be shared equally by 4 devices" in frontier.notes[-1]
    with pytest.raises(OffbeatError, match="cannot be shared equally"):
        find_frontier(graph, FOUR, engines=("replicated",))


def test_no_point_of_any_engine_beats_another(found: ModelFrontier):
    assert len(found.engines) > 1
    memory, seconds = ([getattr(p, name) for p in found.points] for name in ("memory_bytes", "time_seconds"))
    assert memory == sorted(memory)
    assert seconds == sorted(seconds, reverse=True)
    for point in found.points:
        assert point.engine == point.strategy.engine
        assert point.time_seconds == pytest.approx(point.compute_seconds + point.network_seconds)


def test_points_of_replicas_are_what_replay_and_memory_say(found: ModelFrontier, part: ModelGraph):
    points = [point for point in found.points if point.engine != "split"]
    for point in points:
        plan = lower(part, FOUR, point.strategy)
        assert point.time_seconds == pytest.approx(step_seconds(plan), rel=0.01)
        assert point.memory_bytes == pytest.approx(peak_memory(plan, 0).total, rel=0.01)


def test_a_limit_that_replication_breaks_is_answered_by_another_engine(
    whole: ModelGraph, part: ModelGraph, monkeypatch: pytest.MonkeyPatch
):
    """And a job with that limit takes the same point."""
    frontier = find_frontier(whole, FOUR, engines=REPLICAS)
    replicated = peak_memory(lower(part, FOUR, build_strategy("ddp", part, FOUR)), 0).total
    chosen = frontier.point_within(replicated // 2)
    assert chosen.memory_bytes <= replicated // 2
    assert chosen.engine == "fsdp"
    monkeypatch.setattr(within, "SEARCH_SECONDS", 5.0)
    alone = SimpleNamespace(rank=0, size=1, all_gather_object=lambda value: [value])
    taken = within.strategy_within(chosen.memory_bytes, batch_share(whole, 4), FOUR, alone, micro_batches=True)
    assert taken.strategy == chosen.strategy


def test_rehearsed_splits_hold_what_replicas_hold(whole: ModelGraph, part: ModelGraph):
    """Splitting the batch alone is data parallelism, which needs what a replica computing its part does."""
    prices = find_frontier(whole, FOUR, engines=("split",)).prices
    summed = data_parallel(prices)
    point = rehearsed(summed, prices)
    assert point.time_seconds == summed.time_seconds, "each collective is waited for"
    torch_loop = peak_memory(lower(part, FOUR, build_strategy("ddp", part, FOUR)), 0, runtime="torch").total
    batch = sum(tensor.bytes for tensor in whole.inputs) - sum(tensor.bytes for tensor in part.inputs)
    assert point.memory_bytes == pytest.approx(torch_loop + batch, rel=0.05)


def test_engines_restrict_every_choice(whole: ModelGraph):
    plain = find_frontier(whole, FOUR, engines=("replicated",))
    assert plain.engines == ("replicated",)
    assert plain.min_devices(memory="16GiB").point.engine == "replicated"
    rows = profile_devices(whole, FOUR, (1, 2), "16GiB", engines=("fsdp", "replicated"))
    assert {row.point.engine for row in rows} <= {"fsdp", "replicated"}
    for engines in ((), ("magic",), "split"):
        with pytest.raises(OffbeatError, match="engines"):
            find_frontier(whole, FOUR, engines=engines)
    with pytest.raises(OffbeatError, match="some of split for these objectives"):
        find_frontier(whole, FOUR, engines=("fsdp",), objectives=("memory", "communication"))


def test_files_keep_engines_and_older_files_are_splits(found: ModelFrontier):
    loaded = Frontier.from_json(found.to_json())
    assert [point.name for point in loaded.points] == [point.name for point in found.points]
    older = orjson.loads(found.to_json())
    for point in older["points"]:
        del point["engine"]
    assert Frontier.from_json(orjson.dumps(older)).engines == ("split",)
    older["points"][0]["engine"] = "magic"
    with pytest.raises(OffbeatError, match=r"points\[0\].engine"):
        Frontier.from_json(orjson.dumps(older))


def test_the_picture_tells_engines_apart():
    made = [("fsdp", Strategy(recompute=("a",))), ("split", Strategy()), ("replicated", Strategy())]
    found = Frontier(
        tuple(
            FrontierPoint(0.1 / 2**n, 2**n * 2**20, 0.05 / 2**n, 0.05 / 2**n, s, engine=e)
            for n, (e, s) in enumerate(made)
        )
    )
    text = svg(found)
    assert ">FSDP2<" in text
    assert ">operators split<" in text
    assert ">updates sharded<" not in text
    assert ">hollow: modules are computed again, or micro-batches<" in text
    assert text.count('class="point"') == len(found.points)
    assert "fsdp + recompute" in text, "a point says what it is"
    assert ">measured, 20 ms<" in svg(found, measured_seconds=0.02)


def test_strategies_know_their_engine():
    graph = zoo.capture("mlp", 0.2)
    assert build_strategy("byteps", graph, FOUR).engine == "replicated"
    assert build_strategy("sharded", graph, FOUR).engine == "sharded"
    assert build_strategy("fsdp", graph, FOUR).engine == "fsdp"
    assert Strategy().engine == "replicated"
    assert offbeat.find_frontier(graph, FOUR, engines=("split",)).points[0].strategy.engine == "split"
