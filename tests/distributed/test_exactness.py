"""Every strategy without a lossy encoder computes exactly what one process would that averages the replicas' gradients."""

from typing import Any

import pytest
from harness import Pools

from offbeat.strategy import Shard, Slice, Strategy, VariableConfig, builders
from offbeat.strategy.model import Schedule

OPTIONS: dict[str, dict[str, Any]] = {
    "all_reduce": {"chunk": 3},
    "byteps": {"partition": "1KiB", "servers": "ranks"},
    "ddp": {"first_bucket": 300, "bucket": 900},
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


@pytest.mark.parametrize("mode", EXPECTED_MODE)
@pytest.mark.parametrize(("optimizer", "dtype", "tolerance"), ARITHMETIC)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("builder", builders())
@pytest.mark.parametrize("world", [2, 4])
def test_builder_is_exact(
    pools: Pools, world: int, builder: str, model: str, optimizer: str, dtype: str, tolerance: float, mode: str
) -> None:
    strategy = {"builder": builder, "options": OPTIONS.get(builder, {})}
    answers = pools(world).call(
        "train", model=model, optimizer=optimizer, dtype=dtype, strategy=strategy, mode=mode, nodes=2
    )
    assert [answer["mode"] for answer in answers] == [EXPECTED_MODE[mode]] * world
    assert max(answer["error"] for answer in answers) <= tolerance
