"""Requests of the emulating process → its keeper; a rank started there → Worker.

The keeper (keeper.py) is another process, so that whatever happens to this one, nothing is left behind.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.emulate.keeper import MAX_MESSAGE_BYTES
from offbeat.errors import EmulationError

_END_SECONDS = 10.0


class KeeperRefused(Exception):
    """The keeper could not do what was asked; the text is its reason, `missing` the kernel feature it lacks."""

    def __init__(self, reason: str, missing: str | None = None) -> None:
        super().__init__(reason)
        self.missing = missing


def search_path() -> str:
    """PYTHONPATH with which a new interpreter finds this very package."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))))


class KeeperProcess:
    """One running keeper."""

    def __init__(self, kind: str) -> None:
        self._lock = threading.Lock()
        self._requests = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-m", "offbeat.emulate.keeper", str(theirs.fileno()), str(os.getpid()), kind]
        with theirs:
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, "PYTHONPATH": search_path()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: str, descriptors: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """Sends one request and returns the reply; raises KeeperRefused if it could not be done."""
        with self._lock:
            self._requests += 1
            number = self._requests
            message = json.dumps({"request": request, "number": number, **fields}).encode()
            reply = self._exchange(message, descriptors)
            # A request that Ctrl-C cut short leaves its reply behind.
            while reply["number"] != number:
                reply = self._receive()
        if "error" in reply:
            raise KeeperRefused(reply["error"], reply.get("missing"))
        return reply

    def _exchange(self, message: bytes, descriptors: Sequence[int]) -> dict[str, Any]:
        if len(message) > MAX_MESSAGE_BYTES:
            raise KeeperRefused(
                f"command and environment of a rank take {len(message)} bytes, over {MAX_MESSAGE_BYTES}"
            )
        try:
            socket.send_fds(self._socket, [message], list(descriptors))
        except OSError as error:
            raise KeeperRefused(f"the keeper process {self.pid} does not listen: {error.strerror}") from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            answer = self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            raise KeeperRefused(f"the keeper process {self.pid} does not answer: {error.strerror}") from None
        if not answer:
            raise KeeperRefused(f"the keeper process {self.pid} has ended")
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def end(self) -> None:
        """Ends the keeper and with it every process and link of the emulation."""
        self._socket.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Worker:
    """One rank's process, with the methods of subprocess.Popen that one needs to watch it."""

    def __init__(
        self,
        keeper: KeeperProcess,
        rank: int,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        standard: Sequence[int],
        result: int | None = None,
    ) -> None:
        """`standard` holds the descriptors of its input, output and error stream, `result` one it may answer on."""
        self.rank = rank
        self.host = host
        self.returncode: int | None = None
        """Exit code; negative is the signal that ended it; None while it runs."""
        self.ended_at: float | None = None
        """Time of its end on the monotonic clock."""
        self._keeper = keeper
        self._status, theirs = os.pipe()
        extra = [] if result is None else [result]
        fields = {"host": host, "argv": list(argv), "env": dict(env), "cwd": os.getcwd(), "result": bool(extra)}
        try:
            self.pid: int = keeper.ask("spawn", [theirs, *standard, *extra], **fields)["pid"]
        except KeeperRefused as error:
            os.close(self._status)
            raise EmulationError(f"rank {rank}: cannot start {argv[0]!r}: {error}") from None
        finally:
            os.close(theirs)

    def fileno(self) -> int:
        """Becomes readable when the process has ended."""
        return self._status

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._collect(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended; TimeoutError after `timeout` seconds."""
        code = self._collect(timeout)
        if code is None:
            raise TimeoutError(f"rank {self.rank} still runs after {timeout} s")
        return code

    def send_signal(self, number: int) -> None:
        """Signals the process and those of its process group."""
        if self.poll() is None:
            # A keeper that is gone has taken the rank with it.
            with contextlib.suppress(KeeperRefused):
                self._keeper.ask("signal", pid=self.pid, signal_number=int(number))

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _collect(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._status, select.POLLIN)
            if poller.poll(None if timeout is None else max(0.0, timeout) * 1e3):
                report = os.read(self._status, 4096)
                os.close(self._status)
                # No report means that the keeper was killed, which kills its children.
                facts = json.loads(report) if report else {"returncode": -int(signal.SIGKILL), "time": None}
                self.returncode, self.ended_at = facts["returncode"], facts["time"]
        return self.returncode
