"""How much communication slows computing down is found in what was recorded."""

import time
from pathlib import Path

import numpy as np
import pytest

from offbeat.cost.measured import Costs
from offbeat.cpu_steal import ProcessorTime
from offbeat.profile.compute import COLLECTIVE_BYTES, MOST_DELAYED, fit_interference, own_processor_seconds
from offbeat.profile.lines import Collective, Pass, RankTrace, Step


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


SENT = 10**6
"""Bytes of a message, and what each of two ranks sends of it."""


def trace(delayed: float | None) -> RankTrace:
    """Each step computes for 40 ms. Two messages are under way, one of them beside computing for half of its time."""
    steps = []
    for number in range(5):
        at = 0.1 * number
        rows = tuple(
            Collective(task, "all_reduce", f"m{task}", SENT, 2, begin, begin, begin + 0.02)
            for task, begin in ((0, at + 0.01), (1, at + 0.03))
        )
        computed = Pass(at, at, (), ((0, at, at + 0.04),), at + 0.04)
        processor = None if delayed is None else ProcessorTime(0.01, delayed)
        steps.append(Step(number, at, at + 0.06, (computed,), (), rows, processor=processor))
    return RankTrace(
        rank=0, world=2, job="ddp", machine="here", modules=(), parameters=(), gradients=(), path=Path("rank0"),
        steps=tuple(steps),
    )  # fmt: skip


def test_what_a_job_waits_for_a_processor_is_shared_out_over_its_messages() -> None:
    """Computing waited for 1.5 ms beside one and a half messages, so a message takes 1 ms from it."""
    found = own_processor_seconds([trace(1.5e-3)], Costs(interference=0.2))
    assert found is not None
    assert found.processor_seconds + SENT * found.processor_seconds_per_byte == pytest.approx(1e-3)
    assert found.processor_seconds == pytest.approx(COLLECTIVE_BYTES * found.processor_seconds_per_byte)
    assert found.interference == 0.0


def test_other_processes_do_not_make_messages_expensive() -> None:
    """The backend's threads have worked for 10 ms in each step, whatever computing waited for."""
    usual, busy = (own_processor_seconds([trace(delayed)], Costs()) for delayed in (MOST_DELAYED * 0.01, 0.5))
    assert usual is not None
    assert busy == usual


@pytest.mark.parametrize("delayed", [None, 0.0], ids=["an old trace", "a kernel that does not tell"])
def test_where_a_trace_does_not_tell_nothing_is_said(delayed: float | None) -> None:
    assert own_processor_seconds([trace(delayed)], Costs()) is None


def test_time_on_the_processor_is_this_process_and_thread() -> None:
    before, end = ProcessorTime.now(), time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    passed = ProcessorTime.now().since(before)
    assert 0.0 <= passed.helpers < 0.05
    assert passed.delayed >= 0.0
