"""Print plain values as JSON, or as tables and facts on a terminal, a pipe or a file."""

import json
import math
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from typer import Exit

from offbeat import units
from offbeat.errors import OffbeatError
from offbeat.launch import SERVERS_VARIABLE, TIMED_OUT

PIPE_WIDTH = 200
Format = Callable[[Any], str]


def say(sentence: str) -> None:
    """One line on stderr."""
    print(f"offbeat: {' '.join(sentence.split())}", file=sys.stderr)


def exit_if_failed(code: int, timeout: float | None) -> None:
    """Exits with the code of a failed job, after a sentence about it."""
    if code:
        say(f"the job ended with exit code {code}" + (f": timed out after {timeout:g} s" if code == TIMED_OUT else ""))
        raise Exit(code)


def require_folder(output: Path, what: str) -> None:
    """Rejects an output file that cannot be written before the work starts."""
    if not output.parent.is_dir():
        raise OffbeatError(f"{output}: cannot write the {what}: no folder {output.parent}")


def require_script(script: str) -> None:
    """Raises OffbeatError unless the script is a file."""
    if not Path(script).is_file():
        raise OffbeatError(f"{script}: no such script")


def refuse_servers(servers: int) -> None:
    """In a job that another launcher has started, it is that one which starts servers."""
    if servers:
        raise OffbeatError(f"--servers: under another launcher set {SERVERS_VARIABLE} to their ranks, such as 4,5")


def print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))


def print_rows(rows: Sequence[Mapping[str, Any]], as_json: bool, **formats: Format) -> None:
    """Rows with the same fields as a table; numbers are right-aligned."""
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, value in rows[0].items():
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        table.add_column(_title(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_text(name, value, formats) for name, value in row.items()))
    _print(table)


def print_facts(facts: Mapping[str, Any], as_json: bool = False, **formats: Format) -> None:
    """Names and values, one pair per line; None is left out."""
    if as_json:
        print_json(facts)
        return
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            table.add_row(_title(name), _text(name, value, formats))
    _print(table)


def with_intervals(facts: Mapping[str, Any]) -> dict[str, Any]:
    """For people: each time with its bounds in one text, '375 ms (358–396, 9 of 10)'."""
    from offbeat.cost.interval import Interval

    left_out = ("_low_seconds", "_high_seconds", "gain_inside_interval")
    shown = {name: value for name, value in facts.items() if not name.endswith(left_out)}
    for name, value in shown.items():
        low, high = (facts.get(f"{name.removesuffix('_seconds')}_{bound}_seconds") for bound in ("low", "high"))
        if low is not None and high is not None:
            shown[name] = str(Interval(value, low, high))
    return shown


def print_paragraphs(title: str, paragraphs: Sequence[str]) -> None:
    """A title, and below it each paragraph indented."""
    from rich.padding import Padding
    from rich.text import Text

    _print(Text(title, style="bold"))
    for each in paragraphs:
        _print(Padding(Text(each), (0, 0, 0, 4)))


@contextmanager
def progress(
    what: str, most_seconds: float | None = None, about_seconds: float | None = None
) -> Generator[None, None, None]:
    """Shows the elapsed seconds while the block runs and, given a limit or an estimate, the seconds left; on a
    terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task
    from rich.text import Text

    class Seconds(ProgressColumn):
        def render(self, task: Task) -> Text:
            passed = task.elapsed or 0.0
            left = ""
            if most_seconds is not None:
                left = f", at most {max(0, math.ceil(most_seconds - passed))} s left"
            elif about_seconds is not None:
                more = math.ceil(about_seconds - passed)
                left = f", about {more} s left" if more > 0 else ", longer than expected"
            return Text(f"{task.description}: {passed:.0f} s{left}")

    with Progress(SpinnerColumn(), Seconds(), console=Console(stderr=True), transient=True) as shown:
        shown.add_task(what, total=None)
        yield


@contextmanager
def stdout_to_stderr(wanted: bool = True) -> Generator[None, None, None]:
    """Sends what this process and its children print to stderr, so that stdout holds the result alone."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _print(content: Any) -> None:
    from rich.console import Console

    # A pipe has no width of its own, and a script needs whole lines.
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(content)
    for line in capture.get().splitlines():
        print(line.rstrip())


def _text(name: str, value: Any, formats: Mapping[str, Format]) -> str:
    if value is None:
        return "-"
    if name in formats:
        return formats[name](value)
    if name.endswith("_bytes"):
        return units.format_bytes(value)
    if name.endswith("_seconds") and not isinstance(value, str):
        return units.format_seconds(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {key}" for key, count in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _title(name: str) -> str:
    return name.removesuffix("_seconds").replace("memory_bytes", "memory").replace("_", " ")
