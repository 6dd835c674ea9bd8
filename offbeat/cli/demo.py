"""A model and a bandwidth → plain DDP and Offbeat compared on two emulated hosts, with measured numbers only."""

import math
from itertools import chain
from statistics import median
from typing import Any

from offbeat import units
from offbeat.emulate import Emulation
from offbeat.errors import OffbeatError

HOSTS = 2
LOSS_TOLERANCE = 1e-3
"""Both sum the same gradients, so losses may differ by rounding only; relative to the loss."""


def run_demo(
    model: str, scale: float, batch: int, bandwidth: str, steps: int, rounds: int, timeout: float
) -> dict[str, Any]:
    """Trains the model both ways in the same processes, a round of one after a round of the other."""
    parameter_bytes = _parameter_bytes(model, scale, batch)
    with Emulation(HOSTS, bandwidth) as emulation:
        ranks = emulation.run_function(
            "offbeat.cli.demo_job:train", model, scale, batch, steps, rounds, timeout=timeout
        )
        kind = emulation.kind
    seconds = {job: list(chain.from_iterable(rank[job]["seconds"] for rank in ranks)) for job in ("ddp", "offbeat")}
    difference, agree = compare_losses(ranks)
    return {
        "jobs": [
            _row("DDP, default settings", seconds["ddp"]),
            _row(f"Offbeat, strategy {ranks[0]['strategy']}", seconds["offbeat"]),
        ],
        "ddp_over_offbeat": median(seconds["ddp"]) / median(seconds["offbeat"]),
        "largest_loss_difference": difference,
        "losses_agree": agree,
        "model": f"{model} at scale {scale:g}, batch {batch} on each host",
        "parameter_bytes": parameter_bytes,
        "mode": ranks[0]["mode"],
        "hosts": HOSTS,
        "emulation": kind,
        "link": "not limited" if kind == "loopback" else units.format_bandwidth(units.parse_bandwidth(bandwidth)),
        "steps": f"{rounds} x {steps} timed steps of each, in turn",
    }


def _parameter_bytes(model: str, scale: float, batch: int) -> int:
    """Also refuses what cannot be built before any process is started."""
    import torch

    from offbeat import zoo

    with torch.device("meta"):
        built, _ = zoo.build(model, scale, batch)
    return sum(parameter.numel() * parameter.itemsize for parameter in built.parameters())


def _row(job: str, seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "job": job,
        "median_step_seconds": median(ordered),
        "fastest_seconds": ordered[0],
        "slowest_seconds": ordered[-1],
    }


def compare_losses(ranks: list[dict[str, Any]]) -> tuple[float, bool]:
    """The largest difference between the losses of the two jobs, and whether rounding explains it."""
    largest, agree = 0.0, True
    for rank in ranks:
        for ddp, ours in zip(rank["ddp"]["losses"], rank["offbeat"]["losses"], strict=True):
            if not (math.isfinite(ddp) and math.isfinite(ours)):
                raise OffbeatError(f"the losses are not finite: {ddp} with DDP and {ours} with Offbeat")
            largest = max(largest, abs(ddp - ours))
            agree &= abs(ddp - ours) <= LOSS_TOLERANCE * max(1.0, abs(ddp))
    return largest, agree
