"""A program and ranks → processes on this machine, started as torchrun would, and how they ended."""

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
from typing import IO

POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
LOOPBACK = "127.0.0.1"


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
        *,
        captured: bool = True,
    ) -> None:
        """Without `captured` the ranks write where this process does, and say nothing in `RankEnd.stderr`."""
        self.program, self.ranks, self.captured = list(program), list(ranks), captured
        self.environment = {**job_environment(len(ranks), world_size, master), **(env or {})}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: dict[int, float] = {}
        """Seconds after which a rank ended by itself, by its place on this machine."""
        self._outputs: list[IO[bytes]] = []

    def __enter__(self) -> "LocalJob":
        if self.captured:
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

    def wait(self, timeout: float | None) -> bool:
        """Until all ranks have ended, or one has failed; False if `timeout` seconds after the start came first."""
        while (waits := self.poll()) and (timeout is None or self.age_seconds < timeout):
            time.sleep(POLL_SECONDS)
        return not waits

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
                _tail(self._outputs[place]) if self.captured else "",
            )
            for place, (rank, process) in enumerate(zip(self.ranks, self.processes, strict=True))
        ]

    def _start(self, place: int, rank: int) -> "subprocess.Popen[bytes]":
        output = self._outputs[place] if self.captured else None
        # A session of its own: Ctrl-C reaches the launcher alone, which ends the ranks; a traceback of each would hide
        # the reason.
        return subprocess.Popen(
            [sys.executable, *self.program],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL if self.captured else None,
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


def job_environment(local_ranks: int, world_size: int, master: tuple[str, int]) -> dict[str, str]:
    """What torchrun gives to all workers of a machine; what the user has set stays."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }
    if sys.platform == "linux" and master[0] == LOOPBACK:
        # The name of a machine often resolves to no address that it can reach.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world_size > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def free_port(address: str = "") -> int:
    """A port of this machine that nothing listens on now."""
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _tail(log: IO[bytes], length: int = 8192) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - length))
    return log.read().decode(errors="replace")
