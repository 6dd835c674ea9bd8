"""Clocks that were set apart in a real trace are found again."""

import json
from pathlib import Path

import pytest
from harness import run_script
from skewed_clocks import skewed_copy

from offbeat.profile.traces import align, read_traces

JOB = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import offbeat.profile.recorder as recorder
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))), bucket_cap_mb=0.3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with recorder.Recorder(sys.argv[1], calibrate=False) as recording:
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.ones(16, 256)).sum().backward()
        optimizer.step()
        recording.step()
dist.barrier()
"""
CLOCKS = {0: (0.0, 0.0), 1: (0.05, 50e-6), 2: (-0.05, -50e-6)}


@pytest.mark.timing
@pytest.mark.timeout(120)
def test_skew_and_drift_of_a_real_trace_are_recovered(tmp_path: Path) -> None:
    """±50 ms and 50 ppm, to under 200 µs at every step."""
    script = tmp_path / "train.py"
    script.write_text(JOB)
    assert run_script(script, len(CLOCKS), str(tmp_path / "trace")) == [0] * len(CLOCKS)
    true, _ = read_traces(tmp_path / "trace")
    skewed_copy(tmp_path / "trace", tmp_path / "skewed", CLOCKS.__getitem__)
    skewed, _ = read_traces(tmp_path / "skewed")
    zero = skewed[0].steps[0].begin
    apart = [
        max(abs(s.begin - t.begin) for s, t in zip(s.steps, t.steps, strict=True))
        for s, t in zip(skewed, true, strict=True)
    ]
    assert max(apart) > 0.04, "the clocks were set apart"
    aligned, alignment = align(skewed)
    assert alignment is not None
    errors = {
        found.rank: max(abs(f.begin + zero - t.begin) for f, t in zip(found.steps, there.steps, strict=True))
        for found, there in zip(aligned, true, strict=True)
    }
    assert max(errors.values()) < 200e-6, json.dumps(errors)
