"""Steps and workspaces measured on a device: what a changed step is predicted to take, what an operator needs."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph, capture
from offbeat.graph.model import BlockTimes, Workspaces
from offbeat.profile import stopwatch
from offbeat.profile.stopwatch import time_laps
from offbeat.profile.whole import StepTimes, time_step
from offbeat.profile.workspace import WorkspaceWatch, with_workspaces

CPU = torch.device("cpu")
LAUNCHED = BlockTimes(
    ("layers.0",),
    seconds={"eager": (1e-3, 2e-3), "recomputed": (1e-3, 3e-3), "compiled": (0.5e-3, 1e-3)},
    host={"eager": (2e-3, 2e-3), "recomputed": (4e-3, 5e-3), "compiled": (0.2e-3, 0.5e-3)},
)


def test_a_change_counts_on_whichever_of_host_and_device_is_slower() -> None:
    launching = StepTimes(seconds=0.021, host=0.020, device=0.010)
    assert launching.changed([(LAUNCHED, "recomputed")]) == pytest.approx(0.021 + 5e-3)
    computing = StepTimes(seconds=0.031, host=0.010, device=0.030)
    assert computing.changed([(LAUNCHED, "recomputed")]) == pytest.approx(0.031 + 1e-3)
    # What recomputing launches fits beside the device's work up to a point.
    even = StepTimes(seconds=0.031, host=0.029, device=0.030)
    assert even.changed([(LAUNCHED, "recomputed")] * 2) == pytest.approx(0.031 + 2 * 5e-3 - 1e-3)
    # Compiling launches less, until the device is what takes longest.
    assert launching.changed([(LAUNCHED, "compiled")] * 2) == pytest.approx(0.021 - 2 * 3.3e-3)
    assert even.changed([(LAUNCHED, "compiled")]) == pytest.approx(0.031 - 1.5e-3)
    assert even.changed([]) == 0.031


def test_on_a_processor_a_block_s_difference_is_added_to_the_step() -> None:
    block = BlockTimes(("layers.0",), {"eager": (1e-3, 2e-3), "recomputed": (1e-3, 4e-3)})
    assert StepTimes(0.05, 0.04, 0.04).changed([(block, "recomputed")] * 3) == pytest.approx(0.05 + 6e-3)


def test_a_block_alone_takes_what_its_slower_part_takes() -> None:
    assert LAUNCHED.taken("eager") == (2e-3, 2e-3)
    assert LAUNCHED.taken("compiled") == (0.5e-3, 1e-3)
    assert LAUNCHED.taken("bf16") == LAUNCHED.taken("eager")
    assert LAUNCHED.factor("compiled", "backward") == pytest.approx(0.5)
    assert LAUNCHED.recomputing() == pytest.approx(2.5)
    # A part of the batch is launched like the whole.
    assert LAUNCHED.share(4).taken("eager") == (2e-3, 2e-3)
    assert LAUNCHED.share(4).seconds["eager"] == (0.25e-3, 0.5e-3)
    graph = capture(nn.Linear(4, 4), torch.zeros(2, 4)).with_blocks([LAUNCHED])
    assert ModelGraph.from_json(graph.to_json()) == graph
    with pytest.raises(OffbeatError, match=r"block 'layers\.0' has no comparable seconds"):
        BlockTimes(("layers.0",), LAUNCHED.seconds, {"eager": (1.0, 1.0)})


def test_calls_are_timed_one_by_one_and_a_step_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rounds in (("WARM_UP", 1), ("LEAST_ROUNDS", 3), ("MOST_ROUNDS", 3)):
        monkeypatch.setattr(stopwatch, name, rounds)

    def step(timed: Any) -> None:
        assert timed(lambda: time.sleep(0.01) or "returned") == "returned"
        time.sleep(0.02)
        timed(lambda: time.sleep(0.03))

    first, second = time_laps(step, CPU)
    assert 0.01 <= first.device == first.host < 0.02
    assert 0.03 <= second.device == second.host
    whole = time_step(step, CPU)
    assert whole.seconds >= 0.06
    assert 0.04 <= whole.device == whole.host < whole.seconds


class Convolutions(nn.Module):
    """Two alike convolutions and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 4, 5, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x))).square().mean()


def test_the_workspace_of_an_operator_is_found_by_what_it_does() -> None:
    class OneByOne:
        """An allocator of which each convolution takes more than the one before, and nothing else anything."""

        calls = 0

        def begin(self) -> None:
            self.calls += 1

        def passed(self) -> int:
            return 100 * self.calls

    model, x = Convolutions(), torch.randn(2, 4, 8, 8)
    graph = capture(model, x)
    watch = WorkspaceWatch(OneByOne())  # type: ignore[arg-type] # it answers the same
    with torch.autograd.set_multithreading_enabled(False), watch:
        model(x).backward()
    found = watch.of(graph)
    forward = [op.name for op in graph.phase("forward") if op.target == "aten.convolution.default"]
    backward = [op.name for op in graph.phase("backward") if op.target == "aten.convolution_backward.default"]
    # Alike ones count as the larger of them; the first convolution's backward makes no gradient of the batch.
    assert [found[name] for name in forward] == [200, 200, 300]
    assert len({found[name] for name in backward}) == 3
    assert min(found[name] for name in backward) > 300


def test_processors_need_no_workspaces() -> None:
    model, x = Convolutions(), torch.randn(2, 4, 8, 8)
    graph = capture(model, x)
    assert with_workspaces(graph, model, x) is graph
    with pytest.raises(OffbeatError, match="workspaces have at least 0 bytes, got -1"):
        Workspaces(0, {"convolution": -1})
