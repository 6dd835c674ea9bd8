"""How long PACE's linear programme and Offbeat's scheduler take on the paper's models → JSON.

    python benchmarks/pace_speed.py --json

Instances have the tensors, operators and parameters of PACE's table II. Tensor sizes are log-uniform over the range its
figure 4 shows and sum to the model's parameters in float32; operator times and the places of tensors are random. Times
are whole slots of 5 ms, the paper's example, on 10 Gbit/s with 12 workers. Each instance is solved by

- `lp`: equation 14 as one linear programme (HiGHS), the least work the paper's method can do. In floating point its
  weights are too far apart, so its makespan is shown beside the optimum;
- `lp_exact`: the same constraints, searching for the least makespan, which is exact;
- `offbeat`: `preemptive_schedule`, and its compiled kernel alone (`kernel`).

Medians over instances. Building the programme's matrix counts as the programme's time; compiling the kernel does not
count, as it is done once and kept on disk.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from pace_lp import solve, solve_weighted

from offbeat.search import pace
from offbeat.search.pace.schedule import best_served

# PACE's table II: parameters in millions, all-reduce operators, computation operators.
MODELS = {
    "VGG16": (138.4, 32, 80),
    "ResNet50": (25.5, 157, 335),
    "Seq2Seq": (67.2, 32, 293),
    "Transformer": (91.8, 164, 1061),
}
SLOT_SECONDS = 5e-3
BYTES_PER_SECOND = 10e9 / 8
WORKERS = 12
STEP_COMPUTE_SECONDS = 0.3
KERNEL_REPEATS = 200


def instance(model: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ready times, durations and tails in whole slots."""
    millions, tensors, operators = MODELS[model]
    sizes = 10 ** rng.uniform(np.log10(256), np.log10(4e8), tensors)
    sizes *= millions * 4e6 / sizes.sum()
    seconds = sizes * 2 * (WORKERS - 1) / WORKERS / BYTES_PER_SECOND
    # A third of the operators are forward and two thirds backward; each tensor belongs to one of the forward ones.
    forward = rng.exponential(1.0, operators // 3)
    forward *= STEP_COMPUTE_SECONDS / 3 / forward.sum()
    owner = np.sort(rng.choice(len(forward), tensors, replace=tensors > len(forward)))
    tail = forward[::-1].cumsum()[::-1][owner]
    ready = 2 * tail.max() - 2 * (forward.cumsum()[owner] - forward[owner])
    slots = [np.ceil(values / SLOT_SECONDS).astype(np.int64) for values in (np.maximum(ready, 0), seconds, tail)]
    return slots[0], slots[1], slots[2]


def timed(call: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Median seconds of a call, and its result."""
    lengths = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = call()
        lengths.append(time.perf_counter() - begin)
    return statistics.median(lengths), result


def measure(model: str, instances: int, seed: int) -> dict[str, Any]:
    """Medians over the instances of one model."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(instances):
        slots = instance(model, rng)
        arrays = [values.astype(np.float64) for values in slots]
        lp_seconds, lp = timed(lambda slots=slots: solve_weighted(*slots))
        exact_seconds, exact = timed(lambda slots=slots: solve(*slots, lexicographic=False))
        our_seconds, ours = timed(lambda arrays=arrays: pace.preemptive_schedule(*arrays), KERNEL_REPEATS)
        kernel_seconds, _ = timed(lambda arrays=arrays: best_served(*arrays, 0.0, 0.0, True, 1), KERNEL_REPEATS)
        if ours.makespan != exact.makespan:
            raise SystemExit(f"{model}: makespan {ours.makespan} slots, the linear programme finds {exact.makespan}")
        rows.append(
            {
                "slots": int(slots[0].max() + slots[1].sum()),
                "lp_seconds": lp_seconds,
                "lp_exact_seconds": exact_seconds,
                "lp_exact_programmes": exact.programmes,
                "offbeat_seconds": our_seconds,
                "kernel_seconds": kernel_seconds,
                "lp_makespan_over_optimum": lp.makespan / exact.makespan,
                "lp_over_offbeat": lp_seconds / our_seconds,
                "lp_exact_over_offbeat": exact_seconds / our_seconds,
                "lp_over_kernel": lp_seconds / kernel_seconds,
            }
        )
    _, tensors, operators = MODELS[model]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {"tensors": tensors, "operators": operators, "instances": instances, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--instances", type=int, default=5, help="instances of each model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    models = {name: measure(name, options.instances, options.seed) for name in MODELS}
    result = {
        "benchmark": "pace_speed",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "slot_seconds": SLOT_SECONDS,
        "models": models,
        "least_lp_over_offbeat": min(row["lp_over_offbeat"] for row in models.values()),
        "least_lp_over_kernel": min(row["lp_over_kernel"] for row in models.values()),
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{'model':<12}{'tensors':>8}{'slots':>7}{'LP ms':>10}{'exact ms':>10}{'ours µs':>9}{'LP/ours':>10}")
    for name, row in models.items():
        print(
            f"{name:<12}{row['tensors']:>8}{row['slots']:>7.0f}{row['lp_seconds'] * 1e3:>10.1f}"
            f"{row['lp_exact_seconds'] * 1e3:>10.1f}{row['offbeat_seconds'] * 1e6:>9.1f}{row['lp_over_offbeat']:>10.0f}"
        )


if __name__ == "__main__":
    main()
