"""State shared by the parts of an engine."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from offbeat.plan import Plan
from offbeat.runtime.comm import Channels
from offbeat.runtime.engine.reports import Reports
from offbeat.runtime.sync import Synchroniser, make_synchroniser
from offbeat.runtime.unit_optimizer import Unit, UnitOptimizer, group_of
from offbeat.timeline.clock import clock_of


@dataclass(eq=False)
class Training:
    """One rank's part of a plan, and the model and optimizer it trains."""

    plan: Plan
    """The current plan; the engine replaces it when a better order is found."""
    model: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    """By the plan's names."""
    optimizer: Optimizer
    optimizer_class: type[Optimizer]
    """The user's optimizer, without the additions of distribute()."""
    channels: Channels
    reports: Reports = field(init=False)
    synchronisers: list[Synchroniser] = field(init=False)
    """One per message."""

    def __post_init__(self) -> None:
        self.reports = Reports(clock_of(next(iter(self.parameters.values())).device))
        self.synchronisers = [make_synchroniser(message, self) for message in self.plan.messages]

    def optimizer_of(self, units: Iterable[Unit]) -> UnitOptimizer | None:
        """Updates those of the units that the user's optimizer holds; None if it holds none."""
        optimized = group_of(self.optimizer)
        held = [unit for unit in units if id(unit.parameter) in optimized]
        return UnitOptimizer(self.optimizer, self.optimizer_class, held) if held else None
