"""NCCL ranks on one GPU, each an emulated host: they train to the single-process reference, and say who was lost.

All cases of a number of ranks run in one start of them (nccl_worker.py); the tests look at what each case found.
"""

import json
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.emulate import Emulation
from offbeat.emulate.keeper import search_path

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
    pytest.mark.timeout(340),
]

WORKER = Path(__file__).with_name("nccl_worker.py")
SERVER_JOB = Path(__file__).parents[1] / "distributed" / "server_job.py"
RUN_SECONDS = 270.0
START_SECONDS = 120.0
LOST_SECONDS = 30.0
"""By when the survivors of a rank that was killed must have ended."""
KINDS = {
    # How many cases of a kind there are at least.
    "builder": 60,
    "synchronizers": 4,
    "stations": 2,
    "encoder": 15,
    "staleness": 4,
    "checkpoint": 8,
    "fully sharded": 20,
    "split": 80,
    "guest": 40,
    "refusal": 1,
    "batch norm": 1,
    "auto": 1,
}


@contextmanager
def gpu_cluster(ranks: int) -> Iterator[Emulation]:
    """So many hosts on this machine's GPU; where it allows no namespaces they share its loopback."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Emulation(ranks, "10Gbit/s", gpu=True) as cluster:
            yield cluster


def run_cases(ranks: int, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Every rank's row of every case, and what went wrong with the run as a whole."""
    with gpu_cluster(ranks) as cluster:
        command = [str(WORKER), "cases", str(folder)]
        ends = cluster.run(command, timeout=RUN_SECONDS, env={"PYTHONPATH": search_path()}, check=False)
    wrong = [
        f"rank {end.rank} {end.outcome} with {end.returncode} after {end.seconds:.0f} s: {end.stderr[-1500:]}"
        for end in ends
        if end.returncode or end.outcome != "exited"
    ]
    rows: list[dict[str, Any]] = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows += [{"rank": rank, **json.loads(line)} for line in lines]
    return rows, "\n".join(wrong)


@pytest.fixture(scope="module", params=[2, 4])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    return run_cases(request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_one_process_would(ran: tuple[list[dict[str, Any]], str], kind: str):
    rows, wrong = ran
    mine = [row for row in rows if row["kind"] == kind]
    bad = [row for row in mine if not row["good"]]
    worst = max((row.get("distance", 0.0) for row in mine), default=0.0)
    names = {row["name"] for row in mine}
    print(f"{kind}: {len(names)} cases, largest distance {worst:.2e}, {sum(row['seconds'] for row in mine):.0f} s")
    assert not bad, json.dumps(bad[:4], indent=1)
    assert len(names) >= KINDS[kind], f"only {sorted(names)}\n{wrong}"


def test_all_ranks_end_well(ran: tuple[list[dict[str, Any]], str]):
    assert not ran[1]


@pytest.mark.parametrize(
    "case",
    [
        *({"what": "exact", "strategy": name} for name in ("auto", "byteps", "ps_load_balanced", "partitioned_ps")),
        {"what": "relaxed", "staleness": 2},
        {"what": "relaxed", "asynchronous": True},
    ],
)
def test_workers_on_a_gpu_train_beside_servers_on_processors(tmp_path: Path, case: dict[str, Any]):
    """Two workers and two servers, which take their models off the GPU."""
    with gpu_cluster(4) as cluster:
        told = json.dumps({**case, "folder": str(tmp_path)})
        cluster.run([str(SERVER_JOB), told], timeout=120, env={"PYTHONPATH": search_path()})
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for each in found:
        if case["what"] == "exact":
            assert each["error"] <= 1e-10
        else:
            steps = len(each["moved"])
            behind = case.get("staleness", 0)
            low, high = (0.5, steps / 2) if case.get("asynchronous") else (1.0, 0.0)
            for step, moved in enumerate(each["moved"], 1):
                assert max(0, step - behind) * low <= moved <= step * low + high, found


@pytest.mark.parametrize("how", ["overlap", "split"])
def test_survivors_name_the_rank_that_was_killed(tmp_path: Path, how: str):
    with gpu_cluster(2) as cluster:
        port = cluster.new_port()
        logs = [(tmp_path / f"rank{rank}.log").open("wb") for rank in range(2)]
        command = [str(WORKER), "forever", str(tmp_path), how]
        options = {"env": {"PYTHONPATH": search_path()}, "master_port": port}
        ranks = [cluster.popen(rank, command, stdout=log, stderr=log, **options) for rank, log in enumerate(logs)]
        until = time.monotonic() + START_SECONDS
        while not (tmp_path / "steps").exists() or int((tmp_path / "steps").read_text() or 0) < 30:
            assert all(process.poll() is None for process in ranks), said(tmp_path)
            assert time.monotonic() < until, said(tmp_path)
            time.sleep(0.1)
        ranks[1].send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        try:
            code = ranks[0].wait(LOST_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        waited = time.monotonic() - killed_at
        ranks[1].wait(LOST_SECONDS)
        # Whatever the dead rank has left of the service that shares the GPU, a new one works.
        cluster.restart_gpu()
        sums = [end.stdout.strip() for end in cluster.run(["-c", SUM], timeout=120)]
        for log in logs:
            log.close()
    print(f"the survivor ended with {code} after {waited:.1f} s")
    text = said(tmp_path)
    assert code not in (None, 0), text
    assert "rank 1 gave no sign of life" in text
    assert sums == ["3.0", "3.0"]


SUM = (
    "import torch, torch.distributed as dist; torch.cuda.set_device(0); dist.init_process_group('nccl'); "
    "x = torch.full((1,), 1.0 + dist.get_rank(), device='cuda'); dist.all_reduce(x); print(x.item()); "
    "torch.cuda.synchronize(); dist.destroy_process_group()"
)


def said(folder: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in folder.glob("*.log"))
