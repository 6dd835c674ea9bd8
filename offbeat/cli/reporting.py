"""offbeat report: a recorded job → one HTML file that says where its time goes and what would help."""

from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.cli.app import Json, app
from offbeat.cli.show import print_facts, print_json, progress
from offbeat.errors import OffbeatError


@app.command(epilog="Example: offbeat report trace/ -o report.html")
def report(
    trace: Annotated[Path, typer.Argument(help="A recorded folder, torch.profiler's traces, or a saved timeline.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file to write.")] = Path("report.html"),
    strategy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Explain this strategy beside the one that ran.")
    ] = None,
    frontier: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A saved frontier, to be drawn in the report.")
    ] = None,
    predicted: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A saved timeline that was predicted, to compare with.")
    ] = None,
    title: Annotated[str, typer.Option(help="What the page is called; the trace's name by default.")] = "",
    what_ifs: Annotated[bool, typer.Option(help="Replay what would help most.")] = True,
    as_json: Json = False,
) -> None:
    """Write one HTML file, for any browser and offline: where the step goes, the timeline, and what would help."""
    if not output.parent.is_dir():
        raise OffbeatError(f"{output}: cannot write the report: there is no folder {output.parent}")
    with progress("reading the trace"):
        from offbeat.profile.source import load_recording
        from offbeat.search.frontier.model import Frontier
        from offbeat.strategy import Strategy
        from offbeat.timeline import Timeline

        recording = load_recording(trace)
        options: dict[str, Any] = {
            "title": title or trace.resolve().name,
            "strategy": Strategy.load(strategy) if strategy else None,
            "frontier": Frontier.load(frontier) if frontier else None,
            "predicted": Timeline.load(predicted) if predicted else None,
            "what_ifs": what_ifs,
        }
    with progress("replaying what would help"):
        from offbeat.report import write_report

        made = write_report(output, recording, **options)
    if as_json:
        print_json({"output": str(output), "output_bytes": output.stat().st_size, **made.to_dict()})
        return
    best = made.help.rows[0] if made.help and made.help.rows else None
    print_facts(
        {
            "report": str(output),
            "report_bytes": output.stat().st_size,
            "spans": len(made.timeline),
            "step_seconds": made.step_seconds,
            "best_change": best.label if best else None,
            "predicted_step_seconds": best.seconds if best else None,
        }
    )
    print()
    print(made.headline)
