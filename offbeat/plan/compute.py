"""Replication, operator fusion, recomputation and accumulation: turn the graph into compute segments.

What compiling, recomputing or autocast changes is taken from blocks that were measured (`ModelGraph.blocks`), as a
factor on the seconds of their operators. Without that, compiling is taken to save the traffic between operators,
recomputing to take as long as forward, and autocast to change nothing: guesses.
"""

from dataclasses import replace
from itertools import groupby

from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph, Operator
from offbeat.graph.coarsen import Segment, segment_of, segments
from offbeat.graph.model import BlockTimes, Way, within
from offbeat.plan.model import Draft
from offbeat.strategy import Strategy


def replicate(draft: Draft) -> None:
    """Places a replica on each rank, and lays out the compute of one of them."""
    strategy = draft.strategy
    if strategy.operators:
        raise StrategyError(
            f"the strategy splits {len(strategy.operators)} operators over devices; "
            f"this version lowers strategies that replicate the graph"
        )
    draft.replicas = strategy.replicas or draft.cluster.workers
    shares = strategy.weights or (1.0,) * len(draft.replicas)
    total = sum(shares)
    draft.weights = tuple(share / total for share in shares)
    timed = _as_computed(draft.graph, strategy)
    draft.segments = [segment for segment in segments(timed) if segment.phase != "optimizer"]


def _as_computed(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """The graph with the seconds of its operators where they are compiled or run under autocast, as far as measured."""
    regions = [block for block in graph.blocks if block.modules in strategy.fusion]
    ways: list[tuple[BlockTimes, Way]] = [(block, "compiled") for block in regions]
    if strategy.precision is not None:
        ways = [(block, "compiled bf16" if "compiled bf16" in block.seconds else way) for block, way in ways]
        ways += [(block, "bf16") for block in graph.blocks if "bf16" in block.seconds]
    seconds: dict[str, float] = {}
    for operator in graph.operators if ways else ():
        if operator.phase != "optimizer" and operator.seconds is not None:
            way = next(((block, way) for block, way in ways if block.holds(operator.module)), None)
            if way is not None:
                seconds[operator.name] = operator.seconds * way[0].factor(way[1], operator.phase)
    return graph.with_seconds(seconds) if seconds else graph


def fuse(draft: Draft) -> None:
    """Merges adjacent segments of one phase that lie in one region of modules.

    A fused region reads its inputs and writes its outputs once, so traffic between its own operators disappears; its
    gradients all become ready when it ends (dPRO §2.3), which is what may make fusion not worth it.
    """
    for number, region in enumerate(draft.strategy.fusion):
        merged: list[Segment] = []
        for (inside, _), run in groupby(draft.segments, key=lambda s: (all(_inside(draft, s, *region)), s.phase)):
            segments = list(run)
            merged.extend([_merge(draft, number, segments)] if inside else segments)
        draft.segments[:] = merged


def _inside(draft: Draft, segment: Segment, *paths: str) -> list[bool]:
    """Whether each of a segment's operators lies in one of some modules; none of them do when it is recomputed."""
    modules = (draft.graph.operator(name).module for name in segment.operators)
    return [not segment.recomputed and any(within(module, path) for path in paths) for module in modules]


def _merge(draft: Draft, number: int, segments: list[Segment]) -> Segment:
    operators = tuple(name for segment in segments for name in segment.operators)
    own = set(operators)
    read_again = {name for op in map(draft.graph.operator, operators) for name in op.inputs if name in own}
    internal = sum(sum(out.bytes for out in draft.graph.operator(name).outputs) for name in read_again)
    return replace(
        segments[0],
        name=f"fused{number}.{segments[0].name}",
        operators=operators,
        flops=sum(segment.flops for segment in segments),
        # Each internal tensor was written once and read at least once.
        bytes_moved=max(0.0, sum(segment.bytes_moved for segment in segments) - 2 * internal),
        activation_bytes=sum(segment.activation_bytes for segment in segments),
        seconds=_total([segment.seconds for segment in segments]),
        reads=tuple(name for segment in segments for name in segment.reads),
        completes=tuple(name for segment in segments for name in segment.completes),
    )


def recompute(draft: Draft) -> None:
    """For each named module, drops what its forward keeps and runs that forward again before its backward begins.

    Each module's own input stays, because the second forward starts from it.
    """
    for path in draft.strategy.recompute:
        inside = [operator for operator in draft.graph.phase("forward") if within(operator.module, path)]
        dropped = {operator.name: operator.activation_bytes for operator in inside}
        inputs = {name for operator in inside for name in operator.inputs if name not in dropped}
        backward = (n for n, s in enumerate(draft.segments) if s.phase == "backward" and any(_inside(draft, s, path)))
        position = next(backward, None)
        if not inside or position is None:
            continue
        draft.segments[:] = [
            _kept(draft, segment, dropped, inputs) if segment.phase == "forward" else segment
            for segment in draft.segments
        ]
        again = segment_of(f"recompute.{path}", "backward", inside, recomputed=True)
        draft.segments.insert(position, replace(again, seconds=_recomputing(draft, path, inside)))


def _recomputing(draft: Draft, path: str, forward: list[Operator]) -> float | None:
    """Seconds by which recomputing a module prolongs a step: measured, else what its forward takes."""
    total = _total([operator.seconds for operator in forward])
    block = next((block for block in draft.graph.blocks if block.modules == (path,)), None)
    share = None if block is None else block.recomputing()
    return total if total is None or share is None else total * share


def accumulate(draft: Draft) -> None:
    """Repeats the compute for each micro-batch: the training loop's own (`ModelGraph.passes`), each cut into the
    strategy's.

    Forward waits for variables in the first micro-batch only, and gradients are complete in the last.
    """
    parts = draft.strategy.accumulation
    count = parts * draft.graph.passes
    if count == 1:
        return
    draft.segments[:] = [
        replace(
            segment,
            name=f"{segment.name}@{turn}",
            flops=segment.flops / parts,
            bytes_moved=segment.bytes_moved / parts,
            activation_bytes=segment.activation_bytes / parts,
            seconds=None if segment.seconds is None else segment.seconds / parts,
            reads=segment.reads if turn == 0 else (),
            completes=segment.completes if turn == count - 1 else (),
            microbatch=turn,
        )
        for turn in range(count)
        for segment in draft.segments
    ]


def _total(measured: list[float | None]) -> float | None:
    return None if None in measured else sum(seconds for seconds in measured if seconds is not None)


def _kept(draft: Draft, segment: Segment, dropped: dict[str, int], inputs: set[str]) -> Segment:
    """A forward segment that keeps the module's inputs, where nothing else kept them, and not what is dropped."""
    freed = sum(dropped.get(name, 0) for name in segment.operators)
    read = (draft.graph.operator(name) for name in segment.operators if name in inputs)
    extra = sum(output.bytes for operator in read if operator.activation_bytes == 0 for output in operator.outputs)
    left = max(0.0, segment.activation_bytes - freed) if freed else segment.activation_bytes
    return replace(segment, activation_bytes=left + extra)
