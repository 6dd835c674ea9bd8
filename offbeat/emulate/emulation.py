"""An emulated cluster on this machine, which runs programs with one process per rank.

Each host is a network namespace with a name and an address of its own, joined to a switch by a link of the given
bandwidth in each direction. Without the right to make namespaces the ranks share this machine's loopback, unshaped.

With `gpu=True` all ranks compute on this machine's GPU at once (`offbeat.emulate.gpu`), and NCCL takes the emulated
links. Emulated are the network between hosts and ranks that compute at the same time. Not emulated are a GPU for each
rank (its arithmetic and memory are shared, so compute of N ranks takes up to N times as long) and fast links within a
host: NCCL refuses two ranks of one host on one device, so that each rank is a host of its own for it, and ranks of one
emulated host talk through its loopback, unshaped.
"""

import importlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

from offbeat.arguments import checked
from offbeat.emulate import linux
from offbeat.emulate.gpu import Gpu, find_control, find_gpu
from offbeat.emulate.keeper import KeeperProcess, search_path
from offbeat.errors import EmulationError
from offbeat.launch import LOOPBACK, Job, RankEnd, RankProcess, first_failure, free_port, job_environment, last_words
from offbeat.units import parse_bandwidth, parse_seconds, quote

if TYPE_CHECKING:
    from offbeat.cluster import ClusterSpec

Kind = Literal["namespaces", "user namespaces", "loopback"]
Bandwidth = str | float | None
Program = str | os.PathLike[str] | Sequence[str]

MAX_HOSTS = 250
# A slower link would hold one packet for seconds; a faster one does not fit the token bucket's 32-bit rate.
MIN_BYTES_PER_SECOND = 1e5
MAX_BYTES_PER_SECOND = 4e9
_FIRST_PORT = 29_500
_PORTS = 10_000
# What gloo reaches between two processes of a small machine, for links that are not shaped, and its time for 1 KiB.
_UNSHAPED_BYTES_PER_SECOND = 2.5e9
_MESSAGE_SECONDS = 160e-6
# One core's share of a small machine.
_MEMORY_BYTES = 4 * 2**30
_PEAK_FLOPS = 50e9
# What NCCL's sockets reach between ranks on one GPU, and half of its all-reduce of 1 KiB among two ranks.
_NCCL_BYTES_PER_SECOND = 1.5e9
_NCCL_MESSAGE_SECONDS = 35e-6
_ANSWER = "from offbeat.emulate.emulation import answer_call; answer_call()"
_QUEUES = 64
"""Share of an H200 available to all processes that share it."""
_MARK = "OFFBEAT_EMULATION"
"""Environment variable of every rank and its children, by which the keeper finds them."""


class RankError(EmulationError):
    """A rank failed or timed out; `results` says how every rank ended."""

    def __init__(self, message: str, results: list[RankEnd]) -> None:
        super().__init__(message)
        self.results = results


@dataclass(frozen=True, slots=True)
class Host:
    """One emulated machine."""

    name: str
    address: str
    bandwidth_bytes_per_second: float | None
    """In each direction; None if the link is not shaped."""
    pid: int
    """A process inside it, for tools such as nsenter."""


class Emulation:
    """A cluster that exists inside a `with` block.

    `hosts` is the number of hosts, or a list with the bandwidth of each; None means unlimited bandwidth. `latency` is
    one-way between two hosts and needs a kernel with netem. `kind` is the kind of emulation that this machine supports.
    With `gpu` all ranks share this machine's GPU as device 0.
    """

    @checked
    def __init__(
        self,
        hosts: int | Sequence[Bandwidth],
        bandwidth: Bandwidth = "1Gbit/s",
        *,
        latency: str | float | None = None,
        ranks_per_host: int = 1,
        gpu: bool = False,
    ) -> None:
        count = hosts if isinstance(hosts, int) else len(hosts)
        if not 1 <= count <= MAX_HOSTS:
            raise EmulationError(f"hosts: {quote(hosts)} is not a number or list of 1 to {MAX_HOSTS} hosts")
        self._rates = [_rate(each) for each in ([bandwidth] * count if isinstance(hosts, int) else hosts)]
        self._latency_seconds = None if latency is None else parse_seconds(latency, "latency") or None
        if ranks_per_host < 1:
            raise EmulationError(f"ranks_per_host: {ranks_per_host} is not a whole number above 0")
        self._ranks_per_host = ranks_per_host
        self._wants_gpu = gpu
        self._gpu: Gpu | None = None
        self._gpu_environment: dict[str, str] = {}
        self._gpu_suspect = False
        """Whether a rank has failed since the GPU sharing service was started."""
        self._keeper: KeeperProcess | None = None
        self._mark = secrets.token_hex(8)
        self._ports = 0
        self.hosts: tuple[Host, ...] = ()
        self.kind: Kind = "namespaces"
        """'namespaces', 'user namespaces', or 'loopback', where nothing is shaped."""

    def __enter__(self) -> "Emulation":
        if self._keeper is not None:
            raise EmulationError("hosts: this emulated cluster is already running")
        if sys.platform != "linux":
            raise EmulationError(f"hosts: an emulated cluster needs Linux, not {sys.platform}")
        if self._wants_gpu:
            find_control()
            self._gpu = find_gpu()
        self._build_any()
        if self._wants_gpu:
            try:
                self._gpu_environment = self._ask_gpu("start")["environment"]
            except BaseException:
                self.close()
                raise
        return self

    def _build_any(self) -> None:
        """Builds the cluster in the first way that this machine supports."""
        refusals: list[str] = []
        for kind in get_args(Kind)[:-1]:
            try:
                self._build(kind)
                return
            except EmulationError as error:
                refusals.append(f"{kind}: {error}")
        reasons = "; ".join(refusals)
        if self._latency_seconds is not None:
            raise EmulationError(f"latency: {self._latency_seconds:g} s cannot be emulated here ({reasons})")
        warnings.warn(
            f"the emulated cluster runs on plain loopback with unshaped links, because this machine refused {reasons}",
            stacklevel=3,
        )
        try:
            self._build("loopback")
        except EmulationError as error:
            raise EmulationError(f"hosts: the emulated cluster cannot be started: {error}") from None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process and removes every namespace and link."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.end()

    def gpu_answers(self) -> bool:
        """Whether the GPU sharing service still works."""
        return bool(self._ask_gpu("check")["answers"])

    def restart_gpu(self) -> None:
        """Restarts that service, which ends all ranks on it; `run` does so after a run in which a rank failed.

        A rank that dies with kernels in flight may leave it in a state in which no kernel ends.
        """
        self._gpu_environment = self._ask_gpu("restart")["environment"]
        self._gpu_suspect = False

    @property
    def world_size(self) -> int:
        return len(self._rates) * self._ranks_per_host

    @property
    def interface(self) -> str:
        """Name of the network interface through which the hosts reach each other."""
        return "lo" if self.kind == "loopback" else "eth0"

    def set_bandwidth(self, host_index: int, bandwidth: Bandwidth) -> None:
        """Changes a host's link at once, even while ranks run; None removes the limit."""
        (keeper, host), rate = self._running(host_index), _rate(bandwidth)
        if self.kind == "loopback":
            warnings.warn("bandwidth: nothing was changed, because this emulation runs on plain loopback", stacklevel=2)
            return
        try:
            keeper.ask(host=host_index, bytes_per_second=rate)
        except EmulationError as error:
            raise EmulationError(f"bandwidth: {host.name} cannot be set to {bandwidth!r}: {error}") from None
        changed = replace(host, bandwidth_bytes_per_second=rate)
        self.hosts = (*self.hosts[:host_index], changed, *self.hosts[host_index + 1 :])

    def traffic(self) -> list[tuple[int, int]]:
        """(sent, received) bytes of every host since the start, headers included; on loopback all hosts share one."""
        counts = []
        for host in self.hosts:
            devices = Path(f"/proc/{host.pid}/net/dev").read_text().splitlines()
            line = next(line for line in devices if line.strip().startswith(f"{self.interface}:"))
            fields = line.partition(":")[2].split()
            counts.append((int(fields[8]), int(fields[0])))
        return counts

    def cluster_spec(self) -> "ClusterSpec":
        """This cluster as data for planning and simulation."""
        from offbeat.cluster import ClusterSpec, Node

        unshaped, message = _UNSHAPED_BYTES_PER_SECOND, _MESSAGE_SECONDS
        device: dict[str, Any] = {"device": "cpu", "memory": _MEMORY_BYTES, "peak_flops": _PEAK_FLOPS}
        if self._gpu is not None:
            unshaped, message = _NCCL_BYTES_PER_SECOND, _NCCL_MESSAGE_SECONDS
            # The catalogue of devices knows its FLOP per second.
            device = {"device": self._gpu.name, "memory": self._gpu.memory_bytes}
        nodes = tuple(
            Node(
                name=host.name,
                address=host.address,
                devices=self._ranks_per_host,
                bandwidth=host.bandwidth_bytes_per_second or unshaped,
                latency=message + (self._latency_seconds or 0.0),
                intra_bandwidth=unshaped,
                intra_latency=message,
                **device,
            )
            for host in self.hosts
        )
        return ClusterSpec(name="emulated", nodes=nodes)

    def new_port(self) -> int:
        """A port on the first host that no earlier run has used."""
        if self.kind == "loopback":
            return free_port(LOOPBACK)
        self._ports += 1
        return _FIRST_PORT + self._ports % _PORTS

    def popen(
        self,
        rank: int,
        program: Program,
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        master_port: int = _FIRST_PORT,
    ) -> RankProcess:
        """Starts one rank inside its host; it ends with this process at the latest.

        A Python script, or options of Python, run under this interpreter. The rank has no input; its output defaults to
        this process's.
        """
        _, host = self._running(rank // self._ranks_per_host)
        environment = {**self._environment(rank, master_port), **(env or {}), _MARK: self._mark}
        argv = [os.fspath(part) for part in ([program] if isinstance(program, (str, os.PathLike)) else program)]
        if not argv:
            raise EmulationError("program: an empty command cannot be run")
        if argv[0].endswith(".py") or argv[0].startswith("-"):
            argv = [sys.executable, *argv]
        if shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise EmulationError(f"rank {rank}: cannot start {argv[0]!r}: No such file or program")
        if self.kind != "loopback":
            namespaces = "user,net,uts,mnt" if self.kind == "user namespaces" else "net,uts,mnt"
            argv = [sys.executable, "-I", "-S", linux.__file__, str(host.pid), namespaces, *argv]
        return RankProcess(argv, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)

    def run(
        self, program: Program, *, timeout: float | None, env: Mapping[str, str] | None = None, check: bool = True
    ) -> list[RankEnd]:
        """Runs a script or command on every rank and returns how each ended, in order of rank.

        When a rank fails or `timeout` seconds have passed all ranks are stopped, and RankError says what happened; with
        `check=False` the results alone do.
        """
        if self._gpu is not None and (self._gpu_suspect or not self.gpu_answers()):
            self.restart_gpu()
        start = partial(self.popen, program=program, env=env, master_port=self.new_port())
        ends = Job(start, range(self.world_size)).run(timeout)
        self._gpu_suspect = any(end.returncode for end in ends)
        if not check:
            return ends
        failure = first_failure(ends)
        if failure is not None:
            code, host = failure.returncode, failure.rank // self._ranks_per_host
            how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
            said = f": {last_words(failure)}" if failure.stderr.strip() else ""
            raise RankError(f"rank {failure.rank} on host{host} {how}{said}", ends)
        late = [str(end.rank) for end in ends if end.outcome == "timed out"]
        if late:
            raise RankError(f"timeout: ranks still running after {timeout:g} s: {', '.join(late)}", ends)
        return ends

    def run_function(self, function: str | Callable[..., Any], *args: Any, timeout: float | None) -> list[Any]:
        """Calls a function of a module ('package.module:name', or the function) on every rank; returns values by rank.

        Arguments and values are sent as JSON, so tuples arrive as lists.
        """
        target = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        module, _, name = target.partition(":")
        if module == "__main__" or not module or not name.isidentifier():
            raise EmulationError(f"function: {target!r} is not a function at the top of an importable module")
        call = json.dumps({"module": module, "name": name, "args": args, "path": sys.path})
        with tempfile.TemporaryDirectory(prefix="offbeat-call-") as folder:
            Path(folder, "call").write_text(call)
            self.run(["-c", _ANSWER, folder], timeout=timeout, env={"PYTHONPATH": search_path()})
            return [json.loads(Path(folder, f"answer{rank}").read_bytes()) for rank in range(self.world_size)]

    def _environment(self, rank: int, master_port: int) -> dict[str, str]:
        """The variables that torchrun sets for a rank, and those that keep gloo and NCCL on the emulated links."""
        host_index, local_rank = divmod(rank, self._ranks_per_host)
        name = self.hosts[host_index].name
        environment = {
            # Without it torch warns on every rank that emulated hosts have no names.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            **job_environment(self._ranks_per_host, self.world_size, (self.hosts[0].address, master_port)),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "NODE_RANK": str(host_index),
            "GROUP_RANK": str(host_index),
            "GROUP_WORLD_SIZE": str(len(self.hosts)),
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
            # Emulated hosts share memory and adapters, which NCCL would use instead of the emulated links.
            "NCCL_HOSTID": name,
            "NCCL_IB_DISABLE": "1",
        }
        if self._gpu is None:
            return environment
        return {
            **environment,
            **self._gpu_environment,
            # As the service numbers devices: it has one.
            "CUDA_VISIBLE_DEVICES": "0",
            "NCCL_HOSTID": name if self._ranks_per_host == 1 else f"{name}-{local_rank}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            # MPS gives a process two queues for all its streams, and one that waits holds up others in its queue. Four
            # processes with 32 are refused.
            "CUDA_DEVICE_MAX_CONNECTIONS": str(max(2, min(32, _QUEUES // self.world_size))),
        }

    def _ask_gpu(self, wanted: str) -> dict[str, Any]:
        keeper, _ = self._running(0)
        if self._gpu is None:
            raise EmulationError("gpu: this emulated cluster was created without one")
        return keeper.ask(gpu=wanted)

    def _build(self, kind: Kind) -> None:
        count = len(self._rates)
        names = [f"host{index}" for index in range(count)]
        addresses = [LOOPBACK if kind == "loopback" else f"10.77.0.{index + 1}" for index in range(count)]
        rates = [None] * count if kind == "loopback" else self._rates
        keeper = KeeperProcess(f"{_MARK}={self._mark}")
        try:
            reply = keeper.ask(
                kind=kind, names=names, addresses=addresses, rates=rates, latency_seconds=self._latency_seconds
            )
        except BaseException:
            keeper.end()
            raise
        self._keeper, self.kind = keeper, kind
        self.hosts = tuple(map(Host, names, addresses, rates, reply["pids"]))

    def _running(self, index: int) -> tuple[KeeperProcess, Host]:
        """The keeper, and one of its hosts."""
        if self._keeper is None:
            raise EmulationError("hosts: the emulated cluster is not running; use it inside its `with` block")
        if not 0 <= index < len(self.hosts):
            raise EmulationError(f"host {index} is outside the emulated cluster of {len(self.hosts)} hosts")
        return self._keeper, self.hosts[index]


def _rate(bandwidth: Bandwidth) -> float | None:
    if bandwidth is None or bandwidth == "unlimited":
        return None
    rate = parse_bandwidth(bandwidth)
    if not MIN_BYTES_PER_SECOND <= rate <= MAX_BYTES_PER_SECOND:
        raise EmulationError(f"bandwidth: {bandwidth!r} is outside the 0.8 Mbit/s to 32 Gbit/s that can be emulated")
    return rate


def answer_call() -> None:
    """The rank's side of `Emulation.run_function`: calls what the folder in argv names and leaves the value there."""
    folder = Path(sys.argv[1])
    call = json.loads((folder / "call").read_text())
    sys.path[:] = call["path"]
    value = getattr(importlib.import_module(call["module"]), call["name"])(*call["args"])
    (folder / f"answer{os.environ['RANK']}").write_text(json.dumps(value, allow_nan=False))
