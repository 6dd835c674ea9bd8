"""A program and ranks → processes, started as torchrun would, and how they ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Self

POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
LOOPBACK = "127.0.0.1"
TIMED_OUT = 124
"""Exit code of a job that took too long, as that of the program `timeout`."""
_LOST_PEER = ("WorkerLost", "closed by peer", "reset by peer", "Broken pipe", "connection lost", "timed out waiting")
NODE_NUMBERS = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
"""Variables in which launchers number a job's nodes."""
Outcome = Literal["exited", "stopped", "timed out"]


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    returncode: int
    """Exit code; negative is the signal that ended it."""
    outcome: Outcome
    """'exited' by itself, 'stopped' because another rank failed, or 'timed out'."""
    seconds: float
    """From the start of the first rank to the end of this one."""
    stderr: str = ""
    stdout: str = ""


class RankProcess(subprocess.Popen[bytes]):
    """One rank, which leads a session of its own: Ctrl-C reaches the launcher alone, which signals its whole group."""

    def __init__(self, argv: Sequence[str], **options: Any) -> None:
        super().__init__(argv, start_new_session=True, **options)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, sig)


class Job:
    """The ranks of one job that this process has started. Use it in a `with` block, which ends what still runs."""

    tail_bytes: int | None = None
    """How much of the end of the output is kept; None for all of it."""

    def __init__(self, start: Callable[..., RankProcess], ranks: Sequence[int], *, captured: bool = True) -> None:
        """`start(rank, stdout=…, stderr=…)` starts a rank with these files as its output; None without `captured`."""
        self.start, self.ranks, self.captured = start, list(ranks), captured
        self.processes: list[RankProcess] = []
        self.ended: dict[int, float] = {}
        """Seconds after which each rank ended by itself, by its position in `ranks`."""
        self._outputs: list[tuple[IO[bytes], IO[bytes]]] = []

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        try:
            for rank in self.ranks:
                stdout = stderr = None
                if self.captured:
                    # Unlinked files, so that a long output blocks no rank and nothing is left on disk.
                    stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
                    self._outputs.append((stdout, stderr))
                self.processes.append(self.start(rank, stdout=stdout, stderr=stderr))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for outputs in self._outputs:
            for output in outputs:
                output.close()

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def failed(self) -> bool:
        """A rank has ended with an error."""
        return any(self.processes[place].returncode for place in self.ended)

    def poll(self) -> bool:
        """Notes which ranks have ended; True while the job goes on."""
        for place, process in enumerate(self.processes):
            if place not in self.ended and process.poll() is not None:
                self.ended[place] = self.age_seconds
        return len(self.ended) < len(self.ranks) and not self.failed

    def wait(self, timeout: float | None) -> bool:
        """Waits until all ranks have ended or one has failed; False if `timeout` seconds passed first."""
        while (waits := self.poll()) and (timeout is None or self.age_seconds < timeout):
            time.sleep(POLL_SECONDS)
        return not waits

    def run(self, timeout: float | None) -> list[RankEnd]:
        """Starts the ranks and returns how each ended; all end when one fails or `timeout` seconds have passed."""
        with self:
            in_time = self.wait(timeout)
            return self.finish(timed_out=not in_time)

    def finish(self, timed_out: bool = False) -> list[RankEnd]:
        """Ends what still runs and returns how each rank ended."""
        self.poll()
        late: Outcome = "timed out" if timed_out else "stopped"
        self._end()
        ends, age = [], self.age_seconds
        for place, (rank, process) in enumerate(zip(self.ranks, self.processes, strict=True)):
            outcome = "exited" if place in self.ended else late
            stdout, stderr = map(self._text, self._outputs[place]) if self.captured else ("", "")
            ends.append(RankEnd(rank, process.returncode, outcome, self.ended.get(place, age), stderr, stdout))
        return ends

    def _end(self) -> None:
        """Terminates what still runs, and kills it after a moment."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + GRACE_SECONDS
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _text(self, output: IO[bytes]) -> str:
        output.seek(0, os.SEEK_END)
        output.seek(0 if self.tail_bytes is None else max(0, output.tell() - self.tail_bytes))
        return output.read().decode(errors="replace")


class LocalJob(Job):
    """Ranks of a Python program on this machine; `RankEnd.stderr` has the end of all they wrote."""

    tail_bytes = 8192

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
        """Without `captured` the ranks inherit this process's output."""
        super().__init__(self._start, ranks, captured=captured)
        self.program = list(program)
        self.environment = {**job_environment(len(ranks), world_size, master), **(env or {})}

    def _start(self, rank: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> RankProcess:
        return RankProcess(
            [sys.executable, *self.program],
            stdout=stderr,
            stderr=stderr,
            stdin=subprocess.DEVNULL if self.captured else None,
            env={**self.environment, "RANK": str(rank), "LOCAL_RANK": str(self.ranks.index(rank))},
        )


def job_environment(local_ranks: int, world_size: int, master: tuple[str, int]) -> dict[str, str]:
    """The variables that torchrun sets for all workers of a machine."""
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


class Place(NamedTuple):
    """Where a rank runs, as far as its launcher tells; a number is -1 where it does not."""

    node: str
    """Different for any two nodes of a job."""
    local_rank: int
    local_world: int
    """Ranks of the job on this node."""


def this_place() -> Place:
    """The node of this process: by the launcher's number (emulated hosts share a machine), and its machine's name."""
    number = next((os.environ[name] for name in NODE_NUMBERS if os.environ.get(name)), "")
    local_rank, local_world = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    numbers = (int(text) if text.isascii() and text.isdecimal() else -1 for text in (local_rank, local_world))
    return Place(f"{machine_name()} {number}".strip(), *numbers)


def machine_name() -> str:
    """Names the machine whose clock this process reads."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}".strip()


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank whose error is the cause: one that only lost a peer fails too, and may even be noticed first."""
    failed = [end for end in ends if end.outcome == "exited" and end.returncode]
    return min(failed, key=lambda end: (any(sign in last_words(end) for sign in _LOST_PEER), end.seconds), default=None)


def last_words(end: RankEnd) -> str:
    """The last line that a rank wrote, which names the error if it was one."""
    words = end.stderr.strip().rpartition("\n")[2].strip()
    return (words or f"exit code {end.returncode}")[:300]


def exit_code(returncode: int) -> int:
    """As shells give it: 128 + n for a process that signal n ended."""
    return returncode if returncode >= 0 else 128 - returncode


def free_port(address: str = "") -> int:
    """A port of this machine that nothing listens on now."""
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
        return port
