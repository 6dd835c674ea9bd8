"""Detect changes that the training loop made to a model or its optimizer.

Layers may be replaced, parameters frozen, unfrozen or given to the optimizer later. A plan made before then no longer
fits, and ranks would drift apart silently. Torch tells of every parameter and module that is registered anywhere; only
after one in the model itself, or when a watched parameter's `requires_grad` has changed, is the model walked over and
compared. Inside torch.func.functional_call() it holds other tensors for one forward only, which is no change.
"""

from functools import cache
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from offbeat.runtime.engine import Engine
from offbeat.runtime.engine.frozen import FrozenVariables
from offbeat.runtime.lazy import can_be_lazy

_registrations = [0]
"""Number of registrations: torch's hooks are per process, so there is one count."""
_watched: set[int] = set()
"""The modules, by id, in which they count."""


@cache
def watch_structure() -> None:
    """Starts counting registrations in the modules of distributed models."""
    register_module_parameter_registration_hook(_count)
    register_module_module_registration_hook(_count)


def _count(module: torch.nn.Module, *_: Any) -> None:
    if id(module) in _watched:
        _registrations[0] += 1


class Structure:
    """The content of a model and its optimizer when a plan was made for them."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.registrations = _registrations[0]
        _watched.update(map(id, model.modules()))
        self.parameters = list(model.parameters())
        self.held = [(id(parameter), parameter.requires_grad) for parameter in self.parameters]
        self.optimized = self._optimized()
        # As long as these exist, no other parameter has one of their ids.
        self.kept = [group["params"][:] for group in optimizer.param_groups]
        self.unwatched = [(p, p.requires_grad) for p in self.parameters if not can_be_lazy(p)]
        """Parameters of classes of their own, which do not tell that they are frozen or unfrozen."""

    def changed(self, engine: Engine) -> bool:
        """Whether their content has changed."""
        known = self.registrations == _registrations[0] and not engine.refrozen
        if known and not engine.outdated and not self.regrouped():
            return False
        if not all(isinstance(parameter, torch.nn.Parameter) for parameter in self.model.parameters()):
            return False
        self.registrations, engine.refrozen = _registrations[0], False
        return engine.outdated or self.regrouped() or self._held(engine.frozen) != self.held

    def regrouped(self) -> bool:
        """Whether other parameters are in the optimizer's groups, or of those that do not tell, other ones train."""
        if any(parameter.requires_grad != before for parameter, before in self.unwatched):
            return True
        return self._optimized() != self.optimized

    def _held(self, frozen: FrozenVariables) -> list[tuple[int, bool]]:
        # What the plan lets be frozen for the moment counts as it did: registrations may be noticed on one rank alone.
        return [(id(p), p.requires_grad or frozen.spares(p)) for p in self.model.parameters()]

    def _optimized(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.optimizer.param_groups]
