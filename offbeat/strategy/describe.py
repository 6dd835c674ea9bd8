"""Describe a strategy in words, one clause per decision, without a model or a cluster."""

from collections import Counter
from typing import TYPE_CHECKING

from offbeat.units import format_bytes

if TYPE_CHECKING:
    from offbeat.strategy.model import Strategy

_MODES = {
    "barrier": "the optimizer's step waits for all gradients",
    "deferred": "updates overlap the next forward, which waits module by module",
    "auto": "updates overlap the next forward if the training loop allows it",
}
_POLICIES = {
    "fifo": "messages are sent as gradients become ready",
    "priority": "messages needed first by the next forward are sent first",
    "explicit": "messages are sent in an order found by search",
}
_KINDS = {
    "all_reduce": "all-reduced",
    "parameter_server": "updated by servers",
    "summation_server": "summed by servers",
    "sharded": "reduced and updated in shards, one per rank",
    "sparse_all_gather": "gathered as rows",
    "sparse_parameter_server": "sent as rows to servers",
    "factor_broadcast": "broadcast as two factors",
}


def describe(strategy: "Strategy") -> tuple[str, ...]:
    """Clauses without a full stop; default choices, such as no encoding, are left out."""
    schedule, found = strategy.schedule, []
    shards = [(shard, config) for config in strategy.variables.values() for shard in config.shards]
    cut = sum(config.shard_count > 1 for config in strategy.variables.values())
    kinds = Counter(shard.synchronizer for shard, _ in shards)
    groups = {(shard.synchronizer, shard.group) for shard, _ in shards if shard.group is not None}
    alone = sum(config.shard_count if len(config.shards) == 1 else 1 for shard, config in shards if shard.group is None)
    many = "gradients or their shards are" if cut else "gradients are"
    found += [f"{_some(count, 'gradient is', many)} {_KINDS[kind]}" for kind, count in kinds.most_common()]
    if shards:
        found.append(f"they are sent in {_some(len(groups) + alone, 'message')}")
    elif strategy.fsdp is not None:
        found.append(f"{_some(len(strategy.fsdp.wrapped), 'module')} and the rest of the model are sharded by FSDP2")
        return (*found, *_modules(strategy))
    elif not strategy.operators:
        found.append("every gradient is all-reduced separately")
    if cut:
        found.append(f"{_some(cut, 'variable is', 'variables are')} cut into shards")
    if strategy.operators:
        found.append(f"{_some(len(strategy.operators), 'operator is', 'operators are')} split over devices")
    found += [_MODES[schedule.mode], _POLICIES[schedule.policy]]
    if schedule.slice_bytes:
        found.append(f"messages above {format_bytes(schedule.slice_bytes)} are cut into slices of that size")
    found.append(f"at most {_some(schedule.in_flight, 'collective is', 'collectives are')} in flight at once")
    if schedule.credit_bytes is not None:
        found.append(f"at most {format_bytes(schedule.credit_bytes)} are in flight at once")
    for encoder, count in Counter(shard.encoder.name for shard, _ in shards).items():
        if encoder != "none":
            found.append(f"{_some(count, 'gradient is', 'gradients are')} encoded as {encoder}, which changes the sums")
    if any(shard.staleness or shard.asynchronous for shard, _ in shards):
        found.append("some replicas may be several steps ahead of others")
    return (*found, *_modules(strategy))


def _modules(strategy: "Strategy") -> list[str]:
    """Clauses about modules and batches."""
    found = []
    if strategy.accumulation > 1:
        found.append(f"the batch is computed in {strategy.accumulation} micro-batches")
    if strategy.recompute:
        found.append(f"{_some(len(strategy.recompute), 'module is', 'modules are')} recomputed in backward")
    if strategy.fusion:
        found.append(f"{_some(len(strategy.fusion), 'region is', 'regions are')} compiled")
    if strategy.precision is not None:
        found.append(f"forward runs under autocast to {strategy.precision}, which changes the results")
    return found


def _some(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or f'{one}s'}"
