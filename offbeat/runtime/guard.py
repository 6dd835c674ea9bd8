"""A parameter whose gradient may still be on the wire → one that waits when somebody looks.

In deferred mode gradients are not yet averaged when `backward()` returns. Code that reads `parameter.grad` in Python
(clipping, a gradient scaler, logging) must still see the average, so reading it asks the engine first. Autograd itself
writes gradients in C++ and does not pass here.
"""

from typing import Protocol

import torch
from torch.optim import optimizer as torch_optimizer


class GradientReader(Protocol):
    """Who is asked before a gradient is read."""

    def gradient_read(self, parameter: torch.nn.Parameter) -> None:
        """Makes `parameter.grad` right before it is returned."""

    def gradient_written(self, parameter: torch.nn.Parameter) -> None:
        """Lets go of `parameter.grad` before somebody replaces it."""


_gradient = torch.Tensor.grad


class GuardedParameter(torch.nn.Parameter):
    """A Parameter that asks `_offbeat_reader` before it shows its gradient."""

    _offbeat_reader: GradientReader

    @property
    def grad(self) -> torch.Tensor | None:
        self._offbeat_reader.gradient_read(self)
        return _gradient.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._offbeat_reader.gradient_written(self)
        _gradient.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self._offbeat_reader.gradient_written(self)
        _gradient.__delete__(self)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.nn.Parameter:
        """A copy is nobody's business but its owner's."""
        if id(self) not in memo:
            copied = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad)
        return memo[id(self)]


def raw_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient as it is, without asking anybody."""
    return _gradient.__get__(parameter)


def set_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    _gradient.__set__(parameter, value)


def guard(parameter: torch.nn.Parameter, reader: GradientReader) -> None:
    """From now on `reader` is asked before this parameter's gradient is read."""
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = GuardedParameter
        parameter._offbeat_reader = reader


def unguard(parameter: torch.nn.Parameter) -> None:
    if type(parameter) is GuardedParameter:
        parameter.__class__ = torch.nn.Parameter
        del parameter._offbeat_reader


# Optimizers take their fast paths only for the parameter types listed there.
if GuardedParameter not in torch_optimizer._foreach_supported_types:
    torch_optimizer._foreach_supported_types.append(GuardedParameter)
