"""Operators that draw random numbers → the same draws on every rank.

A dropped-out element must be dropped on every rank that holds it. Such operators are run whole on every rank, from a
stream of random numbers that starts where rank 0's generator stands when training starts. It is nobody else's: numbers
that a rank draws for itself, as to shuffle its data, do not shift it.
"""

from typing import Any

import torch

from offbeat.runtime.comm import World


class SharedRandom:
    """A context in which the default generator is the shared stream."""

    def __init__(self, job: World, device: torch.device) -> None:
        self._job = job
        on_gpu = device.type == "cuda"
        self._generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
        self._device = device
        self._state: torch.Tensor | None = None
        self._own = self._generator.get_state()

    def __enter__(self) -> None:
        self._own = self._generator.get_state()
        if self._state is None:
            shared = self._own.clone().to(self._device)
            self._job.broadcast(shared, 0)
            self._state = shared.cpu()
        self._generator.set_state(self._state)

    def __exit__(self, *_: Any) -> None:
        self._state = self._generator.get_state()
        self._generator.set_state(self._own)
