"""A script and a number of ranks → as many processes on this machine that run it, recorded or not, and an exit code."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from offbeat.errors import OffbeatError
from offbeat.launch import LOOPBACK, LocalJob, free_port

TIMED_OUT = 124
_SIGNALLED = 128
RECORDED_FILES = ("rank*.jsonl", "calibration.json", "strategy.json", "overhead.json")
"""What a recording consists of; those of an earlier run would be mixed with the new ones."""


def profile_script(
    script: Sequence[str],
    folder: str | os.PathLike[str],
    ranks: int,
    *,
    steps: int,
    plain_steps: int,
    run_on: bool,
    timeout: float | None,
) -> int:
    """Runs a training script on so many ranks with a recorder attached; the exit code as `run_module` gives it."""
    clear_folder(Path(folder))
    options = ["--folder", os.fspath(folder), "--steps", str(steps), "--plain-steps", str(plain_steps)]
    options += ["--run-on"] if run_on else []
    return run_module("offbeat.profile.attach", [*options, *script], ranks, timeout)


def profile_here(
    script: Sequence[str], folder: str | os.PathLike[str], *, steps: int, plain_steps: int, run_on: bool
) -> None:
    """Runs the script in this process, a rank that torchrun or another launcher has started, and records it."""
    from offbeat.profile.attach import record_script

    if os.environ["RANK"] == "0":
        # The others begin to record only after they have met this rank.
        clear_folder(Path(folder))
    try:
        record_script(script, folder, steps=steps, plain_steps=plain_steps, run_on=run_on)
    except SystemExit as ended:
        # The usual end: enough was recorded.
        if ended.code:
            raise


def require_script(script: str) -> None:
    """Refuses what is no file, before anything is started."""
    if not Path(script).is_file():
        raise OffbeatError(f"{script}: there is no such script")


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
        raise OffbeatError(f"{folder}: a trace cannot be written there: {error.strerror}") from None


def run_module(module: str, arguments: Sequence[str], ranks: int, timeout: float | None = None) -> int:
    """Runs a module on so many ranks; the exit code as `run_script` gives it."""
    return run_script(["-m", module, *arguments], ranks, {}, timeout)


def run_script(arguments: Sequence[str], ranks: int, variables: Mapping[str, str], timeout: float | None = None) -> int:
    """0, the exit code of the rank that failed first (128 + n if signal n ended it), or 124 when time was up.

    `arguments` are Python's, `variables` join every rank's environment. When one rank fails the others are ended,
    because they would wait for it.
    """
    master = (LOOPBACK, free_port(LOOPBACK))
    with LocalJob(arguments, range(ranks), ranks, master, variables, captured=False) as job:
        if not job.wait(timeout):
            return TIMED_OUT
        failed = [end.returncode for end in job.finish() if end.outcome == "exited" and end.returncode]
    if not failed:
        return 0
    return failed[0] if failed[0] > 0 else _SIGNALLED - failed[0]
