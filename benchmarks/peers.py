"""Step time and exactness of Offbeat beside other ways to synchronise a PyTorch job, all variants in one run.

    python benchmarks/peers.py --json [--quick] [--model vgg ...] [--regime balanced ...]

Two emulated hosts with real compute. The link's bandwidth is chosen from the measured compute, so that network divided
by compute is 1.6 (network-bound) or 1.0 (balanced). Every variant starts from the same weights, each rank with a batch
of its own, and first trains some steps: they are the try-out of its setting, and its parameters are then compared with
those of DDP with default buckets (`max_difference`; `max_movement` is how far training moved a parameter meanwhile). Of
eight bucket sizes of DDP the two best stay. Then short blocks of all variants alternate; `median_ms` and `spread_ms`
are over blocks.

| variant | what it is |
|---|---|
| ddp_default, ddp_bucket_N | DDP with default buckets; with buckets of N MiB |
| ddp_list_growing | DDP's `bucket_cap_mb_list` with sizes that double, from 0.25 MiB |
| ddp_list_offbeat | the same with the buckets of the plan that "auto" ended with |
| ddp_fp16, ddp_powersgd | DDP with torch's hooks, the first at the best bucket size, the second with one bucket |
| zero_optimizer | ZeroRedundancyOptimizer and DDP at the best bucket size |
| fsdp2, fsdp2_kept | `fully_shard` layer by layer, weights dropped after forward or kept until backward |
| deepspeed_zero_0 to 3 | DeepSpeed's stages, where it is installed |
| horovod_plan, byteps_plan | what these systems would send and when, run by Offbeat's engine |
| offbeat_auto, offbeat_fp16 | `strategy="auto"` after its trials; the plan it ended with, encoded in 16 bits |

`over_best_exact_peer` is a variant's median over the best median of exact variants that owe nothing to Offbeat's
search. `peak_rss_mib` is how much building a variant and its first steps add to the process at the most. What could not
run is in `refused`, with the reason. An exact variant whose parameters are not DDP's, or a lossy one that is far off,
ends the program with an error.
"""

import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from step_time import DDP_BUCKETS_MIB, REGIMES, alternate, machine, make_step, timed

HOSTS = 2
ZooModel = tuple[str, dict[str, Any]]
"""Name and options."""
MODELS: dict[str, ZooModel] = {
    # Steps compute for some 40 ms on one core, so that a case takes little over a minute
    "vgg": ("vgg16", {"scale": 0.15, "batch": 4}),
    "transformer": ("transformer", {"scale": 0.4, "batch": 6, "vocabulary": 500, "shared_embeddings": False}),
}
LOSSY = ("ddp_fp16", "ddp_powersgd", "offbeat_fp16")
CHECKED_STEPS = 6
"""Steps before parameters are compared."""
EXACT_AGREEMENT, LOSSY_AGREEMENT = 1e-3, 0.5
"""Largest difference as a share of the movement: sums in another order differ by far less than the first; a variant
beyond the second trains something else."""
POWERSGD_RANK = 4
LEARNING_RATE, MOMENTUM = 0.01, 0.9
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Variant:
    """A job of its own: one step of it, what ends outstanding work, and its whole parameters."""

    step: Callable[[], None]
    finish: Callable[[], None] | None
    parameters: Callable[[], list[Any]]


Maker = Callable[[Any, Any, Any], Variant]
"""Model, optimizer and batch → variant."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer repeats, for a smoke test")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--regime", choices=("network-bound", "balanced"), action="append")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    rows = []
    for model in options.model or MODELS:
        for regime in options.regime or ("network-bound", "balanced"):
            rows.append(run_case(model, regime, options.quick))
            print(describe(rows[-1]), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"benchmark": "peers", "machine": machine(), "rows": rows}, indent=1))
    for row in rows:
        if row["disagree"]:
            sys.exit(f"{row['model']}, {row['regime']}: not DDP's parameters: {', '.join(row['disagree'])}")


def run_case(model: str, regime: str, quick: bool) -> dict:
    from offbeat.emulate import Emulation

    name, zoo_options = MODELS[model]
    case = {
        "zoo": (name, {**zoo_options, "scale": zoo_options["scale"] / (2 if quick else 1)}),
        "blocks": 1 if quick else 4,
        "steps": 2 if quick else 6,
        # "auto" tries its first other plan after 13 steps and at most three, of five steps each.
        "auto_steps": 20 if quick else 36,
        "buckets_mib": (1, 8) if quick else DDP_BUCKETS_MIB,
    }
    with Emulation(HOSTS, bandwidth=None) as cluster:
        alone = launch(cluster, {**case, "local": True})
        bandwidth = 2 * (HOSTS - 1) / HOSTS * alone["bytes"] / (REGIMES[regime] * alone["seconds"])
        for host in range(HOSTS):
            cluster.set_bandwidth(host, bandwidth)
        found = launch(cluster, {**case, "compute_seconds": alone["seconds"]})
    return {
        "model": model,
        "regime": regime,
        "bandwidth_mbit": round(bandwidth * 8 / 1e6),
        "bytes": alone["bytes"],
        "compute_ms": round(alone["seconds"] * 1e3, 2),
        "emulation": cluster.kind,
        **found,
    }


def launch(cluster: Any, case: dict) -> dict:
    """One run of this file on every host; what rank 0 found."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(case)]
    results = cluster.run(command, env={"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}, timeout=300)
    return json.loads(next(line for line in reversed(results[0].stdout.splitlines()) if line.startswith("{")))


def work(case: dict) -> None:
    import logging

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    # A variant that leaves the other rank waiting must end with an error, not with the run's time.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = time_local(case["zoo"]) if case.get("local") else compare(case)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    # Threads of a dozen process groups are under way: taking them down in the interpreter's order may abort.
    os._exit(0)


def time_local(model: ZooModel) -> dict:
    """A step without the network while every host computes, which is what the variants will see."""
    import torch.distributed as dist

    built, optimizer, inputs = build(model)
    step = make_step(built, optimizer, inputs)
    timed(step, 3)
    dist.barrier()
    seconds = statistics.mean(on_all_ranks(statistics.median(timed(step, 10))))
    size = sum(parameter.numel() * parameter.element_size() for parameter in built.parameters())
    return {"bytes": size, "seconds": seconds}


def build(model: ZooModel) -> tuple[Any, Any, Any]:
    """The same weights on every rank, and a batch that no other rank has."""
    import torch
    import torch.distributed as dist

    from offbeat import zoo

    name, options = model
    torch.manual_seed(1 + dist.get_rank())
    inputs = zoo.build(name, **options)[1]
    torch.manual_seed(0)
    built = zoo.build(name, **options)[0]
    return built, sgd(built.parameters()), inputs


def sgd(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


class Comparison:
    """The variants that run, what is known of each, and why others do not run."""

    def __init__(self, model: ZooModel) -> None:
        self.model = model
        self.variants: dict[str, Variant] = {}
        self.facts: dict[str, dict] = {}
        self.refused: dict[str, str] = {}
        self.initial = [parameter.detach().clone() for parameter in build(model)[0].parameters()]
        self.reference: dict[int, list[Any]] = {}
        """DDP's parameters after so many steps."""

    def start(self, name: str, make: Maker, steps: int = CHECKED_STEPS) -> None:
        """Builds a variant, trains its first steps and compares; or notes why it cannot run."""
        memory, reason = PeakMemory(), None
        try:
            variant = make(*build(self.model))
            seconds = timed(variant.step, CHECKED_STEPS)
            facts = {"peak_rss_mib": memory.growth_mib(), "max_difference": self.difference(variant, CHECKED_STEPS)}
            if steps > CHECKED_STEPS:
                timed(variant.step, steps - CHECKED_STEPS)
                facts["max_difference"] = largest([facts["max_difference"], self.difference(variant, steps)])
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        failed = next((said for said in on_all_ranks(reason) if said), None)
        if failed:
            self.refused[name] = failed
            return
        self.variants[name] = variant
        self.facts[name] = {**facts, "tried_ms": statistics.mean(on_all_ranks(statistics.median(seconds[2:]))) * 1e3}

    def difference(self, variant: Variant, steps: int) -> float:
        """From DDP's parameters after as many steps, the largest of any rank; the first variant is DDP itself."""
        if variant.finish:
            variant.finish()
        present = [parameter.detach().clone() for parameter in variant.parameters()]
        expected = self.reference.setdefault(steps, present)
        return largest(on_all_ranks(max_distance(present, expected)))


def compare(case: dict) -> dict:
    found = Comparison(case["zoo"])
    found.start("ddp_default", ddp(), case["auto_steps"])
    sizes = {f"ddp_bucket_{size}": size for size in case["buckets_mib"]}
    for name, size in sizes.items():
        found.start(name, tuned_ddp(bucket_cap_mb=size))
    tried = {name: round(found.facts[name]["tried_ms"], 2) for name in sizes}
    ranked = sorted(tried, key=tried.__getitem__)
    for name in ranked[2:]:
        del found.variants[name]
    add_torch_variants(found, sizes[ranked[0]])
    for stage in range(4):
        found.start(f"deepspeed_zero_{stage}", deepspeed(stage))
    plan_name = add_offbeat_variants(found, case)
    pairs = {name: (variant.step, variant.finish) for name, variant in found.variants.items()}
    blocks, steal = alternate(pairs, case["blocks"], case["steps"])
    movement = max_distance(found.reference[CHECKED_STEPS], found.initial)
    return {
        **summary(blocks, found.facts, movement),
        "refused": found.refused,
        "tried_ms": tried,
        "auto_plan": plan_name,
        "stolen": steal,
    }


def add_torch_variants(found: Comparison, best_mib: float) -> None:
    growing = [0.25 * 2**power for power in range(8)]
    found.start("ddp_list_growing", tuned_ddp(bucket_cap_mb_list=growing))
    found.start("ddp_fp16", tuned_ddp(fp16_hook, bucket_cap_mb=best_mib))
    # The hook starts each bucket's second round when the first ends, which several buckets would do in another order on
    # each rank: one bucket for everything.
    found.start("ddp_powersgd", tuned_ddp(powersgd_hook, bucket_cap_mb=1024))
    found.start("zero_optimizer", zero_optimizer(best_mib))
    found.start("fsdp2", fsdp2(reshard_after_forward=True))
    found.start("fsdp2_kept", fsdp2(reshard_after_forward=False))


def add_offbeat_variants(found: Comparison, case: dict) -> str:
    """Returns the name of the plan that "auto" ended with."""
    import torch.distributed as dist

    import offbeat
    from offbeat.integrations.ddp import ddp_kwargs

    cluster = offbeat.ClusterSpec.homogeneous(nodes=dist.get_world_size(), devices_per_node=1)
    graph = timed_graph(found.model, cluster, case["compute_seconds"])
    found.start("horovod_plan", planned(offbeat.build_strategy("horovod", graph, cluster)))
    found.start("byteps_plan", planned(offbeat.build_strategy("byteps", graph, cluster)))
    kept = []
    found.start("offbeat_auto", planned("auto", kept), case["auto_steps"])
    if not kept:
        return "none"
    strategy = kept[0]._offbeat.plan.strategy
    found.start("offbeat_fp16", planned(in_16_bits(strategy)))
    found.start("ddp_list_offbeat", lambda m, o, i: ddp(**ddp_kwargs(strategy, m))(m, o, i))
    return strategy.name


def ddp(hook: Callable[[Any], None] | None = None, **options: Any) -> Maker:
    def make(model: Any, optimizer: Any, inputs: Any) -> Variant:
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(model, **options)
        if hook:
            hook(wrapped)
        return Variant(make_step(wrapped, optimizer, inputs), None, lambda: list(model.parameters()))

    return make


def tuned_ddp(hook: Callable[[Any], None] | None = None, **options: Any) -> Maker:
    """Gradients lie in the buckets, as whoever tunes DDP would have them."""
    return ddp(hook, gradient_as_bucket_view=True, **options)


def fp16_hook(wrapped: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped.register_comm_hook(None, fp16_compress_hook)


def powersgd_hook(wrapped: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    # Two plain steps are the fewest that torch allows: everything measured is compressed.
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powersgd.powerSGD_hook)


def zero_optimizer(bucket_mib: float) -> Maker:
    def make(model: Any, optimizer: Any, inputs: Any) -> Variant:
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer

        shared = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.SGD,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
            momentum=MOMENTUM,
        )
        return tuned_ddp(bucket_cap_mb=bucket_mib)(model, shared, inputs)

    return make


def fsdp2(reshard_after_forward: bool) -> Maker:
    def make(model: Any, optimizer: Any, inputs: Any) -> Variant:
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        options = {
            "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
            "reshard_after_forward": reshard_after_forward,
        }
        for parent in model.modules():
            for layer in parent.children() if isinstance(parent, (nn.Sequential, nn.ModuleList)) else ():
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, **options)
        fully_shard(model, **options)
        step = make_step(model, sgd(model.parameters()), inputs)
        return Variant(step, None, lambda: [parameter.full_tensor() for parameter in model.parameters()])

    return make


def deepspeed(stage: int) -> Maker:
    def make(model: Any, optimizer: Any, inputs: Any) -> Variant:
        import deepspeed
        import torch.distributed as dist

        # Collectives in shared memory, which hosts do not have in common, would be compiled before the first step.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        samples = len(inputs[0])
        config = {
            "train_batch_size": samples * dist.get_world_size(),
            "train_micro_batch_size_per_gpu": samples,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]

        def step() -> None:
            engine.backward(engine(*inputs).mean())
            engine.step()

        def parameters() -> list[Any]:
            with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
                return [parameter.detach().clone() for parameter in model.parameters()]

        return Variant(step, None, parameters)

    return make


def planned(strategy: Any, kept: list[Any] | None = None) -> Maker:
    """Offbeat with a strategy; the model goes into `kept`."""

    def make(model: Any, optimizer: Any, inputs: Any) -> Variant:
        import offbeat

        model, optimizer = offbeat.distribute(model, optimizer, strategy=strategy)
        if kept is not None:
            kept.append(model)
        return Variant(make_step(model, optimizer, inputs), model.flush, lambda: list(model.parameters()))

    return make


def timed_graph(model: ZooModel, cluster: Any, compute_seconds: float) -> Any:
    """The captured step with estimated times that add up to the measured ones: Horovod's cycles depend on them."""
    import offbeat

    built, _, inputs = build(model)
    graph, device = offbeat.capture(built, inputs), cluster.device_of(0)
    estimated = {
        operator.name: operator.estimate(device.peak_flops, device.memory_bandwidth)
        for operator in graph.operators
        if operator.phase in ("forward", "backward")
    }
    factor = compute_seconds / sum(estimated.values())
    return graph.with_seconds({name: seconds * factor for name, seconds in estimated.items()})


def in_16_bits(strategy: Any) -> Any:
    """The same messages, encoded and uncut, by priority: an explicit order was timed for messages twice as long."""
    from offbeat.strategy import Encoder, Schedule

    def encoded(config: Any) -> Any:
        shards = tuple(shard.model_copy(update={"encoder": Encoder(name="fp16")}) for shard in config.shards)
        return config.model_copy(update={"shards": shards})

    variables = {name: encoded(config) for name, config in strategy.variables.items()}
    schedule = Schedule(policy="priority", in_flight=strategy.schedule.in_flight, mode=strategy.schedule.mode)
    return strategy.model_copy(update={"variables": variables, "schedule": schedule})


class PeakMemory:
    """Begins to look at once; `growth_mib()` is the most that this process has grown since then."""

    def __init__(self) -> None:
        gc.collect()
        try:
            # What earlier variants have freed would hide what this one takes.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self.before_kib: int | None = _status_kib("VmRSS")
        except (OSError, AttributeError):
            self.before_kib = None

    def growth_mib(self) -> float | None:
        return None if self.before_kib is None else round((_status_kib("VmHWM") - self.before_kib) / 1024, 1)


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def on_all_ranks(value: Any) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def largest(values: list[float]) -> float:
    """Not a number if one of them is not; Python's max would let it pass."""
    import torch

    return float(torch.tensor(values, dtype=torch.float64).max())


def max_distance(these: list[Any], those: list[Any]) -> float:
    return largest([float((a - b).abs().max()) for a, b in zip(these, those, strict=True)])


def summary(blocks: dict[str, list[float]], facts: dict[str, dict], movement: float) -> dict:
    median = {name: statistics.median(times) * 1e3 for name, times in blocks.items()}
    best = min((name for name in median if name not in LOSSY and "offbeat" not in name), key=median.__getitem__)
    variants = {
        name: {
            "median_ms": round(median[name], 2),
            "spread_ms": round((max(times) - min(times)) * 1e3, 2),
            "over_best_exact_peer": round(median[name] / median[best], 4),
            "exact": name not in LOSSY,
            # JSON knows no other numbers than finite ones.
            "max_difference": facts[name]["max_difference"] if math.isfinite(facts[name]["max_difference"]) else None,
            "peak_rss_mib": facts[name]["peak_rss_mib"],
        }
        for name, times in blocks.items()
    }
    disagree = [
        name
        for name, of in variants.items()
        if of["max_difference"] is None
        or of["max_difference"] > (EXACT_AGREEMENT if of["exact"] else LOSSY_AGREEMENT) * movement
    ]
    return {"best_exact_peer": best, "max_movement": movement, "disagree": disagree, "variants": variants}


def describe(row: dict) -> str:
    lines = [
        f"{row['model']} {row['regime']} {row['bandwidth_mbit']} Mbit/s, compute {row['compute_ms']:.0f} ms,"
        f" parameters moved by {row['max_movement']:.1e}"
    ]
    for name, of in sorted(row["variants"].items(), key=lambda item: item[1]["median_ms"]):
        kind = "exact" if of["exact"] else "lossy"
        difference = "no number" if of["max_difference"] is None else f"{of['max_difference']:.1e}"
        lines.append(
            f"  {name:<18} {of['median_ms']:8.1f} ms +- {of['spread_ms'] / 2:5.1f}"
            f"  {of['over_best_exact_peer']:6.3f} x best exact peer  {kind}, differs by {difference}"
        )
    return "\n".join([*lines, *(f"  {name:<18} refused: {reason}" for name, reason in row["refused"].items())])


if __name__ == "__main__":
    main()
