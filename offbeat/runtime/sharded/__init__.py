"""A strategy that splits operators → the user's model, in parts on all ranks, with the numbers of a single one."""

from offbeat.runtime.sharded.runtime import ShardedRuntime

__all__ = ["ShardedRuntime"]
