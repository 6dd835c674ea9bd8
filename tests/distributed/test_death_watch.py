"""On NCCL, where a collective with a dead rank never ends, a thread ends the survivors and names that rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
# Rank 0 hangs as in a driver; the others do what they are told once all have met.
SCRIPT = """
import os, sys, time
import torch.distributed as dist
from offbeat.runtime.comm.liveness import DeathWatch, Liveness

world = int(os.environ["WORLD_SIZE"])

class World:
    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.store = dist.FileStore(sys.argv[1], world)
        self.set, self.get = self.store.set, self.store.get

liveness = Liveness(World())
liveness.find(range(world))
DeathWatch(liveness).start()
liveness.find(range(world))
print("up", flush=True)
if os.environ["RANK"] == "0":
    time.sleep(float(sys.argv[2]))
else:
    sys.stdin.readline()
    if sys.argv[3] == "raise":
        raise ValueError("no data")
"""


class Job:
    """Some ranks, the first of which sleeps for so long."""

    def __init__(self, folder: Path, world: int, seconds: float, how: str) -> None:
        script = folder / "rank.py"
        script.write_text(SCRIPT)
        shared = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world)}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, script, folder / "store", str(seconds), how],
                env={**shared, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        for process in self.ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"

    def end(self) -> list[tuple[int, str]]:
        """Exit code and last line of every rank."""
        said = [process.communicate(timeout=60)[1] for process in self.ranks]
        codes = [process.returncode for process in self.ranks]
        return [(code, text.strip().rpartition("\n")[2]) for code, text in zip(codes, said, strict=True)]


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path):
    job = Job(tmp_path, 3, 600, "wait")
    time.sleep(1)
    job.ranks[2].send_signal(signal.SIGKILL)
    began = time.monotonic()
    job.ranks[0].wait(30)
    assert time.monotonic() - began < 10
    for rank, (code, said) in enumerate(job.end()[:2]):
        assert code == 1
        assert said.startswith(f"offbeat: WorkerLost: rank {rank} cannot go on: rank 2 gave no sign of life"), said


def test_a_rank_whose_script_fails_ends_the_others(tmp_path: Path):
    job = Job(tmp_path, 2, 600, "raise")
    job.ranks[1].stdin.write("\n")
    job.ranks[1].stdin.flush()
    first, failed = job.end()
    assert failed == (1, "ValueError: no data")
    assert first[0] == 1
    assert "rank 1 gave no sign of life" in first[1]


def test_ranks_that_end_in_peace_end_nobody(tmp_path: Path):
    job = Job(tmp_path, 2, 4, "return")
    for process in job.ranks[1:]:
        process.stdin.write("\n")
        process.stdin.flush()
    assert job.end() == [(0, "")] * 2
