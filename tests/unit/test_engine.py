"""Through the real engine, four ranks in memory compute what one process would that averages their gradients."""

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import small_models
import torch
from in_memory import distance, distributed, fresh, run_ranks, train
from memory_job import MemoryJob, MemoryWorld
from random_strategies import random_strategy
from reference import graph_of, make_strategy, reference_run
from small_strategies import ENGINE_BUILDERS, EXPECTED_MODE, OPTIONS, every_synchronizer, server

from offbeat.api import resolve_strategy
from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.graph.skeleton import skeleton
from offbeat.plan import lower
from offbeat.runtime.engine.gradients import UnusedParameters
from offbeat.strategy import Schedule, Shard, Slice, Strategy, VariableConfig

RANKS = 4
EQUAL, SIZES = (1.0,) * RANKS, (4,) * RANKS
STEPS = 5
"""The engine rebuilds its issue order after the fourth."""
CLUSTER = ClusterSpec.homogeneous(nodes=2, devices_per_node=2)
TOLERANCE = 1e-10


def trained(
    name: str,
    kind: str,
    strategy: Strategy,
    *,
    seed: int | None = None,
    sizes: tuple[int, ...] = SIZES,
    steps: int = STEPS,
    graph: ModelGraph | None = None,
) -> list[dict[str, Any]]:
    """Each rank's distance from the reference, its mode, its issue order and the synchronisers of its plan."""
    graph = graph or graph_of(name, torch.float64, kind)
    expected = reference_run(name, kind, torch.float64, steps, RANKS, strategy.weights or EQUAL, sizes)

    def rank(world: MemoryWorld) -> dict[str, Any]:
        # Only rank 0 has the reference's weights: the runtime must share them.
        model, optimizer = fresh(world, name, kind)
        with distributed(world, model, optimizer, (graph, CLUSTER, strategy)) as runtime:
            train(world, name, model, optimizer, range(steps), sizes)
            return {
                "mode": model.offbeat.mode,
                "error": distance(model, expected),
                "order": [task.index for task in runtime.engine.order],
                "synchronizers": {message.synchronizer for message in runtime.plan.messages},
            }

    return run_ranks(RANKS, rank, MemoryJob(RANKS, seed=seed))


def assert_exact(answers: list[dict[str, Any]], mode: str | None = None) -> None:
    assert max(answer["error"] for answer in answers) <= TOLERANCE
    if mode is not None:
        assert [answer["mode"] for answer in answers] == [EXPECTED_MODE[mode]] * RANKS


@pytest.mark.parametrize("mode", EXPECTED_MODE)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("builder", ENGINE_BUILDERS)
def test_builder_is_exact(builder: str, kind: str, mode: str) -> None:
    graph = graph_of("everything", torch.float64, kind)
    given = {"builder": builder, "options": OPTIONS.get(builder, {})}
    assert_exact(trained("everything", kind, make_strategy(given, graph, CLUSTER, mode)), mode)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("builder", ENGINE_BUILDERS)
def test_builder_by_name(builder: str, captured: bool) -> None:
    """The builder's own defaults, with the step captured and without."""
    graph = graph_of("mlp", torch.float64, "sgd") if captured else skeleton(small_models.make("mlp"))
    assert_exact(trained("mlp", "sgd", resolve_strategy(builder, graph, CLUSTER), graph=graph, steps=3))


@pytest.mark.parametrize(("name", "kind"), [("transformer", "sgd"), ("cnn", "adamw")])
@pytest.mark.parametrize("builder", ["fast_servers", "overlap", "poseidon", "sharded"])
def test_other_models_are_exact(builder: str, name: str, kind: str) -> None:
    """Attention reads its projections itself, words are tied, BatchNorm has buffers."""
    graph = graph_of(name, torch.float64, kind)
    given = {"builder": builder, "options": OPTIONS.get(builder, {})}
    assert_exact(trained(name, kind, make_strategy(given, graph, CLUSTER, "auto"), seed=1), "auto")


@pytest.mark.parametrize("mode", EXPECTED_MODE)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_all_synchronisers_in_one_model(kind: str, mode: str) -> None:
    strategy = make_strategy({"json": every_synchronizer(RANKS).to_json()}, None, CLUSTER, mode)
    answers = trained("everything", kind, strategy, seed=2)
    assert len(answers[0]["synchronizers"]) == 6
    assert_exact(answers, mode)


@pytest.mark.parametrize("seed", range(24))
def test_random_strategy_with_random_completion(seed: int) -> None:
    """Whatever the strategy and in whatever order collectives complete: no deadlock, no wrong value."""
    kind = ("sgd", "adamw")[seed % 2]
    strategy = random_strategy(seed, graph_of("everything", torch.float64, kind), CLUSTER)
    assert_exact(trained("everything", kind, strategy, seed=seed, steps=3))


@pytest.mark.parametrize("builder", ["overlap", "partitioned_ps", "sharded", "poseidon", "parallax"])
def test_uneven_replicas_get_a_weighted_average(builder: str) -> None:
    """Weights in proportion to the batch sizes give the mean over all samples."""
    sizes = (2, 5, 3, 6)
    graph = graph_of("everything", torch.float64, "adamw")
    strategy = make_strategy({"builder": builder, "options": OPTIONS.get(builder, {})}, graph, CLUSTER, "auto")
    strategy = strategy.model_copy(update={"weights": tuple(map(float, sizes))})
    assert_exact(trained("everything", "adamw", strategy, sizes=sizes), "auto")


@pytest.mark.parametrize("stations", [(0, 2), (1, 3), (2,), (3,)])
@pytest.mark.parametrize("owner", [0, 1, 3])
def test_servers_behind_transfer_stations(owner: int, stations: tuple[int, ...]) -> None:
    shard = server(owner, stations=stations)
    names = ("layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.4.weight")
    assert_exact(trained("mlp", "sgd", Strategy(variables=dict.fromkeys(names, VariableConfig(shards=(shard,))))))


def test_explicit_order() -> None:
    """Two messages cut at uneven places and issued in an order that no policy would choose."""
    groups = {"layers.0.weight": 0, "layers.0.bias": 1, "layers.2.weight": 1, "layers.2.bias": 0}
    groups |= {"layers.4.weight": 0, "layers.4.bias": 1}
    cuts = {0: (0, 7, 500, 23 * 37 + 9 + 9 * 5), 1: (0, 100, 37 + 37 * 9 + 5)}
    slices = [
        Slice(group=group, start=start, stop=stop) for group, edges in cuts.items() for start, stop in pairwise(edges)
    ]
    strategy = Strategy(
        variables={name: VariableConfig(shards=(Shard(group=group),)) for name, group in groups.items()},
        schedule=Schedule(policy="explicit", order=tuple(slices[index] for index in (3, 1, 4, 0, 2))),
    )
    answers = trained("mlp", "adamw", strategy)
    assert len(answers[0]["order"]) == len(slices)
    assert_exact(answers)


def test_ranks_agree_on_an_order_rebuilt_from_their_own_times() -> None:
    """Ready times differ from rank to rank; the rebuilt order must not."""
    graph = graph_of("mlp", torch.float64, "sgd")
    strategy = make_strategy({"builder": "overlap", "options": OPTIONS["overlap"]}, graph, CLUSTER, "auto")
    planned = [task.index for task in lower(graph, CLUSTER, strategy, rank=0).communication if task.stage == 0]
    answers = trained("mlp", "sgd", strategy, steps=9)
    assert sorted(answers[0]["order"]) == sorted(planned)
    assert all(answer["order"] == answers[0]["order"] for answer in answers)
    assert_exact(answers, "auto")


CHANGES = [
    ("mlp", "sgd", ["overlap", "ddp", "overlap"]),
    ("everything", "adamw", ["ddp", "sharded", "overlap"]),
    ("mlp", "adamw", ["ps_load_balanced", "all_reduce", "uneven_partitioned_ps"]),
    ("everything", "sgd", ["poseidon", "parallax", "partitioned_all_reduce"]),
]


@pytest.mark.parametrize(("name", "kind", "strategies"), CHANGES)
def test_a_switch_changes_nothing_but_the_plan(name: str, kind: str, strategies: list[str]) -> None:
    graph, steps = graph_of(name, torch.float64, kind), 3
    given = [{"builder": builder, "options": OPTIONS.get(builder, {})} for builder in strategies]
    chosen = [make_strategy(each, graph, CLUSTER, None) for each in given]
    expected = reference_run(name, kind, torch.float64, steps * len(chosen), RANKS, EQUAL, SIZES)

    def rank(world: MemoryWorld) -> tuple[float, list[str]]:
        model, optimizer = fresh(world, name, kind)
        modes = []
        with distributed(world, model, optimizer, (graph, CLUSTER, chosen[0])) as runtime:
            for number, strategy in enumerate(chosen):
                if number:
                    runtime.switch(lower(graph, CLUSTER, strategy, rank=world.rank))
                train(world, name, model, optimizer, range(number * steps, (number + 1) * steps))
                modes.append(model.offbeat.mode)
            return distance(model, expected), modes

    for error, modes in run_ranks(RANKS, rank):
        assert error <= TOLERANCE
        assert modes == ["barrier" if builder == "ddp" else "deferred" for builder in strategies]


@pytest.mark.parametrize("builder", ENGINE_BUILDERS)
def test_a_switch_frees_the_buffers_of_the_plan_before_at_once(builder: str) -> None:
    """Without the garbage collector, which takes longer than a step."""

    def rank(world: MemoryWorld) -> bool:
        model, optimizer = fresh(world, "mlp", "sgd")
        graph = graph_of("mlp", torch.float64, "sgd")
        given = [{"builder": each, "options": {}} for each in (builder, "ddp")]
        first, second = (make_strategy(each, graph, CLUSTER, None) for each in given)
        with distributed(world, model, optimizer, (graph, CLUSTER, first)) as runtime:
            train(world, "mlp", model, optimizer, range(2))
            before = weakref.ref(runtime.engine)
            runtime.switch(lower(graph, CLUSTER, second, rank=world.rank))
            train(world, "mlp", model, optimizer, range(2, 4))
            return before() is None

    gc.disable()
    try:
        assert run_ranks(RANKS, rank) == [True] * RANKS
    finally:
        gc.enable()


class OneAtATime:
    """A channel of two ranks whose collectives end when they are waited for; until then nobody may write the tensor."""

    size = 2

    def __init__(self) -> None:
        self.sent: tuple[torch.Tensor, torch.Tensor] | None = None

    def all_reduce(self, tensor: torch.Tensor) -> "OneAtATime":
        assert self.sent is None, "the one before has not ended"
        self.sent = tensor, tensor.clone()
        return self

    def wait(self) -> None:
        assert self.sent is not None
        tensor, before = self.sent
        assert torch.equal(tensor, before), "written while it was on the wire"
        tensor.mul_(2)
        self.sent = None


def test_a_question_about_unused_variables_is_not_overwritten_by_the_next() -> None:
    """Gradients that a loop forgets with zero_grad() are never asked for, so that their question is still under way."""
    channel = OneAtATime()
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in "ab"}
    unused = UnusedParameters(parameters, channel, True)  # type: ignore[arg-type]
    unused.backward_ended([])
    unused.backward_ended(["b"])
    assert unused.unused() == ["b"]
