"""Predictions and what was then measured → a small file of the user's, and back.

It is not part of a trial store, which belongs to one project and holds whole strategies: what a machine teaches about
predictions holds for all projects, and is a few numbers. Each line is one JSON object: an `Outcome`, or an
`Expectation` of a strategy that was saved and may be run later. Writers take turns by a lock on a file beside it and
give up at once where they cannot; the oldest half is dropped when the file has grown to `MOST_BYTES`. Nothing depends
on it: where it cannot be read or written, there is no history. OFFBEAT_HISTORY names another file; /dev/null is none.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from offbeat import files
from offbeat.graph import ModelGraph
from offbeat.strategy import Strategy

HISTORY_VARIABLE = "OFFBEAT_HISTORY"
MOST_BYTES = 2**19
"""Some 2,500 lines."""
MOST_LINE_BYTES = 1000
MOST_RATIO = 100.0
"""Of two times of one thing."""
Kind = Literal["same", "strategy", "link", "ranks", "trial", "compute", "model"]
"""What a prediction knows less about than the run it was measured in. 'same': nothing, it is the replay of that run.
'strategy': another strategy. 'link': other links, or devices of another speed. 'ranks': another number of ranks.
'trial': a strategy that a search is about to try, at what it has measured by then. 'compute': recomputing, compiling
or another precision. 'model': nothing was measured at all."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A predicted step and the measured one, in seconds."""

    kind: Kind
    device: str
    job: str
    """Tells models apart (`job_of`)."""
    predicted: float
    measured: float
    noise: float = 0.0
    """The prediction's own relative standard error, as far as it was known."""

    def __post_init__(self) -> None:
        numbers = (self.predicted, self.measured, self.noise)
        if self.kind not in KINDS or not all(isinstance(text, str) for text in (self.device, self.job)):
            raise ValueError(f"{self} is no outcome")
        if not all(isinstance(number, (int, float)) and isfinite(number) for number in numbers):
            raise ValueError(f"{self} has a number that is none")
        if min(self.predicted, self.measured) <= 0 or not 0 <= self.noise <= 1:
            raise ValueError(f"{self} has a time that is not positive, or noise that is no share")
        if not 1 / MOST_RATIO < self.measured / self.predicted < MOST_RATIO:
            raise ValueError(f"{self} compares two different things")


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a saved strategy is predicted to take; the outcome follows when a job runs it."""

    strategy: str
    """`name_of` the strategy."""
    ranks: int
    kind: Kind
    device: str
    job: str
    seconds: float
    noise: float = 0.0

    def outcome(self, measured: float) -> Outcome:
        return Outcome(self.kind, self.device, self.job, self.seconds, measured, self.noise)


def job_of(graph: ModelGraph) -> str:
    """The same for all recordings of one model."""
    return files.digest([[variable.name, variable.bytes] for variable in graph.variables])[:12]


def name_of(strategy: Strategy) -> str:
    """The same wherever a strategy is run."""
    return strategy.model_copy(update={"graph": "", "cluster": ""}).digest[:16]


def history_file() -> Path:
    """Where the history is; it may not exist."""
    if given := os.environ.get(HISTORY_VARIABLE):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(state) if state else Path.home() / ".local" / "state") / "offbeat" / "outcomes.jsonl"
    except RuntimeError:
        return Path(os.devnull)


def past_outcomes(device: str) -> tuple[Outcome, ...]:
    """What predictions for such devices turned out to be, the oldest first."""
    found = []
    for line in _lines():
        with suppress(TypeError, ValueError):
            outcome = Outcome(**line)
            if outcome.device == device:
                found.append(outcome)
    return tuple(found)


def expectation_of(strategy: Strategy, ranks: int) -> Expectation | None:
    """The latest prediction for this strategy on so many ranks."""
    wanted, found = name_of(strategy), None
    for line in _lines(wanted.encode()):
        with suppress(TypeError, ValueError):
            if line.get("strategy") == wanted and line.get("ranks") == ranks:
                found = Expectation(**line)
                # What a file holds may be anything; an outcome of it checks every field.
                found.outcome(1.0)
    return found


def remember(fact: Outcome | Expectation) -> None:
    """Appends one line, unless the history has it or cannot be written; never raises and never waits."""
    line = orjson.dumps(asdict(fact)) + b"\n"
    path = history_file()
    if len(line) > MOST_LINE_BYTES or path == Path(os.devnull):
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path.with_name(f"{path.name}.lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = _content(path)
            if line in before:
                return
            if len(before) + len(line) > MOST_BYTES:
                kept = before[-MOST_BYTES // 2 :]
                _replace(path, kept[kept.find(b"\n") + 1 :] + line)
                return
            if before and not before.endswith(b"\n"):
                line = b"\n" + line
            with open(path, "ab") as stream:
                stream.write(line)


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    os.replace(new, path)


def _content(path: Path) -> bytes:
    try:
        if not path.is_file():
            return b""
        with open(path, "rb") as stream:
            # Not more than is ever written, whatever somebody has put there.
            return stream.read(2 * MOST_BYTES)
    except OSError:
        return b""


def _lines(containing: bytes = b"") -> Iterator[dict[str, Any]]:
    for line in _content(history_file()).splitlines():
        if containing not in line:
            continue
        with suppress(orjson.JSONDecodeError):
            parsed = orjson.loads(line)
            if isinstance(parsed, dict):
                yield parsed
