"""Group a plan's synchronisers into components, which are waited for and applied at once, or slice by slice.

An update that waits for a message's last slice begins when the network has nothing left to carry, and the network then
waits for it. An optimizer that treats every element alone can apply what is there while the rest is on its way.
"""

import copy
from collections import defaultdict
from typing import Any, cast

import torch
from torch.optim import SGD

from offbeat.plan import Task
from offbeat.plan.program import Component as Described
from offbeat.runtime.engine.training import Training
from offbeat.runtime.sync import StaleAllReduce, Synchroniser
from offbeat.runtime.sync.dense import piece_edges
from offbeat.runtime.unit_optimizer import Unit, UnitOptimizer, elementwise, group_of

ALIGNMENT = 64
"""Elements. Portions of a variable begin at multiples of it, so that the processor's vector instructions take the same
elements at a time as in an update of the whole, and the result is the same bit for bit."""


class Component:
    """Messages that are settled together because they hold parts of the same variables, and the update they allow."""

    def __init__(self, described: Described, training: Training) -> None:
        self.synchronisers = [training.synchronisers[index] for index in described.messages]
        self.messages = described.messages
        self.pieces: dict[torch.nn.Parameter, list[tuple[Synchroniser, int]]] = defaultdict(list)
        """Where each variable's averaged gradient arrives: synchronisers, and the piece's place in their message."""
        for synchroniser in self.synchronisers:
            for place, parameter in enumerate(synchroniser.parameters):
                self.pieces[parameter].append((synchroniser, place))
        self.parameters = tuple(self.pieces)
        only = [(parameter, *pieces[0]) for parameter, pieces in self.pieces.items() if len(pieces) == 1]
        fixed = [(p, each.views[place]) for p, each, place in only if each.elementwise and each.whole[place]]
        self.averages = fixed if len(fixed) == len(self.pieces) else []
        """Each parameter with the place of its averaged gradient, where that is always the same."""
        self.relaxed = any(synchroniser.relaxed for synchroniser in self.synchronisers)
        self.stale = cast("list[StaleAllReduce]", self.synchronisers) if described.staleness else []
        """The same synchronisers, or none if messages are applied in their own step."""
        self.optimizer = training.optimizer_of(self._replicated_units())
        """Applies the update of every replica; None if there is nothing of the kind."""
        self.portions: Portions | None = None
        """Applies the same slice by slice, if there are several and the optimizer allows it."""
        self.settled = True
        """Whether no update is pending."""
        self.hidden: set[int] = set()
        """Parameters, by id, whose gradient was taken over and whose average has not been shown since."""

    def _replicated_units(self) -> list[Unit]:
        """Variables are updated whole; if some shards have an owner, the replicated ones are separate units."""
        units: list[Unit] = []
        for parameter, pieces in self.pieces.items():
            if all(synchroniser.replicated for synchroniser, _ in pieces):
                units.append(Unit(parameter, parameter))
            else:
                units += [each.unit_of_piece(place, parameter) for each, place in pieces if each.replicated]
        return units


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
            self.optimizer.take_step(optimizer)

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
