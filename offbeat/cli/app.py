"""The command line: runs a command, returns its exit code, and prints user errors as one sentence on stderr."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from threading import Timer
from typing import Annotated, Any

import typer
from typer import Argument, Option

from offbeat.cli.show import say
from offbeat.errors import OffbeatError
from offbeat.launch import INTERRUPTED

SCRIPT_SETTINGS = {"ignore_unknown_options": True}
"""For commands that run a script: unknown options and everything after '--' go to the script."""

app = typer.Typer(
    name="offbeat",
    help="Make distributed PyTorch training as fast as the cluster allows.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Typer brings its own copy of click in new releases and uses the installed one in old ones.
_UsageError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _complete(module: str, names: str, *endings: str) -> Callable[[str], list[str]]:
    """Shell completion: matching names that a function of a module returns, then folders and files with the endings."""

    def offered(incomplete: str) -> list[str]:
        known = attrgetter(names)(import_module(module))()
        files = [path for path in Path(incomplete).parent.glob("*") if path.is_dir() or path.suffix in endings]
        paths = [str(path) + "/" * path.is_dir() for path in sorted(files)]
        return [name for name in (*known, *paths) if name.startswith(incomplete)]

    return offered


MODEL: dict[str, Any] = {"autocompletion": _complete("offbeat.zoo", "names")}
CLUSTER: dict[str, Any] = {
    "metavar": "NAME|FILE",
    "autocompletion": _complete("offbeat.cluster", "ClusterSpec.presets", ".yaml", ".yml", ".json"),
}
STRATEGY: dict[str, Any] = {
    "metavar": "BUILDER|FILE",
    "autocompletion": _complete("offbeat.strategy", "builders", ".json"),
}
SCRIPT: dict[str, Any] = {"metavar": "SCRIPT [ARGS]...", "autocompletion": _complete("builtins", "tuple", ".py")}
"""Keywords of options and arguments that name one of these."""

Json = Annotated[bool, Option("--json", help="Print JSON on stdout.")]
Model = Annotated[
    str,
    Argument(help="A zoo model, or pkg.mod:function returning (model, example_inputs).", **MODEL),
]
Scale = Annotated[float | None, Option(help="Relative size of the zoo model, above 0 and at most 1.")]
Cluster = Annotated[str, Option(help="A preset or a cluster file.", **CLUSTER)]
Script = Annotated[
    list[str],
    Argument(help="The training script and its options; put options that this command also has after '--'.", **SCRIPT),
]
SavedStrategy = Annotated[Path | None, Option("-o", "--output", help="File for the strategy.")]
Trace = Annotated[Path, Argument(help="A recording, torch.profiler traces, or a saved timeline.")]
Ranks = Annotated[int, Option("-n", "--ranks", min=1, help="Processes to start on this machine.")]
Servers = Annotated[int, Option(min=0, help="Extra ranks that hold no replica and serve parameters to the others.")]
Timeout = Annotated[float | None, Option(min=0, help="End the job after this many seconds.")]


def group_commands(groups: dict[str, tuple[str, ...]]) -> None:
    """List the registered commands under these headings, in this order, in the help."""
    registered = {command.callback.__name__: command for command in app.registered_commands if command.callback}
    for heading, names in groups.items():
        for name in names:
            registered[name].rich_help_panel = heading
    app.registered_commands[:] = [registered[name] for names in groups.values() for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    usual, sys.unraisablehook = sys.unraisablehook, partial(_interrupt_again, sys.unraisablehook)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(args=None if arguments is None else list(arguments), prog_name="offbeat", standalone_mode=False)
        sys.stdout.flush()
    except OffbeatError as error:
        say(str(error))
        return 1
    except _UsageError as error:
        say(f"{error.format_message().rstrip('.')} (offbeat --help shows the commands)")
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe; Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        sys.unraisablehook = usual
    if code == INTERRUPTED:
        say("interrupted")
    return code or 0


@app.callback(invoke_without_command=True)
def offbeat(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from offbeat import __version__

        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


def _interrupt_again(usual: Callable[[Any], None], unraisable: Any) -> None:
    """Ctrl-C in a callback of a compiled library ends only the callback: the signal is sent again, soon after it."""
    if unraisable.exc_type is KeyboardInterrupt:
        Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        usual(unraisable)


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    # Deprecations and the like concern programmers, not users of the command.
    if issubclass(category, UserWarning):
        say(f"warning: {message}")
