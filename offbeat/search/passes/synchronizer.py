"""The pass that changes how variables are synchronised: all-reduce, gathered rows, broadcast factors or servers.

Only exchanges that give the same update are tried. Variables that change leave their group;
the later passes fuse, cut and order what results.
"""

from collections.abc import Iterator
from itertools import cycle

from offbeat.graph import Variable
from offbeat.plan.model import REPLICATED
from offbeat.search.arrange import explicit, rescheduled
from offbeat.search.pace.strategy import pace_schedule
from offbeat.search.passes.problem import Candidate, Problem, register_pass
from offbeat.simulate.fast.gradients import link_seconds
from offbeat.strategy import Shard, Strategy, VariableConfig

_SERVED = 2
"""Variables, the largest ones, that are tried on a server."""
SLICE_BYTES = 2 * 2**20
_SUMMED_SLICES, _SUMMED_IN_FLIGHT = (2**19, 2**20), 4
"""Bytes of slices that servers sum, and how many of them are in flight: each root has its own."""


@register_pass("synchronizer", order=50)
def synchronizer(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Every variable by what takes the link least; all summed by the cluster's servers and fast workers, if it has
    servers; then the largest ones, and sparse ones, on single servers."""
    if len(candidate.plan.replicas) < 2:
        return
    strategy = candidate.strategy
    variables = [v for v in problem.graph.gradient_order if strategy.config(v.name).shard_count == 1]
    cheapest = {v.name: shard for v in variables if (shard := _cheapest(v, candidate, problem)) is not None}
    if cheapest:
        changed = _rearranged(strategy, cheapest)
        yield changed
        gradients = problem.gradients(problem.evaluate(changed, "trial"))
        if gradients is not None and problem.mode != "barrier":
            # Without PACE's schedule it would lose against a candidate that has one.
            yield explicit(gradients, *pace_schedule(gradients), changed)
    if problem.cluster.servers:
        summed = {v.name: strategy.config(v.name).summed for v in problem.graph.gradient_order}
        through = strategy.model_copy(update={"variables": strategy.variables | summed})
        for size in _SUMMED_SLICES:
            fields = {"policy": "priority", "slice_bytes": size, "in_flight": _SUMMED_IN_FLIGHT, "order": ()}
            yield rescheduled(through, **fields, pinned=False)
    owners = problem.cluster.servers or candidate.plan.replicas
    dense = sorted((v for v in variables if not v.sparse), key=lambda v: -v.bytes)
    for variable, owner in zip(dense[:_SERVED], cycle(owners), strict=False):
        shard = Shard(synchronizer="parameter_server", placement=(owner,))
        yield _rearranged(strategy, {variable.name: shard})
    sparse = zip((v.name for v in variables if v.sparse), cycle(owners), strict=False)
    shards = {name: Shard(synchronizer="sparse_parameter_server", placement=(owner,)) for name, owner in sparse}
    if shards:
        yield _rearranged(strategy, shards)


def _cheapest(variable: Variable, candidate: Candidate, problem: Problem) -> Shard | None:
    """The cheapest exchange on the link in which every replica updates; None if it has that one."""
    current = candidate.strategy.config(variable.name).shards[0]
    if current.encoder.name != "none" or current.staleness or current.asynchronous:
        return None
    replicas = candidate.plan.replicas

    def seconds(shard: Shard) -> float:
        """On the link, and for factors also what multiplying those of all replicas takes."""
        link = link_seconds(candidate.plan, problem.costs, variable, shard)
        if shard.synchronizer != "factor_broadcast":
            return link
        slowest = min(problem.cluster.device_of(rank).peak_flops for rank in replicas)
        return link + 2 * len(replicas) * variable.factor_rows * variable.elements / slowest

    options = [Shard()]
    if variable.sparse:
        options.append(Shard(synchronizer="sparse_all_gather"))
    if variable.factor_rows:
        options.append(Shard(synchronizer="factor_broadcast"))
    best = min(options, key=seconds)
    if best.synchronizer == current.synchronizer:
        return None
    return best if current.synchronizer not in REPLICATED or seconds(current) > seconds(best) else None


def _rearranged(strategy: Strategy, changes: dict[str, Shard]) -> Strategy:
    """The strategy with these shards, each in its own message, in the order of urgency."""
    configs = {name: VariableConfig(shards=(shard,)) for name, shard in changes.items()}
    changed = strategy.model_copy(update={"variables": {**strategy.variables, **configs}})
    size = strategy.schedule.slice_bytes or SLICE_BYTES
    return rescheduled(changed, policy="priority", slice_bytes=size, order=(), pinned=False)
