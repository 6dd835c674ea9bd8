"""torch.profiler's traces of DDP are enough to recommend buckets, and a strategy where the model is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_kineto import event, record_job

import offbeat
from offbeat.api import resolve_strategy
from offbeat.cli.app import main
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError, StrategyError
from offbeat.graph.skeleton import skeleton
from offbeat.profile.ddp_trace import load_ddp_profile
from offbeat.profile.whatif import what_if
from offbeat.strategy import Recipe, Strategy, load_strategy

SHAPES = [[100], [100, 5000], [5000], [5000, 200]]
"""Of the gradients in the order in which backward completes them; the first two share a bucket, and the others do."""
KERNEL, STEP = 1000.0, 12_000.0
"""Microseconds."""
LATE = 3000.0
"""The device runs so much later than the host launches."""


def build_model() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    return model, (torch.randn(4, 64),)


def cuda_ddp_trace(rank: int, *, shapes: bool = True, gradients: bool = True, world: int = 2) -> dict[str, Any]:
    """Steps of two forward kernels, one backward kernel per gradient, two all-reduces and an update."""
    events: list[Any] = []
    for step in range(4):
        begin, number = STEP * step, 1000 * step
        at = begin + LATE

        def kernel(name: str, host: float, category: str, operator: str, extra: float = KERNEL) -> None:
            nonlocal number, at
            number += 1
            outer = [event("cpu_op", operator, host, 20, tid=2)] if operator else []
            events.extend([*outer, event("cpu_op", "aten::mm", host + 1, 10, tid=2, **{"External id": number})])
            events.append(event(category, name, at, extra, tid=7, stream=7, **{"External id": number}))
            at += extra

        events.append(event("user_annotation", f"ProfilerStep#{step}", begin, STEP))
        for turn in range(2):
            kernel("gemm", begin + 100 * turn, "kernel", "")
        for place, shape in enumerate(SHAPES):
            host = begin + 300 + 100 * place
            kernel("gemm", host, "kernel", "autograd::engine::evaluate_function: MmBackward0")
            known = {"Input Dims": [shape], "Input type": ["c10::BFloat16"]} if shapes else {}
            if gradients:
                events.append(event("cpu_op", "torch::autograd::AccumulateGrad", host + 50, 5, tid=2, **known))
            if place % 2:
                elements = sum(torch.Size(each).numel() for each in SHAPES[place - 1 : place + 1])
                asked = {"External id": number + 500}
                events.append(event("cpu_op", "record_param_comms", host + 60, 5, tid=2, **asked))
                about = {"stream": 20, "Collective name": "allreduce", "In msg nelems": elements, "dtype": "BFloat16"}
                length = 100 + elements / 500
                events.append(event("kernel", "ncclDevKernel_AllReduce", at, length, tid=20, **about, **asked))
        events.append(event("user_annotation", "Optimizer.step#AdamW.step", begin + 900, 50))
        at += 2000
        kernel("adam", begin + 910, "kernel", "", extra=200.0)
    info = {"backend": "nccl", "rank": rank, "world_size": world}
    return {"distributedInfo": info, "host_name": "one", "baseTimeNanoseconds": 10**18, "traceEvents": events}


def write(folder: Path, ranks: int = 2, **options: Any) -> Path:
    for rank in range(ranks):
        (folder / f"rank{rank}.json").write_text(json.dumps(cuda_ddp_trace(rank, **options)))
    return folder


def test_gradients_of_a_gpu_are_complete_when_their_kernels_have_ended(tmp_path: Path) -> None:
    profile, named = load_ddp_profile(write(tmp_path))
    assert not named
    ready = profile.graph.gradient_order
    assert [list(variable.shape) for variable in ready] == SHAPES
    assert {variable.dtype for variable in ready} == {"bfloat16"}
    seconds = {operator.name: operator.seconds for operator in profile.graph.operators}
    for place in range(len(SHAPES)):
        assert seconds[f"backward.{place}"] == pytest.approx(KERNEL * 1e-6, rel=1e-6)
    assert sum(seconds[f"forward.{place}"] or 0.0 for place in range(4)) == pytest.approx(2 * KERNEL * 1e-6, rel=1e-6)
    groups = [profile.strategy.variables[variable.name].shards[0].group for variable in ready]
    assert groups == [0, 0, 1, 1]
    fit = profile.costs.collectives["all_reduce", 2]
    assert fit.overhead_seconds == pytest.approx(1e-4, rel=0.1)
    assert fit.seconds_per_byte == pytest.approx(1e-9, rel=0.1)
    assert [node.devices for node in profile.cluster.nodes] == [2]
    assert (profile.graph.optimizer, profile.graph.optimizer_slots) == ("AdamW", 2)
    # Compute, the all-reduce that is left at its end, the pause of the trace before its update, and that.
    assert what_if(profile, ())[0].iteration_time == pytest.approx(profile.step_seconds, rel=0.15)


@pytest.mark.parametrize(
    ("options", "variables", "note"),
    [
        ({"shapes": False}, 4, "all gradients of a bucket are assumed to have equal size"),
        ({"gradients": False}, 2, "each bucket counts as one variable"),
    ],
)
def test_what_traces_do_not_tell_is_assumed_and_said(
    options: dict[str, Any], variables: int, note: str, tmp_path: Path
) -> None:
    profile, _ = load_ddp_profile(write(tmp_path, **options))
    assert len(profile.graph.variables) == variables
    assert sum(variable.bytes for variable in profile.graph.variables) == 2 * sum(
        torch.Size(shape).numel() for shape in SHAPES
    )
    assert any(note in each for each in profile.timeline.notes)


def test_one_rank_stands_for_all(tmp_path: Path) -> None:
    profile, _ = load_ddp_profile(write(tmp_path, ranks=1, world=8))
    assert profile.cluster.world_size == 8
    assert "1 of 8 ranks have a trace; the others are assumed to be alike" in profile.timeline.notes
    assert profile.costs.collectives["all_reduce", 8].seconds_per_byte == pytest.approx(1e-9, rel=0.1)
    write(tmp_path, ranks=1, world=1)
    with pytest.raises(OffbeatError, match="pass --workers"):
        load_ddp_profile(tmp_path)
    assert load_ddp_profile(tmp_path, workers=4)[0].cluster.world_size == 4


def test_a_trace_without_ddp_is_refused(tmp_path: Path) -> None:
    document = cuda_ddp_trace(0)
    document["traceEvents"] = [each for each in document["traceEvents"] if "nccl" not in each["name"]]
    (tmp_path / "rank0.json").write_text(json.dumps(document))
    with pytest.raises(OffbeatError, match=r"rank0.json: no step of DDP"):
        load_ddp_profile(tmp_path)


def test_real_traces_are_optimized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the model a builder with its options, which any model can take; with it a strategy by names."""
    job, found = record_job(tmp_path), tmp_path / "strategy"
    assert main(["optimize", str(job), "-o", str(found), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["step_seconds"] <= shown["next_builder_seconds"] * (1 + 1e-9), "or as long, but for rounding"
    assert any("only a builder is recommended" in note for note in shown["notes"])
    model, _ = build_model()
    chosen = resolve_strategy(str(found), skeleton(model), ClusterSpec.local(2))
    assert set(chosen.variables) == {name for name, _ in model.named_parameters()}
    named = ["--model", "test_ddp_trace:build_model", "--time-limit", "0.5"]
    assert main(["optimize", str(job), *named, "-o", str(found), "--json"]) == 0
    assert "recipe" not in json.loads(capsys.readouterr().out)
    strategy = Strategy.load(found)
    # A strategy of factors needs to know which variables are weights of dense layers.
    captured = offbeat.capture(*build_model())
    offbeat.lower(captured, ClusterSpec.local(2), strategy.model_copy(update={"graph": "", "cluster": ""}))
    assert set(strategy.variables) == {name for name, _ in model.named_parameters()}
    graph = load_ddp_profile(job, model=captured)[0].graph
    assert (graph.optimizer, graph.optimizer_slots) == ("SGD", 0)
    # The ReLU's output, which backward reads; the batch is no activation.
    assert sum(operator.activation_bytes for operator in graph.operators) == 4 * 4 * 64


def test_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", str(write(tmp_path)), "--model", "test_ddp_trace:build_model"]) == 1
    assert "--model: the trace has one more gradient of shape" in capsys.readouterr().err


def test_a_recipe_names_a_builder_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    Recipe(builder="overlap", options={"bucket": 2**20}).save(path)
    assert load_strategy(path) == Recipe(builder="overlap", options={"bucket": 2**20})
    path.write_text('{"builder": "no"}')
    with pytest.raises(StrategyError, match="unknown builder 'no'"):
        load_strategy(path)
    path.write_text('{"builder": "ddp", "option": {}}')
    with pytest.raises(StrategyError, match="option: no such field"):
        load_strategy(path)
