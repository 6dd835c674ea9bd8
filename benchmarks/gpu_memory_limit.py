"""Offbeat under a memory limit that plain replication breaks, against hand-tried FSDP2, with NCCL ranks on one GPU.

    python benchmarks/gpu_memory_limit.py --output gpu_memory_limit.json [--cases '2r-*' ...] [--seconds 360] [--list]

A case is a number of ranks, each an emulated host with a link of 10 Gbit/s, and a model. DDP's measured peak times
`--share` is the limit. FSDP2 is tried by hand: each block, every two blocks or the model alone as units; freed after
forward or kept; with blocks recomputed or not; gradients reduced in fp32, for the smallest model also in bf16. The
first of them is FSDP2's default wrapping. What exceeds the limit is not timed. Offbeat is given the limit and an
example batch (`memory_limit=…, example_inputs=…`; with `allow=("bf16",)` where bf16 was tried), and says what it
expects of its choice. Then short blocks of it, of the default and of the fastest by hand alternate. fp32 without TF32,
AdamW. Times are of the slowest rank, on the GPU; memory is `torch.cuda.max_memory_allocated` of the fullest.

Without a GPU, `--quick` runs tiny models on gloo ranks and measures no memory.
"""

import argparse
import fnmatch
import gc
import itertools
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_cases import agreed, agreed_all, device, run_cases, run_rank, timed

MODELS: dict[str, dict[str, Any]] = {
    # The samples of a rank, the hand-tried ones that stay for the comparison, and what gradients are reduced in.
    "gpt2": {"batch": 1, "kept": 3, "reduce": ("fp32", "bf16")},
    "gpt2_large": {"batch": 1, "kept": 2, "reduce": ("fp32",)},
    "llama_1b": {"batch": 1, "kept": 1, "reduce": ("fp32",)},
}
RANKS, GBIT = (2, 4), 10
UNITS = ("each block", "two blocks", "model")
DEFAULT = "each block, freed"
BLOCKS, STEPS = 2, 2
TRIED_STEPS = 2
HOPELESS = 1.3
"""Times the fastest so far: whose first step takes longer is not timed any further."""
TRIED_SHARE = 0.6
"""Of a case's time, after which nothing else is tried by hand."""
QUICK_SCALE = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="gpu_memory_limit.json", help="JSON file to which every case is added")
    parser.add_argument("--cases", nargs="*", default=["*"], help="patterns of names, such as '2r-*'")
    parser.add_argument("--share", type=float, default=0.8, help="of DDP's peak memory, which is the limit")
    parser.add_argument("--case-seconds", type=float, default=200.0, help="what a case is fitted into")
    parser.add_argument("--seconds", type=float, default=None, help="no case starts later than this")
    parser.add_argument("--list", action="store_true", help="print the names of the chosen cases")
    parser.add_argument("--quick", action="store_true", help="tiny models, for a smoke test; also without a GPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_rank(json.loads(options.worker), lambda case: Case(case).run(), describe)
        return 0
    cases = [
        {"name": f"{ranks}r-{GBIT}G-{model}", "ranks": ranks, "gbit": GBIT, "model": model}
        for ranks, model in itertools.product(RANKS, MODELS)
    ]
    chosen = [case for case in cases if any(fnmatch.fnmatch(str(case["name"]), p) for p in options.cases)]
    if options.list:
        print("\n".join(str(case["name"]) for case in chosen))
        return 0
    common = {
        "share": options.share,
        "case_seconds": options.case_seconds,
        "quick": options.quick,
        "output": str(Path(options.output).resolve()),
        "shown": ("name", "ranks", "gbit", "model", "share"),
    }
    return int(run_cases(__file__, [{**case, **common} for case in chosen], options.seconds) > 0)


def by_hand(reduced: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What is tried, by name; FSDP2's default wrapping first."""
    found = {}
    for reduce, recompute, units, freed in itertools.product(reduced, (False, True), UNITS, (True, False)):
        words = [units, "freed" if freed else "kept"]
        words += ["recomputed"] if recompute else []
        words += ["bf16 reduce"] if reduce == "bf16" else []
        found[", ".join(words)] = {"units": units, "freed": freed, "recompute": recompute, "reduce": reduce}
    return found


class Case:
    """One case on this rank."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.of = case, MODELS[case["model"]]
        self.began = time.monotonic()
        self.jobs: dict[str, Job] = {}
        self.limit = 0.0

    def run(self) -> dict[str, Any]:
        ddp, replicated = self.replicated()
        self.limit = round(self.case["share"] * replicated)
        tried = self.try_by_hand()
        reduced = {"offbeat": False} | ({"offbeat, bf16 allowed": True} if "bf16" in self.of["reduce"] else {})
        chosen = {name: self.offbeat(name, allowed) for name, allowed in reduced.items()}
        blocks = self.alternate()
        median = {name: statistics.median(seconds) for name, seconds in blocks.items()}
        for name, row in chosen.items():
            row["measured_ms"] = round(median[name] * 1e3, 3)
            row["time_error"] = round(row["predicted_ms"] / row["measured_ms"] - 1, 4)
            exact = [each for each in tried if name != "offbeat" or "bf16" not in each]
            best = min((each for each in exact if each in median), key=median.__getitem__, default=None)
            if best is not None:
                row |= {"best": best, "over_best": round(median[name] / median[best], 4)}
            if DEFAULT in median:
                row["default_over"] = round(median[DEFAULT] / median[name], 4)
        return {
            "batch": self.of["batch"],
            "ddp_ms": ddp,
            "replicated_bytes": replicated,
            "limit_bytes": self.limit,
            "tried": tried,
            "chosen": chosen,
            "median_ms": {name: round(value * 1e3, 3) for name, value in median.items()},
            "blocks_ms": {name: [round(s * 1e3, 3) for s in seconds] for name, seconds in blocks.items()},
            "seconds": round(time.monotonic() - self.began, 1),
        }

    def replicated(self) -> tuple[float, int]:
        """(milliseconds, peak bytes) of DDP's step; without a GPU, what Offbeat estimates for the latter."""
        from torch.nn.parallel import DistributedDataParallel

        import offbeat
        from offbeat.cost.memory import peak_memory

        job = Job(self.case)
        plain = job.model
        job.model = DistributedDataParallel(plain)
        seconds, peak = job.measure(1)
        if peak is None:
            graph = offbeat.capture(plain, job.batch, optimizer=job.optimizer())
            cluster = offbeat.ClusterSpec.local(self.case["ranks"])
            peak = peak_memory(offbeat.lower(graph, cluster, offbeat.build_strategy("ddp", graph, cluster))).total
        return round(seconds * 1e3, 3), peak

    def try_by_hand(self) -> dict[str, dict[str, Any]]:
        """Time and memory of each setting, of which the fastest that fit stay, and the default."""
        tried: dict[str, dict[str, Any]] = {}
        fitting: dict[str, float] = {}
        for name, setting in by_hand(self.of["reduce"]).items():
            if agreed(time.monotonic() - self.began) > TRIED_SHARE * self.case["case_seconds"]:
                tried[name] = {"skipped": "no time left"}
                continue
            job = Job(self.case)
            job.shard(setting)
            least = min(fitting.values(), default=float("inf"))
            seconds, peak = job.measure(TRIED_STEPS, self.limit, least * HOPELESS)
            fits = peak is None or peak <= self.limit
            tried[name] = {"fits": fits, "peak_bytes": peak, "ms": None if seconds is None else round(seconds * 1e3, 3)}
            if fits and seconds is not None:
                fitting[name] = seconds
                self.jobs[name] = job
                # bf16 beside fp32, whose fastest Offbeat must be compared with.
                ordered = sorted(fitting, key=fitting.__getitem__)
                exact = [each for each in ordered if "bf16" not in each][:1]
                for other in set(self.jobs) - {*ordered[: self.of["kept"]], *exact, DEFAULT}:
                    del self.jobs[other]
        return tried

    def offbeat(self, name: str, bf16: bool) -> dict[str, Any]:
        """What Offbeat chooses, says of it, and takes until the end of its first step; its memory."""
        import offbeat
        from offbeat.strategy.describe import describe as words

        job = Job(self.case)
        optimizer = job.optimizer()
        began = time.perf_counter()
        offbeat.distribute(
            job.model,
            optimizer,
            memory_limit=int(self.limit),
            example_inputs=job.batch,
            allow=("bf16",) if bf16 else (),
            quiet=True,
        )
        distributed = time.perf_counter()
        job.trained = optimizer
        job.step()
        finish()
        ended = time.perf_counter()
        _, peak = job.measure(1)
        handle = job.model.offbeat
        expected = handle.history[0]
        self.jobs[name] = job
        return {
            "plan": ", ".join(words(handle.plan.strategy)),
            "strategy": json.loads(handle.plan.strategy.to_json()) if handle.plan.strategy.fsdp else None,
            "distribute_seconds": round(agreed(distributed - began), 2),
            "first_step_seconds": round(agreed(ended - began), 2),
            "predicted_ms": round(expected.predicted_seconds * 1e3, 3),
            "predicted_bytes": expected.predicted_bytes,
            "peak_bytes": peak,
            "memory_error": None if peak is None else round(expected.predicted_bytes / peak - 1, 4),
        }

    def alternate(self) -> dict[str, list[float]]:
        """Seconds of a step in every block of what stays, the slowest rank's."""
        order, blocks = list(self.jobs), {name: list[float]() for name in self.jobs}
        for _ in range(BLOCKS):
            for name in order:
                blocks[name].append(timed(self.jobs[name].step, STEPS, filled=1))
            order.reverse()
        return {name: agreed_all(seconds) for name, seconds in blocks.items()}


class Job:
    """A model with its batch, not distributed yet."""

    def __init__(self, case: dict[str, Any]) -> None:
        import torch

        from offbeat import zoo

        free()
        self.before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        """What other jobs hold."""
        torch.manual_seed(0)
        scale = QUICK_SCALE if case["quick"] else 1.0
        with device():
            self.model, self.batch = zoo.build(case["model"], scale, MODELS[case["model"]]["batch"])
        self.trained: Any = None

    def optimizer(self) -> Any:
        import torch

        return torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def shard(self, setting: dict[str, Any]) -> None:
        """As an FSDP2 script does it."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.utils.checkpoint import checkpoint

        blocks = list(self.model.blocks)
        if setting["recompute"]:
            for block in blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        wide = {"each block": 1, "two blocks": 2, "model": len(blocks)}[setting["units"]]
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if setting["reduce"] == "bf16" else None)
        options = {"reshard_after_forward": setting["freed"], "mp_policy": policy}
        for place in range(0, len(blocks), wide) if wide < len(blocks) else ():
            together = blocks[place : place + wide]
            fully_shard(together if wide > 1 else together[0], **options)
        # By default the model itself keeps its own.
        fully_shard(self.model, **(options if setting["units"] == "model" else {"mp_policy": policy}))

    def step(self) -> None:
        if self.trained is None:
            self.trained = self.optimizer()
        self.trained.zero_grad()
        self.model(*self.batch).backward()
        self.trained.step()

    def measure(
        self, count: int, limit: float = float("inf"), slowest: float = float("inf")
    ) -> tuple[float | None, int | None]:
        """(seconds of a step, peak bytes), after a step that creates the optimizer's state; no seconds for what exceeds
        the limit, those of a single step for what is too slow."""
        import torch

        cuda = torch.cuda.is_available()
        self.step()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seconds = agreed(timed(self.step, 1, filled=0))
        peak = round(agreed(torch.cuda.max_memory_allocated() - self.before)) if cuda else None
        if peak is not None and peak > limit:
            return None, peak
        if count > 1 and seconds <= slowest:
            seconds = agreed(timed(self.step, count, filled=0))
        return seconds, peak


def free() -> None:
    """Gives back what jobs that are gone have left, and cuBLAS's workspaces, which every job has anew."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        finish()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def finish() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def describe(row: dict[str, Any]) -> str:
    lines = [f"{row['name']}: limit {row['limit_bytes'] / 2**30:.2f} GiB, DDP {row['ddp_ms']:.0f} ms, "
             f"{row['replicated_bytes'] / 2**30:.2f} GiB, in {row['seconds']:.0f} s"]  # fmt: skip
    for name, of in row["tried"].items():
        lines.append(f"  {name}: {of}")
    for name, of in row["chosen"].items():
        lines.append(f"  {name}: { {key: value for key, value in of.items() if key != 'strategy'} }")
    return "\n".join([*lines, f"  {row['median_ms']}"])


if __name__ == "__main__":
    os.environ.setdefault("OFFBEAT_QUIET", "1")
    sys.exit(main())
