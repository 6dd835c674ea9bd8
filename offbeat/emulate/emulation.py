"""Number of hosts + bandwidth → an emulated cluster on this machine, in which programs run as one process per rank.

Each host is a network namespace with a name and an address of its own, joined to a switch by a link of the given
bandwidth in each direction. Without the right to make namespaces the ranks share this machine's loopback, unshaped.
"""

import json
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal

from offbeat.emulate.control import KeeperProcess, KeeperRefused, Worker, search_path
from offbeat.emulate.launch import Program, Result, command, require_success, run_ranks
from offbeat.errors import EmulationError
from offbeat.units import parse_bandwidth, parse_seconds

if TYPE_CHECKING:
    from offbeat.cluster import ClusterSpec

Kind = Literal["namespaces", "user namespaces", "loopback"]
Bandwidth = str | float | None

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

    `hosts` is their number, or a list with the bandwidth of each; the bandwidth None means unlimited. `latency` is one
    way between two hosts and needs a kernel with netem. `kind` says what this machine allowed.
    """

    def __init__(
        self,
        hosts: int | Sequence[Bandwidth],
        bandwidth: Bandwidth = "1Gbit/s",
        *,
        latency: str | float | None = None,
        ranks_per_host: int = 1,
    ) -> None:
        self._rates = _rates(hosts, bandwidth)
        self._latency_seconds = None if latency is None else parse_seconds(latency, "latency") or None
        self._ranks_per_host = _count(ranks_per_host, "ranks_per_host")
        self._keeper: KeeperProcess | None = None
        self._hosts: tuple[Host, ...] = ()
        self._kind: Kind = "namespaces"
        self._ports = 0

    def __enter__(self) -> "Emulation":
        if self._keeper is not None:
            raise EmulationError("hosts: this emulated cluster is already running")
        if sys.platform != "linux":
            raise EmulationError(f"hosts: an emulated cluster needs Linux, and this is {sys.platform}")
        refusals: list[str] = []
        kinds: tuple[Kind, ...] = ("namespaces", "user namespaces")
        for kind in kinds:
            try:
                return self._build(kind)
            except KeeperRefused as error:
                refusals.append(f"{kind}: {error}")
        reasons = "; ".join(refusals)
        if self._latency_seconds is not None:
            raise EmulationError(
                f"latency: {self._latency_seconds:g} s cannot be emulated on plain loopback ({reasons})"
            )
        warnings.warn(
            f"the emulated cluster runs on plain loopback with unshaped links, because this machine refused {reasons}",
            stacklevel=2,
        )
        try:
            return self._build("loopback")
        except KeeperRefused as error:
            raise EmulationError(f"hosts: the emulated cluster cannot be started: {error}") from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process and removes every namespace and link."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.end()

    @property
    def kind(self) -> Kind:
        """'namespaces', 'user namespaces', or 'loopback', where nothing is shaped."""
        return self._kind

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self._hosts

    @property
    def world_size(self) -> int:
        return len(self._rates) * self._ranks_per_host

    @property
    def interface(self) -> str:
        """Name of the network interface through which the hosts reach each other."""
        return "lo" if self._kind == "loopback" else "eth0"

    def set_bandwidth(self, host_index: int, bandwidth: Bandwidth) -> None:
        """Changes a host's link at once, also while ranks run; None lifts the limit."""
        host, rate = self._host(host_index), _rate(bandwidth, "bandwidth")
        if self._kind == "loopback":
            warnings.warn("bandwidth: nothing was changed, because this emulation runs on plain loopback", stacklevel=2)
            return
        try:
            self._running().ask("shape", host=host_index, rate=rate)
        except KeeperRefused as error:
            raise EmulationError(f"bandwidth: {host.name} cannot be set to {bandwidth!r}: {error}") from None
        changed = replace(host, bandwidth_bytes_per_second=rate)
        self._hosts = (*self._hosts[:host_index], changed, *self._hosts[host_index + 1 :])

    def traffic(self) -> list[tuple[int, int]]:
        """(sent, received) bytes of every host since the start, headers included; on loopback all hosts share one."""
        return [_counters(host.pid, self.interface) for host in self._hosts]

    def cluster_spec(self) -> "ClusterSpec":
        """This cluster as data for planning and simulation."""
        from offbeat.cluster import ClusterSpec, Node

        nodes = tuple(
            Node(
                name=host.name,
                address=host.address,
                device="cpu",
                devices=self._ranks_per_host,
                memory=_MEMORY_BYTES,
                peak_flops=_PEAK_FLOPS,
                bandwidth=host.bandwidth_bytes_per_second or _UNSHAPED_BYTES_PER_SECOND,
                latency=_MESSAGE_SECONDS + (self._latency_seconds or 0.0),
                intra_bandwidth=_UNSHAPED_BYTES_PER_SECOND,
                intra_latency=_MESSAGE_SECONDS,
            )
            for host in self._hosts
        )
        return ClusterSpec(name="emulated", nodes=nodes)

    def rank_environment(
        self, rank: int, *, ranks_per_host: int | None = None, master_port: int = _FIRST_PORT
    ) -> dict[str, str]:
        """The variables that torchrun sets for a rank, and those that keep gloo and NCCL on the emulated links."""
        local_world = self._local_world(ranks_per_host)
        host_index, local_rank = divmod(rank, local_world)
        host = self._host(host_index)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._hosts) * local_world),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world),
            "NODE_RANK": str(host_index),
            "GROUP_RANK": str(host_index),
            "GROUP_WORLD_SIZE": str(len(self._hosts)),
            "MASTER_ADDR": self._hosts[0].address,
            "MASTER_PORT": str(master_port),
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
            # Emulated hosts share memory and adapters, which NCCL would use instead of the emulated links.
            "NCCL_HOSTID": host.name,
            "NCCL_IB_DISABLE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Without it torch warns on every rank that emulated hosts have no names.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }

    def new_port(self) -> int:
        """A port on the first host that no earlier run has used."""
        if self._kind == "loopback":
            with socket.create_server(("127.0.0.1", 0)) as server:
                port: int = server.getsockname()[1]
                return port
        self._ports += 1
        return _FIRST_PORT + self._ports % _PORTS

    def popen(
        self,
        rank: int,
        program: Program,
        *,
        env: Mapping[str, str] | None = None,
        stdin: IO[bytes] | int | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        answer: IO[bytes] | None = None,
        ranks_per_host: int | None = None,
        master_port: int = _FIRST_PORT,
    ) -> Worker:
        """Starts one rank inside its host; it ends with this process at the latest.

        Input defaults to none, output to this process's. `answer` is a file the rank may write to: the variable
        OFFBEAT_RESULT_FD names its descriptor there.
        """
        settings = self.rank_environment(rank, ranks_per_host=ranks_per_host, master_port=master_port)
        with open(os.devnull, "rb") as nothing:
            return Worker(
                self._running(),
                rank,
                rank // self._local_world(ranks_per_host),
                command(program),
                {**os.environ, **settings, **(env or {})},
                [_descriptor(stdin, nothing.fileno()), _descriptor(stdout, 1), _descriptor(stderr, 2)],
                None if answer is None else answer.fileno(),
            )

    def run(
        self,
        program: Program,
        *,
        timeout: float | None,
        env: Mapping[str, str] | None = None,
        ranks_per_host: int | None = None,
        capture: bool = True,
        check: bool = True,
    ) -> list[Result]:
        """Runs a script or command on every rank and returns how each ended, in order of rank.

        When a rank fails or `timeout` seconds have passed all ranks are stopped, and RankError says what happened; with
        `check=False` the results alone do. Without `capture` the ranks write to this process's output.
        """
        port = self.new_port()

        def start(rank: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> Worker:
            where = {"ranks_per_host": ranks_per_host, "master_port": port}
            return self.popen(rank, program, env=env, stdout=stdout, stderr=stderr, **where)  # type: ignore[arg-type]

        results = run_ranks(start, self._ranks(ranks_per_host), timeout, capture)
        if check:
            require_success(results, timeout)
        return results

    def run_function(
        self,
        function: str | Callable[..., Any],
        *args: Any,
        timeout: float | None,
        env: Mapping[str, str] | None = None,
        ranks_per_host: int | None = None,
    ) -> list[Any]:
        """Calls a function of a module ('package.module:name', or the function) on every rank; its values, by rank.

        Arguments and values travel as JSON, so tuples arrive as lists.
        """
        call = json.dumps({"target": _target(function), "args": args, "path": sys.path}).encode()
        settings = {"PYTHONPATH": search_path(), **(env or {})}
        ranks, port = self._ranks(ranks_per_host), self.new_port()
        with ExitStack() as stack:
            answers = [stack.enter_context(tempfile.TemporaryFile()) for _ in ranks]

            def start(rank: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> Worker:
                question = stack.enter_context(tempfile.TemporaryFile())
                question.write(call)
                question.seek(0)
                return self.popen(
                    rank,
                    ["-m", "offbeat.emulate.call"],
                    env=settings,
                    stdin=question,
                    stdout=stdout,
                    stderr=stderr,
                    answer=answers[rank],
                    ranks_per_host=ranks_per_host,
                    master_port=port,
                )

            require_success(run_ranks(start, ranks, timeout, capture=True), timeout)
            return [_read_json(answer) for answer in answers]

    def _build(self, kind: Kind) -> "Emulation":
        count = len(self._rates)
        names = [f"host{index}" for index in range(count)]
        addresses = ["127.0.0.1" if kind == "loopback" else f"10.77.0.{index + 1}" for index in range(count)]
        rates = [None] * count if kind == "loopback" else self._rates
        keeper = KeeperProcess(kind)
        try:
            reply = keeper.ask(
                "build", names=names, addresses=addresses, rates=rates, latency_seconds=self._latency_seconds
            )
        except BaseException as error:
            keeper.end()
            if isinstance(error, KeeperRefused) and error.missing == "netem":
                given = f"{self._latency_seconds:g} s"
                raise EmulationError(f"latency: {given} needs the netem qdisc, which this kernel lacks") from None
            raise
        self._keeper, self._kind = keeper, kind
        self._hosts = tuple(map(Host, names, addresses, rates, reply["pids"]))
        return self

    def _running(self) -> KeeperProcess:
        if self._keeper is None:
            raise EmulationError("hosts: the emulated cluster is not running; use it inside its `with` block")
        return self._keeper

    def _host(self, index: int) -> Host:
        self._running()
        if not 0 <= index < len(self._hosts):
            raise EmulationError(f"host {index} is outside the emulated cluster of {len(self._hosts)} hosts")
        return self._hosts[index]

    def _local_world(self, ranks_per_host: int | None) -> int:
        return self._ranks_per_host if ranks_per_host is None else _count(ranks_per_host, "ranks_per_host")

    def _ranks(self, ranks_per_host: int | None) -> range:
        self._running()
        return range(len(self._hosts) * self._local_world(ranks_per_host))


def _rates(hosts: int | Sequence[Bandwidth], bandwidth: Bandwidth) -> list[float | None]:
    if isinstance(hosts, int):
        count = _count(hosts, "hosts")
        given: Sequence[Bandwidth] = [bandwidth] * min(count, MAX_HOSTS + 1)
    else:
        given, count = hosts, len(hosts)
    if isinstance(hosts, str) or not 1 <= count <= MAX_HOSTS:
        raise EmulationError(f"hosts: {hosts!r} is not a number or list of 1 to {MAX_HOSTS} hosts")
    return [_rate(value, "bandwidth") for value in given]


def _rate(bandwidth: Bandwidth, field: str) -> float | None:
    if bandwidth is None or bandwidth == "unlimited":
        return None
    rate = parse_bandwidth(bandwidth, field)
    if not MIN_BYTES_PER_SECOND <= rate <= MAX_BYTES_PER_SECOND:
        raise EmulationError(f"{field}: {bandwidth!r} is outside the 0.8 Mbit/s to 32 Gbit/s that can be emulated")
    return rate


def _count(value: int, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EmulationError(f"{field}: {value!r} is not a whole number above 0")
    return value


def _target(function: str | Callable[..., Any]) -> str:
    target = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    module, _, name = target.partition(":")
    if module == "__main__" or not module or not name.isidentifier():
        raise EmulationError(f"function: {target!r} is not a function at the top of an importable module")
    return target


def _counters(pid: int, interface: str) -> tuple[int, int]:
    with open(f"/proc/{pid}/net/dev") as stream:
        line = next(line for line in stream if line.strip().startswith(f"{interface}:"))
    fields = line.partition(":")[2].split()
    return int(fields[8]), int(fields[0])


def _descriptor(stream: IO[bytes] | int | None, default: int) -> int:
    if stream is None:
        return default
    return stream if isinstance(stream, int) else stream.fileno()


def _read_json(stream: IO[bytes]) -> Any:
    stream.seek(0)
    return json.load(stream)
