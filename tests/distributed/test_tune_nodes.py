"""Trials on several machines: node 0 leads, the others follow, and whatever happens on one is known on all."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.launch import free_port
from offbeat.search.auto.nodes import LeadNode, Meeting, follow
from offbeat.search.auto.trials import TASK, TrialOptions, TrialRunner
from offbeat.strategy import build_strategy

HERE = Path(__file__).parent
SHORT = TrialOptions(warm_up=2, timed=3, timeout_seconds=60, batch=4)
FOLLOWER = """
import sys
from offbeat.errors import OffbeatError
from offbeat.search.auto.nodes import Meeting, follow
try:
    print(follow(Meeting(2, 1, "127.0.0.1", int(sys.argv[1]), 30), 2))
except OffbeatError as error:
    sys.exit(str(error))
"""
SAYS = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')))"

pytestmark = pytest.mark.timeout(240)


def start_follower(port: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", FOLLOWER, str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def port() -> int:
    return free_port("127.0.0.1")


def test_every_node_starts_its_ranks_and_a_failure_on_one_ends_all(port, tmp_path):
    follower = start_follower(port)
    task = tmp_path / "task.json"
    task.write_text("what to do")
    with LeadNode(Meeting(2, 0, "127.0.0.1", port, 30), 2) as lead:
        assert lead.world_size == 4
        assert lead.cluster_spec().world_size == 4
        ends = lead.run(["-c", SAYS], timeout=30)
        assert [end.stderr.split() for end in ends] == [[f"{r}", f"{r % 2}", "4", "2"] for r in range(4)]
        read = f"import os; print(open(os.environ[{TASK!r}]).read(), os.environ[{TASK!r}] == {str(task)!r})"
        ends = lead.run(["-c", read], timeout=30, env={TASK: str(task)})
        assert [end.stderr.strip() for end in ends] == ["what to do True"] * 2 + ["what to do False"] * 2
        fails = "import os, sys, time; sys.exit('broken') if os.environ['RANK'] == '3' else time.sleep(60)"
        with pytest.raises(OffbeatError, match="rank 3 failed: broken"):
            lead.run(["-c", fails], timeout=30)
        late = lead.run(["-c", "import time; time.sleep(60)"], timeout=0.5, check=False)
        assert [end.outcome for end in late] == ["timed out"] * 4
    said, _ = follower.communicate(timeout=30)
    assert (follower.returncode, said) == (0, "4\n")


def test_a_node_that_is_missing_or_lost_is_named(port):
    with pytest.raises(OffbeatError, match=r"node 1 of 2 did not come to 127\.0\.0\.1"):
        LeadNode(Meeting(2, 0, "127.0.0.1", port, 0.3), 1)
    with pytest.raises(OffbeatError, match="node 1: node 0 cannot be reached"):
        follow(Meeting(2, 1, "127.0.0.1", free_port("127.0.0.1"), 1), 1)
    with pytest.raises(OffbeatError, match="node_rank: 2 is not from 0 to 1"):
        Meeting(2, 2, "127.0.0.1")
    with pytest.raises(OffbeatError, match="master_port: 0"):
        Meeting(2, 0, "127.0.0.1", 0)


def test_a_follower_notices_that_its_leader_was_killed(port):
    leads = f"""
import time
from offbeat.search.auto.nodes import LeadNode, Meeting
lead = LeadNode(Meeting(2, 0, "127.0.0.1", {port}, 30), 1)
print("leads", flush=True)
lead.run(["-c", "import time; time.sleep(100)"], timeout=100)
"""
    follower = start_follower(port)
    leader = subprocess.Popen([sys.executable, "-c", leads], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    assert leader.stdout.readline() == "leads\n"
    leader.send_signal(signal.SIGKILL)
    leader.communicate()
    _, said = follower.communicate(timeout=60)
    assert follower.returncode == 1
    assert "node 0 at 127.0.0.1" in said
    assert "is gone" in said


@pytest.mark.slow
def test_trials_run_on_two_nodes_and_survive_a_failure_on_the_second(port):
    follower = start_follower(port)
    with LeadNode(Meeting(2, 0, "127.0.0.1", port, 60), 1) as lead:
        runner = TrialRunner(lead, "tuning_targets:build", (), SHORT)
        graph, cluster = runner.discover(), ClusterSpec.local(3)
        with pytest.raises(OffbeatError, match="the nodes have 1, 2 ranks"):
            lead.cluster_spec()
        broken = TrialRunner(lead, "tuning_targets:build", ("crash",), SHORT)
        (trial,) = broken.run(graph, cluster, [build_strategy("ddp", graph, cluster)])
        assert (trial.status, "the model is broken" in trial.error) == ("crashed", True)
        strategies = [build_strategy(name, graph, cluster) for name in ("ddp", "ps_load_balanced")]
        trials = list(runner.run(graph, cluster, strategies))
    assert [trial.status for trial in trials] == ["done", "done"]
    follower.communicate(timeout=30)
    assert follower.returncode == 0


@pytest.mark.slow
def test_the_same_command_on_two_hosts_tunes_over_the_network_between_them(emulated_cluster, tmp_path):
    emulation = emulated_cluster(2, "200Mbit/s")
    code = (
        "import sys; from offbeat.cli import main; sys.exit(main(['tune', 'tuning_targets:build', '--nnodes', '2', "
        "'-n', '1', '--trials', '2', '--guide', 'replay', '--warm-up', '2', '--steps', '3', '--json', "
        "'-o', sys.argv[1] + '/best.json', '--store', sys.argv[1] + '/t.sqlite']))"
    )
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    before = emulation.traffic()
    lead, other = emulation.run(["-c", code, str(tmp_path)], timeout=200, env={"PYTHONPATH": path})
    after = emulation.traffic()
    found = json.loads(lead.stdout)
    assert found["statuses"] == {"done": 2}
    assert Path(found["strategy"]).is_file()
    assert json.loads(other.stdout)["jobs"] == 3, "a run alone, and two in which both trials share processes"
    assert all(b[0] - a[0] > 10_000 for a, b in zip(before, after, strict=True)), "they talked over their links"
