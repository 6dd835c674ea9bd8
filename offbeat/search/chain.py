"""Plan + Costs → Chain: the gradients of a step as units that may be fused with a neighbour, cut and reordered.

A `State` says where groups begin, into how many parts each may be cut, and how urgent each is; `Chain.seconds` is the
step it gives and `Chain.strategy` the Strategy that runs it. The link is a single machine: whenever it is free it takes
the most urgent group that is ready, and between two parts of a group it turns to a more urgent one that has become
ready. Parts that follow each other are one slice and pay the cost of a collective once, which makes PACE's uneven
slices. Compute never waits within backward and all messages arrive before the next backward begins, so one step from
backward to backward is the steady state.

With `coarsen`, the variables of one module are one unit (dPRO's Coarsened View, figure 6).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.measured import Costs
from offbeat.cost.tables import Collectives
from offbeat.cost.updates import variable_updates
from offbeat.graph.model import ELEMENTWISE, ITEM_BYTES, Variable
from offbeat.plan import Piece, Plan, Task
from offbeat.plan.compress import encoded_bytes, sparse_bytes
from offbeat.search.chain_kernel import Arrays, serve_chain
from offbeat.search.oracle import StepArrays, arrays_of
from offbeat.search.pace_link import Floats
from offbeat.strategy import Schedule, Shard, Slice, Strategy, VariableConfig

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

MOST_PARTS = 64
"""More cuts than this of one message are not tried."""


@dataclass(frozen=True)
class State:
    """One choice of groups, parts and urgencies; arrays of one entry per unit."""

    borders: Flags
    """Whether a group begins at the unit."""
    parts: Integers
    """Parts into which the group that begins at the unit may be cut."""
    urgency: Floats
    """Lower goes first; a group has the least of its units."""
    barrier: bool = False


@dataclass(frozen=True)
class Chain:
    """Units in the order in which they may be fused: by kind of message, then as backward completes them."""

    names: tuple[tuple[str, ...], ...]
    """Variables of each unit."""
    shards: tuple[Shard, ...]
    ready: Floats
    """Seconds after the start of backward."""
    elements: Integers
    wire: Floats
    """Encoded bytes."""
    update: Floats
    """Seconds of its update, without the cost of the call."""
    overhead: Floats
    per_byte: Floats
    lag: Floats
    forced: Flags
    """Units that cannot share a message with the one before."""
    sliceable: Flags
    portions: Flags
    """Whether its update is applied slice by slice, as slices arrive."""
    forward_order: Integers
    """Units in the order in which forward waits for them."""
    before: Floats
    """Forward seconds before each of those, since the one before it."""
    after: float
    """Forward seconds after the last one."""
    tail: Floats
    """Seconds of forward and updates from each unit's own update on."""
    backward: float
    gap: float
    update_call: float

    def __len__(self) -> int:
        return len(self.names)

    def seconds(self, state: State) -> float:
        """Step time of a state."""
        return float(self.run(state)[0])

    def run(self, state: State) -> tuple[float, Integers, int, Floats]:
        """(step seconds, slices as rows of group, start, stop in issue order, their number, arrival of each group)."""
        return serve_chain(self.arrays, state.borders, state.parts, state.urgency, state.barrier)

    @cached_property
    def arrays(self) -> Arrays:
        """What the kernels take."""
        return Arrays(*(getattr(self, name) for name in Arrays._fields))

    @cached_property
    def least_tail(self) -> Floats:
        """As `tail`, without the updates that may be nearly over when a unit has arrived."""
        update = np.where(self.portions, 0.0, self.update)
        return _tails(self.forward_order, self.before, update, self.after)

    def state(self, *, fused: bool = False, barrier: bool = False) -> State:
        """Every unit alone (or all that can be, together), uncut, most urgent for the next forward first."""
        count = len(self)
        borders = self.forced.copy() if fused else np.ones(count, np.bool_)
        place = np.empty(count)
        place[self.forward_order] = np.arange(count)
        return State(borders, np.ones(count, np.int64), place, barrier)

    def state_of(self, strategy: Strategy) -> State:
        """The state closest to a strategy: its groups, as far as they are neighbours here, and its parts."""
        groups = [strategy.config(names[0]).shards[0].group for names in self.names]
        alone = [i == 0 or group is None or group != groups[i - 1] for i, group in enumerate(groups)]
        borders = np.array(alone, np.bool_) | self.forced
        parts = np.ones(len(self), np.int64)
        if strategy.schedule.slice_bytes is not None:
            parts = self.even_parts(borders, strategy.schedule.slice_bytes)
        shortest: dict[int, int] = {}
        for item in strategy.schedule.order:
            shortest[item.group] = min(shortest.get(item.group, item.stop), item.stop - item.start)
        for units in self.groups(borders) if shortest else ():
            total = int(self.elements[list(units)].sum())
            length = shortest.get(groups[units[0]] or 0, total)
            parts[units[0]] = min(MOST_PARTS, max(1, round(total / length)))
        start = self.state(barrier=strategy.schedule.mode == "barrier")
        return replace(start, borders=borders, parts=parts)

    def even_parts(self, borders: Flags, part_bytes: float) -> Integers:
        """As many parts as make none longer than `part_bytes` on the wire."""
        parts = np.ones(len(self), np.int64)
        starts = np.flatnonzero(borders)
        if len(starts):
            sizes = np.add.reduceat(self.wire, starts)
            parts[starts] = np.maximum(1, np.ceil(sizes / part_bytes)).astype(np.int64)
        return np.where(self.sliceable, parts, 1)

    def groups(self, borders: Flags) -> list[tuple[int, ...]]:
        """Units of each group."""
        return [tuple(part.tolist()) for part in np.split(np.arange(len(self)), np.flatnonzero(borders)[1:])]

    def strategy(self, state: State, base: Strategy) -> Strategy:
        """`base` with the groups, slices and order of a state."""
        _, slices, made, _ = self.run(state)
        order = ((int(group), int(start), int(stop)) for group, start, stop in slices[:made])
        return self.explicit(self.groups(state.borders), order, base, barrier=state.barrier)

    def explicit(
        self,
        groups: Iterable[tuple[int, ...]],
        order: Iterable[tuple[int, int, int]],
        base: Strategy,
        *,
        barrier: bool = False,
    ) -> Strategy:
        """`base` with these groups of units, and (group, start, stop) in this order."""
        configs: dict[str, VariableConfig] = {}
        for number, units in enumerate(groups):
            for unit in units:
                shard = self.shards[unit].model_copy(update={"group": number})
                configs |= dict.fromkeys(self.names[unit], VariableConfig(shards=(shard,)))
        kept = base.schedule.mode if base.schedule.mode != "barrier" else "auto"
        issued = tuple(Slice(group=group, start=start, stop=stop) for group, start, stop in order)
        schedule = Schedule(
            policy="explicit" if issued else "fifo",
            order=issued,
            # An order is kept by one message at a time: two under way share the link.
            in_flight=1,
            mode="barrier" if barrier else kept,
        )
        # Variables keep the order of the base, so that two strategies compare line by line.
        listed = [name for name in base.variables if name in configs]
        ordered = {name: configs[name] for name in dict.fromkeys((*listed, *configs))}
        return base.model_copy(update={"variables": {**base.variables, **ordered}, "schedule": schedule})

    def with_short_ends(
        self, groups: Sequence[tuple[int, ...]], order: Sequence[tuple[int, int, int]]
    ) -> list[tuple[int, int, int]]:
        """The last slice of each group that is updated in portions, cut so that little is left to update at its end."""
        last = {group: place for place, (group, _, _) in enumerate(order)}
        result: list[tuple[int, int, int]] = []
        for place, (group, start, stop) in enumerate(order):
            if self.portions[groups[group][0]] and last[group] == place:
                result += [(group, *part) for part in self._short_ends(list(groups[group]), start, stop)]
            else:
                result.append((group, start, stop))
        return result

    def _short_ends(self, units: list[int], start: int, stop: int) -> list[tuple[int, int]]:
        """A slice cut so that the update of what came before is over when the end arrives.

        And the end likewise, as long as a cut hides at least twice what it costs.
        """
        elements = float(self.elements[units].sum())
        update = float(self.update[units].sum()) / elements
        sent = float((self.wire * self.per_byte)[units].sum()) / elements
        price = float(self.overhead[units[0]]) + self.update_call
        parts: list[tuple[int, int]] = []
        begin = start
        while sent > 0:
            cut = stop - int((stop - begin) * update / (update + sent))
            if cut == stop or (cut - begin) * update < 2 * price:
                break
            parts.append((begin, cut))
            begin = cut
        return [*parts, (begin, stop)]


def chain_of(plan: Plan, costs: Costs, *, coarsen: bool = True, slack_seconds: float = 0.0) -> Chain | None:
    """The chain of a plan in which every variable travels whole and every replica applies its update; else None.

    Compute is that of the slowest rank, lengthened by what communication takes from it in this plan. `slack_seconds`
    are added to every ready time, for orders that must hold though gradients come late.
    """
    arrays = arrays_of(plan, costs)
    variables = plan.graph.gradient_order
    if arrays is None or not variables or any(_travels_in_parts(plan.strategy.config(v.name)) for v in variables):
        return None
    forward, backward = _compute(arrays)
    ends = np.cumsum(backward)
    behind = [s for s in plan.segments if s.phase != "forward" or s.recomputed or s.microbatch]
    ahead = [s for s in plan.segments if s.phase == "forward" and not (s.recomputed or s.microbatch)]
    ready = {name: float(ends[i]) for i, segment in enumerate(behind) for name in segment.completes}
    units = _units(plan, coarsen)
    reads = {name: (i, j) for i, segment in enumerate(ahead) for j, name in enumerate(segment.reads)}
    # The first segment also takes what none reads, after its own.
    unread = (0, len(plan.graph.variables))
    place = [min((reads.get(name, unread) for name in names), default=unread) for names in units]
    order = np.array(sorted(range(len(units)), key=lambda unit: place[unit]), np.int64)
    edges = np.concatenate((np.zeros(1), np.cumsum(forward)))
    at = edges[[place[unit][0] for unit in order.tolist()]]
    shards = tuple(plan.strategy.config(names[0]).shards[0].model_copy(update={"group": None}) for names in units)
    price = {shard: _price(plan, costs, shard) for shard in dict.fromkeys(shards)}
    prices = np.array([price[shard] for shard in shards])
    updates = _updates(plan, costs)
    update = np.array([sum(updates[name] for name in names) for names in units])
    in_portions = costs.portions and plan.graph.optimizer in ELEMENTWISE
    before = np.diff(at, prepend=0.0)
    after = float(edges[-1] - at[-1])
    return Chain(
        names=tuple(units),
        shards=shards,
        ready=np.array([max(ready[name] for name in names) for names in units]) + slack_seconds,
        elements=np.array([sum(plan.graph.variable(name).elements for name in names) for names in units], np.int64),
        wire=np.array(
            [
                float(sum(_wire_bytes(plan.graph.variable(name), shard) for name in names))
                for names, shard in zip(units, shards, strict=True)
            ]
        ),
        update=update,
        overhead=np.ascontiguousarray(prices[:, 0]),
        lag=np.ascontiguousarray(prices[:, 1]),
        per_byte=np.ascontiguousarray(prices[:, 2]),
        forced=_forced(plan, units, shards),
        sliceable=np.array([s.synchronizer == "all_reduce" and s.encoder.sliceable for s in shards], np.bool_),
        portions=np.array([in_portions and _plain(shard) for shard in shards], np.bool_),
        forward_order=order,
        before=before,
        after=after,
        tail=_tails(order, before, update, after),
        backward=float(ends[-1]) if len(ends) else 0.0,
        gap=arrays.gap,
        update_call=costs.update(0, 0.0),
    )


def _plain(shard: Shard) -> bool:
    """Whether its gradient travels as it is and every replica applies it as it comes."""
    return shard.synchronizer == "all_reduce" and shard.encoder.name == "none" and not shard.staleness


def _travels_in_parts(config: VariableConfig) -> bool:
    return config.shard_count > 1


def _compute(arrays: StepArrays) -> tuple[Floats, Floats]:
    """Forward and backward seconds of the slowest role, in a step of the steady state."""
    role = int(np.argmax(arrays.forward.sum(axis=1) + arrays.backward.sum(axis=1)))
    forward, backward = arrays.forward[role], arrays.backward[role]
    if arrays.interference > 0:
        added = arrays.replay()[2][role, -2]
        behind = 1 + len(forward) + len(arrays.update)
        forward = forward + added[1 : 1 + len(forward)]
        backward = backward + added[behind : behind + len(backward)]
    return forward, backward


def _units(plan: Plan, coarsen: bool) -> list[tuple[str, ...]]:
    """Variables that always travel together, by kind of message and in gradient order."""
    chains: dict[object, list[list[Variable]]] = {}
    for variable in plan.graph.gradient_order:
        shard = plan.strategy.config(variable.name).shards[0].model_copy(update={"group": None})
        fusible = shard.synchronizer == "all_reduce"
        units = chains.setdefault((shard, variable.dtype, "" if fusible else variable.name), [])
        if coarsen and units and _module(units[-1][-1]) == _module(variable):
            units[-1].append(variable)
        else:
            units.append([variable])
    return [tuple(variable.name for variable in unit) for units in chains.values() for unit in units]


def _module(variable: Variable) -> str:
    return variable.name.rpartition(".")[0]


def _forced(plan: Plan, units: list[tuple[str, ...]], shards: tuple[Shard, ...]) -> Flags:
    kinds = [
        (shard, plan.graph.variable(names[0]).dtype, "" if shard.synchronizer == "all_reduce" else names[0])
        for names, shard in zip(units, shards, strict=True)
    ]
    return np.array([i == 0 or kind != kinds[i - 1] for i, kind in enumerate(kinds)], np.bool_)


def _wire_bytes(variable: Variable, shard: Shard) -> int:
    """Encoded bytes of one replica's gradient."""
    item = ITEM_BYTES[variable.dtype]
    match shard.synchronizer:
        case "sparse_all_gather":
            return sparse_bytes(Piece(variable.name, tuple((0, length) for length in variable.shape)), variable)
        case "factor_broadcast":
            height = variable.shape[0]
            return variable.factor_rows * (height + variable.elements // height) * item
        case _:
            return encoded_bytes(shard.encoder, variable.shape, item)


def _price(plan: Plan, costs: Costs, shard: Shard) -> tuple[float, float, float]:
    """Seconds for which a collective takes the link without bytes, until its result is there, and for each byte."""
    summed = shard.synchronizer == "all_reduce" and not shard.encoder.gathered
    probe = Task(
        index=0,
        kind="all_reduce" if summed else "all_gather",
        message=0,
        stage=0,
        start=0,
        stop=1,
        ranks=shard.reduction_order or plan.replicas,
        root=None,
        wire_bytes=0,
        waits_for=(),
        after=(),
        delivers=(),
    )
    links = Collectives(plan.cluster)
    overhead, lag = costs.collective(probe, links, in_flight=1)
    megabyte = 10**6
    larger, _ = costs.collective(replace(probe, wire_bytes=megabyte), links, in_flight=1)
    return overhead, lag, (larger - overhead) / megabyte


def _updates(plan: Plan, costs: Costs) -> dict[str, float]:
    """Seconds of each variable's update, without the cost of the call."""
    estimates = variable_updates(plan)
    call = costs.update(0, 0.0)
    return {v.name: costs.update(v.bytes, estimates.get(v.name, 0.0)) - call for v in plan.graph.gradient_order}


def _tails(order: Integers, before: Floats, update: Floats, after: float) -> Floats:
    tail = np.empty(len(order))
    remaining = after
    for place in range(len(order) - 1, -1, -1):
        remaining += update[order[place]]
        tail[order[place]] = remaining
        remaining += before[place]
    return tail


def link_seconds(plan: Plan, costs: Costs, variable: Variable, shard: Shard) -> float:
    """Seconds for which one variable alone would take the link."""
    overhead, _, per_byte = _price(plan, costs, shard)
    return overhead + per_byte * _wire_bytes(variable, shard)
