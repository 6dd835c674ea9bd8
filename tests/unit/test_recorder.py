"""Training loops of one process, recorded: what counts as a step and as a pass of it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import offbeat
from offbeat.profile.measure import load_profile
from offbeat.profile.traces import read_traces

STEPS, PASSES = 4, 3
Loop = Callable[[torch.nn.Module, torch.optim.Optimizer], Iterator[None]]


def loss(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 8)).square().mean()


def accumulating(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for _ in range(PASSES):
        loss(model).backward()
    optimizer.step()
    yield


def told_of_every_pass(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for turn in range(PASSES):
        loss(model).backward()
        if turn == PASSES - 1:
            optimizer.step()
        yield


def two_forwards_for_one_backward(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    (loss(model) + loss(model)).backward()
    optimizer.step()
    yield


def two_backwards_for_one_forward(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    result = loss(model)
    result.backward(retain_graph=True)
    result.backward()
    optimizer.step()
    yield


def without_an_optimizer(model: torch.nn.Module, _: torch.optim.Optimizer) -> Iterator[None]:
    loss(model).backward()
    yield


@pytest.mark.parametrize(
    ("loop", "passes", "calls", "gradients"),
    [
        (accumulating, PASSES, 2, 4),
        (told_of_every_pass, PASSES, 2, 4),
        (two_forwards_for_one_backward, 1, 4, 4),
        (two_backwards_for_one_forward, 1, 2, 8),
        (without_an_optimizer, 1, 2, 4),
    ],
)
def test_steps_and_passes(loop: Loop, passes: int, calls: int, gradients: int, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.Recorder(tmp_path, calibrate=False) as recorder:
        for _ in range(STEPS + 1):
            for _ in loop(model, optimizer):
                recorder.step()
            optimizer.zero_grad()
    (trace,), _ = read_traces(tmp_path)
    # The first step is cut, because the model is found in its forward.
    assert len(trace.steps) == STEPS
    for step in trace.steps:
        assert [(len(part.forward), len(part.backward)) for part in step.passes] == [(calls, gradients)] * passes
    profile = load_profile(tmp_path)
    assert profile.graph.passes == passes
    assert len(profile.graph.variables) == 4
    predicted = offbeat.simulate(offbeat.lower(profile.graph, profile.cluster, profile.strategy), profile.costs)
    assert 0 < predicted.iteration_time < 10 * profile.step_seconds
