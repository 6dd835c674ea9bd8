"""A job may change its plan between two steps without changing what it computes."""

import pytest
from harness import Pools

CHANGES = [
    ("mlp", "sgd", ["overlap", "ddp", "overlap"]),
    ("cnn", "adamw", ["ddp", "sharded", "overlap"]),
    ("mlp", "adamw", ["ps_load_balanced", "all_reduce", "uneven_partitioned_ps"]),
    ("transformer", "sgd", ["poseidon", "overlap", "partitioned_all_reduce"]),
]


@pytest.mark.parametrize(("model", "optimizer", "builders"), CHANGES)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_switch_changes_nothing_but_the_plan(
    pools: Pools, ranks: int, model: str, optimizer: str, builders: list[str]
) -> None:
    answers = pools(ranks).call("switch", model=model, optimizer=optimizer, builders=builders, timeout=60)
    assert max(answer["error"] for answer in answers) <= 1e-10


def test_a_plan_with_a_barrier_leaves_none_behind(pools: Pools) -> None:
    builders = ["overlap", "ddp", "overlap"]
    for answer in pools(2).call("switch", model="mlp", optimizer="sgd", builders=builders, timeout=60):
        assert answer["modes"][2::3] == ["deferred", "barrier", "deferred"]
