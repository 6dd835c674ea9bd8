"""Recomputation: modules whose activations are computed again in backward, as few as the memory limit allows."""

from collections.abc import Iterator

from offbeat.search.passes.modules import activation_bytes, blocks, forward_work
from offbeat.search.passes.problem import Candidate, Problem
from offbeat.search.passes.registry import register_pass
from offbeat.strategy import Strategy


@register_pass("recompute", aim="memory", order=10)
def propose(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Blocks by the bytes they free for the work they repeat: the fewest that fit, then all."""
    done = candidate.strategy.recompute
    paths = [path for path in blocks(problem.graph) if path not in done]
    freed = activation_bytes(problem.graph, paths)
    work = forward_work(problem.graph, paths)
    ranked = sorted((p for p in paths if freed[p] > 0), key=lambda path: work[path] / freed[path])
    if not ranked:
        return

    def recomputed(count: int) -> Strategy:
        return candidate.strategy.model_copy(update={"recompute": (*done, *ranked[:count])})

    fewest, most = 1, len(ranked)
    while fewest < most:
        middle = (fewest + most) // 2
        if problem.fits(problem.evaluate(recomputed(middle), "trial")):
            most = middle
        else:
            fewest = middle + 1
    yield recomputed(fewest)
    if fewest < len(ranked):
        yield recomputed(len(ranked))
