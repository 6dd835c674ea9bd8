"""A framework's model and optimizer → the same, training on all ranks; what every integration shares."""

import os
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.api import distribute
from offbeat.errors import OffbeatError
from offbeat.strategy import Strategy

Wanted = str | os.PathLike[str] | Strategy
"""What `offbeat.distribute` takes for a strategy."""


def missing(package: str, extra: str) -> OffbeatError:
    """One sentence for a package that is not installed."""
    return OffbeatError(f"{package} is not installed: run pip install 'offbeat[{extra}]'")


def join(model: torch.nn.Module, optimizer: Optimizer, strategy: Wanted, **options: Any) -> Any:
    """`offbeat.distribute` that returns the runtime."""
    distribute(model, optimizer, strategy, **options)
    return model._offbeat
