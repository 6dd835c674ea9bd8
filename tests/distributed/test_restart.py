"""A job that loses a rank is restarted by torchrun and repeats the losses of an unbroken run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import start_ranks

JOB = Path(__file__).with_name("restart_job.py")
STEPS = 6


def run(directory: Path, builder: str, kill_at: int) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=1",
            str(JOB),
            str(directory),
            builder,
            str(STEPS),
            str(kill_at),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def losses(directory: Path) -> list[list[float]]:
    return [json.loads((directory / f"losses{rank}.{STEPS}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(320)
@pytest.mark.parametrize("builder", [pytest.param("overlap", marks=pytest.mark.slow), "partitioned_ps"])
def test_a_relaunched_job_repeats_the_unbroken_one(tmp_path: Path, builder: str):
    (tmp_path / "unbroken").mkdir()
    arguments = [str(tmp_path / "unbroken"), builder, str(STEPS), "-1"]
    ranks = start_ranks(2, *arguments, directory=tmp_path, script=JOB, pipes=False)
    assert [rank.wait() for rank in ranks] == [0, 0]
    broken = run(tmp_path / "broken", builder, kill_at=3)
    assert broken.returncode == 0, broken.stderr[-2000:]
    assert (tmp_path / "broken" / "killed").exists()
    assert losses(tmp_path / "broken") == losses(tmp_path / "unbroken")
