"""A strategy → others near it: the same but for its schedule, its groups, or what becomes of a few variables.

Whatever is not changed stays as it was, also groups and owners that no draw of the sampler would have made: the
hand-made builders group better than Algorithm 2 where sizes differ much. Beside drawing all groups anew, one group may
be split, or two that follow each other in backward merged.
"""

import math
from dataclasses import replace

import numpy as np

from offbeat.search.auto.sampler import COLLECTIVES, Choice, Draft, Sampler, synchronizer_of
from offbeat.strategy import Schedule, Strategy
from offbeat.strategy.model import SERVERS, Synchronizer

_VARIATIONS = ("schedule", "groups", "synchronizer", "partition", "servers")
_OFTEN = (0.3, 0.3, 0.15, 0.15, 0.1)
"""How often each is drawn: the first two change all of the step, the others a few variables."""
_SECOND_CHANGE = 0.4
"""Two changes at once may win where either alone loses."""
Shards = list[tuple[str, int]]


def vary(sampler: Sampler, strategy: Strategy, count: int) -> list[Strategy]:
    """So many different neighbours of a strategy, none of them equal to it."""
    # A change may draw what was there before; under the name of a draw that is the same strategy still.
    same = {strategy.digest, sampler.complete(draft_of(sampler, strategy)).digest}
    return sampler.distinct(count, lambda: _neighbour(sampler, strategy), same)


def draft_of(sampler: Sampler, strategy: Strategy) -> Draft:
    """The strategy as a draft; configurations beyond the space become the nearest in it."""
    choices: dict[str, Choice] = {}
    groups: dict[str, tuple[int | None, ...]] = {}
    owners: dict[str, tuple[int, ...]] = {}
    stations = False
    for variable in sampler.variables:
        config = strategy.config(variable.name)
        first = config.shards[0].synchronizer
        kept: Synchronizer = "all_reduce" if first == "factor_broadcast" else first
        choices[variable.name] = Choice(kept, config.partition)
        shards = [config.shard(index) for index in range(config.shard_count)]
        stations |= any(shard.stations for shard in shards)
        if kept in COLLECTIVES:
            groups[variable.name] = tuple(shard.group for shard in shards)
        elif kept in SERVERS and all(shard.owner is not None for shard in shards):
            owners[variable.name] = tuple(shard.owner or 0 for shard in shards)
    schedule = strategy.schedule
    if schedule.policy == "explicit":
        schedule = schedule.model_copy(update={"policy": "priority", "order": ()})
    everywhere = {owner for owned in owners.values() for owner in owned} <= set(sampler.server_ranks("nodes"))
    count = len(_labels(groups, [(name, index) for name in groups for index in range(len(groups[name]))]))
    return Draft(choices, count, schedule, "nodes" if everywhere else "ranks", stations, groups, owners)


def _neighbour(sampler: Sampler, strategy: Strategy) -> Strategy:
    draft, random = draft_of(sampler, strategy), sampler.random
    for _ in range(1 + int(random.random() < _SECOND_CHANGE)):
        match _VARIATIONS[int(random.choice(len(_VARIATIONS), p=_OFTEN))]:
            case "schedule":
                draft = replace(draft, schedule=_changed_schedule(sampler, draft.schedule))
            case "groups":
                draft = _changed_groups(sampler, draft)
            case "servers":
                draft = replace(draft, servers=sampler.servers(), stations=bool(random.random() < 0.5), kept_owners={})
            case what:
                draft = _changed_choices(sampler, draft, what)
    return sampler.complete(draft)


def _changed_schedule(sampler: Sampler, schedule: Schedule) -> Schedule:
    drawn = sampler.schedule()
    fields = ("policy", "slice_bytes", "in_flight", "mode")
    chosen = fields[int(sampler.random.integers(len(fields)))]
    return schedule.model_copy(update={chosen: getattr(drawn, chosen)})


def _changed_choices(sampler: Sampler, draft: Draft, what: str) -> Draft:
    """The synchroniser or the partition of a few variables drawn again; large variables are drawn more often."""
    random = sampler.random
    sizes = np.array([math.sqrt(variable.bytes) + 1 for variable in sampler.variables])
    count = min(len(sizes), 1 + int(random.geometric(0.4)))
    chosen = random.choice(len(sizes), size=count, replace=False, p=sizes / sizes.sum())
    choices, owners = dict(draft.choices), dict(draft.kept_owners)
    groups = None if draft.kept_groups is None else dict(draft.kept_groups)
    for position in chosen.tolist():
        variable = sampler.variables[position]
        synchronizer = choices[variable.name].synchronizer
        if what == "synchronizer":
            synchronizer = synchronizer_of(variable, synchronizer not in SERVERS, "all_reduce")
        choices[variable.name] = Choice(synchronizer, sampler.partition(variable, synchronizer))
        owners.pop(variable.name, None)
        if groups is not None:
            groups.pop(variable.name, None)
    return replace(draft, choices=choices, kept_groups=groups, kept_owners=owners)


def _changed_groups(sampler: Sampler, draft: Draft) -> Draft:
    """All groups anew in another number, one group split, or two neighbours merged."""
    random = sampler.random
    kept = draft.kept_groups or {}
    shards = [(v.name, index) for v in sampler.variables for index in range(len(kept.get(v.name, ())))]
    members = _labels(kept, shards)
    kind = random.random()
    if kind < 0.3 or not shards:
        factor = float(np.exp2(random.normal(0.0, 1.0)))
        return replace(draft, groups=max(1, round(draft.groups * factor)), kept_groups=None)
    several = [group for group in members if len(group) > 1]
    if kind < 0.65 and several:
        split = several[int(random.integers(len(several)))]
        cut = int(random.integers(1, len(split)))
        position = members.index(split)
        members[position : position + 1] = [split[:cut], split[cut:]]
    elif len(members) > 1:
        first = int(random.integers(len(members) - 1))
        members[first : first + 2] = [members[first] + members[first + 1]]
    group_of = {shard: number if len(group) > 1 else None for number, group in enumerate(members) for shard in group}
    groups = {name: tuple(group_of[name, index] for index in range(len(kept[name]))) for name in kept}
    return replace(draft, groups=len(members), kept_groups=groups)


def _labels(groups: dict[str, tuple[int | None, ...]], shards: Shards) -> list[Shards]:
    """The members of every group, in the order of the groups' first members; shards without one are alone."""
    members: dict[object, Shards] = {}
    for name, index in shards:
        group = groups[name][index]
        members.setdefault((name, index) if group is None else group, []).append((name, index))
    return list(members.values())
