"""A job ends as its script does: with its exit code, without an abort, and without a rank that stays."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from exit_job import PATIENCE_SECONDS
from exits import JOB, Ended, run_job
from harness import run_script

RUNS, AT_ONCE = int(os.environ.get("OFFBEAT_EXITS", "200")), 25
"""Of each way to end, in the slow tests, and in one of them."""
PARTS = [range(first, min(first + AT_ONCE, RUNS)) for first in range(0, RUNS, AT_ONCE)]
CODES = {
    "return": 0,
    "exit": 3,
    "exit_inside": 3,
    "destroy": 0,
    "destroy_read": 0,
    "read": 0,
    "read_on_one": 0,
    "os_exit": 4,
    "raise_both": 1,
    "raise_forward_both": 1,
    "raise_backward_both": 1,
    "raise": 1,
    "raise_forward": 1,
    "raise_backward": 1,
    "workers": 0,
}
"""Ways to end, each with the exit code of both ranks."""
SOON_SECONDS = 40.0
"""Within which a rank ends when it has lost the other, on a busy machine; collectives wait for 60."""


def assert_clean(ended: list[Ended], codes: list[int | None]) -> None:
    for rank, end in enumerate(ended):
        assert end.code == codes[rank], (
            f"rank {rank} ended with {end.code} after {end.seconds:.1f} s: {end.said[-2000:]}"
        )
        for word in ("terminate called", "what():", "Fatal Python error", "Exception ignored", "Exception in thread"):
            assert word not in end.said, end.said[-2000:]


def assert_names_the_other(end: Ended, watch: str = "") -> None:
    stops = "(was waiting for .*|cannot go on)" if watch else "was waiting for .*"
    # Not always the last line: torch warns of what a failed step has left in flight.
    assert re.search(f"WorkerLost: rank 0 {stops}: rank 1 gave no sign of life", end.said), end.said[-2000:]


def end_by_itself(folder: Path, name: str, steps: int, ending: str, inside: str = "", watch: str = "") -> None:
    inside = str(folder / "trace") if inside == "recorder" else inside
    ended = run_job(folder, name, str(steps), ending, inside, watch)
    # A rank that is behind may find the other gone before it ends itself: the rank of the job's store, if that leaves
    # without a word, or its server, which is rank 0 or either rank where both serve.
    served = name.startswith("asynchronous") and ending.endswith("_both")
    behind = [(served or ending == "os_exit") and "WorkerLost" in end.said for end in ended]
    assert not all(behind)
    assert not behind[0] or name == "asynchronous_both"
    assert_clean(ended, [1 if late else CODES[ending] for late in behind])
    if ending.startswith("raise"):
        assert "Planned: the script failed" in ended[1].said or behind[1]
        if not ending.endswith("_both"):
            assert_names_the_other(ended[0], watch)


def end_by_signal(folder: Path, name: str, number: int, ranks: tuple[int, ...], delay: float, watch: str = "") -> None:
    blows = [(rank, number) for rank in ranks]
    ended = run_job(folder, name, "1", "signal", "", watch, after="step 3", signals=blows, delay=delay)
    assert_clean(ended, [-number if rank in ranks else 1 for rank in range(2)])
    assert max(end.seconds for end in ended) < SOON_SECONDS
    if ranks == (1,):
        assert_names_the_other(ended[0], watch)


@pytest.mark.parametrize(
    ("name", "steps", "ending", "inside", "watch"),
    [
        ("overlap", 6, "return", "", ""),
        ("auto", 10, "destroy", "", "watch"),
        ("stale", 3, "exit_inside", "recorder", ""),
        pytest.param("sharded", 3, "destroy_read", "monitor", "", marks=pytest.mark.slow),
        pytest.param("ps_load_balanced", 3, "read_on_one", "", "", marks=pytest.mark.slow),
        ("asynchronous_both", 1, "return", "", ""),
        ("asynchronous", 3, "raise", "", ""),
        ("overlap_batchnorm", 3, "raise_backward", "recorder", "watch"),
        ("split", 3, "return", "", ""),
        ("split", 3, "raise_forward", "", ""),
        pytest.param("overlap", 3, "raise_backward_both", "", "", marks=pytest.mark.slow),
    ],
)
def test_a_job_ends_as_its_script_does(
    tmp_path: Path, name: str, steps: int, ending: str, inside: str, watch: str
) -> None:
    end_by_itself(tmp_path, name, steps, ending, inside, watch)


@pytest.mark.parametrize(
    ("name", "number", "ranks", "watch"),
    [
        ("overlap", signal.SIGINT, (0, 1), ""),
        ("sharded", signal.SIGINT, (0, 1), "watch"),
        ("asynchronous_both", signal.SIGINT, (1,), ""),
        ("overlap", signal.SIGTERM, (1,), "watch"),
        ("split", signal.SIGKILL, (1,), ""),
        ("split", signal.SIGKILL, (1,), "watch"),
        ("split", signal.SIGINT, (0, 1), ""),
        pytest.param("ps_load_balanced", signal.SIGTERM, (1,), "", marks=pytest.mark.slow),
    ],
)
def test_a_job_ends_by_signals(tmp_path: Path, name: str, number: int, ranks: tuple[int, ...], watch: str) -> None:
    end_by_signal(tmp_path, name, number, ranks, 0.05, watch)


def test_ctrl_c_ends_a_job_by_the_signal_whatever_torch_imports_at_exit(tmp_path: Path) -> None:
    """Torch's compiler, which optimizers load, imports tabulate."""
    (tmp_path / "tabulate.py").write_text(
        "import collections\nprint('imported', flush=True)\nLine = collections.namedtuple('Line', 'begin')\n"
        "def tabulate(*_, **__):\n    return ''\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nsys.path.insert(0, os.getcwd())\nfrom offbeat.runtime import lifetime\n"
        "runtime = lifetime.Callbacks()\nlifetime.close_at_exit(runtime)\nraise KeyboardInterrupt\n"
    )
    assert run_script(script, 1) == [-signal.SIGINT]
    assert "imported" in (tmp_path / "rank0.log").read_text()


@pytest.mark.parametrize("name", ["overlap", pytest.param("asynchronous_both", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_does_not_keep_the_other_from_ending(tmp_path: Path, name: str) -> None:
    first, _ = run_job(tmp_path, name, "3", "hang", after="step 3", leave=(1,))
    assert_clean([first], [0])
    assert first.seconds < PATIENCE_SECONDS + SOON_SECONDS


def test_ctrl_c_ends_a_rank_that_waits_for_one_that_hangs(tmp_path: Path) -> None:
    # By the time of the second signal rank 0 stands in a wait.
    first, _ = run_job(
        tmp_path,
        "overlap",
        "1",
        "signal",
        after="step 3",
        signals=[(1, signal.SIGSTOP), (0, signal.SIGINT)],
        delay=1.0,
        leave=(1,),
    )
    assert_clean([first], [-signal.SIGINT])
    assert first.seconds < SOON_SECONDS


def test_torchrun_sees_no_failed_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB)]
    ended = subprocess.run(
        [*command, "auto", "3", "return"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "terminate called" not in ended.stderr


STRATEGIES = (
    "overlap",
    "ddp",
    "ps_load_balanced",
    "sharded",
    "auto",
    "stale",
    "stale_server",
    "asynchronous",
    "asynchronous_both",
    "overlap_batchnorm",
)


def strategies(watch: str) -> list[str]:
    """NCCL, and so the watch, has no asynchronous servers."""
    return [name for name in STRATEGIES if not (watch and name.startswith("asynchronous"))]


STEPS = (1, 3, 6, 10, 16)
"""The tuner records from step 8 on, and its first trial begins with step 14."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("watch", ["", "watch"])
@pytest.mark.parametrize("ending", CODES)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_every_way_to_end_many_times(tmp_path: Path, ending: str, watch: str, part: range) -> None:
    jobs = list(itertools.product(strategies(watch), STEPS, ("", "recorder", "monitor")))
    random.Random(ending).shuffle(jobs)
    for run in part:
        name, steps, inside = jobs[run % len(jobs)]
        end_by_itself(tmp_path / str(run), name, steps, ending, inside, watch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("watch", ["", "watch"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_every_signal_many_times(tmp_path: Path, number: int, ranks: tuple[int, ...], watch: str, part: range) -> None:
    names = strategies(watch)
    for run in part:
        delay = random.Random(run).uniform(0, 0.2)
        end_by_signal(tmp_path / str(run), names[run % len(names)], number, ranks, delay, watch)
