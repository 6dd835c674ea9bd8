"""Estimated against measured peak memory of a training step → JSON.

    python benchmarks/memory_accuracy.py --json                    four models, SGD with momentum and AdamW
    python benchmarks/memory_accuracy.py --json --only bert_base   one model
    python benchmarks/memory_accuracy.py --json --device cpu       on the CPU even where there is a GPU

On a CPU the peak is that of the allocator's own events, as torch.profiler records them; the models are scaled down so
that all runs take seconds. On a GPU it is `torch.cuda.max_memory_allocated`, and the models have their published size.
"""

import argparse
import gc
import json
import platform
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import offbeat
from offbeat.cluster import find_device
from offbeat.cost.memory import MemoryEstimate, peak_memory

MODELS = {"vgg16": (0.25, 8), "resnet50": (0.25, 16), "bert_base": (0.25, 8), "gpt2": (0.25, 2)}
"""Scale and batch on a CPU."""
GPU_BATCH = {"vgg16": 32, "resnet50": 32, "bert_base": 32, "gpt2": 8}
OPTIMIZERS: dict[str, tuple[str, int, Callable[..., torch.optim.Optimizer]]] = {
    "sgd_momentum": ("SGD", 1, lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)),
    "adamw": ("AdamW", 2, lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)),
}
STEPS = 3
"""The optimizer's state exists from the second step on; the third is measured."""
TARGET = 0.06


def measure_on_cpu(name: str, scale: float, batch: int, optimizer: str) -> int:
    """Most bytes that the allocator had given out at once during the last step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _train(name, scale, batch, optimizer, torch.device("cpu"))
    return peak_of(profiler)


def peak_of(profiler: profile) -> int:
    """Most bytes held at once during the last span called 'step', of what was allocated under the profiler."""
    events = profiler.profiler.kineto_results.events()
    begin, end = max((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == "step")
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for moment, change in changes:
        held += change
        if begin <= moment <= end:
            peak = max(peak, held)
    return peak


def measure_on_gpu(name: str, scale: float, batch: int, optimizer: str) -> int:
    """The caching allocator's own peak over the last step."""
    gc.collect()
    torch.cuda.empty_cache()
    _train(name, scale, batch, optimizer, torch.device("cuda"))
    return torch.cuda.max_memory_allocated()


def _train(name: str, scale: float, batch: int, optimizer_name: str, device: torch.device) -> None:
    with device:
        model, inputs = offbeat.zoo.build(name, scale, batch)
    optimizer = OPTIMIZERS[optimizer_name][2](model.parameters())
    for step in range(STEPS):
        if device.type == "cuda" and step == STEPS - 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with record_function("step"):
            optimizer.zero_grad(set_to_none=True)
            loss = model(*inputs)
            loss.backward()
            optimizer.step()
            del loss
    if device.type == "cuda":
        torch.cuda.synchronize()


def estimate(name: str, scale: float, batch: int, optimizer: str, device: str) -> MemoryEstimate:
    """What Offbeat says without running anything."""
    kind, slots, _ = OPTIMIZERS[optimizer]
    graph = offbeat.zoo.capture(name, scale, batch).with_optimizer(kind, slots)
    cluster = offbeat.ClusterSpec.homogeneous(nodes=1, device=device)
    plan = offbeat.lower(graph, cluster, offbeat.build_strategy("all_reduce", graph, cluster))
    return peak_memory(plan, 0, runtime="torch")


def compare(name: str, scale: float, batch: int, optimizer: str, on_gpu: bool = False) -> dict[str, Any]:
    """One model and optimizer: both numbers, and what the estimate is made of."""
    measured = (measure_on_gpu if on_gpu else measure_on_cpu)(name, scale, batch, optimizer)
    estimated = estimate(name, scale, batch, optimizer, _gpu_kind() if on_gpu else "cpu")
    parts = {field: getattr(estimated, field) for field in MemoryEstimate.__dataclass_fields__}
    return {
        "model": name,
        "scale": scale,
        "batch": batch,
        "optimizer": optimizer,
        "measured_bytes": measured,
        "estimated_bytes": estimated.total,
        "relative_error": estimated.total / measured - 1.0,
        "estimate": parts,
    }


def _gpu_kind() -> str:
    """The catalogue's name of this machine's GPU, such as 'H200'."""
    words = torch.cuda.get_device_name().replace("-", " ").split()
    return next((word for word in words if find_device(word) is not None), words[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of indented JSON")
    parser.add_argument("--only", choices=MODELS, action="append", help="only this model; may be repeated")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    runs = []
    for name in options.only or MODELS:
        scale, batch = (1.0, GPU_BATCH[name]) if on_gpu else MODELS[name]
        runs += [compare(name, scale, batch, optimizer, on_gpu) for optimizer in OPTIMIZERS]
    errors = [abs(run["relative_error"]) for run in runs]
    result = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "runs": runs,
        "median_relative_error": statistics.median(errors),
        "worst_relative_error": max(errors),
        "target": TARGET,
        "within_target": max(errors) <= TARGET,
    }
    print(json.dumps(result, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
