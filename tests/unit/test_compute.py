"""The seconds that a recorded job's graph says its operators take."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.cost.measured import Costs
from offbeat.profile.compute import compute_scale, measured_graph
from offbeat.profile.lines import Pass, RankTrace, Step
from offbeat.profile.measure import MOST_CORRECTED, corrections

SPAN = 0.01
GRADIENTS = 4
STEPS = 12


def traces(delay: Callable[[int, int, int], float], ranks: int = 2) -> list[RankTrace]:
    """Jobs whose backward completes a gradient every 10 ms, and later by delay(rank, step, gradient)."""
    found = []
    for rank in range(ranks):
        steps = []
        for number in range(STEPS):
            at, spans = float(number), []
            for gradient in range(GRADIENTS):
                end = at + SPAN + delay(rank, number, gradient)
                spans.append((gradient, at, end))
                at = end
            computed = Pass(float(number), float(number), ((0, float(number), float(number)),), tuple(spans), at)
            steps.append(Step(number, float(number), at, (computed,), (), ()))
        names = tuple(f"layer.w{gradient}" for gradient in range(GRADIENTS))
        found.append(
            RankTrace(
                rank=rank, world=ranks, job="ddp", machine="here", modules=("layer",), gradients=names,
                parameters=tuple((name, (4,), "float32") for name in names), path=Path("job", f"rank{rank}"),
                steps=tuple(steps),
            )
        )  # fmt: skip
    return found


def backward_seconds(recorded: list[RankTrace]) -> list[float]:
    graph, _ = measured_graph(recorded, Costs())
    return [operator.seconds for operator in graph.operators if operator.phase == "backward"]


def test_delays_that_strike_one_rank_and_span_after_another_prolong_the_step() -> None:
    """Every step has one delay somewhere, so every step is late, though each span is punctual in most steps."""
    chance = np.random.default_rng(0)
    struck = [(step % 2, chance.integers(GRADIENTS)) for step in range(STEPS)]
    found = backward_seconds(traces(lambda rank, step, gradient: 0.008 * (struck[step] == (rank, gradient))))
    assert sum(found) == pytest.approx(GRADIENTS * SPAN + 0.008)
    assert min(found) >= SPAN - 1e-9


def test_a_rank_that_is_always_slower_keeps_its_factor() -> None:
    recorded = traces(lambda rank, *_: SPAN / 2 * (rank == 2), ranks=3)
    assert compute_scale(recorded) == {2: pytest.approx(1.5)}
    assert backward_seconds(recorded) == pytest.approx([SPAN] * GRADIENTS)


@given(st.floats(1e-3, 1), st.floats(1e-3, 1), st.floats(1e-3, 2))
def test_corrected_costs_take_the_link_as_long_as_the_job_did(fixed: float, moving: float, spent: float) -> None:
    constant, per_byte = corrections(spent, fixed + moving, moving)
    within = moving / MOST_CORRECTED < spent < MOST_CORRECTED * (fixed + moving)
    assert not within or constant * fixed + per_byte * moving == pytest.approx(spent)
    assert per_byte == 1 or spent <= moving or spent >= fixed + moving


def test_a_delay_that_messages_hide_from_each_other_is_not_taken_for_bandwidth() -> None:
    """Fifty messages of 1 MB back to back on a link of 1 GB/s, each of which took 0.2 ms longer alone."""
    constant, per_byte = corrections(0.050, 50 * (0.2e-3 + 1e-3), 0.050)
    assert (constant, per_byte) == (pytest.approx(0), 1)
