"""Group a plan's synchronisers into components, which are waited for and applied at once."""

from collections import defaultdict
from typing import cast

import torch

from offbeat.plan.program import Component as Described
from offbeat.runtime.engine.portions import Portions
from offbeat.runtime.engine.training import Training
from offbeat.runtime.sync import StaleAllReduce, Synchroniser
from offbeat.runtime.unit_optimizer import Unit


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
