"""Run a script as several ranks on this machine."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from offbeat.errors import OffbeatError
from offbeat.launch import LOOPBACK, TIMED_OUT, LocalJob, exit_code, first_failure, free_port

RECORDED_FILES = ("rank*.jsonl", "calibration.json", "overhead.json")
"""The files of a recording, which a new one replaces."""


def require_script(script: str) -> None:
    """Raises OffbeatError unless the script is a file."""
    if not Path(script).is_file():
        raise OffbeatError(f"{script}: no such script")


def inside_job() -> bool:
    """Whether this process is a rank that a launcher has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def clear_folder(folder: Path) -> None:
    """Makes the folder and removes what an earlier recording left in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in RECORDED_FILES:
            for path in folder.glob(pattern):
                path.unlink()
    except OSError as error:
        raise OffbeatError(f"{folder}: cannot write a trace there: {error.strerror}") from None


def run_script(
    arguments: Sequence[str], ranks: int, variables: Mapping[str, str] | None = None, timeout: float | None = None
) -> int:
    """Runs Python on all ranks; returns 0, `TIMED_OUT`, or the exit code of the rank that failed first.

    `arguments` are Python's, `variables` join every rank's environment. When one rank fails the others are ended,
    because they would wait for it.
    """
    master = (LOOPBACK, free_port(LOOPBACK))
    with LocalJob(arguments, range(ranks), ranks, master, variables or {}, captured=False) as job:
        if not job.wait(timeout):
            return TIMED_OUT
        failure = first_failure(job.finish())
    return exit_code(failure.returncode) if failure else 0
