"""What the frontier's search returns can be run, and trains with the numbers of a single device."""

import pytest
from harness import Pools

POINTS, LEAST = 10, 8
"""Strategies that run, and how many of them at least are of the frontier; where it has fewer, others are drawn."""


@pytest.mark.parametrize(
    ("world", "model"),
    [
        (2, "mlp"),
        (2, "cnn"),
        (2, "transformer"),
        (2, "gpt2"),
        (4, "mlp"),
        pytest.param(4, "cnn", marks=pytest.mark.slow),
        pytest.param(4, "transformer", marks=pytest.mark.slow),
        pytest.param(4, "gpt2", marks=pytest.mark.slow),
    ],
)
def test_points_of_the_frontier_equal_a_single_device(pools: Pools, world: int, model: str):
    ranks = pools(world).call("frontier_points", name=model, count=POINTS, timeout=150)
    assert ranks[0]["of_the_frontier"] >= LEAST
    for rank in ranks:
        assert len(rank["runs"]) >= POINTS
        assert max(run["losses"] for run in rank["runs"]) < 1e-10
        assert max(run["weights"] for run in rank["runs"]) < 1e-10
    # From all weights on every rank to the smallest parts.
    held = [run["held"] for run in ranks[0]["runs"]]
    assert min(held) < 0.6
    assert max(held) > min(held) + 0.3
