"""A dataset of trials {(G, R, S), seconds} over several models and clusters, as in the AutoSync supplement's §9.

    python benchmarks/make_dataset.py --json [--store FILE] [--points 100] [--real 0] [--export FOLDER]

Every domain gets `--points` strategies: the builders, draws of the sampler, and neighbours of the best of both. Their
times come from replay and are stored as 'replayed'. A replay that labels points must not be the one that predicts them,
or the replayer would be tested against itself. The two differ in what they compute and in what they know (`Site`):
labels come from the expanded replay, in which every rank, link and message is a task of its own, at a site's own
bandwidths, latencies, efficiencies of each kind of collective, interference, straggler and cost of updates, with 2% of
noise; predictors get the folded replay and the cluster file's nominal figures. Both are still written by the same
people, so these points show how learned models compare and transfer, not how well replay ranks.

That is what measured points are for: with `--real N` also N strategies of some domains are run on the emulated cluster
(shaped links, real gloo traffic) and stored as 'measured'; compute is paced there, because four workers do not fit on
two cores. Running it again adds only what is missing; `benchmarks/results/dataset_summary.json` is what `--json` said.
"""

import argparse
import functools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from step_time import machine

from offbeat.cluster import ClusterSpec, Node
from offbeat.cost.measured import CollectiveFit, Costs

STEP_SECONDS = 0.12
"""Paced compute of one step; forward takes a third of it."""
LONGER_STEP_SECONDS = {"bert_large": 0.3}
"""Of a larger model."""
NOISE = 0.02
SPREAD = 0.15
ATTEMPTS = 3
MODELS = {
    # Zoo name and options: parameters of 3.5 to 9 MiB (BERT-large 17), for which the links below take 0.4 to 2 times
    # the compute.
    "vgg": ("vgg16", {"scale": 0.1, "batch": 4}),
    "resnet": ("resnet50", {"scale": 0.25, "batch": 4}),
    "bert": ("bert_3l", {"scale": 0.3}),
    "transformer": ("transformer", {"scale": 0.3, "vocabulary": 500, "shared_embeddings": False}),
    "ncf": ("ncf_dense", {"scale": 0.1}),
    "ncf_sparse": ("ncf_sparse", {"scale": 0.1}),
    "bert_large": ("bert_large", {"scale": 0.2}),
}
IN_DATASET = ("vgg", "resnet", "bert", "transformer", "ncf", "ncf_sparse")
CLUSTERS = {
    # Bandwidth of each host's link and ranks on each host.
    "4x1G": (("1Gbit/s",) * 4, 1),
    "mixed": (("500Mbit/s", "500Mbit/s", "1Gbit/s", "1Gbit/s"), 1),
    "2x400M": (("400Mbit/s",) * 2, 1),
    "2x2": (("600Mbit/s",) * 2, 2),
    "4x700M": (("700Mbit/s",) * 4, 1),
}
CLUSTERS_IN_DATASET = ("4x1G", "mixed", "2x400M", "2x2")
EMULATED_LATENCY_SECONDS = 160e-6


@dataclass(frozen=True)
class Site:
    """What a cluster really is like, which no predictor is told."""

    cluster: ClusterSpec
    costs: Costs

    def seconds(self, graph, strategy) -> float:
        from offbeat.plan import lower
        from offbeat.simulate.predict import simulate

        # The strategy names the cluster as its file describes it.
        plan = lower(graph, self.cluster, strategy.model_copy(update={"cluster": ""}))
        return simulate(plan, self.costs, expand=True, memory=False).iteration_time


@functools.cache
def make_site(name: str) -> Site:
    """The same for a cluster in every run. Ranges are about what gloo was seen to do on emulated links and CPUs."""
    from offbeat.cost.tables import closed_form

    random = np.random.default_rng(sum(name.encode()))
    nominal = make_cluster(name)
    nodes = tuple(
        node.model_copy(
            update={
                "bandwidth": node.bandwidth * random.uniform(0.75, 0.97),
                "latency": node.latency * random.uniform(1.0, 4.0),
                "intra_latency": node.intra_latency * random.uniform(1.0, 2.0),
            }
        )
        for node in nominal.nodes
    )
    cluster = nominal.model_copy(update={"name": f"{name} as it is", "nodes": nodes})
    everyone = tuple(range(cluster.world_size))
    fits = {}
    for kind in ("reduce", "broadcast", "gather", "all_gather"):
        link = closed_form(kind, everyone, cluster, 0 if kind != "all_gather" else None)
        fits[kind, len(everyone)] = CollectiveFit(
            overhead_seconds=random.uniform(1e-4, 8e-4),
            latency_seconds=link.latency_seconds,
            seconds_per_byte=link.seconds_per_byte / random.uniform(0.5, 1.0),
        )
    costs = Costs(
        collectives=fits,
        update_call_seconds=random.uniform(5e-5, 3e-4),
        gap_seconds=random.uniform(1e-3, 4e-3),
        interference=random.uniform(0.05, 0.4),
        compute_scale={int(random.integers(2)): random.uniform(1.0, 1.15)},
    )
    return Site(cluster, costs)


def make_cluster(name: str) -> ClusterSpec:
    """As `Emulation.cluster_spec` describes it."""
    bandwidths, devices = CLUSTERS[name]
    nodes = tuple(
        Node(
            name=f"host{index}",
            device="cpu",
            devices=devices,
            memory="4GiB",
            peak_flops=50e9,
            bandwidth=bandwidth,
            latency=EMULATED_LATENCY_SECONDS,
            intra_bandwidth=2.5e9,
            intra_latency=EMULATED_LATENCY_SECONDS,
        )
        for index, bandwidth in enumerate(bandwidths)
    )
    return ClusterSpec(name=name, nodes=nodes)


@functools.cache
def make_graph(model: str):
    """The model's graph with the compute times it is paced with."""
    from offbeat import zoo
    from offbeat.search.auto.trials import with_compute_seconds

    name, options = MODELS[model]
    return with_compute_seconds(zoo.capture(name, **options), *phase_seconds(model))


def phase_seconds(model: str) -> tuple[float, float]:
    """Paced forward and backward."""
    seconds = LONGER_STEP_SECONDS.get(model, STEP_SECONDS)
    return seconds / 3, seconds * 2 / 3


def build_paced(model: str):
    """What a real trial trains: true parameters and gradients, paced compute."""
    import torch
    from paced import PacedModel

    return PacedModel.from_graph(make_graph(model), *phase_seconds(model)), (torch.ones(1),)


def emulation_of(cluster: str):
    from offbeat.emulate import Emulation

    bandwidths, devices = CLUSTERS[cluster]
    return Emulation(list(bandwidths), ranks_per_host=devices)


def replayed(graph, strategies, site: Site, noise: np.random.Generator, spread: float = NOISE):
    """Trials by replay of what a site is like."""
    from offbeat.search.auto.store import Trial

    for strategy in strategies:
        seconds = site.seconds(graph, strategy) * math.exp(noise.normal(0.0, spread))
        yield Trial(strategy, "done", seconds, source="replayed", search="dataset")


def built_strategies(graph, cluster: ClusterSpec) -> list:
    from offbeat.strategy import build_strategy

    settings = (
        *(("all_reduce", {"chunk": chunk}) for chunk in (1, 4, 16, 64)),
        *(("ddp", {"bucket": bucket}) for bucket in ("512KiB", "2MiB", "25MiB")),
        *(("horovod", {"fusion_bytes": size}) for size in ("1MiB", "8MiB", "64MiB")),
        *(("overlap", {"bucket": bucket}) for bucket in ("256KiB", "1MiB", "4MiB")),
        *(("partitioned_ps", {"threshold": size}) for size in ("64KiB", "1MiB")),
        *((name, {}) for name in ("ps", "ps_load_balanced", "uneven_partitioned_ps", "hierarchical_ps", "parallax")),
    )
    made = [build_strategy(name, graph, cluster, **options) for name, options in settings]
    return list({strategy.digest: strategy for strategy in made}.values())


def fill_domain(store, model: str, name: str, points: int, seed: int) -> None:
    """Replayed points: builders, draws, then neighbours of the best, which a search meets most."""
    from offbeat.search.auto.neighbours import vary
    from offbeat.search.auto.sampler import Sampler

    graph, cluster = make_graph(model), make_cluster(name)
    known = store.trials(graph.digest, cluster.digest, source="replayed")
    if len(known) >= points:
        return
    noise, site = np.random.default_rng(seed), make_site(name)
    sampler = Sampler(graph, cluster, seed)
    first = (built_strategies(graph, cluster) + sampler.sample(points))[: max(2, points * 7 // 10)]
    trials = list(replayed(graph, first, site, noise))
    best = sorted(trials, key=lambda trial: trial.seconds)[:4]
    seen = {trial.strategy.digest for trial in trials}
    near = [s for trial in best for s in vary(sampler, trial.strategy, points)]
    fresh = list({s.digest: s for s in near if s.digest not in seen}.values())
    # Evenly from the neighbours of all four.
    step = max(1, len(fresh) // max(1, points - len(trials)))
    trials += replayed(graph, fresh[::step][: points - len(trials)], site, noise)
    store.add(graph, cluster, *trials)


def real_strategies(graph, cluster: ClusterSpec, count: int, seed: int) -> list:
    """A quarter builders, a quarter neighbours of the overlapped ones, and draws, mixed so that any part has all."""
    from offbeat.search.auto.neighbours import vary
    from offbeat.search.auto.sampler import Sampler
    from offbeat.strategy import build_strategy

    built = built_strategies(graph, cluster)
    sampler = Sampler(graph, cluster, seed)
    near = vary(sampler, build_strategy("overlap", graph, cluster, bucket="1MiB"), count // 4)
    some = built[:: max(1, len(built) // max(1, count // 4))][: count // 4]
    wanted = {strategy.digest: strategy for strategy in (*some, *near, *sampler.sample(count))}
    chosen = list(wanted.values())[:count]
    return [chosen[position] for position in np.random.default_rng(seed).permutation(len(chosen))]


def measure_domain(store, model: str, name: str, count: int, seed: int) -> None:
    """Real trials on the emulated cluster; one whose steps differ much was disturbed and is made again."""
    from dataclasses import replace

    from offbeat.search.auto.trials import TrialOptions, TrialRunner

    graph, cluster = make_graph(model), make_cluster(name)
    known = {t.strategy.digest for t in store.trials(graph.digest, cluster.digest, source="measured")}
    wanted = real_strategies(graph, cluster, count, seed)
    missing = [strategy for strategy in wanted if strategy.digest not in known]
    options = TrialOptions(warm_up=6, timed=12, stop_ratio=None, timeout_seconds=60, batch=10)
    for attempt in range(ATTEMPTS):
        if not missing:
            return
        again = []
        with emulation_of(name) as emulation:
            runner = TrialRunner(emulation, "make_dataset:build_paced", (model,), options)
            for trial in runner.run(graph, cluster, missing):
                print(f"{model} on {name}: {trial.status} {trial.seconds} {trial.error}", file=sys.stderr, flush=True)
                if attempt < ATTEMPTS - 1 and disturbed(trial.steps):
                    again.append(trial.strategy)
                else:
                    store.add(graph, cluster, replace(trial, search="dataset"))
        missing = again


def disturbed(steps) -> bool:
    """Half of the steps lie further apart than they do on a quiet machine."""
    if not steps:
        return False
    low, high = np.percentile(steps, (25, 75))
    return bool(high > (1 + SPREAD) * low)


def summary(store) -> dict:
    domains = []
    for domain in store.domains():
        trials = store.trials(domain.graph_digest, domain.cluster_digest)
        row = {"model": domain.model, "cluster": domain.cluster, "points": len(trials)}
        for source in ("replayed", "measured"):
            times = [t.seconds for t in trials if t.source == source and t.usable]
            row[source] = len(times)
            if times:
                spread = {"fastest": min(times), "median": float(np.median(times)), "slowest": max(times)}
                row[f"{source}_ms"] = {key: round(value * 1e3, 2) for key, value in spread.items()}
        row["failed"] = sum(not t.usable for t in trials)
        domains.append(row)
    total = {key: sum(row[key] for row in domains) for key in ("points", "replayed", "measured", "failed")}
    models, clusters = {row["model"] for row in domains}, {row["cluster"] for row in domains}
    return {"models": len(models), "clusters": len(clusters), "domains": len(domains), **total, "rows": domains}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the summary")
    parser.add_argument("--store", type=Path, default=Path("offbeat-dataset.sqlite"))
    parser.add_argument("--points", type=int, default=100, help="replayed points of each domain")
    parser.add_argument("--real", type=int, default=0, help="real trials of each domain with dense gradients")
    parser.add_argument("--real-model", choices=MODELS, action="append", help="only these; vgg and bert if none")
    parser.add_argument("--real-cluster", choices=CLUSTERS, action="append", help="only these; 4x1G and mixed if none")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--cluster", choices=CLUSTERS, action="append")
    parser.add_argument("--export", type=Path, help="also write JSON lines, one folder per domain")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from offbeat.search.auto.store import TrialStore

    with TrialStore(options.store) as store:
        for model in options.model or IN_DATASET if options.points else ():
            for cluster in options.cluster or CLUSTERS_IN_DATASET:
                fill_domain(store, model, cluster, options.points, options.seed)
                print(f"{model} on {cluster}: {options.points} replayed points", file=sys.stderr, flush=True)
        if options.real:
            for model in options.real_model or ("vgg", "bert"):
                for cluster in options.real_cluster or ("4x1G", "mixed"):
                    measure_domain(store, model, cluster, options.real, options.seed)
        if options.export:
            store.export(options.export)
        if options.json:
            print(json.dumps({"benchmark": "make_dataset", "machine": machine(), **summary(store)}, indent=1))


if __name__ == "__main__":
    main()
