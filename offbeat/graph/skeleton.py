"""Build a ModelGraph without work from a model alone: its variables, in registration order.

Enough to synchronise a model whose inputs are not known yet. What it lacks (operators, times, the true order of uses)
the runtime measures in the first steps.
"""

import torch

from offbeat.graph.model import ModelGraph, Operator, Phase, update_operators
from offbeat.graph.step import constants_of, make_variables, sparse_embeddings

_ASSUMED_ROWS = 1024
"""Rows a sparse gradient is taken to hold until a step shows otherwise."""


def skeleton(model: torch.nn.Module) -> ModelGraph:
    """One forward and one backward operator per module with parameters of its own; forward in registration order."""
    sparse = {id(embedding.weight) for embedding in sparse_embeddings(model)}
    owned: dict[str, dict[str, torch.nn.Parameter]] = {}
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            owned.setdefault(path.rpartition(".")[0], {})[path] = parameter
    forward = [_operator("forward", owner, held) for owner, held in owned.items()]
    backward = [_operator("backward", owner, held) for owner, held in reversed(owned.items())]

    def describe(path: str, parameter: torch.nn.Parameter) -> dict[str, object]:
        owner = path.rpartition(".")[0]
        return {
            "first_use": f"forward.{owner}",
            "gradient_from": f"backward.{owner}",
            "sparse": id(parameter) in sparse,
            "sparse_rows": min(parameter.shape[0], _ASSUMED_ROWS) if id(parameter) in sparse else 0,
        }

    variables = make_variables(model, forward, describe)
    return ModelGraph(
        name=type(model).__name__,
        operators=(*forward, *backward, *update_operators(variables, "SGD", 0)),
        variables=variables,
        constants=constants_of(model),
        source="skeleton",
    )


def _operator(phase: Phase, owner: str, held: dict[str, torch.nn.Parameter]) -> Operator:
    size = sum(parameter.numel() * parameter.itemsize for parameter in held.values())
    return Operator(
        name=f"{phase}.{owner}",
        kind="other",
        target="module",
        phase=phase,
        module=owner,
        inputs=(),
        variables=tuple(held),
        outputs=(),
        flops=0,
        bytes_read=size,
        bytes_written=0 if phase == "forward" else size,
        activation_bytes=0,
    )
