"""Jobs leak nothing: not when their plan changes, nor in a short soak; `benchmarks/soak.py` is the long one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run_script

SWITCHES = """
import os, torch, torch.distributed as dist
import offbeat
from offbeat.cluster import ClusterSpec
from offbeat.graph.skeleton import skeleton
from offbeat.plan import lower
from offbeat.runtime import retime
from offbeat.strategy import build_strategy
torch.set_num_threads(1)
# A change of plan measures the link, with messages that take seconds here and decide nothing.
retime.LONG_ENOUGH_SECONDS = 1e-9
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
graph, cluster, rank = skeleton(model), ClusterSpec.local(2), int(os.environ["RANK"])
offbeat.distribute(model, optimizer, "wfbp")
for number in range(4):
    for builder in ("ps_load_balanced", "wfbp"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        strategy = build_strategy(builder, graph, cluster).model_copy(update={"graph": "", "cluster": ""})
        model._offbeat.switch(lower(graph, cluster, strategy, rank=rank))
    print(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), flush=True)
dist.barrier()
"""
SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.timeout(120)
def test_changing_plans_leaves_no_files_or_threads_behind(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SWITCHES)
    codes = run_script(script, 2, seconds=100)
    for rank, code in enumerate(codes):
        said = (tmp_path / f"rank{rank}.log").read_text()
        assert code == 0, said[-2000:]
        counts = [tuple(map(int, line.split())) for line in said.splitlines()]
        assert len(counts) == 4
        assert counts[1:] == [counts[1]] * 3, "files and threads after each pair of switches"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hundred_stressed_steps_with_a_killed_rank_leak_nothing() -> None:
    command = [sys.executable, str(SOAK), "--json", "--steps", "100", "--kills", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["lives"] == 2
    assert len(result["killed"]) == 1
    assert result["bandwidth_changes"] >= 1
    assert result["largest_loss_difference"] <= result["loss_tolerance"]
    for rank in result["growth"]:
        assert (rank["files"], rank["threads"]) == (0, 0), result
        assert rank["rss_bytes"] <= result["memory_tolerance_bytes"], result
    assert result["passed"], result
