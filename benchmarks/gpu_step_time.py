"""Step time of Offbeat against DDP and FSDP2 with several NCCL ranks on one GPU, each an emulated host.

    python benchmarks/gpu_step_time.py --output gpu_step_time.json [--cases '2r-10G-*' ...] [--clip] [--plans overlap]
                                       [--precision autocast|bf16] [--case-seconds 40] [--seconds 480] [--list]

A case is a number of ranks, the links' bandwidth, a model and a regime. The model's width is chosen so that all-reduces
of its gradients take about as long with every number of ranks and bandwidth, its batch so that compute alone takes 0.4
(network-bound), 1.0 (balanced) or 2.0 (compute-bound) times as long as all-reducing them back to back. The larger of
the two is the bound. In every case DDP runs with five bucket sizes, of which the quickest stays
(`gradient_as_bucket_view=True`), and with its default, FSDP2 shards every block, DDP runs with the fp16 compression
hook, and Offbeat starts with "auto" and trains until it has settled. Then short blocks of all alternate. Fused AdamW,
bf16 autocast or bf16 weights. Times are between two events on the GPU, of the slowest rank, medians of the blocks in
milliseconds. `--clip` clips by the global norm in each step.

All cases of a number of ranks and a bandwidth run in one start of the ranks. Every case is written to the output as
soon as it has ended; one that hangs is left out when its time is up, and the rest go on in a new start.
"""

import argparse
import fnmatch
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from auto_strategy import judged
from gpu_cases import FILLED, Step, agreed, agreed_all, device, run_cases, run_rank, timed

MODELS: dict[str, dict[str, Any]] = {
    # By precision: a zoo name and options with 75 to 100 MB of gradients, for two ranks at 10 Gbit/s. FSDP2 shards
    # modules of the classes `blocks`. The largest batch of that size fits into the GPU's memory four times.
    "transformer": {
        "autocast": ("transformer", {"scale": 0.75, "vocabulary": 2000, "shared_embeddings": False}),
        "bf16": ("transformer", {"scale": 1.0, "vocabulary": 2000, "shared_embeddings": False}),
        "quick": ("transformer", {"scale": 0.1, "vocabulary": 100, "shared_embeddings": False}),
        "blocks": ("Layer",),
        "largest_batch": 1024,
    },
    "resnet": {
        "autocast": ("resnet50", {"scale": 1.0}),
        "bf16": ("resnet101", {"scale": 1.0}),
        "quick": ("resnet50", {"scale": 0.1}),
        "blocks": ("Bottleneck",),
        "largest_batch": 320,
    },
    "vgg": {
        "autocast": ("vgg16", {"scale": 0.42}),
        "bf16": ("vgg16", {"scale": 0.58}),
        "quick": ("vgg16", {"scale": 0.1}),
        "blocks": ("Conv2d", "Linear"),
        "largest_batch": 1024,
    },
}
REGIMES = {"network-bound": 0.4, "balanced": 1.0, "compute-bound": 2.0}
"""Compute alone divided by network alone."""
RANKS, GBITS = (2, 4), (10, 5)
BUCKETS_MIB = (1, 2, 4, 8, 16)
KEPT_BUCKETS = 1
BLOCKS = 3
STEPS = (3, 8)
TRIED_STEPS, TRIED_WARM = 3, 2
SETTLING_SHARE = 0.8
"""Of a case's time that "auto" may take to settle."""
SETTLING_CHUNK = 10
LEAST_SETTLING_STEPS, MOST_SETTLING_STEPS = 30, 400
PROBED_BATCH, GROWTH = 16, 8
"""The first batch tried, and by how much the next may be larger."""
CLIPPED_NORM = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="gpu_step_time.json", help="JSON file to which every case is added")
    parser.add_argument("--cases", nargs="*", default=["*"], help="patterns of names, such as '2r-10G-*'")
    parser.add_argument("--clip", action="store_true", help="clip by the global norm in each step")
    parser.add_argument("--plans", nargs="*", default=[], help="builders that run beside 'auto'")
    parser.add_argument("--precision", choices=("autocast", "bf16"), default="autocast")
    parser.add_argument("--case-seconds", type=float, default=40.0, help="what a case is fitted into")
    parser.add_argument("--seconds", type=float, default=None, help="no case starts later than this")
    parser.add_argument("--list", action="store_true", help="print the names of the chosen cases")
    parser.add_argument("--quick", action="store_true", help="tiny models, for a smoke test; also without a GPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_rank(json.loads(options.worker), lambda case: Case(case).run(), describe)
        return 0
    chosen = [case for case in every_case() if any(fnmatch.fnmatch(case["name"], p) for p in options.cases)]
    if options.list:
        print("\n".join(case["name"] for case in chosen))
        return 0
    common = {
        "clip": options.clip,
        "plans": options.plans,
        "precision": options.precision,
        "case_seconds": options.case_seconds,
        "quick": options.quick,
        "output": str(Path(options.output).resolve()),
        "shown": ("name", "ranks", "gbit", "model", "regime", "clip", "precision"),
    }
    return int(run_cases(__file__, [{**case, **common} for case in chosen], options.seconds) > 0)


def every_case() -> list[dict[str, Any]]:
    """The most telling regime first, so that what fits into a short time tells most."""
    return [
        {
            "name": f"{ranks}r-{gbit}G-{model}-{regime}",
            "ranks": ranks,
            "gbit": gbit,
            "model": model,
            "regime": regime,
        }
        for ranks, gbit in itertools.product(RANKS, GBITS)
        for model in MODELS
        for regime in ("balanced", "network-bound", "compute-bound")
    ]


class Case:
    """One case on this rank: the variants alternate."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.began = time.monotonic()
        self.model_of = MODELS[case["model"]]
        self.name, options = self.model_of["quick" if case["quick"] else case["precision"]]
        # Gradients grow with the square of the width, activations with the width.
        width = math.sqrt(case.get("gbit", 10) / 10 / ring_share(case.get("ranks", 2)))
        self.options = {**options, "scale": round(options["scale"] * width, 3)}
        self.largest_batch = int(self.model_of["largest_batch"] / width)
        self.batch = 2 if case["quick"] else PROBED_BATCH
        self.plans = [f"offbeat_{plan}" for plan in case["plans"]]
        self.steps: dict[str, Step] = {}
        self.models: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        import torch

        self.add("compute", lambda model, optimizer: (model, optimizer))
        size = sum(p.numel() * p.element_size() for p in self.models["compute"].parameters())
        first = next(self.models["compute"].parameters())
        flat = torch.zeros(size // first.element_size(), dtype=first.dtype, device=first.device)
        self.steps["network"] = network_step(flat)
        self.choose_batch()
        tried = self.try_buckets()
        self.add_others()
        settling = self.settle()
        blocks, steps = self.alternate()
        handle = self.models["auto"].offbeat
        row = {
            **judged(blocks),
            "blocks_ms": {name: [round(s * 1e3, 3) for s in seconds] for name, seconds in blocks.items()},
            "compute_over_network": round(
                statistics.median(blocks["compute"]) / statistics.median(blocks["network"]), 3
            ),
            "batch": self.batch,
            "bytes": size,
            "steps": steps,
            "tried_ms": tried,
            **settling,
            "plan": handle.plan.strategy.name,
            "mode": handle.mode,
            "history": [decision.what for decision in handle.history],
            "seconds": round(time.monotonic() - self.began, 1),
        }
        for name in ("auto", *self.plans):
            self.models[name]._offbeat.release()
        self.steps.clear()
        self.models.clear()
        return row

    def add(self, name: str, wrap: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        """Builds the model once more, as a variant."""
        import torch

        from offbeat import zoo

        torch.manual_seed(0)
        with device():
            model, example = zoo.build(self.name, batch=2, **self.options)
        if self.case["precision"] == "bf16":
            model = model.to(torch.bfloat16)
        # FSDP2 replaces the parameters, so that the optimizer comes after it.
        model, optimizer = wrap(model, adamw)
        optimizer = optimizer(model.parameters()) if optimizer is adamw else optimizer
        parameters, autocast = list(model.parameters()), self.case["precision"] == "autocast"
        batches: dict[int, Any] = {}

        def step() -> None:
            if self.batch not in batches:
                batches.clear()
                batches[self.batch] = self.inputs(example)
            optimizer.zero_grad()
            with torch.autocast(device().type, dtype=torch.bfloat16, enabled=autocast):
                loss = model(*batches[self.batch])
            loss.backward()
            if self.case["clip"]:
                torch.nn.utils.clip_grad_norm_(parameters, CLIPPED_NORM)
            optimizer.step()

        self.models[name], self.steps[name] = model, step

    def inputs(self, example: Any) -> Any:
        """As many samples as the batch has, of the example's."""
        import torch

        rows = torch.arange(self.batch, device=device()) % example[0].shape[0]
        made = [tensor[rows] for tensor in example]
        if self.case["precision"] == "bf16":
            made = [tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for tensor in made]
        return made

    def choose_batch(self) -> None:
        """The batch whose compute is to the network as the regime says, from two batches' compute on a line."""
        goal = REGIMES[self.case["regime"]] * agreed(timed(self.steps["network"], 5))
        if self.case["quick"]:
            return
        known: dict[int, float] = {}
        for _ in range(4):
            timed(self.steps["compute"], 1)
            known[self.batch] = agreed(timed(self.steps["compute"], 3))
            if abs(known[self.batch] / goal - 1) < 0.1:
                break
            guess = self.batch * goal / known[self.batch]
            if len(known) > 1:
                (small, less), (large, more) = sorted(known.items())[-2:]
                if more > less:
                    guess = large + (goal - more) * (large - small) / (more - less)
            guess = min(max(1, round(guess)), self.batch * GROWTH, self.largest_batch)
            if guess in known:
                self.batch = min(known, key=lambda batch: abs(known[batch] / goal - 1))
                return
            self.batch = guess

    def try_buckets(self) -> dict[str, float]:
        """DDP at some bucket sizes, of which the quickest stay."""
        seconds = {}
        for size in BUCKETS_MIB:
            self.add(f"ddp_{size}", ddp(bucket_cap_mb=size, gradient_as_bucket_view=True))
            seconds[f"ddp_{size}"] = agreed(timed(self.steps[f"ddp_{size}"], TRIED_STEPS, TRIED_WARM))
        for name in sorted(seconds, key=seconds.__getitem__)[KEPT_BUCKETS:]:
            del self.steps[name], self.models[name]
        return {name: round(value * 1e3, 3) for name, value in seconds.items()}

    def add_others(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        import offbeat

        def hooked(model: Any, optimizer: Any) -> tuple[Any, Any]:
            wrapped, optimizer = ddp(gradient_as_bucket_view=True)(model, optimizer)
            wrapped.register_comm_hook(None, fp16_compress_hook)
            return wrapped, optimizer

        self.add("ddp_default", ddp())
        # Not called DDP: it is no exact peer.
        self.add("fp16_hook", hooked)
        self.add("fsdp2", self.sharded)
        for name in self.plans:
            plan = name.removeprefix("offbeat_")
            self.add(name, lambda model, make, plan=plan: offbeat.distribute(model, make(model.parameters()), plan))
        self.add("auto", lambda model, make: offbeat.distribute(model, make(model.parameters()), quiet=True))
        for name in ("ddp_default", "fp16_hook", "fsdp2", *self.plans):
            timed(self.steps[name], 1)

    def sharded(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """FSDP2 that keeps parameters between forward and backward, so that it sends what an all-reduce does."""
        from torch.distributed.fsdp import fully_shard

        for module in list(model.modules()):
            if type(module).__name__ in self.model_of["blocks"]:
                fully_shard(module, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
        return model, optimizer

    def settle(self) -> dict[str, Any]:
        """Trains with "auto" until it has settled, or as long as it may."""
        handle, step, began = self.models["auto"].offbeat, self.steps["auto"], time.monotonic()
        steps, waited = 0, 0.0
        # The order of a plan is found in its first steps, also where no other plan is looked for.
        while steps < LEAST_SETTLING_STEPS or not handle.settled:
            step()
            steps += 1
            # Seldom, since ranks that wait for each other disturb what "auto" measures.
            if steps % SETTLING_CHUNK == 0:
                waited = agreed(time.monotonic() - began)
                if steps >= MOST_SETTLING_STEPS or waited > SETTLING_SHARE * self.case["case_seconds"]:
                    break
        return {"settled": handle.settled, "settling_steps": steps, "settling_seconds": round(waited, 1)}

    def alternate(self) -> tuple[dict[str, list[float]], int]:
        """Seconds of a step in every block of every variant, the slowest rank's, and the steps of a block."""
        left = agreed(self.case["case_seconds"] - (time.monotonic() - self.began))
        each = sum(agreed(timed(step, 1, filled=1)) for step in self.steps.values())
        steps = min(max(STEPS[0], int(left / (BLOCKS * each)) - FILLED), STEPS[1])
        blocks: dict[str, list[float]] = {name: [] for name in self.steps}
        order = list(self.steps)
        for _ in range(BLOCKS):
            for name in order:
                blocks[name].append(timed(self.steps[name], steps))
            order = [*order[1:], order[0]]
        return {name: agreed_all(seconds) for name, seconds in blocks.items()}, steps


def ring_share(ranks: int) -> float:
    """Bytes that each rank sends in an all-reduce of one byte."""
    return 2 * (ranks - 1) / ranks


def adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def ddp(**options: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    from torch.nn.parallel import DistributedDataParallel

    return lambda model, optimizer: (DistributedDataParallel(model, **options), optimizer)


def network_step(flat: Any) -> Step:
    """All gradients' bytes, all-reduced back to back in messages of about 4 MiB."""
    import torch.distributed as dist

    parts = flat.split(2**22 // flat.element_size())

    def step() -> None:
        works = [dist.all_reduce(part, async_op=True) for part in parts]
        for work in works:
            work.wait()

    return step


def describe(row: dict[str, Any]) -> str:
    median = row["median_ms"]
    others = "  ".join(
        f"{name} {value:.1f}" for name, value in median.items() if name not in ("compute", "network", "auto")
    )
    return (
        f"{row['name']:<32}{' clipped' if row['clip'] else ''} batch {row['batch']}  compute {median['compute']:.1f}  "
        f"network {median['network']:.1f}  {others}  auto {median['auto']:.1f} ms ({row['plan']}, "
        f"{'settled' if row['settled'] else 'not settled'})  {row['auto_over_bound']:.3f} x bound  "
        f"default/auto {row['default_over_auto']:.3f}  {row['best']}/auto {row['best_over_auto']:.3f}"
        f"{'' if row['decided'] else ' (noisy)'}  in {row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    os.environ.setdefault("OFFBEAT_QUIET", "1")
    sys.exit(main())
