"""Servers that hold no replica, as real processes on gloo; tests/unit/test_servers.py shows more in memory."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import drain_and_wait, start_ranks, stop_ranks, wait_for_steps
from server_job import STEPS, WORKERS

SCRIPT = Path(__file__).with_name("server_job.py")
RANKS = 4
SECONDS = 60.0


def run_job(folder: Path, whole_end: bool = False, **case: Any) -> list[dict[str, Any]]:
    """What each worker found; every rank, also the servers, must end by itself and well."""
    ranks = start_ranks(RANKS, json.dumps(case), directory=folder, script=SCRIPT, pipes=False, whole_end=whole_end)
    deadline = time.monotonic() + SECONDS
    try:
        while any(process.poll() is None for process in ranks):
            assert time.monotonic() < deadline, f"the job has not ended within {SECONDS:.0f} s"
            time.sleep(0.02)
    finally:
        stop_ranks(ranks)
    logs = {rank: (folder / f"rank{rank}.log").read_text()[-2000:] for rank in range(RANKS)}
    assert [process.wait() for process in ranks] == [0] * RANKS, logs
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORKERS)]


@pytest.mark.parametrize(
    ("strategy", "said"), [("auto", "keeps its first plan, fast_servers"), ("ps_load_balanced", "ps_load_balanced")]
)
def test_a_job_with_servers_trains_as_one_process_does(tmp_path: Path, strategy: str, said: str) -> None:
    for found in run_job(tmp_path, whole_end=strategy == "auto", what="exact", strategy=strategy):
        assert found["error"] <= 1e-10
        assert said in found["said"]


def test_a_stale_server_is_behind_by_no_more_than_its_bound(tmp_path: Path) -> None:
    """The gradient is 1 on both replicas, and so is its average: after n steps n − 2 to n of them are applied."""
    for found in run_job(tmp_path, what="relaxed", staleness=2):
        assert all(max(0, step - 2) <= moved <= step for step, moved in enumerate(found["moved"], 1)), found


def test_an_asynchronous_server_answers_with_every_gradient_so_far(tmp_path: Path) -> None:
    """Each replica's gradient counts half: after n steps of its own, a worker sees these and some of the other's."""
    for found in run_job(tmp_path, what="relaxed", asynchronous=True):
        bounds = ((step / WORKERS, (step + STEPS) / WORKERS) for step in range(1, STEPS + 1))
        assert all(low <= moved <= high for (low, high), moved in zip(bounds, found["moved"], strict=True)), found


@pytest.mark.parametrize("builder", ["fast_servers", "ps_load_balanced"])
def test_workers_name_a_server_that_was_lost(tmp_path: Path, builder: str) -> None:
    ranks = start_ranks(RANKS, json.dumps({"what": "forever", "builder": builder}), directory=tmp_path, script=SCRIPT)
    try:
        wait_for_steps(ranks[0], 10, SECONDS)
        os.kill(ranks[3].pid, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        for rank in range(WORKERS):
            assert drain_and_wait(ranks[rank], deadline) not in (None, 0)
            last = (tmp_path / f"rank{rank}.log").read_text().strip().splitlines()[-1]
            assert "WorkerLost" in last
            assert "rank 3 gave no sign of life" in last
    finally:
        stop_ranks(ranks)
