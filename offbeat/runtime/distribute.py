"""A model, its optimizer and a plan → the same model and optimizer, training on all ranks.

Model and optimizer stay the user's objects: only their classes gain a mixin, so that state dicts, schedulers and
`isinstance` go on as before.
"""

import copy
import gc
import logging
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.plan import Message, Plan
from offbeat.runtime import beacon
from offbeat.runtime.asynchronous import AsyncParcel
from offbeat.runtime.buffers import BufferKeeper
from offbeat.runtime.channel import Channels
from offbeat.runtime.checkpoint import gather_state, scatter_state
from offbeat.runtime.encoders import make_encoder
from offbeat.runtime.engine import Engine
from offbeat.runtime.faults import explain
from offbeat.runtime.forward import ForwardGate
from offbeat.runtime.memory import MicroBatches, apply_memory_strategy
from offbeat.runtime.parcels import EncodedParcel, EncodedServerParcel, Parcel, ServerParcel, ShardedParcel
from offbeat.runtime.retime import Retimer
from offbeat.runtime.row_parcels import FactorParcel, SparseParcel, SparseServerParcel
from offbeat.runtime.stale import StaleParcel, StaleServerParcel
from offbeat.runtime.updates import elementwise, per_variable

log = logging.getLogger("offbeat")
_COUNTED = "_wrapped_by_lr_sched"
"""How torch's schedulers mark the step() that they count by."""

_SPARSE_OPTIMIZERS = ("SGD", "SparseAdam", "Adagrad")
_generation = 0


class DistributedModel:
    """What distribute() adds to a model's class."""

    _offbeat: "Runtime"

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Gradients of backward passes inside stay local and accumulate, as with DDP."""
        engine = self._offbeat.engine
        before, engine.sync = engine.sync, False
        try:
            yield
        finally:
            engine.sync = before

    def flush(self) -> None:
        """Waits for outstanding updates, stale ones included, so that every parameter holds its newest value."""
        self._offbeat.engine.drain()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        # Whoever walks over the parameters may read them.
        self._offbeat.engine.settle_all()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A plain model with the newest values, which takes no part in the job."""
        return self._offbeat.plain_copy(memo)

    @property
    def offbeat_mode(self) -> str:
        """'deferred' or 'barrier'."""
        return self._offbeat.engine.mode


class DistributedOptimizer:
    """What distribute() adds to an optimizer's class."""

    _offbeat: "Runtime"

    def step(self, closure: Any = None) -> Any:
        engine = self._offbeat.engine
        if closure is None:
            engine.step()
            return None
        engine.need_barrier("step() is given a closure")
        if not engine.all_replicated:
            raise StrategyError("an optimizer that takes a closure needs variables that every replica updates")
        engine.settle_all()
        result = engine.optimizer_class.step(self, closure)
        engine.synced = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._offbeat.engine.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As a single device's; where a strategy spreads state over ranks, every rank must call it."""
        return gather_state(self._offbeat.engine)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scatter_state(self._offbeat.engine, state_dict)


class Runtime:
    """Everything distribute() attaches to a model and an optimizer."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, plan: Plan, timeout: timedelta) -> None:
        self.model = model
        self.model_class: Any = type(model)
        self.optimizer = optimizer
        self.optimizer_class = type(optimizer)
        self.timeout = timeout
        self.parameters = _variables(model, plan)
        mode, reason = self._check(plan)
        beacon.light(plan.replicas)
        share_state(model)
        self._attach(plan, mode, reason)
        apply_memory_strategy(model, plan.strategy, self.engine)
        self._mix_in()
        self.engine.step_hooks.append(self._after_first_step)

    def _check(self, plan: Plan) -> tuple[Literal["deferred", "barrier"], str]:
        """The mode in which to run, and why; StrategyError unless model, optimizer and all ranks can run the plan."""
        _check_optimizer(plan, self.optimizer_class)
        _check_stations(plan)
        _check_ranks_agree(plan)
        return choose_mode(self.model, self.optimizer, self.optimizer_class, plan)

    def _attach(self, plan: Plan, mode: Literal["deferred", "barrier"], reason: str) -> None:
        self.plan = plan
        channels = Channels(plan, dist.get_backend(), self.timeout, _next_generation())
        parcels = make_parcels(self.model, plan, channels, self.parameters, self.optimizer_class)
        self.engine = Engine(plan, parcels, self.parameters, self.optimizer, self.optimizer_class, channels, mode)
        self.gate = ForwardGate(self.model, self.engine)
        self.buffers = BufferKeeper(self.model, channels.control, root=plan.replicas[0])
        self.engine.backward_hooks.append(self.buffers.send)
        self.gate.before_forward.append(self._receive_buffers)
        self.retimer: Retimer | None = None
        if mode == "deferred" or not self.engine.all_replicated:
            self.engine.attach_guards()
        log.info("offbeat runs '%s' in %s mode: %s", plan.strategy.name, mode, reason)

    def switch(self, plan: Plan) -> None:
        """Goes on with another plan from the next step on. Parameters and optimizer state stay as they are.

        Every rank must call it between two steps, with the same plan.
        """
        before = self.plan.strategy
        for aspect in ("recompute", "fusion", "accumulation"):
            if getattr(plan.strategy, aspect) != getattr(before, aspect):
                raise StrategyError(f"a job under way cannot change its {aspect}: {getattr(plan.strategy, aspect)!r}")
        mode, reason = self._check(plan)
        old, gate = self.engine, self.gate
        if old.bound_by_loop:
            mode, reason = "barrier", "the training loop needs it"
        old.drain()
        self._receive_buffers()
        state = gather_state(old)
        old.detach()
        gate.detach()
        self._attach(plan, mode, reason)
        self.gate.adopt(gate)
        self.engine.bound_by_loop = old.bound_by_loop
        scatter_state(self.engine, state)
        self.engine.step_hooks.append(self._after_first_step)
        self._after_first_step()
        del old, gate
        # An engine refers to itself through its hooks, and its buffers are as large as the model.
        gc.collect()

    def _receive_buffers(self) -> None:
        with explain(self.plan, what=f"the buffers of rank {self.buffers.root}"):
            self.buffers.receive()

    def _after_first_step(self) -> None:
        """The first step runs with a barrier while the uses of variables are watched."""
        engine = self.engine
        if not self.gate.watched:
            return
        engine.step_hooks.remove(self._after_first_step)
        if engine.wanted_mode == "deferred":
            engine.set_mode("deferred", "updates wait until a module needs them")
        if self.plan.strategy.schedule.policy != "explicit" and len(self.plan.replicas) > 1:
            device = next(iter(self.parameters.values())).device
            self.retimer = Retimer(engine, self.gate.use_order, device)
            engine.step_hooks.append(self.retimer.after_step)

    def _mix_in(self) -> None:
        for target, mixin in ((self.model, DistributedModel), (self.optimizer, DistributedOptimizer)):
            target._offbeat = self
            target.__class__ = type(type(target).__name__, (mixin, type(target)), {})
        _keep_counting(self.optimizer)
        self._handles = [
            self.model.register_state_dict_pre_hook(lambda *_: self.engine.settle_all()),
            self.model.register_load_state_dict_pre_hook(lambda *_: self.engine.settle_all()),
            self.model.register_load_state_dict_post_hook(lambda *_: self.engine.take_values()),
        ]

    def plain_copy(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A copy of the model without the hooks and classes that distribute() gave it."""
        self.engine.settle_all()
        # Hooks of the copy still point at the runtime until they are taken off; the runtime itself is not copied.
        for kept in (self, self.engine, self.gate, *self.engine.parcels):
            memo[id(kept)] = kept
        copied = self.model_class.__new__(self.model_class)
        memo[id(self.model)] = copied
        for name, value in self.model.__dict__.items():
            if name != "_offbeat" and not isinstance(value, MicroBatches):
                copied.__dict__[name] = copy.deepcopy(value, memo)
        hooks = [parcel.hook for parcel in self.engine.parcels if isinstance(parcel, FactorParcel)]
        ours = {handle.id for handle in (*self._handles, *self.gate.handles, *hooks)}
        for module in copied.modules():
            for name, value in module.__dict__.items():
                if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                    for number in ours & value.keys():
                        del value[number]
        return copied


def make_parcels(
    model: torch.nn.Module,
    plan: Plan,
    channels: Channels,
    parameters: dict[str, torch.nn.Parameter],
    optimizer_class: type[Optimizer],
) -> list[Parcel]:
    """One parcel per message, of the kind its synchroniser and encoder ask for."""
    assert plan.rank is not None
    share = plan.weights[plan.replicas.index(plan.rank)]
    return [
        _make_parcel(model, plan, message, channels, parameters, optimizer_class, share) for message in plan.messages
    ]


def _make_parcel(
    model: torch.nn.Module,
    plan: Plan,
    message: Message,
    channels: Channels,
    parameters: dict[str, torch.nn.Parameter],
    optimizer_class: type[Optimizer],
    share: float,
) -> Parcel:
    assert plan.rank is not None
    common = (message, parameters, channels, plan.rank, share)
    first = parameters[message.pieces[0].variable]
    variable = plan.graph.variable(message.pieces[0].variable)
    densify = optimizer_class.__name__ not in _SPARSE_OPTIMIZERS
    encoder = make_encoder(
        message.encoder,
        [piece.shape for piece in message.pieces],
        first.dtype,
        first.device,
        seed=message.index,
        world=len(plan.replicas),
        rank=plan.replicas.index(plan.rank),
    )
    if message.asynchronous:
        return AsyncParcel(*common)
    if message.staleness:
        return StaleParcel(*common) if message.synchronizer == "all_reduce" else StaleServerParcel(*common)
    match message.synchronizer:
        case "sparse_all_gather":
            return SparseParcel(variable, densify, *common)
        case "sparse_parameter_server":
            return SparseServerParcel(variable, densify, *common)
        case "factor_broadcast":
            return FactorParcel(_linear(model, variable.name), variable.factor_rows, *common)
        case "sharded":
            slices = [(t.start, t.stop) for t in plan.communication if t.message == message.index and t.stage == 0]
            dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(message.encoder.name)
            parcel = ShardedParcel(dtype, slices, *common)
            parcel.bind(next(t.ranks for t in plan.communication if t.message == message.index))
            return parcel
        case "parameter_server":
            return ServerParcel(*common) if encoder is None else EncodedServerParcel(encoder, *common)
        case _:
            return Parcel(*common) if encoder is None else EncodedParcel(encoder, *common)


def choose_mode(
    model: torch.nn.Module, optimizer: Optimizer, optimizer_class: type[Optimizer], plan: Plan
) -> tuple[Literal["deferred", "barrier"], str]:
    """The mode the strategy asks for, or the best that this model and optimizer allow, and why."""
    wanted = plan.strategy.schedule.mode
    if wanted == "barrier":
        return "barrier", "the strategy asks for it"
    obstacle = _deferral_obstacle(model, optimizer, optimizer_class)
    if obstacle:
        if wanted == "deferred":
            raise StrategyError(f"the strategy asks for deferred mode, but {obstacle}")
        return "barrier", obstacle
    return "deferred", "updates may wait until a module needs them"


def _deferral_obstacle(model: torch.nn.Module, optimizer: Optimizer, optimizer_class: type[Optimizer]) -> str:
    name = optimizer_class.__name__
    if not per_variable(optimizer_class):
        return f"optimizer {name} may couple variables"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"optimizer {name} has step hooks"
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        return "the model is compiled"
    return ""


def _keep_counting(optimizer: Optimizer) -> None:
    """Gives an optimizer that a learning-rate scheduler counts the steps of a step() that both know.

    The scheduler has put the plain class's step() on the optimizer itself, where it would hide Offbeat's.
    """
    if not hasattr(vars(optimizer).get("step"), _COUNTED):
        return

    def step(*arguments: Any, **options: Any) -> Any:
        optimizer._opt_called = True  # what the scheduler looks at
        return type(optimizer).step(optimizer, *arguments, **options)

    setattr(step, _COUNTED, True)
    vars(optimizer)["step"] = step


def _check_optimizer(plan: Plan, optimizer_class: type[Optimizer]) -> None:
    if elementwise(optimizer_class):
        return
    for message in plan.messages:
        if message.synchronizer in ("all_reduce", "sparse_all_gather", "factor_broadcast"):
            continue
        whole = all(piece.shape == plan.graph.variable(piece.variable).shape for piece in message.pieces)
        if message.synchronizer == "sharded" or not whole:
            raise StrategyError(
                f"optimizer {optimizer_class.__name__} cannot update pieces of {message.variables[0]!r} separately; "
                f"use a strategy that keeps variables whole"
            )


def _check_stations(plan: Plan) -> None:
    for message in plan.messages:
        if message.stations and message.encoder.gathered:
            raise StrategyError(
                f"encoder {message.encoder.name!r} of {message.variables[0]!r} cannot pass transfer stations, which "
                f"add gradients up on the way; leave out its stations, or use fp16, bf16 or randomk"
            )


def _variables(model: torch.nn.Module, plan: Plan) -> dict[str, torch.nn.Parameter]:
    """The model's trainable parameters by the plan's names, or one sentence that says where they differ."""
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for variable in plan.graph.variables:
        parameter = found.get(variable.name)
        if parameter is None:
            raise StrategyError(
                f"the model has no trainable parameter {variable.name!r}, which the strategy synchronises"
            )
        if tuple(parameter.shape) != variable.shape:
            raise StrategyError(
                f"parameter {variable.name!r} has shape {list(parameter.shape)}, "
                f"the strategy was made for {list(variable.shape)}"
            )
    missing = sorted(set(found) - {variable.name for variable in plan.graph.variables})
    if missing:
        raise StrategyError(f"the strategy does not know the trainable parameter {missing[0]!r}")
    return {variable.name: found[variable.name] for variable in plan.graph.variables}


def _check_ranks_agree(plan: Plan) -> None:
    """Every rank must have the same model and the same strategy, or the first collective would hang."""
    store = dist.PrefixStore(f"offbeat/agreement/{_generation}", _get_default_store())
    mine = f"{plan.graph.signature} {plan.strategy.digest}"
    store.set(str(plan.rank), mine)
    first, *others = ((rank, store.get(str(rank)).decode()) for rank in plan.replicas)
    for rank, theirs in others:
        if theirs != first[1]:
            what = "model" if theirs.split()[0] != first[1].split()[0] else "strategy"
            raise StrategyError(f"rank {rank} has another {what} than rank {first[0]}")


def share_state(model: torch.nn.Module) -> None:
    """Gives every rank the parameters and buffers of rank 0."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.numel():
                contiguous = tensor.detach().contiguous()
                dist.broadcast(contiguous, src=0)
                tensor.copy_(contiguous)


def _linear(model: torch.nn.Module, name: str) -> torch.nn.Linear:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if not isinstance(module, torch.nn.Linear) or attribute != "weight":
        raise StrategyError(
            f"factor_broadcast needs the weight of an nn.Linear, {name!r} belongs to {type(module).__name__}"
        )
    return module


def _next_generation() -> int:
    """Keeps the channels of several distribute() calls apart; every rank makes the same calls."""
    global _generation  # noqa: PLW0603 - one count per process is what the shared store needs
    _generation += 1
    return _generation
