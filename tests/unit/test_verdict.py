"""Two plans timed in alternating blocks: noise and a machine that changes its speed do not decide which is kept."""

import random

import pytest

from offbeat.online.verdict import Verdict

MOST_PAIRS = 10
"""After which a comparison ends."""


def judged(chance: random.Random, ratio: float, noise: float, drift: float = 0.0, even: bool = False) -> str:
    """The decision on a plan whose step takes `ratio` of the old one's; every block is slower by `drift` than the last.

    The two take turns in being first, as in the tuner.
    """
    verdict, speed = Verdict(even=even), 1.0
    for pair in range(MOST_PAIRS):
        blocks = []
        for share in (ratio, 1.0) if pair % 2 == 0 else (1.0, ratio):
            blocks.append(share * speed * chance.lognormvariate(0, noise))
            speed *= 1 + drift
        new, old = blocks if pair % 2 == 0 else reversed(blocks)
        verdict.add(old, new)
        if verdict.decision != "open":
            return verdict.decision
    return "give up"


def share_kept(ratio: float, noise: float, drift: float = 0.0, even: bool = False) -> float:
    chance = random.Random(0)
    return sum(judged(chance, ratio, noise, drift, even) == "keep" for _ in range(2000)) / 2000


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_an_equal_plan_is_seldom_kept(noise: float) -> None:
    assert share_kept(1.0, noise) < 0.09


def test_a_slower_plan_is_given_up() -> None:
    assert share_kept(1.05, 0.03) < 0.01


def test_a_faster_plan_is_kept() -> None:
    assert share_kept(0.9, 0.04) > 0.95


@pytest.mark.parametrize("drift", [-0.05, 0.05])
def test_a_machine_that_changes_its_speed_speaks_for_neither(drift: float) -> None:
    assert share_kept(1.0, 0.01, drift) < 0.09
    assert share_kept(0.9, 0.01, drift) > 0.95


@pytest.mark.parametrize("ratio", [0.93, 1 / 0.93])
def test_of_two_even_plans_the_faster_is_taken_also_in_noise(ratio: float) -> None:
    kept = share_kept(ratio, 0.1, even=True)
    assert (kept if ratio < 1 else 1 - kept) > 0.9
    assert 0.4 < share_kept(1.0, 0.1, even=True) < 0.6


def test_of_two_even_plans_the_faster_is_taken_when_steps_run_out() -> None:
    for times, kept in ((((0.1, 0.09), (0.12, 0.1)), True), (((0.1, 0.11), (0.12, 0.13)), False)):
        verdict = Verdict(even=True)
        for old, new in times:
            verdict.add(old, new)
        assert verdict.decision == "open"
        assert verdict.kept is kept


def test_the_sentence_has_the_spread() -> None:
    verdict = Verdict()
    for old, new in ((0.2, 0.1), (0.22, 0.12), (0.21, 0.11)):
        verdict.add(old, new)
    assert str(verdict) == "210.0 ms (200.0 to 220.0) before, 110.0 ms (100.0 to 120.0) with it"
