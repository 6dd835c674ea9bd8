"""Two NCCL ranks on one GPU train to the single-process reference.

NCCL takes two ranks on one device when each says that it is another host; collectives then go through sockets. That is
right for checking values, not for timing.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")

WORKER = Path(__file__).with_name("nccl_worker.py")


@pytest.mark.timeout(280)
def test_two_ranks_on_one_gpu_match_the_reference(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"host{rank}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
        }
        log = (tmp_path / f"rank{rank}.log").open("w+")
        ranks.append((subprocess.Popen([sys.executable, str(WORKER)], env=environment, stdout=log, stderr=log), log))
    try:
        codes = [process.wait(timeout=270) for process, _ in ranks]
    finally:
        for process, _ in ranks:
            process.kill()
    texts = [Path(log.name).read_text() for _, log in ranks]
    for _, log in ranks:
        log.close()
    assert codes == [0, 0], texts[0][-3000:] + texts[1][-3000:]
    rows = json.loads(next(line for line in texts[0].splitlines() if line.startswith("[")))
    wrong = [row for row in rows if row["error"] > row["limit"]]
    print(f"{len(rows)} cases, largest error {max(row['error'] for row in rows):.2e}")
    assert len(rows) > 60
    assert not wrong
