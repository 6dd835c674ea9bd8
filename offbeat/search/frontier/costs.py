"""Units, their configurations and a fine mesh → memory and seconds of every unit and every tensor between units.

TensorOpt, equations 1 and 2, per device:

- m_p: a variable's part, its gradient's and the optimizer's state (`Prices._variables`)
- m_t: the part of each result that backward needs again (`Prices._members`)
- t_c: forward and backward, by the share of the work that one device does (`Prices._members`)
- t_s: completing partial sums, averaging batch statistics, all-reducing gradients (`Prices._sums`, `_variables`)
- t_x: bringing a tensor to its reader's split and its gradient back (`FlowCosts`)

Tensor reuse (section 4.2): where a tensor that backward needs changes its split, both copies are kept, or one is kept
and the other made again in backward (`FlowCosts.options`).

Time is the sum of all of these, as in equation 3: no communication is taken to overlap with computation.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from offbeat.graph.model import ITEM_BYTES, ModelGraph, Operator, divided
from offbeat.search.frontier.algebra import Floats, Ints
from offbeat.search.frontier.configs import Configurations, configurations
from offbeat.search.frontier.units import Flow, Map, Unit, Units
from offbeat.sharding.layout import BUCKET_BYTES, WHOLE
from offbeat.sharding.rescheduling import SLICE_SECONDS, FineMesh, code_of

Keep = Literal["before", "after", "both"]
KEEPS: tuple[Keep, ...] = get_args(Keep)
_FREE_SECONDS = 8 * SLICE_SECONDS
"""Slices only: a copy that is made again by them costs nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class FlowCosts:
    """What one tensor between units costs, for each pair of configurations of its ends."""

    seconds: Floats
    """(K, P) forward and backward together."""
    again: tuple[Floats, Floats]
    """(K, P) seconds to make the copy after re-scheduling again from the one before, and the reverse."""
    held: tuple[Floats, Floats]
    """Bytes for backward of the copy before (K,) and after (P,)."""
    moves: NDArray[np.bool_]
    """(K, P) whether the split of a tensor that backward needs changes at all."""
    count: int
    single: bool

    def options(self, source: Ints, target: Ints) -> tuple[Floats, Floats]:
        """(3, N) bytes beyond the source's own copy, and seconds, of keeping before, after or both."""
        before, after = self.held[0][source], self.held[1][target]
        forth, back = (table[source, target] for table in self.again)
        nothing = np.zeros_like(after)
        memory = np.stack([nothing, after - before if self.single else after, after])
        seconds = np.stack([forth, back if self.single else nothing, nothing])
        moves = self.moves[source, target]
        return np.where(moves, memory, 0.0) * self.count, np.where(moves, seconds, 0.0) * self.count

    def table(self, small: bool, objectives: tuple[str, str]) -> Floats:
        """(K, P, 2) two of the costs, keeping what takes the least memory or the least time."""
        memory, seconds = self.options(*np.indices(self.seconds.shape).reshape(2, -1))
        chosen = preferred(memory, seconds, small), np.arange(self.seconds.size)
        total = self.seconds.ravel() * self.count + seconds[chosen]
        return columns(memory[chosen], 0.0, total, objectives).reshape(*self.seconds.shape, 2)


def preferred(memory: Floats, seconds: Floats, small: bool) -> Ints:
    """Which of the options needs least memory and then time (`small`), or least time and then memory."""
    rounded = np.where(seconds <= _FREE_SECONDS, 0.0, seconds)
    keys = (rounded, memory) if small else (memory, rounded)
    return np.lexsort(keys, axis=0)[0]


class Prices:
    """The costs of all configurations of all units, and of the tensors between them: what FT and the baselines need.

    A unit may choose from `most` configurations."""

    def __init__(self, graph: ModelGraph, mesh: FineMesh, units: Units, most: int = 64) -> None:
        self.graph, self.mesh, self.units = graph, mesh, units
        self.configs = [configurations(unit, mesh.factors, mesh.levels, most) for unit in units.units]
        self._seconds = _operator_seconds(graph, mesh)
        self._updates = {op.variables[0]: self._seconds.get(op.name, 0.0) for op in graph.phase("optimizer")}
        self._radix = np.array(mesh.factors, np.float64)
        self._bucket_bytes = _bucket_bytes(graph)
        self._known: dict[tuple[object, ...], FlowCosts] = {}
        self.unit_costs = [self._unit(index) for index in range(len(units.units))]
        """(K, 3) memory in bytes, compute and network seconds of each unit."""
        self.flow_costs = [self._flow(flow) for flow in units.flows]
        self.base_bytes = sum(c.bytes for c in graph.constants) + sum(t.bytes for t in graph.inputs) / mesh.devices
        """Constants and the batch, which no configuration changes."""

    def tables(
        self, small: bool, objectives: tuple[str, str] = ("memory", "time")
    ) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """Operator and edge costs for `track`, in two of memory, time, communication and money.

        An edge's memory is negative where keeping only the copy after re-scheduling frees the one before."""
        ops = [columns(c[:, 0], c[:, 1], c[:, 2], objectives) for c in self.unit_costs]
        edges: dict[tuple[int, int], Floats] = {}
        tables = {costs: costs.table(small, objectives) for costs in self._known.values()}
        for flow, costs in zip(self.units.flows, self.flow_costs, strict=True):
            table = tables[costs]
            if flow.source == flow.target:
                ops[flow.source] = ops[flow.source] + np.einsum("kkc->kc", table)
                continue
            pair = (min(flow.source, flow.target), max(flow.source, flow.target))
            turned = table if flow.source < flow.target else table.transpose(1, 0, 2)
            edges[pair] = edges.get(pair, 0.0) + turned
        return ops, edges

    def _unit(self, index: int) -> Floats:
        """(K, 3) memory, compute and network seconds."""
        unit, configs = self.units.units[index], self.configs[index]
        costs = np.zeros((len(configs), 3))
        self._members(unit, configs, costs)
        self._sums(unit, configs, costs)
        self._variables(index, unit, configs, costs)
        return costs

    def share(self, symbols: Ints, labels: Collection[int]) -> Floats:
        """(K,) the part of something with these labels that one device has."""
        split = np.isin(symbols, [label for label in labels if label >= 0])
        return np.prod(np.where(split, 1.0 / self._radix, 1.0), axis=1)

    def _members(self, unit: Unit, configs: Configurations, costs: Floats) -> None:
        for number, member in enumerate(unit.members):
            seconds = sum(self._seconds.get(name, 0.0) for name in member.names)
            costs[:, 1] += seconds * self.share(configs.symbols(unit, number), member.rule.labels)
            kept = sum(self.graph.operator(name).activation_bytes for name in member.names)
            if kept:
                result = configs.symbols(unit, number, result=True)
                costs[:, 0] += kept * self.share(result, member.rule.outputs[0])
            for shape, labels in member.rule.data:
                costs[:, 2] += self._loading(shape, labels, configs.symbols(unit, number)) * len(member.names)

    def _loading(self, shape: tuple[int, ...], labels: Map, symbols: Ints) -> Floats:
        """The batch is loaded by data parallelism and then re-scheduled to the split that is asked for."""
        spec = next(tensor for tensor in self.graph.inputs if tensor.shape == shape)
        loaded = 0 if shape and shape[0] % self.mesh.devices == 0 else WHOLE
        fine, rank = len(self.mesh.factors), len(shape)
        wanted = code_of(self._layouts(symbols, labels)[:, :fine], rank)
        return self.mesh.paths(rank, spec.bytes)[code_of((loaded,) * fine, rank), wanted]

    def _sums(self, unit: Unit, configs: Configurations, costs: Floats) -> None:
        head = unit.members[unit.head]
        count = len(head.names)
        size = head.operator.outputs[0].bytes
        held = size * self.share(configs.before, head.rule.outputs[0])
        for k, axes in enumerate(_axes_with(configs.before, unit.sums)):
            if axes and configs.after[k, axes[0]] >= 0:
                part = held[k] / self.mesh.parts(axes)
                costs[k, 2] += count * self.mesh.seconds("reduce_scatter", axes, held[k])
                costs[k, 2] += count * self.mesh.seconds("all_gather", axes, part)
            else:
                costs[k, 2] += count * self.mesh.seconds("all_reduce", axes, held[k])
        for number, member in enumerate(unit.members):
            if member.rule.statistics:
                bytes_each = member.rule.statistics_elements * ITEM_BYTES[member.operator.outputs[0].dtype]
                for k, axes in enumerate(_axes_with(configs.symbols(unit, number), member.rule.statistics)):
                    costs[k, 2] += 2 * len(member.names) * self.mesh.seconds("all_reduce", axes, bytes_each)

    def _variables(self, index: int, unit: Unit, configs: Configurations, costs: Floats) -> None:
        """A gradient costs its share of a bucket, because the runtime sums small ones of a group of devices together.

        Which others are in the bucket depends on what is chosen for them, so they are taken to be split alike.
        """
        for name, (number, labels) in unit.variables.items():
            if self.units.owner[name] != index:
                continue
            variable = self.graph.variable(name)
            symbols = configs.symbols(unit, number)
            share = self.share(symbols, labels)
            trained = variable.gradient_from is not None
            copies = 2 + self.graph.optimizer_slots if trained else 1
            costs[:, 0] += variable.bytes * copies * share
            if not trained:
                continue
            costs[:, 1] += self._updates.get(name, 0.0) * share
            size = variable.updated_elements * ITEM_BYTES[variable.dtype]
            bucket = max(size, self._bucket_bytes[variable.dtype])
            # Devices that differ along an axis that does not split the variable hold terms of its gradient.
            for k, axes in enumerate(_axes_with(symbols, _involved(unit, number) - set(labels))):
                costs[k, 2] += self.mesh.seconds("all_reduce", axes, bucket * float(share[k])) * size / bucket

    def _layouts(self, symbols: Ints, labels: Map, involved: frozenset[int] = frozenset()) -> Ints:
        """(K, 2F) the tensor axis that each fine axis splits, then whether the gradient is partial over it."""
        axis_of = np.full(max(symbols.max(initial=0), *labels, 0) + 2, WHOLE)
        for axis, label in enumerate(labels):
            if label >= 0:
                axis_of[label] = axis
        # No label, -1, is looked up at the end.
        return np.concatenate([axis_of[symbols], np.isin(symbols, list(involved - set(labels)))], axis=1)

    def _flow(self, flow: Flow) -> FlowCosts:
        source, target = self.units.units[flow.source], self.units.units[flow.target]
        axes = [a for a, ends in enumerate(zip(flow.given, flow.taken, strict=True)) if max(ends) >= 0]
        given, taken = (tuple(labels[a] for a in axes) for labels in (flow.given, flow.taken))
        from_symbols = self.configs[flow.source].symbols(source, flow.member, result=not flow.is_variable)
        to_symbols = self.configs[flow.target].symbols(target, flow.reader)
        own = _involved(source, flow.member) if flow.is_variable else frozenset()
        before = self._layouts(from_symbols, given, own)
        after = self._layouts(to_symbols, taken, _involved(target, flow.reader))
        alike = replace(flow, source=0, member=0, target=0, reader=0, given=given, taken=taken)
        key = (alike, *(array.tobytes() for array in (from_symbols, to_symbols, before, after)))
        if key not in self._known:
            held = (flow.kept_bytes * self.share(from_symbols, given), flow.kept_bytes * self.share(to_symbols, taken))
            self._known[key] = self._moved(flow, len(axes), before, after, held)
        return self._known[key]

    def _moved(self, flow: Flow, rank: int, before: Ints, after: Ints, held: tuple[Floats, Floats]) -> FlowCosts:
        fine = len(self.mesh.factors)
        paths = self.mesh.paths(rank, flow.bytes)
        out, into = (code_of(layouts[:, :fine], rank) for layouts in (before, after))
        forth, back = paths[np.ix_(out, into)], paths[np.ix_(into, out)].T
        kinds, which = np.unique(after, axis=0, return_inverse=True)
        rows = []
        for kind in kinds.tolist():
            partial = tuple(axis for axis in range(fine) if kind[fine + axis])
            rows.append(self.mesh.completed(rank, flow.bytes, tuple(kind[:fine]), partial)[out])
        gradient = np.stack(rows, axis=1)[:, which.ravel()]
        if flow.is_variable:
            # Equal terms of one gradient are added where they are, before the owner's sum.
            gradient = np.where((before[:, None] == after[None, :]).all(axis=2), 0.0, gradient)
        needed = (out[:, None] != into[None, :]) & (flow.kept_bytes > 0)
        return FlowCosts(forth + gradient, (forth, back), held, needed, flow.count, flow.single)


def columns(memory: Floats, compute: Floats | float, network: Floats, objectives: tuple[str, str]) -> Floats:
    """Two of the costs side by side."""
    # Money is time at a fixed price, so it orders configurations as time does.
    named = {"memory": memory, "time": compute + network, "communication": network, "money": compute + network}
    return np.stack([named[objective] for objective in objectives], axis=-1)


def _bucket_bytes(graph: ModelGraph) -> dict[str, int]:
    """By dtype, the bytes of gradients that the runtime sums together where all are split alike: all, or a bucket."""
    whole: dict[str, int] = defaultdict(int)
    for variable in graph.variables:
        if variable.gradient_from is not None:
            whole[variable.dtype] += variable.updated_elements * ITEM_BYTES[variable.dtype]
    return {dtype: min(size, BUCKET_BYTES) for dtype, size in whole.items()}


def _involved(unit: Unit, number: int) -> frozenset[int]:
    """The labels whose split makes terms of the gradient of what a member reads.

    A view of a weight is split as its reader in the unit uses it, so it is the reader's labels that count."""
    member = unit.members[number]
    if number >= unit.head and not (member.operator.kind == "view" and member.operator.variables):
        return member.rule.labels
    return frozenset().union(*(other.rule.labels for other in unit.members))


def _axes_with(symbols: Ints, labels: Collection[int]) -> list[tuple[int, ...]]:
    """For each configuration the fine axes that split one of these labels."""
    return [tuple(np.flatnonzero(row).tolist()) for row in np.isin(symbols, list(labels))]


def _operator_seconds(graph: ModelGraph, mesh: FineMesh) -> dict[str, float]:
    """Seconds of each forward operator with its backward, and of each update, on the slowest device.

    A backward operator belongs to the forward operators of its kind in its module, by their time."""
    devices = [mesh.cluster.device_of(rank) for rank in range(mesh.devices)]
    peak = min(device.peak_flops for device in devices)
    bandwidth = min(device.memory_bandwidth for device in devices)
    alone = {operator.name: operator.estimate(peak, bandwidth) for operator in graph.operators}
    pools: dict[object, list[str]] = defaultdict(list)
    for operator in graph.phase("forward"):
        for key in _pools(operator):
            pools[key].append(operator.name)
    whole = {key: sum(alone[name] for name in names) for key, names in pools.items()}
    spent: dict[object, float] = defaultdict(float)
    for operator in graph.phase("backward"):
        spent[next((key for key in _pools(operator) if whole.get(key)), None)] += alone[operator.name]
    total = dict(alone)
    for pool, seconds in spent.items():
        for name, share in divided(seconds, {name: alone[name] for name in pools[pool]}).items():
            total[name] += share
    return total


def _pools(operator: Operator) -> tuple[object, ...]:
    return (operator.module, operator.kind), operator.module, None
