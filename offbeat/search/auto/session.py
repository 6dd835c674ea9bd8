"""Find the best strategy for a training script, or a function that returns a model, with real trials.

This is `offbeat.tune`: it runs the target once by itself for its graph and its compute times, then searches
(`offbeat.search.auto.tune`), and keeps every trial in a store from which later searches begin.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.search.auto.store import TrialStore
from offbeat.search.auto.trials import LocalRanks, Machines, TrialOptions, TrialRunner
from offbeat.search.auto.tune import Options, Progress, TuneResult
from offbeat.search.auto.tune import tune as search_strategies

STORE = "offbeat-trials.sqlite"
Target = str | PathLike[str] | Callable[..., Any]


def tune(
    target: Target,
    arguments: Sequence[str] = (),
    *,
    trials: int = 20,
    ranks: int = 2,
    machines: Machines | None = None,
    cluster: ClusterSpec | None = None,
    store: str | PathLike[str] | TrialStore | None = STORE,
    resume: bool = False,
    options: Options | None = None,
    trial_options: TrialOptions | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TuneResult:
    """Searches for the fastest strategy of a job with real trials; `.strategy` is the best, `.trials` the history.

    `target` is a training script that calls `offbeat.distribute`, or a function (or 'package.module:function') that
    returns a model and its example inputs; `arguments` are the script's, or texts given to the function. Trials run on
    `ranks` processes of this machine, or on `machines`: an `offbeat.emulate.Emulation`, or a `LeadNode` of several
    machines. `cluster` describes them, if known. `store` is the file that keeps the
    trials (None keeps nothing); with `resume` the latest search for this model on this cluster is continued. Ctrl-C
    returns the best found so far.
    """
    from offbeat.runtime.comm import known_costs
    from offbeat.search.auto.job import trial_backend

    machines = machines or LocalRanks(ranks)
    spec = cluster or machines.cluster_spec()
    if spec.world_size != machines.world_size:
        raise OffbeatError(f"cluster: {spec.name!r} has {spec.world_size} devices for {machines.world_size} ranks")
    runner = TrialRunner(machines, target_name(target), tuple(arguments), trial_options or TrialOptions())
    graph = runner.discover(spec.servers)
    with nullcontext(store) if store is None or isinstance(store, TrialStore) else TrialStore(store) as kept:
        search = _search_name(kept, graph.digest, spec.digest, resume)
        return search_strategies(
            graph,
            spec,
            lambda strategies, best: runner.run(graph, spec, strategies, best),
            replace(options or Options(), trials=trials, search=search, resume=resume),
            store=kept,
            costs=known_costs(trial_backend(), spec.world_size),
            on_progress=on_progress,
        )


def target_name(target: Target) -> str:
    """The name by which trials in other processes import a target."""
    if not callable(target):
        return fspath(target)
    module, name = target.__module__, target.__qualname__
    if not name.isidentifier():
        raise OffbeatError(f"target: {name!r} is not a top-level function of a module, so trials cannot import it")
    if module == "__main__":
        # Trials import the running script as a module; its folder is on their path as it is on this process's.
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script is None:
            raise OffbeatError(f"target: {name!r} was defined in an interactive session; put it in a file to tune it")
        module = Path(script).stem
    return f"{module}:{name}"


def _search_name(store: TrialStore | None, graph_digest: str, cluster_digest: str, resume: bool) -> str:
    """A new search is named by its time; the latest one of this domain is resumed."""
    if not resume:
        return time.strftime("%Y-%m-%dT%H:%M:%S")
    if store is None:
        raise OffbeatError("resume: a search needs the store of its trials")
    known = [trial.search for trial in store.trials(graph_digest, cluster_digest, source="measured")]
    if not known:
        raise OffbeatError(f"resume: {store.path} has no search for this model on this cluster")
    return known[-1]
