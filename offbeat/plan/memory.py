"""Recomputation and accumulation: what is kept for backward → what is computed again, and in how many micro-batches."""

from dataclasses import replace

from offbeat.graph.model import Operator
from offbeat.plan.draft import Draft
from offbeat.plan.model import Segment


def recompute(draft: Draft) -> None:
    """For each named module, drops what its forward keeps and runs that forward again before its backward begins.

    Each module's own input stays, because the second forward starts from it.
    """
    for path in draft.strategy.recompute:
        inside = [operator for operator in draft.graph.phase("forward") if within(operator.module, path)]
        names = {operator.name for operator in inside}
        dropped = {operator.name: operator.activation_bytes for operator in inside}
        inputs = {name for operator in inside for name in operator.inputs if name not in names}
        position = _first_backward(draft, path)
        if not inside or position is None:
            continue
        draft.segments[:] = [
            _without_activations(segment, dropped) if segment.phase == "forward" else segment
            for segment in draft.segments
        ]
        draft.segments.insert(position, _second_forward(draft, path, inside))
        _keep_inputs(draft, inputs)


def accumulate(draft: Draft) -> None:
    """Repeats the compute for each micro-batch, with an equal share of the batch each.

    Forward waits for variables in the first micro-batch only, and gradients are complete in the last.
    """
    count = draft.strategy.accumulation
    if count == 1:
        return
    draft.segments[:] = [
        replace(
            segment,
            name=f"{segment.name}@{turn}",
            flops=segment.flops / count,
            bytes_moved=segment.bytes_moved / count,
            activation_bytes=segment.activation_bytes / count,
            seconds=None if segment.seconds is None else segment.seconds / count,
            reads=segment.reads if turn == 0 else (),
            completes=segment.completes if turn == count - 1 else (),
            microbatch=turn,
        )
        for turn in range(count)
        for segment in draft.segments
    ]


def within(module: str, path: str) -> bool:
    """Whether a module lies in, or is, the module at `path`."""
    return module == path or module.startswith(f"{path}.")


def _first_backward(draft: Draft, path: str) -> int | None:
    for position, segment in enumerate(draft.segments):
        if segment.phase == "backward" and not segment.recomputed:
            operators = (draft.graph.operator(name) for name in segment.operators)
            if any(within(operator.module, path) for operator in operators):
                return position
    return None


def _without_activations(segment: Segment, dropped: dict[str, int]) -> Segment:
    freed = sum(dropped.get(name, 0) for name in segment.operators)
    return replace(segment, activation_bytes=max(0.0, segment.activation_bytes - freed)) if freed else segment


def _second_forward(draft: Draft, path: str, inside: list[Operator]) -> Segment:
    measured = [operator.seconds for operator in inside]
    return Segment(
        name=f"recompute.{path}",
        phase="backward",
        operators=tuple(operator.name for operator in inside),
        flops=sum(operator.flops for operator in inside),
        bytes_moved=sum(operator.bytes_read + operator.bytes_written for operator in inside),
        activation_bytes=sum(operator.activation_bytes for operator in inside),
        seconds=None if None in measured else sum(second for second in measured if second is not None),
        recomputed=True,
    )


def _keep_inputs(draft: Draft, inputs: set[str]) -> None:
    """Adds the module's inputs to what is kept, where nothing else kept them."""
    for position, segment in enumerate(draft.segments):
        if segment.phase != "forward":
            continue
        extra = sum(
            sum(output.bytes for output in draft.graph.operator(name).outputs)
            for name in segment.operators
            if name in inputs and draft.graph.operator(name).activation_bytes == 0
        )
        if extra:
            draft.segments[position] = replace(segment, activation_bytes=segment.activation_bytes + extra)
