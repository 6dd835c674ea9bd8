"""Ranks with uneven data → the others train on until the last has run out.

Before each forward the ranks count who still has data, and whether the backward pass will be synchronised. A rank that
has none left takes part in the others' steps with gradients of zero, as DDP's `join()` has it: the average still
divides by the number of all ranks.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from offbeat.errors import StrategyError
from offbeat.runtime.faults import explain

if TYPE_CHECKING:
    from offbeat.runtime.distribute import Runtime


@contextmanager
def join(runtime: "Runtime") -> Generator[None, None, None]:
    """Around a training loop that may end after fewer steps on some ranks; one forward for each backward pass."""
    if any(message.asynchronous for message in runtime.plan.messages):
        raise StrategyError("join() is for synchronous strategies: asynchronous servers wait for nobody anyway")

    def count() -> None:
        if torch.is_grad_enabled() and runtime.model.training:
            _count(runtime, active=True, synchronise=runtime.engine.arrivals.synchronise)

    runtime.before_forward.insert(0, count)
    try:
        yield
    finally:
        runtime.before_forward.remove(count)
    # An error ends the loop on this rank alone; the others learn of it as they do of any lost rank.
    while True:
        active, synchronised = _count(runtime, active=False, synchronise=False)
        if not active:
            return
        if synchronised:
            # One step of the others, to which this rank adds nothing.
            runtime.share_buffers()
            for parameter in runtime.engine.parameters.values():
                parameter.grad = None
            runtime.engine.backward_without_gradients()
            runtime.engine.step()


def _count(runtime: "Runtime", *, active: bool, synchronise: bool) -> list[int]:
    """How many ranks have data left, and how many of them will synchronise."""
    counts = torch.tensor([active, synchronise], dtype=torch.int32, device=runtime.device)
    with explain(runtime.plan, what="word of which ranks have data left"):
        runtime.engine.channels.control.all_reduce(counts).wait()
    return counts.tolist()
