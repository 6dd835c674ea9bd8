"""A script and its environment → a running process, within milliseconds.

Importing torch and Offbeat takes seconds, which hundreds of ranks cannot afford. So one process imports them and forks
for every rank; a forked rank runs its script as the interpreter would. Taking an interpreter down that has loaded torch
takes about as long as loading it, so a rank whose script has ended well does what was registered for that moment and
leaves. Where the end itself is tested, the whole interpreter ends as any other does.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parent.parent / "shared"


class Forked:
    """A process that was forked, as subprocess.Popen shows one."""

    def __init__(self, zygote: "Zygote", pid: int, stdin: Any = None, stdout: Any = None) -> None:
        self.zygote, self.pid, self.stdin, self.stdout = zygote, pid, stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self.zygote.ask({"poll": self.pid})
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Zygote:
    """The process that forks."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        theirs.close()

    def start(
        self,
        script: Path,
        arguments: Sequence[str],
        log: Path,
        variables: Mapping[str, str],
        *,
        pipes: bool = True,
        whole_end: bool = False,
    ) -> Forked:
        """Runs the script with these variables on top of the environment, in the folder of its log.

        Its stderr goes to `log`; without `pipes` stdout does too, and stdin is empty. With `whole_end` the interpreter
        is taken down in the end.
        """
        request = {"script": str(script), "arguments": list(arguments), "variables": dict(variables)}
        request["whole_end"] = whole_end
        request["folder"] = str(log.parent.absolute())
        with log.open("wb") as said, open(os.devnull, "rb") as nothing:
            if not pipes:
                return Forked(self, self.ask(request, [nothing.fileno(), said.fileno(), said.fileno()]))
            (their_stdin, stdin), (stdout, their_stdout) = os.pipe(), os.pipe()
            pid = self.ask(request, [their_stdin, their_stdout, said.fileno()])
        os.close(their_stdin)
        os.close(their_stdout)
        return Forked(self, pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        socket.send_fds(self.socket, [json.dumps(request).encode() + b"\n"], list(files))
        answer = b""
        while not answer.endswith(b"\n"):
            part = self.socket.recv(4096)
            assert part, f"the forking process has ended with {self.process.wait()}"
            answer += part
        return json.loads(answer)


@cache
def zygote() -> Zygote:
    """Ends with this process, when its socket is closed."""
    return Zygote()


def _serve(client: socket.socket) -> dict[str, Any] | None:
    """Forks until the client is gone; in a forked process, what it was asked to run."""
    while True:
        message, files, _, _ = socket.recv_fds(client, 1 << 16, 3)
        if not message:
            return None
        while not message.endswith(b"\n"):
            message += client.recv(1 << 16)
        request = json.loads(message)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                client.close()
                for stream, file in enumerate(files):
                    os.dup2(file, stream)
                    os.close(file)
                os.environ |= request["variables"]
                os.chdir(request["folder"])
                sys.argv = [request["script"], *request["arguments"]]
                return request
            for file in files:
                os.close(file)
        client.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        sys.path[:0] = [str(SHARED)]
        for module in ("offbeat.api", "offbeat.monitor", "offbeat.online", "torch._dynamo", "workers"):
            importlib.import_module(module)
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
        # Or every rank's first collection would copy the memory that it shares with this process.
        gc.collect()
        gc.freeze()
        request = _serve(listening)
    if request is not None:
        try:
            runpy.run_path(request["script"], run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
        if not request["whole_end"]:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
