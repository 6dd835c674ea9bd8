"""Real jobs recorded from outside and from inside: what the traces hold, and that they can be replayed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from click.testing import Result
from harness import run_script
from typer.testing import CliRunner

from offbeat.cli import app, main
from offbeat.launch import LocalJob, RankEnd, run_python
from offbeat.profile.measure import Profile, load_profile
from offbeat.profile.source import load_recording
from offbeat.profile.traces import read_traces
from offbeat.profile.whatif import what_if
from offbeat.timeline.diagnosis import diagnose

HIDDEN, LAYERS, STEPS, PASSES = 256, 3, 6, 3
BLOCK_BYTES = 4 * (HIDDEN * HIDDEN + HIDDEN)
MODEL = f"""
import contextlib, os, sys
import torch
import torch.distributed as dist
from offbeat.profile import calibrate
calibrate.ATTEMPTS = 1
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear({HIDDEN}, {HIDDEN}) for _ in range({LAYERS})])
data = torch.randn(32, {HIDDEN})
def train(model, optimizer, steps=1000, after=lambda step: None):
    for step in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        after(step)
def accumulate(model, optimizer, no_sync, passes={PASSES}):
    for step in range(1000):
        optimizer.zero_grad()
        for turn in range(passes):
            local = no_sync and turn < passes - 1
            with model.no_sync() if local else contextlib.nullcontext():
                model(data).square().mean().backward()
        optimizer.step()
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)
"""
JOBS = {
    "ddp": """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
train(model, sgd(model))
""",
    "fsdp2": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
train(model, sgd(model))
""",
    "offbeat": """
import offbeat
model, optimizer = offbeat.distribute(model, sgd(model), strategy="wfbp")
train(model, optimizer)
""",
    "ddp accumulating": """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
accumulate(model, sgd(model), no_sync=True)
""",
    "ddp in every pass": """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
accumulate(model, sgd(model), no_sync=False)
""",
    "offbeat accumulating": """
import offbeat
model, optimizer = offbeat.distribute(model, sgd(model), strategy="overlap")
accumulate(model, optimizer, no_sync=True)
""",
    "offbeat in every pass": """
import offbeat
model, optimizer = offbeat.distribute(model, sgd(model), strategy="overlap")
accumulate(model, optimizer, no_sync=False)
""",
    "offbeat in micro-batches": f"""
import offbeat
class WithLoss(torch.nn.Sequential):
    def forward(self, inputs):
        return super().forward(inputs).square().mean()
model = WithLoss(*model)
strategy = offbeat.Strategy(accumulation={2 * PASSES - 2})
model, optimizer = offbeat.distribute(model, sgd(model), strategy=strategy)
train(model, optimizer)
""",
    "one rank of ddp": """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
train(model, sgd(model))
""",
    "other": """
with torch.no_grad():
    model(data)
train(model, sgd(model))
""",
}


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", "import sys; from offbeat.cli import main; sys.exit(main())", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def run_here(arguments: list[str], folder: Path) -> Result:
    """As `run`, without a process for the command itself."""
    with contextlib.chdir(folder), mock.patch.dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"):
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done


def profile_job(job: str, ranks: int, folder: Path, *more: str) -> dict[str, Any]:
    (folder / "train.py").write_text(MODEL + JOBS[job])
    arguments = ["profile", "train.py", "-o", "trace", "-n", str(ranks), "--steps", str(STEPS), "--plain-steps", "4"]
    return json.loads(run_here([*arguments, "--timeout", "120", "--json", *more], folder).stdout)


@pytest.mark.parametrize(("job", "sent"), [("ddp", 1.0), ("offbeat", 1.0), ("fsdp2", 2.5)])
def test_two_ranks_are_recorded_and_replayed(job: str, sent: float, tmp_path: Path) -> None:
    facts = profile_job(job, 2, tmp_path)
    assert (facts["job"], facts["ranks"], facts["steps"]) == (job, 2, STEPS)
    # Per step: all gradients once; FSDP2 gathers halves twice but for the last layer, and scatters all gradients.
    assert facts["communication_bytes"] == pytest.approx(sent * LAYERS * BLOCK_BYTES, rel=0.35)
    profile = load_recording(tmp_path / "trace")
    assert isinstance(profile, Profile)
    assert {v.name for v in profile.graph.variables} == {f"{i}.{p}" for i in range(LAYERS) for p in ("weight", "bias")}
    kinds = {span.kind for span in profile.timeline.spans}
    assert {"forward", "backward", "communication"} <= kinds
    assert diagnose(profile.timeline).communication_seen
    again, _ = what_if(profile, ())
    # How near it comes is measured by benchmarks/replay_accuracy.py; here other tests share the processors.
    steps = np.diff(profile.timeline.marks)
    assert steps.min() / 4 < again.iteration_time < 4 * steps.max()
    assert what_if(profile, ["bandwidth=0.01x"])[0].iteration_time > again.iteration_time
    assert (tmp_path / "trace" / "calibration.json").exists()


ACCUMULATING = (
    ("ddp accumulating", 1),
    ("ddp in every pass", PASSES),
    ("offbeat accumulating", 1),
    ("offbeat in every pass", PASSES),
)


@pytest.mark.slow
@pytest.mark.parametrize(("job", "synchronisations"), ACCUMULATING)
def test_accumulating_jobs_are_recorded_and_replayed(job: str, synchronisations: int, tmp_path: Path) -> None:
    facts = profile_job(job, 2, tmp_path)
    assert (facts["steps"], facts["passes_per_step"]) == (STEPS, PASSES)
    assert facts["communication_bytes"] == pytest.approx(synchronisations * LAYERS * BLOCK_BYTES, rel=0.01)
    profile = load_profile(tmp_path / "trace")
    assert (profile.graph.passes, profile.synchronisations) == (PASSES, synchronisations)
    again, _ = what_if(profile, ())
    # How near it comes is tested with traces that are made (test_whatif); here other tests share the processors.
    steps = np.diff(profile.timeline.marks)
    assert steps.min() / 4 < again.iteration_time < 4 * steps.max()
    assert what_if(profile, ["bandwidth=0.01x"])[0].iteration_time > again.iteration_time
    assert what_if(profile, ["strategy=ddp"])[0].iteration_time > 0


@pytest.mark.slow
def test_micro_batches_of_a_strategy_are_recorded_and_replayed(tmp_path: Path) -> None:
    """The graph is that of the whole batch, which the strategy cuts into parts."""
    facts = profile_job("offbeat in micro-batches", 2, tmp_path)
    assert facts["passes_per_step"] == 1
    assert facts["communication_bytes"] == pytest.approx(LAYERS * BLOCK_BYTES, rel=0.01)
    profile = load_profile(tmp_path / "trace")
    assert profile.strategy.accumulation == 2 * PASSES - 2
    assert profile.step_seconds / 4 < what_if(profile, ())[0].iteration_time < 4 * profile.step_seconds


TWICE = f"""
import offbeat
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.3)
optimizer = sgd(model)
for name in ("one", "two"):
    with offbeat.Recorder(name, calibrate=False) as recorder:
        train(model, optimizer, {STEPS}, lambda step: recorder.step())
    train(model, optimizer, 2)
dist.destroy_process_group()
"""


def test_a_ddp_job_can_be_recorded_again(tmp_path: Path) -> None:
    """DDP keeps its communication hook, so the second recorder must find the first one's."""
    (tmp_path / "train.py").write_text(MODEL + TWICE)
    assert run_script(tmp_path / "train.py", 2) == [0, 0]
    sent = []
    for name in ("one", "two"):
        traces, _ = read_traces(tmp_path / name)
        sent.append([(row.name, row.bytes) for row in traces[0].steps[-2].communication])
    assert len(sent[0]) > 1
    assert sent[1] == sent[0]


def test_the_exit_code_is_that_of_the_rank_that_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [RankEnd(0, 3, "exited", seconds=2.0), RankEnd(1, 7, "exited", seconds=1.0)]
    monkeypatch.setattr(LocalJob, "finish", lambda job, timed_out: ends)
    assert run_python(["-c", ""], 2) == 7


def test_one_rank_by_default(tmp_path: Path) -> None:
    """`offbeat profile train.py` starts one rank, whose collectives say nothing of any link."""
    (tmp_path / "train.py").write_text(MODEL + JOBS["one rank of ddp"])
    done = run_here(["profile", "train.py", "--steps", "3", "--plain-steps", "2", "--json"], tmp_path)
    assert "warning" not in done.stderr
    facts = json.loads(done.stdout)
    assert (facts["ranks"], facts["collectives_per_step"], facts["communication_bytes"]) == (1, 0, 0)
    for command in (["replay", "trace"], ["report", "trace", "-o", "report.html"]):
        assert run_here(command, tmp_path).stderr == ""


@pytest.mark.slow
def test_a_script_of_one_process(tmp_path: Path) -> None:
    facts = profile_job("other", 1, tmp_path)
    assert (facts["job"], facts["ranks"], facts["collectives_per_step"]) == ("other", 1, 0)
    assert load_profile(tmp_path / "trace").step_seconds > 0


@pytest.mark.slow
def test_a_script_may_run_on(tmp_path: Path) -> None:
    JOBS["short"] = "train(model, sgd(model), 14)\nprint('args', sys.argv[1:])\n"
    (tmp_path / "train.py").write_text(MODEL + JOBS.pop("short"))
    arguments = ["profile", "train.py", "--run-on", "--steps", "3", "--plain-steps", "2", "--json", "--", "--lr", "1"]
    done = run(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "args ['--lr', '1']" in done.stderr
    assert json.loads(done.stdout)["steps"] == 3


def test_a_script_that_fails_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.exit(3)\n")
    done = run(["profile", "train.py", "-o", "trace"], tmp_path)
    assert done.returncode == 3
    assert done.stderr == "offbeat: the job ended with exit code 3\n"
    (tmp_path / "train.py").write_text("print('no training here')\n")
    with contextlib.chdir(tmp_path):
        assert main(["profile", "train.py", "-o", "trace"]) == 1
    assert "nothing was recorded, because the script ran 0 steps" in capfd.readouterr().err


def test_a_crash_leaves_readable_traces(tmp_path: Path) -> None:
    """Recorded from inside, by the two lines; rank 1 is killed in mid-run, without any chance to clean up."""
    (tmp_path / "train.py").write_text(
        MODEL
        + """
import offbeat, signal
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
with offbeat.Recorder("trace") as recorder:
    def after(step):
        recorder.step()
        if step == 7 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    train(model, sgd(model), 1000, after)
"""
    )
    survivor, killed = run_script(tmp_path / "train.py", 2)
    assert (survivor, killed) == (1, -signal.SIGKILL)
    traces, notes = read_traces(tmp_path / "trace")
    assert [trace.rank for trace in traces] == [0, 1]
    # Step 0 is cut, because the recorder found the model in it.
    assert [step.number for step in traces[1].steps] == list(range(1, 8))
    assert notes == []
    with (tmp_path / "trace" / "rank1.jsonl").open("ab") as stream:
        stream.write(b'{"step": 8, "begin": 1.0, "for')
    traces, notes = read_traces(tmp_path / "trace")
    assert len(traces[1].steps) == 7
    assert notes == [f"{traces[1].path}: the last line is cut off; its step is left out"]
    assert load_profile(tmp_path / "trace").timeline.ranks == (0, 1)


@pytest.mark.slow
def test_calibrate_writes_a_cluster(tmp_path: Path) -> None:
    from offbeat.cluster import ClusterSpec

    done = run(["calibrate", "-o", "cluster.yaml", "-n", "2", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    spec = ClusterSpec.load(tmp_path / "cluster.yaml")
    assert json.loads(done.stdout)["tables"] == len(spec.tables) == 6
    assert spec.table("all_to_all", ((0, 1),)) is not None
    assert spec.world_size == 2
    assert 1e6 < spec.nodes[0].intra_bandwidth < 1e12
    table = spec.table("all_reduce", ((0, 1),))
    assert table is not None
    assert table.seconds[-1] > table.seconds[0]
