"""offbeat report and view: show a recorded job or a model as an HTML file or a live page."""

import gc
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from offbeat.cli.app import CLUSTER, MODEL, Json, Scale, Trace, app
from offbeat.cli.planning import capture_model, load_cluster
from offbeat.cli.show import print_facts, print_json, progress, require_folder, say
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.report.live import Session

DEFAULT_PORT = 8620


@app.command(epilog="Example: offbeat report trace/ -o report.html")
def report(
    trace: Trace,
    output: Annotated[Path, Option("-o", "--output", help="The HTML file to write.")] = Path("report.html"),
    strategy: Annotated[Path | None, Option(metavar="FILE", help="Another strategy to explain.")] = None,
    frontier: Annotated[Path | None, Option(metavar="FILE", help="A saved frontier to draw in the report.")] = None,
    predicted: Annotated[Path | None, Option(metavar="FILE", help="A predicted timeline to compare with.")] = None,
    compare: Annotated[Path | None, Option(metavar="TRACE", help="Another recording to compare with.")] = None,
    title: Annotated[str, Option(help="Title of the page; the trace's name by default.")] = "",
    what_ifs: Annotated[bool, Option(help="Replay changes to find what would help.")] = True,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML file: where the step time goes, the timeline, and what would help."""
    require_folder(output, "report")
    with progress("reading the trace"):
        from offbeat.profile.measure import Profile
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
            "trace": str(trace) if isinstance(recording, Profile) else "",
            "compare": (_name(compare, trace), load_recording(compare)) if compare else None,
        }
    with progress("replaying what would help"):
        from offbeat.report import write_report

        made = write_report(output, recording, **options)
    if as_json:
        print_json({"output": str(output), "output_bytes": output.stat().st_size, **made.to_dict()})
        return
    best = (made.help.free or made.help.rows[0]) if made.help and made.help.rows else None
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
    print("\n".join([made.headline, *(f"    {command}" for command in made.commands)]))


def _name(other: Path, trace: Path) -> str:
    """The name of another recording: its folder, or the whole path if both folders have the same name."""
    return other.resolve().name if other.resolve().name != trace.resolve().name else str(other)


@app.command(epilog="Example: offbeat view trace/, or offbeat view --model resnet50 --cluster B7")
def view(
    trace: Annotated[Path | None, Argument(help="A recording, torch.profiler traces, or a saved timeline.")] = None,
    model: Annotated[
        str | None, Option(help="A zoo model or pkg.mod:function, instead of a recording.", **MODEL)
    ] = None,
    cluster: Annotated[str | None, Option(help="A preset or a cluster file, for --model.", **CLUSTER)] = None,
    scale: Scale = None,
    port: Annotated[int, Option(min=0, max=65535, help="Port to serve on; 0 picks a free one.")] = DEFAULT_PORT,
    open_browser: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Serve a local page that replays the job while you change bandwidth, workers, strategy and more."""
    session = _session(trace, model, cluster, scale)
    from offbeat.report.server import LiveServer

    with LiveServer(session, port) as server:
        if as_json:
            print_json({"url": server.url, "port": server.server_port, "title": session.title})
        else:
            print(f"{session.title}: {server.url} (Ctrl-C to stop)")
        # Objects loaded so far stay alive, so the garbage collector need not visit them during a replay.
        gc.collect()
        gc.freeze()
        # A reader of the pipe waits for the URL.
        print(end="", flush=True)
        with opening_page(server.url) if open_browser else nullcontext():
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                say("stopped")


@contextmanager
def opening_page(url: str) -> Generator[None, None, None]:
    """Opens a URL through a file that only this user can read; a command line would expose the token."""
    import webbrowser

    with tempfile.NamedTemporaryFile("w", prefix="offbeat-view-", suffix=".html") as page:
        page.write('<!doctype html><meta name="referrer" content="no-referrer">')
        page.write(f'<meta http-equiv="refresh" content="0;url={url}">')
        page.flush()
        webbrowser.open(Path(page.name).as_uri())
        yield


def _session(trace: Path | None, model: str | None, cluster: str | None, scale: float | None) -> "Session":
    if (trace is None) == (model is None):
        raise OffbeatError("view: give either a trace or --model" + (", not both" if trace is not None else ""))
    if model is None:
        if cluster is not None or scale is not None:
            raise OffbeatError(f"--{'cluster' if cluster is not None else 'scale'}: needs --model, not a trace")
        with progress("reading the traces"):
            from offbeat.report.live import Session

            assert trace is not None
            return Session.of_recording(trace)
    if cluster is None:
        raise OffbeatError(f"--cluster: required for --model {model}")
    spec = load_cluster(cluster)
    graph = capture_model(model, scale)
    from offbeat.report.live import Session

    return Session.of_model(graph, spec)
