"""Synchroniser: how each variable travels - all-reduce, gathered rows, broadcast factors, a server, sharded updates.

Only exchanges that give the same update are tried. Variables that change leave their group; the later passes fuse, cut
and order what results.
"""

from collections.abc import Iterator

from offbeat.graph import Variable
from offbeat.plan.model import REPLICATED
from offbeat.search.chain import link_seconds
from offbeat.search.pace_strategy import pace_schedule
from offbeat.search.passes.problem import Candidate, Problem
from offbeat.search.passes.registry import register_pass
from offbeat.strategy import Schedule, Shard, Strategy, VariableConfig

_SERVED = 2
"""Variables, the largest ones, that are tried on a server."""
_SLICE_BYTES = 2 * 2**20


@register_pass("synchronizer", order=50)
def propose(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Every variable by what takes the link least; then the largest ones, and sparse ones, on servers."""
    if len(candidate.plan.replicas) < 2:
        return
    strategy = candidate.strategy
    variables = [v for v in problem.graph.gradient_order if strategy.config(v.name).shard_count == 1]
    cheapest = {v.name: shard for v in variables if (shard := _cheapest(v, candidate, problem)) is not None}
    if cheapest:
        yield from _scheduled(_rearranged(strategy, cheapest), problem)
    dense = sorted((v for v in variables if not v.sparse), key=lambda v: -v.bytes)
    owners = candidate.plan.replicas
    for place, variable in enumerate(dense[:_SERVED]):
        shard = Shard(synchronizer="parameter_server", placement=(owners[place % len(owners)],))
        yield _rearranged(strategy, {variable.name: shard})
    sparse = {
        v.name: Shard(synchronizer="sparse_parameter_server", placement=(owners[i % len(owners)],))
        for i, v in enumerate(v for v in variables if v.sparse)
    }
    if sparse:
        yield _rearranged(strategy, sparse)


def _scheduled(strategy: Strategy, problem: Problem) -> Iterator[Strategy]:
    """The strategy with PACE's schedule, without which it would lose against a candidate that has one."""
    yield strategy
    chain = problem.chain(problem.evaluate(strategy, "trial"))
    if chain is not None and problem.mode != "barrier":
        yield chain.explicit(*pace_schedule(chain), strategy)


def _cheapest(variable: Variable, candidate: Candidate, problem: Problem) -> Shard | None:
    """The exchange in which every replica updates that takes the link least; None if it has that one."""
    current = candidate.strategy.config(variable.name).shards[0]
    if current.encoder.name != "none" or current.staleness or current.asynchronous:
        return None
    options = [Shard()]
    if variable.sparse:
        options.append(Shard(synchronizer="sparse_all_gather"))
    if variable.factor_rows:
        options.append(Shard(synchronizer="factor_broadcast"))
    best = min(options, key=lambda shard: _seconds(variable, shard, candidate, problem))
    if best.synchronizer == current.synchronizer:
        return None
    if current.synchronizer not in REPLICATED:
        return best
    now = _seconds(variable, current, candidate, problem)
    return best if _seconds(variable, best, candidate, problem) < now else None


def _seconds(variable: Variable, shard: Shard, candidate: Candidate, problem: Problem) -> float:
    """On the link, and for factors also what multiplying those of all replicas takes."""
    seconds = link_seconds(candidate.plan, problem.costs, variable, shard)
    if shard.synchronizer == "factor_broadcast":
        replicas = candidate.plan.replicas
        slowest = min(problem.cluster.device_of(rank).peak_flops for rank in replicas)
        seconds += 2 * len(replicas) * variable.factor_rows * variable.elements / slowest
    return seconds


def _rearranged(strategy: Strategy, changes: dict[str, Shard]) -> Strategy:
    """The strategy with these shards, each in a message of its own, in the order of urgency."""
    configs = {name: VariableConfig(shards=(shard,)) for name, shard in changes.items()}
    old = strategy.schedule
    schedule = Schedule(
        policy="priority",
        slice_bytes=old.slice_bytes or _SLICE_BYTES,
        in_flight=old.in_flight,
        credit_bytes=old.credit_bytes,
        mode=old.mode,
    )
    return strategy.model_copy(update={"variables": {**strategy.variables, **configs}, "schedule": schedule})
