"""Update a subset of an optimizer's parameters, or pieces of them."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.graph.model import ELEMENTWISE
from offbeat.runtime.lazy import set_gradient, without_grad
from offbeat.torch_private import unhooked_step

PER_VARIABLE = (*ELEMENTWISE, "SparseAdam", "Adafactor", "Muon")
"""torch.optim classes that treat every variable separately, so that variables can be updated one after another."""

SCALING = ("grad_scale", "found_inf")
"""Attributes by which a gradient scaler lets a fused optimizer divide gradients and skip a step itself."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is updated at once: a variable, or a piece of one viewed as a parameter."""

    parameter: torch.nn.Parameter
    """The variable it is, or is a piece of."""
    tensor: torch.Tensor
    gradient: torch.Tensor | None = None
    """Where its gradient arrives; None for a whole variable, whose gradient arrives in `parameter.grad`."""
    box: tuple[slice, ...] | None = None
    """Which box of the variable it is; None for all of it."""
    span: slice | None = None
    """Which elements of the flattened box it is; None for all of them."""

    def read(self, whole: torch.Tensor) -> torch.Tensor:
        """This unit's part of a tensor of the variable's shape."""
        part = whole if self.box is None else whole[self.box]
        return part if self.span is None else part.reshape(-1)[self.span]

    def write(self, whole: torch.Tensor, value: torch.Tensor) -> None:
        """Puts this unit's part into a tensor of the variable's shape."""
        part = whole if self.box is None else whole[self.box]
        if self.span is None:
            part.copy_(value.view_as(part))
            return
        flat = part.reshape(-1)
        flat[self.span] = value.view(-1)
        if flat.data_ptr() != part.data_ptr():
            part.copy_(flat.view_as(part))


class UnitOptimizer:
    """An optimizer of the user's class and hyperparameters over a few units."""

    def __init__(self, base: Optimizer, base_class: type[Optimizer], units: Sequence[Unit]) -> None:
        self.base = base
        self.base_class = base_class
        self.take_step = unhooked_step(base_class)
        self.units = units
        self.own_state = any(unit.tensor is not unit.parameter for unit in units)
        """Its state is kept apart from the user's optimizer, because it is that of pieces."""
        self.boxed = [unit for unit in units if unit.box is not None]
        self.in_place = all(unit.gradient is None for unit in units)
        """Every gradient arrives in `parameter.grad`."""
        group = group_of(base)
        self.groups = sorted({group[id(unit.parameter)] for unit in units})
        self.optimizer = twin(base, base_class)
        self.optimizer.param_groups = [
            {
                **base.param_groups[number],
                "params": [unit.tensor for unit in units if group[id(unit.parameter)] == number],
            }
            for number in self.groups
        ]
        if self.own_state:
            self.optimizer.state = defaultdict(dict)

    def refresh(self) -> None:
        """Takes the current hyperparameters; a scheduler may change them before the update is applied."""
        set_scaling(self.optimizer, scaling_of(self.base))
        for mine, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            for key, value in self.base.param_groups[group].items():
                if key != "params":
                    mine[key] = value

    def find_pieces(self) -> None:
        """Finds pieces at the current place of their variables: the training loop may have moved these."""
        for unit in self.boxed:
            piece = unit.parameter.data[unit.box]
            if piece.data_ptr() != unit.tensor.data_ptr():
                unit.tensor.data = piece

    def take_gradients(self, arrived: dict[int, torch.Tensor], unused: frozenset[int]) -> None:
        """Gives each unit its gradient: one that arrived elsewhere, its own, or none if nobody used its variable."""
        for unit in () if self.in_place and not arrived and not unused else self.units:
            gradient = arrived.get(id(unit.tensor), unit.gradient)
            if id(unit.parameter) in unused:
                set_gradient(unit.tensor, None)
            elif gradient is not None:
                set_gradient(unit.tensor, gradient)

    @without_grad
    def step(self) -> None:
        self.take_step(self.optimizer)


def twin(optimizer: Optimizer, plain_class: type[Optimizer]) -> Optimizer:
    """An optimizer of the plain class that shares everything with the given one, but for what was put on it: the
    runtime, and a scheduler's wrapper that counts steps."""
    made: Optimizer = object.__new__(plain_class)
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key not in ("_offbeat", "step")})
    return made


def scaling_of(optimizer: Optimizer) -> dict[str, Any]:
    """What a gradient scaler has put on the optimizer for this step."""
    return {name: vars(optimizer)[name] for name in SCALING if name in vars(optimizer)}


def set_scaling(optimizer: Optimizer, scaling: dict[str, Any]) -> None:
    """Puts the same on another optimizer."""
    for name in SCALING:
        vars(optimizer).pop(name, None)
    vars(optimizer).update(scaling)


def group_of(optimizer: Optimizer) -> dict[int, int]:
    """Index of the parameter group of each parameter, by its id."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def per_variable(optimizer_class: type[Optimizer], names: Collection[str] = PER_VARIABLE) -> bool:
    """Whether this torch class treats every variable separately."""
    return optimizer_class.__module__.startswith("torch.optim") and optimizer_class.__name__ in names


def elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether this torch class treats every element separately."""
    return per_variable(optimizer_class, ELEMENTWISE)
