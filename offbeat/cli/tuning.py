"""offbeat tune and trials: search with real trials, and the trial store."""

import math
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from offbeat import units
from offbeat.cli.app import CLUSTER, SCRIPT, SCRIPT_SETTINGS, Json, app
from offbeat.cli.planning import load_cluster
from offbeat.cli.show import print_facts, print_rows, progress, say, stdout_to_stderr
from offbeat.errors import OffbeatError
from offbeat.launch import INTERRUPTED

if TYPE_CHECKING:
    from offbeat.search.auto.store import TrialStore
    from offbeat.search.auto.trials import Machines
    from offbeat.search.auto.tune import Progress, TuneResult

STORE = Path("offbeat-trials.sqlite")
Store = Annotated[Path, Option(metavar="FILE", help="The trial store.")]


@app.command(
    epilog="Example: offbeat tune train.py --batch 8 --trials 20 --hosts 4 --bandwidth 1Gbit/s -o strategy.json",
    context_settings=SCRIPT_SETTINGS,
)
def tune(
    script: Annotated[
        list[str],
        Argument(
            help="A training script or pkg.mod:function, and its options; put options that this command also has "
            "after '--'.",
            **SCRIPT,
        ),
    ],
    *,
    trials: Annotated[int, Option(min=1, help="Strategies to run.")] = 20,
    output: Annotated[Path, Option("-o", "--output", help="File for the best strategy.")] = Path("strategy.json"),
    store: Store = STORE,
    ranks: Annotated[int, Option("-n", "--ranks", min=1, help="Ranks on this machine.")] = 2,
    nnodes: Annotated[int, Option(min=1, help="Machines; run the same command on each.")] = 1,
    node_rank: Annotated[int, Option(min=0, envvar="NODE_RANK", help="Index of this machine.")] = 0,
    master_addr: Annotated[str, Option(envvar="MASTER_ADDR", help="Address of node 0.")] = "127.0.0.1",
    master_port: Annotated[int, Option(envvar="MASTER_PORT", help="Rendezvous port on node 0.")] = 29500,
    hosts: Annotated[int | None, Option(min=1, help="Emulate this many hosts instead.")] = None,
    bandwidth: Annotated[str, Option(help="Bandwidth of every link, or one per host, comma-separated.")] = "1Gbit/s",
    cluster: Annotated[str | None, Option(help="The cluster of the ranks, if known.", **CLUSTER)] = None,
    guide: Annotated[str, Option(help="combined, replay, rnn, gat, linear, predefined or random.")] = "combined",
    seed: Annotated[int, Option(min=0, help="Seed of the sampler.")] = 0,
    warm_up: Annotated[int, Option(min=1, help="Untimed steps per trial.")] = 10,
    steps: Annotated[int, Option(min=1, help="Timed steps per trial.")] = 40,
    timeout: Annotated[float, Option(min=1, help="Seconds after which a trial counts as hung.")] = 300.0,
    time_limit: Annotated[float | None, Option(min=0, help="Seconds for the whole search.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the latest search for this model.")] = False,
    as_json: Json = False,
) -> None:
    """Try strategies on the real job, learn from each, and save the best."""
    from offbeat.search.auto.session import tune as search
    from offbeat.search.auto.trials import TrialOptions, check_target
    from offbeat.search.auto.tune import Options

    check_target(script[0])
    options = Options(trials=trials, guide=guide, seed=seed, time_limit_seconds=time_limit)  # type: ignore[arg-type]
    length = TrialOptions(warm_up, steps, timeout_seconds=timeout)
    if nnodes > 1:
        if hosts is not None:
            raise OffbeatError(f"--hosts {hosts}: an emulated cluster runs on one machine, not on --nnodes {nnodes}")
        if node_rank:
            from offbeat.search.auto.nodes import Meeting, follow

            leader = f"{master_addr}:{master_port}"
            with progress(f"taking part in the search that node 0 leads at {leader}"):
                jobs = follow(Meeting(nnodes, node_rank, master_addr, master_port), ranks)
            print_facts({"node_rank": node_rank, "jobs": jobs, "led_by": leader}, as_json)
            return
    master = (master_addr, master_port)
    with stdout_to_stderr(), _machines(ranks, nnodes, master, hosts, bandwidth) as machines:
        say("the first run, without synchronisation, records the model's graph and compute times")
        result = search(
            script[0],
            script[1:],
            trials=trials,
            machines=machines,
            cluster=None if cluster is None else load_cluster(cluster),
            store=store,
            resume=resume,
            options=options,
            trial_options=length,
            on_progress=_show,
        )
    if result.best is not None:
        result.strategy.save(output)
    print_facts(summarise(result, output), as_json, speedup_over_ddp="{:.2f}×".format)
    if result.best is None:
        raise OffbeatError(f"none of the {len(result.trials)} trials completed; `offbeat trials` shows why")
    if result.interrupted:
        raise Exit(INTERRUPTED)


@app.command(epilog="Example: offbeat trials --store trials.sqlite --export folder/")
def trials(
    store: Store = STORE,
    export: Annotated[Path | None, Option(metavar="FOLDER", help="Write all trials as JSON lines.")] = None,
    import_from: Annotated[Path | None, Option("--import", metavar="FOLDER", help="Import such a folder.")] = None,
    best: Annotated[int | None, Option(min=1, help="Show only this many, fastest first.")] = None,
    as_json: Json = False,
) -> None:
    """List, export or import stored trials."""
    from offbeat.search.auto.store import TrialStore

    if import_from is None and not store.is_file():
        raise OffbeatError(f"{store}: no such trial store")
    with TrialStore(store) as kept:
        if import_from is not None:
            print_facts({"imported": kept.import_folder(import_from)}, as_json)
        if export is not None:
            print_facts({"exported": kept.export(export), "folder": str(export)}, as_json)
        if import_from is None and export is None:
            rows = _rows(kept, best)
            if rows or as_json:
                print_rows(rows, as_json)
            else:
                say(f"{store} has no trials yet")


def summarise(result: "TuneResult", output: Path) -> dict[str, Any]:
    """The result of a search as plain values."""
    best = result.best
    seconds = None if best is None else best.seconds
    ddp = min((each.seconds for each in result.trials if each.strategy.name == "ddp" and each.seconds), default=None)
    return {
        "search": result.search,
        "trials": len(result.trials),
        "statuses": dict(Counter(trial.status for trial in result.trials)),
        "best_seconds": seconds,
        "predicted_seconds": None if best is None else best.predicted_seconds,
        "ddp_seconds": ddp,
        "speedup_over_ddp": None if not (seconds and ddp) else ddp / seconds,
        "hit_rate": None if math.isnan(result.hit_rate) else result.hit_rate,
        "ranking_accuracy": None if math.isnan(result.accuracy) else result.accuracy,
        "interrupted": result.interrupted,
        "strategy": None if best is None else str(output),
    }


def _show(state: "Progress") -> None:
    """One line on stderr for each trial."""
    trial, best = state.trial, state.best
    took = trial.status if trial.seconds is None else units.format_seconds(trial.seconds)
    if trial.status == "stopped":
        took += " (stopped)"
    expected = "" if trial.predicted_seconds is None else f", {units.format_seconds(trial.predicted_seconds)} predicted"
    if state.interval is not None:
        expected += f" {state.interval.bounds}"
    fastest = "none yet" if best is None or best.seconds is None else units.format_seconds(best.seconds)
    hits = "" if math.isnan(state.hit_rate) else f", hit rate {state.hit_rate:.0%}"
    left = units.format_seconds(round(state.seconds_left)) if state.seconds_left >= 1 else "0 s"
    number = f"trial {state.number}/{state.trials} {trial.strategy.name}"
    print(f"{number}: {took}{expected}; best {fastest}{hits}; {left} left", file=sys.stderr, flush=True)


def _machines(
    ranks: int, nodes: int, master: tuple[str, int], hosts: int | None, bandwidth: str
) -> AbstractContextManager["Machines"]:
    """Where trials run."""
    if nodes > 1:
        from offbeat.search.auto.nodes import LeadNode, Meeting

        return LeadNode(Meeting(nodes, 0, *master), ranks)
    if hosts is not None:
        from offbeat.cli.hosts import link_rates
        from offbeat.emulate import Emulation

        return Emulation(link_rates(bandwidth, hosts), bandwidth)
    from offbeat.search.auto.trials import LocalRanks

    return nullcontext(LocalRanks(ranks))


def _rows(store: "TrialStore", best: int | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "model": domain.model,
            "cluster": domain.cluster,
            "search": trial.search,
            "strategy": f"{trial.strategy.name} {trial.strategy.digest[:8]}",
            "status": trial.status,
            "source": trial.source,
            "step_seconds": trial.seconds,
            "predicted_seconds": trial.predicted_seconds,
            "error": trial.error,
        }
        for domain in store.domains()
        for trial in store.trials(domain.graph_digest, domain.cluster_digest)
    ]
    if best is None:
        return rows
    return sorted((row for row in rows if row["status"] == "done"), key=lambda row: row["step_seconds"])[:best]
