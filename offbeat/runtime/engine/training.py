"""State shared by the parts of an engine, and reports of its work to observers."""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.plan import Plan, Task
from offbeat.runtime.comm import Channels
from offbeat.runtime.sync import Synchroniser, make_synchroniser
from offbeat.runtime.unit_optimizer import Unit, UnitOptimizer, group_of
from offbeat.timeline import Kind
from offbeat.timeline.clock import Clock, Moment, clock_of
from offbeat.timeline.observer import Observer
from offbeat.torch_private import unhooked_step

_UNOBSERVED = nullcontext()


class Reports:
    """Reports everything to a recorder, and only collectives to a timekeeper."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.observer: Observer | None = None
        self.timekeeper: Observer | None = None
        self.step = 0

    def now(self) -> Moment:
        """The current moment, if anyone observes."""
        return self.clock.about_now() if self.observer is not None or self.timekeeper is not None else 0.0

    def collective(self, synchroniser: Synchroniser, task: Task, queued: Moment) -> None:
        """A collective has just been issued; its end is reported once the backend says so."""
        if self.observer is None and self.timekeeper is None:
            return
        work, issued = synchroniser.works.get(task.index), self.now()
        for observer in (self.observer, self.timekeeper):
            if observer is not None and work is not None:
                work.report_end(partial(observer.communication, self.step, task, queued, issued))

    def local(self, kind: Kind, messages: tuple[int, ...] = ()) -> AbstractContextManager[None]:
        """Reports how long something took on this rank."""
        return _UNOBSERVED if self.observer is None else self._observed(self.observer, kind, messages)

    @contextmanager
    def _observed(self, observer: Observer, kind: Kind, messages: tuple[int, ...]) -> Generator[None, None, None]:
        # An update begins where a wait has just ended; a wait on a GPU takes the host no time.
        begin = self.clock.now() if kind == "wait" else self.clock.about_now()
        yield
        observer.local(kind, messages, begin, self.clock.now())


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
    take_step: Callable[..., Any] = field(init=False)
    """That class's step(); hooks run around the one which distribute() puts in its place."""
    reports: Reports = field(init=False)
    synchronisers: list[Synchroniser] = field(init=False)
    """One per message."""

    def __post_init__(self) -> None:
        self.take_step = unhooked_step(self.optimizer_class)
        self.reports = Reports(clock_of(next(iter(self.parameters.values())).device))
        self.synchronisers = [make_synchroniser(message, self) for message in self.plan.messages]

    def optimizer_of(self, units: Iterable[Unit]) -> UnitOptimizer | None:
        """Updates those of the units that the user's optimizer holds; None if it holds none."""
        optimized = group_of(self.optimizer)
        held = [unit for unit in units if id(unit.parameter) in optimized]
        return UnitOptimizer(self.optimizer, self.optimizer_class, held) if held else None
