"""Whatever the strategy and however late a rank is: no deadlock, no wrong value; tests/unit/test_engine.py has more."""

import pytest
from harness import Pools

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 200))]
RANKS = (2, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_strategy_with_random_delays(pools: Pools, seed: int) -> None:
    """Half of the strategies on 2 ranks, half on 4 ranks of two nodes."""
    world = RANKS[seed % 2]
    answers = pools(world).call("train_random", seed=seed, timeout=40)
    assert max(answer["error"] for answer in answers) <= 1e-10
