"""Blocks and encoders timed on this device: what is timed, how often, and what is kept."""

import stat
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph, capture
from offbeat.profile import blocks, stopwatch
from offbeat.runtime import fusion
from offbeat.search.passes.encoding import ENCODERS
from offbeat.strategy import Encoder

# Torch hides this warning of its compiler's by itself, but not from filters that make errors of warnings.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CLUSTER = ClusterSpec.homogeneous(nodes=2, devices_per_node=1, bandwidth="10Gbit/s")


class Net(nn.Module):
    """Two convolutions with what follows them, two alike layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        conv = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        self.body = nn.Sequential(*conv, nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).mean((2, 3)).contiguous()
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelGraph, nn.Module, torch.Tensor]:
    """A model, its graph and a batch; an empty cache, and a compiler that is quick."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fusion, "backend", lambda graph, _: graph.forward)
    for name, rounds in (("WARM_UP", 1), ("LEAST_ROUNDS", 2), ("MOST_ROUNDS", 2)):
        monkeypatch.setattr(stopwatch, name, rounds)
    torch.compiler.reset()
    model, x = Net(), torch.randn(4, 3, 8, 8)
    return capture(model, (x,)), model, x


def timed(job: tuple[ModelGraph, nn.Module, torch.Tensor], *ways: Any) -> dict[tuple[str, ...], Any]:
    graph, model, x = job
    found, _ = blocks.time_blocks(graph, model, (x,), ways)
    assert all(op.seconds is not None for op in found.operators if op.phase != "optimizer")
    return {block.modules: block.seconds for block in found.blocks}


def test_regions_are_timed_together_and_alike_ones_once(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    real = blocks._timed

    def counted(key: str, modules: Any, call: Any, ways: Any) -> Any:
        measured.append(len(modules))
        return real(key, modules, call, ways)

    monkeypatch.setattr(blocks, "_timed", counted)
    before = {name: value.clone() for name, value in job[1].state_dict().items()}
    random = torch.get_rng_state()
    found = timed(job, "compiled")
    conv = [("body.0", "body.1", "body.2"), ("body.3", "body.4", "body.5", "body.6")]
    assert set(found) == {*conv, *((f"layers.{i}.0", f"layers.{i}.1") for i in range(2)), ("head",)}
    # The second of the two layers is the first one again.
    assert sorted(measured) == [1, 2, 3, 4]
    assert found["layers.0.0", "layers.0.1"] == found["layers.1.0", "layers.1.1"]
    assert all(set(seconds) == {"eager", "compiled"} for seconds in found.values())
    assert all(torch.equal(value, before[name]) for name, value in job[1].state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_listening_to_the_model_keeps_nothing_for_backward(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            kept = x.clone()
            held.append(weakref.ref(kept))
            context.save_for_backward(kept)
            return x * x

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph = capture(nn.Sequential(*model), torch.zeros(2, 4), lambda out: out.sum())
    still: list[int] = []
    model.register_forward_hook(lambda *_: still.append(sum(each() is not None for each in held)))
    model[1].forward = Square.apply
    blocks.time_blocks(graph, model, torch.zeros(2, 4), ways=(), modules=["0"])
    assert held
    assert still == [0]


def test_times_are_kept_by_what_was_timed(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed(job, "bf16", "recomputed")
    assert all("bf16" in seconds for region, seconds in found.items() if len(region) > 1)
    assert "recomputed" in found["body.0",]

    def again(*_: Any) -> Any:
        raise AssertionError("it was timed before")

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "_run", again)
        assert timed(job, "bf16", "recomputed") == found
    # Another batch is another block.
    graph, model, x = job
    larger = timed((graph, model, torch.cat([x, x])), "bf16", "recomputed")
    assert larger != found


@pytest.mark.parametrize("folder", ["absent", "read-only", "damaged"])
def test_a_cache_that_cannot_be_used_does_no_harm(job: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = blocks.cache_folder().parent
    if folder == "absent":
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    elif folder == "read-only":
        cache.write_text("a file in its place")
        cache.chmod(stat.S_IRUSR)
    else:
        timed(job, "bf16")
        for path in cache.glob("offbeat/blocks/*"):
            path.write_text('{"eager": [1, null], "bf16": 7}')
    assert timed(job, "bf16")


def test_what_cannot_be_compiled_is_noted_and_not_proposed(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("there is no compiler")

    monkeypatch.setattr(fusion, "backend", broken)
    found, notes = blocks.time_blocks(job[0], job[1], job[2], ("compiled",))
    assert "could not be timed" in notes[0]
    assert "there is no compiler" in notes[0]
    assert not any("compiled" in block.seconds for block in found.blocks)
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(OffbeatError, match="the model is on the meta device"):
        blocks.time_blocks(job[0], empty, job[2])


def test_optimize_compiles_and_casts_what_it_has_timed(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the measured seconds, whatever they are: here compiling saves a third, and autocast half."""
    share = {"eager": 1.0, "compiled": 2 / 3, "bf16": 0.5, "compiled bf16": 0.25, "recomputed": 1.5}
    monkeypatch.setattr(
        blocks, "_timed", lambda k, m, c, ways: ({w: (stopwatch.Lap(*(share[w],) * 2),) * 2 for w in ways}, {})
    )
    graph, model, x = job
    assert offbeat.optimize(graph, CLUSTER, rounds=0).fusion == ()
    given: dict[str, Any] = {"model": model, "example_inputs": (x,), "rounds": 0}
    found = offbeat.optimize(graph, CLUSTER, **given)
    assert ("body.0", "body.1", "body.2") in found.fusion
    assert len(found.fusion) == 5
    assert found.precision is None
    assert offbeat.optimize(graph, CLUSTER, allow=("amp",), **given).precision == "bf16"
    with pytest.raises(OffbeatError, match="timing a model needs its example_inputs"):
        offbeat.optimize(graph, CLUSTER, model=model)


def test_every_encoder_is_timed() -> None:
    encoders: list[Encoder] = list(ENCODERS.values())
    seconds = blocks.time_encoders(encoders, torch.device("cpu"), world=2)
    assert seconds.keys() == ENCODERS.keys()
    assert all(1e-13 < each < 1e-5 for each in seconds.values())
