"""strategy="auto" changes the plan of a job under way: only for a faster one, and never the numbers."""

from pathlib import Path
from statistics import median

import pytest
from cases import mostly_slow
from harness import Pools


@pytest.mark.parametrize("ranks", mostly_slow([2, 4], [2]))
def test_a_faster_plan_is_kept_and_the_numbers_stay(pools: Pools, ranks: int) -> None:
    answers = pools(ranks).call("tune_online", builder="partitioned_all_reduce", slower=False, timeout=90)
    assert max(answer["error"] for answer in answers) <= 1e-10
    for answer in answers:
        assert answer["names"][0] != "partitioned_all_reduce"
        assert answer["names"][-1] == "partitioned_all_reduce"
        assert answer["names"] == answers[0]["names"], "every rank switches between the same two steps"
    # The recorded steps took 50 ms or more, of which the new plan changes nothing in replay.
    assert 0.05 < answers[0]["predicted"] < 2 * answers[0]["recorded"], "the handle's timeline is at recorded times"


def test_a_slower_plan_is_given_up_again(pools: Pools) -> None:
    answers = pools(2).call("tune_online", builder="ps_load_balanced", slower=True, timeout=90)
    assert max(answer["error"] for answer in answers) <= 1e-10
    for answer in answers:
        assert "ps_load_balanced" in answer["names"], "it was tried"
        assert answer["names"][-1] == answer["names"][0], "and given up"


@pytest.mark.parametrize("no_sync", mostly_slow([True, False], [True]), ids=["no_sync", "every pass"])
def test_a_job_that_accumulates_gradients_is_tuned(pools: Pools, no_sync: bool) -> None:
    answers = pools(2).call(
        "tune_online", builder="partitioned_all_reduce", slower=False, passes=2, no_sync=no_sync, timeout=90
    )
    assert max(answer["error"] for answer in answers) <= 1e-10
    assert set(answers[0]["passes"]) == {2}, "the recorded steps were replayed"
    for answer in answers:
        assert answer["names"][-1] == "partitioned_all_reduce"


@pytest.mark.parametrize(
    ("how", "sentence"),
    [("killed", "the searching process ended with -9"), ("stopped", "the search has not answered for 1 s")],
)
def test_training_goes_on_without_the_search(pools: Pools, how: str, sentence: str) -> None:
    answers = pools(2).call("lose_the_search", how=how, timeout=90)
    for answer in answers:
        assert answer["error"] <= 1e-10
        assert sentence in answer["said"][0], "it says so once"
        assert len(answer["said"]) == 1
        assert not answer["left"], "nothing stays behind"


PAUSE_SECONDS = 0.05
"""What Offbeat may add to a step, beside the time of another one."""
FIRST_STEPS = 3
"""Torch and Offbeat load and build things in these."""


@pytest.mark.timing
@pytest.mark.parametrize("cache", [pytest.param("cold", marks=pytest.mark.slow), "warm"])
def test_no_step_stands_still_while_a_plan_is_sought(pools: Pools, tmp_path: Path, cache: str) -> None:
    answers = pools(2).call("step_times", cache=str(tmp_path) if cache == "cold" else "", most_steps=1500, timeout=200)
    for answer in answers:
        usual = answer["seconds"][FIRST_STEPS:]
        assert answer["said"], "it has settled"
        assert max(usual) <= 2 * median(usual) + PAUSE_SECONDS


def test_auto_encodes_gradients_with_leave_and_only_then(pools: Pools) -> None:
    for answer in pools(2).call("encoded_with_leave", allow=[], timeout=120):
        assert answer["encoders"] == ["none"]
        assert answer["error"] < 1e-5
    answers = pools(2).call("encoded_with_leave", allow=["bf16"], timeout=120)
    for answer in answers:
        assert "bf16" in answer["encoders"], answer["said"]
        # Rounded gradients are close, and not the same.
        assert 1e-5 < answer["error"] < 1e-1
    # The search was told what encoding takes on this device.
    assert all(0 < seconds["bf16"] < 1e-6 for seconds in answers[0]["measured"])
    assert answers[0]["measured"]
