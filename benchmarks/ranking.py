"""How well each predictor ranks strategies: pairwise accuracy on held-out trials.

    python benchmarks/make_dataset.py && python benchmarks/ranking.py --json [--quick] [--domains 6] [--epochs 200]

Predictors: `predefined` (AutoSync's analytic model), `linear`, `rnn` and `gat` on raw and predefined features,
`replayer` (with the cluster file's figures, not those of the site that made the points), and `combined`, which learns
the replayer's error.
  within     70/15/15 splits of one domain, the epoch chosen on the 15% for validation, three seeds;
  transfer   trained on the other domains of the same source, tested on this one;
  curve      trained on the first 10, 20, 40 and 80 trials of a domain, tested on the held-out ones.
Replayed and measured trials are never mixed in a domain. Accuracy is over pairs that differ by more than 1%.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from step_time import machine

LEARNED = ("linear", "rnn", "gat", "combined")
CURVE = (10, 20, 40, 80)
LEAST = 30
"""Trials a domain needs, so that its test split holds pairs worth counting."""


class Domain:
    """The trials of one model on one cluster from one source, encoded."""

    def __init__(self, name: str, source: str, plans: list, seconds: list[float]) -> None:
        self.name, self.source = name, source
        self.plans, self.seconds = plans, np.array(seconds)

    def samples(self, chosen, replay: bool):
        from offbeat.simulate.learned.ranking import Samples

        return Samples([self.plans[i][replay] for i in chosen], self.seconds[chosen].tolist())


def load(path: Path, limit: int | None) -> list[Domain]:
    from offbeat.plan import lower
    from offbeat.search.auto.store import TrialStore
    from offbeat.simulate.learned.features import encode

    found = []
    with TrialStore(path) as store:
        for domain in store.domains():
            graph, cluster = store.load_domain(domain)
            for source in ("measured", "replayed"):
                known = store.trials(domain.graph_digest, domain.cluster_digest, source=source)
                trials = [trial for trial in known if trial.usable]
                if len(trials) < LEAST:
                    continue
                lowered = [lower(graph, cluster, trial.strategy) for trial in trials]
                plans = [(encode(plan), encode(plan, replay=True)) for plan in lowered]
                name = f"{domain.model} on {domain.cluster}"
                found.append(Domain(name, source, plans, [trial.seconds for trial in trials]))
                print(f"{name}: {len(trials)} {source} trials", file=sys.stderr, flush=True)
    # Measured domains first, as there are few of them.
    found.sort(key=lambda domain: domain.source)
    return found[:limit]


def split(count: int, seed: int):
    order = np.random.default_rng(seed).permutation(count)
    first, second = round(0.7 * count), round(0.85 * count)
    return order[:first], order[first:second], order[second:]


def fixed(domain: Domain, chosen) -> dict[str, float]:
    """The predictors that are not trained."""
    from offbeat.search.auto.select import ranking_accuracy

    return {
        name: ranking_accuracy([domain.plans[i][replay].base for i in chosen], domain.seconds[chosen])
        for name, replay in (("predefined", False), ("replayer", True))
    }


def trained(kind: str, train, test, validation, options, seed: int) -> float:
    from offbeat.simulate.learned.ranking import Schedule, Simulator

    simulator = Simulator(kind, hidden=options.hidden, seed=seed)
    epochs = options.epochs
    schedule = Schedule(epochs=epochs, decay_epochs=(epochs * 2 // 5, epochs * 4 // 5))
    simulator.fit(train, schedule, validation)
    return simulator.accuracy([test])


def within(domain: Domain, options, seed: int) -> dict[str, float]:
    train, check, test = split(len(domain.seconds), seed)
    scores = fixed(domain, test)
    for kind in LEARNED:
        parts = [domain.samples(part, kind == "combined") for part in (train, check, test)]
        scores[kind] = trained(kind, parts[:1], parts[2], parts[1:2], options, seed)
    return scores


def curve(domain: Domain, options, seed: int) -> dict[int, dict[str, float]]:
    train, _, test = split(len(domain.seconds), seed)
    result = {}
    for count in CURVE:
        if count <= len(train):
            result[count] = fixed(domain, test)
            for kind in LEARNED:
                some, rest = (domain.samples(part, kind == "combined") for part in (train[:count], test))
                result[count][kind] = trained(kind, [some], rest, None, options, seed)
    return result


def transferred(domains: list[Domain], target: Domain, options, seed: int) -> dict[str, float]:
    others = [domain for domain in domains if domain is not target and domain.source == target.source]
    everything = np.arange(len(target.seconds))
    scores = fixed(target, everything)
    if others:
        for kind in LEARNED:
            replay = kind == "combined"
            train = [domain.samples(np.arange(len(domain.seconds)), replay) for domain in others]
            scores[kind] = trained(kind, train, target.samples(everything, replay), None, options, seed)
    return scores


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    kinds = ("predefined", *LEARNED[:3], "replayer", "combined")
    values = {kind: [row[kind] for row in rows if kind in row and not np.isnan(row[kind])] for kind in kinds}
    return {kind: round(statistics.mean(found), 4) for kind, found in values.items() if found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two domains, one seed, few epochs: a smoke test")
    parser.add_argument("--store", type=Path, default=Path("offbeat-dataset.sqlite"))
    parser.add_argument("--domains", type=int, help="at most so many")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=32)
    options = parser.parse_args()
    if options.quick:
        options.domains, options.seeds, options.epochs = 2, 1, min(options.epochs, 20)
    if not options.store.is_file():
        sys.exit(f"{options.store}: there is no dataset; make one with benchmarks/make_dataset.py")
    domains = load(options.store, options.domains)
    rows, curves = [], []
    for domain in domains:
        for seed in range(options.seeds):
            row = {"domain": domain.name, "source": domain.source, "seed": seed}
            row |= {"within": within(domain, options, seed), "transfer": transferred(domains, domain, options, seed)}
            rows.append(row)
            curves.append(curve(domain, options, seed))
            print(f"{domain.name} ({domain.source}) seed {seed}: {mean([row['within']])}", file=sys.stderr, flush=True)
    result = {"benchmark": "ranking", "machine": machine(), "domains": len(domains), "epochs": options.epochs}
    for source in ("replayed", "measured"):
        mine = [row for row in rows if row["source"] == source]
        if mine:
            result[source] = {part: mean([row[part] for row in mine]) for part in ("within", "transfer")}
            paths = [c for c, row in zip(curves, rows, strict=True) if row["source"] == source]
            result[source]["curve"] = {n: mean([c[n] for c in paths if n in c]) for n in CURVE}
    print(json.dumps({key: result[key] for key in result if key in ("replayed", "measured")}), file=sys.stderr)
    if options.json:
        print(json.dumps({**result, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
