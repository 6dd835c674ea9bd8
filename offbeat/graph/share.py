"""ModelGraph of a whole batch → ModelGraph of the part of it that one of several equal replicas computes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.graph.model import ModelGraph, Operator, TensorSpec
from offbeat.units import quote

_PASSED_ON = ("aten.add.", "aten._to_copy.")
"""Targets whose results are gradients of a variable if what they read is, beside views."""


def batch_size(graph: ModelGraph) -> int | None:
    """Samples of a step: the first axis of the first input; None for graphs that know no inputs."""
    return next((tensor.shape[0] for tensor in graph.inputs if tensor.shape), None)


def batch_share(graph: ModelGraph, parts: int) -> ModelGraph:
    """One replica's graph, where `parts` of them share the batch equally.

    Results have an axis of samples where their first axis is a multiple of the batch or their second equals it, unless
    they are variables, seen through views, or gradients of variables. Measured seconds are divided by `parts`.
    """
    batch = batch_size(graph)
    if parts == 1:
        return graph
    if batch is None or batch % parts:
        raise OffbeatError(f"graph {quote(graph.name)}: a batch of {batch} cannot be shared equally by {parts} devices")
    whole = of_variables(graph)
    made: dict[str, Operator] = {}
    for operator in graph.operators:
        made[operator.name] = _shared(operator, graph, made, whole.get(operator.name, {}), batch, parts)
    variables = tuple(
        replace(v, sparse_rows=v.sparse_rows // parts, factor_rows=v.factor_rows // parts) for v in graph.variables
    )
    inputs = tuple(_cut(tensor, batch, parts) for tensor in graph.inputs)
    return replace(
        graph,
        operators=tuple(made.values()),
        variables=variables,
        inputs=inputs,
        blocks=tuple(block.share(parts) for block in graph.blocks),
    )


def of_variables(graph: ModelGraph) -> dict[str, dict[int, str]]:
    """By operator, those of its results that are variables or gradients of variables: the variable, by elements."""
    sizes: dict[str, dict[int, str]] = {}
    for operator in graph.operators:
        views = operator.kind == "view" or operator.target.startswith("aten._to_copy.")
        if views and operator.variables and all(name in sizes for name in operator.inputs):
            sizes[operator.name] = {graph.variable(name).elements: name for name in operator.variables}
    for variable in graph.gradient_order:
        waiting = [variable.gradient_from or ""]
        while waiting:
            operator = graph.operator(waiting.pop())
            sizes.setdefault(operator.name, {})[variable.elements] = variable.name
            if operator.phase == "backward" and (operator.kind == "view" or operator.target.startswith(_PASSED_ON)):
                waiting += operator.inputs
    return sizes


def _shared(
    operator: Operator, graph: ModelGraph, made: dict[str, Operator], whole: Mapping[int, str], batch: int, parts: int
) -> Operator:
    read = [(graph.operator(name), made[name]) for name in operator.inputs]
    shared = [before.outputs != after.outputs for before, after in read]
    outputs = tuple(
        out if out.elements in whole or (operator.kind == "norm" and len(out.shape) == 1) else _cut(out, batch, parts)
        for out in operator.outputs
    )
    if operator.kind == "view" and any(shared) and outputs == operator.outputs and not whole:
        # Samples may have come to the last axis.
        outputs = tuple(_cut_at(out, len(out.shape) - 1, parts) for out in outputs)
    if operator.phase == "optimizer":
        rows = graph.variable(operator.variables[0]).sparse
        return replace(operator, **_divided(operator, 0, parts)) if rows else operator
    if outputs == operator.outputs and not any(shared):
        return operator
    through = {name for source, _ in read if source.kind == "view" for name in source.variables}
    kept = sum(graph.variable(name).bytes for name in operator.variables if name not in through)
    kept += sum(_bytes(before) for (before, _), cut in zip(read, shared, strict=True) if not cut)
    divided = _divided(operator, 0 if operator.kind == "embedding" else min(kept, operator.bytes_read), parts)
    left = sum(out.bytes for out in outputs) / (_bytes(operator) or 1)
    divided["bytes_written"] = round(operator.bytes_written * left)
    kept_results = round(operator.activation_bytes * left)
    seconds = None if operator.seconds is None else operator.seconds / parts
    return replace(operator, outputs=outputs, activation_bytes=kept_results, seconds=seconds, **divided)


def _divided(operator: Operator, kept: int, parts: int) -> dict[str, Any]:
    """The operator's work; `kept` of the bytes it reads do not depend on the batch."""
    return {
        "flops": operator.flops // parts,
        "bytes_read": kept + (operator.bytes_read - kept) // parts,
        "bytes_written": operator.bytes_written // parts,
    }


def _bytes(operator: Operator) -> int:
    return sum(out.bytes for out in operator.outputs)


def _cut(tensor: TensorSpec, batch: int, parts: int) -> TensorSpec:
    """The part of a tensor along its axis of samples, if it has one."""
    shape = tensor.shape
    if shape and shape[0] % batch == 0:
        return _cut_at(tensor, 0, parts)
    return _cut_at(tensor, 1, parts) if len(shape) > 1 and shape[1] == batch else tensor


def _cut_at(tensor: TensorSpec, axis: int, parts: int) -> TensorSpec:
    if axis < 0 or tensor.shape[axis] % parts:
        return tensor
    shape = list(tensor.shape)
    shape[axis] //= parts
    return replace(tensor, shape=tuple(shape))
