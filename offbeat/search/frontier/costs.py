"""Units, their configurations and a fine mesh → memory and seconds of every unit and every tensor between units.

TensorOpt, equations 1 and 2, per device:

- m_p: a variable's part, its gradient's and the optimizer's state (`_Prices._variables`)
- m_t: the part of each result that backward needs again (`_Prices._members`)
- t_c: forward and backward, by the share of the work that one device does (`_Prices._members`)
- t_s: completing partial sums, averaging batch statistics, all-reducing gradients (`_Prices._sums`, `_variables`)
- t_x: bringing a tensor to its reader's split and its gradient back (`FlowCosts`)

Tensor reuse (section 4.2): where a tensor that backward needs changes its split, both copies are kept, or one is kept
and the other made again in backward (`FlowCosts.options`).

Time is the sum of all of these, as in equation 3: no communication is taken to overlap with computation.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from offbeat.graph.model import ITEM_BYTES, ModelGraph, Operator
from offbeat.search.frontier.algebra import Floats
from offbeat.search.frontier.configs import Configurations, configurations
from offbeat.search.frontier.resharding import SLICE_SECONDS, FineMesh, layout_of
from offbeat.search.frontier.rules import Map
from offbeat.search.frontier.units import Flow, Unit, Units

Keep = Literal["before", "after", "both"]
KEEPS: tuple[Keep, ...] = get_args(Keep)
_FREE_SECONDS = 8 * SLICE_SECONDS
"""Slices only: a copy that is made again by them costs nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class FlowCosts:
    """What one tensor between units costs, for each pair of configurations of its ends."""

    flow: Flow
    seconds: Floats
    """(K, P) forward and backward together."""
    again: tuple[Floats, Floats]
    """(K, P) seconds to make the copy after re-scheduling again from the one before, and the reverse."""
    held: tuple[Floats, Floats]
    """Bytes for backward of the copy before (K,) and after (P,)."""
    moves: NDArray[np.bool_]
    """(K, P) whether the split changes at all."""

    def options(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """(3, N) bytes beyond the source's own copy, and seconds, of keeping before, after or both."""
        before, after = self.held[0][source], self.held[1][target]
        moves = self.moves[source, target]
        forth, back = (table[source, target] for table in self.again)
        reversible = self.flow.single and self.flow.kept_bytes > 0
        memory = np.stack([np.zeros_like(after), after - before if reversible else after, after])
        seconds = np.stack([forth, back if reversible else np.zeros_like(back), np.zeros_like(after)])
        needed = moves & (self.flow.kept_bytes > 0)
        return np.where(needed, memory, 0.0) * self.flow.count, np.where(needed, seconds, 0.0) * self.flow.count

    def table(self, small: bool) -> Floats:
        """(K, P, 2) memory and network seconds, keeping what takes the least memory or the least time."""
        first, second = np.meshgrid(*(np.arange(n) for n in self.seconds.shape), indexing="ij")
        memory, seconds = self.options(first.ravel(), second.ravel())
        chosen = preferred(memory, seconds, small)
        columns = np.arange(chosen.size)
        total = self.seconds.ravel() * self.flow.count + seconds[chosen, columns]
        return np.stack([memory[chosen, columns], total], axis=-1).reshape(*self.seconds.shape, 2)


def preferred(memory: Floats, seconds: Floats, small: bool) -> NDArray[np.int64]:
    """Which of the options needs least memory and then time (`small`), or least time and then memory."""
    rounded = np.where(seconds <= _FREE_SECONDS, 0.0, seconds)
    keys = (rounded, memory) if small else (memory, rounded)
    return np.lexsort(keys, axis=0)[0]


@dataclass(slots=True)
class Prices:
    """Everything FT and the baselines need to know."""

    graph: ModelGraph
    mesh: FineMesh
    units: Units
    configs: list[Configurations]
    unit_costs: list[Floats]
    """(K, 3) memory in bytes, compute and network seconds of each unit."""
    flow_costs: list[FlowCosts]
    base_bytes: float
    """Constants and the batch, which no configuration changes."""

    def tables(
        self, small: bool, objectives: tuple[str, str] = ("memory", "time")
    ) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """Operator and edge costs for `track`, in two of memory, time, communication and money."""
        ops = [_columns(c[:, 0], c[:, 1], c[:, 2], objectives) for c in self.unit_costs]
        edges: dict[tuple[int, int], Floats] = {}
        known: dict[tuple[object, ...], Floats] = {}
        for costs in self.flow_costs:
            flow = costs.flow
            key = (id(costs.seconds), id(costs.held[0]), id(costs.held[1]), flow.kept_bytes, flow.count, flow.single)
            if key not in known:
                table = costs.table(small)
                known[key] = _columns(table[..., 0], 0.0, table[..., 1], objectives)
            table = known[key]
            if flow.source == flow.target:
                ops[flow.source] = ops[flow.source] + np.einsum("kkc->kc", table)
                continue
            pair = (flow.source, flow.target) if flow.source < flow.target else (flow.target, flow.source)
            turned = table if flow.source < flow.target else table.transpose(1, 0, 2)
            edges[pair] = edges[pair] + turned if pair in edges else turned
        return _lifted(ops, edges)


def _columns(memory: Floats, compute: Floats | float, network: Floats, objectives: tuple[str, str]) -> Floats:
    # Money is time at a fixed price, so it orders configurations as time does.
    named = {"memory": memory, "time": compute + network, "communication": network, "money": compute + network}
    return np.stack([named[objective] for objective in objectives], axis=-1)


def _lifted(
    ops: list[Floats], edges: dict[tuple[int, int], Floats]
) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
    """The same sums without negative costs, which `track` refuses: keeping only the copy after re-scheduling frees the
    one before, so what an edge saves is taken from the operator whose copy it is, or else counted as nothing."""
    for (i, j), table in list(edges.items()):
        for end in (i, j):
            table = edges[i, j]  # noqa: PLW2901 - the first end may have changed it
            freed = np.minimum(table.min(axis=1 if end == i else 0), 0.0)
            freed = -np.minimum(-freed, ops[end])
            if freed.any():
                ops[end] = ops[end] + freed
                edges[i, j] = table - (freed[:, None] if end == i else freed[None, :])
        edges[i, j] = np.maximum(edges[i, j], 0.0)
    return ops, edges


def price(graph: ModelGraph, mesh: FineMesh, units: Units, most: int = 64) -> Prices:
    """The costs of all configurations of all units, and of the tensors between them."""
    configs = [configurations(unit, mesh.factors, mesh.levels, most) for unit in units.units]
    prices = _Prices(graph, mesh, units, configs)
    unit_costs = [prices.unit(index) for index in range(len(units.units))]
    flows = [prices.flow(flow) for flow in units.flows]
    base = sum(c.bytes for c in graph.constants) + sum(t.bytes for t in graph.inputs) / mesh.devices
    return Prices(graph, mesh, units, configs, unit_costs, flows, float(base))


class _Prices:
    def __init__(self, graph: ModelGraph, mesh: FineMesh, units: Units, configs: list[Configurations]) -> None:
        self.graph, self.mesh, self.units, self.configs = graph, mesh, units, configs
        self.seconds = _operator_seconds(graph, mesh)
        self.updates = {op.variables[0]: self.seconds.get(op.name, 0.0) for op in graph.phase("optimizer")}
        self.radix = np.array(mesh.factors, np.float64)
        self._flows: dict[tuple[object, ...], tuple[Floats, Floats, Floats, NDArray[np.bool_]]] = {}
        self._held: dict[tuple[object, ...], Floats] = {}

    def unit(self, index: int) -> Floats:
        """(K, 3) memory, compute and network seconds."""
        unit, configs = self.units.units[index], self.configs[index]
        costs = np.zeros((len(configs), 3))
        self._members(unit, configs, costs)
        self._sums(unit, configs, costs)
        self._variables(index, unit, configs, costs)
        return costs

    def _share(self, symbols: NDArray[np.int64], labels: Sequence[int] | frozenset[int]) -> Floats:
        """(K,) the part of something with these labels that one device has."""
        split = np.isin(symbols, [label for label in labels if label >= 0])
        return np.prod(np.where(split, 1.0 / self.radix, 1.0), axis=1)

    def _members(self, unit: Unit, configs: Configurations, costs: Floats) -> None:
        for number, member in enumerate(unit.members):
            seconds = sum(self.seconds.get(name, 0.0) for name in member.names)
            costs[:, 1] += seconds * self._share(configs.symbols(unit, number), member.labels)
            kept = sum(self.graph.operator(name).activation_bytes for name in member.names)
            if kept:
                result = configs.symbols(unit, number, result=True)
                costs[:, 0] += kept * self._share(result, member.rule.outputs[0])
            for shape, labels in member.rule.data:
                costs[:, 2] += self._loading(shape, labels, configs.symbols(unit, number)) * len(member.names)

    def _loading(self, shape: tuple[int, ...], labels: Map, symbols: NDArray[np.int64]) -> Floats:
        """The batch is loaded by data parallelism and then re-scheduled to the split that is asked for."""
        spec = next(tensor for tensor in self.graph.inputs if tensor.shape == shape)
        loaded = 0 if shape and shape[0] % self.mesh.devices == 0 else -1
        rank = len(shape)
        codes, _ = self._codes(symbols, labels, frozenset())
        first = 0
        for _ in self.mesh.factors:
            first = first * (rank + 1) + loaded + 1
        return self._paths(rank, spec.bytes)[first, codes]

    def _paths(self, rank: int, size: int) -> Floats:
        return self.mesh.paths(rank, size)

    def _sums(self, unit: Unit, configs: Configurations, costs: Floats) -> None:
        head = unit.members[unit.head]
        count = len(head.names)
        size = head.operator.outputs[0].bytes
        held = size * self._share(configs.before, head.rule.outputs[0])
        summed = np.isin(configs.before, list(unit.sums))
        for k in range(len(configs)):
            axes = tuple(int(axis) for axis in np.flatnonzero(summed[k]))
            if not axes:
                continue
            if configs.after[k, axes[0]] < 0:
                costs[k, 2] += count * self.mesh.seconds("all_reduce", axes, held[k])
            else:
                part = held[k] / self.mesh.parts(axes)
                costs[k, 2] += count * self.mesh.seconds("reduce_scatter", axes, held[k])
                costs[k, 2] += count * self.mesh.seconds("all_gather", axes, part)
        for number, member in enumerate(unit.members):
            if member.rule.statistics:
                averaged = np.isin(configs.symbols(unit, number), list(member.rule.statistics))
                bytes_each = member.rule.statistics_elements * ITEM_BYTES[member.operator.outputs[0].dtype]
                for k in range(len(configs)):
                    axes = tuple(int(axis) for axis in np.flatnonzero(averaged[k]))
                    costs[k, 2] += 2 * len(member.names) * self.mesh.seconds("all_reduce", axes, bytes_each)

    def _variables(self, index: int, unit: Unit, configs: Configurations, costs: Floats) -> None:
        """Gradients that are summed over the same devices travel together."""
        together: list[dict[tuple[int, ...], float]] = [defaultdict(float) for _ in range(len(configs))]
        for name, (number, labels) in unit.variables.items():
            if self.units.owner[name] != index:
                continue
            variable = self.graph.variable(name)
            symbols = configs.symbols(unit, number)
            share = self._share(symbols, labels)
            trained = variable.gradient_from is not None
            copies = 2 + self.graph.optimizer_slots if trained else 1
            costs[:, 0] += variable.bytes * copies * share
            if not trained:
                continue
            costs[:, 1] += self.updates.get(name, 0.0) * share
            size = variable.updated_elements * ITEM_BYTES[variable.dtype]
            partial = self._partial(unit, number, symbols, labels)
            for k in range(len(configs)):
                axes = tuple(int(axis) for axis in np.flatnonzero(partial[k]))
                if axes:
                    together[k][axes] += size * float(share[k])
        for k, messages in enumerate(together):
            costs[k, 2] += sum(self.mesh.seconds("all_reduce", axes, size) for axes, size in messages.items())

    def _partial(self, unit: Unit, number: int, symbols: NDArray[np.int64], labels: Map) -> NDArray[np.bool_]:
        """(K, F) where devices hold different terms of this tensor's gradient."""
        return np.isin(symbols, list(_involved(unit, number) - set(labels)))

    def _codes(
        self, symbols: NDArray[np.int64], labels: Map, involved: frozenset[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(K,) the layout's number, and the fine axes over which the gradient is partial as bits."""
        highest = int(max(symbols.max(initial=0), max(labels, default=0), 0))
        axis_of = np.zeros(highest + 2, np.int64)
        for axis, label in enumerate(labels):
            if label >= 0:
                axis_of[label + 1] = axis + 1
        digits = axis_of[symbols + 1]
        fine = symbols.shape[1]
        weights = (len(labels) + 1) ** np.arange(fine - 1, -1, -1)
        terms = np.isin(symbols, list(involved - set(labels)))
        return digits @ weights, terms @ (1 << np.arange(fine))

    def flow(self, flow: Flow) -> FlowCosts:
        source, target = self.units.units[flow.source], self.units.units[flow.target]
        axes = [a for a, ends in enumerate(zip(flow.given, flow.taken, strict=True)) if max(ends) >= 0]
        given, taken = (tuple(labels[a] for a in axes) for labels in (flow.given, flow.taken))
        is_variable = bool(flow.variable)
        from_symbols = self.configs[flow.source].symbols(source, flow.member, result=not is_variable)
        to_symbols = self.configs[flow.target].symbols(target, flow.reader)
        own = _involved(source, flow.member) if is_variable else frozenset()
        out, terms = self._codes(from_symbols, given, own)
        into, partial = self._codes(to_symbols, taken, _involved(target, flow.reader))
        key = (len(axes), flow.bytes, out.tobytes(), into.tobytes(), partial.tobytes(), is_variable and terms.tobytes())
        if key not in self._flows:
            self._flows[key] = self._moved(len(axes), flow.bytes, (out, terms), (into, partial), is_variable)
        seconds, forth, back, moves = self._flows[key]
        held = tuple(
            self._kept(flow.kept_bytes, symbols, labels)
            for symbols, labels in ((from_symbols, given), (to_symbols, taken))
        )
        return FlowCosts(flow, seconds, (forth, back), held, moves)  # type: ignore[arg-type]

    def _kept(self, size: int, symbols: NDArray[np.int64], labels: Map) -> Floats:
        key = (size, symbols.tobytes(), labels)
        if key not in self._held:
            self._held[key] = size * self._share(symbols, labels)
        return self._held[key]

    def _moved(
        self,
        rank: int,
        size: int,
        given: tuple[NDArray[np.int64], NDArray[np.int64]],
        taken: tuple[NDArray[np.int64], NDArray[np.int64]],
        is_variable: bool,
    ) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
        fine = len(self.mesh.factors)
        paths = self._paths(rank, size)
        (out, terms), (into, partial) = given, taken
        forth, back = paths[np.ix_(out, into)], paths[np.ix_(into, out)].T
        kinds, which = np.unique(np.stack([into, partial]), axis=1, return_inverse=True)
        rows = [
            self.mesh.completed(rank, size, layout_of(int(code), rank, fine), _bits(int(mask)))[out]
            for code, mask in kinds.T
        ]
        gradient = np.stack(rows, axis=1)[:, which.ravel()]
        if is_variable:
            # Equal terms of one gradient are added where they are and travel with the owner's.
            alike = (out[:, None] == into[None, :]) & (terms[:, None] == partial[None, :])
            gradient = np.where(alike, 0.0, gradient)
        return forth + gradient, forth, back, out[:, None] != into[None, :]


def _involved(unit: Unit, number: int) -> frozenset[int]:
    """The labels whose split makes terms of the gradient of what a member reads.

    A view of a weight is split as its reader in the unit uses it, so it is the reader's labels that count."""
    member = unit.members[number]
    if number >= unit.head and not (member.operator.kind == "view" and member.operator.variables):
        return member.labels
    return frozenset().union(*(other.labels for other in unit.members))


def _bits(mask: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(mask.bit_length()) if mask >> axis & 1)


def _operator_seconds(graph: ModelGraph, mesh: FineMesh) -> dict[str, float]:
    """Seconds of each forward operator with its backward, and of each update, on the slowest device.

    A backward operator belongs to the forward operators of its kind in its module, by their time."""
    nodes = {mesh.cluster.node_of(rank): mesh.cluster.device_of(rank) for rank in range(mesh.devices)}
    peak = min(node.peak_flops for node in nodes.values())
    bandwidth = min(node.memory_bandwidth for node in nodes.values())

    def alone(operator: Operator) -> float:
        if operator.seconds is not None:
            return operator.seconds
        return max(operator.flops / peak, (operator.bytes_read + operator.bytes_written) / bandwidth)

    forward = {operator.name: alone(operator) for operator in graph.phase("forward")}
    pools: dict[object, list[str]] = defaultdict(list)
    for operator in graph.phase("forward"):
        for key in ((operator.module, operator.kind), operator.module, None):
            pools[key].append(operator.name)
    whole = {key: sum(forward[name] for name in names) for key, names in pools.items()}
    spent: dict[object, float] = defaultdict(float)
    for operator in graph.phase("backward"):
        keys: tuple[object, ...] = ((operator.module, operator.kind), operator.module, None)
        spent[next((key for key in keys if whole.get(key)), None)] += alone(operator)
    total = dict(forward)
    for pool, seconds in spent.items():
        for name in pools[pool]:
            total[name] += seconds * (forward[name] / whole[pool] if whole[pool] else 1.0 / len(pools[pool]))
    return total | {operator.name: alone(operator) for operator in graph.phase("optimizer")}
