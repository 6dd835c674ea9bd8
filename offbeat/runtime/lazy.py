"""Parameters with a pending gradient or value, which are brought up to date when they are accessed.

Three classes stand in for `torch.nn.Parameter`, each a subclass of the one before, and a parameter's `__class__` says
which applies: `WatchedParameter` tells its watcher when it is frozen, unfrozen or given other memory;
`LazyGradParameter` asks before its gradient is read or replaced in Python (autograd itself works in C++ and does not
pass here); `PendingParameter` has an update outstanding and is brought up to date before any torch function uses it.
Switching classes takes about 70 ns and nothing is added to a forward pass.

A view that somebody keeps of a parameter is a tensor of its own and cannot ask. `AliasCheck` finds out that there is
one, so that updates of that parameter are not put off.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ParamSpec

import torch

from offbeat.torch_private import disable_torch_function, pytree, storage_users, support_foreach

if TYPE_CHECKING:
    from offbeat.runtime.engine import Engine


Given = ParamSpec("Given")

_gradient = torch.Tensor.grad
_requires_grad = torch.Tensor.requires_grad
_data = torch.Tensor.data


class WatchedParameter(torch.nn.Parameter):
    """A Parameter that tells `_offbeat_watcher` when `requires_grad` changes, or when it is given other memory."""

    _offbeat_watcher: "Engine"

    @property
    def requires_grad(self) -> bool:
        return _requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != _requires_grad.__get__(self):
            self._offbeat_watcher.training_changed(self, value)
        _requires_grad.__set__(self, value)

    @property
    def data(self) -> torch.Tensor:
        return _data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _data.__set__(self, value)
        self._offbeat_watcher.moved = True

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        self.requires_grad = requires_grad
        return self

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """The hook sees this rank's own gradient, as with DDP: the engine takes it away after the last hook."""
        handle = super().register_post_accumulate_grad_hook(hook)
        self._offbeat_watcher.arrivals.observe_last(self)
        return handle

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(torch.nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, object]) -> torch.nn.Parameter:
        """A plain parameter, detached from the job."""
        if id(self) not in memo:
            copied = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain parameter."""
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class LazyGradParameter(WatchedParameter):
    """A parameter whose gradient may not be averaged yet: reading it waits for the average."""

    @property
    def grad(self) -> torch.Tensor | None:
        self._offbeat_watcher.gradient_read(self)
        return raw_gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._offbeat_watcher.gradient_written(self)
        set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        self._offbeat_watcher.gradient_written(self)
        set_gradient(self, None)


class PendingParameter(LazyGradParameter):
    """A parameter with a pending update, which is applied before its value is read or written."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with disable_torch_function():
            if func not in _METADATA:
                for value in pytree.tree_leaves((args, kwargs)):
                    if type(value) is PendingParameter:
                        value._offbeat_watcher.value_used(value)
            return func(*args, **(kwargs or {}))


_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")]
    + [getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_sparse")]
    + [_gradient.__get__, _gradient.__set__]
    + [torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.dim, torch.Tensor.size, torch.Tensor.stride]
    + [torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_contiguous, torch.Tensor.element_size]
)
"""Functions that do not need the parameter's value."""


def outside_inference_mode(bring: Callable[Given, None]) -> Callable[Given, None]:
    """Runs what brings parameters up to date outside of inference mode, whose tensors could not be changed later."""

    @wraps(bring)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
        if not torch.is_inference_mode_enabled():
            bring(*args, **kwargs)
            return
        with torch.inference_mode(mode=False):
            bring(*args, **kwargs)

    return run


def without_grad(function: Callable[Given, None]) -> Callable[Given, None]:
    """What `torch.no_grad()` does as a decorator, which costs more than a check: inside backward nothing needs it."""

    @wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
        if not torch.is_grad_enabled():
            function(*args, **kwargs)
            return
        with torch.no_grad():
            function(*args, **kwargs)

    return run


def raw_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The stored gradient, without bringing it up to date."""
    return _gradient.__get__(parameter)


def set_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Replaces the gradient without notifying anyone."""
    _gradient.__set__(parameter, value)


def watch(parameter: torch.nn.Parameter, watcher: "Engine", *, lazy: bool) -> None:
    """Notifies `watcher` when this parameter is frozen or unfrozen and, if `lazy`, asks it for the gradient."""
    if can_be_lazy(parameter):
        parameter.__class__ = LazyGradParameter if lazy else WatchedParameter
        parameter._offbeat_watcher = watcher


def unwatch(parameter: torch.nn.Parameter) -> None:
    """Makes it a plain parameter again."""
    if type(parameter) in _KINDS:
        parameter.__class__ = torch.nn.Parameter
        del parameter._offbeat_watcher


def can_be_lazy(parameter: torch.nn.Parameter) -> bool:
    """Whether accesses to this parameter can be intercepted: other subclasses of Parameter are left alone."""
    return type(parameter) in (torch.nn.Parameter, *_KINDS)


def set_pending(parameters: Iterable[torch.nn.Parameter], pending: bool) -> None:
    """Marks lazy parameters as having a pending update, or as up to date."""
    before, after = LazyGradParameter, PendingParameter
    if not pending:
        before, after = after, before
    for parameter in parameters:
        if type(parameter) is before:
            parameter.__class__ = after


def sharing_memory(parameters: dict[str, torch.nn.Parameter]) -> tuple[str, str] | None:
    """The names of two parameters of which one lies where the other does, as after `a.data = b.data`; or None."""
    with disable_torch_function():
        spans = sorted(
            (parameter.data_ptr(), parameter.data_ptr() + _extent(parameter), name)
            for name, parameter in parameters.items()
            if parameter.numel() and parameter.layout == torch.strided
        )
    overlapping = ((min(a, b), max(a, b)) for (_, end, a), (begin, _, b) in pairwise(spans) if begin < end)
    return next(overlapping, None)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element, both included."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((size - 1) * stride for size, stride in strides))


class AliasCheck:
    """Detects views of a parameter's memory held outside the model and the engine."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], before: "AliasCheck | None" = None) -> None:
        """Create it before the engine takes its own views; `before` is the check of the previous engine."""
        self.parameters = list(parameters)
        memory = [parameter.untyped_storage().data_ptr() for parameter in self.parameters]
        sharing = Counter(memory)
        self.others = {
            id(parameter): (place, max(0, storage_users(parameter) - sharing[place] - 1))
            for parameter, place in zip(self.parameters, memory, strict=True)
        }
        """The place of each parameter, and the number of foreign views at the start."""
        self.expected: dict[int, int] = {}
        known = {} if before is None else before.expected
        self.held = frozenset(
            id(parameter)
            for parameter in self.parameters
            if (before.any([parameter]) if before and id(parameter) in known else self.others[id(parameter)][1])
        )
        """Parameters (by id) with foreign views, which must not be moved."""

    def count_own(self) -> None:
        """Counts every view added since as the engine's."""
        for parameter in self.parameters:
            place, others = self.others[id(parameter)]
            moved = parameter.untyped_storage().data_ptr() != place
            self.expected[id(parameter)] = storage_users(parameter) - (0 if moved else others)

    def any(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether one of these has a foreign view."""
        expected = self.expected
        with disable_torch_function():
            return any(storage_users(parameter) > expected[id(parameter)] for parameter in parameters)


_KINDS = (WatchedParameter, LazyGradParameter, PendingParameter)
for _kind in _KINDS:
    support_foreach(_kind)
