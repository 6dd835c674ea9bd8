"""A way to start one rank → the results of all, with everything stopped once one fails or time is up."""

import contextlib
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Literal

from offbeat.emulate.control import Worker
from offbeat.errors import EmulationError

Outcome = Literal["exited", "stopped", "timed out"]
Program = str | os.PathLike[str] | Sequence[str]

_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """How one rank ended."""

    rank: int
    host: int
    returncode: int
    """Exit code; negative is the signal that ended it."""
    outcome: Outcome
    """'exited' by itself, 'stopped' because another rank failed, or 'timed out'."""
    seconds: float
    """From the start of the first rank to the end of this one."""
    stdout: str = ""
    stderr: str = ""


class RankError(EmulationError):
    """A rank failed or time ran out; `results` says how every rank ended."""

    def __init__(self, message: str, results: list[Result]) -> None:
        super().__init__(message)
        self.results = results


def command(program: Program) -> list[str]:
    """The argv of a rank: a Python script, or options of Python, run under this interpreter; all else as it is."""
    argv = [os.fspath(program)] if isinstance(program, (str, os.PathLike)) else [os.fspath(part) for part in program]
    if not argv:
        raise EmulationError("program: an empty command cannot be run")
    return [sys.executable, *argv] if argv[0].endswith(".py") or argv[0].startswith("-") else argv


def run_ranks(
    start: Callable[[int, IO[bytes] | None, IO[bytes] | None], Worker],
    ranks: range,
    timeout_seconds: float | None,
    capture: bool,
) -> list[Result]:
    """Starts every rank with its output and error stream, waits for all, and returns the results in order of rank."""
    began = time.monotonic()
    workers: list[Worker] = []
    with contextlib.ExitStack() as stack:
        # Unlinked files, so that a long output blocks no rank and nothing is left on disk.
        outputs = [
            (stack.enter_context(tempfile.TemporaryFile()), stack.enter_context(tempfile.TemporaryFile()))
            for _ in (ranks if capture else ())
        ]
        try:
            for rank in ranks:
                output, error = outputs[rank] if capture else (None, None)
                workers.append(start(rank, output, error))
            outcomes = await_all(workers, timeout_seconds)
        except BaseException:
            stop(workers)
            raise
        texts = [(_text(out), _text(error)) for out, error in outputs] or [("", "")] * len(workers)
    return [
        _result(worker, outcome, began, *text) for worker, outcome, text in zip(workers, outcomes, texts, strict=True)
    ]


def await_all(workers: Sequence[Worker], timeout_seconds: float | None) -> list[Outcome]:
    """Waits until all have ended, stopping the rest when one fails or time is up; how each ended."""
    until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    running = list(workers)
    reason: Outcome = "stopped"
    with selectors.DefaultSelector() as selector:
        for worker in running:
            selector.register(worker.fileno(), selectors.EVENT_READ, worker)
        while running and not any(worker.returncode for worker in workers):
            events = selector.select(None if until is None else max(0.0, until - time.monotonic()))
            for key, _ in events:
                selector.unregister(key.fd)
                key.data.poll()
                running.remove(key.data)
            if not events and until is not None and time.monotonic() >= until:
                reason = "timed out"
                break
    stop(running)
    return [reason if worker in running else "exited" for worker in workers]


def stop(workers: Iterable[Worker]) -> None:
    """Asks workers to end, and makes them after a moment."""
    remaining = [worker for worker in workers if worker.poll() is None]
    for worker in remaining:
        worker.terminate()
    until = time.monotonic() + _GRACE_SECONDS
    for worker in remaining:
        with contextlib.suppress(TimeoutError):
            worker.wait(until - time.monotonic())
    for worker in remaining:
        worker.kill()
        worker.wait()


def first_failure(results: Sequence[Result]) -> Result | None:
    """The rank that failed first by itself, else one that did not finish in time."""
    failed = [result for result in results if result.outcome == "exited" and result.returncode]
    late = next((result for result in results if result.outcome == "timed out"), None)
    return min(failed, key=lambda result: result.seconds, default=late)


def require_success(results: list[Result], timeout_seconds: float | None) -> None:
    """Raises one sentence about the first rank that failed."""
    failure = first_failure(results)
    if failure is None:
        return
    if failure.outcome == "timed out":
        ranks = ", ".join(str(result.rank) for result in results if result.outcome == "timed out")
        raise RankError(f"timeout: after {timeout_seconds:g} s these ranks still ran: {ranks}", results)
    raise RankError(f"rank {failure.rank} on host{failure.host} {_ending(failure)}", results)


def _ending(result: Result) -> str:
    code = result.returncode
    how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    last_words = result.stderr.strip().rpartition("\n")[2].strip()
    return f"{how}: {last_words}" if last_words else how


def _result(worker: Worker, outcome: Outcome, began: float, stdout: str, stderr: str) -> Result:
    assert worker.returncode is not None
    ended = time.monotonic() if worker.ended_at is None else worker.ended_at
    return Result(worker.rank, worker.host, worker.returncode, outcome, ended - began, stdout, stderr)


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")
