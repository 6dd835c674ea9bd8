"""offbeat demo: measure DDP and Offbeat on two emulated hosts."""

import math
from itertools import chain
from statistics import median
from typing import Annotated, Any

import typer

from offbeat import units
from offbeat.cli.app import Json, app
from offbeat.cli.catalogue import count_parameters
from offbeat.cli.show import print_facts, print_json, print_rows, progress, stdout_to_stderr
from offbeat.errors import OffbeatError

HOSTS = 2
LOSS_TOLERANCE = 1e-3
"""Both sum the same gradients, so losses may differ by rounding only; relative to the loss."""
BAR_CHARACTERS = 40
OPTIONS: dict[str, dict[str, Any]] = {"transformer": {"vocabulary": 500, "shared_embeddings": False}}
"""Of zoo models. With few words, most parameters of the translation model are those of its layers."""


@app.command(epilog="Example: offbeat demo --bandwidth 200Mbit/s")
def demo(
    model: Annotated[str, typer.Option(help="A zoo model.")] = "transformer",
    scale: Annotated[float, typer.Option(help="Relative size of the model, above 0 and at most 1.")] = 0.4,
    batch: Annotated[int, typer.Option(min=1, help="Samples per rank.")] = 32,
    bandwidth: Annotated[str, typer.Option(help="Bandwidth of each host's link.")] = "450Mbit/s",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each runs every job once.")] = 4,
    timeout: Annotated[float, typer.Option(min=0, help="End the demo after this many seconds.")] = 240.0,
    as_json: Json = False,
) -> None:
    """Train one model on two emulated hosts with DDP and with Offbeat, and compare."""
    with progress("training on two emulated hosts, for about a minute"), stdout_to_stderr():
        result = _measure(model, scale, batch, bandwidth, steps, rounds, timeout)
    if as_json:
        print_json(result)
    else:
        rows, verdict = result.pop("jobs"), result.pop("verdict")
        longest = max(row["median_step_seconds"] for row in rows)
        for row in rows:
            row[""] = "█" * round(BAR_CHARACTERS * row["median_step_seconds"] / longest)
        print_rows(rows, as_json=False)
        print(f"\n{verdict}\n")
        print_facts(result)
    if not result["losses_agree"]:
        raise OffbeatError(f"the losses of DDP and Offbeat differ by {result['largest_loss_difference']:.3g}")


def _measure(
    model: str, scale: float, batch: int, bandwidth: str, steps: int, rounds: int, timeout: float
) -> dict[str, Any]:
    """Trains every variant of the model in the same processes, in alternating rounds."""
    from offbeat.emulate import Emulation

    # Rejects a model that cannot be built before any process starts.
    options = OPTIONS.get(model, {})
    parameter_bytes = count_parameters(model, scale, batch, **options)["parameter_bytes"]
    with Emulation(HOSTS, bandwidth) as emulation:
        ranks = emulation.run_function(
            "offbeat.cli.demo_job:train", model, scale, batch, options, steps, rounds, timeout=timeout
        )
        kind = emulation.kind
    by_round = {job: _round_medians(ranks, job) for job in ("ddp", "best_ddp", "offbeat", "compute")}
    difference, agree = compare_losses(ranks)
    bound = max(median(by_round["compute"]), median(ranks[0]["network_seconds"]))
    ratios = [ddp / ours for ddp, ours in zip(by_round["ddp"], by_round["offbeat"], strict=True)]
    return {
        "jobs": [
            _row("DDP, default settings", by_round["ddp"]),
            _row(f"DDP, best bucket size ({ranks[0]['best_bucket_mb']} MB)", by_round["best_ddp"]),
            _row(f"Offbeat, strategy {ranks[0]['strategy']}", by_round["offbeat"]),
            _row("bound: compute or network alone", [bound]),
        ],
        "ddp_over_offbeat": median(by_round["ddp"]) / median(by_round["offbeat"]),
        "best_ddp_over_offbeat": median(by_round["best_ddp"]) / median(by_round["offbeat"]),
        "verdict": _verdict(ratios),
        "largest_loss_difference": difference,
        "losses_agree": agree,
        "model": f"{model} at scale {scale:g}, batch {batch} on each host",
        "parameter_bytes": parameter_bytes,
        "mode": ranks[0]["mode"],
        "hosts": HOSTS,
        "emulation": kind,
        "link": "not limited" if kind == "loopback" else units.format_bandwidth(units.parse_bandwidth(bandwidth)),
        "steps": f"{rounds} x {steps} timed steps of each job, alternating, after {ranks[0]['settling_steps']} steps "
        f"in which Offbeat chose its plan",
    }


def _round_medians(ranks: list[dict[str, Any]], job: str) -> list[float]:
    """Seconds of a step in each round, over all ranks."""
    rounds = zip(*(rank[job]["seconds"] for rank in ranks), strict=True)
    return [median(chain.from_iterable(parts)) for parts in rounds]


def _row(job: str, rounds: list[float]) -> dict[str, Any]:
    return {
        "job": job,
        "median_step_seconds": median(rounds),
        "fastest_round_seconds": min(rounds),
        "slowest_round_seconds": max(rounds),
    }


def _verdict(ratios: list[float]) -> str:
    """One sentence on DDP's step over Offbeat's, round by round."""
    if min(ratios) > 1:
        return f"Offbeat's steps are {median(ratios):.2f} times as fast as DDP's ({min(ratios):.2f} at least)."
    if max(ratios) < 1:
        return f"Offbeat's steps are slower than DDP's here: {median(ratios):.2f} times as fast."
    return (
        f"This machine is too noisy to tell: Offbeat's steps were {min(ratios):.2f} to {max(ratios):.2f} times as fast "
        f"as DDP's."
    )


def compare_losses(ranks: list[dict[str, Any]]) -> tuple[float, bool]:
    """The largest difference between the losses of the two jobs, and whether rounding explains it."""
    largest, agree = 0.0, True
    for rank in ranks:
        for ddp, ours in zip(rank["ddp"]["losses"], rank["offbeat"]["losses"], strict=False):
            if not (math.isfinite(ddp) and math.isfinite(ours)):
                raise OffbeatError(f"the losses are not finite: {ddp} with DDP and {ours} with Offbeat")
            largest = max(largest, abs(ddp - ours))
            agree &= abs(ddp - ours) <= LOSS_TOLERANCE * max(1.0, abs(ddp))
    return largest, agree
