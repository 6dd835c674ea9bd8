"""Automatic search against hand-tuned builders on an emulated cluster, with the same number of trials for every search.

    python benchmarks/tune.py --json [--quick] [--model vgg ...] [--cluster mixed ...] [--trials 20] [--replayed]

For each model and cluster the hand-made builders are measured first, each with several settings; the best of all is the
baseline (1x). Then each search gets `--trials` trials: `random` draws within the constraints, `autosync` adds the
predefined and the recurrent model, `replay` Offbeat's replayer, `combined` the model that learns the replayer's error.
All start without earlier trials. Recorded are the best so far and the hit rate (share of trials that beat the baseline)
after every trial, as in AutoDist's figure 9. At the end the baseline and each search's winner are measured again, in
turn, in the same processes; `speedup` is the ratio of these medians, which no lucky trial can have chosen. Compute is
paced, gradients are real. With `--replayed` trials are replays of what a site is really like instead (make_dataset.py):
fast, and marked so. `--steps` shortens trials, `--candidates` the rounds.

`--transfer` shows what earlier trials save: how many trials a `combined` search takes to come within 2% of the best
that any of them found, alone and after 20 trials of the same model on another cluster or of another model on this.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from make_dataset import CLUSTERS, MODELS, emulation_of, make_cluster, make_graph, make_site, replayed
from step_time import machine

SEARCHES = ("random", "autosync", "replay", "combined")
BUILDERS = {
    "all_reduce": [{"chunk": chunk} for chunk in (1, 4, 16, 64)],
    "ps_load_balanced": [{}],
    "partitioned_ps": [{"threshold": size} for size in ("64KiB", "256KiB", "1MiB")],
    "horovod": [{"fusion_bytes": size} for size in ("1MiB", "4MiB", "64MiB")],
    "ddp": [{"bucket": size} for size in ("512KiB", "1MiB", "2MiB", "4MiB", "25MiB")],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="short trials and few of them, for a smoke test")
    parser.add_argument("--replayed", action="store_true", help="replay instead of real trials")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--cluster", choices=CLUSTERS, action="append")
    parser.add_argument("--search", choices=SEARCHES, action="append")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, nargs=2, metavar=("WARM_UP", "TIMED"), default=(10, 40))
    parser.add_argument("--candidates", type=int, default=120, help="strategies that are predicted in each round")
    parser.add_argument("--rounds", type=int, default=5, help="times that winners are measured again")
    parser.add_argument("--transfer", action="store_true", help="what earlier trials save (replayed)")
    parser.add_argument("--seeds", type=int, default=3, help="repetitions of --transfer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds = (3, 5), 2
    options.replayed |= options.transfer
    rows = []
    for cluster in options.cluster or ("mixed", "4x1G"):
        for model in options.model or ("ncf", "vgg", "bert"):
            rows += transfer_case(model, cluster, options) if options.transfer else run_case(model, cluster, options)
    if options.json:
        result = {"benchmark": "tune", "machine": machine(), "replayed": options.replayed, "trials": options.trials}
        result |= {"transfer": options.transfer, "steps": options.steps}
        print(json.dumps({**result, "rows": rows}, indent=1))


def run_case(model: str, name: str, options) -> list[dict]:
    graph, cluster = make_graph(model), make_cluster(name)
    with ExitStack() as stack:
        run = trial_maker(model, name, graph, cluster, options, stack)
        built = {strategy.digest: strategy for strategy in tuned_builders(graph, cluster, options.quick)}
        baseline = min(measure(run, list(built.values()), "builders"), key=lambda trial: trial.seconds)
        results = {}
        for guide in options.search or SEARCHES:
            began = time.monotonic()
            results[guide] = search(graph, cluster, run, guide, baseline.seconds, options), time.monotonic() - began
        winners = {guide: result.best for guide, (result, _) in results.items() if result.best is not None}
        final = confirm(run, baseline, winners, options.rounds)
    rows = []
    for guide, (result, seconds) in results.items():
        row = {
            "model": model,
            "cluster": name,
            "search": guide,
            "baseline": baseline.strategy.name,
            "baseline_ms": round(final["baseline"] * 1e3, 2),
            "best_ms": round(final[guide] * 1e3, 2) if guide in final else None,
            "speedup": round(final["baseline"] / final[guide], 4) if guide in final else None,
            "hit_rate": round(result.hit_rate, 4),
            "ranking_accuracy": None if np.isnan(result.accuracy) else round(result.accuracy, 4),
            "statuses": dict(Counter(trial.status for trial in result.trials)),
            "search_seconds": round(seconds, 1),
            "curve": curve(result.trials, baseline.seconds),
        }
        rows.append(row)
        shown = {key: row[key] for key in ("baseline", "baseline_ms", "best_ms", "speedup", "hit_rate")}
        print(f"{model} on {name} {guide}: {shown}", file=sys.stderr, flush=True)
    return rows


def trial_maker(model: str, name: str, graph, cluster, options, stack: ExitStack):
    """Strategies and the best so far → trials, real or replayed."""
    if options.replayed:
        noise, site = np.random.default_rng(options.seed), make_site(name)
        return lambda strategies, best: replayed(graph, strategies, site, noise)
    from offbeat.search.auto.trials import TrialOptions, TrialRunner

    trial_options = TrialOptions(*options.steps, timeout_seconds=120, batch=6)
    emulation = stack.enter_context(emulation_of(name))
    runner = TrialRunner(emulation, "make_dataset:build_paced", (model,), trial_options)
    return lambda strategies, best: runner.run(graph, cluster, strategies, best)


def tuned_builders(graph, cluster, quick: bool) -> list:
    from offbeat.strategy import build_strategy

    return [
        build_strategy(name, graph, cluster, **settings)
        for name, choices in BUILDERS.items()
        for settings in (choices[:1] if quick else choices)
    ]


def measure(run, strategies, what: str) -> list:
    trials = list(run(strategies, None))
    for trial in trials:
        if trial.status != "done":
            print(f"{what}: {trial.strategy.name} {trial.status}: {trial.error}", file=sys.stderr, flush=True)
    done = [trial for trial in trials if trial.status == "done"]
    if not done:
        sys.exit(f"{what}: no trial came to its end")
    return done


def search(graph, cluster, run, guide: str, baseline_seconds: float | None, options):
    from offbeat.search.auto.store import TrialStore

    with tempfile.TemporaryDirectory() as folder, TrialStore(Path(folder) / "trials.sqlite") as store:
        return search_in(store, guide, graph, cluster, run, options, baseline_seconds=baseline_seconds)


def search_in(store, name: str, graph, cluster, run, options, **more):
    """A search of that name; its guide is what stands before a blank in it."""
    from offbeat.search.auto.tune import Options, tune
    from offbeat.simulate.learned.samples import Schedule

    settings = Options(
        trials=options.trials,
        guide=name.split(maxsplit=1)[0],
        search=name,
        seed=options.seed,
        candidates=options.candidates,
        schedule=Schedule(epochs=20) if options.quick else Schedule(),
        **more,
    )
    return tune(graph, cluster, run, settings, store=store, on_progress=lambda state: show(name, state))


def show(name: str, state) -> None:
    took = "none" if state.trial.seconds is None else f"{state.trial.seconds * 1e3:.1f} ms"
    best = "none" if state.best is None else f"{state.best.seconds * 1e3:.1f} ms"
    number = f"{name} {state.number}/{state.trials}"
    print(f"{number} {state.trial.strategy.name} {state.trial.status} {took}, best {best}", file=sys.stderr, flush=True)


def transfer_case(model: str, name: str, options) -> list[dict]:
    """Trials needed alone and with the trials of two other domains, averaged over seeds."""
    other_cluster = next(each for each in ("4x1G", "mixed") if each != name)
    other_model = next(each for each in ("bert", "vgg") if each != model)
    sources = {"alone": None, "same model": (model, other_cluster), "same cluster": (other_model, name)}
    best: dict[str, list[list[float]]] = {source: [] for source in sources}
    for seed in range(options.seeds):
        settings = argparse.Namespace(**{**vars(options), "seed": seed})
        for source, domain in sources.items():
            best[source].append(best_after_each(model, name, domain, settings))
            print(f"{model} on {name}, {source}, seed {seed}: {best[source][-1][-1] * 1e3:.1f} ms", file=sys.stderr)
    goal = [1.02 * min(best[source][seed][-1] for source in sources) for seed in range(options.seeds)]
    rows = []
    for source, found in best.items():
        needed = [
            next((n for n, seconds in enumerate(curve, 1) if seconds <= goal[seed]), None)
            for seed, curve in enumerate(found)
        ]
        rows.append(
            {
                "model": model,
                "cluster": name,
                "earlier_trials": source,
                "trials_needed": needed,
                "first_trial_ms": round(statistics.mean(curve[0] for curve in found) * 1e3, 2),
                "best_ms": round(statistics.mean(curve[-1] for curve in found) * 1e3, 2),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def best_after_each(model: str, name: str, earlier: tuple[str, str] | None, options) -> list[float]:
    """Seconds of the best so far after every trial of a search."""
    from offbeat.search.auto.store import TrialStore

    with tempfile.TemporaryDirectory() as folder, TrialStore(Path(folder) / "t.sqlite") as store, ExitStack() as stack:
        for search_name, domain in (("combined earlier", earlier), ("combined", (model, name))):
            if domain is not None:
                graph, cluster = make_graph(domain[0]), make_cluster(domain[1])
                run = trial_maker(*domain, graph, cluster, options, stack)
                result = search_in(store, search_name, graph, cluster, run, options)
    return np.minimum.accumulate([trial.seconds or np.inf for trial in result.trials]).tolist()


def confirm(run, baseline, winners: dict, rounds: int) -> dict[str, float]:
    """Median of repeated trials of the baseline and of every winner, a round of all after a round of all."""
    contestants = {"baseline": baseline, **winners}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        strategies = [trial.strategy for trial in contestants.values()]
        for name, trial in zip(contestants, run(strategies, None), strict=True):
            if trial.status == "done":
                seconds[name].append(trial.seconds)
    return {name: statistics.median(found) for name, found in seconds.items() if found}


def curve(trials, baseline_seconds: float) -> list[dict]:
    """Speed-up of the best so far, and the hit rate, after every trial."""
    points, best, hits = [], float("inf"), 0
    for number, trial in enumerate(trials, 1):
        if trial.status == "done":
            best = min(best, trial.seconds)
            hits += trial.seconds < baseline_seconds
        speedup = None if best == float("inf") else round(baseline_seconds / best, 4)
        predicted = trial.predicted_seconds
        points.append(
            {
                "trial": number,
                "status": trial.status,
                "strategy": trial.strategy.name,
                "measured_ms": None if trial.seconds is None else round(trial.seconds * 1e3, 2),
                "predicted_ms": None if predicted is None else round(predicted * 1e3, 2),
                "best_speedup": speedup,
                "hit_rate": round(hits / number, 4),
            }
        )
    return points


if __name__ == "__main__":
    main()
