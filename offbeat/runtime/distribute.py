"""Attach a plan to a model and its optimizer, so that they train on all ranks."""

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph
from offbeat.graph.skeleton import skeleton
from offbeat.plan import Plan, lower
from offbeat.runtime.buffers import BufferKeeper
from offbeat.runtime.checkpoint import divide_state, gather_state, unite_state
from offbeat.runtime.comm import Channel, Channels, Key, World, torch_world
from offbeat.runtime.engine import Engine, Mode, Training
from offbeat.runtime.faults import explain
from offbeat.runtime.forward import ForwardGate
from offbeat.runtime.handle import Decision
from offbeat.runtime.join import refuse_change
from offbeat.runtime.lazy import AliasCheck, can_be_lazy
from offbeat.runtime.lifetime import close_at_exit
from offbeat.runtime.memory import apply_memory_strategy
from offbeat.runtime.mixins import DistributedOptimizer, OuterModel, check_classes, with_mixin
from offbeat.runtime.retime import Retimer, fit_link
from offbeat.runtime.server import Server
from offbeat.runtime.structure import Structure, watch_structure
from offbeat.runtime.unit_optimizer import elementwise, per_variable, twin
from offbeat.runtime.wrapping import begin, check_unwrapped, shared_memory
from offbeat.strategy import transfer
from offbeat.timeline import Timeline
from offbeat.torch_private import hook_step, hooks_of, keep_counting, uncompiled

log = logging.getLogger("offbeat")


class Runtime:
    """Everything distribute() attaches to a model and an optimizer."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        timeout: timedelta,
        world: World | None = None,
        find_unused: bool | None = None,
    ) -> None:
        """`world` is the job; the default process group's if it is not given."""
        self.world = world or torch_world()
        begin(model, optimizer)
        check_classes(model, optimizer)
        self.model = model
        self.model_class: Any = type(model)
        self.optimizer = optimizer
        self.optimizer_class = type(optimizer)
        self.timeout = timeout
        self.find_unused = find_unused
        self.history: list[Decision] = []
        """What was tried while training went on."""
        self.quiet = False
        """Decisions are kept, and not printed."""
        self.predict: Callable[[Plan], Timeline] | None = None
        """How a plan would run in this job, once its steps have been recorded."""
        self.settled = True
        """Whether no other plan is being looked for."""
        self.link: tuple[float, float] | None = None
        """(seconds per all-reduce, seconds per byte) on an idle link, once they have been measured."""
        self.steps = 0
        """Steps taken, by all plans together."""
        self.step_hooks: list[Callable[[], None]] = [self._count_step]
        """Called at the end of every step, whatever the plan."""
        self.before_forward: list[Callable[[], None]] = [self.fit_model]
        """Called before every forward of the model, whatever the plan."""
        self.uncompiled: Any = torch.compiler.disable(_call)
        """Calls a function that torch.compile must leave alone, as it would trace into the engine."""
        self.before_step: list[Callable[[], None]] = []
        """Called before every step of the optimizer."""
        self.refit_hooks: list[Callable[[ModelGraph], None]] = []
        """Called with the new graph when the training loop has changed the model."""
        self.release_hooks: list[Callable[[], None]] = []
        """Called when model and optimizer are about to become what they were."""
        self.visitors: set[int] = set()
        """Ids of the hooks by which others observe the model for a while; copies go without them."""
        self.opened: dict[Key, Channel] = {}
        """The channels of all plans so far."""
        self.parameters = variables_of(model, plan)
        mode, reason = self.fits(plan)
        check_ranks_agree(plan, self.world)
        self.world.watch(range(self.world.size))
        share_state([*model.parameters(), *model.buffers()], self.world, plan)
        self._attach(plan, mode, reason)
        self.undo = apply_memory_strategy(model, plan.strategy, lambda: self.engine, lambda: bool(self.gate.watched))
        self._mix_in()
        watch_structure()
        close_at_exit(self)

    def _count_step(self) -> None:
        self.steps += 1
        if self.gate.watched is not None and self.engine.wanted_mode == "barrier":
            self.gate.let_pass()

    @property
    def mode(self) -> Mode:
        """'deferred' or 'barrier'."""
        return self.engine.mode

    @property
    def plan(self) -> Plan:
        """The plan in force: the one it was made with, or the one with the order that was found since."""
        return self.engine.plan

    def fits(self, plan: Plan) -> tuple[Mode, str]:
        """The mode in which to run, and why; StrategyError unless model and optimizer can run the plan here."""
        variables_of(self.model, plan)
        if plan.strategy.fsdp is not None:
            raise StrategyError("fsdp: a running job cannot switch to fully_shard; use it from the start")
        _check_messages(plan, self.optimizer_class, self.device)
        shared = shared_memory(self.model, plan)
        wanted, kind = plan.strategy.schedule.mode, self.optimizer_class.__name__
        odd = [name for name, p in self.model.named_parameters() if p.requires_grad and not can_be_lazy(p)]
        if wanted == "barrier":
            return "barrier", "the strategy asks for it"
        if len(plan.replicas) == 1 and wanted == "auto":
            return "barrier", "there is one replica"
        if shared:
            obstacle = shared
        elif not per_variable(self.optimizer_class):
            obstacle = f"optimizer {kind} may couple variables"
        elif any(uncompiled(module) is not module for module in self.model.modules()):
            obstacle = "the model is compiled"
        elif odd:
            obstacle = f"parameter {odd[0]!r} is of a class of its own"
        else:
            return "deferred", "updates may wait until a module needs them"
        if wanted == "deferred":
            raise StrategyError(f"the strategy asks for deferred mode, but {obstacle}")
        return "barrier", obstacle

    def _attach(self, plan: Plan, mode: Mode, reason: str, before: AliasCheck | None = None) -> None:
        """Makes an engine for the plan; `before` knows who else held views of parameters under the last one."""
        channels = Channels(plan, self.world, self.timeout, self.opened)
        training = Training(plan, self.model, self.parameters, self.optimizer, self.optimizer_class, channels)
        self.engine = Engine(training, mode, self.find_unused, AliasCheck(self.parameters.values(), before))
        self.engine.step_hooks = self.step_hooks
        self.gate = ForwardGate(self.model, self.engine)
        self.buffers = BufferKeeper(self.model, channels.control, root=plan.replicas[0])
        self.engine.backward_hooks.append(self.buffers.send)
        self.gate.before_forward, self.gate.share_buffers = self.before_forward, self.share_buffers
        self.retimer: Retimer | None = None
        self.structure = Structure(self.model, self.optimizer)
        self.step_hooks.append(self._after_first_step)
        log.info("offbeat runs '%s' in %s mode: %s", plan.strategy.name, mode, reason)

    def check_switch(self, plan: Plan) -> tuple[Mode, str]:
        """What `fits` says of a plan that is to follow the present one."""
        if len(self.plan.replicas) < self.world.size:
            raise StrategyError("a job with servers that hold no replica cannot change its plan or its model")
        for aspect in ("recompute", "fusion", "precision", "accumulation"):
            if getattr(plan.strategy, aspect) != getattr(self.plan.strategy, aspect):
                raise StrategyError(f"a running job cannot change its {aspect}: {getattr(plan.strategy, aspect)!r}")
        return self.fits(plan)

    def switch(self, plan: Plan) -> None:
        """Switches to another plan from the next step on. Parameters and optimizer state do not change.

        Every rank must call it between two steps, with the same plan.
        """
        # Whatever may be refused is refused before anything is taken apart.
        mode, reason = self.check_switch(plan)
        check_ranks_agree(plan, self.world)
        old, gate, buffers = self.engine, self.gate, self.buffers
        if old.bound_by_loop:
            mode, reason = "barrier", "the training loop needs it"
        self._detach()
        self.parameters = variables_of(self.model, plan)
        self._attach(plan, mode, reason, old.updates.aliases)
        self.gate.adopt(gate)
        self.buffers.adopt(buffers)
        self.engine.arrivals.synchronise = old.arrivals.synchronise
        self.engine.bound_by_loop, self.engine.reports.observer = old.bound_by_loop, old.reports.observer
        self.engine.frozen.adopt(old.frozen)
        divide_state(self.engine)
        self._after_first_step()
        # The two refer to each other, and the engine's buffers are as large as the model: they must go now. To collect
        # all garbage would take longer than a step.
        del old.arrivals.engine

    def _detach(self) -> None:
        """Takes the engine off model and optimizer, which has its state as on a single device."""
        self.engine.drain()
        self.engine.gradients.publish_all()
        with explain(self.plan, what=f"the buffers of rank {self.buffers.root}"):
            self.buffers.drop()
        unite_state(self.engine)
        for hook in (self._after_first_step, self.retimer and self.retimer.after_step):
            if hook in self.step_hooks:
                self.step_hooks.remove(hook)
        self.engine.detach()
        self.gate.detach()

    def release(self) -> None:
        """Makes model and optimizer what they were before distribute(); every rank must call it."""
        for hook in self.release_hooks:
            hook()
        self._detach()
        self.engine.channels.close()
        for undo in self.undo:
            undo()
        self.model.__class__, self.optimizer.__class__ = self.model_class, self.optimizer_class
        vars(self.optimizer).pop("step", None)
        del self.model._offbeat, self.optimizer._offbeat

    def close(self, deadline: float) -> None:
        """Lets go of the network before the interpreter ends; nothing is applied any more."""
        self.engine.close(deadline)

    def fit_if_outdated(self) -> None:
        """Between two passes: rebuilds the plan after a known change, because a step may come before a forward."""
        changed = self.engine.outdated or self.engine.refrozen or self.engine.moved
        if changed or self.structure.regrouped():
            self.fit_model()

    def zero_grad(self, set_to_none: bool, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Drops gradients of these parameters."""
        self.fit_if_outdated()
        self.engine.zero_grad(set_to_none, parameters)

    def fit_model(self) -> None:
        """Rebuilds the plan if the training loop has changed the model or the optimizer; all ranks call it together."""
        if self.engine.moved:
            self.engine.moved = False
            if shared := shared_memory(self.model, self.plan):
                self.engine.need_barrier(shared)
        if not torch.is_grad_enabled() or not self.structure.changed(self.engine):
            return
        if self.before_step:
            refuse_change()
        graph = skeleton(self.model)
        if not graph.variables:
            return
        before = self.plan.strategy
        kept = {aspect: getattr(before, aspect) for aspect in ("recompute", "fusion", "accumulation", "weights")}
        strategy = transfer(before, graph, self.plan.cluster).model_copy(update=kept | {"graph": "", "cluster": ""})
        log.info("offbeat plans anew: the training loop has changed the model or its optimizer")
        known = set(map(id, self.structure.parameters))
        new = [parameter for parameter in self.model.parameters() if id(parameter) not in known]
        share_state(new, self.world, self.plan)
        self.buffers.due |= bool(new)
        self.switch(lower(graph, self.plan.cluster, strategy, rank=self.plan.rank))
        for hook in self.refit_hooks:
            hook(graph)

    def share_buffers(self) -> None:
        """Before a forward: every rank has rank 0's buffers."""
        with explain(self.plan, what=f"the buffers of rank {self.buffers.root}"):
            self.buffers.share()
        self.buffers.due = torch.is_grad_enabled() and self.engine.arrivals.synchronise

    def _after_first_step(self) -> None:
        """The first step runs with a barrier while the uses of variables are watched."""
        engine = self.engine
        if self.gate.watched is None:
            return
        self.step_hooks.remove(self._after_first_step)
        if engine.wanted_mode == "deferred":
            engine.set_mode("deferred", "updates wait until a module needs them")
        # Asynchronous messages have no order, and their ranks must not wait for each other.
        ordered = any(not message.asynchronous for message in self.plan.messages)
        if not self.plan.strategy.schedule.pinned and len(self.plan.replicas) > 1 and ordered:
            self.link = self.link or fit_link(engine.channels.control, self.device)
            self.retimer = Retimer(engine, self.gate.watched.order, self.device, self.link)
            self.step_hooks.append(self.retimer.after_step)

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(iter(self.parameters.values())).device

    def _mix_in(self) -> None:
        for target, mixin in ((self.model, OuterModel), (self.optimizer, DistributedOptimizer)):
            target._offbeat = self
            target.__class__ = with_mixin(mixin, type(target))
        hook_step(self.optimizer, self.optimizer_class)
        keep_counting(self.optimizer)

    def plain_copy(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A copy of the model without the hooks and classes that distribute() gave it."""
        # Hooks of the copy still point at the runtime until they are taken off; the runtime itself is not copied.
        for kept in (self, self.engine, self.gate, *self.engine.synchronisers, self.engine.reports.observer):
            memo[id(kept)] = kept
        copied = object.__new__(self.model_class)
        content = {name: value for name, value in vars(self.model).items() if name != "_offbeat"}
        if hasattr(self.model_class, "__deepcopy__"):
            vars(copied).update(content)
            copied = self.model_class.__deepcopy__(copied, memo)
        else:
            memo[id(self.model)] = copied
            for name, value in content.items():
                vars(copied)[name] = copy.deepcopy(value, memo)
        others = [handle for synchroniser in self.engine.synchronisers for handle in synchroniser.handles]
        ours = self.visitors.union(handle.id for handle in (*self.gate.handles, *others))
        for module in copied.modules():
            for hooks in hooks_of(module):
                for number in ours & hooks.keys():
                    del hooks[number]
        return copied

    def plain_optimizer(self) -> Optimizer:
        """The optimizer as it would be without distribute(), on the same parameters."""
        state = gather_state(self.engine)
        plain = twin(self.optimizer, self.optimizer_class)
        plain.param_groups = [{**group, "params": list(group["params"])} for group in self.optimizer.param_groups]
        plain.state = defaultdict(dict)
        plain.load_state_dict(state)
        return plain


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def serve(model: torch.nn.Module, optimizer: Optimizer, plan: Plan, timeout: timedelta, world: World) -> None:
    """Keeps parameters for the replicas until they have ended, on a rank that holds none."""
    check_unwrapped(model)
    parameters = variables_of(model, plan)
    _check_messages(plan, type(optimizer), torch.device("cpu"))
    check_ranks_agree(plan, world)
    world.watch(range(world.size))
    share_state([*model.parameters(), *model.buffers()], world, plan)
    Server(model, optimizer, parameters, plan, timeout, world).serve()


def _check_messages(plan: Plan, optimizer_class: type[Optimizer], device: torch.device) -> None:
    """Whether the optimizer can update what the plan spreads, stations add up what is encoded, and servers answer."""
    for message in plan.messages:
        if message.asynchronous and device.type != "cpu" and message.owner in plan.replicas:
            raise StrategyError(
                f"variable {message.variables[0]!r} has an asynchronous parameter server on rank {message.owner}, "
                f"which computes on a GPU: NCCL's sends and receives have no tags, so gradients and replies would mix; "
                f"use a synchronous one, a server without a replica, or train on CPUs"
            )
        if message.roots and device.type != "cpu" and len(plan.replicas) == plan.cluster.world_size:
            raise StrategyError(
                f"variable {message.variables[0]!r} is summed by servers, which on GPUs only pays beside servers "
                f"without a replica: gradients pass through host memory; use a strategy without servers"
            )
        if message.stations and message.encoder.gathered:
            raise StrategyError(
                f"encoder {message.encoder.name!r} of {message.variables[0]!r} does not work with transfer stations, "
                f"which add up gradients on the way; remove its stations, or use fp16, bf16 or randomk"
            )
        if elementwise(optimizer_class) or (message.replicated and not message.staleness):
            continue
        if not per_variable(optimizer_class):
            raise StrategyError(
                f"optimizer {optimizer_class.__name__} may read several variables at once, but "
                f"{message.variables[0]!r} would be updated separately from the others; use a strategy in which every "
                f"replica updates everything, such as overlap"
            )
        whole = all(piece.shape == plan.graph.variable(piece.variable).shape for piece in message.pieces)
        if message.synchronizer == "sharded" or not whole:
            raise StrategyError(
                f"optimizer {optimizer_class.__name__} cannot update pieces of {message.variables[0]!r} separately; "
                f"use a strategy that keeps variables whole"
            )


def variables_of(model: torch.nn.Module, plan: Plan) -> dict[str, torch.nn.Parameter]:
    """The model's trainable parameters by the plan's names, or one sentence that says where they differ."""
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    known = {variable.name: variable.shape for variable in plan.graph.variables}
    for name, shape in known.items():
        if name not in found:
            raise StrategyError(f"the model has no trainable parameter {name!r}, which the strategy synchronises")
        if tuple(found[name].shape) != shape:
            here = list(found[name].shape)
            raise StrategyError(f"parameter {name!r} has shape {here}, the strategy was made for {list(shape)}")
        if found[name].is_meta:
            raise StrategyError(
                f"parameter {name!r} is on the meta device; give the model memory first, with model.to_empty() and its "
                f"initial values"
            )
    if found.keys() - known:
        raise StrategyError(f"the strategy does not cover the trainable parameter {min(found.keys() - known)!r}")
    return {name: found[name] for name in known}


def check_ranks_agree(plan: Plan, world: World) -> None:
    """Every rank must have the same model and the same strategy, or the first collective would hang."""
    key = f"offbeat/agreement/{world.next_generation()}"
    mine = f"{plan.graph.signature} {plan.strategy.digest}"
    world.set(f"{key}/{plan.rank}", mine.encode())
    first, *others = ((rank, world.get(f"{key}/{rank}").decode()) for rank in range(world.size))
    for rank, theirs in others:
        if theirs != first[1]:
            what = "model" if theirs.split()[0] != first[1].split()[0] else "strategy"
            raise StrategyError(f"rank {rank} has a different {what} than rank {first[0]}")


def share_state(tensors: Iterable[torch.Tensor], world: World, plan: Plan) -> None:
    """Gives every rank the values of the first replica."""
    # Ranks without a replica have theirs in host memory.
    on_host = world.staged and len(plan.replicas) < world.size
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                contiguous = tensor.detach().contiguous()
                contiguous = contiguous.cpu() if on_host else contiguous
                world.broadcast(contiguous, plan.replicas[0])
                tensor.copy_(contiguous)
