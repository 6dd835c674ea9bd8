"""The engine: sends gradients as they become ready and applies updates before they are needed.

Autograd tells the engine when each gradient is complete. A message whose gradients are all complete is loaded, and
tasks start in the program's order as far as it is loaded; the order is the same on every rank, so nothing is
negotiated. No thread of the engine's own takes part: the backend's queue runs the collectives while autograd goes on.

In *barrier* mode `backward()` returns when all gradients are averaged, as with DDP. In *deferred* mode the optimizer's
`step()` returns at once; each module's next forward waits for its own variables and applies their update (PACE's
overlap into the next iteration). Both are the same synchronous SGD. A loop that looks at gradients between `backward()`
and `step()` (clipping, a gradient scaler) sees the averaged ones and moves the engine to barrier mode.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal

import torch

from offbeat.plan import Message, Plan, Task
from offbeat.runtime.engine.arrivals import Arrivals
from offbeat.runtime.engine.components import Component
from offbeat.runtime.engine.frozen import FrozenVariables
from offbeat.runtime.engine.gradients import Gradients, Phase, UnusedParameters
from offbeat.runtime.engine.owners import Owners
from offbeat.runtime.engine.training import Training
from offbeat.runtime.engine.updates import Updates
from offbeat.runtime.faults import explain
from offbeat.runtime.lazy import AliasCheck, unwatch, watch
from offbeat.runtime.lifetime import script_failed
from offbeat.runtime.rollcall import RollCall
from offbeat.runtime.sync import AsyncServer
from offbeat.timeline.clock import Moment

log = logging.getLogger("offbeat")

Mode = Literal["deferred", "barrier"]


class Engine:
    """Runs one rank's part of a plan on a model and its optimizer."""

    def __init__(self, training: Training, mode: Mode, find_unused: bool | None, aliases: AliasCheck) -> None:
        self.training = training
        self.synchronisers, self.parameters = training.synchronisers, training.parameters
        self.channels, self.reports = training.channels, training.reports
        self.wanted_mode: Mode = mode
        self.mode: Mode = "barrier"
        self.bound_by_loop = False
        """The training loop has shown that it needs a barrier, whatever the plan."""
        self.outdated = False
        """The model or the optimizer has changed, so that the plan no longer fits."""
        self.refrozen = False
        """Parameters were frozen or unfrozen: the plan fits only if the same ones train as when it was made."""
        self.moved = False
        """The training loop has given a parameter other memory."""
        self.steps = 0
        self.began: Moment = 0.0
        self.ready: list[Moment] = [0.0] * len(self.synchronisers)
        """When the last backward pass began and each message was complete, if observed."""
        self.step_hooks: list[Callable[[], None]] = []
        self.backward_hooks: list[Callable[[], None]] = []
        """Called when a backward pass begins and when all its gradients are on their way."""
        program = training.plan.program
        self.alone = len(training.plan.replicas) == 1 and all(map(_plain, training.plan.messages))
        """Whether nothing is exchanged, and gradients are applied where autograd puts them."""
        self.components = [Component(each, training) for each in program.components]
        self.owners = Owners(training, aliases.held)
        spread = len(training.plan.replicas) > 1 and not training.plan.whole_state
        self.roll_call = RollCall(training.plan, self.channels) if spread else None
        """Where ranks that each hold a part of the optimizer's state meet; None if each holds all of it."""
        unused = UnusedParameters(self.parameters, self.channels.control, find_unused)
        self.frozen = FrozenVariables(self.parameters, program.replicated)
        self.gradients = Gradients(training, self.components, self.owners, unused, self.frozen)
        self.updates = Updates(self.gradients, aliases)
        self.all_replicated = program.replicated
        self.follow(training.plan)
        self.arrivals = Arrivals(self)
        frozen = [parameter for parameter in training.model.parameters() if not parameter.requires_grad]
        self.watched = [*self.parameters.values(), *frozen]
        lazy = mode == "deferred" or not self.all_replicated
        for parameter in self.watched:
            watch(parameter, self, lazy=lazy and parameter.requires_grad)
        self.server: AsyncServer | None = None
        """This rank's side of asynchronous messages, if there are any."""
        if self.channels.direct is not None:
            self.server = AsyncServer(
                self.channels.direct, self.synchronisers, self.owners.update_alone, training.plan.replicas
            )

    def follow(self, plan: Plan) -> None:
        """Issues gradients in this plan's order from the next backward pass on; everything else must be unchanged."""
        self.plan = self.training.plan = plan
        self.order: tuple[Task, ...] = plan.program.order
        self.updates.follow(plan)

    # Backward

    def backward_begins(self) -> None:
        """Called at the first gradient of a pass."""
        self.began = self.reports.now()
        self.updates.settle_all()
        self.gradients.backward_begins()
        self.owners.tell("backward")
        if self.roll_call is not None:
            self.roll_call.backward_begins()
        self.head = 0
        self.missing = list(self.plan.program.awaited)
        self.loaded = [False] * len(self.synchronisers)
        for hook in self.backward_hooks:
            hook()
        for name in self.frozen.now & self.plan.program.carriers.keys():
            self.gradient_complete(name)

    def gradient_complete(self, name: str) -> None:
        """A gradient is final: messages that waited only for it can start."""
        for index in self.plan.program.carriers[name]:
            self.missing[index] -= 1
            if not self.missing[index]:
                self._load(index)
        self._issue()

    def _load(self, index: int) -> None:
        self.gradients.take(index)
        self.loaded[index] = True
        self.ready[index] = self.reports.now()

    def _issue(self) -> None:
        order, loaded = self.order, self.loaded
        while self.head < len(order) and loaded[order[self.head].message]:
            task = order[self.head]
            synchroniser = self.synchronisers[task.message]
            with explain(self.plan, synchroniser, task):
                synchroniser.start(task)
            self.reports.collective(synchroniser, task, self.ready[task.message])
            self.head += 1

    def backward_ends(self) -> None:
        """Variables without a gradient contribute nothing, so that the other ranks' messages can go."""
        self._send_rest(self.gradients.lacking(self.arrivals.calls))

    def _send_rest(self, unused: list[str]) -> None:
        self.gradients.unused.backward_ended(unused, self.frozen.backward_ends())
        for index, loaded in enumerate(self.loaded):
            if not loaded:
                self._load(index)
        self._issue()
        self.gradients.phase = Phase.TRAVELLING
        for hook in self.backward_hooks:
            hook()
        if self.mode == "barrier":
            with self.reports.local("wait"):
                self.gradients.average()

    def backward_without_gradients(self) -> None:
        """Takes part in a backward pass of the other ranks with gradients of zero."""
        self.backward_begins()
        self._send_rest([] if self.gradients.unused.track is False else list(self.parameters))

    # Step

    def step(self) -> None:
        """Applies the averaged gradients: now (barrier), or as each module needs them (deferred)."""
        if self.alone:
            self.steps += 1
            self.reports.step = self.steps
            with self.reports.local("optimizer"):
                self.updates.whole_step()
            self._run_hooks()
            return
        if not self.gradients.phase.synchronised:
            # Without a synchronised backward pass before it, what `parameter.grad` shows is applied as it is.
            self.updates.settle_all()
            if self.all_replicated or any(component.relaxed for component in self.components):
                self.updates.whole_step()
                return
            self.gradients.adopt()
        self.steps += 1
        self.reports.step = self.steps
        if self.mode == "barrier":
            with self.reports.local("wait"):
                self.gradients.average()
        self.gradients.take_back()
        if self.mode == "barrier" and self.all_replicated:
            with self.reports.local("optimizer"):
                self.updates.whole_step()
        else:
            self.updates.begin_step()
        self._end_step()

    def _end_step(self) -> None:
        if self.gradients.unused.track is None:
            # A rank that applies nothing yet must learn of it with the others, or it would ask again alone.
            self.gradients.unused_parameters()
        if self.server is not None:
            with explain(self.plan, what="the parameters of asynchronous servers"):
                self.server.exchange()
        self.gradients.step_ends()
        if self.mode == "barrier":
            self.updates.settle_all()
        else:
            self.updates.settle_aliased()
        self.outdated |= self.frozen.step_ends()
        self._run_hooks()

    def _run_hooks(self) -> None:
        for hook in list(self.step_hooks):
            # One of them may have changed the plan, and with it the hooks.
            if hook in self.step_hooks:
                with explain(self.plan, what="all ranks to agree on the issue order"):
                    hook()

    def closure_step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Runs a step in which the user's optimizer calls backward itself, any number of times."""
        self.need_barrier("step() is given a closure")
        self.updates.settle_all()
        result: torch.Tensor = self.training.take_step(self.training.optimizer, closure)
        self.gradients.phase = Phase.IDLE
        return result

    def zero_grad(self, set_to_none: bool, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Drops gradients of these parameters."""
        parameters = list(parameters)
        phase = self.gradients.phase
        if phase.synchronised:
            everything = self.updates.component_of.keys() <= set(map(id, parameters))
            if phase is not Phase.PUBLISHED and set_to_none and everything:
                self.gradients.discard()
            else:
                self.gradients.publish()
        self.updates.zero(parameters, set_to_none)

    def settle_all(self) -> None:
        """Waits for all pending updates, so that parameters are up to date."""
        self.updates.settle_all()

    def drain(self) -> None:
        """Waits for stale messages too, so that all replicas are equal; every rank must call it."""
        self.updates.drain()

    # What the training loop does with parameters

    def gradient_read(self, parameter: torch.nn.Parameter) -> None:
        """`parameter.grad` is read: it must be the average, and later steps should not defer."""
        if self.updates.applying or self.gradients.phase is Phase.BACKWARD:
            return
        self.value_used(parameter)
        if self.gradients.phase.synchronised:
            self.gradients.publish()
            if self.mode == "deferred":
                self.need_barrier("the training loop reads gradients before step()")
        elif self.gradients.phase is Phase.KEPT and self.updates.hides(parameter):
            self.updates.settle_all()
            self.gradients.publish_kept()

    def gradient_written(self, parameter: torch.nn.Parameter) -> None:
        """`parameter.grad` is replaced: a pending update is applied first, and the next step uses the new gradient."""
        if self.gradients.phase is not Phase.KEPT:
            self.gradient_read(parameter)
        elif not self.updates.applying:
            self.value_used(parameter)
            self.updates.zero([parameter], set_to_none=True)

    def value_used(self, parameter: torch.nn.Parameter) -> None:
        """A parameter is read or written: a pending update is applied first."""
        component = self.updates.component_of.get(id(parameter))
        if component is not None:
            self.updates.settle(component)

    def training_changed(self, parameter: torch.nn.Parameter, trains: bool) -> None:
        """A parameter is frozen or unfrozen."""
        if not self.frozen.change(parameter, trains):
            self.refrozen = True

    # Modes

    def need_barrier(self, reason: str) -> None:
        """From now on no update is deferred, not even by later plans."""
        self.bound_by_loop = True
        self.wanted_mode = "barrier"
        self.set_mode("barrier", reason)

    def set_mode(self, mode: Mode, reason: str) -> None:
        if mode != self.mode:
            self.mode = mode
            log.info("offbeat runs in %s mode: %s", mode, reason)

    # The end

    def close(self, deadline: float) -> None:
        """Waits for collectives in flight until `deadline` (time.monotonic), drops them, ends threads and sockets."""
        if not script_failed():
            # A failed rank says no goodbye, so that the owners of its gradients notice.
            self._say_farewell()
            if self.server is not None:
                self.server.close(deadline)
        self.channels.close(deadline)
        if self.server is not None:
            # Without connections its threads come to an end.
            self.server.join(time.monotonic() + 1.0)

    def _say_farewell(self) -> None:
        """Lets servers end; they, or the connection, may already be gone."""
        with suppress(RuntimeError):
            self.owners.tell("end")

    def detach(self) -> None:
        """Removes every hook from the model, and makes its parameters plain."""
        self.drain()
        self._say_farewell()
        if self.server is not None:
            self.server.close()
        hooks = [handle for synchroniser in self.synchronisers for handle in synchroniser.handles]
        for handle in (*self.arrivals.handles, *hooks):
            handle.remove()
        for parameter in self.watched:
            unwatch(parameter)
        self.channels.leave()


def _plain(message: Message) -> bool:
    """Whether a message's only replica can apply it directly."""
    exact = not message.staleness and not message.asynchronous and message.encoder.name == "none"
    return message.replicated and exact and not message.roots
