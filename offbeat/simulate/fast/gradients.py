"""Gradients: predict a step whose gradients are grouped, cut and ordered differently.

Gradients come in units that may share a message with a neighbour. An `Arrangement` says where groups begin, into how
many parts each may be cut, and how urgent each is; `Gradients.seconds` is the step it gives. The link is a single
machine: whenever it is free it takes the most urgent group that is ready, and between two parts of a group it turns to
a more urgent one that has become ready. Parts that follow each other are one slice and pay the cost of a collective
once, which makes PACE's uneven slices. Compute never waits within backward and all messages arrive before the next
backward begins, so one step from backward to backward is the steady state.

With `coarsen`, the variables of one module are one unit (dPRO's Coarsened View, figure 6).
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.measured import Costs, encoding_seconds, variable_updates
from offbeat.cost.tables import Collectives
from offbeat.graph import Variable
from offbeat.plan import Plan, Task
from offbeat.plan.compress import gradient_bytes
from offbeat.plan.messages import ALONE, make_stages
from offbeat.plan.program import applied_as_it_arrives
from offbeat.plan.schedule import sliceable
from offbeat.simulate.fast.arrays import Floats, Integers, StepArrays, arrays_of
from offbeat.simulate.fast.link import Arrays, serve
from offbeat.strategy import Shard

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Arrangement:
    """One choice of groups, parts and urgencies; arrays of one entry per unit."""

    borders: Flags
    """Whether a group begins at the unit."""
    parts: Integers
    """Parts into which the group that begins at the unit may be cut."""
    urgency: Floats
    """Lower goes first; a group has the lowest value of its units."""
    barrier: bool = False


@dataclass(frozen=True)
class Gradients:
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
    as_it_arrives: Flags
    """Whether its update is applied slice by slice, as slices arrive."""
    forward_order: Integers
    """Units in the order in which forward waits for them."""
    before: Floats
    """Forward seconds before each of those, since the one before it."""
    after: float
    """Forward seconds after the last one."""
    backward: float
    slots: Floats
    """Seconds of each of the program's slots."""
    gap: float
    update_call: float

    def __len__(self) -> int:
        return len(self.names)

    def seconds(self, arrangement: Arrangement) -> float:
        """Step time of an arrangement."""
        return float(self.run(arrangement)[0])

    def run(self, arrangement: Arrangement) -> tuple[float, Integers, int, Floats]:
        """(step seconds, slices as rows of group, start, stop in issue order, their number, arrival of each group)."""
        return serve(self.arrays, arrangement.borders, arrangement.parts, arrangement.urgency, arrangement.barrier)

    @cached_property
    def arrays(self) -> Arrays:
        """The kernels' input."""
        return Arrays(*(getattr(self, name) for name in Arrays._fields))

    @cached_property
    def tail(self) -> Floats:
        """Seconds of forward and updates from each unit's own update on."""
        return self._tails(self.update)

    @cached_property
    def least_tail(self) -> Floats:
        """Like `tail`, without the updates that may be nearly done when a unit has arrived."""
        return self._tails(np.where(self.as_it_arrives, 0.0, self.update))

    def _tails(self, update: Floats) -> Floats:
        backwards = self.forward_order[::-1]
        seconds = np.column_stack((update[backwards], self.before[::-1])).ravel()
        tail = np.empty(len(self))
        tail[backwards] = np.cumsum(np.append(self.after, seconds))[1::2]
        return tail

    def arrangement(self, *, fused: bool = False, barrier: bool = False) -> Arrangement:
        """Every unit alone (or all possible ones together), uncut, most urgent for the next forward first."""
        count = len(self)
        borders = self.forced.copy() if fused else np.ones(count, np.bool_)
        place = np.empty(count)
        place[self.forward_order] = np.arange(count)
        return Arrangement(borders, np.ones(count, np.int64), place, barrier)

    def even_parts(self, borders: Flags, part_bytes: float) -> Integers:
        """The number of parts that makes none larger than `part_bytes` on the wire."""
        parts = np.ones(len(self), np.int64)
        starts = np.flatnonzero(borders)
        parts[starts] = np.maximum(1, np.ceil(np.add.reduceat(self.wire, starts) / part_bytes)).astype(np.int64)
        return np.where(self.sliceable, parts, 1)

    def groups(self, borders: Flags) -> list[tuple[int, ...]]:
        """Units of each group."""
        return [tuple(part.tolist()) for part in np.split(np.arange(len(self)), np.flatnonzero(borders)[1:])]


def gradients_of(plan: Plan, costs: Costs, *, coarsen: bool = True, slack_seconds: float = 0.0) -> Gradients | None:
    """The gradients of a plan in which every variable travels whole and every replica applies its update; else None.

    Compute is that of the slowest rank, lengthened by what communication takes from it in this plan. `slack_seconds`
    are added to every ready time, for orders that must hold though gradients come late.
    """
    arrays = arrays_of(plan, costs)
    variables = plan.graph.gradient_order
    if arrays is None or not variables or any(plan.strategy.config(v.name).shard_count > 1 for v in variables):
        return None
    kinds = _units(plan, coarsen)
    units = [tuple(variable.name for variable in unit) for _, unit in kinds]
    shards = tuple(kind[0] for kind, _ in kinds)
    program = plan.program
    forward, backward = _compute(arrays, program.ahead)
    ends = np.cumsum(backward)
    ready = [max(float(ends[program.uses[name].completed - program.ahead]) for name in names) for names in units]
    first_use = [min(program.uses[name][:2] for name in names) for names in units]
    order = np.array(sorted(range(len(units)), key=lambda unit: first_use[unit]), np.int64)
    edges = np.concatenate((np.zeros(1), np.cumsum(forward)))
    at = edges[[first_use[unit][0] for unit in order.tolist()]]
    price = {shard: _price(plan, costs, shard) for shard in dict.fromkeys(shards)}
    prices = np.array([price[shard] for shard in shards])
    call, estimates = costs.update(0, 0.0), variable_updates(plan)
    updates = {
        v.name: costs.update(v.bytes, estimates.get(v.name, 0.0))
        + encoding_seconds(plan, costs, plan.strategy.config(v.name).shards[0].encoder, v.bytes)
        - call
        for v in variables
    }
    return Gradients(
        names=tuple(units),
        shards=shards,
        ready=np.array(ready) + slack_seconds,
        elements=np.array([sum(variable.elements for variable in unit) for _, unit in kinds], np.int64),
        wire=np.array([float(sum(gradient_bytes(kind[0], v.shape, v) for v in unit)) for kind, unit in kinds]),
        update=np.array([sum(updates[name] for name in names) for names in units]),
        overhead=np.ascontiguousarray(prices[:, 0]),
        lag=np.ascontiguousarray(prices[:, 1]),
        per_byte=np.ascontiguousarray(prices[:, 2]),
        forced=np.array([i == 0 or kind != kinds[i - 1][0] for i, (kind, _) in enumerate(kinds)], np.bool_),
        sliceable=np.array([sliceable(shard) for shard in shards], np.bool_),
        as_it_arrives=np.array([costs.portions and applied_as_it_arrives(plan.graph, s) for s in shards], np.bool_),
        forward_order=order,
        before=np.diff(at, prepend=0.0),
        after=float(edges[-1] - at[-1]),
        backward=float(ends[-1]) if len(ends) else 0.0,
        slots=np.concatenate((forward, backward)),
        gap=arrays.gap,
        update_call=call,
    )


def _compute(arrays: StepArrays, ahead: int) -> tuple[Floats, Floats]:
    """Forward and backward seconds of the slowest role, in a step of the steady state."""
    forward, backward = np.split(arrays.slots, [ahead])
    compute = np.ascontiguousarray(arrays.durations[:, arrays.slots])
    role = int(np.argmax(compute[:, :ahead].sum(axis=1) + compute[:, ahead:].sum(axis=1)))
    seconds = arrays.durations[role]
    if arrays.slowed:
        seconds = seconds + arrays.replay()[1][role, -2, :-1]
    return seconds[forward], seconds[backward]


def _units(plan: Plan, coarsen: bool) -> list[tuple[tuple[Shard, str, str], list[Variable]]]:
    """Variables that are always sent together, in gradient order, each with what its message must agree in."""
    kinds: dict[tuple[Shard, str, str], list[list[Variable]]] = {}
    for variable in plan.graph.gradient_order:
        shard = plan.strategy.config(variable.name).shards[0].model_copy(update={"group": None})
        alone = variable.name if shard.synchronizer in ALONE else ""
        units = kinds.setdefault((shard, variable.dtype, alone), [])
        if coarsen and units and units[-1][-1].name.rpartition(".")[0] == variable.name.rpartition(".")[0]:
            units[-1].append(variable)
        else:
            units.append([variable])
    return [(kind, unit) for kind, units in kinds.items() for unit in units]


def _price(plan: Plan, costs: Costs, shard: Shard) -> tuple[float, float, float]:
    """(seconds an empty collective occupies the link, seconds until its result arrives, seconds per byte)."""
    stage = make_stages(shard, plan.replicas, plan.cluster)[0]
    ((ranks, root),) = stage.groups
    # A probe of one element: what a collective costs depends on its kind, its ranks and its bytes.
    probe = Task(0, stage.kind, 0, 0, 0, 1, ranks, root, wire_bytes=0, waits_for=(), after=(), delivers=())
    links = Collectives(plan.cluster)
    overhead, lag, _ = costs.collective(probe, links, in_flight=1)
    megabyte = 10**6
    larger, *_ = costs.collective(replace(probe, wire_bytes=megabyte), links, in_flight=1)
    return overhead, lag, (larger - overhead) / megabyte


def link_seconds(plan: Plan, costs: Costs, variable: Variable, shard: Shard) -> float:
    """Seconds one variable alone would occupy the link."""
    overhead, _, per_byte = _price(plan, costs, shard)
    return overhead + per_byte * gradient_bytes(shard, variable.shape, variable)
