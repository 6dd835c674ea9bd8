"""offbeat demo and tour: DDP against Offbeat on two emulated hosts, and how to get from one to the other."""

import math
import os
import sys
import webbrowser
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from typer import Option

from offbeat import units
from offbeat.cli.app import MODEL, Json, app
from offbeat.cli.show import print_facts, print_json, print_rows, progress, say, stdout_to_stderr
from offbeat.errors import OffbeatError

HOSTS = 2
LOSS_TOLERANCE = 1e-3
"""Both sum the same gradients, so losses may differ by rounding only; relative to the loss."""
BAR_CHARACTERS = 40
OPTIONS: dict[str, dict[str, Any]] = {"transformer": {"vocabulary": 500, "shared_embeddings": False}}
"""Of zoo models. With few words, most parameters of the translation model are those of its layers."""
SEARCH_SECONDS = 10.0
START_SECONDS = 6.0
"""Until the ranks of a job train; as seen on two cores."""
UNTIMED_STEPS = 12
"""Of each job before its first round (`demo_job.compare`), and one more in each round."""
JOBS = ("ddp", "offbeat")


@app.command(epilog="Example: offbeat demo --bandwidth 200Mbit/s")
def demo(
    model: Annotated[str, Option(help="A zoo model.")] = "transformer",
    scale: Annotated[float, Option(help="Relative size of the model, above 0 and at most 1.")] = 0.4,
    batch: Annotated[int, Option(min=1, help="Samples per rank.")] = 32,
    bandwidth: Annotated[str, Option(help="Bandwidth of each host's link.")] = "450Mbit/s",
    steps: Annotated[int, Option(min=1, help="Timed steps per round.")] = 6,
    rounds: Annotated[int, Option(min=1, help="Rounds; each runs every job once.")] = 4,
    timeout: Annotated[float, Option(min=0, help="End the demo after this many seconds.")] = 240.0,
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

    options = OPTIONS.get(model, {})
    size = parameter_bytes(model, scale, batch, options)
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
        "parameter_bytes": size,
        "mode": ranks[0]["mode"],
        "hosts": HOSTS,
        "emulation": kind,
        "link": "not limited" if kind == "loopback" else units.format_bandwidth(units.parse_bandwidth(bandwidth)),
        "steps": f"{rounds} x {steps} timed steps of each job, alternating, after {ranks[0]['settling_steps']} steps "
        f"in which Offbeat chose its plan",
    }


def parameter_bytes(model: str, scale: float, batch: int, options: dict[str, Any]) -> int:
    """The size of a zoo model, which is not allocated; refuses one that cannot be built before any process starts."""
    import torch

    from offbeat import zoo

    with torch.device("meta"):
        built, _ = zoo.build(model, scale, batch, **options)
    return sum(parameter.nbytes for parameter in built.parameters())


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


@app.command(epilog="Example: offbeat tour -o tour/")
def tour(
    folder: Annotated[Path, Option("-o", "--output", help="Folder for trace, report and strategy.")] = Path("tour"),
    model: Annotated[str, Option(help="A zoo model.", **MODEL)] = "transformer",
    scale: Annotated[float, Option(help="Relative size of the model, above 0 and at most 1.")] = 0.4,
    batch: Annotated[int, Option(min=1, help="Samples per rank.")] = 32,
    bandwidth: Annotated[str, Option(help="Bandwidth of each host's link.")] = "450Mbit/s",
    steps: Annotated[int, Option(min=2, help="Steps to record, and in each timed round.")] = 8,
    rounds: Annotated[int, Option(min=1, help="Rounds; each runs both jobs once.")] = 3,
    timeout: Annotated[float, Option(min=0, help="End a job after this many seconds.")] = 180.0,
    open_report: Annotated[
        bool | None,
        Option("--open/--no-open", help="Open the report in the browser; by default if there is a display."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Take a tour of a few minutes: record a slow DDP job, see why, find a better strategy, and measure it."""
    from offbeat.cli.profiling import clear_folder
    from offbeat.emulate import Emulation

    options = OPTIONS.get(model, {})
    parameter_bytes(model, scale, batch, options)
    trace, page, file = folder / "trace", folder / "report.html", folder / "strategy.json"
    clear_folder(trace)
    job = (model, scale, batch, options, steps)
    with stdout_to_stderr(), Emulation(HOSTS, bandwidth) as emulation:
        say(f"1 of 4: train {model} with DDP on {HOSTS} emulated hosts at {bandwidth}, and record {steps} steps")
        with progress("recording"):
            emulation.run_function("offbeat.cli.demo_job:record", *job, str(trace), timeout=timeout)
        say(f"2 of 4: offbeat report {trace} -o {page} (why is it slow?)")
        with progress("replaying what would help"):
            from offbeat.profile.measure import load_profile
            from offbeat.report import write_report

            profile = load_profile(trace)
            report = write_report(page, profile, title=model, trace=str(trace))
        say(report.headline)
        if open_report if open_report is not None else _has_screen():
            webbrowser.open(page.resolve().as_uri())
        say(f"3 of 4: offbeat optimize {trace} -o {file} (is there a better strategy?)")
        with progress("searching", SEARCH_SECONDS):
            from offbeat.profile.whatif import replay_scale, trust_in
            from offbeat.search.optimize import search
            from offbeat.strategy import describe

            found = search(profile.graph, profile.cluster, costs=profile.costs, time_limit=SEARCH_SECONDS)
            found.strategy.save(file)
            interval = trust_in(profile).interval(replay_scale(profile) * found.seconds, "strategy")
            predicted = interval.seconds
        doubt = interval.doubt(profile.step_seconds)
        say(f"predicted: {interval} instead of {units.format_seconds(profile.step_seconds)} per step{doubt}")
        for clause in describe(found.strategy):
            say(f"- {clause}")
        say(f'4 of 4: train with DDP and with distribute(model, optimizer, strategy="{file}") in turn')
        each_job = UNTIMED_STEPS + rounds * (steps + 1)
        with progress("training", about_seconds=START_SECONDS + each_job * (profile.step_seconds + predicted)):
            ranks = emulation.run_function(
                "offbeat.cli.demo_job:compare", *job, rounds, str(file.resolve()), timeout=timeout
            )
    # A round of both jobs is one comparison; of its ranks the slowest counts, for which the others wait.
    before, after = ([max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)] for name in JOBS)
    ratios = [ddp / ours for ddp, ours in zip(before, after, strict=True)]
    result: dict[str, Any] = {
        "before_seconds": median(before),
        "after_seconds": median(after),
        "predicted_seconds": predicted,
        "speedup": median(before) / median(after),
        "speedup_of_each_round": ratios,
        "trace": str(trace),
        "report": str(page),
        "strategy": str(file),
    }
    if as_json:
        print_json(result)
        return
    rows = {"before: DDP": before, f"after: {file}": after, "after, as predicted": [predicted]}
    print_rows([{"job": name, "step_seconds": median(seconds)} for name, seconds in rows.items()], as_json=False)
    print(f"\n{_tour_verdict(ratios)} {page} shows why DDP is slow here; open it in a browser.")


def _tour_verdict(ratios: Sequence[float]) -> str:
    """One sentence on the step before over the step after, round by round."""
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
    if min(ratios) <= 1 <= max(ratios):
        return f"The machine is too noisy to tell: after is {spread} times as fast as before."
    return f"After is {median(ratios):.2f}× as fast as before ({spread})."


def _has_screen() -> bool:
    """Whether a browser would open its own window; one in the terminal would block the tour."""
    shown = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(shown) and sys.stderr.isatty()
