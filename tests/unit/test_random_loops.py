"""Random training loops through the real engine on ranks in memory end where averaging by hand does."""

import pytest
from loop_actions import ACTIONS
from loop_models import MODELS
from random_loops import OFTEN, SEEDS, difference, draw_loop, shrink, tolerance
from small_strategies import ENGINE_BUILDERS

# torch's Adagrad says it once of sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


def check(seed: int) -> None:
    loop = draw_loop(seed)
    found = difference(loop, tolerance(loop))
    if found:
        shorter = shrink(loop, tolerance(loop))
        pytest.fail(f"{found}\nwith {loop}\nand already with {shorter}", pytrace=False)


def test_the_loops_of_every_day_have_all_there_is_to_draw() -> None:
    loops = [draw_loop(seed) for seed in OFTEN]
    assert {name for loop in loops for name, _ in loop.actions} == set(ACTIONS)
    assert {loop.model for loop in loops} == set(MODELS)
    assert {loop.way[0] for loop in loops} == {*ENGINE_BUILDERS, "random"}


@pytest.mark.parametrize("first", OFTEN[::10])
def test_a_random_loop_ends_where_averaging_by_hand_does(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", SEEDS[len(OFTEN) :: 10])
def test_many_random_loops_end_where_averaging_by_hand_does(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)
