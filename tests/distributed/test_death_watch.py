"""On NCCL, where a collective with a dead rank never ends, a thread ends the survivors and names that rank."""

import signal
import time
from pathlib import Path

import pytest
from harness import drain_and_wait, start_ranks, stop_ranks

pytestmark = pytest.mark.timeout(120)

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
        self.folder = folder
        self.ranks = start_ranks(world, str(folder / "store"), str(seconds), how, directory=folder, script=script)
        for process in self.ranks:
            assert process.stdout.readline() == b"up\n"

    def tell(self, rank: int) -> None:
        self.ranks[rank].stdin.write(b"\n")
        self.ranks[rank].stdin.flush()

    def end(self) -> list[tuple[int | None, str]]:
        """Exit code and last line of every rank."""
        deadline = time.monotonic() + 60
        codes = [drain_and_wait(process, deadline) for process in self.ranks]
        stop_ranks(self.ranks)
        said = [(self.folder / f"rank{rank}.log").read_text() for rank in range(len(codes))]
        return [(code, text.strip().rpartition("\n")[2]) for code, text in zip(codes, said, strict=True)]


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path):
    job = Job(tmp_path, 3, 600, "wait")
    time.sleep(1)
    job.ranks[2].send_signal(signal.SIGKILL)
    began = time.monotonic()
    drain_and_wait(job.ranks[0], began + 30)
    assert time.monotonic() - began < 10
    for rank, (code, said) in enumerate(job.end()[:2]):
        assert code == 1
        assert said.startswith(f"offbeat: WorkerLost: rank {rank} cannot go on: rank 2 gave no sign of life"), said


def test_a_rank_whose_script_fails_ends_the_others(tmp_path: Path):
    job = Job(tmp_path, 2, 600, "raise")
    job.tell(1)
    first, failed = job.end()
    assert failed == (1, "ValueError: no data")
    assert first[0] == 1
    assert "rank 1 gave no sign of life" in first[1]


def test_ranks_that_end_in_peace_end_nobody(tmp_path: Path):
    job = Job(tmp_path, 2, 4, "return")
    job.tell(1)
    assert job.end() == [(0, "")] * 2
