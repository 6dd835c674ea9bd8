"""Apply averaged gradients to parameters: all at once, or each component when it is needed.

A component whose update is outstanding has pending parameters (`offbeat.runtime.lazy`): using one applies the update.
"""

from collections.abc import Iterable

import torch

from offbeat.plan import Plan
from offbeat.runtime.engine.components import Component, Portions
from offbeat.runtime.engine.gradients import Gradients
from offbeat.runtime.faults import explain
from offbeat.runtime.lazy import (
    AliasCheck,
    outside_inference_mode,
    raw_gradient,
    set_gradient,
    set_pending,
    without_grad,
)
from offbeat.runtime.sync import Synchroniser
from offbeat.runtime.unit_optimizer import Unit, UnitOptimizer


class Updates:
    """The optimizer's side of a plan on one rank."""

    def __init__(self, gradients: Gradients, aliases: AliasCheck) -> None:
        self.training = training = gradients.training
        self.reports = training.reports
        self.gradients = gradients
        self.components, self.owners = gradients.components, gradients.owners
        self.component_of = {id(parameter): each for each in self.components for parameter in each.parameters}
        held = (parameter for group in training.optimizer.param_groups for parameter in group["params"])
        self.outside = training.optimizer_of(Unit(p, p) for p in held if id(p) not in self.component_of)
        """For parameters outside the plan, which are updated only here."""
        self.outstanding = 0
        """Components with a pending update."""
        self.zeroing: dict[int, bool] = {}
        """Whether zero_grad() asked for None, by id of parameters with a pending update."""
        self.applying = False
        """Whether an optimizer is running, so that accesses to gradients are not the training loop's."""
        self.aliases = aliases
        aliases.count_own()

    def follow(self, plan: Plan) -> None:
        """Applies slices in the order in which this plan sends them."""
        for component, described in zip(self.components, plan.program.components, strict=True):
            component.portions = None
            if described.slices and component.optimizer is not None:
                synchroniser = component.synchronisers[0]
                if Portions.fit(synchroniser, component.optimizer):
                    component.portions = Portions(synchroniser, component.optimizer, described.slices)

    def optimizers(self) -> list[UnitOptimizer]:
        """Every optimizer that replaces a part of the user's."""
        others = (self.outside, *(component.optimizer for component in self.components))
        return [*self.owners.optimizers.values(), *(each for each in others if each is not None)]

    # Applying

    def whole_step(self) -> None:
        """The user's optimizer takes one ordinary step with what `parameter.grad` holds."""
        with self.at_work():
            self.training.take_step(self.training.optimizer)

    def begin_step(self) -> None:
        """Owners update their messages and send them back; updates of every replica become pending."""
        for optimizer in self.optimizers():
            optimizer.refresh()
        if self.outside is not None:
            self.apply(self.outside)
        if self.owners.commands is not None:
            dropped = self.gradients.dropped
            unused = self.gradients.unused_parameters() if dropped is None else dropped
            self.owners.tell_step(unused, published=self.owners.reduced)
        self.owners.run(self.apply)
        for component in self.components:
            component.settled = component.relaxed
            if not component.settled:
                set_pending(component.parameters, pending=True)
        self.outstanding = sum(not component.settled for component in self.components)
        for component in self.components:
            # This step's messages leave; those that are due, or have arrived, are applied.
            for synchroniser in component.stale:
                synchroniser.depart()
            while component.stale and (component.stale[0].due or all(each.arrived for each in component.stale)):
                self._apply_stale(component)

    def apply(self, optimizer: UnitOptimizer, *synchronisers: Synchroniser) -> None:
        """Steps an optimizer; gradients that are not where its units expect them come from the synchronisers."""
        elsewhere = {key: value for each in synchronisers for key, value in each.unit_gradients().items()}
        with self.at_work():
            dropped = self.gradients.dropped
            optimizer.take_gradients(elsewhere, self.gradients.unused_parameters() if dropped is None else dropped)
            optimizer.step()

    def at_work(self) -> "_AtWork":
        """While the engine itself reads gradients and writes parameters."""
        return _AtWork(self)

    @outside_inference_mode
    @without_grad
    def settle(self, component: Component) -> None:
        """Waits for one component and applies its update."""
        if component.settled:
            return
        component.settled = True
        self.outstanding -= 1
        set_pending(component.parameters, pending=False)
        if not self._apply_in_portions(component):
            self._apply_at_once(component)
        for parameter in component.parameters:
            set_to_none = self.zeroing.pop(id(parameter), None)
            if set_to_none is not None:
                self._forget(component, parameter, set_to_none)

    def settle_all(self) -> None:
        """Waits for everything outstanding, so that parameters are up to date."""
        if self.outstanding:
            for component in self.components:
                self.settle(component)

    def settle_aliased(self) -> None:
        """Settles parameters of which others hold views: a view cannot be brought up to date when it is read."""
        for component in self.components if self.outstanding else ():
            if not component.settled and self.aliases.any(component.parameters):
                self.settle(component)

    def _apply_in_portions(self, component: Component) -> bool:
        """Applies each slice as it arrives; False, and nothing done, where that cannot be."""
        portions = component.portions
        arriving = len(component.hidden) == len(component.parameters)
        if portions is None or not arriving or self.gradients.dropped is not None or not portions.possible():
            return False
        synchroniser = portions.synchroniser
        with self.reports.local("wait", component.messages):
            unused = self.gradients.unused_parameters()
        for task in portions.slices:
            with self.reports.local("wait", component.messages), explain(self.training.plan, synchroniser, task):
                synchroniser.wait(task.index)
            with self.reports.local("update", component.messages):
                portions.apply(task.stop, unused)
        portions.end()
        self.gradients.show(component)
        return True

    def _apply_at_once(self, component: Component) -> None:
        with self.reports.local("wait", component.messages):
            self.gradients.show(component)
            for synchroniser in component.synchronisers:
                if not synchroniser.replicated:
                    with explain(self.training.plan, synchroniser):
                        synchroniser.receive()
        if component.optimizer is not None:
            with self.reports.local("update", component.messages):
                component.optimizer.find_pieces()
                self.apply(component.optimizer, *(each for each in component.synchronisers if each.replicated))
        self.owners.received(component.synchronisers)

    # Stale messages

    def _apply_stale(self, component: Component) -> None:
        for synchroniser in component.stale:
            with explain(self.training.plan, synchroniser):
                synchroniser.arrive()
                self.owners.run_stale(synchroniser.message.index, self.apply)
                synchroniser.receive()
        for parameter in component.parameters:
            component.hidden.add(id(parameter))
            set_gradient(parameter, None)
        self.gradients.show(component)
        component.hidden.clear()
        if component.optimizer is not None:
            component.optimizer.find_pieces()
            self.apply(component.optimizer)
        self.owners.received(component.stale)

    def drain(self) -> None:
        """Applies everything, stale messages too, so that all replicas are equal; every rank must call it."""
        self.settle_all()
        self.owners.tell("drain")
        for component in self.components:
            while component.stale and component.stale[0].flying:
                self._apply_stale(component)

    # Forgetting

    def zero(self, parameters: Iterable[torch.nn.Parameter], set_to_none: bool) -> None:
        """Forgets gradients: those still needed for an outstanding update are forgotten once it is applied."""
        for parameter in parameters:
            component = self.component_of.get(id(parameter))
            if component is not None and not component.settled:
                self.zeroing[id(parameter)] = set_to_none or self.zeroing.get(id(parameter), False)
            else:
                self._forget(component, parameter, set_to_none)

    def _forget(self, component: Component | None, parameter: torch.nn.Parameter, set_to_none: bool) -> None:
        """What torch's zero_grad() does to one parameter."""
        gradient = raw_gradient(parameter)
        hidden = component is not None and id(parameter) in component.hidden
        if component is not None:
            component.hidden.discard(id(parameter))
        if set_to_none or (gradient is None and (not hidden or id(parameter) in self.gradients.unused_parameters())):
            set_gradient(parameter, None)
        elif gradient is None or gradient.grad_fn is not None:
            set_gradient(parameter, torch.zeros_like(parameter, requires_grad=False))
        else:
            with torch.no_grad():
                gradient.zero_()

    def hides(self, parameter: torch.nn.Parameter) -> bool:
        """Whether an average of its gradient has not been shown nor forgotten."""
        component = self.component_of.get(id(parameter))
        return component is not None and id(parameter) in component.hidden


class _AtWork:
    """Marks that the engine itself is at work."""

    __slots__ = ("before", "updates")

    def __init__(self, updates: Updates) -> None:
        self.updates = updates

    def __enter__(self) -> None:
        self.before, self.updates.applying = self.updates.applying, True

    def __exit__(self, *_: object) -> None:
        self.updates.applying = self.before
