"""Start a program as the ranks of a job, like torchrun, and report how they ended."""

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Self, TextIO

from offbeat.errors import OffbeatError

POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
LOOPBACK = "127.0.0.1"
TIMED_OUT = 124
"""Exit code of a job that took too long, like that of the program `timeout`."""
_LOST_PEER = ("WorkerLost", "closed by peer", "reset by peer", "Broken pipe", "connection lost", "timed out waiting")
NODE_NUMBERS = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
"""Variables in which launchers number a job's nodes."""
SERVERS_VARIABLE = "OFFBEAT_SERVERS"
"""The ranks of a job that hold no replica, comma-separated, as its launcher tells every rank."""
Outcome = Literal["exited", "stopped", "timed out"]
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""
SSH_FAILED = 255
"""Exit code of ssh itself if it could not connect or lost its connection."""
HEARTBEAT_SECONDS, SILENCE_SECONDS = 5.0, 60.0
"""How often a node hears from the launcher, and after what silence it gives up: a cut connection raises no error."""
_SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=10")
_RUN_NODE = "from offbeat.launch import run_node; run_node()"


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
    """One rank, in its own session: Ctrl-C reaches only the launcher, which signals the whole group."""

    def __init__(self, argv: Sequence[str], **options: Any) -> None:
        super().__init__(argv, start_new_session=True, **options)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, sig)


class Job:
    """The ranks of one job started by this process. Use it in a `with` block, which ends ranks that still run."""

    tail_bytes: int | None = None
    """Bytes kept from the end of the output; None for all of it."""

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
        """Records which ranks have ended; True while the job runs."""
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
        """Ends ranks that still run and returns how each rank ended."""
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
        """Terminates ranks that still run, and kills them after a moment."""
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
    """Ranks of a Python program on this machine; `RankEnd.stderr` has the end of their output."""

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


class Shown:
    """Prints the lines of several processes, each with a prefix."""

    def __init__(self) -> None:
        self.readers: list[threading.Thread] = []

    def started(self, start: Callable[..., RankProcess], prefix: str = "[{}] ") -> Callable[..., RankProcess]:
        """`start` for a `Job`, which prints the lines of the started processes."""

        def shown(rank: int, **_: object) -> RankProcess:
            process = start(rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for stream, shown_on in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                arguments = (prefix.format(rank), stream, shown_on)
                self.readers.append(threading.Thread(target=_show_lines, args=arguments, daemon=True))
                self.readers[-1].start()
            return process

        return shown

    def join(self, timeout: float | None = None) -> None:
        """Waits until everything is printed, which requires that all processes that could still write have ended."""
        for reader in self.readers:
            reader.join(timeout)


def _show_lines(prefix: str, stream: IO[bytes], shown_on: TextIO) -> None:
    with stream:
        for line in stream:
            text = line.rstrip(b"\n").decode(errors="replace")
            with contextlib.suppress(BrokenPipeError):
                shown_on.write(f"{prefix}{text}\n")
                shown_on.flush()


@dataclass(frozen=True)
class RemoteNode:
    """A machine reachable by ssh, and the ranks it runs."""

    name: str
    address: str
    ranks: Sequence[int]
    world_size: int
    master: tuple[str, int]
    environment: Mapping[str, str]
    """Set in addition to the machine's own variables and torchrun's."""


class NodeProcess(RankProcess):
    """An ssh connection that runs a node's ranks: they end when its input does."""

    def tell(self, line: bytes = b"") -> None:
        """Sends a line; if the connection has ended, its exit code shows it."""
        assert self.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.stdin.write(line + b"\n")
            self.stdin.flush()

    def send_signal(self, sig: int) -> None:
        if sig == signal.SIGTERM and self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
        else:
            super().send_signal(sig)


def start_node(
    node: RemoteNode, program: Sequence[str], folder: str, python: str, ssh: Sequence[str], **output: Any
) -> NodeProcess:
    """Runs a program as the ranks of a node, in the same folder and with the same interpreter as here."""
    path = os.environ.get("PYTHONPATH")
    variables = [] if path is None else ["env", f"PYTHONPATH={path}"]
    command = f"cd {shlex.quote(folder)} && exec {shlex.join([*variables, python, '-c', _RUN_NODE])}"
    argv = [*ssh, *_SSH_OPTIONS, "--", node.address, command]
    process = NodeProcess(argv, stdin=subprocess.PIPE, **output)
    task = {"program": list(program), **asdict(node), "ranks": list(node.ranks), "silence_seconds": SILENCE_SECONDS}
    process.tell(json.dumps(task).encode())
    return process


def run_node() -> None:
    """A node's side of `start_node`: runs the ranks that the first line of the input names.

    They end when the input does, or when nothing has come for too long."""
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(INTERRUPTED)
    task = json.loads(line)
    program, ranks = task["program"], task["ranks"]
    common = job_environment(len(ranks), task["world_size"], task["master"])
    environment = {**_interface(task["address"]), **common, **task["environment"]}
    if program[0].endswith(".py") or program[0].startswith("-"):
        program = [sys.executable, *program]

    def start(rank: int, **output: Any) -> RankProcess:
        own = {"RANK": str(rank), "LOCAL_RANK": str(ranks.index(rank))}
        return RankProcess(program, stdin=subprocess.DEVNULL, env={**environment, **own}, **output)

    left = threading.Event()

    def until_the_input_ends() -> None:
        while select.select([0], [], [], task["silence_seconds"])[0] and os.read(0, 4096):
            pass
        left.set()

    threading.Thread(target=until_the_input_ends, daemon=True).start()
    shown = Shown()
    job = Job(shown.started(start), ranks, captured=False)
    try:
        with job:
            while job.poll() and not left.wait(POLL_SECONDS):
                pass
            code = INTERRUPTED if left.is_set() else job_exit_code(job.finish())
    except OSError as error:
        code = 127
        print(f"{program[0]}: {error.strerror}", file=sys.stderr)
    for process in job.processes:
        # What a rank has left behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    shown.join(GRACE_SECONDS)
    sys.exit(code)


def _interface(address: str) -> dict[str, str]:
    """The network interface with an address, for gloo and NCCL, which would otherwise take any."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found: dict[str, str] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        wanted = socket.inet_aton(socket.gethostbyname(address))
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # SIOCGIFADDR: a struct ifreq, in which a sockaddr_in follows the name.
                answer = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", name.encode()))
                if answer[20:24] == wanted:
                    found = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), name)
    return found


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


def servers_environment(ranks: Sequence[int]) -> dict[str, str]:
    """The variable that tells every rank of a job which of them are servers."""
    return {SERVERS_VARIABLE: ",".join(map(str, ranks))} if ranks else {}


def named_servers() -> tuple[int, ...]:
    """The ranks that the launcher has named as servers."""
    text = os.environ.get(SERVERS_VARIABLE, "")
    try:
        return tuple(map(int, text.split(","))) if text else ()
    except ValueError:
        raise OffbeatError(f"{SERVERS_VARIABLE}: {text!r} is not a list of ranks such as 4,5") from None


class Place(NamedTuple):
    """Where a rank runs, as far as its launcher says; a number is -1 if unknown."""

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
    """The rank whose error is the cause: ranks that only lost a peer fail too, and may even be noticed first."""
    failed = [end for end in ends if end.outcome == "exited" and end.returncode]
    return min(failed, key=lambda end: (any(sign in last_words(end) for sign in _LOST_PEER), end.seconds), default=None)


def last_words(end: RankEnd) -> str:
    """The last line a rank wrote, which names the error if there was one."""
    words = end.stderr.strip().rpartition("\n")[2].strip()
    return (words or f"exit code {end.returncode}")[:300]


def exit_code(returncode: int) -> int:
    """Like shells: 128 + n for a process that signal n ended."""
    return returncode if returncode >= 0 else 128 - returncode


def job_exit_code(ends: Sequence[RankEnd]) -> int:
    """0, the exit code of the rank that failed first, or 124 on timeout."""
    failure = first_failure(ends)
    if failure is not None:
        return exit_code(failure.returncode)
    return TIMED_OUT if any(end.outcome == "timed out" for end in ends) else 0


def inside_job() -> bool:
    """Whether this process is a rank that a launcher has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_python(
    arguments: Sequence[str], ranks: int, variables: Mapping[str, str] | None = None, timeout: float | None = None
) -> int:
    """Runs Python on all ranks; returns 0, `TIMED_OUT`, or the exit code of the rank that failed first.

    `arguments` are Python's, `variables` join every rank's environment. When one rank fails the others are ended,
    because they would wait for it.
    """
    master = (LOOPBACK, free_port(LOOPBACK))
    job = LocalJob(arguments, range(ranks), ranks, master, variables, captured=False)
    return job_exit_code(job.run(timeout))


def free_port(address: str = "") -> int:
    """A port of this machine on which nothing listens now."""
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
        return port
