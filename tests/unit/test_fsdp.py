"""FSDP2 as a strategy: what a unit is, when it is gathered and reduced, what that takes and how much it holds."""

from dataclasses import replace

import pytest
import torch
from reference import graph_of
from strategies import Layer, Weight, make_graph

import offbeat
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import CollectiveFit, Costs
from offbeat.cost.memory import peak_memory
from offbeat.errors import OffbeatError, StrategyError
from offbeat.graph import ModelGraph
from offbeat.plan import Plan, lower
from offbeat.search.explain import explain
from offbeat.search.fsdp import limit_bytes
from offbeat.search.optimize import search
from offbeat.strategy import FullyShard, Strategy, build_strategy, transfer
from offbeat.strategy.code import torch_code

FOUR = ClusterSpec.homogeneous(nodes=4)
TWO_BY_TWO = ClusterSpec.homogeneous(nodes=2, devices_per_node=2)
GATHER, REDUCE, COMPUTE = 1.0, 2.0, 10.0
COSTS = Costs(
    collectives={
        ("all_gather", 4): CollectiveFit(GATHER, 0.0, 0.0),
        ("reduce_scatter", 4): CollectiveFit(REDUCE, 0.0, 0.0),
    }
)


def gpt2() -> ModelGraph:
    return offbeat.zoo.capture("gpt2", 0.1)


def chain(layers: int = 3) -> ModelGraph:
    """Equal layers, each a module of its own, that take `COMPUTE` seconds forward and as many backward."""
    graph = make_graph([Layer((Weight(f"layers.{n}.weight", (8, 8)),), seconds=COMPUTE) for n in range(layers)])
    seconds = {operator.name: COMPUTE for operator in graph.operators if operator.phase != "optimizer"}
    return graph.with_seconds(seconds | {op.name: 0.0 for op in graph.phase("optimizer")})


def fsdp(graph: ModelGraph, cluster: ClusterSpec = FOUR, **options: object) -> Plan:
    return lower(graph, cluster, build_strategy("fsdp", graph, cluster, **options))


def test_repeated_blocks_are_units_and_tied_weights_are_not():
    strategy = build_strategy("fsdp", gpt2(), FOUR, reshard=False)
    assert strategy.fsdp == FullyShard(units={"blocks.0": False, "blocks.1": False})
    with pytest.raises(StrategyError, match=r"'word_embedding\.weight' and 'head\.weight' are one tensor"):
        build_strategy("fsdp", gpt2(), FOUR, units=["head"])
    small = build_strategy("fsdp", gpt2(), FOUR, units=1024).fsdp
    assert small is not None
    assert "blocks.0.norm1" in small.units
    assert "head" not in small.units


def test_a_strategy_survives_its_file_and_another_cluster():
    strategy = build_strategy("fsdp", gpt2(), FOUR, reshard=2, root=True, prefetch=3, replicas=1, recompute=True)
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert strategy.recompute == ("blocks.0", "blocks.1")
    carried = transfer(strategy, gpt2(), ClusterSpec.homogeneous(nodes=3)).fsdp
    assert carried is not None
    assert carried.units == {"blocks.0": True, "blocks.1": True, "": True}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"units": ["blocks.9"]}, "fsdp: the model has no module 'blocks.9'"),
        ({"reshard": 3}, "fsdp: unit 'blocks.0': 3 is no smaller group that divides 4 ranks"),
        ({"replicas": 3}, "fsdp: 3 replicas do not divide the 4 ranks evenly"),
        ({"units": ["blocks.0", "blocks.0.expand"]}, "unit 'blocks.0.expand' lies in 'blocks.0', which is wrapped"),
        ({"prefetch": -1}, "prefetch"),
        ({"param_dtype": "int8"}, "param_dtype"),
    ],
)
def test_what_torch_could_not_wrap_is_refused(options: dict, sentence: str):
    with pytest.raises(StrategyError, match=sentence.replace("(", "\\(")):
        build_strategy("fsdp", gpt2(), FOUR, **options)


def test_what_does_not_go_with_units_is_refused():
    with pytest.raises(ValueError, match="weights: a strategy with fsdp takes none"):
        Strategy(fsdp=FullyShard(), weights=(1.0, 2.0))
    with pytest.raises(StrategyError, match="has a sparse gradient, which fully_shard cannot reduce"):
        build_strategy("fsdp", graph_of("everything", torch.float64, "sgd"), FOUR)
    # The attention reads its output projection itself.
    with pytest.raises(StrategyError, match=r"unit 'attention\.out_proj' holds 'attention\.out_proj\.weight'"):
        build_strategy("fsdp", graph_of("transformer", torch.float64, "sgd"), FOUR, units=["attention.out_proj"])


def kinds(plan: Plan) -> list[tuple[str, str]]:
    assert plan.strategy.fsdp is not None
    units = [plan.strategy.fsdp.unit_of(message.variables[0]) for message in plan.messages]
    return [(task.kind, units[task.message]) for task in plan.communication]


def test_units_are_gathered_for_forward_and_for_backward_and_reduced_behind_it():
    assert kinds(fsdp(gpt2(), prefetch=0)) == [
        ("all_gather", ""),
        ("all_gather", "blocks.0"),
        ("all_gather", "blocks.1"),
        ("all_gather", "blocks.1"),
        ("all_gather", "blocks.0"),
        ("reduce_scatter", "blocks.1"),
        ("reduce_scatter", "blocks.0"),
        ("reduce_scatter", ""),
    ]
    kept = kinds(fsdp(gpt2(), reshard=False))
    assert kept.count(("all_gather", "blocks.0")) == 1
    assert len(kinds(fsdp(gpt2(), root=True))) == 9


def test_of_units_that_begin_together_the_one_backward_comes_to_is_gathered_ahead():
    graph, last = chain(12), "layers.11.weight"
    joined = [v if v.name == last else replace(v, gradient_from="backward0") for v in graph.variables]
    plan = fsdp(replace(graph, variables=tuple(joined)))
    backward = next(place for place, segment in enumerate(plan.segments) if segment.phase == "backward")
    gathers = [task for task in plan.tasks if task.kind == "all_gather"]
    ahead = [plan.messages[task.message].variables for task in gathers if task.window.issued == backward]
    assert ahead == [(last,), ("layers.10.weight",)]


def test_every_micro_batch_gathers_and_reduces_anew():
    graph = gpt2()
    strategy = build_strategy("fsdp", graph, FOUR).model_copy(update={"accumulation": 3})
    assert len(kinds(lower(graph, FOUR, strategy))) == 3 * 8


@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"reshard": 2}, {"recompute": True, "prefetch": 2}])
def test_every_rank_derives_its_part_and_folding_changes_nothing(options: dict):
    graph = gpt2()
    plan = fsdp(graph, TWO_BY_TWO, **options)
    assert all(lower(graph, TWO_BY_TWO, plan.strategy, rank=rank) == plan.for_rank(rank) for rank in range(4))
    folded, unfolded = (offbeat.simulate(plan, fold=fold, memory=False).iteration_time for fold in (True, False))
    assert folded == pytest.approx(unfolded, rel=1e-9)


def test_bytes_on_the_wire():
    """Each rank puts in its part of what is gathered, and all of the gradients; replicas exchange parts."""
    plan = fsdp(gpt2(), TWO_BY_TWO, replicas=2, reduce_dtype="float32", param_dtype="bfloat16")
    message = next(m for m in plan.messages if "blocks.0.norm1.weight" in m.variables)
    wire = {t.kind: t.wire_bytes for t in plan.communication if t.message == message.index}
    elements = message.elements
    assert wire == {"all_gather": elements // 2 * 2, "reduce_scatter": elements * 4, "all_reduce": elements * 4 // 2}


def seconds(plan: Plan) -> float:
    return offbeat.simulate(plan, COSTS, memory=False).iteration_time


def test_a_step_without_overlap_adds_everything_up():
    """On CPUs the gathers of forward are waited for where nothing is gathered ahead, and so is every reduction."""

    def step(**options: object) -> float:
        cpus = ClusterSpec.homogeneous(nodes=4, device="cpu")
        return seconds(fsdp(chain(), cpus, units=["layers.0", "layers.1", "layers.2"], **options))

    # Forward gathers three units one by one; backward gathers the last before it begins, and the others ahead.
    assert step(prefetch=0) == pytest.approx(6 * COMPUTE + 4 * GATHER + 3 * REDUCE)
    assert step(prefetch=1) == pytest.approx(6 * COMPUTE + 2 * GATHER + 3 * REDUCE)
    assert step(prefetch=1, reshard=False) == pytest.approx(6 * COMPUTE + GATHER + 3 * REDUCE)


def test_a_gpu_reduces_while_the_next_unit_computes():
    cluster = ClusterSpec.homogeneous(nodes=4, device="A100")
    plan = fsdp(chain(), cluster, units=["layers.0", "layers.1", "layers.2"], prefetch=0)
    assert seconds(plan) == pytest.approx(6 * COMPUTE + 2 * GATHER + REDUCE)


def test_under_a_limit_that_replication_breaks_the_fastest_that_fits_is_found():
    graph = gpt2().with_optimizer("AdamW", 2)
    limit = round(0.7 * peak_memory(lower(graph, FOUR, build_strategy("ddp", graph, FOUR))).total)
    found = search(graph, FOUR, rounds=0, memory_limit=limit)
    assert found.strategy.fsdp is not None
    assert max(offbeat.simulate(found.plan).peak_memory) == found.peak_bytes <= limit
    for options in ({}, {"reshard": False}, {"root": True}, {"recompute": True}):
        plan = fsdp(graph, **options)
        if peak_memory(plan).total <= limit:
            assert found.seconds <= offbeat.simulate(plan).iteration_time * (1 + 1e-9)
    with pytest.raises(OffbeatError, match="is not enough for"):
        search(graph, FOUR, rounds=0, memory_limit=limit // 3, micro_batches=False)
    text = explain(found.strategy, graph, FOUR).text()
    assert "modules are gathered and reduced separately" in text


def test_gradients_are_reduced_in_bfloat16_only_with_leave():
    graph = gpt2().with_optimizer("AdamW", 2)
    cluster = ClusterSpec.homogeneous(nodes=2, bandwidth="1Gbit/s")
    limit = round(0.75 * peak_memory(lower(graph, cluster, build_strategy("ddp", graph, cluster))).total)
    exact, rounded = (
        search(graph, cluster, rounds=0, memory_limit=limit, allow=allow).strategy.fsdp for allow in ((), ("bf16",))
    )
    assert exact is not None
    assert exact.reduce_dtype is None
    assert rounded is not None
    assert rounded.reduce_dtype == "bfloat16"


def test_auto_leaves_a_tenth_of_the_smallest_device():
    assert limit_bytes("auto", ClusterSpec.preset("B10")) == int(0.9 * 8 * 2**30)
    assert limit_bytes("2GiB", FOUR) == 2**31


def test_code_names_every_choice_of_the_strategy():
    strategy = build_strategy("fsdp", gpt2(), TWO_BY_TWO, replicas=2, reduce_dtype="float32", recompute=True)
    code = torch_code(strategy.model_copy(update={"accumulation": 4}))
    compile(code, "pasted", "exec")
    assert '(2, torch.distributed.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))' in code
    assert "MixedPrecisionPolicy(reduce_dtype=torch.float32)" in code
    assert 'for path in {"blocks.0": True, "blocks.1": True}:' in code
    assert "# Split each batch into 4 micro-batches" in code
    many = FullyShard(units={f"layers.{n}": n < 3 for n in range(7)}, prefetch=0)
    units = next(line for line in torch_code(Strategy(fsdp=many)).splitlines() if line.startswith("units = "))
    assert eval(units.removeprefix("units = ")) == many.units
    assert "range(3, 7)" in units
    with pytest.raises(StrategyError, match="the strategy has no fsdp"):
        torch_code(Strategy())


def test_memory_is_a_ranks_parts_and_the_units_that_are_whole():
    graph = gpt2().with_optimizer("AdamW", 2)
    plan = fsdp(graph, recompute=True)
    whole, parts = (peak_memory(lower(graph, FOUR, s)) for s in (build_strategy("ddp", graph, FOUR), plan.strategy))
    assert parts.optimizer_state == pytest.approx(whole.optimizer_state / 4, rel=1e-2)
    unit = max(m.parameter_bytes for m in plan.messages)
    assert graph.parameter_bytes // 4 < parts.weights <= graph.parameter_bytes // 4 + 2 * unit
    peaks = [peak_memory(fsdp(graph, **options)).total for options in ({"root": True}, {}, {"reshard": False})]
    assert peaks == sorted(peaks)
    assert peak_memory(fsdp(graph, TWO_BY_TWO, replicas=2)).total > peak_memory(fsdp(graph)).total
