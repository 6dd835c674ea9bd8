"""Detect by autograd hooks which gradients are complete, and when a backward pass has ended.

A parameter's hook is called each time autograd has added to its gradient: once in a pass, or several times where a
checkpoint of the reentrant kind runs passes inside the pass. The first pass only counts; later ones take a gradient for
complete after as many calls.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch

from offbeat.errors import StrategyError
from offbeat.torch_private import after_backward

if TYPE_CHECKING:
    from offbeat.runtime.engine.engine import Engine


class Arrivals:
    """Reports gradients that the plan synchronises to the engine; other parameters must not get one."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.synchronise = True
        """Off inside no_sync()."""
        self.under_way = False
        self.expected: Counter[str] | None = None
        """Calls of each parameter's hook in a pass; None until a pass has been counted."""
        self.calls: Counter[str] = Counter()
        self.complete: set[str] = set()
        """Parameters whose gradient has been reported as complete in this pass."""
        self.outer = False
        """Whether the end of the outermost pass will be reported."""
        planned = engine.plan.program.carriers
        # Nothing is sent for those without elements.
        observed = {} if engine.alone else {name: p for name, p in engine.parameters.items() if p.numel()}
        self.hooks = {
            id(parameter): partial(weakly(self._arrived) if name in planned else _refuse, name)
            for name, parameter in observed.items()
        }
        self._handles: dict[int, Any] = {}
        for parameter in observed.values():
            self.observe_last(parameter)

    @property
    def handles(self) -> Iterable[Any]:
        """Of the hooks on parameters."""
        return self._handles.values()

    def observe_last(self, parameter: torch.Tensor) -> None:
        """Puts the hook on this parameter behind all others: it may take the gradient away."""
        key = id(parameter)
        if key in self._handles:
            self._handles.pop(key).remove()
        if key in self.hooks:
            self._handles[key] = torch.Tensor.register_post_accumulate_grad_hook(parameter, self.hooks[key])

    def expect_end(self) -> None:
        """Called in the outermost pass before any other: the model's outputs have got their gradients."""
        if self.synchronise and not self.under_way and not self.outer:
            self.outer = True
            after_backward(self._end)

    def recover(self) -> None:
        """Ends a pass that an error cut short; called outside any pass."""
        if self.under_way or self.outer:
            self._end()

    def _arrived(self, name: str, _: torch.Tensor) -> None:
        if not self.synchronise:
            return
        if not self.under_way:
            self._begin()
        self.calls[name] += 1
        if self.expected is None:
            return
        if name in self.complete:
            raise StrategyError(
                f"parameter {name!r} got another gradient after it was sent: a checkpointed module that is "
                f"used more often in some steps needs use_reentrant=False"
            )
        if self.calls[name] >= self.expected[name]:
            self.complete.add(name)
            self.engine.gradient_complete(name)

    def _begin(self) -> None:
        self.under_way = True
        self.calls.clear()
        self.complete.clear()
        if not self.outer:
            after_backward(self._end)
        self.engine.backward_begins()

    def _end(self) -> None:
        self.outer = False
        if not self.under_way:
            return
        self.under_way = False
        if self.expected is None:
            self.expected = Counter(self.calls)
        else:
            # What an earlier pass did not reach is known from now on.
            self.expected.update({name: n for name, n in self.calls.items() if not self.expected[name]})
        self.engine.backward_ends()


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method as a hook of a tensor, which must not keep its object alive: Python's garbage collector does not see
    what a tensor's hooks refer to."""
    kept = WeakMethod(method)

    def call(*arguments: Any) -> None:
        found = kept()
        if found is not None:
            found(*arguments)

    return call


def _refuse(name: str, _: torch.Tensor) -> None:
    raise StrategyError(
        f"parameter {name!r} got a gradient, but none in the captured step; pass example_inputs to distribute() that "
        f"use it, or none"
    )
