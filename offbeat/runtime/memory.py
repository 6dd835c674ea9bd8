"""A strategy's memory and fusion decisions → modules that recompute, are compiled, or work in micro-batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from offbeat.errors import StrategyError
from offbeat.runtime.lazy import raw_gradient, set_gradient
from offbeat.strategy import Strategy
from offbeat.torch_private import replace_compiled_call


def apply_memory_strategy(
    model: torch.nn.Module, strategy: Strategy, engine: Callable[[], Any]
) -> list[Callable[[], None]]:
    """Recomputation, fused regions and micro-batches, as far as the strategy asks; returns what takes them off again.

    `engine` gives the engine in force.
    """
    undo: list[Callable[[], None]] = [recompute(model.get_submodule(path)) for path in strategy.recompute]
    for region in strategy.fusion:
        for path in region:
            module = model.get_submodule(path)
            undo.append(partial(replace_compiled_call, module, replace_compiled_call(module)))
            module.compile()
    if strategy.accumulation > 1:
        undo.append(partial(_restore, model, "forward", vars(model).get("forward")))
        model.forward = MicroBatches(model.forward, strategy.accumulation, engine)
    return undo[::-1]


def recompute(module: torch.nn.Module) -> Callable[[], None]:
    """Lets backward compute what the module's forward does not keep; returns what takes this off again."""
    undo = partial(_restore, module, "forward", vars(module).get("forward"))
    module.forward = partial(_recomputed, module.forward)
    return undo


def _restore(module: torch.nn.Module, name: str, value: Any) -> None:
    """Puts an attribute of the instance back, or takes it away where there was none."""
    vars(module).pop(name, None)
    if value is not None:
        vars(module)[name] = value


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


class MicroBatches:
    """A forward that returns the loss, run on parts of the batch one after another.

    All parts but the last run forward and backward inside the call, so that only one part's activations exist at a
    time. Their gradients are kept aside, and join the last part's when the user's `backward()` arrives, scaled by
    whatever gradient it brings (a loss scale, a further factor).
    """

    def __init__(self, forward: Callable[..., Any], parts: int, engine: Callable[[], Any]) -> None:
        """`engine` gives what has the parameters in force, and may be told not to synchronise for a while."""
        self.forward = forward
        self.parts = parts
        self.engine_in_force = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        batches = self._split(args, kwargs)
        engine = self.engine_in_force()
        parameters = list(engine.parameters.values())
        before = [raw_gradient(parameter) for parameter in parameters]
        for parameter in parameters:
            set_gradient(parameter, None)
        arrivals = engine.arrivals
        before_sync, arrivals.synchronise = arrivals.synchronise, False
        total: torch.Tensor | float = 0.0
        try:
            for part_args, part_kwargs in batches[:-1]:
                loss = self._loss(part_args, part_kwargs)
                loss.backward()
                total = total + loss.detach()
        finally:
            arrivals.synchronise = before_sync
        aside = [raw_gradient(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            set_gradient(parameter, gradient)
        loss = self._loss(*batches[-1])
        loss.register_hook(partial(_join, parameters, aside))
        return loss + total

    def _loss(self, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        loss = self.forward(*args, **kwargs)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise StrategyError(
                f"accumulation over {self.parts} micro-batches needs a model whose forward returns its loss, "
                f"not {type(loss).__name__}"
            )
        return loss / self.parts

    def _split(self, args: tuple, kwargs: dict[str, Any]) -> list[tuple[tuple, dict[str, Any]]]:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim()]
        size = tensors[0].shape[0] if tensors else 0
        if size % self.parts:
            raise StrategyError(f"a batch of {size} does not divide into {self.parts} equal micro-batches")

        def part(value: Any, index: int) -> Any:
            batched = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == size
            return value.chunk(self.parts)[index] if batched else value

        return [
            (tuple(part(value, i) for value in args), {key: part(value, i) for key, value in kwargs.items()})
            for i in range(self.parts)
        ]


@torch.no_grad()
def _join(parameters: list[torch.nn.Parameter], aside: list[torch.Tensor | None], arriving: torch.Tensor) -> None:
    for parameter, gradient in zip(parameters, aside, strict=True):
        if gradient is not None:
            present = raw_gradient(parameter)
            scaled = gradient * arriving.to(gradient.dtype)
            set_gradient(parameter, scaled if present is None else present + scaled)
