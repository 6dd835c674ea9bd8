"""Replace `accelerator.prepare` by one that uses Offbeat instead of DDP.

    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler, strategy="overlap")

The loop stays as it is: `accelerator.backward`, `accumulate`, `no_sync`, `clip_grad_norm_`, `unwrap_model` and
`save_state` find on the model and the optimizer what they look for.
"""

from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.api import Wanted, distribute
from offbeat.errors import OffbeatError

_KINDS = ("MULTI_CPU", "MULTI_GPU")


def prepare(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: Optimizer,
    *others: Any,
    strategy: Wanted = "auto",
    **options: Any,
) -> tuple[Any, ...]:
    """`accelerator.prepare(model, optimizer, *others)` on Offbeat's engine; call it on every rank.

    `others` are data loaders and schedulers. `options` are those of `offbeat.distribute`: example_inputs, loss_fn,
    cluster, timeout. With one process it is plain `accelerator.prepare`.
    """
    if accelerator.num_processes == 1:
        return tuple(accelerator.prepare(model, optimizer, *others))
    model = adopt(accelerator, model, optimizer, strategy, **options)
    rest = accelerator.prepare(optimizer, *others)
    return (model, *rest) if others else (model, rest)


def adopt(
    accelerator: Any, model: torch.nn.Module, optimizer: Optimizer, strategy: Wanted = "auto", **options: Any
) -> torch.nn.Module:
    """Distributes the model and marks it as prepared for the accelerator, including mixed precision."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in _KINDS:
        raise OffbeatError(f"accelerator: distributed_type {kind!r} has its own engine; Offbeat takes {_KINDS}")
    backend = str(getattr(accelerator.state.dynamo_plugin.backend, "value", accelerator.state.dynamo_plugin.backend))
    if backend != "NO":
        raise OffbeatError(
            f"accelerator: dynamo_backend {backend!r} compiles too late; compile the model before prepare()"
        )
    if accelerator.device_placement:
        model.to(accelerator.device)
    distribute(model, optimizer, strategy, **options)
    # Only an evaluated model stays without DDP around it; everything else is done as for training.
    return accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
