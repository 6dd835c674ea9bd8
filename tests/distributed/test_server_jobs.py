"""Servers that hold no replica, as real processes on gloo; tests/unit/test_servers.py shows more in memory."""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import drain_and_wait, start_ranks, stop_ranks, wait_for_steps
from server_job import STEPS, WORKERS
from typer.testing import CliRunner
from zygote import Forked

from offbeat.cli import app, main
from offbeat.errors import OffbeatError
from offbeat.launch import SERVERS_VARIABLE
from offbeat.profile import attach
from offbeat.profile.measure import load_profile
from offbeat.profile.traces import read_traces
from offbeat.profile.whatif import what_if
from offbeat.simulate import simulate

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


def test_run_starts_servers_that_learn_so_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script names no cluster. Its ranks are forked, which is cheaper than to start Python."""

    def start(script: Sequence[str], ranks: int, variables: Mapping[str, str], timeout: float) -> int:
        return ended(
            start_ranks(ranks, *script[1:], directory=tmp_path, script=SCRIPT, pipes=False, variables=variables)
        )

    monkeypatch.setattr("offbeat.cli.searching.run_python", start)
    case = json.dumps({"what": "exact", "strategy": "auto"})
    assert main(["run", "--servers", "1", "-n", str(WORKERS), "--timeout", "60", str(SCRIPT), case]) == 0
    for rank in range(WORKERS):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["error"] <= 1e-10
        assert "keeps its first plan, fast_servers" in found["said"]
    assert not (tmp_path / "rank2.json").exists()


@pytest.mark.parametrize(
    ("strategy", "server"), [("ps_load_balanced", 0), pytest.param("fast_servers", 2, marks=pytest.mark.slow)]
)
def test_a_job_with_servers_is_recorded_and_replayed(
    tmp_path: Path, strategy: str, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes part where all ranks compare clocks and measure their links, and leaves no trace."""
    case = json.dumps({"what": "exact", "strategy": strategy, "steps": 1000})
    arguments = [str(tmp_path / "trace"), "6", "4", "0", "0", str(SCRIPT), case]
    named = {SERVERS_VARIABLE: str(server)}
    script = Path(attach.__file__)
    ranks = start_ranks(WORKERS + 1, *arguments, directory=tmp_path, script=script, pipes=False, variables=named)
    assert ended(ranks) == 0, [path.read_text()[-2000:] for path in tmp_path.glob("rank*.log")]
    workers = [rank for rank in range(WORKERS + 1) if rank != server]
    traces, notes = read_traces(tmp_path / "trace")
    assert [(trace.rank, trace.world, trace.servers) for trace in traces] == [(r, 3, (server,)) for r in workers]
    assert notes == []
    profile = load_profile(tmp_path / "trace")
    assert profile.cluster.servers == profile.plan.cluster.servers == (server,)
    assert {server} <= {rank for message in profile.plan.messages for rank in message.servers}
    assert simulate(profile.plan, profile.costs).iteration_time > 0
    said = CliRunner().invoke(app, ["replay", str(tmp_path / "trace"), "--what-if", "bandwidth=2x"])
    assert said.exit_code == 0, said.output
    with pytest.raises(OffbeatError, match="predicted with its own ranks only"):
        what_if(profile, ["workers=2"])
    said = CliRunner().invoke(app, ["report", str(tmp_path / "trace"), "-o", str(tmp_path / "report.html")])
    assert said.exit_code == 0, said.output


def test_asynchronous_servers_messages_are_recorded_and_replayed_one_by_one(tmp_path: Path) -> None:
    """What goes to one of two servers takes longer. The plan alone knows this only as time between steps."""
    late = 0.03
    case = json.dumps({"what": "slowed", "late": late})
    arguments = [str(tmp_path / "trace"), "8", "4", "0", "1", str(SCRIPT), case]
    ranks = start_ranks(RANKS, *arguments, directory=tmp_path, script=Path(attach.__file__), pipes=False)
    assert ended(ranks) == 0, [path.read_text()[-2000:] for path in tmp_path.glob("rank*.log")]
    profile = load_profile(tmp_path / "trace")
    assert profile.job == "offbeat"
    # A header and a gradient are late, in this step or while the other worker is served.
    assert profile.step_seconds > late
    predicted, _ = what_if(profile, ())
    assert predicted.iteration_time == pytest.approx(profile.step_seconds, rel=0.1)
    taken = {name: [span.end - span.start for span in predicted.spans if span.name == name] for name in predicted.names}
    for worker in range(WORKERS):
        fast, slow = (taken[f"send {worker}>{server}"] for server in (2, 3))
        assert max(slow) > late > sorted(fast)[len(fast) // 2]
    slower, _ = what_if(profile, ["bandwidth=0.5x", "latency=2x"])
    assert slower.iteration_time > 1.25 * predicted.iteration_time
    with pytest.raises(OffbeatError, match=r"messages from rank to rank.*; add strategy=BUILDER"):
        what_if(profile, ["workers=4"])


def ended(ranks: list[Forked]) -> int:
    """The worst exit code of ranks, which must all end by themselves."""
    deadline = time.monotonic() + SECONDS
    try:
        while any(process.poll() is None for process in ranks):
            assert time.monotonic() < deadline, f"the job has not ended within {SECONDS:.0f} s"
            time.sleep(0.02)
    finally:
        stop_ranks(ranks)
    return max(abs(process.wait()) for process in ranks)


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
