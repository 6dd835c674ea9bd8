"""offbeat launch: run a script on the nodes of a cluster file over ssh."""

import os
import shlex
import shutil
import sys
import threading
from collections.abc import Sequence
from functools import partial
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
    start_node,
)

if TYPE_CHECKING:
    from offbeat.cluster import ClusterSpec

MASTER_PORT = 29_500
"""torchrun's."""


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
    from offbeat.cli.catalogue import load_cluster

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
    return [
        RemoteNode(
            node.name,
            addresses[place],
            cluster.ranks_of(place),
            cluster.world_size,
            (addresses[0], port),
            {
                "NODE_RANK": str(place),
                "GROUP_RANK": str(place),
                "GROUP_WORLD_SIZE": str(len(addresses)),
                **variables,
            },
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
