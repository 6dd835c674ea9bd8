"""What distribute() adds to the classes of a model and of an optimizer.

Both stay the user's objects: only their classes gain a mixin, so that state dicts, schedulers and `isinstance` work as
before. Copies and pickles are plain again: they take no part in the job.
"""

import copy
import operator
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.runtime.checkpoint import gather_state, replace_state, scatter_state, state_to_read
from offbeat.runtime.handle import Handle
from offbeat.runtime.join import join
from offbeat.runtime.wrapping import already_distributed
from offbeat.torch_private import ModelHooks, registries

if TYPE_CHECKING:
    from torch.nn import Module as _Module
    from torch.optim import Optimizer as _Optimizer
else:
    _Module = _Optimizer = object


class DistributedModel(ModelHooks):
    """A model that trains on all ranks."""

    _offbeat: Any

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Keeps gradients of backward passes inside local and accumulates them, as with DDP."""
        # A forward inside may replace the engine.
        runtime = self._offbeat
        before, runtime.engine.arrivals.synchronise = runtime.engine.arrivals.synchronise, False
        try:
            yield
        finally:
            runtime.engine.arrivals.synchronise = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Wraps a training loop that some ranks leave early because they have less data.

        As with DDP's `join()`, `enable=False` does nothing; the other arguments must have their defaults.
        """
        return join(
            self._offbeat,
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def join_hook(self, **_: Any) -> Any:
        raise StrategyError(
            "torch.distributed.algorithms.Join cannot follow this model: use `with model.join():` around the loop"
        )

    def flush(self) -> None:
        """Waits for pending updates, including stale ones, so that every parameter has its newest value."""
        self._offbeat.engine.drain()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._offbeat.model_class.zero_grad is not torch.nn.Module.zero_grad:
            # The user's own clears gradients one by one, as a loop may do.
            super().zero_grad(set_to_none)
        else:
            self._offbeat.uncompiled(self._offbeat.zero_grad, set_to_none, list(self.parameters()))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A plain model with the newest values, detached from the job."""
        return self._offbeat.plain_copy(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain model. Parameters are their own, so that an optimizer in the same pickle shares them."""
        return _as(self._offbeat.plain_copy({id(parameter): parameter for parameter in self.parameters()}))

    def _before_conversion(self) -> None:
        """The plan is rebuilt."""
        self._offbeat.engine.settle_all()
        self._offbeat.engine.outdated = True

    def _before_wrapping(self, wrapper: str) -> None:
        already_distributed(wrapper)

    @property
    def offbeat(self) -> Handle:
        """The current plan, its history, and a way to save it."""
        return Handle(self._offbeat)


class SpreadModel(_Module):
    """A model whose variables are spread over the ranks, so that no rank alone can make a plain copy of it."""

    def join(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        raise StrategyError(
            "join() needs a whole model on every rank, and the variables of this one are spread over ranks: give all "
            "ranks equally many batches"
        )

    join_hook = join

    def flush(self) -> None:
        """Returns at once: every parameter holds its newest value when `step()` has ended."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        return _refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _refuse_copy()


def _refuse_copy() -> Any:
    raise StrategyError(
        "this model's variables are spread over ranks, so it cannot be copied or pickled: call state_dict() on every "
        "rank, and load the result into a plain model"
    )


class Outer(_Module):
    """Gives a model as distribute() returns it `module`, which scripts written for DDP use."""

    _offbeat: Any
    _offbeat_inner: type
    """What the model is without this attribute."""

    @property
    def module(self) -> torch.nn.Module:
        """The same model without this attribute, so that code which unwraps models terminates."""
        own = registries(self)[2].get("module")
        if own is not None:
            return own
        inner_class = with_mixin(self._offbeat_inner, self._offbeat.model_class)
        # FSDPModule's __new__ makes an object of another class.
        inner = object.__new__(inner_class)
        object.__setattr__(inner, "__dict__", self.__dict__)
        return inner


class OuterModel(Outer, DistributedModel):
    """The model as distribute() returns it: with `module`, which scripts written for DDP use."""

    _offbeat_inner = DistributedModel


class DistributedOptimizer(_Optimizer):
    """An optimizer whose step() applies averaged gradients."""

    _offbeat: Any

    def step(self, closure: Any = None, **options: Any) -> Any:
        if options:
            raise StrategyError(
                f"step() of a distributed optimizer takes a closure only, not {next(iter(options))!r}: put it into "
                f"the optimizer's parameter groups"
            )
        return self._offbeat.uncompiled(self._take_step, closure)

    def _take_step(self, closure: Any) -> Any:
        self._offbeat.fit_if_outdated()
        engine = self._offbeat.engine
        if closure is None:
            for action in self._offbeat.before_step:
                action()
            engine.step()
            return None
        if self._offbeat.before_step:
            raise StrategyError("step() with a closure inside join(): ranks without data could not follow it")
        if not engine.all_replicated:
            raise StrategyError("step() with a closure needs a strategy in which every replica updates every variable")
        return engine.closure_step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._offbeat.optimizer_class.zero_grad is not Optimizer.zero_grad:
            super().zero_grad(set_to_none)
        else:
            held = [parameter for group in self.param_groups for parameter in group["params"]]
            self._offbeat.uncompiled(self._offbeat.zero_grad, set_to_none, held)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._offbeat.engine.settle_all()
        super().add_param_group(param_group)
        self._offbeat.engine.outdated = True

    @property
    def state(self) -> Any:
        """The state of every parameter, up to date, if every replica updates everything."""
        return state_to_read(self._offbeat.engine)

    @state.setter
    def state(self, value: Any) -> None:
        replace_state(self._offbeat.engine, value)

    def state_dict(self) -> dict[str, Any]:
        """A single device's state dict; if a strategy spreads state over ranks, every rank must call it."""
        return gather_state(self._offbeat.engine)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scatter_state(self._offbeat.engine, state_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        """A plain optimizer, detached from the job."""
        return copy.deepcopy(self._offbeat.plain_optimizer(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain optimizer."""
        return _as(self._offbeat.plain_optimizer())


def _as(plain: Any) -> tuple[Any, ...]:
    """What `__reduce_ex__` returns for an object that is pickled as another; reading it does not need Offbeat."""
    return operator.getitem, ([plain], 0)


class _Unannounced:
    """A user's class need not hear of the subclass made here, which may lack what it asks of its own."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def with_mixin(mixin: type, base: type) -> Any:
    """A class that is called as `base` is, and behaves as `mixin` says."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (_Unannounced, mixin, base), names)


ADDED = ("flush", "join", "join_hook", "no_sync", "offbeat")
"""What distribute() adds to a model."""


def check_classes(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Refuses a model that has other things by the added names, and classes that cannot be extended."""
    own = {*dir(type(model)), *vars(model), *(name for each in registries(model) for name in each)}
    if hidden := sorted(own.intersection(ADDED)):
        raise StrategyError(
            f"distribute() adds {hidden[0]!r} to a model, but {type(model).__name__} has it already: give it another "
            f"name there"
        )
    for kind, mixin in ((type(model), OuterModel), (type(optimizer), DistributedOptimizer)):
        try:
            object.__new__(kind).__class__ = with_mixin(mixin, kind)
        except TypeError as error:
            raise StrategyError(
                f"the class {kind.__name__} cannot be extended ({error}): name torch's class first among its bases, "
                f"as in class {kind.__name__}(torch.nn.Module, ABC)"
            ) from error
