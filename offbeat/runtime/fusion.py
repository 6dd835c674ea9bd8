"""Run each region of a strategy as one compiled function.

The modules of a region run one after another, each on what the one before has returned. The first one's forward
computes all of them by one call of `torch.compile`d code, and the others pass on what they are given. What calls them
(`nn.Sequential`, or any module) stays as it is. That a caller does call them one after another is known of
`nn.Sequential`; of others the first training step shows it, in which nothing is compiled. Where it is not so, each
module is compiled by itself, and a sentence says so.

Hooks inside a region would cut the compiled code into pieces, so the region's variables are all waited for before it
runs (`offbeat.runtime.forward`). Without gradients, and outside of training, modules run as they are.
"""

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial, update_wrapper
from itertools import count
from typing import Any

import torch
from torch import nn

from offbeat.errors import StrategyError
from offbeat.torch_private import backward_pass, has_forward_hooks

log = logging.getLogger("offbeat")

backend = "inductor"
"""Options of torch.compile."""
_numbers = count()


def in_turn(forwards: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """A function that passes its arguments to the first of these and each output to the next."""
    first, *others = forwards

    def run(*args: Any, **kwargs: Any) -> Any:
        value = first(*args, **kwargs)
        for forward in others:
            value = forward(value)
        return value

    return run


def compiled(forwards: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """`in_turn`, compiled."""
    run: Any = in_turn(forwards)
    # Torch counts compilations per code object and gives up after eight: each region gets its own code.
    run.__code__ = run.__code__.replace(co_name=f"region{next(_numbers)}")
    return torch.compile(run, backend=backend, dynamic=False)


class Region:
    """Modules compiled together, or separately if they do not run one after another."""

    def __init__(self, paths: Sequence[str], model: nn.Module, ready: Callable[[], bool]) -> None:
        """`ready` says whether forward need not be watched any more."""
        self.paths = paths
        self.modules = [model.get_submodule(path) for path in paths]
        self.ready = ready
        self.plain = [module.forward for module in self.modules]
        self.together: bool | None = True
        """Whether the modules run one after another; None until known."""
        self.fast = False
        """Whether the current forward runs compiled code. Recomputation in backward does as its forward did."""
        self.calling = False
        """Whether the module that calls them is running."""
        self.reached: tuple[int, Any] | None = None
        """The last of the modules that ran in this call, and its output."""
        self.undo: list[Callable[[], None]] = []
        if len(paths) > 1:
            caller = _caller(paths, model)
            if caller is None or any(map(has_forward_hooks, self.modules)):
                self._take_apart("they have hooks" if caller else "no module calls all of them")
            else:
                self.together = _in_a_row(caller, self.modules) or None
                self.undo.append(replace_forward(caller, partial(self._within, caller.forward)))
        self.compiled = [compiled(self.plain)] if self.together is not False else self._each()
        for place, module in enumerate(self.modules):
            self.undo.append(replace_forward(module, partial(self._run, place)))

    def _each(self) -> list[Callable[..., Any]]:
        return [compiled([forward]) for forward in self.plain]

    def _take_apart(self, why: str) -> None:
        self.together = False
        log.warning("offbeat compiles the modules %s one by one: %s", ", ".join(self.paths), why)

    def _decide(self) -> None:
        if backward_pass() == -1:
            self.fast = self.together is not None and self.ready()

    def _within(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of the module that calls the region's."""
        self._decide()
        self.calling, self.reached = True, None
        try:
            result = forward(*args, **kwargs)
        finally:
            self.calling = False
        if self.reached is not None:
            self._broken(len(self.modules) - 1)
        return result

    def _broken(self, place: int) -> None:
        """A module did not get the output of the one before, or was skipped."""
        if self.together:
            raise StrategyError(
                f"fusion: {self.paths[place]!r} does not take the output of {self.paths[place - 1]!r} in every "
                f"step, so the two cannot form one region"
            )
        self._take_apart("they do not run one after another")
        self.compiled, self.reached = self._each(), None

    def _run(self, place: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of one of the modules."""
        training = self.modules[0].training and torch.is_grad_enabled()
        if self.together is False or len(self.modules) == 1:
            self._decide()
            return (self.compiled if training and self.fast else self.plain)[place](*args, **kwargs)
        if not (training and self.calling):
            return self.plain[place](*args, **kwargs)
        if place:
            before, value = self.reached or (None, None)
            if before != place - 1 or len(args) != 1 or kwargs or args[0] is not value:
                self._broken(place)
                return self.plain[place](*args, **kwargs)
        if self.together and self.fast:
            result = args[0] if place else self.compiled[0](*args, **kwargs)
        else:
            result = self.plain[place](*args, **kwargs)
        last = place == len(self.modules) - 1
        self.together = self.together or (last or None)
        self.reached = None if last else (place, result)
        return result


def _caller(paths: Sequence[str], model: nn.Module) -> nn.Module | None:
    """The module whose forward calls all of these, as far as known; lists of modules are never called."""
    callers = set()
    for path in paths:
        parent = path.rpartition(".")[0]
        while parent and isinstance(model.get_submodule(parent), nn.ModuleList | nn.ModuleDict):
            parent = parent.rpartition(".")[0]
        callers.add(parent)
    return model.get_submodule(callers.pop()) if len(callers) == 1 else None


def _in_a_row(caller: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Whether the caller is a sequence in which these are consecutive."""
    if not isinstance(caller, nn.Sequential) or type(caller).forward is not nn.Sequential.forward:
        return False
    members = list(caller)
    places = [members.index(module) for module in modules]
    unique = all(members.count(module) == 1 for module in modules)
    return unique and places == list(range(places[0], places[0] + len(places)))


def fuse_regions(
    model: nn.Module, regions: Sequence[Sequence[str]], ready: Callable[[], bool]
) -> list[Callable[[], None]]:
    """Compiles each region; returns functions that undo it."""
    paths = [path for region in regions for path in region]
    for path in paths:
        around = next((other for other in paths if path.startswith(f"{other}.")), None)
        if around is not None or paths.count(path) > 1:
            raise StrategyError(f"fusion: module {path!r} is compiled twice, the second time with {around or path!r}")
    return [undo for region in regions for undo in Region(region, model, ready).undo]


class Forward:
    """The replacement of a module's forward. Copies of the module have the original."""

    def __init__(self, before: Callable[..., Any], call: Callable[..., Any]) -> None:
        update_wrapper(self, before)
        self.before = before
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.before, memo)


def replace_forward(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a module's forward; returns a function that restores it."""
    before = vars(module).get("forward")
    module.forward = call if isinstance(call, Forward) else Forward(module.forward, call)

    def undo() -> None:
        vars(module).pop("forward", None)
        if before is not None:
            vars(module)["forward"] = before

    return undo
