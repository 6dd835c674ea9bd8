"""offbeat tune and trials: search with real trials, and the store they are kept in."""

import math
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat import units
from offbeat.cli.app import INTERRUPTED, Json, app
from offbeat.cli.catalogue import load_cluster
from offbeat.cli.show import print_facts, print_rows, progress, say, stdout_to_stderr
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.cluster import ClusterSpec
    from offbeat.search.auto.store import TrialStore
    from offbeat.search.auto.trials import Machines
    from offbeat.search.auto.tune import Progress, TuneResult

STORE = Path("offbeat-trials.sqlite")
Store = Annotated[Path, typer.Option(metavar="FILE", help="The trial store.")]


@app.command(
    epilog="Example: offbeat tune train.py --trials 20 --hosts 4 --bandwidth 1Gbit/s -o strategy.json -- --batch 8"
)
def tune(
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [-- ARGS]...", help="A training script, or pkg.mod:function.")
    ],
    *,
    trials: Annotated[int, typer.Option(min=1, help="Strategies to run.")] = 20,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the best strategy goes.")] = Path(
        "strategy.json"
    ),
    store: Store = STORE,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Ranks on this machine.")] = 2,
    hosts: Annotated[int | None, typer.Option(min=1, help="Emulate so many hosts instead.")] = None,
    bandwidth: Annotated[str, typer.Option(help="Of every emulated link, or one per host with commas.")] = "1Gbit/s",
    cluster: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="What the ranks run on, if known.")] = None,
    guide: Annotated[str, typer.Option(help="combined, replay, autosync, predefined or random.")] = "combined",
    seed: Annotated[int, typer.Option(min=0, help="Of the sampler.")] = 0,
    warm_up: Annotated[int, typer.Option(min=1, help="Untimed steps of a trial.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a trial.")] = 40,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a trial has hung.")] = 300.0,
    time_limit: Annotated[float | None, typer.Option(min=0, help="Seconds for the whole search.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the latest search for this model.")] = False,
    as_json: Json = False,
) -> None:
    """Try strategies on the real job, learn from each, and save the best."""
    from offbeat.search.auto.store import TrialStore
    from offbeat.search.auto.trials import TrialOptions, TrialRunner
    from offbeat.search.auto.tune import Options
    from offbeat.search.auto.tune import tune as search

    with stdout_to_stderr(), _machines(ranks, hosts, bandwidth) as (machines, assumed):
        spec = assumed if cluster is None else load_cluster(cluster)
        if spec.world_size != machines.world_size:
            raise OffbeatError(f"cluster: {spec.name!r} has {spec.world_size} devices for {machines.world_size} ranks")
        length = TrialOptions(warm_up, steps, timeout_seconds=timeout)
        runner = TrialRunner(machines, script[0], tuple(script[1:]), length)
        with progress("running the script once by itself, for its graph and its compute times"):
            graph = runner.discover()
        with TrialStore(store) as kept:
            options = Options(
                trials=trials,
                guide=guide,  # type: ignore[arg-type]
                seed=seed,
                search=_search_name(kept, graph.digest, spec.digest, resume),
                resume=resume,
                time_limit_seconds=time_limit,
            )
            result = search(
                graph, spec, lambda s, best: runner.run(graph, spec, s, best), options, store=kept, on_progress=_show
            )
    if result.best is not None:
        result.strategy.save(output)
    print_facts(summarise(result, options.search, output), as_json)
    if result.best is None:
        raise OffbeatError(f"none of the {len(result.trials)} trials came to its end; `offbeat trials` shows why")
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command(epilog="Example: offbeat trials --store trials.sqlite --export folder/")
def trials(
    store: Store = STORE,
    export: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write all trials as JSON lines.")] = None,
    import_from: Annotated[Path | None, typer.Option("--import", metavar="FOLDER", help="Read such a folder.")] = None,
    best: Annotated[int | None, typer.Option(min=1, help="Show only so many, fastest first.")] = None,
    as_json: Json = False,
) -> None:
    """List, export or import the trials that searches have stored."""
    from offbeat.search.auto.store import TrialStore

    if import_from is None and not store.is_file():
        raise OffbeatError(f"{store}: there is no such trial store")
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
                say(f"{store} holds no trial yet")


def summarise(result: "TuneResult", search: str, output: Path) -> dict[str, Any]:
    """What a search found, as plain values."""
    best, baseline = result.best, result.baseline_seconds
    seconds = None if best is None else best.seconds
    statuses = [trial.status for trial in result.trials]
    return {
        "search": search,
        "trials": len(result.trials),
        "statuses": {status: statuses.count(status) for status in dict.fromkeys(statuses)},
        "best_seconds": seconds,
        "predicted_seconds": None if best is None else best.predicted_seconds,
        "best_builder_seconds": baseline,
        "speedup_over_best_builder": None if not (seconds and baseline) else baseline / seconds,
        "hit_rate": _number(result.hit_rate),
        "ranking_accuracy": _number(result.accuracy),
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
    fastest = "none yet" if best is None or best.seconds is None else units.format_seconds(best.seconds)
    hits = "" if math.isnan(state.hit_rate) else f", hit rate {state.hit_rate:.0%}"
    left = units.format_seconds(round(state.seconds_left)) if state.seconds_left >= 1 else "0 s"
    number = f"trial {state.number}/{state.trials} {trial.strategy.name}"
    print(f"{number}: {took}{expected}; best {fastest}{hits}; {left} left", file=sys.stderr, flush=True)


@contextmanager
def _machines(ranks: int, hosts: int | None, bandwidth: str) -> Generator[tuple["Machines", "ClusterSpec"], None, None]:
    """Where trials run, and what is known of it."""
    from offbeat.cluster import ClusterSpec
    from offbeat.search.auto.trials import LocalRanks

    if hosts is None:
        yield LocalRanks(ranks), ClusterSpec.local(ranks)
        return
    from offbeat.cli.trying import _links
    from offbeat.emulate import Emulation

    with Emulation(_links(bandwidth, hosts), bandwidth if "," not in bandwidth else "1Gbit/s") as emulation:
        yield emulation, emulation.cluster_spec()


def _search_name(store: "TrialStore", graph_digest: str, cluster_digest: str, resume: bool) -> str:
    """A new search is named by its time; the latest one of this domain is resumed."""
    if not resume:
        return time.strftime("%Y-%m-%dT%H:%M:%S")
    known = [trial.search for trial in store.trials(graph_digest, cluster_digest, source="measured")]
    if not known:
        raise OffbeatError(f"--resume: {store.path} has no search for this model on this cluster")
    return known[-1]


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


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
