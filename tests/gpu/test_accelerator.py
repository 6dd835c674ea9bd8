"""The accelerator benchmark on a GPU, at a small scale: what it writes can be read and replayed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerator_times import AcceleratorTimes, on_device

from offbeat import zoo
from offbeat.cluster import ClusterSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(280)
def test_what_the_benchmark_measures_can_be_read(tmp_path: Path):
    output = tmp_path / "results.json"
    command = [sys.executable, "benchmarks/accelerator.py", "--quick", "--device", "cuda", "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command += ["--models", "gpt2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    raw = json.loads(output.read_text())
    assert not [name for name in raw["failed"] if not name.startswith("op_fusion")], raw["failed"]
    step = AcceleratorTimes.from_dict(raw).step("gpt2", "bf16")
    for times in step.phases.values():
        assert (times.busy_seconds or 0) > 0
        assert (times.host_seconds or 0) > 0
    assert raw["models"]["gpt2"]["bf16"]["memory"]["measured_bytes"] > 0
    graph = zoo.capture("gpt2", raw["scale"])
    node = ClusterSpec.homogeneous(nodes=1, device=raw["device"]).nodes[0]
    timed = on_device(graph, node, step)
    forward = sum(operator.seconds or 0.0 for operator in timed.phase("forward"))
    assert forward == pytest.approx(step.phases["forward"].seconds, rel=0.01)
