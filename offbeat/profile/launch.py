"""A module and a number of ranks → as many processes on this machine, started as torchrun would, and how they ended."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from offbeat.errors import OffbeatError

TIMED_OUT = 124
_SIGNALLED = 128
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
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
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            environment = {**rank_environment(rank, ranks, port), **variables}
            # Ctrl-C reaches this process alone, which then ends the ranks; a traceback of each would hide the reason.
            processes.append(subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True))
        return _follow(processes, None if timeout is None else time.monotonic() + timeout)
    finally:
        _stop(processes)


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun gives to a worker; what the user has set stays."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if sys.platform == "linux":
        # The name of a machine often resolves to no address that it can reach.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _follow(processes: list[subprocess.Popen[bytes]], until: float | None) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else _SIGNALLED - failed[0]
        if None not in codes:
            return 0
        if until is not None and time.monotonic() >= until:
            return TIMED_OUT
        time.sleep(_POLL_SECONDS)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    until = time.monotonic() + _GRACE_SECONDS
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
