"""A control socket → the namespaces, links and processes of one emulated cluster, for as long as its owner lives.

The keeper is a process of its own, started as `python -m offbeat.emulate.keeper SOCKET OWNER KIND`. It lives in the
switch's network namespace, every host's namespaces are held by a child that only sleeps, and ranks are its children. So
everything ends with the keeper, and the keeper ends with its owner: it watches the owner's process (which, unlike
PR_SET_PDEATHSIG, does not mistake the end of one of its threads for the end of it) and the socket. On the way out it
kills all descendants, also those that ranks left behind; should the keeper itself be killed, its children die with it.

Messages are JSON, one per packet. Requests: `build` (once, first), `spawn` (with file descriptors), `signal`, `shape`.
A rank's exit is written to the status pipe that came with its `spawn`.
"""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offbeat.emulate import linux

MAX_MESSAGE_BYTES = 160 * 1024
_MAX_DESCRIPTORS = 5
_HELD = (("net", linux.CLONE_NEWNET), ("uts", linux.CLONE_NEWUTS), ("mnt", linux.CLONE_NEWNS))
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class _Holder:
    """A sleeping process and its open namespaces: (file descriptor, kind) each."""

    pid: int
    namespaces: tuple[tuple[int, int], ...]


class Keeper:
    """What exists of the emulation, and one method per request."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._holders: list[_Holder] = []
        self._network: Any = None
        self._status_pipes: dict[int, int] = {}

    def handle(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """The reply to one request; a failure is a reply with `error`."""
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "build": self._build,
            "spawn": self._spawn,
            "signal": self._signal,
            "shape": self._shape,
        }
        try:
            return actions[request.pop("request")](**request, descriptors=descriptors)
        except Exception as error:  # every failure belongs to the owner, who turns it into one sentence
            reason = error.strerror if isinstance(error, OSError) else None
            return {"error": reason or f"{type(error).__name__}: {error}"}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _build(
        self,
        names: list[str],
        addresses: list[str],
        rates: list[float | None],
        latency_seconds: float | None,
        descriptors: list[int],
    ) -> dict[str, Any]:
        if self._kind == "loopback":
            return {"pids": [os.getpid()] * len(names)}
        if self._kind == "user namespaces":
            linux.enter_user_namespace()
            linux.allow_inspection()
        known = "".join(f"{address} {name}\n" for name, address in zip(names, addresses, strict=True))
        for name in names:
            self._holders.append(_hold(name, f"127.0.0.1 localhost\n{known}"))
        linux.unshare(linux.CLONE_NEWNET)
        # Imported only now: the holders were forked from a process without it.
        from offbeat.emulate.links import Network, delays_available

        if latency_seconds and not delays_available():
            return {"error": "no netem", "missing": "netem"}
        networks = [holder.namespaces[0][0] for holder in self._holders]
        self._network = Network(networks, addresses, latency_seconds)
        for host, rate in enumerate(rates):
            self._network.shape(host, rate)
        return {"pids": [holder.pid for holder in self._holders]}

    def _shape(self, host: int, rate: float | None, descriptors: list[int]) -> dict[str, Any]:
        if self._network is not None:
            self._network.shape(host, rate)
        return {}

    def _spawn(
        self, host: int, argv: list[str], env: dict[str, str], cwd: str, result: bool, descriptors: list[int]
    ) -> dict[str, Any]:
        status, standard, extra = descriptors[0], descriptors[1:4], descriptors[4:]
        if result:
            env["OFFBEAT_RESULT_FD"] = str(extra[0])
        keeper = os.getpid()

        def enter() -> None:
            for number in _IGNORED_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            linux.die_with(keeper)
            if self._holders:
                for descriptor, kind in self._holders[host].namespaces:
                    linux.setns(descriptor, kind)
                os.chdir(cwd)  # entering a mount namespace leads to its root

        process = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=standard[0],
            stdout=standard[1],
            stderr=standard[2],
            pass_fds=extra,
            start_new_session=True,
            preexec_fn=enter,  # noqa: PLW1509 - the keeper has one thread, so code between fork and exec is safe
        )
        process.returncode = 0  # reaped by reap(), together with orphans; Popen must not wait for it
        self._status_pipes[process.pid] = os.dup(status)
        return {"pid": process.pid}

    def _signal(self, pid: int, signal_number: int, descriptors: list[int]) -> dict[str, Any]:
        # A rank that is not yet reaped still owns its process group, so the number cannot have been reused.
        if pid in self._status_pipes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal_number)
        return {}

    def reap(self) -> None:
        """Collects all children that have ended and reports those that are ranks."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = ended.si_pid
                pipe = self._status_pipes.pop(pid, None)
                if pipe is not None:
                    # What a rank leaves running ends with it; its group's number is taken until it is reaped.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        os.write(pipe, json.dumps({"returncode": code, "time": time.monotonic()}).encode())
                    os.close(pipe)


def _hold(name: str, hosts_file: str) -> _Holder:
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
    opened = tuple((os.open(f"/proc/{pid}/ns/{entry}", os.O_RDONLY | os.O_CLOEXEC), kind) for entry, kind in _HELD)
    return _Holder(pid, opened)


def _sleep_in_namespaces(keeper: int, name: str, hosts_file: str, ready: int) -> None:
    try:
        linux.die_with(keeper)
        linux.name_process(f"offbeat-{name}")
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWUTS | linux.CLONE_NEWNS)
        linux.set_host_name(name)
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


def _kill_descendants() -> None:
    """Kills children until none is left; their orphans become children, because the keeper adopts them."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                with open(f"/proc/{entry}/stat") as stream:
                    # The second field, the command's name, is in brackets and may hold blanks.
                    parent = stream.read().rpartition(")")[2].split()[1]
                if int(parent) == os.getpid():
                    found.append(int(entry))
    return found


def _serve(keeper: Keeper, control: socket.socket, owner: int | None, wake: socket.socket) -> None:
    poller = select.poll()
    for descriptor in (control.fileno(), wake.fileno(), *([] if owner is None else [owner])):
        poller.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if owner in ready:
            return
        if wake.fileno() in ready:
            wake.recv(4096)
            keeper.reap()
        if control.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
            if not message:
                return
            request = json.loads(message)
            number = request.pop("number")
            reply = keeper.handle(request, list(descriptors))
            control.send(json.dumps({"number": number, **reply}).encode())


def main(arguments: list[str]) -> None:
    """Runs until the owner ends or closes the socket."""
    descriptor, owner, kind = int(arguments[0]), int(arguments[1]), arguments[2]
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    watched = None
    with contextlib.suppress(OSError):  # an old kernel; the socket's end then tells the same a little less strictly
        watched = os.pidfd_open(owner)
    if os.getppid() != owner:
        return
    linux.name_process("offbeat-keeper")
    linux.adopt_orphans()
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    try:
        with socket.socket(fileno=descriptor) as control:
            _serve(Keeper(kind), control, watched, wake)
    except (ConnectionError, BrokenPipeError):
        pass
    finally:
        _kill_descendants()


if __name__ == "__main__":
    main(sys.argv[1:])
