"""A forward operator and the shapes it reads → Rule: which axes of its tensors can be split together.

A rule is an index notation. Every axis of every tensor carries a label; axes with one label are split alike, and -1
marks an axis that must stay whole. A label that no output carries is summed over: splitting it leaves partial sums,
which an all-reduce or a reduce-scatter completes. TensorOpt (section 2.1) leaves its rules out; these are derived from
what the operators compute.

A captured operator names its target and shapes, but not its other arguments. Where the shapes admit several readings
(a transpose of two equal axes), the axes that differ between the readings stay whole. Softmax is taken to run over the
last axis, log-softmax over the last and, beyond matrices, over axis 1 as well. What has no rule stays whole, and the
rule says so in `note`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from math import gcd, prod
from typing import Any

from offbeat.graph.model import ModelGraph, Operator

Shape = tuple[int, ...]
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


@dataclass(slots=True)
class _Call:
    """What a rule is derived from."""

    operator: Operator
    inputs: tuple[Shape, ...]
    variables: tuple[Shape, ...]
    weights: tuple[bool, ...]
    """Which inputs are views or copies of variables."""
    data: tuple[Shape, ...]
    """Shapes of the step's own inputs."""
    sizes: list[int] = field(default_factory=list)

    @property
    def outputs(self) -> tuple[Shape, ...]:
        return tuple(tensor.shape for tensor in self.operator.outputs)

    def label(self, size: int) -> int:
        """A new label; an axis of one element cannot be split."""
        if size < 2:
            return -1
        self.sizes.append(size)
        return len(self.sizes) - 1

    def labels(self, shape: Shape) -> list[int]:
        return [self.label(size) for size in shape]

    def rule(self, inputs: Sequence[Map], variables: Sequence[Map], outputs: Sequence[Map], **more: Any) -> Rule:
        used = {label for labels in (*inputs, *variables, *outputs) for label in labels}
        used |= {label for _, labels in more.get("data", ()) for label in labels}
        sizes = tuple(size if label in used else 1 for label, size in enumerate(self.sizes))
        return Rule(sizes, tuple(inputs), tuple(variables), tuple(outputs), **more)


def rule_of(operator: Operator, graph: ModelGraph, weights: frozenset[str] = frozenset()) -> Rule:
    """The rule of a forward operator; `weights` are the operators that only view or copy variables."""
    call = _Call(
        operator,
        tuple(graph.operator(name).outputs[0].shape for name in operator.inputs),
        tuple(graph.variable(name).shape for name in operator.variables),
        tuple(name in weights for name in operator.inputs),
        tuple(tensor.shape for tensor in graph.inputs),
    )
    name = base_name(operator)
    derive = _BY_NAME.get(name) or _BY_KIND.get(operator.kind)
    reads_known = call.inputs or call.variables or operator.kind not in ("view", "reduction")
    rule = derive(call) if derive is not None and operator.outputs and reads_known else None
    return rule or replicated(call.inputs, call.variables, call.outputs, f"{name} has no sharding rule and stays whole")


def base_name(operator: Operator) -> str:
    """'mm' of 'aten.mm.default'."""
    parts = operator.target.split(".")
    return parts[1] if len(parts) > 1 else operator.target


def replicated(inputs: Sequence[Shape], variables: Sequence[Shape], outputs: Sequence[Shape], note: str) -> Rule:
    """The rule that splits nothing."""
    read, held, made = (tuple((-1,) * len(shape) for shape in shapes) for shapes in (inputs, variables, outputs))
    return Rule((), read, held, made, note=note)


def _aligned(shape: Shape, target: Shape, labels: Sequence[int]) -> Map | None:
    """Labels of a tensor that is broadcast to `target`; None if it cannot be."""
    if len(shape) > len(target):
        return None
    first = len(target) - len(shape)
    if any(size not in (1, target[first + axis]) for axis, size in enumerate(shape)):
        return None
    return tuple(labels[first + axis] if size > 1 else -1 for axis, size in enumerate(shape))


def _elementwise(call: _Call) -> Rule | None:
    shape = max(call.outputs, key=len)
    labels = call.labels(shape)
    maps = [_aligned(given, shape, labels) for given in (*call.inputs, *call.variables, *call.outputs)]
    if any(found is None for found in maps):
        return None
    known = [found for found in maps if found is not None]
    first, second = len(call.inputs), len(call.inputs) + len(call.variables)
    return call.rule(known[:first], known[first:second], known[second:])


def _same_axes(call: _Call) -> Rule | None:
    """Axes that have one size in all tensors are passed on (cat, slice, pad, repeat); exactly those that change are
    worked on. Of tensors of another rank nothing is known."""
    shape = call.outputs[0]
    alike = [given for given in (*call.inputs, *call.variables) if len(given) == len(shape)]
    if not alike:
        return None
    labels = [
        call.label(size) if all(given[axis] == size for given in (*alike, *call.outputs)) else -1
        for axis, size in enumerate(shape)
    ]
    return call.rule(*_where_rank(call, len(shape), labels))


def _where_rank(call: _Call, rank: int, labels: Sequence[int]) -> tuple[list[Map], list[Map], list[Map]]:
    """The labels for every tensor of this rank; others stay whole."""
    groups = (call.inputs, call.variables, call.outputs)
    return tuple([tuple(labels) if len(s) == rank else (-1,) * len(s) for s in shapes] for shapes in groups)  # type: ignore[return-value]


def _changes_one_axis(call: _Call) -> Rule | None:
    """As `_same_axes`, but only if an axis does change: else the one that is worked on is unknown."""
    given = [shape for shape in call.inputs if len(shape) == len(call.outputs[0])]
    return _same_axes(call) if any(shape != call.outputs[0] for shape in given) else None


def _scan_last(call: _Call) -> Rule | None:
    """Softmax and the like: independent but for the last axis."""
    shape = call.outputs[0]
    labels = call.labels(shape)
    if labels:
        labels[-1] = -1
    if "log_softmax" in call.operator.target and len(shape) > 2:
        labels[1] = -1
    return call.rule(*_where_rank(call, len(shape), labels))


def _triangle(call: _Call) -> Rule:
    labels = call.labels(call.outputs[0])
    return call.rule(*_where_rank(call, len(labels), [*labels[:-2], -1, -1][-len(labels) :]))


def _dropped(shape: Shape, rest: Shape) -> list[int | None]:
    """For each axis, its place in `rest`, -1 if it is dropped, None if the shapes leave that open."""
    kept = [axes for axes in combinations(range(len(shape)), len(rest)) if tuple(shape[a] for a in axes) == rest]
    places = [{axes.index(axis) if axis in axes else -1 for axes in kept} for axis in range(len(shape))]
    return [found.pop() if len(found) == 1 else None for found in places]


def _reduction(call: _Call) -> Rule | None:
    source = (*call.inputs, *call.variables)[0]
    out = call.outputs[0]
    additive = base_name(call.operator) in ("sum", "mean")
    if len(out) == len(source):
        places = [axis if out[axis] == size else -1 for axis, size in enumerate(source)]
        if additive and out == source:
            return None
    else:
        places = _dropped(source, out)  # type: ignore[assignment]
    labels = [-1 if place is None else call.label(size) for place, size in zip(places, source, strict=True)]
    sums = [label for label, place in zip(labels, places, strict=True) if place == -1 and label >= 0]
    if not additive:
        labels = [-1 if label in sums else label for label in labels]
        sums = []
    result = [-1] * len(out)
    for label, place in zip(labels, places, strict=True):
        if place is not None and place >= 0:
            result[place] = label
    inputs = [tuple(labels) if shape == source else (-1,) * len(shape) for shape in call.inputs]
    variables = [tuple(labels) if shape == source else (-1,) * len(shape) for shape in call.variables]
    outputs = [tuple(result) if shape == out else (-1,) * len(shape) for shape in call.outputs]
    return call.rule(inputs, variables, outputs, sums=frozenset(sums))


def _pooling(call: _Call) -> Rule:
    shape = call.outputs[0]
    labels = [*call.labels(shape[:2]), *(-1,) * (len(shape) - 2)]
    return call.rule(*_where_rank(call, len(shape), labels))


def _select(call: _Call) -> Rule | None:
    source = (*call.inputs, *call.variables)[0]
    places = _dropped(source, call.outputs[0])
    if base_name(call.operator) == "unbind":
        axes = [axis for axis, size in enumerate(source) if size == len(call.outputs)]
        if len(axes) == 1:
            places = [axis - (axis > axes[0]) if axis != axes[0] else -1 for axis in range(len(source))]
    return _viewed(call, source, places)


def _viewed(call: _Call, source: Shape, places: Sequence[int | None]) -> Rule:
    """An input whose axes go to the given places of every output."""
    paired = zip(source, places, strict=True)
    labels = [call.label(size) if place is not None and place >= 0 else -1 for size, place in paired]
    result = [-1] * len(call.outputs[0])
    for label, place in zip(labels, places, strict=True):
        if place is not None and place >= 0:
            result[place] = label
    return _with_view_maps(call, tuple(labels), tuple(result))


def _with_view_maps(call: _Call, given: Map, result: Map) -> Rule:
    def fit(shape: Shape) -> Map:
        return given if len(shape) == len(given) else (-1,) * len(shape)

    # An operator that views a view of a variable reads the variable as well, whatever its shape.
    source = (*call.inputs, *call.variables)[0]
    variables = [given if shape == source else (-1,) * len(shape) for shape in call.variables]
    return call.rule(list(map(fit, call.inputs)), variables, [result] * len(call.outputs))


def _reshape(call: _Call) -> Rule:
    """Axes fall into groups of equal products; the first axis of a group stays split, as far as both sides divide."""
    source = (*call.inputs, *call.variables)[0]
    out = call.outputs[0]
    given, result = [-1] * len(source), [-1] * len(out)
    i = j = 0
    while i < len(source) and j < len(out):
        here, there = source[i], out[j]
        first, second = i, j
        i, j = i + 1, j + 1
        while here != there:
            if here < there and i < len(source):
                here, i = here * source[i], i + 1
            elif j < len(out):
                there, j = there * out[j], j + 1
            else:
                return replicated(call.inputs, call.variables, call.outputs, "a view of unequal sizes stays whole")
        first = next((axis for axis in range(first, i) if source[axis] > 1), first)
        second = next((axis for axis in range(second, j) if out[axis] > 1), second)
        given[first] = result[second] = call.label(gcd(source[first], out[second]))
    return _with_view_maps(call, tuple(given), tuple(result))


def _transpose(call: _Call) -> Rule:
    """A swap of two axes changes the shape in exactly those two places, unless their sizes are equal."""
    source = (*call.inputs, *call.variables)[0]
    out = call.outputs[0]
    places: list[int | None] = list(range(len(source)))
    changed = [axis for axis in range(len(source)) if source[axis] != out[axis]]
    if len(changed) == 2:
        places[changed[0]], places[changed[1]] = changed[1], changed[0]
    elif base_name(call.operator) == "t" and len(source) == 2:
        places = [1, 0]
    else:
        places = [None if source.count(size) > 1 else axis for axis, size in enumerate(source)]
    return _viewed(call, source, places)


def _permute(call: _Call) -> Rule | None:
    source, out = (call.inputs or call.variables)[0], call.outputs[0]
    if len(source) > 6:
        return None
    orders = [order for order in permutations(range(len(source))) if tuple(source[a] for a in order) == out]
    places = [{order.index(axis) for order in orders} for axis in range(len(source))]
    return _viewed(call, source, [found.pop() if len(found) == 1 else None for found in places])


def _matmul(call: _Call) -> Rule | None:
    """(…, m, k) × (…, k, n) → (…, m, n); addmm and baddbmm add a tensor that is broadcast to the result."""
    out = call.outputs[0]
    rank = len(out)
    added = base_name(call.operator) in ("addmm", "baddbmm")
    if rank not in (2, 3) or base_name(call.operator) not in ("mm", "bmm", "addmm", "baddbmm"):
        return None
    right_at, inner = _right_operand(call, rank, added)
    if inner is None:
        return None
    batch = call.labels(out[: rank - 2])
    m, n, k = call.label(out[-2]), call.label(out[-1]), call.label(inner)
    left, right, result = (*batch, m, k), (*batch, k, n), (*batch, m, n)
    factors = [index for index, shape in enumerate(call.inputs) if len(shape) == rank]
    factors = factors[-2:] if right_at >= 0 and len(factors) > 1 else factors
    inputs: list[Map] = []
    for index, shape in enumerate(call.inputs):
        if index == right_at:
            inputs.append(right)
        elif index in factors and shape == (*out[:-1], inner):
            inputs.append(left)
        else:
            inputs.append(_aligned(shape, out, result) or (-1,) * len(shape))
    has_left = left in inputs
    flipped = any(weight for weight in call.weights)
    variables = [_factor_map(shape, call, (left, right, result), inner, flipped) for shape in call.variables]
    data = [] if has_left or left in variables else [((*out[:-1], inner), left)]
    data = [entry for entry in data if entry[0] in call.data]
    return call.rule(inputs, variables, [result], sums=frozenset({k} - {-1}), data=tuple(data))


def _right_operand(call: _Call, rank: int, added: bool) -> tuple[int, int | None]:
    """Place of the right factor among the inputs (-1: it is a variable) and the length of the inner axis."""
    out = call.outputs[0]
    whole = [index for index, shape in enumerate(call.inputs) if len(shape) == rank]
    if whole and call.inputs[whole[-1]][-1] == out[-1] and (len(whole) > 1 or call.weights[whole[-1]]):
        return whole[-1], call.inputs[whole[-1]][-2]
    for shape in call.variables:
        if len(shape) == rank and shape[-1] == out[-1]:
            return -1, shape[-2]
    return -1, call.inputs[whole[0]][-1] if whole and not added else None


def _factor_map(shape: Shape, call: _Call, maps: tuple[Map, Map, Map], inner: int, flipped: bool) -> Map:
    """Of a variable read directly, or through a transpose that is an input of its own."""
    left, right, result = maps
    out = call.outputs[0]
    right_shape = (*out[:-2], inner, out[-1])
    if flipped and shape == (*right_shape[:-2], right_shape[-1], right_shape[-2]):
        return (*right[:-2], right[-1], right[-2])
    if shape == right_shape:
        return right
    if shape == (*out[:-1], inner) and not call.weights.count(True):
        return left
    return (_aligned(shape, out, result) if len(shape) < len(out) else None) or (-1,) * len(shape)


def _convolution(call: _Call) -> Rule | None:
    out = call.outputs[0]
    kernels = [s for s in (*call.variables, *call.inputs) if len(s) == len(out) and s[0] != out[0]]
    kernels = [s for s in call.variables if len(s) == len(out)] or kernels
    if not kernels or len(out) < 3:
        return None
    kernel = kernels[0]
    fields = [s for s in call.inputs if len(s) == len(out) and s != kernel and s[0] == out[0]]
    from_data = [s for s in call.data if len(s) == len(out) and s[0] == out[0]]
    if not fields and not from_data:
        return None
    source = (fields or from_data)[0]
    transposed = source[1] == kernel[0] and source[2] < out[2]
    n, whole = call.label(out[0]), (-1,) * (len(out) - 2)
    sums: set[int] = set()
    if not transposed and kernel[1] == source[1] and kernel[0] == out[1]:
        ci, co = call.label(source[1]), call.label(out[1])
        weight, sums = (co, ci), {ci} - {-1}
    elif transposed and kernel[1] == out[1]:
        ci, co = call.label(source[1]), call.label(out[1])
        weight, sums = (ci, co), {ci} - {-1}
    elif source[1] == out[1] == kernel[0] and kernel[1] == 1:
        ci = co = call.label(out[1])
        weight = (co, -1)
    else:
        ci = co = -1
        weight = (-1, -1)

    def fit(shape: Shape) -> Map:
        if shape == kernel:
            return (*weight, *whole)
        if shape == source:
            return (n, ci, *whole)
        return (co,) if shape == (out[1],) else (-1,) * len(shape)

    data = () if fields else ((source, (n, ci, *whole)),)
    inputs, variables = list(map(fit, call.inputs)), list(map(fit, call.variables))
    return call.rule(inputs, variables, [(n, co, *whole)], sums=frozenset(sums), data=data)


def _attention(call: _Call) -> Rule | None:
    """Queries, keys and values (batch, heads, length, width): batch and heads are independent."""
    out = call.outputs[0]
    if len(out) != 4:
        return None
    batch, heads = call.label(out[0]), call.label(out[1])
    if any(len(shape) == 4 and shape[1] not in (1, out[1]) for shape in call.inputs):
        heads = -1

    def fit(shape: Shape) -> Map:
        first = batch if len(shape) > 1 and shape[0] == out[0] else -1
        second = heads if len(shape) == 4 and shape[1] == out[1] else -1
        return (first, second, *(-1,) * len(shape))[: len(shape)]

    return call.rule(*(list(map(fit, shapes)) for shapes in (call.inputs, call.variables, call.outputs)))


def _layer_norm(call: _Call) -> Rule | None:
    """Layer and RMS norm: the normalised axes are those whose statistics have one element."""
    out = call.outputs[0]
    statistics = call.outputs[1] if len(call.outputs) > 1 else None
    if statistics is None or len(statistics) != len(out):
        return None
    labels = [call.label(size) if kept == size else -1 for size, kept in zip(out, statistics, strict=True)]
    return call.rule(*_where_rank(call, len(out), labels))


def _batch_norm(call: _Call) -> Rule:
    """Channels are independent; samples share the channel's mean and variance."""
    out = call.outputs[0]
    n, c = call.label(out[0]), call.label(out[1])

    def fit(shape: Shape) -> Map:
        if len(shape) == len(out):
            return (n, c, *(-1,) * (len(out) - 2))
        return (c,) if shape == (out[1],) else (-1,) * len(shape)

    maps = [list(map(fit, shapes)) for shapes in (call.inputs, call.variables, call.outputs)]
    statistics = frozenset({n} - {-1})
    return call.rule(*maps, statistics=statistics, statistics_elements=2 * out[1])


def _first_axis(call: _Call) -> Rule:
    out = call.outputs[0]
    labels = [call.label(out[0]), *(-1,) * (len(out) - 1)] if out else []
    return call.rule(*_where_rank(call, len(out), labels))


def _embedding(call: _Call) -> Rule | None:
    """Rows of a table. A part of the rows gives partial results: zeros for the rows it does not hold."""
    out = call.outputs[0]
    tables = [shape for shape in (*call.variables, *call.inputs) if len(shape) == 2 and shape[1] == out[-1]]
    if base_name(call.operator) != "embedding" or not tables:
        return None
    rows = call.label(tables[0][0])
    labels = call.labels(out)

    def fit(shape: Shape) -> Map:
        if shape == tables[0]:
            return (rows, labels[-1])
        return tuple(labels[:-1]) if shape == out[:-1] else (-1,) * len(shape)

    inputs, variables = list(map(fit, call.inputs)), list(map(fit, call.variables))
    data = () if out[:-1] in call.inputs or out[:-1] not in call.data else ((out[:-1], tuple(labels[:-1])),)
    return call.rule(inputs, variables, [tuple(labels)], sums=frozenset({rows} - {-1}), data=data)


def _loss(call: _Call) -> Rule | None:
    """Sums over samples; the classes stay whole."""
    if prod(call.outputs[0]) > 1:
        return _elementwise(call)
    source = max(call.inputs, key=prod, default=())
    if not source:
        return None
    classes = base_name(call.operator).startswith("nll_loss")
    labels = [-1 if classes and axis == 1 else call.label(size) for axis, size in enumerate(source)]
    target = tuple(size for axis, size in enumerate(source) if not (classes and axis == 1))
    target_map = tuple(label for axis, label in enumerate(labels) if not (classes and axis == 1))

    def fit(shape: Shape) -> Map:
        return tuple(labels) if shape == source else target_map if shape == target else (-1,) * len(shape)

    data = ((target, target_map),) if target in call.data and target not in call.inputs else ()
    outputs = [(-1,) * len(shape) for shape in call.outputs]
    sums = frozenset(label for label in labels if label >= 0)
    return call.rule(list(map(fit, call.inputs)), list(map(fit, call.variables)), outputs, sums=sums, data=data)


_Derive = Callable[[_Call], Rule | None]


def _no_rule(call: _Call) -> None:
    return None


def _named(**derivations: tuple[_Derive, str]) -> dict[str, _Derive]:
    return {name: derive for derive, names in derivations.values() for name in names.split()}


_BY_KIND: dict[str, _Derive] = {
    "matmul": _matmul,
    "conv": _convolution,
    "attention": _attention,
    "embedding": _embedding,
    "elementwise": _elementwise,
    "reduction": _reduction,
    "loss": _loss,
    "view": _reshape,
}
_BY_NAME = _named(
    layer=(_layer_norm, "native_layer_norm _fused_rms_norm"),
    batch=(
        _batch_norm,
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update"
        " _batch_norm_with_update_functional cudnn_batch_norm _native_batch_norm_legit_no_training",
    ),
    group=(_first_axis, "native_group_norm"),
    scan=(_scan_last, "_softmax _log_softmax _safe_softmax"),
    pool=(
        _pooling,
        "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d"
        " _adaptive_avg_pool3d adaptive_max_pool2d avg_pool1d upsample_nearest2d upsample_bilinear2d",
    ),
    same=(_same_axes, "cat slice narrow constant_pad_nd repeat repeat_interleave"),
    gather=(_changes_one_axis, "gather index_select split split_with_sizes chunk topk"),
    dropped=(_select, "select unbind"),
    swap=(_transpose, "t transpose swapaxes numpy_T mT"),
    permuted=(_permute, "permute"),
    broadcast=(_elementwise, "expand broadcast_to"),
    triangle=(_triangle, "triu tril"),
    unknown=(
        _no_rule,
        "roll flip cumsum cumprod sort median scatter scatter_add index index_put index_add masked_scatter stack"
        " select_scatter slice_scatter diagonal_scatter as_strided as_strided_scatter unfold diagonal one_hot"
        " _fft_r2c _fft_c2r _fft_c2c index_reduce select_backward slice_backward renorm",
    ),
)
