"""Mixed precision of messages: half the bytes on the wire. It rounds gradients, so it must be allowed."""

from collections.abc import Iterator

from offbeat.search.passes.problem import Candidate, Problem
from offbeat.search.passes.registry import register_pass
from offbeat.strategy import Encoder, Shard, Strategy, VariableConfig


@register_pass("precision", order=60)
def propose(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """All dense float32 messages in bfloat16, which keeps float32's range."""
    if not problem.allow_lossy:
        return
    variables = dict(candidate.strategy.variables)
    for variable in problem.graph.gradient_order:
        config = candidate.strategy.config(variable.name)
        if variable.dtype == "float32" and all(_plain(shard) for shard in config.shards):
            shards = tuple(shard.model_copy(update={"encoder": Encoder(name="bf16")}) for shard in config.shards)
            variables[variable.name] = VariableConfig(partition=config.partition, cuts=config.cuts, shards=shards)
    if variables != candidate.strategy.variables:
        yield candidate.strategy.model_copy(update={"variables": variables})


def _plain(shard: Shard) -> bool:
    allowed = shard.synchronizer in ("all_reduce", "sharded", "parameter_server")
    return allowed and shard.encoder.name == "none" and not (shard.staleness or shard.asynchronous or shard.stations)
