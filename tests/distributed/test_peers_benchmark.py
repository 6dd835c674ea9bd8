"""The comparison with other systems runs every variant, says why one does not run, and finds exact ones exact."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers.py"
TORCH_PEERS = {"ddp_default", "ddp_list_growing", "zero_optimizer", "fsdp2", "fsdp2_kept"}
PLANS = {"horovod_plan", "byteps_plan"}
LOSSY = {"ddp_fp16", "ddp_powersgd", "offbeat_fp16"}
OFFBEAT = {"offbeat_auto", "ddp_list_offbeat"}
DEEPSPEED = {f"deepspeed_zero_{stage}" for stage in range(4)}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_peers_run_side_by_side_and_exact_ones_agree() -> None:
    command = [sys.executable, str(PEERS), "--json", "--quick", "--model", "transformer", "--regime", "balanced"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=140)
    assert ended.returncode == 0, ended.stderr[-3000:]
    report = json.loads(ended.stdout)
    assert report["benchmark"] == "peers"
    (row,) = report["rows"]
    variants = row["variants"]
    assert set(row["refused"]) <= DEEPSPEED, row["refused"]
    assert {name for name in variants if name.startswith("ddp_bucket_")} == {"ddp_bucket_1", "ddp_bucket_8"}
    assert set(variants) >= TORCH_PEERS | PLANS | LOSSY | OFFBEAT
    assert {name for name, of in variants.items() if not of["exact"]} == LOSSY
    assert row["max_movement"] > 0
    for name, of in variants.items():
        if of["exact"]:
            assert of["max_difference"] <= 1e-3 * row["max_movement"], name
        elif name != "ddp_powersgd":
            assert of["max_difference"] > 0, f"{name} sends 16 bits and cannot be exact"
    peers = {name: of["median_ms"] for name, of in variants.items() if of["exact"] and "offbeat" not in name}
    assert row["best_exact_peer"] == min(peers, key=peers.__getitem__)
    assert variants[row["best_exact_peer"]]["over_best_exact_peer"] == 1
