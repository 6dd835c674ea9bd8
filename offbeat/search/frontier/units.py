"""ModelGraph → Units: the forward operators in groups that are configured together, and the tensors between groups.

A unit begins with an operator that decides how tensors are split (a matrix product, a convolution, a norm over a split
axis) and takes in what follows it and keeps its axes: views, element-wise operators, batch norms. Within a unit tensors
stay where they are; between units they are re-scheduled. Views and copies of weights belong to the unit that uses them.

Operators that no trainable tensor reaches (masks, positions, counters) are computed everywhere and belong to no unit.
Steps of an unrolled recurrence, which are equal operators on the same variables, share one unit and one configuration.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from math import gcd

from offbeat.graph.model import ModelGraph, Operator
from offbeat.search.frontier.rules import Map, Rule, Shape, rule_of

HEAVY = ("matmul", "conv", "attention", "embedding", "rnn", "other")


@dataclass(slots=True)
class Member:
    """An operator in a unit: its rule in the unit's labels."""

    operator: Operator
    rule: Rule
    labels: frozenset[int] = frozenset()
    """All labels that its tensors carry."""
    repeats: list[str] = field(default_factory=list)
    """The operators at the same place of the unit's other instances."""

    @property
    def names(self) -> list[str]:
        return [self.operator.name, *self.repeats]


@dataclass(slots=True)
class Unit:
    """Operators with one configuration."""

    members: list[Member] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """What the parts of each label must divide; 1 for a label that was found to be unsplittable."""
    head: int = 0
    """Place of the operator it began with."""
    variables: dict[str, tuple[int, Map]] = field(default_factory=dict)
    """For each variable it reads: the member that reads it first and its map."""

    @property
    def name(self) -> str:
        return self.members[self.head].operator.name

    @property
    def sums(self) -> frozenset[int]:
        return self.members[self.head].rule.sums


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor that passes from one unit to another, or from one instance of a unit to the next."""

    source: int
    member: int
    output: int
    target: int
    reader: int
    shape: Shape
    bytes: int
    kept_bytes: int
    """Of it, what backward needs again."""
    given: Map
    """Labels of the source unit."""
    taken: Map
    """Labels of the target unit."""
    count: int = 1
    variable: str = ""
    """Set where the tensor is a variable that the target shares with its owner, the source."""
    single: bool = False
    """No other unit reads the tensor."""


@dataclass(frozen=True, slots=True)
class Units:
    """The graph that FT works on."""

    units: tuple[Unit, ...]
    flows: tuple[Flow, ...]
    owner: dict[str, int]
    """The unit that holds each variable."""
    notes: tuple[str, ...]
    """Operators that stay whole because no rule is known for them."""


def group(graph: ModelGraph) -> Units:
    """Groups the forward operators of a graph."""
    forward = graph.phase("forward")
    free = _free(forward)
    weights = _weight_views(forward)
    grouping = _Grouping(graph, free, weights)
    for operator in forward:
        if operator.name not in free and operator.name not in weights:
            grouping.add(operator)
    for unit in grouping.units:
        _finish(unit)
    return _shared(graph, grouping)


def _free(forward: tuple[Operator, ...]) -> frozenset[str]:
    free: set[str] = set()
    for operator in forward:
        light = operator.kind in ("elementwise", "view", "reduction") or not operator.outputs or not operator.flops
        if light and not operator.variables and all(name in free for name in operator.inputs):
            free.add(operator.name)
    return frozenset(free)


def _weight_views(forward: tuple[Operator, ...]) -> frozenset[str]:
    views: set[str] = set()
    for operator in forward:
        light = operator.kind in ("view", "elementwise")
        if light and operator.variables and all(name in views for name in operator.inputs):
            views.add(operator.name)
    return frozenset(views)


class _Grouping:
    """Units under construction."""

    def __init__(self, graph: ModelGraph, free: frozenset[str], weights: frozenset[str]) -> None:
        self.graph, self.free, self.weights = graph, free, weights
        self.units: list[Unit] = []
        self.place: dict[str, tuple[int, int]] = {}
        """Unit and member of each operator."""
        self.notes: list[str] = []

    def add(self, operator: Operator) -> None:
        rule = rule_of(operator, self.graph, self.weights)
        if rule.note:
            self.notes.append(f"{operator.name}: {rule.note}")
        for index in self._candidates(operator, rule):
            if self._absorb(index, operator, rule):
                return
        self.units.append(Unit())
        index = len(self.units) - 1
        self._insert(index, operator, rule)
        self.units[index].head = len(self.units[index].members) - 1

    def _candidates(self, operator: Operator, rule: Rule) -> list[int]:
        if operator.kind in HEAVY or rule.sums or rule.note:
            return []
        found = [self.place[name][0] for name in operator.inputs if name in self.place]
        return sorted(set(found), reverse=True)

    def _absorb(self, index: int, operator: Operator, rule: Rule) -> bool:
        """Adds the operator to a unit, unless it would keep a heavy head from splitting an axis."""
        unit = self.units[index]
        heavy = unit.members[unit.head].operator.kind in HEAVY
        largest = max(tensor.elements for tensor in operator.outputs)
        for position, name in enumerate(operator.inputs):
            if self.place.get(name, (-1, 0))[0] != index:
                continue
            member = unit.members[self.place[name][1]]
            if member.operator.outputs[0].elements < largest // len(operator.inputs):
                return False
            pairs = zip(member.rule.outputs[0], rule.inputs[position], strict=True)
            lost = any(mine >= 0 and unit.sizes[mine] > 1 and label < 0 for mine, label in pairs)
            if lost and (heavy or operator.kind != "view"):
                return False
        self._insert(index, operator, rule)
        return True

    def _insert(self, index: int, operator: Operator, rule: Rule) -> None:
        unit = self.units[index]
        for name in operator.inputs:
            if name in self.weights and name not in self.place:
                view = self.graph.operator(name)
                self._insert(index, view, rule_of(view, self.graph, self.weights))
        base = len(unit.sizes)
        unit.sizes.extend(rule.sizes)
        member = Member(operator, _relabelled(rule, [base + label for label in range(len(rule.sizes))]))
        unit.members.append(member)
        self.place[operator.name] = (index, len(unit.members) - 1)
        for position, name in enumerate(operator.inputs):
            where = self.place.get(name)
            if where is not None and where[0] == index:
                _unify(unit, unit.members[where[1]].rule.outputs[0], member.rule.inputs[position], base)


def _relabelled(rule: Rule, new: list[int]) -> Rule:
    def maps(old: tuple[Map, ...]) -> tuple[Map, ...]:
        return tuple(tuple(new[label] if label >= 0 else -1 for label in labels) for labels in old)

    return Rule(
        rule.sizes,
        maps(rule.inputs),
        maps(rule.variables),
        maps(rule.outputs),
        frozenset(new[label] for label in rule.sums) - {-1},
        tuple((shape, maps((labels,))[0]) for shape, labels in rule.data),
        frozenset(new[label] for label in rule.statistics) - {-1},
        rule.statistics_elements,
        rule.note,
    )


def _unify(unit: Unit, given: Map, taken: Map, base: int) -> None:
    """Axes of one tensor, as its producer and its reader label them, become one label.

    Labels from `base` on are in use by the newest member alone."""
    if len(given) != len(taken):
        return
    for first, second in zip(given, taken, strict=True):
        if first < 0 or second < 0:
            for label in (first, second):
                if label >= 0:
                    unit.sizes[label] = 1
        elif first != second:
            unit.sizes[first] = gcd(unit.sizes[first], unit.sizes[second])
            _replace(unit, second, first, unit.members[-1:] if second >= base else unit.members)


def _replace(unit: Unit, old: int, new: int, members: list[Member]) -> None:
    renamed = list(range(len(unit.sizes)))
    renamed[old] = new
    unit.sizes[old] = 1
    for member in members:
        if any(old in labels for maps in _all_maps(member.rule) for labels in maps) or old in member.rule.sums:
            member.rule = _relabelled(member.rule, renamed)


def _all_maps(rule: Rule) -> tuple[tuple[Map, ...], ...]:
    return rule.inputs, rule.variables, rule.outputs, tuple(labels for _, labels in rule.data)


def _finish(unit: Unit) -> None:
    """Drops labels that cannot be split, or that one tensor carries twice, and numbers the others from 0."""
    for member in unit.members:
        for maps in _all_maps(member.rule):
            for labels in maps:
                for label, count in Counter(labels).items():
                    if label >= 0 and count > 1:
                        unit.sizes[label] = 1
    new: list[int] = []
    sizes: list[int] = []
    for size in unit.sizes:
        new.append(len(sizes) if size > 1 else -1)
        sizes += [size] if size > 1 else []
    unit.sizes = sizes
    for index, member in enumerate(unit.members):
        member.rule = _relabelled(member.rule, new)
        used = {label for maps in _all_maps(member.rule) for labels in maps for label in labels}
        member.labels = frozenset((used | member.rule.sums) - {-1})
        for name, labels in zip(member.operator.variables, member.rule.variables, strict=True):
            unit.variables.setdefault(name, (index, labels))


def _signature(unit: Unit) -> tuple[object, ...]:
    return tuple((m.operator.module, m.operator.target, m.operator.outputs, m.operator.variables) for m in unit.members)


def _shared(graph: ModelGraph, grouping: _Grouping) -> Units:
    """One unit for the equal steps of a recurrence; then the tensors between units."""
    units, place = grouping.units, grouping.place
    merged: dict[tuple[object, ...], int] = {}
    kept: list[int] = []
    template = list(range(len(units)))
    known: dict[tuple[object, ...], int] = {}
    signatures = [known.setdefault(_signature(unit), len(known)) for unit in units]
    for index, unit in enumerate(units):
        sources = {place[n][0] for m in unit.members for n in m.operator.inputs if n in place}
        before = frozenset(template[s] for s in sources if s != index and signatures[s] != signatures[index])
        key = (signatures[index], frozenset() if unit.variables else before)
        first = merged.setdefault(key, index)
        template[index] = first
        if first == index:
            kept.append(index)
        else:
            for member, same in zip(units[first].members, unit.members, strict=True):
                member.repeats.append(same.operator.name)
    number = {index: position for position, index in enumerate(kept)}
    owner: dict[str, int] = {}
    for index in kept:
        for name in units[index].variables:
            owner.setdefault(name, number[index])
    final = tuple(units[index] for index in kept)
    flows = _flows(graph, grouping, [number[first] for first in template])
    return Units(final, (*flows, *_variable_flows(graph, final, owner)), owner, tuple(grouping.notes))


def _flows(graph: ModelGraph, grouping: _Grouping, number: list[int]) -> list[Flow]:
    units, place = grouping.units, grouping.place
    seen: set[tuple[object, ...]] = set()
    counts: Counter[Flow] = Counter()
    readers: dict[tuple[int, int, int], set[int]] = {}
    for index, unit in enumerate(units):
        for reader, member in enumerate(unit.members):
            for name, taken in zip(member.operator.inputs, member.rule.inputs, strict=True):
                where = place.get(name)
                if where is None or where[0] == index or (name, index, taken) in seen:
                    continue
                seen.add((name, index, taken))
                source = units[where[0]].members[where[1]]
                spec, given = source.operator.outputs[0], source.rule.outputs[0]
                if not spec.shape or len(given) != len(taken):
                    continue
                kept = min(source.operator.activation_bytes, spec.bytes)
                ends = (number[where[0]], where[1], 0, number[index], reader)
                counts[Flow(*ends, spec.shape, spec.bytes, kept, given, taken)] += 1
                readers.setdefault(ends[:3], set()).add(ends[3])
    return [
        replace(flow, count=count, single=len(readers[flow.source, flow.member, flow.output]) == 1)
        for flow, count in counts.items()
    ]


def _variable_flows(graph: ModelGraph, units: tuple[Unit, ...], owner: dict[str, int]) -> list[Flow]:
    """From the unit that holds a variable to the others that read it (tied weights)."""
    flows = []
    for index, unit in enumerate(units):
        for name, (reader, taken) in unit.variables.items():
            if owner[name] == index:
                continue
            member, given = units[owner[name]].variables[name]
            variable = graph.variable(name)
            ends = (owner[name], member, 0, index, reader)
            flows.append(Flow(*ends, variable.shape, variable.bytes, 0, given, taken, 1, name))
    return flows
