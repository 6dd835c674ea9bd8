"""Apply a strategy's compute decisions to a model: compiled regions (`fusion.py`), recomputation, autocast,
micro-batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from offbeat.errors import StrategyError
from offbeat.runtime.fusion import Forward, fuse_regions, replace_forward
from offbeat.runtime.lazy import raw_gradient, set_gradient
from offbeat.strategy import Strategy
from offbeat.torch_private import pytree


def apply_memory_strategy(
    model: torch.nn.Module, strategy: Strategy, engine: Callable[[], Any], ready: Callable[[], bool] = lambda: True
) -> list[Callable[[], None]]:
    """Fused regions, recomputation, autocast and micro-batches, as far as the strategy asks; returns what takes them
    off again.

    `engine` gives the engine in force, `ready` says whether regions may run compiled already.
    """
    undo = fuse_regions(model, strategy.fusion, ready)
    # Around what is compiled, so that backward repeats that, and not the modules as they were.
    for path in strategy.recompute:
        module = model.get_submodule(path)
        undo.append(replace_forward(module, partial(recomputed, module.forward)))
    if strategy.precision is not None:
        device = next(model.parameters()).device.type
        undo.append(replace_forward(model, partial(autocast, model.forward, device)))
    if strategy.accumulation > 1:
        undo.append(replace_forward(model, MicroBatches(model.forward, strategy.accumulation, engine)))
    return undo[::-1]


def recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A forward that keeps only its inputs and is repeated in backward."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def autocast(forward: Callable[..., Any], device: str, *args: Any, **kwargs: Any) -> Any:
    """A forward under autocast to bfloat16. It returns float32, as autocast makes it for a loss inside."""
    with torch.autocast(device, torch.bfloat16):
        result = forward(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype == torch.bfloat16 else t, result)


class MicroBatches(Forward):
    """A forward that returns the loss, run on parts of the batch one after another.

    All parts but the last run forward and backward inside the call, so that only one part's activations exist at a
    time. Their gradients are kept aside, and join the last part's when the user's `backward()` arrives, scaled by
    whatever gradient it brings (a loss scale, a further factor).
    """

    def __init__(self, forward: Callable[..., Any], parts: int, engine: Callable[[], Any]) -> None:
        """`engine` gives what has the parameters in force, and may be told not to synchronise for a while."""
        super().__init__(forward, forward)
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
