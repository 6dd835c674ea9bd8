"""offbeat tour: record, analyse and improve a slow DDP job on one machine, and run it again."""

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from typer import Option

from offbeat.cli.app import Json, app, complete_model
from offbeat.cli.demo import HOSTS, OPTIONS
from offbeat.cli.show import print_json, print_rows, progress, say, stdout_to_stderr
from offbeat.units import format_seconds

SEARCH_SECONDS = 10.0
START_SECONDS = 6.0
"""Until the ranks of a job train; as seen on two cores."""
UNTIMED_STEPS = 12
"""Of each job before its first round (`demo_job.compare`), and one more in each round."""
JOBS = ("ddp", "offbeat")


@app.command(epilog="Example: offbeat tour -o tour/")
def tour(
    folder: Annotated[Path, Option("-o", "--output", help="Folder for trace, report and strategy.")] = Path("tour"),
    model: Annotated[str, Option(help="A zoo model.", autocompletion=complete_model)] = "transformer",
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
    from offbeat.cli.catalogue import count_parameters
    from offbeat.emulate import Emulation
    from offbeat.profile.launch import clear_folder

    options = OPTIONS.get(model, {})
    # Rejects a model that cannot be built before any process starts.
    count_parameters(model, scale, batch, **options)
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
        say(f"predicted: {interval} instead of {format_seconds(profile.step_seconds)} per step{doubt}")
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
    print(f"\n{_verdict(ratios)} {page} shows why DDP is slow here; open it in a browser.")


def _verdict(ratios: Sequence[float]) -> str:
    """One sentence on the step before over the step after, round by round."""
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
    if min(ratios) <= 1 <= max(ratios):
        return f"The machine is too noisy to tell: after is {spread} times as fast as before."
    return f"After is {median(ratios):.2f}× as fast as before ({spread})."


def _has_screen() -> bool:
    """Whether a browser would open its own window; one in the terminal would block the tour."""
    shown = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(shown) and sys.stderr.isatty()
