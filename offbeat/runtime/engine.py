"""Plan → synchronous training: gradients go out as they become ready, updates come in before they are needed.

Autograd tells the engine when each gradient is complete. A parcel whose gradients are all complete is loaded, and
tasks start in the plan's order as far as it is loaded; the order is the same on every rank, so nothing is negotiated.
No thread of the engine's own takes part: the backend's queue runs the collectives while autograd goes on.

In *barrier* mode `backward()` returns when all gradients are averaged, as with DDP. In *deferred* mode the optimizer's
`step()` returns at once; each module's next forward waits for its own variables and applies their update (PACE's
overlap into the next iteration). Both are the same synchronous SGD. A loop that looks at gradients between `backward()`
and `step()` (clipping, a gradient scaler) sees the averaged ones and moves the engine to barrier mode.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.plan import Plan, Task
from offbeat.runtime.absences import Absences
from offbeat.runtime.asynchronous import AsyncParcel, AsyncServer
from offbeat.runtime.channel import Channels, report_end
from offbeat.runtime.components import Component, make_components
from offbeat.runtime.faults import explain
from offbeat.runtime.guard import guard, raw_gradient, set_gradient, unguard
from offbeat.runtime.parcels import Parcel, ShardedParcel, ValueParcel
from offbeat.runtime.row_parcels import SparseParcel, SparseServerParcel
from offbeat.runtime.stale import StaleParcel
from offbeat.runtime.updates import Unit, UnitOptimizer, group_of
from offbeat.timeline import Kind
from offbeat.timeline.observer import Observer

log = logging.getLogger("offbeat")


class Engine:
    """Runs one rank's part of a plan on a model and its optimizer."""

    bound_by_loop = False
    """The training loop has shown that it needs a barrier, whatever the plan."""
    timekeeper: Observer | None = None
    """Is told of collectives only; set by the retimer."""

    def __init__(
        self,
        plan: Plan,
        parcels: list[Parcel],
        parameters: dict[str, torch.nn.Parameter],
        optimizer: Optimizer,
        optimizer_class: type[Optimizer],
        channels: Channels,
        mode: Literal["deferred", "barrier"],
    ) -> None:
        self.plan = plan
        self.parcels = parcels
        self.parameters = parameters
        self.optimizer = optimizer
        self.optimizer_class = optimizer_class
        self.channels = channels
        self.wanted_mode = mode
        self.mode: Literal["deferred", "barrier"] = "barrier"
        free = {message.index for message in plan.messages if message.asynchronous}
        stale = {message.index for message in plan.messages if message.staleness}
        self.order = [task for task in plan.communication if task.stage == 0 and task.message not in free]
        later = [task for task in plan.tasks if task.stage > 0 and not parcels[task.message].replicated]
        self.tail = [task for task in later if task.message not in free | stale]
        self.stale_tail = {index: [task for task in later if task.message == index] for index in stale}
        self.sync = True
        """Off inside no_sync()."""
        self.steps = 0
        self.ready_seconds: list[float] = [0.0] * len(parcels)
        """When each parcel was last complete, after the start of backward."""
        self.absences = Absences(list(parameters), channels.control, next(iter(parameters.values())).device)
        self._reset_step()
        self._handles: list[Any] = []
        self._listen()
        self.components = make_components(plan, parcels, optimizer, optimizer_class)
        self.component_of = {id(p): component for component in self.components for p in component.parameters()}
        self._make_server_optimizers()
        self.outside = self._make_outside_optimizer()
        self.in_rounds = [parcel for parcel in parcels if parcel.replicated and parcel.later_rounds]
        """Parcels that all ranks must finish in one order, whichever they need first."""
        self.dropped: frozenset[int] = frozenset()
        """Parameters (by id) whose gradient the training loop has taken away before step()."""
        self.retained = False
        """The last step's gradients have not been forgotten since."""
        self.shown = False
        """They have been published since, for somebody who read them."""
        self.all_replicated = all(parcel.replicated and not parcel.message.staleness for parcel in parcels)
        self.server: AsyncServer | None = None
        if channels.direct is not None:
            asynchronous = [parcel for parcel in parcels if isinstance(parcel, AsyncParcel)]
            self.server = AsyncServer(channels.direct, asynchronous, self._update_alone)
        self.unsettled = 0
        """Components whose update is outstanding."""
        self.zeroing: dict[int, str] = {}
        """What zero_grad() asked for parameters whose update is outstanding: 'none' or 'zero'."""
        self.own_access = False
        """The engine itself reads gradients now."""
        self.observer: Observer | None = None
        """Is told what the engine does and when; set by a recorder."""
        self.step_hooks: list[Callable[[], None]] = []
        self.backward_hooks: list[Callable[[], None]] = []

    # Set-up

    def _listen(self) -> None:
        """Hooks that tell when each gradient is complete."""
        parcels_of: dict[str, list[int]] = {}
        for message in self.plan.messages:
            for name in message.variables:
                parcels_of.setdefault(name, []).append(message.index)
        self.waits_of = [len(message.variables) for message in self.plan.messages]
        self.variable_parcels = parcels_of
        for name, indices in parcels_of.items():
            parameter = self.parameters[name]
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._ready_hook(name, indices)))
        for name, parameter in self.parameters.items():
            if name not in parcels_of:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._unplanned_hook(name)))

    def _unplanned_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def refuse(_: torch.Tensor) -> None:
            raise StrategyError(
                f"parameter {name!r} gets a gradient, which it did not get in the step that was captured; give "
                f"distribute() example_inputs that use it, or none"
            )

        return refuse

    def _ready_hook(self, name: str, indices: list[int]) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            if self.sync:
                self._gradient_ready(name, indices)

        return ready

    def _make_server_optimizers(self) -> None:
        """What this rank owns is updated here, with its own optimizer state."""
        optimized = group_of(self.optimizer)
        self.owned: dict[int, UnitOptimizer] = {}
        for parcel in self.parcels:
            if parcel.replicated:
                continue
            parcel.hold_values()  # type: ignore[attr-defined]
            units = [unit for unit in parcel.update_units() if id(unit.parameter) in optimized]
            if units:
                self.owned[parcel.message.index] = UnitOptimizer(self.optimizer, self.optimizer_class, units)

    def _make_outside_optimizer(self) -> UnitOptimizer | None:
        """The optimizer may also hold parameters that the plan knows nothing of: they are stepped here alone."""
        held = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        units = [Unit(parameter, parameter) for parameter in held if id(parameter) not in self.component_of]
        return UnitOptimizer(self.optimizer, self.optimizer_class, units) if units else None

    def unit_optimizers(self) -> Iterable[UnitOptimizer]:
        """Every optimizer that stands in for a part of the user's."""
        yield from self.owned.values()
        if self.outside is not None:
            yield self.outside
        for component in self.components:
            if component.optimizer is not None:
                yield component.optimizer

    # Backward

    def _reset_step(self) -> None:
        self.head = 0
        self.missing = [0] * len(self.parcels)
        self.ready = [False] * len(self.parcels)
        self.arrived: set[str] = set()
        self.in_backward = False
        self.synced = False
        self.published = False
        self.prepared = False

    def _gradient_ready(self, name: str, indices: list[int]) -> None:
        if not self.in_backward:
            self._begin_backward()
        if name in self.arrived:
            return
        self.arrived.add(name)
        for index in indices:
            self.missing[index] -= 1
            if not self.missing[index]:
                self._parcel_ready(index)

    def _begin_backward(self) -> None:
        if self.unsettled:
            self.settle_all()
        if self.synced:
            self.finish_gradients()
            self.publish_gradients()
        self._reset_step()
        self.missing = list(self.waits_of)
        self.in_backward = True
        self.began = time.perf_counter()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _parcel_ready(self, index: int) -> None:
        self.parcels[index].load()
        self.ready[index] = True
        self.ready_seconds[index] = time.perf_counter() - self.began
        order, ready = self.order, self.ready
        while self.head < len(order) and ready[order[self.head].message]:
            task = order[self.head]
            parcel = self.parcels[task.message]
            with explain(self.plan, parcel, task):
                self._start(parcel, task)
            self.head += 1

    def _start(self, parcel: Parcel, task: Task) -> None:
        parcel.start(task)
        if self.observer is not None or self.timekeeper is not None:
            self._report(parcel, task, self.began + self.ready_seconds[task.message])

    def _report(self, parcel: Parcel, task: Task, queued: float) -> None:
        """Tells who wants to know of a collective, once the backend says that it has ended."""
        work = parcel.works.get(task.index)
        issued, step = time.perf_counter(), self.steps
        if work is None:
            return
        for observer in (self.observer, self.timekeeper):
            if observer is not None:
                report_end(work, partial(observer.communication, step, task, queued, issued))

    def _end_backward(self) -> None:
        """Variables that got no gradient contribute nothing, so that the others' messages can go."""
        self.absences.backward_ended([name for name in self.variable_parcels if name not in self.arrived])
        for index, missing in enumerate(self.missing):
            if missing:
                self.missing[index] = 0
                self._parcel_ready(index)
        self.in_backward = False
        self.synced = True
        for hook in self.backward_hooks:
            hook()
        if self.mode == "barrier":
            with self._observed("wait"):
                self.finish_gradients()

    def finish_gradients(self) -> None:
        """Waits until `parameter.grad` holds the average, for everything that all replicas apply."""
        for parcel in self.parcels:
            if parcel.replicated and parcel.loaded and not isinstance(parcel, StaleParcel):
                self._finish(parcel)
        self._forget_unused()

    def _finish(self, parcel: Parcel) -> None:
        """Finishes a parcel and, where ranks could otherwise disagree on the order, those before it."""
        if parcel.later_rounds:
            for earlier in self.in_rounds[: self.in_rounds.index(parcel)]:
                if earlier.loaded:
                    with explain(self.plan, earlier):
                        earlier.finish()
        with explain(self.plan, parcel):
            parcel.finish()

    def free_gradients(self) -> None:
        """A backward pass is about to add to `parameter.grad`: what is under way there must have arrived."""
        if self.in_backward:
            return
        if self.synced:
            self.finish_gradients()
            self.publish_gradients()
        elif self.retained:
            self.retained = False
            self._publish_retained(lambda parcel: not self.shown or isinstance(parcel, SparseServerParcel))

    def _publish_retained(self, wanted: Callable[[Parcel], bool]) -> None:
        """Shows the last step's averaged gradients, as far as they have not been forgotten."""
        held = {parameter for parcel in self._served() for parameter in parcel.parameters}
        forgotten = [parameter for parameter in held if raw_gradient(parameter) is None]
        kept = held.difference(forgotten)
        self._publish([p for p in self._served() if wanted(p) and not kept.isdisjoint(p.parameters)])
        for parameter in forgotten:
            set_gradient(parameter, None)

    def _served(self) -> list[Parcel]:
        """The parcels whose averaged gradient is not on every replica."""
        return [self.parcels[index] for index in dict.fromkeys(task.message for task in self.tail)]

    def _unused(self) -> list[str]:
        with explain(self.plan, what="word of which variables each rank used"):
            return self.absences.unused()

    def _forget_unused(self) -> None:
        """A variable that no replica used keeps no gradient, so that the optimizer leaves it alone."""
        for name in self._unused():
            set_gradient(self.parameters[name], None)

    def publish_gradients(self) -> None:
        """Also for what has an owner: its averaged gradient goes to every replica."""
        if self.published or not self.tail:
            return
        self.published = True
        self._run_tail(gradients_only=True)
        self._publish(self._served())

    def _publish(self, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            if isinstance(parcel, SparseServerParcel):
                raise StrategyError(
                    f"the averaged gradient of {parcel.message.variables[0]!r} stays on its parameter server: the "
                    f"training loop cannot read it, nor keep it beyond step()"
                )
            assert isinstance(parcel, ValueParcel)
            with explain(self.plan, parcel):
                parcel.publish([t for t in self.tail if t.message == parcel.message.index and t.delivers])

    def _take_back_gradients(self) -> None:
        """What the training loop made of the published gradients is what is applied."""
        for parcel in self.parcels:
            if not isinstance(parcel, StaleParcel | AsyncParcel):
                parcel.reload()
        taken = [p for p in self.parameters.values() if raw_gradient(p) is None]
        self.dropped = frozenset(map(id, taken))

    def _discard(self) -> None:
        """The gradients on their way are not wanted: they arrive and are forgotten."""
        self._prepare()
        for parcel in self.parcels:
            with explain(self.plan, parcel):
                if parcel.replicated and parcel.loaded and not isinstance(parcel, StaleParcel):
                    self._finish(parcel)
                else:
                    parcel.drop()
        self._reset_step()

    # Step

    def step(self) -> None:
        """Applies the averaged gradients: now (barrier), or as each module needs them (deferred)."""
        if not self.synced:
            if self.unsettled:
                self.settle_all()
            self._step_without_sync()
            return
        self.steps += 1
        if self.mode == "barrier":
            with self._observed("wait"):
                self.finish_gradients()
        self.dropped = frozenset()
        if self.published:
            self._take_back_gradients()
        if self.mode == "barrier" and self.all_replicated:
            self._step_whole()
        elif self.outside is not None:
            self.outside.refresh()
            self._apply(self.outside)
        for component in self.components:
            if component.optimizer is not None:
                component.optimizer.refresh()
            component.settled = component.stale or (self.mode == "barrier" and self.all_replicated)
        self.unsettled = sum(not component.settled for component in self.components)
        self._run_tail()
        if self.absences.track is None:
            # A rank that applies nothing yet must learn of it with the others, or it would ask again alone.
            self._unused()
        for component in self.components:
            if component.stale:
                self._step_stale(component)
        if self.server is not None:
            self.server.exchange()
        self._reset_step()
        self.retained, self.shown = bool(self.tail), False
        if self.mode == "barrier":
            self.settle_all()
        for hook in list(self.step_hooks):
            with explain(self.plan, what="all ranks to agree on the issue order"):
                hook()

    def _step_whole(self) -> None:
        """Everything is averaged and everybody applies it: the user's optimizer takes one ordinary step."""
        with self._observed("optimizer"):
            self._step_without_sync()

    def _step_without_sync(self) -> None:
        """step() without a synchronised backward before it: the user's optimizer decides what that means."""
        self.own_access = True
        try:
            self.optimizer_class.step(self.optimizer)
        finally:
            self.own_access = False

    def _run_tail(self, gradients_only: bool = False) -> None:
        """The tasks after the first of each message: further reductions, owners' updates, returning parameters."""
        self._prepare()
        for task in self.tail:
            returning = task.kind == "update" or bool(task.delivers)
            if gradients_only and returning:
                continue
            if self.published and not returning and not gradients_only:
                continue
            parcel = self.parcels[task.message]
            with explain(self.plan, parcel, task):
                with self._observed("wait", task):
                    for before in task.after:
                        parcel.wait(before)
                self._run_tail_task(parcel, task)

    def _prepare(self) -> None:
        """Rounds that owners' updates need, in one order on all ranks and before any rank waits for an owner."""
        if self.prepared:
            return
        self.prepared = True
        for parcel in self._served():
            with explain(self.plan, parcel):
                parcel.prepare()  # type: ignore[attr-defined]

    def _run_tail_task(self, parcel: Parcel, task: Task) -> None:
        if task.kind == "update":
            with self._observed("update", task):
                self._update_owned(parcel)
        else:
            queued = time.perf_counter()
            if task.delivers:
                parcel.start_return(task)  # type: ignore[attr-defined]
            else:
                parcel.start(task)
            self._report(parcel, task, queued)

    def _update_owned(self, parcel: Parcel) -> None:
        optimizer = self.owned.get(parcel.message.index)
        if isinstance(parcel, ShardedParcel) and not self.published:
            parcel.settle_parts()
        if optimizer is None:
            return
        arrived = {id(parcel.unit): parcel.collect()} if isinstance(parcel, SparseServerParcel) else {}
        optimizer.refresh()
        self._apply(optimizer, arrived)

    def _step_stale(self, component: Component) -> None:
        """This step's messages leave; those that are due, or have arrived, are applied."""
        parcels = [parcel for parcel in component.parcels if isinstance(parcel, StaleParcel)]
        for parcel in parcels:
            parcel.depart()
        while parcels[0].due or all(parcel.arrived for parcel in parcels):
            self._apply_stale(component, parcels)

    def _apply_stale(self, component: Component, parcels: list[StaleParcel]) -> None:
        for parcel in parcels:
            with explain(self.plan, parcel):
                parcel.arrive()
                for task in self.stale_tail[parcel.message.index]:
                    self._run_tail_task(parcel, task)
                if not parcel.replicated:
                    parcel.receive()  # type: ignore[attr-defined]
        if component.optimizer is not None:
            self._apply(component.optimizer)

    def drain(self) -> None:
        """Waits for stale messages too, so that all replicas are equal; every rank must call it."""
        self.settle_all()
        for component in self.components:
            parcels = [parcel for parcel in component.parcels if isinstance(parcel, StaleParcel)]
            while parcels and parcels[0].flying:
                self._apply_stale(component, parcels)

    def _update_alone(self, parcel: AsyncParcel) -> None:
        """Applies what lies in an asynchronous parcel's inbox; runs in the server's threads."""
        optimizer = self.owned.get(parcel.message.index)
        if optimizer is not None:
            optimizer.refresh()
            optimizer.take_gradients({}, frozenset())
            optimizer.step()

    def _apply(self, optimizer: UnitOptimizer, arrived: dict[int, torch.Tensor] | None = None) -> None:
        """Steps an optimizer; `arrived` holds gradients that lie elsewhere than their units say, by the unit's id."""
        self.own_access = True
        try:
            unused = frozenset(id(self.parameters[name]) for name in self._unused())
            optimizer.take_gradients(arrived or {}, unused | self.dropped)
            optimizer.step()
        finally:
            self.own_access = False

    def settle(self, component: Component) -> None:
        """Waits for one component and applies its update."""
        if component.settled:
            return
        component.settled = True
        self.unsettled -= 1
        if not self._apply_in_portions(component):
            self._apply_at_once(component)
        for parameter in component.parameters():
            zeroing = self.zeroing.get(id(parameter))
            if zeroing is not None:
                _forget(parameter, set_to_none=zeroing == "none")

    def _apply_in_portions(self, component: Component) -> bool:
        """Applies each slice as it arrives; False, and nothing done, where that cannot be."""
        portions = component.portions
        if portions is None or not portions.parcel.loaded or self.dropped:
            return False
        parcel = portions.parcel
        tasks = [self.plan.task_at[index] for index in parcel.works]
        ends = [task.stop for task in tasks]
        if [task.start for task in tasks] != [0, *ends[:-1]] or not portions.possible():
            return False
        with self._observed("wait", component):
            unused = frozenset(id(self.parameters[name]) for name in self._unused())
        for task in tasks:
            with self._observed("wait", component), explain(self.plan, parcel, task):
                parcel.wait(task.index)
            with self._observed("update", component):
                portions.apply(task.stop, unused)
        portions.end()
        parcel.unload()
        portions.optimizer.take_gradients({}, unused)
        return True

    def _apply_at_once(self, component: Component) -> None:
        with self._observed("wait", component):
            for parcel in component.parcels:
                if not parcel.replicated:
                    with explain(self.plan, parcel):
                        parcel.receive()  # type: ignore[attr-defined]
                elif parcel.loaded:
                    self._finish(parcel)
        if component.optimizer is not None:
            sparse = (p for p in component.parcels if isinstance(p, SparseParcel) and p.replicated)
            with self._observed("update", component):
                self._apply(component.optimizer, {id(p.unit): p.unit_gradient() for p in sparse if p.unit is not None})

    def settle_all(self) -> None:
        """Waits for everything outstanding, so that parameters are up to date."""
        if not self.unsettled:
            return
        for component in self.components:
            self.settle(component)
        self.zeroing.clear()

    def take_values(self) -> None:
        """The parameters were written from outside: what goes back from their owners must start from them."""
        for parcel in self.parcels:
            if isinstance(parcel, ValueParcel):
                parcel.pack_values()

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets gradients: those still needed for an outstanding update are forgotten once it is applied."""
        self.retained = False
        if self.synced and not self.in_backward:
            self._discard()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                component = self.component_of.get(id(parameter))
                if component is not None and not component.settled:
                    self.zeroing[id(parameter)] = "none" if set_to_none else "zero"
                else:
                    _forget(parameter, set_to_none)

    @contextmanager
    def _observed(self, kind: Kind, what: Component | Task | None = None) -> Generator[None, None, None]:
        """Tells the observer how long something took on this rank."""
        if self.observer is None:
            yield
            return
        begin = time.perf_counter()
        yield
        if isinstance(what, Component):
            messages = tuple(parcel.message.index for parcel in what.parcels)
        else:
            messages = () if what is None else (what.message,)
        self.observer.local(kind, messages, begin, time.perf_counter())

    # Modes

    def gradient_read(self, parameter: torch.nn.Parameter) -> None:
        """Somebody reads `parameter.grad`: it must be the average, and later steps should not defer."""
        if self.own_access or self.in_backward:
            return
        component = self.component_of.get(id(parameter))
        if component is not None and not component.settled:
            for parcel in component.parcels:
                if parcel.replicated and parcel.loaded:
                    self._finish(parcel)
            return
        if self.synced:
            self.finish_gradients()
            self.publish_gradients()
            if self.mode == "deferred":
                self.need_barrier("the training loop reads gradients before step()")
        elif self.retained and not self.shown:
            self.shown = True
            self._publish_retained(lambda parcel: isinstance(parcel, ValueParcel))

    def gradient_written(self, parameter: torch.nn.Parameter) -> None:
        """Somebody replaces `parameter.grad`: an outstanding update comes first, and what is applied is the new one."""
        if self.own_access or self.in_backward:
            return
        component = self.component_of.get(id(parameter))
        if component is not None and not component.settled:
            self.settle(component)
        elif self.synced:
            self.gradient_read(parameter)

    def need_barrier(self, reason: str) -> None:
        """From now on no update is deferred, nor by the plans that follow this one."""
        self.bound_by_loop = True
        self.wanted_mode = "barrier"
        self.set_mode("barrier", reason)

    def set_mode(self, mode: Literal["deferred", "barrier"], reason: str) -> None:
        if mode != self.mode:
            self.mode = mode
            log.info("offbeat runs in %s mode: %s", mode, reason)

    def attach_guards(self) -> None:
        for parameter in self.parameters.values():
            guard(parameter, self)

    def detach(self) -> None:
        """Takes every hook and guard off the model again."""
        self.drain()
        if self.server is not None:
            self.server.close()
        for handle in self._handles:
            handle.remove()
        for parcel in self.parcels:
            parcel.release()
        for parameter in self.parameters.values():
            unguard(parameter)
        self.channels.close()


@torch.no_grad()
def _forget(parameter: torch.nn.Parameter, set_to_none: bool) -> None:
    gradient = raw_gradient(parameter)
    if set_to_none or gradient is None:
        set_gradient(parameter, None)
        return
    if gradient.grad_fn is not None:
        gradient = gradient.detach()
        set_gradient(parameter, gradient)
    gradient.zero_()
