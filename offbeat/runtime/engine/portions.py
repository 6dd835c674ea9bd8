"""Apply the slices of a message as they arrive, portion by portion.

An update that waits for a message's last slice begins when the network has nothing left to carry, and the network then
waits for it. An optimizer that treats every element alone can apply what is there while the rest is on its way.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch.optim import SGD

from offbeat.plan import Task
from offbeat.runtime.sync import Synchroniser
from offbeat.runtime.sync.dense import piece_edges
from offbeat.runtime.unit_optimizer import UnitOptimizer, elementwise, group_of

ALIGNMENT = 64
"""Elements. Portions of a variable begin at multiples of it, so that the processor's vector instructions take the same
elements at a time as in an update of the whole, and the result is the same bit for bit."""


class Portions:
    """Applies one message's averaged gradient up to any element, and later the rest."""

    def __init__(self, synchroniser: Synchroniser, optimizer: UnitOptimizer, slices: tuple[Task, ...]) -> None:
        self.synchroniser = synchroniser
        self.slices = slices
        """Its tasks in issue order, each behind the one before."""
        self.optimizer = optimizer
        self.group = group_of(optimizer.optimizer)
        """By the parameter's id, among the groups of this optimizer."""
        self.edges = piece_edges(synchroniser.message)
        self._restart()

    def _restart(self) -> None:
        self.applied = [0] * len(self.synchroniser.parameters)
        self.scalars: dict[torch.nn.Parameter, dict[str, Any]] = {}

    @staticmethod
    def fit(synchroniser: Synchroniser, optimizer: UnitOptimizer) -> bool:
        """Whether the message and the optimizer allow it; on a GPU an update is too short to be worth it."""
        dense = synchroniser.elementwise and synchroniser.device.type == "cpu" and all(synchroniser.whole)
        return dense and elementwise(optimizer.base_class)

    def possible(self) -> bool:
        """Whether the optimizer's state exists, with elements in the order of the message's."""
        groups, state = self.optimizer.optimizer.param_groups, self.optimizer.optimizer.state
        for parameter in self.synchroniser.parameters:
            group = self.group.get(id(parameter))
            if group is None:
                continue
            known = state.get(parameter, {})
            stateless = self.optimizer.base_class is SGD and not groups[group]["momentum"]
            tensors = [parameter, *(value for value in known.values() if isinstance(value, torch.Tensor))]
            if not (known or stateless) or None in known.values() or not all(t.is_contiguous() for t in tensors):
                return False
        return True

    @torch.no_grad()
    def apply(self, reached: int, unused: frozenset[int]) -> None:
        """Updates the message's elements before `reached` that have not been updated yet."""
        optimizer = copy.copy(self.optimizer.optimizer)
        optimizer.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
        optimizer.state = defaultdict(dict)
        for place, (parameter, (begin, _)) in enumerate(zip(self.synchroniser.parameters, self.edges, strict=True)):
            start, stop = self.applied[place], min(reached - begin, parameter.numel())
            if stop < parameter.numel():
                stop -= stop % ALIGNMENT
            group = self.group.get(id(parameter))
            if stop <= start or group is None or id(parameter) in unused:
                continue
            self.applied[place] = stop
            part = parameter.data.view(-1)[start:stop]
            part.grad = self.synchroniser.buffer[begin + start : begin + stop]
            optimizer.param_groups[group]["params"].append(part)
            known = self.optimizer.optimizer.state.get(parameter)
            if known:
                optimizer.state[part] = {
                    key: _part_of(value, parameter, slice(start, stop)) for key, value in known.items()
                }
                self.scalars[parameter] = optimizer.state[part]
        if any(group["params"] for group in optimizer.param_groups):
            self.optimizer.base_class.step(optimizer)

    def end(self) -> None:
        """Every element has been updated: what a variable has one of, such as Adam's count of steps, moves on too."""
        for parameter, latest in self.scalars.items():
            state = self.optimizer.optimizer.state[parameter]
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    state[key] = latest[key]
                elif value.shape != parameter.shape:
                    value.copy_(latest[key])
        self._restart()


def _part_of(value: Any, parameter: torch.Tensor, elements: slice) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.view(-1)[elements] if value.shape == parameter.shape else value.clone()
