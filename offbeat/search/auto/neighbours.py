"""Strategies to start a search with, and the neighbours of a strategy.

`starting_strategies` are known systems at the settings people tune them to: a search that has these among its
candidates returns nothing slower than tuning one of those systems by hand would have found, as far as trials can tell.

`vary` changes a strategy's schedule, its groups, or what becomes of a few variables. The rest stays as it was, also
groups and owners that no draw of the sampler would have made: the hand-made builders group better than Algorithm 2
where sizes differ much. Beside drawing all groups anew, one group may be split, or two neighbours merged.
"""

import math
from contextlib import suppress

import numpy as np

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph
from offbeat.search.auto.sampler import COLLECTIVES, Choice, Configs, Sampler, config_of, regrouped
from offbeat.strategy import Shard, Strategy, build_strategy
from offbeat.strategy.model import SERVERS

_VARIATIONS = ("schedule", "groups", "synchronizer", "partition", "servers")
_OFTEN = (0.3, 0.3, 0.15, 0.15, 0.1)
"""How often each is drawn: the first two change the whole step, the others a few variables."""
_SECOND_CHANGE = 0.4
"""Probability of a second change: two changes may win where either alone loses."""
STARTS: dict[str, tuple[dict[str, object], ...]] = {
    "overlap": (
        {},
        {"bucket": "256KiB", "slice_bytes": "512KiB"},
        {"bucket": "512KiB", "slice_bytes": "1MiB"},
        {"bucket": "512KiB", "slice_bytes": "1MiB", "in_flight": 2},
        {"bucket": "1MiB", "slice_bytes": "2MiB", "in_flight": 2},
        {"bucket": "4MiB", "slice_bytes": "4MiB"},
        {"bucket": "16MiB", "slice_bytes": "4MiB"},
    ),
    "fast_servers": ({}, {"in_flight": 2}, {"shard": "256KiB"}),
    "all_reduce": tuple({"chunk": chunk} for chunk in (1, 4, 16, 64)),
    "horovod": tuple({"fusion_bytes": size} for size in ("1MiB", "4MiB", "64MiB")),
    "ddp": tuple({"bucket": size} for size in ("512KiB", "1MiB", "2MiB", "4MiB", "25MiB")),
    "ps_load_balanced": ({},),
    "partitioned_ps": tuple({"threshold": size} for size in ("64KiB", "256KiB", "1MiB")),
    "uneven_partitioned_ps": ({},),
    "parallax": ({},),
}
"""Builders and their settings; those of one builder are one family."""


def starting_strategies(graph: ModelGraph, cluster: ClusterSpec) -> list[Strategy]:
    """Each distinct one once; builders that do not fit the model or the cluster are left out."""
    found: dict[str, Strategy] = {}
    for name, choices in STARTS.items():
        for settings in choices:
            with suppress(StrategyError):
                strategy = build_strategy(name, graph, cluster, **settings)
                found.setdefault(strategy.digest, strategy)
    return list(found.values())


def vary(sampler: Sampler, strategy: Strategy, count: int) -> list[Strategy]:
    """Return `count` distinct neighbours of the strategy, or fewer where there are no more."""
    # A change may draw what was there before; under the name of a draw that is the same strategy still.
    start = as_drawn(sampler, strategy)
    return sampler.distinct(count, lambda: _neighbour(sampler, start), (strategy.digest, start.digest))


def as_drawn(sampler: Sampler, strategy: Strategy) -> Strategy:
    """The nearest strategy that the sampler could have drawn."""
    configs: Configs = {}
    for variable in sampler.variables:
        config = strategy.config(variable.name)
        kept = config.shards[0].synchronizer
        shards = [
            Shard(
                synchronizer=kept,
                group=shard.group if kept in COLLECTIVES else None,
                placement=shard.placement if kept in SERVERS else (),
                stations=shard.stations if kept == "parameter_server" else (),
            )
            for shard in config.shards
        ]
        configs[variable.name] = config_of(config.partition, shards)
    schedule = strategy.schedule
    if schedule.policy == "explicit":
        schedule = schedule.model_copy(update={"policy": "priority", "order": (), "pinned": False})
    return sampler.strategy(configs, schedule)


def _neighbour(sampler: Sampler, strategy: Strategy) -> Strategy:
    configs, schedule, random = dict(strategy.variables), strategy.schedule, sampler.random
    for _ in range(1 + int(random.random() < _SECOND_CHANGE)):
        match _VARIATIONS[int(random.choice(len(_VARIATIONS), p=_OFTEN))]:
            case "schedule":
                drawn, fields = sampler.schedule(), ("policy", "slice_bytes", "in_flight", "credit_bytes", "mode")
                chosen = fields[int(random.integers(len(fields)))]
                schedule = schedule.model_copy(update={chosen: getattr(drawn, chosen)})
            case "groups":
                configs = _changed_groups(sampler, configs)
            case "servers":
                served = {name: config for name, config in configs.items() if config.shards[0].owner is not None}
                choices = {name: Choice(c.shards[0].synchronizer, c.partition) for name, c in served.items()}
                configs = sampler.placed(configs, choices, *sampler.servers())
            case what:
                configs = _changed_variables(sampler, configs, what)
    return sampler.strategy(configs, schedule)


def _changed_variables(sampler: Sampler, configs: Configs, what: str) -> Configs:
    """Redraws the synchroniser or the partition of a few variables, preferably large ones."""
    random = sampler.random
    sizes = np.array([math.sqrt(variable.bytes) + 1 for variable in sampler.variables])
    count = min(len(sizes), 1 + int(random.geometric(0.4)))
    choices = {}
    for position in random.choice(len(sizes), size=count, replace=False, p=sizes / sizes.sum()).tolist():
        variable = sampler.variables[position]
        synchronizer = configs[variable.name].shards[0].synchronizer
        if what == "synchronizer":
            others = [each for each in sampler.synchronizers(variable) if each != synchronizer]
            synchronizer = others[int(random.integers(len(others)))]
        choices[variable.name] = sampler.choice(variable, synchronizer)
    shards = [shard for config in configs.values() for shard in config.shards]
    one_each = {shard.owner for shard in shards if shard.owner is not None} <= set(sampler.node_servers)
    servers = sampler.node_servers if one_each else sampler.cluster.servers or sampler.cluster.workers
    return sampler.placed(configs, choices, servers, next((s.stations for s in shards if s.stations), ()))


def _changed_groups(sampler: Sampler, configs: Configs) -> Configs:
    """Redraws all groups with another number of groups, splits one group, or merges two neighbours."""
    random = sampler.random
    # The members of every group, in the order of the groups' first members; shards without one are alone.
    by_group: dict[object, list[tuple[str, int]]] = {}
    for name in (variable.name for variable in sampler.variables):
        if configs[name].shards[0].synchronizer in COLLECTIVES:
            for index in range(configs[name].shard_count):
                group = configs[name].shard(index).group
                by_group.setdefault((name, index) if group is None else group, []).append((name, index))
    members = list(by_group.values())
    kind = random.random()
    if kind < 0.3 or not members:
        return sampler.grouped(configs, max(1, round(len(members) * float(np.exp2(random.normal(0.0, 1.0))))))
    several = [group for group in members if len(group) > 1]
    if kind < 0.65 and several:
        split = several[int(random.integers(len(several)))]
        cut = int(random.integers(1, len(split)))
        position = members.index(split)
        members[position : position + 1] = [split[:cut], split[cut:]]
    elif len(members) > 1:
        first = int(random.integers(len(members) - 1))
        members[first : first + 2] = [members[first] + members[first + 1]]
    numbers = {shard: number if len(group) > 1 else None for number, group in enumerate(members) for shard in group}
    return regrouped(configs, numbers)
