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
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from offbeat.plan import Plan, Task
from offbeat.runtime.absences import Absences
from offbeat.runtime.asynchronous import AsyncParcel, AsyncServer
from offbeat.runtime.channel import Channels
from offbeat.runtime.faults import explain
from offbeat.runtime.guard import guard, raw_gradient, set_gradient, unguard
from offbeat.runtime.parcels import Parcel, ShardedParcel, SparseServerParcel, ValueParcel, box_slices
from offbeat.runtime.stale import StaleParcel
from offbeat.runtime.updates import Unit, UnitOptimizer, group_of

log = logging.getLogger("offbeat")


class Component:
    """Parcels that are settled together because they hold parts of the same variables, and the update they allow."""

    def __init__(self, parcels: list[Parcel]) -> None:
        self.parcels = parcels
        self.optimizer: UnitOptimizer | None = None
        """Applies what every replica applies; None if it holds nothing of the kind."""
        self.settled = True
        self.stale = any(parcel.message.staleness for parcel in parcels)

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return dict.fromkeys(parameter for parcel in self.parcels for parameter in parcel.parameters)


class Engine:
    """Runs one rank's part of a plan on a model and its optimizer."""

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
        self.components = self._make_components()
        self.component_of = {id(p): component for component in self.components for p in component.parameters()}
        self._make_server_optimizers()
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

    def _ready_hook(self, name: str, indices: list[int]) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            if self.sync:
                self._gradient_ready(name, indices)

        return ready

    def _make_components(self) -> list[Component]:
        """Groups parcels that share a variable, so that a variable is updated once, when all its shards are there."""
        leader = list(range(len(self.parcels)))

        def find(index: int) -> int:
            while leader[index] != index:
                leader[index] = leader[leader[index]]
                index = leader[index]
            return index

        for indices in self.variable_parcels.values():
            for index in indices[1:]:
                leader[find(index)] = find(indices[0])
        grouped: dict[int, list[Parcel]] = {}
        for index, parcel in enumerate(self.parcels):
            grouped.setdefault(find(index), []).append(parcel)
        components = [Component(parcels) for parcels in grouped.values()]
        for component in components:
            self._make_component_optimizer(component)
        return components

    def _make_component_optimizer(self, component: Component) -> None:
        """Variables are updated whole; where some shards have an owner, the replicated ones are units of their own."""
        optimized = group_of(self.optimizer)
        owned = {id(p) for parcel in component.parcels if not parcel.replicated for p in parcel.parameters}
        units: dict[object, Unit] = {}
        for parcel in component.parcels:
            if not parcel.replicated:
                continue
            for place, (piece, parameter) in enumerate(zip(parcel.message.pieces, parcel.parameters, strict=True)):
                if id(parameter) not in optimized:
                    continue
                if id(parameter) not in owned:
                    units[id(parameter)] = Unit(parameter, parameter)
                else:
                    box = box_slices(piece)
                    units[piece] = Unit(parameter, torch.nn.Parameter(parameter.data[box]), parcel.views[place], box)
        if units:
            component.optimizer = UnitOptimizer(self.optimizer, self.optimizer_class, list(units.values()))

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

    def unit_optimizers(self) -> Iterable[UnitOptimizer]:
        """Every optimizer that stands in for a part of the user's."""
        yield from self.owned.values()
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
        self.tail_done = 0

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
                parcel.start(task)
            self.head += 1

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
            self.finish_gradients()

    def finish_gradients(self) -> None:
        """Waits until `parameter.grad` holds the average, for everything that all replicas apply."""
        for parcel in self.parcels:
            if parcel.replicated and parcel.loaded and not isinstance(parcel, StaleParcel):
                with explain(self.plan, parcel):
                    parcel.finish()
        self._forget_unused()

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
        for parcel in self.parcels:
            if isinstance(parcel, ValueParcel) and parcel.loaded:
                with explain(self.plan, parcel):
                    if isinstance(parcel, ShardedParcel):
                        parcel.settle_parts()
                    parcel.publish([t for t in self.tail if t.message == parcel.message.index and t.delivers])
            elif isinstance(parcel, SparseServerParcel):
                raise RuntimeError("gradients of a sparse parameter server cannot be read by the training loop")

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
            self.finish_gradients()
        if self.mode == "barrier" and self.all_replicated:
            self._step_whole()
        for component in self.components:
            if component.optimizer is not None:
                component.optimizer.refresh()
            component.settled = component.stale or (self.mode == "barrier" and self.all_replicated)
        self.unsettled = sum(not component.settled for component in self.components)
        self._run_tail()
        for component in self.components:
            if component.stale:
                self._step_stale(component)
        if self.server is not None:
            self.server.exchange()
        self._reset_step()
        if self.mode == "barrier":
            self.settle_all()
        for hook in list(self.step_hooks):
            hook()

    def _step_whole(self) -> None:
        """Everything is averaged and everybody applies it: the user's optimizer takes one ordinary step."""
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
        for position, task in enumerate(self.tail):
            returning = task.kind == "update" or bool(task.delivers)
            if position < self.tail_done or (gradients_only and returning):
                continue
            if self.published and not returning and not gradients_only:
                continue
            parcel = self.parcels[task.message]
            with explain(self.plan, parcel, task):
                for before in task.after:
                    parcel.wait(before)
                self._run_tail_task(parcel, task)

    def _run_tail_task(self, parcel: Parcel, task: Task) -> None:
        if task.kind == "update":
            self._update_owned(parcel)
        elif task.delivers:
            parcel.start_return(task)  # type: ignore[attr-defined]
        else:
            parcel.start(task)

    def _update_owned(self, parcel: Parcel) -> None:
        optimizer = self.owned.get(parcel.message.index)
        if isinstance(parcel, ShardedParcel):
            parcel.take_published() if self.published else parcel.settle_parts()
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
            optimizer.take_gradients(arrived or {}, unused)
            optimizer.step()
        finally:
            self.own_access = False

    def settle(self, component: Component) -> None:
        """Waits for one component and applies its update."""
        if component.settled:
            return
        component.settled = True
        self.unsettled -= 1
        for parcel in component.parcels:
            with explain(self.plan, parcel):
                if not parcel.replicated:
                    parcel.receive()  # type: ignore[attr-defined]
                elif parcel.loaded:
                    parcel.finish()
        if component.optimizer is not None:
            self._apply(component.optimizer)
        for parameter in component.parameters():
            zeroing = self.zeroing.get(id(parameter))
            if zeroing == "none":
                set_gradient(parameter, None)
            elif zeroing == "zero":
                gradient = raw_gradient(parameter)
                if gradient is not None:
                    gradient.detach_().zero_()

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
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                component = self.component_of.get(id(parameter))
                if component is not None and not component.settled:
                    self.zeroing[id(parameter)] = "none" if set_to_none else "zero"
                elif set_to_none:
                    set_gradient(parameter, None)
                else:
                    gradient = raw_gradient(parameter)
                    if gradient is not None:
                        gradient.detach_().zero_()

    # Modes

    def gradient_read(self, parameter: torch.nn.Parameter) -> None:
        """Somebody reads `parameter.grad`: it must be the average, and later steps should not defer."""
        if self.own_access or self.in_backward:
            return
        component = self.component_of.get(id(parameter))
        if component is not None and not component.settled:
            for parcel in component.parcels:
                if parcel.replicated and parcel.loaded:
                    parcel.finish()
            return
        if self.synced:
            self.finish_gradients()
            self.publish_gradients()
            if self.mode == "deferred":
                self.set_mode("barrier", "the training loop reads gradients before step()")
                self.wanted_mode = "barrier"

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
        for parameter in self.parameters.values():
            unguard(parameter)
        self.channels.close()
