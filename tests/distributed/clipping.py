"""Training loops that look at gradients between backward and step. Runs on every rank."""

import time
from typing import Any

import small_models
import torch
import torch.distributed as dist
from features import _adamw, _batches, _compare, _distributed, _everybodys_loss, _mlp, _own_loss, _sgd
from reference import flat_parameters, graph_of, make_strategy
from torch import nn
from torch.nn.utils import clip_grad_norm_
from training import _cluster

from offbeat.strategy import Strategy


def _built(builder: str, options: dict[str, Any], mode: str = "auto") -> Strategy:
    graph = graph_of("mlp", torch.float64, "sgd")
    return make_strategy({"builder": builder, "options": options}, graph, _cluster(None), mode)


def clip(builder: str, options: dict[str, Any], imported: str, optimizer: str, mode: str) -> dict[str, Any]:
    """clip_grad_norm_, imported directly or called through its module, bites in every step."""
    norms: dict[bool, list[float]] = {True: [], False: []}

    def step(model: nn.Module, trainer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        trainer.zero_grad()
        loss(model, number).backward()
        function = clip_grad_norm_ if imported == "function" else nn.utils.clip_grad_norm_
        norms[loss is _own_loss].append(float(function(model.parameters(), 0.05)))
        trainer.step()

    chosen = _built(builder, options, mode)
    result = _compare(
        step,
        strategy=chosen,
        optimize=_sgd if optimizer == "sgd" else _adamw,
        example=_batches(0)[dist.get_rank()],
        steps=5,
    )
    assert min(norms[False]) > 0.05, "the gradients are too small for the clipping to matter"
    apart = max(abs(a - b) for a, b in zip(norms[True], norms[False], strict=True))
    return {**result, "norm_error": apart}


def clip_later(builder: str, options: dict[str, Any]) -> dict[str, Any]:
    """A loop that starts to clip when deferred mode is already active."""

    def step(model: nn.Module, trainer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        trainer.zero_grad()
        loss(model, number).backward()
        if number >= 3:
            clip_grad_norm_(model.parameters(), 0.05)
        trainer.step()

    chosen = _built(builder, options)
    return _compare(step, strategy=chosen, example=_batches(0)[dist.get_rank()], steps=6)


def replaced_gradients(builder: str, options: dict[str, Any]) -> dict[str, Any]:
    """A loop that assigns new tensors to `grad`, and forgets one."""

    def step(model: nn.Module, trainer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        trainer.zero_grad()
        loss(model, number).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        model.layers[2].bias.grad = None
        trainer.step()

    chosen = _built(builder, options)
    return _compare(step, strategy=chosen, example=_batches(0)[dist.get_rank()], steps=5)


def scaler(builder: str, options: dict[str, Any]) -> dict[str, Any]:
    """GradScaler on the CPU: one step overflows on one rank and must be skipped by all, the others count."""

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, bad: bool) -> torch.Tensor:
            ctx.bad = bad
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return (gradient * float("inf") if ctx.bad else gradient), None

    scalers: dict[int, torch.amp.GradScaler] = {}

    def step(model: nn.Module, trainer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        scaled = scalers.setdefault(id(trainer), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2))
        trainer.zero_grad()
        bad = number == 2 and (loss is _everybodys_loss or dist.get_rank() == 1)
        scaled.scale(Poison.apply(loss(model, number), bad)).backward()
        scaled.unscale_(trainer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaled.step(trainer)
        scaled.update()

    chosen = _built(builder, options)
    result = _compare(step, strategy=chosen, example=_batches(0)[dist.get_rank()], steps=5)
    ends = [scaled.get_scale() for scaled in scalers.values()]
    return {**result, "scales": ends}


def slow_peer_clip(builder: str, options: dict[str, Any]) -> dict[str, Any]:
    """As `clip`, with a rank that is late in every backward: a gradient read too early would show."""

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return gradient

    def own(model: nn.Module, step: int) -> torch.Tensor:
        loss = _own_loss(model, step)
        return Late.apply(loss) if dist.get_rank() == dist.get_world_size() - 1 else loss

    def step(model: nn.Module, trainer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        trainer.zero_grad()
        loss(model, number).backward()
        clip_grad_norm_(model.parameters(), 0.05)
        trainer.step()

    chosen = _built(builder, options)
    return _compare(step, strategy=chosen, example=_batches(0)[dist.get_rank()], own_loss=own, steps=5)


def local_gradients() -> dict[str, Any]:
    """`grad` reads as the average right after backward, in the first and in a deferred step."""
    model = _mlp()
    optimizer = _sgd(model)
    errors = []
    with _distributed(model, optimizer, "overlap"):
        for number in range(4):
            reference = small_models.make("mlp")
            reference.load_state_dict(model.state_dict())
            _everybodys_loss(reference, number).backward()
            optimizer.zero_grad()
            _own_loss(model, number).backward()
            if number in (0, 3):
                pairs = zip(reference.parameters(), model.parameters(), strict=True)
                errors.append(max((a.grad - b.grad).abs().max().item() for a, b in pairs))
            optimizer.step()
        flat_parameters(model)
        return {"error": max(errors), "mode": model.offbeat.mode}
