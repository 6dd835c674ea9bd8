"""Automatic search against hand-tuned builders on an emulated cluster, with the same number of trials for every search.

    python benchmarks/tune.py --json [--quick] [--model vgg ...] [--cluster mixed ...] [--trials 20] [--replayed]

For each model and cluster the hand-made builders are measured first, each with several settings; the best of all is the
baseline (1x). Then each search gets `--trials` trials: `random` draws within the constraints, `autosync` adds the
predefined and the recurrent model, `replay` Offbeat's replayer, `combined` the model that learns the replayer's error.
All start without earlier trials. Recorded are the best so far and the hit rate (share of trials that beat the baseline)
after every trial, as in AutoDist's figure 9. At the end the baseline and each search's winner are measured again, in
turn, in the same processes; `speedup` is the ratio of these medians, which no lucky trial can have chosen. Compute is
paced, gradients are real. With `--replayed` trials are replays at a site's hidden costs instead: fast, and marked so.
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
from make_dataset import CLUSTERS, MODELS, emulation_of, make_cluster, make_graph, replayed, site_costs
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
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for cluster in options.cluster or ("mixed", "4x1G"):
        for model in options.model or ("ncf", "vgg", "bert"):
            rows += run_case(model, cluster, options)
    if options.json:
        result = {"benchmark": "tune", "machine": machine(), "replayed": options.replayed, "trials": options.trials}
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
        final = confirm(run, baseline, winners, 2 if options.quick else 5)
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
        noise, costs = np.random.default_rng(options.seed), site_costs(name)
        return lambda strategies, best: replayed(graph, cluster, strategies, costs, noise)
    from offbeat.search.auto.trials import TrialOptions, TrialRunner

    steps = (3, 5) if options.quick else (10, 40)
    trial_options = TrialOptions(*steps, timeout_seconds=120, batch=6)
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


def search(graph, cluster, run, guide: str, baseline_seconds: float, options):
    from offbeat.search.auto.store import TrialStore
    from offbeat.search.auto.tune import Options, tune
    from offbeat.simulate.learned.samples import Schedule

    with tempfile.TemporaryDirectory() as folder, TrialStore(Path(folder) / "trials.sqlite") as store:
        settings = Options(
            trials=options.trials,
            guide=guide,
            seed=options.seed,
            baseline_seconds=baseline_seconds,
            schedule=Schedule(epochs=20) if options.quick else Schedule(),
        )
        return tune(graph, cluster, run, settings, store=store)


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
