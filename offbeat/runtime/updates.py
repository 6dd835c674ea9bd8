"""Some of an optimizer's parameters, or pieces of them → an update of just these."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop")
"""torch.optim classes that treat every element alone, so that pieces of a variable can be updated separately."""
PER_VARIABLE = (*ELEMENTWISE, "SparseAdam", "Adafactor", "Muon")
"""torch.optim classes that treat every variable alone, so that variables can be updated one after another."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is updated at once: a variable, or a piece of one seen as a parameter."""

    tensor: torch.Tensor
    group: int
    """Index of the parameter group whose hyperparameters apply."""


class UnitOptimizer:
    """An optimizer of the user's class and hyperparameters over a few units."""

    def __init__(self, base: Optimizer, base_class: type[Optimizer], units: Sequence[Unit], share_state: bool) -> None:
        self.base = base
        self.base_class = base_class
        self.groups = sorted({unit.group for unit in units})
        self.optimizer = copy.copy(base)
        self.optimizer.__class__ = base_class
        # A scheduler may have put a counting wrapper on the instance.
        self.optimizer.__dict__.pop("step", None)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(self.optimizer, name, OrderedDict())
        self.optimizer.param_groups = [
            {**base.param_groups[group], "params": [unit.tensor for unit in units if unit.group == group]}
            for group in self.groups
        ]
        if not share_state:
            self.optimizer.state = defaultdict(dict)

    def refresh(self) -> None:
        """Takes the hyperparameters as they are now; a scheduler may change them before the update is applied."""
        for mine, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            for key, value in self.base.param_groups[group].items():
                if key != "params":
                    mine[key] = value

    @torch.no_grad()
    def step(self) -> None:
        self.base_class.step(self.optimizer)


def group_of(optimizer: Optimizer) -> dict[int, int]:
    """Index of the parameter group of each parameter, by its id."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def elementwise(optimizer_class: type[Optimizer]) -> bool:
    return _is_torch(optimizer_class, ELEMENTWISE)


def per_variable(optimizer_class: type[Optimizer]) -> bool:
    return _is_torch(optimizer_class, PER_VARIABLE)


def _is_torch(optimizer_class: type[Optimizer], names: Iterable[str]) -> bool:
    return optimizer_class.__module__.startswith("torch.optim") and optimizer_class.__name__ in names
