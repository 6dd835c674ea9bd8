"""Gradient accumulation: the batch in micro-batches one after another, as few as the memory limit allows."""

from collections.abc import Iterator

from offbeat.search.passes.problem import Candidate, Problem
from offbeat.search.passes.registry import register_pass
from offbeat.strategy import Strategy

_MOST = 64


@register_pass("accumulate", aim="memory", order=20)
def propose(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """The smallest number of equal micro-batches that fits; the largest where none does."""
    batch = next((tensor.shape[0] for tensor in problem.graph.inputs if tensor.shape), _MOST)
    counts = [n for n in range(2, min(batch, _MOST) + 1) if batch % n == 0 and n > candidate.strategy.accumulation]
    for count in counts:
        strategy = candidate.strategy.model_copy(update={"accumulation": count})
        if count == counts[-1] or problem.fits(problem.evaluate(strategy, "trial")):
            yield strategy
            return
