"""Jobs of exit_job.py, two ranks each, and how they ended.

Importing torch and Offbeat takes seconds, which hundreds of runs cannot afford. So one process imports them and forks
for every rank; a forked rank runs the script as the interpreter would, and its interpreter ends as any other does.
"""

import importlib
import itertools
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import free_port

JOB = Path(__file__).with_name("exit_job.py")
PATIENCE_SECONDS = 90.0
"""A job that has not ended by then hangs."""


@dataclass(frozen=True)
class Ended:
    """How one rank of a job ended."""

    code: int | None
    """As subprocess has it: negative for a signal, None if the rank had to be killed."""
    seconds: float
    """From the moment at which the first rank had done its steps."""
    said: str


class Launcher:
    """The process that forks ranks."""

    def __init__(self) -> None:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True
        )

    def start(self, folder: Path, *arguments: str) -> list[int]:
        """The process ids of a new job's ranks, whose output goes to `folder`."""
        return self._ask({"folder": str(folder), "arguments": arguments, "port": free_port()})

    def poll(self, pid: int) -> int | None:
        """A rank's exit code, None while it runs."""
        return self._ask({"poll": pid})

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate(timeout=30)


def run_job(
    launcher: Launcher,
    folder: Path,
    *arguments: str,
    after: str = "",
    signals: Sequence[tuple[int, int]] = (),
    delay: float = 0.0,
    leave: tuple[int, ...] = (),
) -> list[Ended]:
    """Runs a job to its end; `signals` (rank, number) are sent when all ranks have printed the line `after`.

    `delay` seconds pass before the first, and before each that differs from the one before it.

    Ranks in `leave` are not waited for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pids = launcher.start(folder, *arguments)
    running = dict(enumerate(pids))
    ended: dict[int, tuple[int | None, float]] = {}
    began = time.monotonic()
    deadline = began + PATIENCE_SECONDS
    hit = 0.0
    try:
        while set(running) - set(leave) and time.monotonic() < deadline:
            time.sleep(0.03)
            if after and not hit and all(f"{after}\n" in said(folder, rank) for rank in range(len(pids))):
                hit = time.monotonic()
                for number, blows in itertools.groupby(signals, key=lambda blow: blow[1]):
                    time.sleep(delay)
                    for rank, _ in blows:
                        os.kill(pids[rank], number)
            for rank, pid in list(running.items()):
                code = launcher.poll(pid)
                if code is not None:
                    del running[rank]
                    ended[rank] = code, time.monotonic() - (hit or began)
    finally:
        for pid in running.values():
            os.kill(pid, 9)
            while launcher.poll(pid) is None:
                time.sleep(0.01)
    return [Ended(*ended.get(rank, (None, PATIENCE_SECONDS)), said(folder, rank)) for rank in range(len(pids))]


def said(folder: Path, rank: int) -> str:
    path = folder / f"rank{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def _become_rank(rank: int, request: dict[str, Any]) -> None:
    """Makes the forked process look like one that torchrun has started."""
    with (Path(request["folder"]) / f"rank{rank}.log").open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(request["port"]),
    }
    sys.argv = [str(JOB), *request["arguments"]]


def _serve() -> bool:
    """Forks ranks until there are no more requests; True in a forked rank."""
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer: Any = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = []
            for rank in range(2):
                pid = os.fork()
                if not pid:
                    _become_rank(rank, request)
                    return True
                answer.append(pid)
        print(json.dumps(answer), flush=True)
    return False


if __name__ == "__main__":
    for module in ("api", "monitor", "online"):
        importlib.import_module(f"offbeat.{module}")
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    if _serve():
        runpy.run_path(str(JOB), run_name="__main__")
