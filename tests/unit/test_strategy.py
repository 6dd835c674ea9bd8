"""Strategy as data: JSON round trip, schema, every validation sentence, and transfer."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import Layer, Weight, make_graph, random_graphs, random_strategies

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph
from offbeat.strategy import (
    Encoder,
    OperatorConfig,
    Schedule,
    Shard,
    Slice,
    Strategy,
    VariableConfig,
    build_strategy,
    check_fits,
    transfer,
)

CLUSTER = ClusterSpec.homogeneous(nodes=2, devices_per_node=2)
SMALLER = ClusterSpec.homogeneous(nodes=1, devices_per_node=3)
LARGER = ClusterSpec.homogeneous(nodes=3, devices_per_node=2)
GRAPH = make_graph(
    [
        Layer((Weight("embedding", (20, 4), sparse=True),)),
        Layer((Weight("fc.weight", (6, 4), factor_rows=4), Weight("fc.bias", (6,)))),
        Layer((Weight("out.weight", (3, 6)),)),
    ]
)
MODELS = (Strategy, Schedule, Slice, VariableConfig, Shard, Encoder, OperatorConfig)


def served(rank: int, **fields: Any) -> Shard:
    return Shard(synchronizer="parameter_server", placement=(rank,), **fields)


def sentence_of(content: dict[str, Any] | str) -> str:
    with pytest.raises(StrategyError) as caught:
        Strategy.from_json(content if isinstance(content, str) else json.dumps(content), origin="s.json")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelGraph, Strategy]:
    graph = draw(random_graphs())
    return graph, draw(random_strategies(graph, CLUSTER, everything=True))


@given(case=cases())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_json_round_trip(case: tuple[ModelGraph, Strategy]):
    graph, strategy = case
    check_fits(strategy, graph, CLUSTER)
    again = Strategy.from_json(strategy.to_json())
    assert again == strategy
    assert (again.digest, again.to_json()) == (strategy.digest, strategy.to_json())


@given(case=cases(), other=st.one_of(st.none(), random_graphs()), cluster=st.sampled_from((CLUSTER, SMALLER, LARGER)))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_transferred_strategy_fits(case: tuple[ModelGraph, Strategy], other: ModelGraph | None, cluster: ClusterSpec):
    graph, strategy = case
    target = other or graph
    moved = transfer(strategy, target, cluster)
    check_fits(moved, target, cluster)
    assert Strategy.from_json(moved.to_json()) == moved
    assert set(moved.variables) <= set(strategy.variables)


def test_transfer_keeps_what_fits_and_wraps_ranks():
    strategy = build_strategy("hierarchical_ps", GRAPH, LARGER, threshold=0)
    moved = transfer(strategy, GRAPH, CLUSTER)
    assert (moved.graph, moved.cluster) == (GRAPH.signature, CLUSTER.digest)
    assert set(moved.variables) == set(strategy.variables)
    before, after = strategy.variables["fc.weight"].shards, moved.variables["fc.weight"].shards
    assert [shard.owner for shard in after] == [shard.owner % 4 for shard in before if shard.owner is not None]
    assert {shard.stations for shard in before} == {(0, 2, 4)}
    assert {shard.stations for shard in after} == {(0, 2)}


def test_transfer_drops_what_does_not_fit():
    strategy = build_strategy("partitioned_ps", GRAPH, LARGER, threshold=0, servers="ranks")
    assert strategy.variables["fc.weight"].shard_count == 6
    short = make_graph([Layer((Weight("fc.weight", (2, 4)),)), Layer((Weight("other", (3,)),))])
    assert transfer(strategy, short, LARGER).variables == {}


def test_transfer_gives_up_an_explicit_order():
    strategy = Strategy(schedule=Schedule(policy="explicit", order=(Slice(group=0, start=0, stop=3),)))
    assert transfer(strategy, GRAPH, CLUSTER).schedule == Schedule(policy="priority")


def test_the_digest_follows_the_content():
    strategy = Strategy(variables={"fc.weight": VariableConfig(partition=(2, 1))})
    digest = strategy.digest
    assert strategy.model_copy(update={"accumulation": 2}).digest != digest
    assert Strategy.from_json(strategy.to_json()).digest == digest


def test_a_file_round_trip(tmp_path: Path):
    strategy = build_strategy("byteps", GRAPH, CLUSTER)
    strategy.save(tmp_path / "s.json")
    assert Strategy.load(tmp_path / "s.json") == strategy
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


def test_defaults_are_left_out_of_the_file():
    content = json.loads(Strategy(variables={"fc.weight": VariableConfig()}).to_json())
    assert content == {"format": 1, "variables": {"fc.weight": {}}}


@given(
    st.lists(st.integers(0, 9000), max_size=8),
    st.integers(0, 9000),
    st.integers(1, 6),
    st.none() | st.integers(1024, 9000),
)
def test_a_message_starts_beside_as_many_as_slots_and_credit_allow(
    before: list[int], size: int, in_flight: int, credit: int | None
) -> None:
    schedule = Schedule(policy="priority", in_flight=in_flight, credit_bytes=credit)
    beside = schedule.beside(before, size)
    allowed = [
        k
        for k in range(min(len(before), in_flight - 1) + 1)
        if sum(before[len(before) - k :]) + size <= (credit or 1e9)
    ]
    assert beside == max(allowed, default=0)


def test_the_schema_names_every_field():
    schema = Strategy.json_schema()
    parts = {"Strategy": schema, **schema["$defs"]}
    for model in MODELS:
        assert set(parts[model.__name__]["properties"]) == set(model.model_fields)
        assert parts[model.__name__]["additionalProperties"] is False
    assert schema["$id"] == "offbeat-strategy-1"


def test_unnamed_variables_are_whole_and_all_reduced():
    assert Strategy().config("fc.weight") == VariableConfig(shards=(Shard(synchronizer="all_reduce"),))


def test_one_shard_serves_for_all():
    config = VariableConfig(partition=(2, 2), shards=(served(1),))
    assert [config.shard(index).owner for index in range(config.shard_count)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("encoder", "feedback", "gathered", "sliceable"),
    [
        (Encoder(), False, False, True),
        (Encoder(error_feedback=True), False, False, True),
        (Encoder(name="fp16"), False, False, True),
        (Encoder(name="fp16", error_feedback=True), True, False, True),
        (Encoder(name="topk", ratio=0.1), True, True, False),
        (Encoder(name="randomk", ratio=0.1, error_feedback=False), False, False, False),
        (Encoder(name="sign"), True, True, False),
        (Encoder(name="int8"), True, True, False),
        (Encoder(name="powersgd", rank=2), True, False, False),
    ],
)
def test_what_an_encoder_implies(encoder: Encoder, feedback: bool, gathered: bool, sliceable: bool):
    assert (encoder.feedback, encoder.gathered, encoder.sliceable) == (feedback, gathered, sliceable)


def in_shard(**fields: Any) -> dict[str, Any]:
    return {"variables": {"w": {"shards": [fields]}}}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"format": 0}, "s.json: format: 0 is not a format this Offbeat reads (1)"),
        ({"format": "2"}, "s.json: format: '2' is not a format this Offbeat reads (1)"),
        ({"format": 1, "colour": 3}, "not a strategy: colour: no such field, got 3"),
        ({"accumulation": 0}, "accumulation: input should be greater than or equal to 1, got 0"),
        ({"replicas": [1, 1]}, "replicas [1, 1] name a rank twice"),
        ({"replicas": [0, -1]}, "replicas[1]: input should be greater than or equal to 0, got -1"),
        ({"replicas": [0, 1], "weights": [1.0]}, "1 weights are given for 2 replicas"),
        ({"weights": [0.0]}, "weights[0]: input should be greater than 0, got 0.0"),
        (in_shard(synchronizer="gossip"), "variables.w.shards[0].synchronizer: input should be 'all_reduce'"),
        (in_shard(colour=3), "variables.w.shards[0].colour: no such field"),
        (
            in_shard(synchronizer="parameter_server"),
            "shard is placed on one rank, its owner, not on []",
        ),
        (in_shard(stations=[0]), "stations [0] belong to a parameter_server shard, not to all_reduce"),
        (
            in_shard(asynchronous=True),
            "an asynchronous shard needs a parameter_server without staleness, not all_reduce",
        ),
        (in_shard(reduction_order=[1, 0, 1]), "reduction_order [1, 0, 1] names a rank twice"),
        (in_shard(staleness=-1), "variables.w.shards[0].staleness: input should be greater than or equal to 0, got -1"),
        (
            in_shard(synchronizer="factor_broadcast", encoder={"name": "fp16"}),
            "a factor_broadcast shard takes no",
        ),
        (
            in_shard(synchronizer="sharded", encoder={"name": "sign"}),
            "takes the encoders none, fp16 and bf16",
        ),
        (in_shard(encoder={"name": "topk"}), "variables.w.shards[0].encoder: encoder 'topk' needs a ratio"),
        (in_shard(encoder={"name": "fp16", "ratio": 0.1}), "encoder 'fp16' takes no ratio"),
        (in_shard(encoder={"name": "powersgd"}), "encoder 'powersgd' needs a rank"),
        (in_shard(encoder={"name": "sign", "rank": 2}), "encoder 'sign' takes no rank"),
        (
            {"variables": {"w": {"partition": [0]}}},
            "variables.w.partition[0]: input should be greater",
        ),
        ({"variables": {"w": {"partition": [2], "shards": [{}] * 3}}}, "partition [2] makes 2 shards, but 3 are given"),
        ({"variables": {"w": {"shards": []}}}, "variables.w.shards: it has too few items, got []"),
        ({"variables": {"w": {"partition": [2], "cuts": [[1], []]}}}, "cuts are given for 2 axes, the partition has 1"),
        ({"variables": {"w": {"partition": [3], "cuts": [[1]]}}}, "axis 0 is cut 1 times, 3 shards need 2 cuts"),
        ({"variables": {"w": {"partition": [3], "cuts": [[4, 2]]}}}, "cuts [4, 2] of axis 0 make overlapping shards"),
        ({"variables": {"w": {"partition": [3], "cuts": [[2, 2]]}}}, "cuts [2, 2] of axis 0 make overlapping shards"),
        ({"schedule": {"policy": "explicit"}}, "the explicit schedule needs order"),
        ({"schedule": {"order": [{"group": 0, "start": 0, "stop": 1}]}}, "the fifo schedule takes no order"),
        ({"schedule": {"pinned": True}}, "pinned keeps an explicit order, and the fifo schedule has none"),
        (
            {
                "schedule": {
                    "policy": "explicit",
                    "order": [{"group": 0, "start": 4, "stop": 8}, {"group": 0, "start": 0, "stop": 5}],
                }
            },
            "overlapping slices of group 0: 4:8 begins before 5",
        ),
        (
            {"schedule": {"policy": "explicit", "order": [{"group": 2, "start": 4, "stop": 4}]}},
            "slice 4:4 of group 2 is empty",
        ),
        (
            {"schedule": {"slice_bytes": 1}},
            "slice_bytes: input should be greater than or equal to 1024, got 1",
        ),
        ({"operators": {"mm": {"mesh": [2], "inputs": [[0, 0]]}}}, "tensor map [0, 0] does not fit mesh [2]"),
        ({"operators": {"mm": {"mesh": [2], "outputs": [[1]]}}}, "tensor map [1] does not fit mesh [2]"),
        ("[]", "it must be a mapping, got []"),
        ("", "not valid JSON"),
        ('{"weights": [NaN]}', "weights[0]: input should be"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_file_is_answered_with_one_sentence(content: dict[str, Any] | str, sentence: str):
    answer = sentence_of(content)
    assert answer.startswith("s.json: ")
    assert sentence in answer


def test_a_truncated_file_names_itself(tmp_path: Path):
    path = tmp_path / "cut.json"
    path.write_text(build_strategy("ddp", GRAPH, CLUSTER).to_json()[:-20])
    with pytest.raises(StrategyError, match=r"cut\.json: not a strategy: it is not valid JSON"):
        Strategy.load(path)


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        (
            Strategy(model="other", graph="0" * 16),
            "the strategy was made for model 'other' (graph 00000000",
        ),
        (Strategy(cluster="0" * 16), "the strategy was made for cluster 0000000000000000, not for 'homogeneous'"),
        (Strategy(replicas=(0, 4)), "replicas: rank 4 is outside the cluster of 4 ranks"),
        (Strategy(weights=(1.0, 2.0)), "2 weights are given for 4 replicas"),
        (Strategy(recompute=("layers.9",)), "the model has no module 'layers.9' to recompute or fuse"),
        (Strategy(fusion=(("layers.0", "x"),)), "the model has no module 'x' to recompute or fuse"),
        (Strategy(operators={"mm": OperatorConfig(mesh=(2,))}), "operators: the model has no operator 'mm'"),
        (Strategy(variables={"w": VariableConfig()}), "variables: the model 'hand-made' has no trainable variable 'w'"),
    ],
)
def test_a_strategy_that_does_not_fit_says_why(strategy: Strategy, sentence: str):
    with pytest.raises(StrategyError) as caught:
        check_fits(strategy, GRAPH, CLUSTER)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("fc.bias", VariableConfig(partition=(2, 1)), "partition [2, 1] has 2 axes, the variable has shape [6]"),
        ("fc.bias", VariableConfig(partition=(7,)), "axis 0 has 6 elements and cannot make 7 shards"),
        ("fc.bias", VariableConfig(partition=(2,), cuts=((6,),)), "cut 6 lies outside axis 0 of 6 elements"),
        ("fc.bias", VariableConfig(shards=(served(4),)), "placement: rank 4 is outside the cluster of 4 ranks"),
        ("fc.bias", VariableConfig(shards=(served(0, stations=(0, 1)),)), "stations [0, 1] name two ranks of one node"),
        (
            "fc.bias",
            VariableConfig(shards=(Shard(reduction_order=(1, 0)),)),
            "reduction_order [1, 0] does not name every replica once",
        ),
        (
            "fc.bias",
            VariableConfig(shards=(Shard(placement=(0,)),)),
            "all_reduce places the shard on every replica; leave placement out",
        ),
        (
            "fc.bias",
            VariableConfig(shards=(Shard(synchronizer="sparse_all_gather"),)),
            "sparse_all_gather needs a sparse gradient, this one is dense",
        ),
        (
            "fc.bias",
            VariableConfig(shards=(Shard(synchronizer="factor_broadcast"),)),
            "factor_broadcast needs the weight of a dense layer",
        ),
        (
            "fc.weight",
            VariableConfig(partition=(2, 1), shards=(Shard(synchronizer="factor_broadcast"),)),
            "factor_broadcast needs the whole variable, not 2 shards",
        ),
        (
            "embedding",
            VariableConfig(partition=(1, 2), shards=(Shard(synchronizer="sparse_all_gather"),)),
            "a sparse variable is partitioned by rows only, not [1, 2]",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_says_why(name: str, config: VariableConfig, sentence: str):
    with pytest.raises(StrategyError) as caught:
        check_fits(Strategy(replicas=(3, 0, 1, 2), variables={name: config}), GRAPH, CLUSTER)
    assert str(caught.value) == f"variable {name!r}: {sentence}"
