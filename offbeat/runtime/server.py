"""Run a rank without a replica as a parameter server until the replicas have ended.

It has the same model and optimizer as they have, and follows the same plan with gradients of zero: what it owns is
reduced to it, it applies the update with its own optimizer state and sends the parameters back. The first replica tells
it which part of a step comes next (`Commands` in `offbeat.runtime.comm.channels`).
"""

import importlib
from datetime import timedelta
from typing import Any, cast

import torch
from torch.optim import Optimizer

from offbeat.plan import Plan
from offbeat.runtime.checkpoint import keep_parts
from offbeat.runtime.comm import Channels, World
from offbeat.runtime.engine import Training
from offbeat.runtime.engine.owners import Owners
from offbeat.runtime.faults import explain
from offbeat.runtime.lazy import set_gradient
from offbeat.runtime.lifetime import close_at_exit
from offbeat.runtime.sync import AsyncServer, StaleAllReduce, Synchroniser
from offbeat.runtime.unit_optimizer import UnitOptimizer, set_scaling


class Served(SystemExit):
    """Ends the script of a rank without a replica, once the replicas have ended."""


class Server:
    """One rank's part of a plan, on a rank without a replica."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        parameters: dict[str, torch.nn.Parameter],
        plan: Plan,
        timeout: timedelta,
        world: World,
    ) -> None:
        self.channels = Channels(plan, world, timeout, {})
        assert self.channels.commands is not None
        self.commands = self.channels.commands
        self.training = Training(plan, model, parameters, optimizer, type(optimizer), self.channels)
        self.owners = Owners(self.training, frozenset())
        self.mine = [each for each in self.training.synchronisers if plan.rank in each.message.servers]
        self.stale = [cast(StaleAllReduce, each) for each in self.mine if each.message.staleness]
        self.unused: frozenset[int] = frozenset()
        self.asynchronous: AsyncServer | None = None
        if self.channels.direct is not None:
            self.asynchronous = AsyncServer(
                self.channels.direct, self.training.synchronisers, self.owners.update_alone, plan.replicas
            )
        close_at_exit(self)

    def serve(self) -> None:
        """Follows the first replica's commands until the job has ended."""
        while True:
            with explain(self.training.plan, what="the next step of the replicas"):
                command, facts = self.commands.next()
            if command == "end":
                break
            getattr(self, f"_{command}")(**facts)
        if self.asynchronous is not None:
            self.asynchronous.close()
        self._finish()
        self.channels.close()

    def close(self, deadline: float) -> None:
        """Closes the network connections before the interpreter ends."""
        self.channels.close(deadline)

    def _meet(self, function: str) -> None:
        """Takes part in what all ranks do together: calls 'package.module:function'."""
        module, _, name = function.partition(":")
        with explain(self.training.plan, what="what all ranks do together"):
            getattr(importlib.import_module(module), name)()

    def _finish(self) -> None:
        """Waits for parameters on their way back."""
        for each in self.mine:
            with explain(self.training.plan, each):
                each.finish()

    def _backward(self) -> None:
        """Joins a backward pass of the replicas with gradients of zero."""
        self._finish()
        self.owners.prepared = self.owners.reduced = False
        for each in self.mine:
            if not each.replicated:
                each.load()
        for task in self.training.plan.program.order:
            synchroniser = self.training.synchronisers[task.message]
            with explain(self.training.plan, synchroniser, task):
                synchroniser.start(task)

    def _order(self, order: tuple[tuple[int, int], ...]) -> None:
        """The replicas issue their gradients in another order from now on."""
        plan = self.training.plan
        known = set(plan.issue_order)
        self.training.plan = plan.reordered(piece for piece in order if piece in known)

    def _step(
        self,
        groups: list[dict[str, Any]],
        unused: list[str],
        values: dict[str, torch.Tensor],
        gradients: dict[str, torch.Tensor | None] | None,
        scaling: dict[str, Any],
    ) -> None:
        """Applies the arrived gradients, or the training loop's changes of them, and sends values back."""
        parameters = self.training.parameters
        for group, told in zip(self.training.optimizer.param_groups, groups, strict=True):
            group.update(told)
        set_scaling(self.training.optimizer, scaling)
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(value)
        self.unused = frozenset(id(parameters[name]) for name in unused)
        if gradients is not None:
            self.owners.prepared = self.owners.reduced = True
            self.unused = frozenset(id(parameters[name]) for name, each in gradients.items() if each is None)
            for name, gradient in gradients.items():
                set_gradient(parameters[name], gradient)
            for each in self.owners.served:
                each.reload()
            for name in gradients:
                set_gradient(parameters[name], None)
        for optimizer in self.owners.optimizers.values():
            optimizer.refresh()
        self.owners.run(self._apply)
        for stale in self.stale:
            stale.depart()
            while stale.due:
                self._apply_stale(stale)

    def _apply(self, optimizer: UnitOptimizer, synchroniser: Synchroniser) -> None:
        optimizer.take_gradients(synchroniser.unit_gradients(), self.unused)
        optimizer.step()
        # Parts of a variable lie outside it, and the next update begins with what the variable holds.
        synchroniser.unpack_values()

    def _apply_stale(self, stale: StaleAllReduce) -> None:
        with explain(self.training.plan, stale):
            stale.arrive()
            self.owners.run_stale(stale.message.index, self._apply)
            stale.finish()

    def _drain(self) -> None:
        for stale in self.stale:
            while stale.flying:
                self._apply_stale(stale)

    def _reduce(self) -> None:
        self.owners.reduce()

    def _publish(self, message: int) -> None:
        if self.training.synchronisers[message] in self.mine:
            self.owners.publish(self.training.synchronisers[message])

    def _discard(self) -> None:
        self.owners.prepare()
        for each in self.mine:
            with explain(self.training.plan, each):
                each.drop()

    def _state(self) -> None:
        """Sends the first replica the optimizer state of the messages this rank owns."""
        self._finish()
        names = {id(parameter): name for name, parameter in self.training.parameters.items()}
        held = [
            (names[id(unit.parameter)], unit.tensor.detach(), _ends(unit.box), dict(state))
            for optimizer in self.owners.optimizers.values()
            for unit in optimizer.units
            if (state := optimizer.optimizer.state.get(unit.tensor))
        ]
        self.commands.send(self.commands.lead, held)
        self.channels.world.all_gather_object({})

    def _load(self, state: dict[str, Any]) -> None:
        """Takes its part of an optimizer's state dict."""
        self._finish()
        optimizer = self.training.optimizer
        optimizer.load_state_dict(state)
        keep_parts(self.owners.optimizers.values(), optimizer)
        optimizer.state.clear()


def _ends(box: tuple[slice, ...] | None) -> list[tuple[int, int]] | None:
    return None if box is None else [(each.start, each.stop) for each in box]
