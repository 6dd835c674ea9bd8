"""offbeat tour: the whole loop on one machine: a slow DDP job is recorded, reported, improved, and run again."""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

from typer import Option

from offbeat.cli.app import Json, app
from offbeat.cli.demo import HOSTS, OPTIONS
from offbeat.cli.show import print_json, print_rows, progress, say, stdout_to_stderr
from offbeat.units import format_seconds, format_speedup

SEARCH_SECONDS = 10.0


@app.command(epilog="Example: offbeat tour -o tour/")
def tour(
    folder: Annotated[Path, Option("-o", "--output", help="Folder for trace, report and strategy.")] = Path("tour"),
    model: Annotated[str, Option(help="A zoo model.")] = "transformer",
    scale: Annotated[float, Option(help="Its size, above 0 and at most 1.")] = 0.4,
    batch: Annotated[int, Option(min=1, help="Samples of each rank.")] = 32,
    bandwidth: Annotated[str, Option(help="Of each host's link.")] = "450Mbit/s",
    steps: Annotated[int, Option(min=2, help="Steps to record, and in each timed round.")] = 8,
    rounds: Annotated[int, Option(min=1, help="Rounds of both jobs in turn.")] = 3,
    timeout: Annotated[float, Option(min=0, help="Seconds after which a job is ended.")] = 180.0,
    as_json: Json = False,
) -> None:
    """See the whole loop in a few minutes: record a slow DDP job, read why, find a better strategy, and measure it."""
    from offbeat.cli.catalogue import count_parameters
    from offbeat.emulate import Emulation
    from offbeat.profile.launch import clear_folder

    options = OPTIONS.get(model, {})
    # Refuses what cannot be built before any process is started.
    count_parameters(model, scale, batch, **options)
    trace, page, file = folder / "trace", folder / "report.html", folder / "strategy.json"
    clear_folder(trace)
    job = (model, scale, batch, options, steps)
    with stdout_to_stderr(), Emulation(HOSTS, bandwidth) as emulation:
        say(f"1 of 4: records {model} under DDP on {HOSTS} hosts joined by {bandwidth}, as offbeat profile does")
        with progress("recording"):
            emulation.run_function("offbeat.cli.demo_job:record", *job, str(trace), timeout=timeout)
        say(f"2 of 4: offbeat report {trace} -o {page}")
        with progress("replaying what would help"):
            from offbeat.profile.measure import load_profile
            from offbeat.report import write_report

            profile = load_profile(trace)
            report = write_report(page, profile, title=model, trace=str(trace))
        say(report.headline)
        say(f"3 of 4: offbeat optimize {trace} -o {file}")
        with progress("searching", SEARCH_SECONDS):
            from offbeat.profile.whatif import replay_scale
            from offbeat.search.optimize import search

            found = search(profile.graph, profile.cluster, costs=profile.costs, time_limit=SEARCH_SECONDS)
            found.strategy.save(file)
            predicted = replay_scale(profile) * found.seconds
        say(f"predicted: {format_seconds(predicted)} instead of {format_seconds(profile.step_seconds)} per step")
        say(f'4 of 4: trains with DDP and with distribute(model, optimizer, strategy="{file}") in turn')
        with progress("training"):
            ranks = emulation.run_function(
                "offbeat.cli.demo_job:compare", *job, rounds, str(file.resolve()), timeout=timeout
            )
    before, after = (median(each for rank in ranks for each in rank[name]) for name in ("ddp", "offbeat"))
    result: dict[str, Any] = {
        "before_seconds": before,
        "after_seconds": after,
        "predicted_seconds": predicted,
        "speedup": before / after,
        "trace": str(trace),
        "report": str(page),
        "strategy": str(file),
    }
    if as_json:
        print_json(result)
        return
    print_rows(
        [{"job": "before: DDP", "step_seconds": before}, {"job": f"after: {file}", "step_seconds": after}],
        as_json=False,
    )
    print(f"\nAfter is {format_speedup(before, after)} as before. {page} says why; open it in a browser.")
