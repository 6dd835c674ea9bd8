"""Every strategy without a lossy encoder computes what one process would that averages the replicas' gradients."""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
from harness import Pools

from offbeat.strategy import Shard, Slice, Strategy, VariableConfig, builders
from offbeat.strategy.model import Schedule

OPTIONS: dict[str, dict[str, Any]] = {
    "all_reduce": {"chunk": 3},
    "byteps": {"partition": "1KiB", "servers": "ranks"},
    "ddp": {"first_bucket": 300, "bucket": 900},
    "fast_servers": {"threshold": 200, "shard": 1024, "bucket": 600},
    "hierarchical_ps": {"threshold": 200},
    "horovod": {"fusion_bytes": 900},
    "overlap": {"bucket": 600, "slice_bytes": 1024},
    "parallax": {"chunk": 3, "servers": "ranks"},
    "partitioned_all_reduce": {"threshold": 300},
    "partitioned_ps": {"threshold": 200, "servers": "ranks"},
    "poseidon": {"threshold": 200, "servers": "ranks"},
    "ps": {"server": 1},
    "ps_load_balanced": {"servers": "ranks"},
    "sharded": {"bucket": 900},
    "uneven_partitioned_ps": {"servers": "ranks"},
}
"""Sizes that cut models of a few hundred parameters as the defaults cut real ones."""

MODELS = ("mlp", "cnn", "transformer", "ncf")
ARITHMETIC = (("sgd", "float64", 1e-10), ("adamw", "float64", 1e-10), ("sgd", "float32", 1e-5))
EXPECTED_MODE = {"auto": "deferred", "barrier": "barrier"}


def _matrix() -> Iterator[Any]:
    """Every case; those that repeat on four ranks, or in float32, what others show in float64 take their time."""
    for world, builder, model in product((2, 4), builders(), MODELS):
        for (optimizer, dtype, tolerance), mode in product(ARITHMETIC, EXPECTED_MODE):
            deferred = (dtype, mode) == ("float64", "auto")
            often = deferred and (world == 2 or (optimizer == "sgd" and model in ("transformer", "ncf")))
            often = often or (world == 2 and (optimizer, dtype, mode) == ("sgd", "float64", "barrier"))
            yield pytest.param(
                world,
                builder,
                model,
                optimizer,
                dtype,
                tolerance,
                mode,
                marks=() if often else pytest.mark.slow,
                id=f"{world}-{builder}-{model}-{optimizer}-{dtype}-{mode}",
            )


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


@pytest.mark.parametrize("builder", builders())
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


@pytest.mark.parametrize("mode", EXPECTED_MODE)
@pytest.mark.parametrize("builder", ["overlap", "ps", "sharded"])
@pytest.mark.parametrize("world", [2, 4])
def test_sync_batch_norm_sees_the_whole_batch(pools: Pools, world: int, builder: str, mode: str) -> None:
    answers = pools(world).call("sync_batch_norm", builder=builder, mode=mode)
    assert [answer["mode"] for answer in answers] == [EXPECTED_MODE[mode]] * world
    assert max(answer["error"] for answer in answers) <= 1e-10


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("builder", ["overlap", "ps", "partitioned_ps", "sharded", "poseidon", "parallax"])
@pytest.mark.parametrize("model", ["mlp", "ncf"])
def test_uneven_replicas_get_a_weighted_average(pools: Pools, model: str, builder: str, optimizer: str) -> None:
    """Weights in proportion to the batch sizes give the mean over all samples."""
    sizes = [2, 5, 3, 6]
    answers = pools(4).call(
        "weighted", model=model, optimizer=optimizer, builder=builder, options=OPTIONS.get(builder, {}), sizes=sizes
    )
    assert [answer["mode"] for answer in answers] == ["deferred"] * 4
    assert max(answer["error"] for answer in answers) <= 1e-10


def _server(owner: int, **fields: Any) -> Shard:
    return Shard(synchronizer="parameter_server", placement=(owner,), **fields)


def _mixed(world: int) -> Strategy:
    """Every synchroniser in one model, several of them in one variable, several axes cut."""
    last = world - 1
    stations = (0, 3) if world == 4 else ()
    return Strategy(
        variables={
            "scale": VariableConfig(shards=(_server(last),)),
            "table.weight": VariableConfig(
                partition=(3, 1),
                shards=(
                    Shard(synchronizer="sparse_all_gather"),
                    Shard(synchronizer="sparse_parameter_server", placement=(last,)),
                    Shard(synchronizer="sparse_parameter_server", placement=(0,)),
                ),
            ),
            "filter.weight": VariableConfig(
                partition=(3, 1, 2),
                shards=(Shard(), _server(1, stations=stations), Shard(synchronizer="sharded")) * 2,
            ),
            "filter.bias": VariableConfig(shards=(Shard(group=1),)),
            "dense.0.weight": VariableConfig(shards=(Shard(synchronizer="factor_broadcast"),)),
            "dense.0.bias": VariableConfig(partition=(4,), cuts=((1, 2, 7),), shards=(_server(0, group=2),)),
            "dense.2.weight": VariableConfig(
                partition=(2, 3),
                shards=(
                    Shard(group=1),
                    _server(0, group=2),
                    Shard(synchronizer="sharded", group=3),
                    Shard(reduction_order=tuple(range(last, -1, -1))),
                    _server(1, stations=stations),
                    Shard(group=1),
                ),
            ),
            "head.weight": VariableConfig(partition=(1, 3), shards=(Shard(synchronizer="sharded", group=3),)),
        },
        schedule=Schedule(policy="priority", in_flight=3),
    )


@pytest.mark.parametrize("mode", EXPECTED_MODE)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("world", [2, 4])
def test_all_synchronisers_in_one_model(pools: Pools, world: int, optimizer: str, mode: str) -> None:
    answers = pools(world).call(
        "train",
        model="everything",
        optimizer=optimizer,
        strategy={"json": _mixed(world).to_json()},
        mode=mode,
        nodes=2,
    )
    assert len(answers[0]["synchronizers"]) == 6
    assert [answer["mode"] for answer in answers] == [EXPECTED_MODE[mode]] * world
    assert max(answer["error"] for answer in answers) <= 1e-10


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stations", [(0, 2), (1, 3), (2,), (3,)])
@pytest.mark.parametrize("owner", [0, 1, 3])
def test_servers_behind_transfer_stations(pools: Pools, owner: int, stations: tuple[int, ...], optimizer: str) -> None:
    shard = _server(owner, stations=stations)
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
