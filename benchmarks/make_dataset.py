"""A dataset of trials {(G, R, S), seconds} over several models and clusters, as in the AutoSync supplement's §9.

    python benchmarks/make_dataset.py --json [--store FILE] [--points 100] [--real 0] [--export FOLDER]

Every domain gets `--points` strategies: the builders, draws of the sampler, and neighbours of the best of both. Their
times come from replay and are stored as 'replayed'. That replay runs with the costs of a site that no predictor knows:
other efficiencies for each collective, a fixed cost of every call, interference, a slower device and 2% of noise
(`SiteCosts`). It is still a replay, so these points flatter the replayer and whatever builds on it; what they show is
how the learned models compare and transfer. Only measured points say how well replay itself ranks. With `--real N`
also N strategies of every domain with dense gradients are run on the emulated cluster and stored as 'measured';
compute is paced there, because four workers do not fit on two cores. Running it again adds only what is missing.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from step_time import machine

from offbeat.cluster import ClusterSpec, Node
from offbeat.cost.measured import Costs

STEP_SECONDS = 0.12
"""Paced compute of one step; forward takes a third of it."""
NOISE = 0.02
MODELS = {
    # Zoo name and options: parameters of 3.5 to 9 MiB, for which the links below take 0.4 to 2 times the compute.
    "vgg": ("vgg16", {"scale": 0.1, "batch": 4}),
    "resnet": ("resnet50", {"scale": 0.25, "batch": 4}),
    "bert": ("bert_3l", {"scale": 0.3}),
    "transformer": ("transformer", {"scale": 0.3, "vocabulary": 500, "shared_embeddings": False}),
    "ncf": ("ncf_dense", {"scale": 0.1}),
    "ncf_sparse": ("ncf_sparse", {"scale": 0.1}),
}
CLUSTERS = {
    # Bandwidth of each host's link and ranks on each host.
    "4x1G": (("1Gbit/s",) * 4, 1),
    "mixed": (("500Mbit/s", "500Mbit/s", "1Gbit/s", "1Gbit/s"), 1),
    "2x400M": (("400Mbit/s",) * 2, 1),
    "2x2": (("600Mbit/s",) * 2, 2),
}
EMULATED_LATENCY_SECONDS = 160e-6


@dataclass(frozen=True)
class SiteCosts(Costs):
    """What a site's network really costs, beyond what its cluster file says."""

    efficiency: dict[str, float] = field(default_factory=dict)
    call_seconds: float = 0.0

    def collective(self, task, cluster, in_flight=2):
        taken, hidden = super().collective(task, cluster, in_flight)
        return taken / self.efficiency.get(task.kind, 0.9) + self.call_seconds, hidden


def site_costs(cluster: str) -> SiteCosts:
    """The same for a cluster in every run."""
    random = np.random.default_rng(sum(cluster.encode()))
    kinds = ("all_reduce", "reduce", "broadcast", "gather", "all_gather", "reduce_scatter")
    slowest = int(random.integers(2))
    return SiteCosts(
        update_call_seconds=float(random.uniform(5e-5, 3e-4)),
        gap_seconds=float(random.uniform(1e-3, 4e-3)),
        interference=float(random.uniform(0.05, 0.4)),
        compute_scale={slowest: float(random.uniform(1.0, 1.15))},
        efficiency={kind: float(random.uniform(0.55, 0.97)) for kind in kinds},
        call_seconds=float(random.uniform(1e-4, 1.2e-3)),
    )


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


def make_graph(model: str):
    """The model's graph with the compute times it is paced with."""
    from offbeat import zoo
    from offbeat.search.auto.trials import with_compute_seconds

    name, options = MODELS[model]
    return with_compute_seconds(zoo.capture(name, **options), STEP_SECONDS / 3, STEP_SECONDS * 2 / 3)


def build_paced(model: str):
    """What a real trial trains: true parameters and gradients, paced compute."""
    import torch

    from offbeat.emulate.paced import PacedModel

    return PacedModel.from_graph(make_graph(model), STEP_SECONDS / 3, STEP_SECONDS * 2 / 3), (torch.ones(1),)


def emulation_of(cluster: str):
    from offbeat.emulate import Emulation

    bandwidths, devices = CLUSTERS[cluster]
    return Emulation(list(bandwidths), ranks_per_host=devices)


def replayed(graph, cluster: ClusterSpec, strategies, costs: Costs, noise: np.random.Generator):
    """Trials by replay at the site's costs."""
    from offbeat.plan import lower
    from offbeat.search.auto.store import Trial
    from offbeat.simulate.predict import simulate

    for strategy in strategies:
        seconds = simulate(lower(graph, cluster, strategy), costs, memory=False).iteration_time
        yield Trial(strategy, "done", seconds * math.exp(noise.normal(0.0, NOISE)), source="replayed", search="dataset")


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
    from offbeat.search.auto.sampler import Sampler

    graph, cluster = make_graph(model), make_cluster(name)
    known = store.trials(graph.digest, cluster.digest, source="replayed")
    if len(known) >= points:
        return
    noise, costs = np.random.default_rng(seed), site_costs(name)
    sampler = Sampler(graph, cluster, seed)
    first = (built_strategies(graph, cluster) + sampler.sample(points))[: max(2, points * 7 // 10)]
    trials = list(replayed(graph, cluster, first, costs, noise))
    best = sorted(trials, key=lambda trial: trial.seconds)[:4]
    seen = {trial.strategy.digest for trial in trials}
    near = [s for trial in best for s in sampler.vary(trial.strategy, points)]
    fresh = list({s.digest: s for s in near if s.digest not in seen}.values())
    # Evenly from the neighbours of all four.
    step = max(1, len(fresh) // max(1, points - len(trials)))
    trials += replayed(graph, cluster, fresh[::step][: points - len(trials)], costs, noise)
    store.add_many(graph, cluster, trials)


def measure_domain(store, model: str, name: str, count: int, seed: int) -> None:
    """Real trials on the emulated cluster."""
    from dataclasses import replace

    from offbeat.search.auto.sampler import Sampler
    from offbeat.search.auto.trials import TrialOptions, TrialRunner

    graph, cluster = make_graph(model), make_cluster(name)
    known = {t.strategy.digest for t in store.trials(graph.digest, cluster.digest, source="measured")}
    wanted = (built_strategies(graph, cluster)[::3] + Sampler(graph, cluster, seed).sample(count))[:count]
    missing = [strategy for strategy in wanted if strategy.digest not in known]
    if not missing:
        return
    options = TrialOptions(warm_up=6, timed=12, stop_ratio=None, timeout_seconds=120, batch=6)
    with emulation_of(name) as emulation:
        runner = TrialRunner(emulation, "make_dataset:build_paced", (model,), options)
        for trial in runner.run(graph, cluster, missing):
            store.add(graph, cluster, replace(trial, search="dataset"))
            print(f"{model} on {name}: {trial.status} {trial.seconds} {trial.error}", file=sys.stderr, flush=True)


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
    parser.add_argument("--real-model", choices=MODELS, action="append", help="only these; vgg, bert and ncf if none")
    parser.add_argument("--real-cluster", choices=CLUSTERS, action="append", help="only these; 4x1G and mixed if none")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--cluster", choices=CLUSTERS, action="append")
    parser.add_argument("--export", type=Path, help="also write JSON lines, one folder per domain")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from offbeat.search.auto.store import TrialStore

    with TrialStore(options.store) as store:
        for model in options.model or MODELS:
            for cluster in options.cluster or CLUSTERS:
                fill_domain(store, model, cluster, options.points, options.seed)
                print(f"{model} on {cluster}: {options.points} replayed points", file=sys.stderr, flush=True)
        if options.real:
            for model in options.real_model or ("vgg", "bert", "ncf"):
                for cluster in options.real_cluster or ("4x1G", "mixed"):
                    measure_domain(store, model, cluster, options.real, options.seed)
        if options.export:
            store.export(options.export)
        if options.json:
            print(json.dumps({"benchmark": "make_dataset", "machine": machine(), **summary(store)}, indent=1))


if __name__ == "__main__":
    main()
