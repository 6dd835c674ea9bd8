"""A strategy that splits operators → the user's model, trained in pieces on all ranks with a single device's numbers."""

from offbeat.runtime.sharded.runtime import ShardedRuntime

__all__ = ["ShardedRuntime"]
