"""Hooks that make each module wait for its own variables only.

Which module uses a variable first is not always the one that owns it (attention modules read their projections' weights
themselves), so the first training step is watched: a torch-function mode sees every call that is given a parameter, and
the innermost module running at that moment is the one that must wait. Owners wait as well, should a later step take
another path.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offbeat.runtime.engine import Engine
from offbeat.runtime.engine.components import Component
from offbeat.torch_private import backward_pass, pytree

_uncompiled = torch.compiler.disable
"""Makes torch.compile leave a hook alone: it must run in every step, not be traced once."""


class FirstUses(TorchFunctionMode):
    """Remembers the innermost running module at the first use of each parameter."""

    def __init__(self, parameters: dict[int, str]) -> None:
        super().__init__()
        self.parameters = parameters
        self.running: list[torch.nn.Module] = []
        self.first: dict[str, torch.nn.Module | None] = {}
        self.order: dict[str, int] = {}
        """Place of each parameter in the order in which forward came to it, or to its owner."""

    def enter(self, module: torch.nn.Module) -> None:
        """A module begins."""
        self.running.append(module)
        for parameter in module.parameters(recurse=False):
            name = self.parameters.get(id(parameter))
            if name is not None:
                self.order.setdefault(name, len(self.order))

    def leave(self) -> None:
        """The innermost module has ended."""
        self.running.pop()

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            name = self.parameters.get(id(value))
            if name is not None and name not in self.first:
                self.first[name] = self.running[-1] if self.running else None
                self.order.setdefault(name, len(self.order))
        return function(*args, **(kwargs or {}))


class ForwardGate:
    """Holds each module's forward back until its variables are up to date."""

    def __init__(self, model: torch.nn.Module, engine: Engine) -> None:
        self.model = model
        self.engine = engine
        self.names = {id(parameter): name for name, parameter in engine.parameters.items()}
        self.watching: FirstUses | None = None
        self.watched: FirstUses | None = None
        """What the first training step has shown, once it has."""
        self.successor: ForwardGate | None = None
        """The gate of the plan after this one."""
        self.waits: dict[torch.nn.Module, dict[Component, None]] = {}
        self.before_forward: list[Callable[[], None]] = []
        self.share_buffers: Callable[[], None] = lambda: None
        """Called after these, except where `model.module` is called: DDP does not share them there."""
        self.handles: list[Any] = [
            model.register_forward_pre_hook(_uncompiled(self._enter_model), prepend=True),
            model.register_forward_hook(_uncompiled(self._leave_model), always_call=True),
        ]
        self.waiting: list[Any] = []
        """Those of the handles whose hooks make a part of the model wait."""
        self.fused: dict[torch.nn.Module, tuple[torch.nn.Module, ...]] = {}
        """Where the variables of a module inside a compiled region are waited for, instead of at the module: a hook
        inside would cut the compiled code into pieces."""
        for region in engine.plan.strategy.fusion:
            members = [model.get_submodule(path) for path in region]
            for member in members:
                for module in member.modules():
                    self.fused[module] = tuple(dict.fromkeys((members[0], member)))
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._add_wait(module, parameter)

    def let_pass(self) -> None:
        """No module need wait any more, because step() applies every update itself: a hook costs time in each forward.

        The model's own stay: torch may be walking over them."""
        for handle in self.waiting:
            handle.remove()
        self.waiting.clear()

    def _add_wait(self, module: torch.nn.Module, parameter: torch.Tensor) -> None:
        component = self.engine.updates.component_of.get(id(parameter))
        if component is not None:
            for place in self.fused.get(module, (module,)):
                self._add_hook(place, component)

    def _add_hook(self, module: torch.nn.Module, component: Component) -> None:
        updates = self.engine.updates
        components = self.waits.setdefault(module, {})

        def wait(*_: Any) -> None:
            if updates.outstanding:
                for each in components:
                    updates.settle(each)

        if not components:
            self.handles.append(module.register_forward_pre_hook(_uncompiled(wait)))
            if module is not self.model:
                self.waiting.append(self.handles[-1])
        components[component] = None

    def _enter_model(self, model: torch.nn.Module, *_: Any) -> None:
        # Checkpointed modules run forward again inside a backward pass.
        if backward_pass() == -1:
            self.engine.arrivals.recover()
        for action in self.before_forward:
            action()
        if model is self.model:
            self.share_buffers()
        # The plan may have been made anew: what is left of this forward is the next gate's.
        gate = self.successor or self
        if gate.watched is None and self.model.training and torch.is_grad_enabled():
            gate._start_watching()

    def _start_watching(self) -> None:
        watching = self.watching = FirstUses(self.names)
        self._watch_handles: list[Any] = []
        # Not on the model itself: torch walks over its hooks when forward fails, and none may be removed meanwhile.
        for module in list(self.model.modules())[1:]:
            self._watch_handles.append(module.register_forward_pre_hook(lambda m, *_: watching.enter(m), prepend=True))
            self._watch_handles.append(module.register_forward_hook(lambda *_: watching.leave(), always_call=True))
        watching.enter(self.model)
        watching.__enter__()

    def _leave_model(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            # Autograd reaches the outputs before passes inside the pass begin.
            for value in pytree.tree_leaves(output):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.register_hook(lambda _: self.engine.arrivals.expect_end())
        if self.watching is None:
            return
        watching, self.watching = self.watching, None
        watching.__exit__(None, None, None)
        for handle in self._watch_handles:
            handle.remove()
        self._know(watching)

    def adopt(self, other: "ForwardGate") -> None:
        """Takes over what another gate of the same model has watched, and the passes that it has begun."""
        other.engine, other.successor = self.engine, self
        if other.watched is not None:
            self._know(other.watched)

    def _know(self, watched: FirstUses) -> None:
        self.watched = watched
        for name, parameter in self.engine.parameters.items():
            first = watched.first.get(name)
            if first is not None:
                self._add_wait(first, parameter)
            elif name in watched.first or name not in watched.order:
                # Used outside every module, or by what cannot be told: the whole model waits.
                self._add_wait(self.model, parameter)

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
