"""Random training loops through the real engine on ranks in memory end where averaging by hand does."""

import pytest
from random_loops import SEEDS, difference, draw_loop, shrink, tolerance

# torch's Adagrad says it once of sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


def check(seed: int) -> None:
    loop = draw_loop(seed)
    found = difference(loop, tolerance(loop))
    if found:
        shorter = shrink(loop, tolerance(loop))
        pytest.fail(f"{found}\nwith {loop}\nand already with {shorter}", pytrace=False)


@pytest.mark.parametrize("first", SEEDS[:200:10])
def test_a_random_loop_ends_where_averaging_by_hand_does(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", SEEDS[200::10])
def test_many_random_loops_end_where_averaging_by_hand_does(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)
