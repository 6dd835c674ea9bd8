"""How well each predictor ranks strategies: pairwise accuracy on held-out trials.

    python benchmarks/make_dataset.py --real 40 && python benchmarks/ranking.py --json [--quick] [--keep FILE]

Predictors: `predefined` (AutoSync's analytic model), `linear`, `rnn` and `gat` on raw and predefined features,
`replayer` (the folded replay with the cluster file's nominal figures, and the ways that gloo's messages take where
trials are measured), `fitted` (the same at costs fitted to the training trials), and `combined`, which is what
`offbeat tune` predicts with: the fitted replayer, or a model that has learned its error where that has been shown to
rank better, here on the validation trials; without any it is the fitted replayer.
  within     70/15/15 splits of one domain, three seeds; nine for measured domains, which are small. The second part
             is used by `combined` alone;
  transfer   trained on the other domains of the same source with as many updates as within one, tested on all of this;
  curve      trained on the first 10, 20, 40 and 80 trials of a domain, tested on the held-out ones: who is best when.
Accuracy is over pairs that differ by more than 5%, about as much as two trials of one strategy may differ; `all_pairs`
has the same over pairs that differ by more than 1%.

Measured and replayed trials are reported apart and never mixed. Only the measured ones say how well the replayer ranks.
Replayed ones were labelled by another replay at costs that no predictor is told (see make_dataset.py), so there the
replayer's accuracy says how much those hidden costs matter, and the others' how much of them can be learned.
`--keep FILE` keeps every result as it is found and takes those that are there, so that the work can be done in pieces.
"""

import argparse
import functools
import json
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from step_time import machine

from offbeat.search.auto.fit import fit_costs

LEARNED = ("linear", "rnn", "gat")
PREDICTORS = ("predefined", "linear", "rnn", "gat", "replayer", "fitted", "combined")
CURVE = (10, 20, 40, 80)
LEAST = 30
"""Trials a domain needs, so that its test split holds pairs worth counting."""
TIES = {"clear": 0.05, "all": 0.01}
Scores = dict[str, float]
"""By the names of `TIES`."""
EARLIER = 40
"""Trials of each other domain that costs are fitted to."""
MEASURED_SPLITS = 3
"""Times as many seeds where a test split holds a handful of trials."""


class Domain:
    """The trials of one model on one cluster from one source, encoded when they are first needed."""

    def __init__(self, name: str, source: str, graph, cluster, trials: list) -> None:
        self.name, self.source = name, source
        self.graph, self.cluster, self.trials = graph, cluster, trials
        self.seconds = np.array([trial.seconds for trial in trials])

    @functools.cached_property
    def lowered(self) -> list:
        from offbeat.plan import lower

        return [lower(self.graph, self.cluster, trial.strategy) for trial in self.trials]

    @functools.cached_property
    def costs(self):
        """What is known without a trial: that gloo ran measured ones; of the sites of replayed ones, nothing."""
        from offbeat.cost.measured import Costs
        from offbeat.runtime.comm import known_costs

        return known_costs("gloo", self.cluster.world_size) if self.source == "measured" else Costs()

    @functools.cached_property
    def plans(self) -> list:
        """Without a replay."""
        from offbeat.simulate.learned.features import encode

        return [encode(plan) for plan in self.lowered]

    def replays(self, chosen, costs) -> list[float]:
        from offbeat.simulate.predict import simulate

        return [simulate(self.lowered[i], costs, memory=False).iteration_time for i in chosen]

    def samples(self, chosen, costs=None):
        """What models learn from and are tested on; with costs, with what replay says at them."""
        from offbeat.simulate.learned.features import Samples, encode

        if costs is None:
            return Samples([self.plans[i] for i in chosen], self.seconds[chosen].tolist())
        encoded = [encode(self.lowered[i], replay=True, costs=costs) for i in chosen]
        return Samples(encoded, self.seconds[chosen].tolist())

    def evidence(self, chosen) -> list:
        from offbeat.search.auto.fit import Evidence

        return [Evidence(self.lowered[i], float(self.seconds[i])) for i in chosen]


def load(path: Path, limit: int | None) -> list[Domain]:
    """Measured domains, and at most `limit` replayed ones that cover the models and the clusters evenly."""
    from offbeat.search.auto.store import TrialStore

    found: dict[str, list[Domain]] = {"measured": [], "replayed": []}
    with TrialStore(path) as store:
        for domain in store.domains():
            graph, cluster = store.load_domain(domain)
            for source, domains in found.items():
                known = store.trials(domain.graph_digest, domain.cluster_digest, source=source)
                trials = [trial for trial in known if trial.usable]
                if len(trials) >= LEAST:
                    domains.append(Domain(f"{domain.model} on {domain.cluster}", source, graph, cluster, trials))
    return found["measured"] + spread(found["replayed"], limit)


def spread(domains: list[Domain], limit: int | None) -> list[Domain]:
    """So many of them along the diagonals of the table of models and clusters."""
    models = list(dict.fromkeys(domain.graph.name for domain in domains))
    clusters = list(dict.fromkeys(domain.cluster.name for domain in domains))

    def diagonal(domain: Domain) -> tuple[int, int]:
        model, cluster = models.index(domain.graph.name), clusters.index(domain.cluster.name)
        return (cluster - model) % len(clusters), model

    return sorted(domains, key=diagonal)[:limit]


def split(count: int, seed: int):
    order = np.random.default_rng(seed).permutation(count)
    first, second = round(0.7 * count), round(0.85 * count)
    return order[:first], order[first:second], order[second:]


def untrained(domain: Domain, chosen, fitted) -> dict[str, Scores]:
    """The predictors that are no models; `fitted` are costs told by trials."""
    predicted = {
        "predefined": [domain.plans[i].base for i in chosen],
        "replayer": domain.replays(chosen, domain.costs),
        "fitted": domain.replays(chosen, fitted),
    }
    return {name: accuracies(seconds, domain.seconds[chosen]) for name, seconds in predicted.items()}


def accuracies(predicted, seconds) -> Scores:
    from offbeat.search.auto.select import ranking_accuracy

    return {name: ranking_accuracy(predicted, seconds, tie) for name, tie in TIES.items()}


def trained(kind: str, train, test, options, epochs: int, seed: int) -> Scores:
    from offbeat.simulate.learned.ranking import Simulator, TrainingSchedule

    simulator = Simulator(kind, hidden=options.hidden, seed=seed)
    if kind in ("rnn", "gat") and options.network_epochs:
        epochs = math.ceil(epochs * options.network_epochs / options.epochs)
    schedule = TrainingSchedule(epochs=epochs, decay_epochs=(epochs * 2 // 5, epochs * 4 // 5))
    simulator.fit(train, schedule)
    return accuracies(simulator.predict(test.plans), test.seconds)


def within(domain: Domain, _: list[Domain], options, seed: int) -> dict[str, Scores]:
    train, check, test = split(len(domain.seconds), seed)
    fitted = fit_costs(domain.evidence(train), domain.costs)
    scores = untrained(domain, test, fitted)
    parts = [domain.samples(part) for part in (train, check, test)]
    for kind in LEARNED:
        scores[kind] = trained(kind, parts[:1], parts[2], options, options.epochs, seed)
    scores["combined"] = combined(*(domain.samples(part, fitted) for part in (train, check, test)), options, seed)
    return scores


def combined(train, check, test, options, seed: int) -> Scores:
    """The replay that the samples hold, unless a model that learns its error ranks the validation trials better."""
    from offbeat.simulate.learned.ranking import Simulator, TrainingSchedule

    simulator = Simulator("combined", hidden=options.hidden, seed=seed)
    epochs = options.epochs
    simulator.fit([train], TrainingSchedule(epochs=epochs, decay_epochs=(epochs * 2 // 5, epochs * 4 // 5)))
    replayed, learned = ([plan.base for plan in check.plans], simulator.predict(check.plans))
    before, after = (accuracies(each, check.seconds)["clear"] for each in (replayed, learned))
    predicted = simulator.predict(test.plans) if after > before else [plan.base for plan in test.plans]
    return accuracies(predicted, test.seconds)


def curve(domain: Domain, _: list[Domain], options, seed: int) -> dict[str, dict[str, Scores]]:
    train, _check, test = split(len(domain.seconds), seed)
    result = {}
    for count in CURVE:
        if count <= len(train):
            fitted = fit_costs(domain.evidence(train[:count]), domain.costs)
            scores = untrained(domain, test, fitted)
            some, rest = domain.samples(train[:count]), domain.samples(test)
            for kind in LEARNED:
                scores[kind] = trained(kind, [some], rest, options, options.epochs, seed)
            scores["combined"] = scores["fitted"]
            result[str(count)] = scores
    return result


def transfer(domain: Domain, domains: list[Domain], options, seed: int) -> dict[str, Scores]:
    others = [other for other in domains if other is not domain and other.source == domain.source]
    everything = np.arange(len(domain.seconds))
    fitted = fit_costs(
        [each for other in others for each in other.evidence(range(min(EARLIER, len(other.seconds))))], domain.costs
    )
    scores = untrained(domain, everything, fitted)
    if others:
        epochs = max(10, math.ceil(options.epochs / len(others)))
        train = [other.samples(np.arange(len(other.seconds))) for other in others]
        for kind in LEARNED:
            scores[kind] = trained(kind, train, domain.samples(everything), options, epochs, seed)
        scores["combined"] = scores["fitted"]
    return scores


def todo(domains: list[Domain], options):
    """Seed by seed, so that what is left out when time is up is the same of every domain."""
    for seed in range(options.seeds):
        for domain in domains:
            for split_seed in range(seed, options.seeds * MEASURED_SPLITS, options.seeds):
                if split_seed == seed or domain.source == "measured":
                    yield within, domain, split_seed
    for part, seeds in ((transfer, options.transfer_seeds), (curve, options.curve_seeds)):
        yield from ((part, domain, seed) for seed in range(seeds) for domain in domains)


def work(domains: list[Domain], options) -> list[dict]:
    """Every part for every domain and seed, unless it is kept from before."""
    kept = {}
    if options.keep and options.keep.exists():
        rows = [json.loads(line) for line in options.keep.read_text().splitlines()]
        kept = {(row["part"], row["domain"], row["source"], row["seed"]): row for row in rows}
    began = time.monotonic()
    for part, domain, seed in todo(domains, options):
        key = (part.__name__, domain.name, domain.source, seed)
        if key in kept:
            continue
        if options.limit and time.monotonic() - began > options.limit:
            print("time is up; run it again with the same --keep for the rest", file=sys.stderr)
            break
        scores = part(domain, domains, options, seed)
        names = ("part", "domain", "source", "seed")
        kept[key] = {**dict(zip(names, key, strict=True)), "trials": len(domain.trials), "scores": scores}
        if options.keep:
            with options.keep.open("a") as stream:
                stream.write(json.dumps(kept[key]) + "\n")
        print(*key, json.dumps(scores), file=sys.stderr, flush=True)
    return list(kept.values())


def mean(rows: list[dict[str, Scores]], pairs: str = "clear") -> dict[str, float]:
    values = {
        kind: [row[kind][pairs] for row in rows if kind in row and not np.isnan(row[kind][pairs])]
        for kind in PREDICTORS
    }
    return {kind: round(statistics.mean(found), 4) for kind, found in values.items() if found}


def summary(rows: list[dict]) -> dict:
    result: dict = {}
    for source in ("measured", "replayed"):
        scores = {part: [r for r in rows if (r["source"], r["part"]) == (source, part)] for part in PARTS}
        if not scores["within"]:
            continue
        domains = {row["domain"]: row["trials"] for row in scores["within"]}
        found = {part: [row["scores"] for row in scores[part]] for part in PARTS}
        result[source] = {
            "domains": domains,
            "splits": len(found["within"]),
            "within": mean(found["within"]),
            "within_all_pairs": mean(found["within"], "all"),
            "within_by_domain": {
                name: mean([row["scores"] for row in scores["within"] if row["domain"] == name]) for name in domains
            },
            "transfer": mean(found["transfer"]),
            "curve": {
                str(count): mean([path[str(count)] for path in found["curve"]])
                for count in CURVE
                if found["curve"] and all(str(count) in path for path in found["curve"])
            },
        }
        result[source]["best_at"] = {
            count: max(accuracy, key=accuracy.__getitem__) for count, accuracy in result[source]["curve"].items()
        }
    return result


PARTS = ("within", "curve", "transfer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two domains, one seed, few epochs: a smoke test")
    parser.add_argument("--store", type=Path, default=Path("offbeat-dataset.sqlite"))
    parser.add_argument("--domains", type=int, help="at most so many replayed ones")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--transfer-seeds", type=int, default=3)
    parser.add_argument("--curve-seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--network-epochs", type=int, help="of rnn and gat, which take longest; as --epochs if none")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--keep", type=Path, help="file of results, to which more are added")
    parser.add_argument("--limit", type=float, help="seconds after which no more work is begun")
    options = parser.parse_args()
    if options.quick:
        options.domains, options.seeds, options.epochs = 2, 1, min(options.epochs, 20)
    if not options.store.is_file():
        sys.exit(f"{options.store}: there is no dataset; make one with benchmarks/make_dataset.py")
    rows = work(load(options.store, options.domains), options)
    result = {
        "benchmark": "ranking",
        "machine": machine(),
        "epochs": options.epochs,
        "network_epochs": options.network_epochs or options.epochs,
        "labels": {
            "measured": "medians of real trials on the emulated cluster with paced compute",
            "replayed": "expanded replay at hidden costs of the site, with 2% of noise; predictors are told neither",
        },
        **summary(rows),
    }
    print(json.dumps(summary(rows), indent=1), file=sys.stderr)
    if options.json:
        print(json.dumps({**result, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
