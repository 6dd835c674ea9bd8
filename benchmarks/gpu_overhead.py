"""What Offbeat's engine costs on a GPU: world size 1 over NCCL, against plain DDP in the same run.

    python benchmarks/gpu_overhead.py --json

Nothing is saved by communicating better here, so every difference is overhead of hooks, buffers and waiting. bf16
autocast, AdamW, medians of interleaved blocks.
"""

import argparse
import json
import os
import statistics
import sys
import time

MODELS = {"resnet50": 64, "bert_base": 32, "gpt2": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", choices=MODELS, action="append")
    options = parser.parse_args()
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        sys.exit("gpu_overhead: this machine has no CUDA device")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl")
    rows = [measure(name, options.blocks, options.steps) for name in options.model or MODELS]
    result = {
        "benchmark": "gpu_overhead",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    dist.destroy_process_group()


def measure(name: str, blocks: int, steps: int) -> dict:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import offbeat
    from offbeat import zoo

    variants = {}

    def add(variant: str, wrap) -> None:
        torch.manual_seed(0)
        model, inputs = zoo.build(name, batch=MODELS[name])
        model, inputs = model.cuda(), tuple(tensor.cuda() for tensor in inputs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        model, optimizer = wrap(model, optimizer)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(*inputs)
            loss.backward()
            optimizer.step()

        variants[variant] = step

    add("plain", lambda model, optimizer: (model, optimizer))
    add("ddp", lambda model, optimizer: (DistributedDataParallel(model), optimizer))
    add("ddp_view", lambda model, optimizer: (DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer))
    add("offbeat", lambda model, optimizer: offbeat.distribute(model, optimizer, strategy="auto"))
    add("offbeat_ddp_plan", lambda model, optimizer: offbeat.distribute(model, optimizer, strategy="ddp"))
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for step in variants.values():
        run(step, 15)
    for block in range(blocks):
        order = list(variants)
        for variant in order[block % len(order) :] + order[: block % len(order)]:
            run(variants[variant], 2)
            times[variant].append(run(variants[variant], steps))
    median = {variant: statistics.median(seconds) * 1e3 for variant, seconds in times.items()}
    return {
        "model": name,
        "batch": MODELS[name],
        "median_ms": {variant: round(value, 3) for variant, value in median.items()},
        "offbeat_over_ddp": round(median["offbeat"] / median["ddp"], 4),
        "offbeat_ddp_plan_over_ddp": round(median["offbeat_ddp_plan"] / median["ddp"], 4),
    }


def run(step, count: int) -> float:
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


if __name__ == "__main__":
    main()
