"""Uneven data: the other ranks keep training until the last one has run out.

Before each forward and each step the ranks count who still has data, and whether the backward pass will be
synchronised. A rank that has none left takes part in the others' steps with gradients of zero, as DDP's `join()` has
it: the average still divides by the number of all ranks, and buffers are those of the last rank that has data.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from offbeat.errors import StrategyError
from offbeat.runtime.engine.gradients import Phase
from offbeat.runtime.faults import explain

if TYPE_CHECKING:
    from offbeat.runtime.distribute import Runtime


@contextmanager
def join(
    runtime: "Runtime", *, divide_by_initial_world_size: bool, enable: bool, throw_on_early_termination: bool
) -> Generator[None, None, None]:
    """Wraps a training loop that may end earlier on some ranks; one forward for each backward pass."""
    if not divide_by_initial_world_size:
        raise StrategyError(
            "join(divide_by_initial_world_size=False): Offbeat's averages always divide by the number of all ranks"
        )
    if throw_on_early_termination:
        raise StrategyError(
            "join(throw_on_early_termination=True): Offbeat's ranks without data follow the others to the end; give "
            "all ranks equally many batches to do without join()"
        )
    if not enable:
        yield
        return
    if any(message.asynchronous for message in runtime.plan.messages):
        raise StrategyError("join() is for synchronous strategies: asynchronous servers never wait for other ranks")

    runtime.fit_model()
    runtime.engine.frozen.held = True
    changes = runtime.engine.frozen.changes

    def before_forward() -> None:
        if runtime.engine.frozen.changes != changes:
            refuse_change()
        if torch.is_grad_enabled() and runtime.model.training:
            _meet(runtime, synchronise=runtime.engine.arrivals.synchronise)

    def before_step() -> None:
        if runtime.engine.frozen.changes != changes:
            refuse_change()
        _meet(runtime, step=True)

    def publish() -> None:
        # A rank without data cannot know whether the others' loop forgets what owners keep.
        if runtime.engine.gradients.phase is Phase.KEPT:
            runtime.engine.settle_all()
            runtime.engine.gradients.publish_kept()

    publish()
    runtime.step_hooks.append(publish)
    runtime.before_forward.insert(0, before_forward)
    runtime.before_step.append(before_step)
    try:
        try:
            yield
        finally:
            runtime.before_forward.remove(before_forward)
            runtime.before_step.remove(before_step)
        # An error ends the loop on this rank alone; the others learn of it as they do of any lost rank.
        _accompany(runtime)
    finally:
        runtime.step_hooks.remove(publish)
        runtime.engine.frozen.held = False


def refuse_change() -> None:
    raise StrategyError(
        "the model or its optimizer has changed inside join(), where ranks without data cannot follow: freeze or "
        "replace parts before it"
    )


def _accompany(runtime: "Runtime") -> None:
    """Follows the ranks that still have data, without contributing."""
    while (met := _meet(runtime, active=False)).active:
        if met.step:
            runtime.engine.step()
            continue
        for action in runtime.before_forward:
            action()
        runtime.share_buffers()
        runtime.buffers.due = met.synchronise
        if met.synchronise:
            for parameter in runtime.engine.parameters.values():
                if parameter.requires_grad:
                    parameter.grad = None
            runtime.engine.backward_without_gradients()
    # The last rank's buffers are everybody's in the end.
    runtime.buffers.drop()
    runtime.buffers.due, runtime.buffers.shared = True, []
    runtime.share_buffers()
    runtime.buffers.follow(runtime.plan.replicas[0])


class Met(NamedTuple):
    """The next action of the ranks that still have data."""

    active: bool
    """Whether there are such ranks."""
    step: bool
    """Whether they take a step; otherwise they begin a forward."""
    synchronise: bool
    """Whether the forward's backward pass will be synchronised."""


def _meet(runtime: "Runtime", *, active: bool = True, step: bool = False, synchronise: bool = False) -> Met:
    """Learns what is next. Buffers are those of the last rank that has data, as with DDP."""
    control, buffers = runtime.engine.channels.control, runtime.buffers
    counts = torch.zeros(control.size + 3, dtype=torch.int32, device=runtime.device)
    counts[control.index] = active
    counts[control.size :] = torch.tensor([step, synchronise, active and buffers.due])
    with explain(runtime.plan, what="word of which ranks have data left"):
        control.all_reduce(counts).wait()
    *having, steps, synchronised, due = counts.tolist()
    left = [rank for rank, has in zip(control.ranks, having, strict=True) if has]
    if left:
        buffers.due = bool(due)
        buffers.follow(max(left))
    return Met(bool(left), bool(steps), bool(synchronised))
