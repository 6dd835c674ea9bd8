"""Saving and restoring distributed training. Runs on every rank."""

import copy
import time
from pathlib import Path
from typing import Any

import small_models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import training
from reference import flat_parameters

from offbeat.errors import StrategyError


def _steps(net: Any, trainer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        trainer.zero_grad()
        loss = net(*small_models.batch("everything", step, dist.get_rank()))
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    return losses


def _fresh(kind: str, seed: int) -> tuple[Any, Any]:
    net = small_models.make("everything", seed=seed, sparse=kind != "adamw")
    return net, small_models.make_optimizer(kind, net.parameters())


def saved_alone(builder: str) -> dict[str, Any]:
    """The sentence with which rank 0 is refused the optimizer's state while the others train on, and how long that
    takes; then all of them ask for it."""
    rank = dist.get_rank()
    net, trainer = _fresh("sgd", 0)
    refused, seconds = "", 0.0
    with training._distributed(net, trainer, builder, small_models.batch("everything", 0, rank)):
        _steps(net, trainer, 0, 2)
        if rank == 0:
            began = time.monotonic()
            try:
                trainer.state_dict()
            except StrategyError as error:
                refused = str(error)
            seconds = time.monotonic() - began
        losses = _steps(net, trainer, 2, 4)
        kept = trainer.state_dict()["state"]
    return {"refused": refused, "seconds": seconds, "losses": losses, "kept": len(kept)}


def resumed(builder: str, kind: str, through: str, directory: str) -> dict[str, Any]:
    """Six steps at once, and three, a checkpoint, and three in new objects: losses and parameters of both."""
    rank = dist.get_rank()
    path = Path(directory)
    net, trainer = _fresh(kind, 0)
    example = small_models.batch("everything", 0, rank)
    with training._distributed(net, trainer, builder, example):
        _steps(net, trainer, 0, 3)
        states = {"model": net.state_dict(), "optimizer": trainer.state_dict()}
        if through == "dcp":
            dcp.save(states, checkpoint_id=str(path / "dcp"))
        elif rank == 0:
            torch.save(states, path / "plain.pt")
        dist.barrier()
        unbroken = _steps(net, trainer, 3, 6)
        expected = flat_parameters(net)
    net, trainer = _fresh(kind, 7 + rank)
    with training._distributed(net, trainer, builder, example):
        if through == "dcp":
            # A template with the right tensors to load into.
            _steps(net, trainer, 0, 1)
            states = {"model": net.state_dict(), "optimizer": trainer.state_dict()}
            dcp.load(states, checkpoint_id=str(path / "dcp"))
        else:
            states = torch.load(path / "plain.pt", weights_only=True)
        net.load_state_dict(states["model"])
        trainer.load_state_dict(states["optimizer"])
        losses = _steps(net, trainer, 3, 6)
        difference = float((flat_parameters(net) - expected).abs().max())
    return {"difference": difference, "losses": losses == unbroken}


def single_process_round_trip(builder: str, kind: str) -> float:
    """Distributed → single process → distributed: the distance from an unbroken distributed run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    example = small_models.batch("everything", 0, rank)
    net, trainer = _fresh(kind, 0)
    with training._distributed(net, trainer, builder, example):
        _steps(net, trainer, 0, 2)
        # State dicts refer to live tensors, which the next steps change.
        states = copy.deepcopy({"model": net.state_dict(), "optimizer": trainer.state_dict()})
        _steps(net, trainer, 2, 6)
        expected = flat_parameters(net)
    alone, optimizer = _fresh(kind, 3)
    alone.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    for step in range(2, 4):
        optimizer.zero_grad()
        for each in range(world):
            (alone(*small_models.batch("everything", step, each)) / world).backward()
        optimizer.step()
    net, trainer = _fresh(kind, 9 + rank)
    with training._distributed(net, trainer, builder, example):
        net.load_state_dict(alone.state_dict())
        trainer.load_state_dict(optimizer.state_dict())
        _steps(net, trainer, 4, 6)
        return float((flat_parameters(net) - expected).abs().max())
