"""offbeat view: a recording or a model → a live page in the browser, until Ctrl-C."""

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.app import Json, app
from offbeat.cli.catalogue import load_cluster
from offbeat.cli.planning import capture_model
from offbeat.cli.show import print_json, progress, say
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.report.live import Session

DEFAULT_PORT = 8620


@app.command(epilog="Example: offbeat view trace/, or offbeat view --model resnet50 --cluster B7")
def view(
    trace: Annotated[
        Path | None, typer.Argument(help="A recorded folder, torch.profiler's traces, or a saved timeline.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Look at a zoo model, or pkg.mod:function, that was not recorded.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Where the model would run: a preset or a cluster file.")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Size of the zoo model, above 0 and at most 1.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = DEFAULT_PORT,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Serve a page on this machine that replays the job while you change bandwidth, workers, strategy and more."""
    session = _session(trace, model, cluster, scale)
    from offbeat.report.server import LiveServer

    with LiveServer(session, port) as server:
        if as_json:
            print_json({"url": server.url, "port": server.server_port, "title": session.title})
        else:
            print(f"{session.title}: {server.url} (Ctrl-C ends it)")
        # What is loaded now stays, so that collections during a replay need not look through it.
        gc.collect()
        gc.freeze()
        # Whoever reads a pipe waits for the address.
        print(end="", flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("the page is closed")


def _session(trace: Path | None, model: str | None, cluster: str | None, scale: float | None) -> "Session":
    if (trace is None) == (model is None):
        raise OffbeatError("view: name either a trace or a --model" + (", not both" if trace is not None else ""))
    if model is None:
        if cluster is not None or scale is not None:
            raise OffbeatError(f"--{'cluster' if cluster is not None else 'scale'}: it goes with --model, not a trace")
        with progress("reading the traces"):
            from offbeat.report.live import Session

            assert trace is not None
            return Session.of_recording(trace)
    if cluster is None:
        raise OffbeatError(f"--cluster: it is needed, because {model!r} was not recorded on any")
    spec = load_cluster(cluster)
    with progress(f"capturing {model}"):
        from offbeat.report.live import Session

        return Session.of_model(capture_model(model, scale), spec)
