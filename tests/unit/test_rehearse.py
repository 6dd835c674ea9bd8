"""A step is rehearsed without computing it, and priced from what was measured."""

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from rehearsal import measure
from rehearsal.estimate import Timings, estimate
from rehearsal.measure import time_calls, time_shifts
from rehearsal.rehearse import Move, Part, Rehearsal, Shift, rehearse
from torch import nn

from offbeat.cluster import ClusterSpec, CollectiveTable
from offbeat.errors import OffbeatError
from offbeat.graph import capture
from offbeat.runtime.sharded.trace import Program, trace_forward
from offbeat.search.frontier.baselines import data_parallel
from offbeat.search.frontier.find import ModelFrontier, find_frontier
from offbeat.sharding.layout import SUM, WHOLE
from offbeat.sharding.rescheduling import FineMesh

WORLD = 2


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256, bias=False)
        self.second = nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).square().sum()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Wide()


@pytest.fixture(scope="module")
def program(model: nn.Module) -> Program:
    return trace_forward(model, model.forward, (torch.randn(16, 64),), {})


@pytest.fixture(scope="module")
def frontier(model: nn.Module) -> ModelFrontier:
    graph = capture(model, (torch.randn(16, 64),), name="wide")
    return find_frontier(graph, ClusterSpec.homogeneous(nodes=WORLD, devices_per_node=1), engines=("split",))


@pytest.fixture(scope="module")
def parallel(model: nn.Module, program: Program, frontier: ModelFrontier) -> Rehearsal:
    strategy = data_parallel(frontier.prices).strategy
    return rehearse(program, model, strategy, WORLD)


def test_data_parallelism_sums_each_gradient_and_the_loss(parallel: Rehearsal):
    weight = 64 * 256 * 4
    expected = Counter({Move("all_reduce", (0,), float(weight)): 2, Move("all_reduce", (0,), 4.0): 1})
    assert parallel.moves == expected
    assert parallel.variable_bytes == (weight, weight)


def test_sums_are_brought_from_all_ranks_to_all_ranks(parallel: Rehearsal):
    assert {(shift.have, shift.need) for shift in parallel.shifts} == {((SUM,), (WHOLE,))}
    assert {shift.shape for shift in parallel.shifts} == {(256, 64), (64, 256), ()}
    assert all(shift.part.shape == shift.shape for shift in parallel.shifts)


def test_products_are_those_of_half_the_batch(parallel: Rehearsal):
    shapes = {call.args[0].shape for call in parallel.calls if "aten.mm" in str(call.target)}
    assert (8, 64) in shapes
    assert (16, 64) not in shapes


def test_gradients_and_what_backward_needs_are_held(parallel: Rehearsal):
    gradients = sum(parallel.variable_bytes)
    assert gradients <= parallel.step_bytes <= 2.2 * gradients
    assert parallel.peak_bytes(2) - parallel.peak_bytes(0) == 2 * gradients
    assert parallel.constant_bytes == 16 * 64 * 4


def test_split_weights_need_less(model: nn.Module, program: Program, frontier: ModelFrontier, parallel: Rehearsal):
    smallest = rehearse(program, model, frontier.points[0].strategy, WORLD)
    assert sum(smallest.variable_bytes) == sum(parallel.variable_bytes) / WORLD
    assert smallest.peak_bytes(1) < parallel.peak_bytes(1)


def test_a_step_costs_what_its_parts_were_measured_to(parallel: Rehearsal):
    table = CollectiveTable(collective="all_reduce", groups=((0, 1),), sizes_bytes=(4, 65536), seconds=(0.001, 0.004))
    mesh = FineMesh(ClusterSpec.homogeneous(nodes=WORLD, devices_per_node=1).replace(tables=(table,)))
    calls = list(parallel.calls)
    timings = Timings(dict.fromkeys(calls, 0.01), 0.5, 0.25, 1e-6)
    found = estimate(parallel, timings, mesh, slots=1)
    assert found.network_seconds == pytest.approx(0.001 + 2 * 0.004)
    work = 0.01 * sum(parallel.calls.values()) + 0.5 + 2 * 0.25 + 1e-6 * sum(parallel.variable_bytes)
    assert found.compute_seconds == pytest.approx(work)
    assert found.memory_bytes == parallel.peak_bytes(1)
    with pytest.raises(OffbeatError, match="was not measured"):
        estimate(parallel, replace(timings, calls={}), mesh, slots=1)


def test_exchanges_that_were_measured_need_no_table(parallel: Rehearsal):
    mesh = FineMesh(ClusterSpec.homogeneous(nodes=WORLD, devices_per_node=1, bandwidth="1Gbit/s", latency="1ms"))
    calls = dict.fromkeys(parallel.calls, 0.01)
    measured = estimate(parallel, Timings(calls, shifts=dict.fromkeys(parallel.shifts, 0.1)), mesh, slots=1)
    assert measured.network_seconds == pytest.approx(0.3)
    largest = max(parallel.shifts, key=lambda shift: shift.moves[0].bytes)
    partly = estimate(parallel, Timings(calls, shifts={largest: 0.1}), mesh, slots=1)
    lacking = Counter(parallel.shifts)
    count = lacking.pop(largest)
    rest = sum(mesh.seconds("all_reduce", (0,), shift.moves[0].bytes) * n for shift, n in lacking.items())
    assert partly.network_seconds == pytest.approx(0.1 * count + rest)


@dataclass
class SleepingGrid:
    """Exchanges of known duration."""

    sizes: tuple[int, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seen: list[tuple[int, ...]] = field(default_factory=list)

    def box(self, shape, layout):
        return SimpleNamespace(sizes=self.sizes)

    def shift(self, local, shape, layouts, gradients):
        self.seen.append(tuple(local.shape))
        time.sleep(0.02 if layouts[1] == (WHOLE,) else 0.1)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank to wait for."""
    monkeypatch.setattr(measure, "dist", SimpleNamespace(barrier=lambda: None, all_reduce=lambda *_, **__: None,
                                                         ReduceOp=torch.distributed.ReduceOp))  # fmt: skip


def shift_to(layout: int) -> Shift:
    return Shift(Part((4, 4), (4, 1), torch.float32), (8, 4), (0,), (layout,), ())


@pytest.mark.timing
@pytest.mark.usefixtures("alone")
def test_an_exchange_costs_what_it_prolongs_the_work_around_it():
    short, long = time_shifts([shift_to(WHOLE), shift_to(1)], SleepingGrid((4, 4)), rounds=3)
    assert 0.015 < short < 0.08 < long


@pytest.mark.usefixtures("alone")
def test_ranks_with_unequal_parts_make_equally_many_exchanges():
    larger, smaller = SleepingGrid((4, 4)), SleepingGrid((3, 4))
    for grid in (larger, smaller):
        time_shifts([shift_to(WHOLE)], grid, rounds=1)
    assert len(larger.seen) == len(smaller.seen)
    assert set(larger.seen) == {(4, 4)}
    assert set(smaller.seen) == {(3, 4)}


def test_every_call_of_a_step_can_be_measured(parallel: Rehearsal):
    seconds = time_calls(list(parallel.calls), rounds=2)
    assert len(seconds) == len(parallel.calls)
    assert all(0 < value < 10 for value in seconds)
