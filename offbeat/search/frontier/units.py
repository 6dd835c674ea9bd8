"""ModelGraph → Units: the forward operators in groups that are configured together, and the tensors between groups.

A unit begins with an operator that decides how tensors are split (a matrix product, a convolution, a norm over a split
axis) and takes in what follows it and keeps its axes: views, element-wise operators, batch norms. Within a unit tensors
stay where they are; between units they are re-scheduled. Views and copies of weights belong to the unit that uses them.

An operator's axes (`offbeat.sharding`) are written as an index notation, its `Rule`: every axis of every tensor carries
a label; axes with one label are split alike, and -1 marks an axis that must stay whole. A label that no output carries
is summed over: splitting it leaves partial sums, which an all-reduce or a reduce-scatter completes.

Operators that no trainable tensor reaches (masks, positions, counters) are computed everywhere and belong to no unit.
Steps of an unrolled recurrence, which are equal operators on the same variables, share one unit and one configuration.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import gcd

from offbeat.graph.model import ModelGraph, Operator
from offbeat.sharding.captured import Shape, captured_axes
from offbeat.sharding.layout import SUM

HEAVY = ("matmul", "conv", "attention", "embedding", "rnn", "other")

Map = tuple[int, ...]
"""The label of each axis of a tensor; -1 stays whole."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator may be split."""

    sizes: tuple[int, ...]
    """What the parts of each label must divide; 1 for a label that no axis carries."""
    inputs: tuple[Map, ...]
    variables: tuple[Map, ...]
    outputs: tuple[Map, ...]
    sums: frozenset[int] = frozenset()
    """Labels that are summed over."""
    data: tuple[tuple[Shape, Map], ...] = ()
    """Tensors of the batch that it reads directly."""
    statistics: frozenset[int] = frozenset()
    """Labels over which it averages `statistics_elements` numbers that every part needs, forward and backward."""
    statistics_elements: int = 0
    note: str = ""

    @property
    def maps(self) -> tuple[Map, ...]:
        """Of all its tensors."""
        return (*self.inputs, *self.variables, *self.outputs, *(labels for _, labels in self.data))

    @property
    def labels(self) -> frozenset[int]:
        return self.sums.union(*self.maps) - {-1}

    def relabelled(self, new: Sequence[int]) -> "Rule":
        """The same rule with each label replaced by `new[label]`; -1 leaves its axes whole."""

        def renamed(labels: Iterable[int]) -> Map:
            return tuple(new[label] if label >= 0 else -1 for label in labels)

        return replace(
            self,
            inputs=tuple(map(renamed, self.inputs)),
            variables=tuple(map(renamed, self.variables)),
            outputs=tuple(map(renamed, self.outputs)),
            sums=frozenset(renamed(self.sums)) - {-1},
            data=tuple((shape, renamed(labels)) for shape, labels in self.data),
            statistics=frozenset(renamed(self.statistics)) - {-1},
        )


@dataclass(slots=True)
class Member:
    """An operator in a unit: its rule in the unit's labels."""

    operator: Operator
    rule: Rule
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
    parents: list[int] = field(default_factory=list)
    """While units are made: for each label one that is the same, or itself."""
    head: int = 0
    """Place of the operator it began with."""
    variables: dict[str, tuple[int, Map]] = field(default_factory=dict)
    """For each variable it reads: the member that reads it first and its map."""

    @property
    def sums(self) -> frozenset[int]:
        return self.members[self.head].rule.sums

    def find(self, label: int) -> int:
        """The label that stands for all that are the same."""
        while self.parents[label] != label:
            label = self.parents[label]
        return label

    def unify(self, given: Map, taken: Map) -> None:
        """Axes of one tensor, as its producer and its reader label them, become one label."""
        for pair in zip(given, taken, strict=True) if len(given) == len(taken) else ():
            labels = [self.find(label) for label in pair if label >= 0]
            if len(labels) == 1:
                self.sizes[labels[0]] = 1
            elif len(set(labels)) == 2:
                first, second = labels
                self.sizes[first] = gcd(self.sizes[first], self.sizes[second])
                self.parents[second] = first


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor that passes from one unit to another, or from one instance of a unit to the next."""

    source: int
    member: int
    target: int
    reader: int
    bytes: int
    kept_bytes: int
    """Of it, what backward needs again."""
    given: Map
    """Labels of the source unit."""
    taken: Map
    """Labels of the target unit."""
    count: int = 1
    is_variable: bool = False
    """The tensor is a variable that the target shares with its owner, the source."""
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


def rule_of(operator: Operator, graph: ModelGraph, weights: frozenset[str] = frozenset()) -> Rule:
    """The rule of a forward operator; `weights` are the operators that only view or copy variables."""
    found = captured_axes(operator, graph, weights)
    shapes = [graph.operator(name).outputs[0].shape for name in operator.inputs]
    shapes += [graph.variable(name).shape for name in operator.variables]
    maps = [[-1] * len(shape) for shape in (*shapes, *(t.shape for t in (*graph.inputs, *operator.outputs)))]
    for label, axis in enumerate(found.axes):
        for labels, split in zip(maps, (*axis.inputs, *axis.outputs), strict=True):
            if split >= 0:
                labels[split] = label
    rest = iter([tuple(labels) for labels in maps])
    groups = operator.inputs, operator.variables, graph.inputs, operator.outputs
    inputs, variables, data, outputs = (tuple(islice(rest, len(group))) for group in groups)
    name = operator.target.split(".")[1] if "." in operator.target else operator.target
    return Rule(
        sizes=tuple(gcd(axis.length, *axis.even) for axis in found.axes),
        inputs=inputs,
        variables=variables,
        outputs=outputs,
        sums=frozenset(label for label, axis in enumerate(found.axes) if axis.outputs[0] == SUM),
        data=tuple((graph.inputs[place].shape, data[place]) for place in sorted(found.data)),
        statistics=frozenset(label for label, axis in enumerate(found.axes) if axis.statistics),
        statistics_elements=max((axis.statistics for axis in found.axes), default=0),
        note="" if found.known else f"{name} has no sharding rule and stays whole",
    )


def group(graph: ModelGraph) -> Units:
    """Groups the forward operators of a graph."""
    forward = graph.phase("forward")
    light = ("elementwise", "view", "reduction")
    free = _closed(forward, lambda op: not op.variables and (op.kind in light or not op.outputs or not op.flops))
    weights = _closed(forward, lambda op: bool(op.variables) and op.kind in ("view", "elementwise"))
    grouping = _Grouping(graph, weights)
    for operator in forward:
        if operator.name not in free and operator.name not in weights:
            grouping.add(operator)
    for unit in grouping.units:
        _finish(unit)
    return _shared(graph, grouping)


def _closed(forward: tuple[Operator, ...], wanted: Callable[[Operator], bool]) -> frozenset[str]:
    """The operators that are wanted and read nothing but such."""
    found: set[str] = set()
    for operator in forward:
        if wanted(operator) and found.issuperset(operator.inputs):
            found.add(operator.name)
    return frozenset(found)


class _Grouping:
    """Units under construction."""

    def __init__(self, graph: ModelGraph, weights: frozenset[str]) -> None:
        self.graph, self.weights = graph, weights
        self.units: list[Unit] = []
        self.place: dict[str, tuple[int, int]] = {}
        """Unit and member of each operator."""
        self.notes: list[str] = []

    def add(self, operator: Operator) -> None:
        rule = rule_of(operator, self.graph, self.weights)
        if rule.note:
            self.notes.append(f"{operator.name}: {rule.note}")
        near: set[int] = set()
        if not (operator.kind in HEAVY or rule.sums or rule.note):
            near = {self.place[name][0] for name in operator.inputs if name in self.place}
        if not any(self._absorb(index, operator, rule) for index in sorted(near, reverse=True)):
            self.units.append(Unit())
            self._insert(len(self.units) - 1, operator, rule)
            self.units[-1].head = len(self.units[-1].members) - 1

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
            lost = any(mine >= 0 and unit.sizes[unit.find(mine)] > 1 and label < 0 for mine, label in pairs)
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
        labels = range(len(unit.sizes), len(unit.sizes) + len(rule.sizes))
        unit.sizes.extend(rule.sizes)
        unit.parents.extend(labels)
        member = Member(operator, rule.relabelled(labels))
        unit.members.append(member)
        self.place[operator.name] = (index, len(unit.members) - 1)
        for position, name in enumerate(operator.inputs):
            where = self.place.get(name)
            if where is not None and where[0] == index:
                unit.unify(unit.members[where[1]].rule.outputs[0], member.rule.inputs[position])


def _finish(unit: Unit) -> None:
    """Drops labels that cannot be split, or that one tensor carries twice, and numbers the others from 0."""
    roots = [unit.find(label) for label in range(len(unit.sizes))]
    for labels in (labels for member in unit.members for labels in member.rule.maps):
        for root, count in Counter(roots[label] for label in labels if label >= 0).items():
            if count > 1:
                unit.sizes[root] = 1
    kept = [label for label, size in enumerate(unit.sizes) if roots[label] == label and size > 1]
    number = {label: index for index, label in enumerate(kept)}
    unit.sizes = [unit.sizes[label] for label in kept]
    for index, member in enumerate(unit.members):
        member.rule = member.rule.relabelled([number.get(root, -1) for root in roots])
        for name, labels in zip(member.operator.variables, member.rule.variables, strict=True):
            unit.variables.setdefault(name, (index, labels))


def _shared(graph: ModelGraph, grouping: _Grouping) -> Units:
    """One unit for the equal steps of a recurrence; then the tensors between units, among them tied weights."""
    units, place = grouping.units, grouping.place
    merged: dict[tuple[object, ...], int] = {}
    template = list(range(len(units)))
    """For each unit the first that is equal to it, or itself."""
    operators = ([member.operator for member in unit.members] for unit in units)
    signatures = [tuple((op.module, op.target, op.outputs, op.variables) for op in each) for each in operators]
    for index, unit in enumerate(units):
        sources = {place[n][0] for m in unit.members for n in m.operator.inputs if n in place}
        before = frozenset(template[s] for s in sources if signatures[s] != signatures[index])
        key = (signatures[index], frozenset() if unit.variables else before)
        template[index] = first = merged.setdefault(key, index)
        for member, same in zip(units[first].members, unit.members, strict=True):
            if member is not same:
                member.repeats.append(same.operator.name)
    number = {index: position for position, index in enumerate(merged.values())}
    final = tuple(units[index] for index in merged.values())
    # Of several units that read a variable the first one holds it.
    owner = {name: position for position, unit in reversed(list(enumerate(final))) for name in unit.variables}
    flows = _flows(grouping, [number[first] for first in template])
    for position, unit in enumerate(final):
        for name, (reader, taken) in unit.variables.items():
            if owner[name] != position:
                holder, given = final[owner[name]].variables[name]
                ends = (owner[name], holder, position, reader)
                flows.append(Flow(*ends, graph.variable(name).bytes, 0, given, taken, is_variable=True))
    return Units(final, tuple(flows), owner, tuple(grouping.notes))


def _flows(grouping: _Grouping, number: list[int]) -> list[Flow]:
    units, place = grouping.units, grouping.place
    seen: set[tuple[object, ...]] = set()
    counts: Counter[Flow] = Counter()
    for index, unit in enumerate(units):
        for reader, member in enumerate(unit.members):
            for name, taken in zip(member.operator.inputs, member.rule.inputs, strict=True):
                where = place.get(name)
                if where is None or where[0] == index or (name, index, taken) in seen:
                    continue
                seen.add((name, index, taken))
                source = units[where[0]].members[where[1]]
                spec, given = source.operator.outputs[0], source.rule.outputs[0]
                if spec.shape and len(given) == len(taken):
                    kept = min(source.operator.activation_bytes, spec.bytes)
                    ends = (number[where[0]], where[1], number[index], reader)
                    counts[Flow(*ends, spec.bytes, kept, given, taken)] += 1
    readers = Counter(ends[:2] for ends in {(flow.source, flow.member, flow.target) for flow in counts})
    return [replace(flow, count=n, single=readers[flow.source, flow.member] == 1) for flow, n in counts.items()]
