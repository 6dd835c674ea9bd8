"""Automatic search against hand-tuned builders on an emulated cluster, with the same number of trials for every search.

    python benchmarks/tune.py --json [--quick] [--model vgg ...] [--cluster mixed ...] [--trials 20] [--replayed]

For each model and cluster the hand-made builders are measured first, each with several settings. Then each search gets
`--trials` trials: `random` draws within the constraints, `rnn` adds the predefined and the recurrent model,
`replay` Offbeat's replayer, `combined` the replayer at costs that trials tell. All start without earlier trials, and
the last of the trials are second runs of each search's finalists. Recorded are the best so far and the hit rate (share
of trials that beat the best builder's first one) after every trial, as in AutoDist's figure 9. At the end the three
best builders and each search's winner are measured again, in turn, in the same processes; the best of these builders is
the baseline (1x), and `speedup` the ratio of medians, which no lucky trial can have chosen. `bound_ms` is a step that
no schedule of all-reduces goes below on links as described, with everything else free. A winner that is the baseline's
own strategy is not raced against itself: its speedup is 1. Compute is paced, gradients are real. `--steps` shortens
trials, `--candidates` the rounds. One model on one cluster with one search takes under 6 minutes with

    python benchmarks/tune.py --json --model vgg --cluster mixed --search combined --steps 4 12 --candidates 60

With `--replayed` trials are replays of what a site is really like instead (make_dataset.py): fast, and marked so. With
`--ceiling` a row then also has the speedup of the best that 300 noiseless replays of the site itself find, which no
search can know.

`--transfer` shows what earlier trials save: how many trials a `combined` search takes to come within 2% of the best
that any of them found, alone and after as many trials of the same model on another cluster or of another model on this.
Trials are replays without noise there, so that a lucky one saves nothing.
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
from make_dataset import CLUSTERS, MODELS, NOISE, emulation_of, make_cluster, make_graph, make_site, replayed
from step_time import machine

FINALISTS = 3
CEILING_REPLAYS = 300
SEARCHES = ("random", "rnn", "replay", "combined")
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
    parser.add_argument("--rounds", type=int, default=3, help="times that winners are measured again")
    parser.add_argument("--ceiling", action="store_true", help="also what could be found at most (with --replayed)")
    parser.add_argument("--transfer", action="store_true", help="what earlier trials save (replayed)")
    parser.add_argument("--seeds", type=int, default=3, help="repetitions of --transfer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds = (3, 5), 2
    options.replayed |= options.transfer
    rows = []
    for cluster in options.cluster or ("mixed", "4x1G"):
        for model in options.model or ("ncf", "vgg", "bert_large"):
            rows += transfer_case(model, cluster, options) if options.transfer else run_case(model, cluster, options)
    if options.json:
        result = {"benchmark": "tune", "machine": machine(), "replayed": options.replayed, "trials": options.trials}
        result |= {"transfer": options.transfer, "steps": options.steps}
        if options.transfer:
            result["mean_trials_needed"] = mean_trials_needed(rows, options.trials)
        print(json.dumps({**result, "rows": rows}, indent=1))


def run_case(model: str, name: str, options) -> list[dict]:
    graph, cluster = make_graph(model), make_cluster(name)
    with ExitStack() as stack:
        run = trial_maker(model, name, graph, cluster, options, stack)
        built = {strategy.digest: strategy for strategy in tuned_builders(graph, cluster, options.quick)}
        by_hand = sorted(measure(run, list(built.values()), "builders"), key=lambda trial: trial.seconds)[:FINALISTS]
        first = by_hand[0].seconds
        results = {}
        for guide in options.search or SEARCHES:
            began = time.monotonic()
            results[guide] = search(graph, cluster, run, guide, first, options), time.monotonic() - began
        winners = {guide: result.best for guide, (result, _) in results.items() if result.best is not None}
        baseline, final = confirm(run, by_hand, winners, options.rounds)
    bound = round(least_seconds(graph, cluster) * 1e3, 2)
    ceiling = round(highest_speedup(graph, cluster, make_site(name)), 4) if options.ceiling else None
    rows = []
    for guide, (result, seconds) in results.items():
        row = {
            "model": model,
            "cluster": name,
            "search": guide,
            "baseline": baseline.strategy.name,
            "baseline_ms": round(final["baseline"] * 1e3, 2),
            "bound_ms": bound,
            "best_ms": round(final[guide] * 1e3, 2) if guide in final else None,
            "speedup": round(final["baseline"] / final[guide], 4) if guide in final else None,
            "hit_rate": round(result.hit_rate, 4),
            "ranking_accuracy": None if np.isnan(result.accuracy) else round(result.accuracy, 4),
            "ceiling": ceiling,
            "best_is_baseline": result.best is not None and result.best.strategy.digest == baseline.strategy.digest,
            "statuses": dict(Counter(trial.status for trial in result.trials)),
            "search_seconds": round(seconds, 1),
            "curve": curve(result.trials, first),
        }
        rows.append(row)
        shown = {key: row[key] for key in ("baseline", "baseline_ms", "best_ms", "speedup", "hit_rate")}
        print(f"{model} on {name} {guide}: {shown}", file=sys.stderr, flush=True)
    return rows


def least_seconds(graph, cluster) -> float:
    """The bound of every step in which all replicas update everything, wherever messages are cut and in any order."""
    from offbeat.plan import lower
    from offbeat.runtime.comm import known_costs
    from offbeat.search.anneal import bound
    from offbeat.simulate.fast.gradients import gradients_of
    from offbeat.strategy import build_strategy

    plan = lower(graph, cluster, build_strategy("wfbp", graph, cluster))
    gradients = gradients_of(plan, known_costs("gloo", cluster.world_size))
    assert gradients is not None
    return bound(gradients, barrier=False)


def trial_maker(model: str, name: str, graph, cluster, options, stack: ExitStack):
    """Strategies and the best so far → trials, real or replayed."""
    if options.replayed:
        noise, site = np.random.default_rng(options.seed), make_site(name)
        spread = 0.0 if options.transfer else NOISE
        return lambda strategies, best: replayed(graph, strategies, site, noise, spread)
    from offbeat.search.auto.trials import TrialOptions, TrialRunner

    trial_options = TrialOptions(*options.steps, timeout_seconds=120, batch=8)
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
    from offbeat.cost.measured import Costs
    from offbeat.runtime.comm import known_costs
    from offbeat.search.auto.tune import Options, tune
    from offbeat.simulate.learned.features import TrainingSchedule

    # The builder's second run is one more than the finalists'.
    again = 0 if options.transfer else min(FINALISTS, (options.trials - 2) // 2)
    settings = Options(
        trials=options.trials - (again + 1 if again else 0),
        finalists=again,
        guide=name.split(maxsplit=1)[0],
        search=name,
        seed=options.seed,
        candidates=options.candidates,
        schedule=TrainingSchedule(epochs=20) if options.quick else TrainingSchedule(),
        **more,
    )
    # Real trials use gloo; of the sites of replayed ones nobody is told.
    costs = Costs() if options.replayed else known_costs("gloo", cluster.world_size)
    return tune(graph, cluster, run, settings, store=store, costs=costs, on_progress=lambda state: show(name, state))


def show(name: str, state) -> None:
    took = "none" if state.trial.seconds is None else f"{state.trial.seconds * 1e3:.1f} ms"
    best = "none" if state.best is None else f"{state.best.seconds * 1e3:.1f} ms"
    number = f"{name} {state.number}/{state.trials}"
    print(f"{number} {state.trial.strategy.name} {state.trial.status} {took}, best {best}", file=sys.stderr, flush=True)


def transfer_case(model: str, name: str, options) -> list[dict]:
    """Trials needed alone and with the trials of two other domains, for each seed."""
    other_cluster = next(each for each in ("4x1G", "mixed") if each != name)
    other_model = next(each for each in ("bert", "vgg") if each != model)
    sources = {"alone": None, "same model": (model, other_cluster), "same cluster": (other_model, name)}
    best: dict[str, list[list[float]]] = {source: [] for source in sources}
    for seed in range(options.seeds):
        settings = argparse.Namespace(**{**vars(options), "seed": seed})
        for source, domain in sources.items():
            trials = searched(model, name, domain, settings)
            best[source].append(np.minimum.accumulate([trial.seconds or np.inf for trial in trials]).tolist())
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
                "first_round_ms": round(statistics.mean(curve[3] for curve in found) * 1e3, 2),
                "best_ms": round(statistics.mean(curve[-1] for curve in found) * 1e3, 2),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def mean_trials_needed(rows: list[dict], trials: int) -> dict[str, float]:
    """By what a search began with; one that did not come so far counts as all its trials and one more."""
    needed: dict[str, list[int]] = {}
    for row in rows:
        needed.setdefault(row["earlier_trials"], []).extend(count or trials + 1 for count in row["trials_needed"])
    return {source: round(statistics.mean(counts), 2) for source, counts in needed.items()}


_SEARCHED: dict[tuple[str, str, tuple[str, str] | None, int], list] = {}
"""Trials of searches so far: one that is alone is also the earlier one of others."""


def searched(model: str, name: str, earlier: tuple[str, str] | None, options) -> list:
    """The trials of a search that begins with those of an earlier one, if any."""
    from offbeat.search.auto.store import TrialStore

    key = (model, name, earlier, options.seed)
    if key in _SEARCHED:
        return _SEARCHED[key]
    graph, cluster = make_graph(model), make_cluster(name)
    with tempfile.TemporaryDirectory() as folder, TrialStore(Path(folder) / "t.sqlite") as store, ExitStack() as stack:
        if earlier is not None:
            store.add(make_graph(earlier[0]), make_cluster(earlier[1]), *searched(*earlier, None, options))
        run = trial_maker(model, name, graph, cluster, options, stack)
        _SEARCHED[key] = list(search_in(store, "combined", graph, cluster, run, options).trials)
    return _SEARCHED[key]


def confirm(run, by_hand: list, winners: dict, rounds: int) -> tuple:
    """The best of the builders, and the medians of repeated trials of it and of every winner, a round of all after a
    round of all."""
    different = {trial.strategy.digest: trial.strategy for trial in (*by_hand, *winners.values())}
    seconds: dict[str, list[float]] = {digest: [] for digest in different}
    for trial in run(list(different.values()) * rounds, None):
        if trial.status == "done":
            seconds[trial.strategy.digest].append(trial.seconds)
    median = {digest: statistics.median(found) for digest, found in seconds.items() if found}
    if not any(trial.strategy.digest in median for trial in by_hand):
        sys.exit("builders: no second trial came to its end")
    baseline = min(by_hand, key=lambda trial: median.get(trial.strategy.digest, float("inf")))
    final = {name: median[trial.strategy.digest] for name, trial in winners.items() if trial.strategy.digest in median}
    return baseline, {"baseline": median[baseline.strategy.digest], **final}


def highest_speedup(graph, cluster, site) -> float:
    """Of the best tuned builder's time over the best found by replaying the site itself, without noise."""
    from offbeat.search.auto.neighbours import starting_strategies, vary
    from offbeat.search.auto.sampler import Sampler

    sampler = Sampler(graph, cluster)
    built = tuned_builders(graph, cluster, quick=False)
    known = {strategy.digest: strategy for strategy in (*built, *starting_strategies(graph, cluster))}
    seconds = {digest: site.seconds(graph, strategy) for digest, strategy in known.items()}
    baseline = min(seconds[strategy.digest] for strategy in built)
    while len(seconds) < CEILING_REPLAYS:
        for digest in sorted(seconds, key=seconds.__getitem__)[:4]:
            for near in vary(sampler, known[digest], 6):
                if near.digest not in known:
                    known[near.digest] = near
                    seconds[near.digest] = site.seconds(graph, near)
    return baseline / min(seconds.values())


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
