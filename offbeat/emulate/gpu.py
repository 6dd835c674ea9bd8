"""Share one GPU among the hosts of an emulated cluster through NVIDIA's Multi-Process Service (MPS).

Without MPS the kernels of several processes take turns on a GPU, and every small collective waits for its turn. The
control daemon belongs to the keeper of the emulation (`offbeat.emulate.keeper`) and ends with it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from offbeat.errors import EmulationError

CONTROL = "nvidia-cuda-mps-control"
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_QUERY = "nvidia-smi"
# Where containers have the driver's programs, whether or not it is on the search path.
_DRIVER_FOLDERS = "/usr/local/nvidia/bin:/usr/bin"
# The daemon's sockets lie below it, and the name of a socket has 107 characters at most.
_FOLDER = "/tmp"
_START_SECONDS = 10.0
_ANSWER_SECONDS = 5.0
_QUIT_SECONDS = 3.0
_QUERY_SECONDS = 60.0
_POLL_SECONDS = 0.05


class Gpu(NamedTuple):
    """The device that all hosts share."""

    name: str
    memory_bytes: int


def find_gpu() -> Gpu:
    """The GPU that CUDA_VISIBLE_DEVICES names first, by default this machine's first; EmulationError without any."""
    program = _program(_QUERY)
    if program is None:
        raise EmulationError(f"gpu: this machine has no NVIDIA GPU, or lacks the program {_QUERY}")
    asked = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", f"--id={_first_device()}"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
        name, _, mebibytes = done.stdout.strip().partition("\n")[0].rpartition(",")
        if done.returncode == 0 and name:
            return Gpu(name.strip(), int(mebibytes) * 2**20)
        reason = " ".join((done.stdout or done.stderr).split())[:200] or f"exit code {done.returncode}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = " ".join(str(error).split())[:200]
    raise EmulationError(f"gpu: this machine has no GPU to share: {_QUERY} says {reason!r}")


def find_control() -> str:
    """The path of MPS's control program; EmulationError where it is missing."""
    program = _program(CONTROL)
    if program is None:
        raise EmulationError(f"gpu: hosts share a GPU through MPS, but this machine lacks the program {CONTROL}")
    return program


class Mps:
    """The control daemon of one emulation, in its own folder."""

    def __init__(self) -> None:
        self.program = find_control()
        self.folder = Path(tempfile.mkdtemp(prefix="offbeat-mps-", dir=_FOLDER))

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which programs find the daemon."""
        return {PIPE_DIRECTORY: str(self.folder), "CUDA_MPS_LOG_DIRECTORY": str(self.folder)}

    @property
    def mark(self) -> bytes:
        """A text in the environment of the daemon, its servers and the ranks."""
        return f"{PIPE_DIRECTORY}={self.folder}\0".encode()

    def start(self) -> None:
        """Starts the daemon; EmulationError unless it answers."""
        # A file, as the daemon would keep a pipe open, and the keeper's own output is for replies.
        with (self.folder / "start.log").open("wb") as said:
            try:
                done = subprocess.run(
                    [self.program, "-d"],
                    env={**self._variables(), "CUDA_VISIBLE_DEVICES": _first_device()},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                    preexec_fn=_heed_signals,
                    timeout=_START_SECONDS,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise EmulationError(f"gpu: MPS does not start: {' '.join(str(error).split())[:200]}") from None
        until = time.monotonic() + _START_SECONDS
        while done.returncode == 0 and time.monotonic() < until:
            if self.answers():
                return
            time.sleep(_POLL_SECONDS)
        words = " ".join((self.folder / "start.log").read_text(errors="replace").split())[-200:]
        raise EmulationError(f"gpu: MPS does not start: {words or f'exit code {done.returncode}'}")

    def answers(self) -> bool:
        """Whether the daemon still answers; a rank that died with kernels in flight may have taken it along."""
        return self._say("get_server_list", _ANSWER_SECONDS)

    def end(self) -> None:
        """Asks the daemon to end and removes its folder; who does not listen is left for the keeper to kill."""
        self._say("quit", _QUIT_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _say(self, command: str, seconds: float) -> bool:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [self.program],
                input=f"{command}\n".encode(),
                env=self._variables(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
            )
            return done.returncode == 0
        return False

    def _variables(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def _heed_signals() -> None:
    """The keeper ignores these signals, by which the daemon may end its servers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), _DRIVER_FOLDERS)))


def _first_device() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
