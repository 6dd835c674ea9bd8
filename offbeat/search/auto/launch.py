"""A program + this machine → one process per rank, watched until all have ended or one has failed.

`LocalJob` is the part of a job that runs on this machine; `LocalRanks` is a job that runs on it as a whole.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from offbeat.errors import OffbeatError

TASK = "OFFBEAT_TRIAL_TASK"
"""Variable that names the file which says what the ranks of a job are to do."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
_LOST_PEER = ("WorkerLost", "closed by peer", "reset by peer", "Broken pipe", "connection lost", "timed out waiting")


class Ended(Protocol):
    """How one rank ended; `offbeat.emulate.Result` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def returncode(self) -> int: ...
    @property
    def outcome(self) -> str:
        """'exited', 'stopped' or 'timed out'."""

    @property
    def seconds(self) -> float: ...
    @property
    def stderr(self) -> str: ...


class Machines(Protocol):
    """Where ranks are started: an `offbeat.emulate.Emulation` is one, `LocalRanks` and `LeadNode` are others."""

    @property
    def world_size(self) -> int: ...
    def run(
        self, program: Any, *, timeout: float | None, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Sequence[Ended]: ...


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    returncode: int
    outcome: str
    seconds: float
    stderr: str


class LocalJob:
    """The ranks of one job that run on this machine. Use it in a `with` block, which ends what still runs."""

    def __init__(
        self,
        program: Sequence[str],
        ranks: Sequence[int],
        world_size: int,
        master: tuple[str, int],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.program, self.ranks = list(program), list(ranks)
        self.environment = {
            **os.environ,
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **(env or {}),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: dict[int, float] = {}
        """Seconds after which a rank ended by itself, by its place on this machine."""
        self._outputs: list[IO[bytes]] = []

    def __enter__(self) -> "LocalJob":
        self._outputs = [tempfile.TemporaryFile() for _ in self.ranks]  # noqa: SIM115 - closed by __exit__
        self.began = time.monotonic()
        try:
            for place, rank in enumerate(self.ranks):
                self.processes.append(self._start(place, rank))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for output in self._outputs:
            output.close()

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def failed(self) -> bool:
        """A rank has ended with an error."""
        return any(self.processes[place].returncode for place in self.ended)

    @property
    def done(self) -> bool:
        return len(self.ended) == len(self.ranks)

    def poll(self) -> bool:
        """Notes who has ended; True while there is something to wait for."""
        for place, process in enumerate(self.processes):
            if place not in self.ended and process.poll() is not None:
                self.ended[place] = self.age_seconds
        return not (self.done or self.failed)

    def finish(self, timed_out: bool = False) -> list[RankEnd]:
        """Ends what still runs and says how each rank ended."""
        self.poll()
        late = "timed out" if timed_out else "stopped"
        self._end()
        age = self.age_seconds
        return [
            RankEnd(
                rank,
                process.returncode,
                "exited" if place in self.ended else late,
                self.ended.get(place, age),
                _tail(self._outputs[place]),
            )
            for place, (rank, process) in enumerate(zip(self.ranks, self.processes, strict=True))
        ]

    def _start(self, place: int, rank: int) -> "subprocess.Popen[bytes]":
        output = self._outputs[place]
        # A session of its own: Ctrl-C is for the search, which then ends its ranks itself.
        return subprocess.Popen(
            [sys.executable, *self.program],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**self.environment, "RANK": str(rank), "LOCAL_RANK": str(place)},
            start_new_session=True,
        )

    def _end(self) -> None:
        """Ends what still runs: asked first, then made."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + GRACE_SECONDS
            for process in self.processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))


class LocalRanks:
    """Ranks on this machine, which talk over loopback or within the device's interconnect."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise OffbeatError(f"ranks: {world_size} is not at least 1")
        self.world_size = world_size

    def run(
        self,
        program: Sequence[str],
        *,
        timeout: float | None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> list[RankEnd]:
        """Runs a Python program on every rank; all are ended when one fails or time is up."""
        master = ("127.0.0.1", free_port("127.0.0.1"))
        with LocalJob(program, range(self.world_size), self.world_size, master, env) as job:
            while (waits := job.poll()) and (timeout is None or job.age_seconds < timeout):
                time.sleep(POLL_SECONDS)
            if job.failed:
                # Others that fail for the same reason get a moment to say so.
                time.sleep(POLL_SECONDS)
            ends = job.finish(timed_out=waits)
        if check:
            require_success(ends)
        return ends


def require_success(ends: Sequence[Ended]) -> None:
    failed = first_failure(ends)
    if failed is not None:
        raise OffbeatError(f"rank {failed.rank} failed: {last_words(failed)}")


def first_failure(ends: Sequence[Ended]) -> Ended | None:
    """The rank whose error is the cause: one that only lost a peer fails too, and may even be noticed first."""
    failed = [end for end in ends if end.outcome == "exited" and end.returncode]
    return min(failed, key=lambda end: (any(sign in last_words(end) for sign in _LOST_PEER), end.seconds), default=None)


def last_words(end: Ended) -> str:
    """The last line that a rank wrote, which names the error if it was one."""
    words = end.stderr.strip().rpartition("\n")[2].strip()
    return (words or f"exit code {end.returncode}")[:300]


def free_port(address: str = "") -> int:
    """A port of this machine that nothing listens on now."""
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _tail(log: IO[bytes], length: int = 8192) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - length))
    return log.read().decode(errors="replace")
