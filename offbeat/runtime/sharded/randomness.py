"""Operators that draw random numbers → the same draws on every rank.

A dropped-out element must be dropped on every rank that holds it. Such operators are run whole on every rank, from a
stream of random numbers that starts where rank 0's generator stands when training starts. It is nobody else's: numbers
that a rank draws for itself, as to shuffle its data, do not shift it.
"""

from typing import Any

import torch
import torch.distributed as dist


class SharedRandom:
    """A context in which the default generator is the shared stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._state: torch.Tensor | None = None
        self._own: torch.Tensor | None = None

    def __enter__(self) -> None:
        self._own = self._get()
        if self._state is None:
            self._state = self._own.clone().to(self.device)
            dist.broadcast(self._state, src=0)
            self._state = self._state.cpu()
        self._set(self._state)

    def __exit__(self, *_: Any) -> None:
        self._state = self._get()
        assert self._own is not None
        self._set(self._own)

    def _get(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)
