"""Strategies that cut models of a few hundred parameters as real ones cut real models."""

from typing import Any

from offbeat.strategy import Shard, Strategy, VariableConfig, builders
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
"""Options of each builder, in bytes of such models."""
ENGINE_BUILDERS = tuple(name for name in builders() if name != "fsdp")
"""Builders whose strategies run on Offbeat's own engine; `fsdp` runs on torch's and takes no sparse gradients."""
FSDP_POINTS: tuple[dict[str, Any], ...] = (
    {},
    {"reshard": False, "prefetch": 0},
    {"root": True, "prefetch": 2},
    {"recompute": True},
    {"units": "2KiB", "accumulation": 2},
    {"units": []},
    {"units": "1KiB", "reshard": False, "root": True, "recompute": True},
    {"prefetch": 3, "accumulation": 4},
    {"replicas": 2},
    {"replicas": 2, "reshard": False, "recompute": True, "accumulation": 2},
)
"""Options of the builder `fsdp`, with a strategy's accumulation beside them."""
FSDP_SMALLER_GROUPS: tuple[dict[str, Any], ...] = (
    {"reshard": 2},
    {"reshard": 2, "recompute": True, "prefetch": 2},
)
"""Further ones, for four ranks."""
EXPECTED_MODE = {"auto": "deferred", "barrier": "barrier"}
"""The mode in which a strategy that asks for the key ends."""


def fsdp_points(world: int) -> list[dict[str, Any]]:
    """At least ten FSDP2 strategies for so many ranks."""
    return [*map(dict, FSDP_POINTS), *(map(dict, FSDP_SMALLER_GROUPS) if world == 4 else ())]


def server(owner: int, **fields: Any) -> Shard:
    return Shard(synchronizer="parameter_server", placement=(owner,), **fields)


def every_synchronizer(world: int) -> Strategy:
    """Every synchroniser in the model "everything", several of them in one variable, several axes cut."""
    last = world - 1
    stations = (0, 3) if world == 4 else ()
    return Strategy(
        variables={
            "scale": VariableConfig(shards=(server(last),)),
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
                shards=(Shard(), server(1, stations=stations), Shard(synchronizer="sharded")) * 2,
            ),
            "filter.bias": VariableConfig(shards=(Shard(group=1),)),
            "dense.0.weight": VariableConfig(shards=(Shard(synchronizer="factor_broadcast"),)),
            "dense.0.bias": VariableConfig(partition=(4,), cuts=((1, 2, 7),), shards=(server(0, group=2),)),
            "dense.2.weight": VariableConfig(
                partition=(2, 3),
                shards=(
                    Shard(group=1),
                    server(0, group=2),
                    Shard(synchronizer="sharded", group=3),
                    Shard(reduction_order=tuple(range(last, -1, -1))),
                    server(1, stations=stations),
                    Shard(group=1),
                ),
            ),
            "head.weight": VariableConfig(partition=(1, 3), shards=(Shard(synchronizer="sharded", group=3),)),
        },
        schedule=Schedule(policy="priority", in_flight=3, credit_bytes=1024),
    )
