"""The factor by which communication slows computing down is found in what was recorded."""

import numpy as np
import pytest

from offbeat.profile.compute import fit_interference


def samples(factor: float, seed: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """40 steps of 30 spans that meet a random share of communication."""
    draw = np.random.default_rng(seed)
    base = draw.uniform(1e-3, 2e-2, 30)
    share = 0.5 + spread * (draw.uniform(0, 1, (40, 30)) - 0.5)
    noise = draw.normal(1.0, 0.02, (40, 30))
    return base * (1 + factor * share) * noise, share


@pytest.mark.parametrize("factor", [0.0, 0.1, 0.3, 0.6])
def test_the_factor_is_recovered(factor: float) -> None:
    found = fit_interference([samples(factor, seed) for seed in range(3)])
    assert found == pytest.approx(factor, abs=0.03)


def test_shares_that_do_not_vary_tell_nothing() -> None:
    assert fit_interference([samples(0.5, 0, spread=0.01)]) == 0.0


def test_too_few_steps_tell_nothing() -> None:
    seconds, share = samples(0.5, 0)
    assert fit_interference([(seconds[:2], share[:2])]) == 0.0
