"""On NCCL, where a collective with a dead rank never ends, a thread ends the survivors and names that rank.

A script that ends by itself keeps its own exit code, however long that takes.
"""

import signal
import time
from pathlib import Path

import pytest
from harness import drain_and_wait, start_ranks, stop_ranks

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import atexit, os, sys, time
import torch.distributed as dist
from offbeat.runtime.comm import liveness
from offbeat.runtime.comm.liveness import DeathWatch, Liveness

exec(sys.argv[4])
world = int(os.environ["WORLD_SIZE"])

class World:
    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.store = dist.FileStore(sys.argv[1], world)
        self.set, self.get = self.store.set, self.store.get

ports = Liveness(World())
ports.find(range(world))
DeathWatch(ports).start()
ports.find(range(world))
print("up", flush=True)
exec(sys.argv[2 if ports.rank == 0 else 3])
"""
HANGS = "time.sleep(600)"
"""As in a driver."""
LONG_SECONDS = 3.5
"""Longer than a survivor has that does nothing about its end."""


class Job:
    """Some ranks, the first of which runs a script of its own."""

    def __init__(self, folder: Path, world: int, first: str, others: str = HANGS, before: str = "") -> None:
        script = folder / "rank.py"
        script.write_text(SCRIPT)
        self.folder = folder
        scripts = (str(folder / "store"), first, others, before)
        self.ranks = start_ranks(world, *scripts, directory=folder, script=script)
        for process in self.ranks:
            assert process.stdout.readline() == b"up\n"
        # Until all watch each other.
        time.sleep(1)

    def end(self) -> list[tuple[int | None, str]]:
        """Exit code and last line of every rank."""
        deadline = time.monotonic() + 60
        codes = [drain_and_wait(process, deadline) for process in self.ranks]
        stop_ranks(self.ranks)
        said = [(self.folder / f"rank{rank}.log").read_text() for rank in range(len(codes))]
        return [(code, text.strip().rpartition("\n")[2]) for code, text in zip(codes, said, strict=True)]


def assert_lost(end: tuple[int | None, str], rank: int, lost: int) -> None:
    code, said = end
    assert code == 1
    assert said.startswith(f"offbeat: WorkerLost: rank {rank} cannot go on: rank {lost} gave no sign of life"), said


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path):
    job = Job(tmp_path, 3, HANGS)
    job.ranks[2].send_signal(signal.SIGKILL)
    began = time.monotonic()
    drain_and_wait(job.ranks[0], began + 30)
    assert time.monotonic() - began < 10
    for rank, end in enumerate(job.end()[:2]):
        assert_lost(end, rank, 2)


def test_a_rank_whose_script_fails_ends_the_others(tmp_path: Path):
    first, failed = Job(tmp_path, 2, HANGS, "time.sleep(1); raise ValueError('no data')").end()
    assert failed == (1, "ValueError: no data")
    assert_lost(first, 0, 1)


def test_ranks_that_end_in_peace_end_nobody(tmp_path: Path):
    assert Job(tmp_path, 2, "time.sleep(5)", "time.sleep(1)").end() == [(0, "")] * 2


@pytest.mark.parametrize(
    "first",
    [
        f"try:\n  {HANGS}\nfinally:\n  time.sleep({LONG_SECONDS})",
        f"sys.excepthook = lambda *_: time.sleep({LONG_SECONDS})\n{HANGS}",
        f"atexit.register(time.sleep, {LONG_SECONDS})\n{HANGS}",
    ],
    ids=["finally", "excepthook", "atexit"],
)
def test_ctrl_c_to_all_also_ends_a_slow_rank_by_the_signal(tmp_path: Path, first: str):
    """For example to save a checkpoint, while the others are gone at once."""
    job = Job(tmp_path, 2, first)
    for process in job.ranks:
        process.send_signal(signal.SIGINT)
    assert [code for code, _ in job.end()] == [-signal.SIGINT] * 2


def test_a_script_that_ends_after_a_rank_has_died_keeps_its_exit_code(tmp_path: Path):
    job = Job(tmp_path, 2, f"atexit.register(time.sleep, {LONG_SECONDS})\nsys.stdin.readline()\nsys.exit(3)")
    job.ranks[1].send_signal(signal.SIGKILL)
    # Rank 0 has seen it by then.
    time.sleep(1)
    job.ranks[0].stdin.close()
    assert job.end()[0] == (3, "")


def test_a_script_that_fails_after_a_rank_has_died_names_it(tmp_path: Path):
    """The death may show as an error of NCCL's, or of a driver that processes share."""
    job = Job(tmp_path, 2, "sys.stdin.readline()\nraise RuntimeError('CUDA error: an illegal memory access')")
    job.ranks[1].send_signal(signal.SIGKILL)
    time.sleep(1)
    job.ranks[0].stdin.close()
    (code, said), _ = job.end()
    assert (code, said.startswith("offbeat: WorkerLost: rank 0 failed: rank 1 gave no sign of life")) == (1, True), said


def test_a_rank_that_hangs_as_it_handles_an_exception_is_ended(tmp_path: Path):
    job = Job(tmp_path, 2, f"liveness.LAST_RESORT_SECONDS = 1\ntry:\n  {HANGS}\nfinally:\n  {HANGS}")
    for process in job.ranks:
        process.send_signal(signal.SIGINT)
    first, second = job.end()
    assert_lost(first, 0, 1)
    assert second[0] == -signal.SIGINT


def test_a_rank_with_many_open_files_notices_a_death(tmp_path: Path):
    files = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
        "files = [open(os.devnull) for _ in range(1100)]"
    )
    job = Job(tmp_path, 2, HANGS, before=files)
    job.ranks[1].send_signal(signal.SIGKILL)
    assert_lost(job.end()[0], 0, 1)
