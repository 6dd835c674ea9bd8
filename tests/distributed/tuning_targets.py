"""Functions that trials in tests train: a model that works, and one for each way to fail."""

import os
import time
from pathlib import Path
from typing import Any

import torch


class _Faulty(torch.nn.Module):
    """Works until its second step, then does what it is told."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
        self.fault, self.steps = fault, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 2 and os.environ["RANK"] == "1":
            if self.fault == "crash":
                raise RuntimeError("the model is broken")
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "memory":
                raise MemoryError
        return self.layers(inputs).square().mean()


def build(fault: str = "") -> tuple[torch.nn.Module, tuple[Any, ...]]:
    return _Faulty(fault), (torch.randn(4, 32),)


def wait(path: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Says which process it is, and never returns."""
    Path(f"{path}.new").write_text(str(os.getpid()))
    Path(f"{path}.new").rename(path)
    time.sleep(600)
    raise AssertionError("somebody should have ended this")
