"""On real processes and gloo: every strategy without a lossy encoder computes what one process would.

The same facts are shown in memory by tests/unit/test_engine.py; what runs often here are gloo's own paths.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
from harness import Pools
from small_strategies import ENGINE_BUILDERS, EXPECTED_MODE, OPTIONS, every_synchronizer, server

from offbeat.strategy import Schedule, Shard, Slice, Strategy, VariableConfig

MODELS = ("mlp", "cnn", "transformer", "ncf")
ARITHMETIC = (("sgd", "float64", 1e-10), ("adamw", "float64", 1e-10), ("sgd", "float32", 1e-5))
OFTEN = {
    ("overlap", "transformer"),
    ("sharded", "cnn"),
    ("poseidon", "mlp"),
    ("hierarchical_ps", "mlp"),
    ("parallax", "ncf"),
}
"""A builder for each synchroniser, each with another model where that can be."""


def _often(case: Any, run: bool) -> Any:
    """A case that `make test` runs, or leaves to `make test-slow` because tests/unit/test_engine.py shows the fact."""
    return pytest.param(*case, marks=() if run else pytest.mark.slow)


def _matrix() -> Iterator[Any]:
    for world, builder, model in product((2, 4), ENGINE_BUILDERS, MODELS):
        for (optimizer, dtype, tolerance), mode in product(ARITHMETIC, EXPECTED_MODE):
            often = (builder, model) in OFTEN and (optimizer, dtype) == ("sgd", "float64")
            yield _often((world, builder, model, optimizer, dtype, tolerance, mode), often)


@pytest.mark.parametrize(("world", "builder", "model", "optimizer", "dtype", "tolerance", "mode"), list(_matrix()))
def test_builder_is_exact(
    pools: Pools, world: int, builder: str, model: str, optimizer: str, dtype: str, tolerance: float, mode: str
) -> None:
    strategy = {"builder": builder, "options": OPTIONS.get(builder, {})}
    answers = pools(world).call(
        "train", model=model, optimizer=optimizer, dtype=dtype, strategy=strategy, mode=mode, nodes=2
    )
    assert [answer["mode"] for answer in answers] == [EXPECTED_MODE[mode]] * world
    assert max(answer["error"] for answer in answers) <= tolerance


@pytest.mark.parametrize("builder", [_often((builder,), builder in ("ddp", "parallax")) for builder in ENGINE_BUILDERS])
def test_builder_by_name(pools: Pools, builder: str) -> None:
    for answer in pools(2).call("by_name", builder=builder):
        assert answer["captured"] <= 1e-10
        assert answer["uncaptured"] <= 1e-10


def test_poseidon_sends_factors(pools: Pools) -> None:
    """The matrix above exercises sufficient factors only if the builder chooses them somewhere."""
    strategy = {"builder": "poseidon"}
    answers = pools(4).call("train", model="mlp", optimizer="adamw", strategy=strategy, mode="auto")
    assert answers[0]["synchronizers"] == ["factor_broadcast", "parameter_server"]
    assert max(answer["error"] for answer in answers) <= 1e-10


@pytest.mark.parametrize(
    ("world", "builder", "mode"),
    [
        _often(case, case[::2] == (4, "auto") or case == (2, "overlap", "barrier"))
        for case in product((2, 4), ("overlap", "ps", "sharded"), EXPECTED_MODE)
    ],
)
def test_sync_batch_norm_sees_the_whole_batch(pools: Pools, world: int, builder: str, mode: str) -> None:
    answers = pools(world).call("sync_batch_norm", builder=builder, mode=mode)
    assert [answer["mode"] for answer in answers] == [EXPECTED_MODE[mode]] * world
    assert max(answer["error"] for answer in answers) <= 1e-10


@pytest.mark.parametrize(
    ("model", "builder", "optimizer"),
    [
        _often(case, case in (("mlp", "sharded", "sgd"), ("ncf", "parallax", "sgd")))
        for case in product(
            ("mlp", "ncf"),
            ("overlap", "ps", "partitioned_ps", "sharded", "poseidon", "parallax"),
            ("sgd", "adamw"),
        )
    ],
)
def test_uneven_replicas_get_a_weighted_average(pools: Pools, model: str, builder: str, optimizer: str) -> None:
    """Weights in proportion to the batch sizes give the mean over all samples."""
    sizes = [2, 5, 3, 6]
    answers = pools(4).call(
        "weighted", model=model, optimizer=optimizer, builder=builder, options=OPTIONS.get(builder, {}), sizes=sizes
    )
    assert [answer["mode"] for answer in answers] == ["deferred"] * 4
    assert max(answer["error"] for answer in answers) <= 1e-10


@pytest.mark.parametrize("mode", EXPECTED_MODE)
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", [2, 4])
def test_all_synchronisers_in_one_model(pools: Pools, world: int, optimizer: str, mode: str) -> None:
    answers = pools(world).call(
        "train",
        model="everything",
        optimizer=optimizer,
        strategy={"json": every_synchronizer(world).to_json()},
        mode=mode,
        nodes=2,
    )
    assert len(answers[0]["synchronizers"]) == 6
    assert [answer["mode"] for answer in answers] == [EXPECTED_MODE[mode]] * world
    assert max(answer["error"] for answer in answers) <= 1e-10


@pytest.mark.parametrize(
    ("owner", "stations", "optimizer"),
    [
        _often(case, case in ((1, (0, 2), "sgd"), (3, (2,), "sgd")))
        for case in product((0, 1, 3), ((0, 2), (1, 3), (2,), (3,)), ("sgd", "adamw"))
    ],
)
def test_servers_behind_transfer_stations(pools: Pools, owner: int, stations: tuple[int, ...], optimizer: str) -> None:
    shard = server(owner, stations=stations)
    names = ("layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.4.weight")
    strategy = Strategy(variables=dict.fromkeys(names, VariableConfig(shards=(shard,))))
    answers = pools(4).call("train", model="mlp", optimizer=optimizer, strategy={"json": strategy.to_json()}, nodes=2)
    assert max(answer["error"] for answer in answers) <= 1e-10


def test_explicit_order(pools: Pools) -> None:
    """Two messages cut at uneven places and issued in an order that no policy would choose."""
    groups = {"layers.0.weight": 0, "layers.0.bias": 1, "layers.2.weight": 1, "layers.2.bias": 0}
    groups |= {"layers.4.weight": 0, "layers.4.bias": 1}
    cuts = {0: (0, 7, 500, 23 * 37 + 9 + 9 * 5), 1: (0, 100, 37 + 37 * 9 + 5)}
    slices = [
        Slice(group=group, start=start, stop=stop) for group, edges in cuts.items() for start, stop in pairwise(edges)
    ]
    order = tuple(slices[index] for index in (3, 1, 4, 0, 2))
    strategy = Strategy(
        variables={name: VariableConfig(shards=(Shard(group=group),)) for name, group in groups.items()},
        schedule=Schedule(policy="explicit", order=order),
    )
    answers = pools(2).call("train", model="mlp", optimizer="adamw", strategy={"json": strategy.to_json()})
    assert answers[0]["tasks"] == len(slices)
    assert max(answer["error"] for answer in answers) <= 1e-10
