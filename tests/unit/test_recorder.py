"""Training loops of one process, recorded: what counts as a step and as a pass of it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import offbeat
from offbeat.cluster import ClusterSpec
from offbeat.cost.memory import MemoryEstimate, peak_memory
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.profile.measure import load_profile
from offbeat.profile.recorder import MemoryRecorder
from offbeat.profile.traces import read_traces
from offbeat.search.optimize import search
from offbeat.strategy import build_strategy

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


def record(folder: Path, model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> ModelGraph:
    with offbeat.Recorder(folder, calibrate=False) as recorder:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            recorder.step()
    return load_profile(folder).graph


def peak(graph: ModelGraph) -> MemoryEstimate:
    one = ClusterSpec.local(1)
    return peak_memory(offbeat.lower(graph, one, build_strategy("ddp", graph, one)), 0, runtime="torch")


def convolutions() -> nn.Module:
    first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
    norms = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
    return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU(), nn.Flatten(), nn.Linear(4096, 10))


@pytest.mark.parametrize(
    ("model", "batch", "optimizer"),
    [
        (nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()), torch.ones(512, 64), "AdamW"),
        (convolutions(), torch.ones(16, 3, 16, 16), "SGD"),
        (nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0), torch.ones(8, 64, 128), "Adam"),
    ],
)
def test_a_recording_tells_the_peak_of_memory(
    model: nn.Module, batch: torch.Tensor, optimizer: str, tmp_path: Path
) -> None:
    """As well as a capture of the same step, which sees every operator."""
    options = {"lr": 0.1, "momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(model.parameters(), **options)
    recorded = record(tmp_path, model, batch, made)
    captured = offbeat.capture(model, (batch,), loss_fn=lambda out: out.square().mean(), optimizer=made)
    assert (recorded.optimizer, recorded.optimizer_slots) == (optimizer, captured.optimizer_slots)
    found, expected = peak(recorded), peak(captured)
    for kind in ("weights", "optimizer_state", "inputs"):
        assert getattr(found, kind) == getattr(expected, kind)
    assert found.total == pytest.approx(expected.total, rel=0.1)


def test_a_memory_limit_counts_what_a_recording_held(tmp_path: Path) -> None:
    """Nothing but the activations is too much; recomputing a layer makes room."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    graph = record(tmp_path, model, torch.ones(2048, 64), torch.optim.SGD(model.parameters(), lr=0.1))
    one, needed = load_profile(tmp_path).cluster, peak(graph).total
    assert one.nodes[0].device == "cpu", "so that no workspace of a GPU's libraries counts"
    assert sum(operator.activation_bytes for operator in graph.operators) > 0.5 * needed
    best = search(graph, one, memory_limit=0.85 * needed, rounds=0)
    assert best.strategy.recompute or best.strategy.accumulation > 1
    with pytest.raises(OffbeatError, match="is not enough"):
        search(graph, one, memory_limit=0.02 * needed, rounds=0)


def test_sparse_gradients_are_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.Linear(8, 8))
    graph = record(tmp_path, model, torch.arange(20).reshape(4, 5), torch.optim.SGD(model.parameters(), lr=0.1))
    assert graph.signature == offbeat.capture(model, (torch.zeros(4, 5, dtype=torch.int64),)).signature
    assert graph.variable("0.weight").sparse_rows == 20


def test_a_capture_is_not_taken_for_training() -> None:
    model = torch.nn.Linear(4, 2)
    recorder = MemoryRecorder()
    with recorder:
        offbeat.capture(model, torch.ones(3, 4))
        assert not recorder.kind
        model(torch.ones(3, 4)).sum().backward()
        recorder.step()
    assert recorder.kind == "other"
