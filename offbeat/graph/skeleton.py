"""nn.Module alone → ModelGraph without work: its variables, in the order in which modules are registered.

Enough to synchronise a model whose inputs are not known yet. What it lacks (operators, times, the true order of uses)
the runtime measures in the first steps.
"""

import torch

from offbeat.graph.model import Constant, ModelGraph, Operator, Variable, update_operators

_ASSUMED_ROWS = 1024
"""Rows a sparse gradient is taken to hold until a step shows otherwise."""


def skeleton(model: torch.nn.Module, name: str | None = None) -> ModelGraph:
    """One forward and one backward operator per module with parameters of its own; forward in registration order."""
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }
    names: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    owners: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    constants = [_constant(path, buffer, "buffer") for path, buffer in model.named_buffers()]
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            constants.append(_constant(path, parameter, "frozen"))
        elif id(parameter) in names:
            aliases.setdefault(names[id(parameter)], []).append(path)
        else:
            names[id(parameter)] = path
            owners.setdefault(path.rpartition(".")[0], []).append((path, parameter))
    variables = []
    for owner, held in owners.items():
        for path, parameter in held:
            rows = parameter.shape[0] if id(parameter) in sparse else 0
            variables.append(
                Variable(
                    name=path,
                    shape=tuple(parameter.shape),
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    first_use=f"forward.{owner}",
                    gradient_from=f"backward.{owner}",
                    sparse=id(parameter) in sparse,
                    sparse_rows=min(rows, _ASSUMED_ROWS),
                    aliases=tuple(aliases.get(path, ())),
                )
            )
    forward = [_operator("forward", owner, held) for owner, held in owners.items()]
    backward = [_operator("backward", owner, held) for owner, held in reversed(owners.items())]
    return ModelGraph(
        name=name or type(model).__name__,
        operators=(*forward, *backward, *update_operators(variables, "SGD", 0)),
        variables=tuple(variables),
        constants=tuple(constants),
        source="skeleton",
    )


def _operator(phase: str, owner: str, held: list[tuple[str, torch.nn.Parameter]]) -> Operator:
    size = sum(parameter.numel() * parameter.itemsize for _, parameter in held)
    return Operator(
        name=f"{phase}.{owner}",
        kind="other",
        target="module",
        phase=phase,  # type: ignore[arg-type]
        module=owner,
        inputs=(),
        variables=tuple(path for path, _ in held),
        outputs=(),
        flops=0,
        bytes_read=size,
        bytes_written=0 if phase == "forward" else size,
        activation_bytes=0,
    )


def _constant(path: str, tensor: torch.Tensor, kind: str) -> Constant:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Constant(name=path, shape=tuple(tensor.shape), dtype=dtype, kind=kind)  # type: ignore[arg-type]
