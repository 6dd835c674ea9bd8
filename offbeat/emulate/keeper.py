"""The keeper process, which owns the namespaces and links of one emulated cluster while its parent lives.

The keeper is a separate process (`KeeperProcess` starts it), so that nothing is left behind when its owner dies. It
lives in the switch's network namespace, and every host's namespaces are held by a child that only sleeps and dies with
it. The keeper ends with its owner: it watches the owner's process (which, unlike PR_SET_PDEATHSIG, does not mistake the
end of one of its threads for the end of it) and its own input. On the way out it kills all processes in the hosts'
namespaces and those with the mark in their environment: the ranks, and whatever they left behind.

Each request and each reply is a line of JSON: first what to build, then links to shape, and what to do with the service
that shares a GPU ({"gpu": "start"}, "check" or "restart"). An empty line ends it.
"""

import contextlib
import errno
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from offbeat.emulate import linux
from offbeat.emulate.gpu import Mps
from offbeat.errors import EmulationError

_POLL_SECONDS = 0.01
_END_SECONDS = 10.0
# A process may not end before the service through which it uses the GPU does.
_RANKS_SECONDS = 3.0
_MAIN = "import sys; from offbeat.emulate.keeper import main; main(int(sys.argv[1]), sys.argv[2])"


def search_path() -> str:
    """PYTHONPATH with which a new interpreter finds this very package."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))))


class KeeperProcess:
    """The owner's end: a keeper that runs, and requests to it."""

    def __init__(self, mark: str) -> None:
        """`mark` is a text in the environment of every process that is to end with the keeper."""
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(os.getpid()), mark],
            env={**os.environ, "PYTHONPATH": search_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends one request and returns the reply; raises EmulationError if it could not be done."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            if answer := self._replies.readline():
                reply: dict[str, Any] = json.loads(answer)
                if "error" in reply:
                    raise EmulationError(reply["error"])
                return reply
        raise EmulationError(f"the keeper process {self._process.pid} has ended")

    def end(self) -> None:
        """Ends the keeper and with it every process and link of the emulation."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(b"\n")
            self._requests.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()


def _build(
    kind: str, names: list[str], addresses: list[str], rates: list[float | None], latency_seconds: float | None
) -> tuple[dict[str, Any], Any]:
    """Makes the hosts; the reply, with the process that holds each of them, and the network."""
    if kind == "loopback":
        return {"pids": [os.getpid()] * len(names)}, None
    if kind == "user namespaces":
        linux.enter_user_namespace()
        # Entering it forbids other processes of this user to read /proc/<pid>/ns.
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
    known = "".join(f"{address} {name}\n" for name, address in zip(names, addresses, strict=True))
    pids = [_hold(name, f"127.0.0.1 localhost\n{known}") for name in names]
    linux.call("unshare", linux.CLONE_NEWNET)
    # Imported only now: the holders were forked from a process without it.
    from offbeat.emulate.links import Network

    network = Network(pids, addresses, latency_seconds)
    for host, rate in enumerate(rates):
        network.shape(host, rate)
    return {"pids": pids}, network


def _hold(name: str, hosts_file: str) -> int:
    """Forks the process that keeps one host's namespaces alive and waits until they exist."""
    keeper = os.getpid()
    ready, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        _sleep_in_namespaces(keeper, name, hosts_file, written)
    os.close(written)
    with os.fdopen(ready) as stream:
        problem = stream.read()
    if problem != "ready":
        raise OSError(errno.EPERM, problem or "the process that holds a host's namespaces ended early")
    return pid


def _sleep_in_namespaces(keeper: int, name: str, hosts_file: str, ready: int) -> None:
    try:
        linux.die_with(keeper)
        linux.prctl(linux.PR_SET_NAME, f"offbeat-{name}".encode())
        linux.call("unshare", linux.CLONE_NEWNET | linux.CLONE_NEWUTS | linux.CLONE_NEWNS)
        socket.sethostname(name)
        # Without it the hosts still reach each other, they only lack names.
        with contextlib.suppress(OSError):
            linux.replace_hosts_file(hosts_file)
        os.write(ready, b"ready")
        os.closerange(0, ready + 1)
        while True:
            signal.pause()
    except OSError as error:
        os.write(ready, (error.strerror or str(error)).encode())
    finally:
        os._exit(1)


def _kill_all(namespaces: set[str], mark: bytes, seconds: float = math.inf) -> None:
    """Kills all processes that are in these network namespaces or have the mark, until none is left or time is up."""
    until, found = time.monotonic() + seconds, True
    while found and time.monotonic() < until:
        found = False
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                process = Path("/proc", entry)
                if os.readlink(process / "ns/net") in namespaces or mark in (process / "environ").read_bytes():
                    os.kill(int(entry), signal.SIGKILL)
                    found = True
        time.sleep(_POLL_SECONDS)


class _Keeper:
    """What one keeper has made."""

    def __init__(self) -> None:
        self.namespaces: set[str] = set()
        """The network namespaces of the hosts."""
        self.network: Any = None
        self.mps: Mps | None = None

    def serve(self, owner: int | None) -> None:
        """Answers requests until the owner or the input ends."""
        poller = select.poll()
        for descriptor in (sys.stdin.fileno(), *([] if owner is None else [owner])):
            poller.register(descriptor, select.POLLIN)
        while owner not in {descriptor for descriptor, _ in poller.poll()}:
            line = sys.stdin.readline()
            if not line.strip():
                return
            try:
                reply = self._answer(json.loads(line))
            except EmulationError as error:
                reply = {"error": str(error)}
            except Exception as error:  # every failure belongs to the owner, who turns it into one sentence
                reason = error.strerror if isinstance(error, OSError) else None
                reply = {"error": reason or f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), flush=True)

    def end(self, mark: bytes) -> None:
        """Ends the ranks, then what they shared a GPU through."""
        if self.mps is None:
            _kill_all(self.namespaces, mark)
            return
        _kill_all(self.namespaces, mark, _RANKS_SECONDS)
        self._end_mps()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "gpu" in request:
            return self._share_gpu(request["gpu"])
        if self.network is not None:
            self.network.shape(**request)
            return {}
        reply, self.network = _build(**request)
        if self.network is not None:
            self.namespaces.update(os.readlink(f"/proc/{pid}/ns/net") for pid in reply["pids"])
        return reply

    def _share_gpu(self, wanted: str) -> dict[str, Any]:
        if wanted == "check":
            return {"answers": self.mps is not None and self.mps.answers()}
        self._end_mps()
        self.mps = Mps()
        try:
            self.mps.start()
        except BaseException:
            self._end_mps()
            raise
        return {"environment": self.mps.environment}

    def _end_mps(self) -> None:
        mps, self.mps = self.mps, None
        if mps is not None:
            mps.end()
            _kill_all(set(), mps.mark, _RANKS_SECONDS)


def main(owner: int, mark: str) -> None:
    """Runs until the owner ends, closes the input or says so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched = None
    with contextlib.suppress(OSError):  # an old kernel; the end of the input then tells the same a little less strictly
        watched = os.pidfd_open(owner)
    if os.getppid() != owner:
        return
    linux.prctl(linux.PR_SET_NAME, b"offbeat-keeper")
    keeper = _Keeper()
    try:
        with contextlib.suppress(BrokenPipeError):
            keeper.serve(watched)
    finally:
        keeper.end(mark.encode())
