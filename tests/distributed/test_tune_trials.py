"""Trials in processes of their own: how they end is recorded, and a search with them finds a strategy."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import tuning_targets
from harness import start_ranks, stop_ranks

import offbeat
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.launch import RankEnd
from offbeat.search.auto import job
from offbeat.search.auto.sampler import Sampler
from offbeat.search.auto.store import TrialStore
from offbeat.search.auto.trials import LocalRanks, TrialOptions, TrialRunner
from offbeat.search.auto.tune import Options, tune
from offbeat.strategy import Shard, Strategy, VariableConfig, build_strategy

CLUSTER = ClusterSpec.local(2)
SHORT = TrialOptions(warm_up=2, timed=4, early_steps=2, timeout_seconds=60, batch=4)
PATIENT = replace(SHORT, stop_ratio=None)
"""On a machine with other work any trial may seem slow."""
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import offbeat
dist.init_process_group("gloo")
torch.manual_seed(int(sys.argv[1]))
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = offbeat.distribute(model, optimizer, strategy="auto")
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
"""

pytestmark = pytest.mark.timeout(240)


def runner(fault: str = "", options: TrialOptions = SHORT) -> TrialRunner:
    """Its machines count the jobs that they run."""
    ranks = LocalRanks(2)
    ranks.run = Mock(wraps=ranks.run)
    return TrialRunner(ranks, "tuning_targets:build", (fault,), options)


@pytest.fixture(scope="module")
def graph():
    return runner().discover()


def test_one_run_alone_gives_the_graph_with_compute_times(graph):
    assert graph.source == "joint"
    assert len(graph.variables) == 6
    compute = [operator.seconds for operator in graph.operators if operator.phase != "optimizer"]
    assert None not in compute
    assert 0 < sum(compute) < 1


def test_trials_share_processes_stop_early_and_survive_a_refusal(graph):
    here = runner()
    stranger = Strategy(
        variables={"layers.0.weight": VariableConfig(shards=(Shard(synchronizer="parameter_server", placement=(7,)),))}
    )
    strategies = [*Sampler(graph, CLUSTER, 0).sample(2), stranger, build_strategy("ddp", graph, CLUSTER)]
    trials = list(here.run(graph, CLUSTER, strategies))
    assert here.machines.run.call_count == 1
    assert [trial.strategy for trial in trials] == strategies
    refused = trials.pop(2)
    assert refused.status == "refused"
    assert "rank 7 is outside the cluster" in refused.error
    assert [(trial.status, len(trial.steps)) for trial in trials] == [("done", 4)] * 3
    assert all(0 < trial.seconds < 10 for trial in trials)
    (bad,) = here.run(graph, CLUSTER, strategies[:1], best_seconds=1e-9)
    assert (bad.status, len(bad.steps)) == ("stopped", 2)


class ForkedRanks:
    """Three ranks on this machine, each of them forked, which is cheaper than to start Python."""

    world_size = 3

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec.local(3)

    def run(self, program, *, timeout, env=None, check=True) -> list[RankEnd]:
        ranks = start_ranks(3, directory=self.folder, script=Path(job.__file__), pipes=False, variables=env)
        deadline = time.monotonic() + timeout
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        late = [rank.poll() is None for rank in ranks]
        stop_ranks(ranks)
        said = [(self.folder / f"rank{number}.log").read_text() for number in range(3)]
        outcomes = ["timed out" if each else "exited" for each in late]
        return [RankEnd(n, r.wait(), o, 0.0, s) for n, (r, o, s) in enumerate(zip(ranks, outcomes, said, strict=True))]


@pytest.mark.parametrize("first", [True, False])
def test_servers_of_the_cluster_take_part_in_trials(graph, first, tmp_path):
    """Also where rank 0 is one; a search draws, predicts and runs strategies that use them."""
    workers, server = {"count": 2}, {"role": "server"}
    cluster, machines = ClusterSpec(nodes=(server, workers) if first else (workers, server)), ForkedRanks(tmp_path)
    here = TrialRunner(machines, "tuning_targets:build", (), replace(PATIENT, timeout_seconds=15))
    builders = ("ps_load_balanced", "fast_servers", "ddp")
    trials = list(here.run(graph, cluster, [build_strategy(name, graph, cluster) for name in builders]))
    assert [(trial.status, len(trial.steps), trial.error) for trial in trials] == [("done", 4, "")] * 3
    if first:
        options = Options(guide="replay", candidates=10, per_round=2, finalists=0)
        settings = {"machines": machines, "cluster": cluster, "options": options, "trial_options": here.options}
        result = offbeat.tune(tuning_targets.build, trials=2, store=None, **settings)
        assert [trial.status for trial in result.trials] == ["done", "done"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [("crash", "crashed", "the model is broken"), ("hang", "hung", "still ran"), ("memory", "out_of_memory", "memory")],
)
def test_a_failure_is_recorded_and_named(graph, fault, status, words):
    limit = TrialOptions(warm_up=2, timed=4, timeout_seconds=20 if fault == "hang" else 60)
    (trial,) = runner(fault, limit).run(graph, CLUSTER, [build_strategy("ddp", graph, CLUSTER)])
    assert trial.status == status
    assert trial.seconds is None
    assert words in trial.error


@pytest.mark.slow
def test_a_script_is_tuned_as_it_is(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    here = TrialRunner(LocalRanks(2), str(script), ("3", "1000"), PATIENT)
    graph = here.discover()
    with TrialStore(tmp_path / "t.sqlite") as store:
        options = Options(trials=2, guide="replay", candidates=10, per_round=2)
        result = tune(graph, CLUSTER, lambda s, best: here.run(graph, CLUSTER, s, best), options, store=store)
        assert [trial.status for trial in store.trials()] == ["done", "done"]
    assert result.strategy in [trial.strategy for trial in result.trials]
    assert json.loads(result.strategy.to_json())["graph"] == graph.signature
    short = TrialRunner(LocalRanks(2), str(script), ("3", "3"), SHORT)
    (ended,) = short.run(graph, CLUSTER, [result.strategy])
    assert ended.status == "refused"
    assert "the script ended after 1 of 4 timed steps" in ended.error


@pytest.mark.slow
def test_the_verb_tunes_a_function_and_resumes(tmp_path: Path):
    settings = {"store": tmp_path / "t.sqlite", "trial_options": PATIENT}
    options = Options(guide="replay", candidates=10)
    first = offbeat.tune(tuning_targets.build, trials=2, options=options, **settings)
    assert [trial.status for trial in first.trials] == ["done", "done"]
    assert first.strategy in [trial.strategy for trial in first.trials]
    with pytest.raises(OffbeatError, match="has 3 devices for 2 ranks"):
        offbeat.tune(tuning_targets.build, cluster=ClusterSpec.local(3), **settings)
    second = offbeat.tune(tuning_targets.build, trials=3, resume=True, options=options, **settings)
    assert second.search == first.search
    assert [trial.strategy for trial in second.trials[:2]] == [trial.strategy for trial in first.trials]
    assert len({trial.strategy.digest for trial in second.trials}) == 3


def test_ranks_end_with_the_search_that_started_them(tmp_path: Path):
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from offbeat.search.auto.trials import LocalRanks
from offbeat.search.auto.trials import TrialOptions, TrialRunner
TrialRunner(LocalRanks(1), "tuning_targets:wait", ({str(tmp_path / "pid")!r},), TrialOptions(1, 1)).discover()
"""
    search = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.1)
    rank = int((tmp_path / "pid").read_text())
    search.send_signal(signal.SIGKILL)
    search.wait()
    while Path(f"/proc/{rank}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{rank}").exists()


def test_trials_run_on_an_emulated_cluster(emulated_cluster, graph):
    emulation = emulated_cluster(2, "200Mbit/s")
    here = TrialRunner(emulation, "tuning_targets:build", (), SHORT)
    cluster = emulation.cluster_spec()
    (trial,) = here.run(graph, cluster, [build_strategy("overlap", graph, cluster)])
    assert trial.status == "done", trial.error


def test_what_cannot_be_run_is_refused():
    with pytest.raises(OffbeatError, match=r"nowhere\.py: no such script"):
        TrialRunner(LocalRanks(2), "nowhere.py")
    with pytest.raises(OffbeatError, match="'train' is neither a script"):
        TrialRunner(LocalRanks(2), "train")
    with pytest.raises(OffbeatError, match="ranks: 0 is not at least 1"):
        LocalRanks(0)
    with pytest.raises(OffbeatError, match="failed in a single-process run"):
        TrialRunner(LocalRanks(1), "tuning_targets:missing", (), SHORT).discover()
