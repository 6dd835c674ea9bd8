"""offbeat emulate and launch: run a script on hosts emulated on this machine, or on the nodes of a cluster over ssh."""

import os
import shlex
import shutil
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from offbeat.cli.app import SCRIPT_SETTINGS, Cluster, Json, Script, Timeout, app
from offbeat.cli.show import exit_if_failed, print_json, stdout_to_stderr
from offbeat.errors import OffbeatError
from offbeat.launch import (
    HEARTBEAT_SECONDS,
    SSH_FAILED,
    Job,
    NodeProcess,
    RemoteNode,
    Shown,
    exit_code,
    first_failure,
    job_exit_code,
    servers_environment,
    start_node,
)

if TYPE_CHECKING:
    from offbeat.cluster import ClusterSpec
    from offbeat.emulate import Emulation

MASTER_PORT = 29_500
"""torchrun's."""


@app.command(
    epilog="Example: offbeat emulate --hosts 4 --bandwidth 1Gbit/s train.py --steps 10; put other programs after '--'",
    context_settings=SCRIPT_SETTINGS,
)
def emulate(
    script: Script,
    hosts: Annotated[int, Option(min=1, help="Emulated hosts.")] = 2,
    bandwidth: Annotated[str, Option(help="Bandwidth of every link, or one per host, comma-separated.")] = "1Gbit/s",
    ranks_per_host: Annotated[int, Option(min=1, help="Processes on each host.")] = 1,
    gpu: Annotated[
        bool,
        Option(
            "--gpu",
            help="All ranks share this machine's GPU (MPS) as device 0, and NCCL uses the emulated links; ranks "
            "share the GPU's speed and memory, and NVLink within a host is not emulated.",
        ),
    ] = False,
    timeout: Annotated[float, Option(min=0, help="End the job after this many seconds.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Run a script on an emulated cluster: hosts connected by links of limited bandwidth."""
    from offbeat.emulate import Emulation

    is_script = script[0].endswith(".py")
    if not (Path(script[0]).is_file() if is_script else script[0].startswith("-") or shutil.which(script[0])):
        raise OffbeatError(f"{script[0]}: no such {'script' if is_script else 'program'}")
    with stdout_to_stderr(as_json):
        emulation = Emulation(link_rates(bandwidth, hosts), bandwidth, ranks_per_host=ranks_per_host, gpu=gpu)
        code = run_shown(emulation, script, timeout)
    if as_json:
        print_json({"hosts": hosts, "ranks": hosts * ranks_per_host, "exit_code": code})
    exit_if_failed(code, timeout)


def run_shown(emulation: "Emulation", program: Sequence[str], timeout: float | None) -> int:
    """Starts an emulated cluster, runs a program on every rank, and prints each line as '[rank] line'.

    Returns 0, the exit code of the rank that failed first (128 + n if signal n ended it), or 124 on timeout. The
    other ranks are then stopped.
    """
    shown = Shown()
    try:
        with emulation:
            start = shown.started(partial(emulation.popen, program=program, master_port=emulation.new_port()))
            ends = Job(start, range(emulation.world_size), captured=False).run(timeout)
    finally:
        # Every process that could still write has ended with the emulation.
        shown.join()
    return job_exit_code(ends)


def link_rates(text: str, hosts: int) -> int | list[str]:
    """The `hosts` argument of `Emulation`: their number, or a list of bandwidths if the text has commas."""
    rates = text.split(",")
    if len(rates) == 1:
        return hosts
    if len(rates) != hosts:
        raise OffbeatError(f"bandwidth: {len(rates)} values for {hosts} hosts")
    return rates


@app.command(
    epilog="Example: offbeat launch --cluster cluster.yaml train.py --steps 10",
    context_settings=SCRIPT_SETTINGS,
)
def launch(
    script: Script,
    cluster: Cluster,
    ssh: Annotated[str, Option(help="The ssh command with its options.")] = "ssh",
    python: Annotated[str, Option(help="Python with Offbeat installed, on every node.")] = sys.executable,
    port: Annotated[int, Option(min=1, max=65535, help="Rendezvous port on the first node.")] = MASTER_PORT,
    env: Annotated[list[str], Option(help="Set a variable on every rank: NAME=VALUE, or NAME to copy it.")] = [],  # noqa: B006 - typer's default
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Run a script on every node of a cluster file over ssh, like torchrun, in the same folder on each node."""
    from offbeat.cli.planning import load_cluster

    spec = load_cluster(cluster)
    nodes = remote_nodes(spec, port, dict(_variable(text) for text in env))
    command = shlex.split(ssh)
    if not command or shutil.which(command[0]) is None:
        raise OffbeatError(f"--ssh: no program named by {ssh!r} is installed here")
    with stdout_to_stderr(as_json):
        code = run_nodes(nodes, script, python, command, timeout)
    if as_json:
        print_json({"nodes": len(nodes), "ranks": spec.world_size, "exit_code": code})
    exit_if_failed(code, timeout)


def remote_nodes(cluster: "ClusterSpec", port: int, variables: dict[str, str]) -> list[RemoteNode]:
    """The nodes of a cluster as launch targets; each must have an address."""
    for node in cluster.nodes:
        if node.address is None or node.address.startswith("-"):
            raise OffbeatError(f"address: node {node.name!r} of cluster {cluster.name!r} has no address for ssh")
    addresses = [str(node.address) for node in cluster.nodes]
    variables = servers_environment(cluster.servers) | variables
    return [
        RemoteNode(
            node.name,
            addresses[place],
            cluster.ranks_of(place),
            cluster.world_size,
            (addresses[0], port),
            {"NODE_RANK": str(place), "GROUP_RANK": str(place), "GROUP_WORLD_SIZE": str(len(addresses)), **variables},
        )
        for place, node in enumerate(cluster.nodes)
    ]


def run_nodes(
    nodes: Sequence[RemoteNode], program: Sequence[str], python: str, ssh: Sequence[str], timeout: float | None
) -> int:
    """Runs a program on all nodes, prints each line as '[rank] line', and stops all if one fails; see `run_shown`."""
    shown = Shown()
    run = partial(start_node, program=program, folder=os.getcwd(), python=python, ssh=ssh)
    start = shown.started(lambda place, **output: run(nodes[place], **output), prefix="")
    job = Job(start, range(len(nodes)), captured=False)
    over = threading.Event()

    def keep_alive() -> None:
        while not over.wait(HEARTBEAT_SECONDS):
            for process in job.processes:
                if isinstance(process, NodeProcess):
                    process.tell()

    threading.Thread(target=keep_alive, daemon=True).start()
    try:
        ends = job.run(timeout)
    finally:
        over.set()
        shown.join()
    failure = first_failure(ends)
    if failure is not None and exit_code(failure.returncode) == SSH_FAILED:
        node = nodes[failure.rank]
        raise OffbeatError(f"address: ssh could not reach node {node.name!r} at {node.address!r}, or lost it")
    return job_exit_code(ends)


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not name.isidentifier() or not (given or name in os.environ):
        raise OffbeatError(f"--env: {text!r} is neither NAME=VALUE nor the name of a variable set here")
    return name, value if given else os.environ[name]
