"""`offbeat launch`: one command on every node of a cluster file, over a real sshd on each of two emulated hosts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli.hosts import remote_nodes
from offbeat.cluster import ClusterSpec, Node
from offbeat.emulate import Emulation
from offbeat.errors import OffbeatError
from offbeat.launch import SERVERS_VARIABLE, RankProcess, RemoteNode, named_servers

ROOT = str(Path(__file__).parents[2])
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = pytest.mark.timeout(120)
needs_sshd = pytest.mark.skipif(
    not (SSHD and shutil.which("ssh") and shutil.which("ssh-keygen") and os.geteuid() == 0),
    reason="needs the ssh and sshd programs, and root to run sshd",
)

TRAIN = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "GREETING")
print(*(f"{name}={os.environ[name]}" for name in names), f"sum={total.item():g}", *sys.argv[1:], flush=True)
dist.destroy_process_group()
os._exit(0)  # torch's gloo threads can abort an interpreter that ends while they let go of tensors
"""
SLEEP = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"])
print("up", os.getpid(), flush=True)
if os.environ["RANK"] == sys.argv[1]:
    time.sleep(1)
    sys.exit(7)
time.sleep(300)
"""

SERVED = """
import torch, offbeat
model = torch.nn.Linear(4, 2)
model, optimizer = offbeat.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "ps_load_balanced")
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
print(model._offbeat.plan.replicas, [message.owner for message in model._offbeat.plan.messages], flush=True)
"""


class Cluster:
    """Two emulated hosts with an sshd each, and what `offbeat launch` needs to use them."""

    def __init__(self, emulation: Emulation, folder: Path) -> None:
        self.emulation, self.folder = emulation, folder
        self.servers: list[RankProcess] = []
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        shutil.copy(folder / "key.pub", folder / "authorized")
        server = {
            "HostKey": folder / "host_key",
            "AuthorizedKeysFile": folder / "authorized",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
        }
        client = {
            "IdentityFile": folder / "key",
            "UserKnownHostsFile": folder / "known",
            "StrictHostKeyChecking": "no",
            "LogLevel": "ERROR",
        }
        for name, options in (("sshd_config", server), ("ssh_config", client)):
            (folder / name).write_text("".join(f"{option} {value}\n" for option, value in options.items()))
        os.makedirs("/run/sshd", exist_ok=True)
        # Each host has a loopback of its own, so all use port 22.
        for host in range(2):
            assert SSHD is not None
            argv = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
            with open(folder / f"sshd{host}.log", "wb") as log:
                self.servers.append(emulation.popen(2 * host, argv, stdout=log, stderr=log))
        self.file = folder / "cluster.yaml"
        self.file.write_text(emulation.cluster_spec().to_yaml())

    def launch(self, script: str, *arguments: str, options: tuple[str, ...] = ()) -> RankProcess:
        """Starts the command on the first host."""
        path = self.folder / "script.py"
        path.write_text(script)
        argv = ["-m", "offbeat", "launch", "--cluster", str(self.file), "--ssh", f"ssh -F {self.folder / 'ssh_config'}"]
        pipe = subprocess.PIPE
        environment = {"PYTHONPATH": ROOT, "GREETING": "hello"}
        return self.emulation.popen(
            0, [*argv, *options, str(path), *arguments], env=environment, stdout=pipe, stderr=pipe
        )

    def left_behind(self) -> list[int]:
        """Ranks and their children that still run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            ours = str(self.folder).encode()
            if ours in environment or (ours in line and b"script.py" in line and b"launch" not in line):
                found.append(int(entry.name))
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    with Emulation(2, None, ranks_per_host=2) as emulation:
        if emulation.kind != "namespaces":
            pytest.skip(f"needs network namespaces of root, and this machine has {emulation.kind}")
        made = Cluster(emulation, tmp_path_factory.mktemp("ssh"))
        yield made
        for server in made.servers:
            server.terminate()
            server.wait()


def finished(process: RankProcess, seconds: float = 60.0) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=seconds)
    return process.returncode, stdout.decode(), stderr.decode()


def gone(cluster: Cluster, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while cluster.left_behind() and time.monotonic() < until:
        time.sleep(0.1)
    return not cluster.left_behind()


def up(process: RankProcess, ranks: int = 4) -> None:
    """Waits until so many ranks have said that they run."""
    assert process.stdout is not None
    for _ in range(ranks):
        assert b"] up" in process.stdout.readline()


@needs_sshd
def test_every_rank_runs_with_torchruns_environment_on_the_addresses_of_the_file(cluster: Cluster) -> None:
    options = ("--env", "GREETING", "--env", "TORCH_CPP_LOG_LEVEL=ERROR")
    code, stdout, stderr = finished(cluster.launch(TRAIN, "--steps", "3", options=options))
    assert (code, stderr) == (0, ""), stderr
    lines = sorted(stdout.splitlines())
    assert lines == [
        f"[{rank}] RANK={rank} LOCAL_RANK={rank % 2} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 NODE_RANK={rank // 2} "
        f"MASTER_ADDR=10.77.0.1 GREETING=hello sum=10 --steps 3"
        for rank in range(4)
    ]
    assert gone(cluster)


@needs_sshd
@pytest.mark.slow
def test_nodes_that_the_file_makes_servers_serve(cluster: Cluster, tmp_path: Path) -> None:
    """The script does not know the cluster."""
    spec = ClusterSpec.load(cluster.file)
    spec.replace(nodes=(spec.nodes[0], spec.nodes[1].model_copy(update={"role": "server"}))).save(tmp_path / "c.yaml")
    options = ("--cluster", str(tmp_path / "c.yaml"), "--env", "TORCH_CPP_LOG_LEVEL=ERROR")
    code, stdout, stderr = finished(cluster.launch(SERVED, options=options))
    assert code == 0, stderr
    assert sorted(stdout.splitlines()) == [f"[{rank}] (0, 1) [2, 3]" for rank in range(2)]
    assert gone(cluster)


@needs_sshd
def test_one_failed_rank_ends_all_nodes(cluster: Cluster) -> None:
    mark = ("--env", f"MARK={cluster.folder}")
    code, _, stderr = finished(cluster.launch(SLEEP, "3", options=mark), 30)
    assert code == 7
    assert "the job ended with exit code 7" in stderr
    assert gone(cluster)


@needs_sshd
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_whatever_ends_the_launcher_ends_the_ranks(cluster: Cluster, sent: int, code: int) -> None:
    process = cluster.launch(SLEEP, "none", options=("--env", f"MARK={cluster.folder}"))
    up(process)
    assert len(cluster.left_behind()) >= 4
    os.kill(process.pid, sent)
    assert finished(process, 30)[0] == code
    assert gone(cluster)


@needs_sshd
def test_a_node_that_cannot_be_reached_is_named(cluster: Cluster, tmp_path: Path) -> None:
    text = re.sub(r"10\.77\.0\.2", "no-such-host.invalid", cluster.file.read_text())
    (tmp_path / "wrong.yaml").write_text(text)
    code, _, stderr = finished(cluster.launch(SLEEP, "none", options=("--cluster", str(tmp_path / "wrong.yaml"))), 30)
    assert code == 1
    assert "ssh could not reach node 'host1' at 'no-such-host.invalid'" in stderr
    assert "Traceback" not in stderr
    assert gone(cluster)


@pytest.mark.parametrize("how", ["its input ends", "nobody is heard of"])
def test_a_node_that_has_lost_its_launcher_ends_its_ranks(how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLEEP)
    node = RemoteNode("here", "127.0.0.1", (0, 1), 2, ("127.0.0.1", 1), {"NODE_RANK": "0"})
    task = {**asdict(node), "program": [str(tmp_path / "script.py"), "none"], "silence_seconds": 2.0}
    code, pipe = "from offbeat.launch import run_node; run_node()", subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.flush()
        ranks = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        if how == "its input ends":
            process.stdin.close()
        assert process.wait(20) == 130
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def test_every_rank_learns_which_ones_the_file_makes_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node(address="a", devices=2), Node(address="b", devices=2, role="server"), Node(address="c")]
    for node in remote_nodes(ClusterSpec(nodes=nodes), 1, {}):
        monkeypatch.setenv(SERVERS_VARIABLE, node.environment[SERVERS_VARIABLE])
        assert named_servers() == (2, 3)
    assert SERVERS_VARIABLE not in remote_nodes(ClusterSpec(nodes=nodes[:1]), 1, {})[0].environment


def test_every_node_needs_an_address() -> None:
    spec = ClusterSpec(name="c", nodes=(Node(address="a"), Node()))
    with pytest.raises(OffbeatError, match="address: node 'node1' of cluster 'c' has no address"):
        remote_nodes(spec, 1, {})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--env", "NO_SUCH_VARIABLE"], "--env: 'NO_SUCH_VARIABLE' is neither"),
        (["--ssh", "no-such-ssh"], "--ssh: no program named by 'no-such-ssh'"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, tmp_path: Path, capfd: Any) -> None:
    from offbeat.cli import main

    (tmp_path / "c.yaml").write_text("nodes: [{address: localhost}]")
    assert main(["launch", "--cluster", str(tmp_path / "c.yaml"), *arguments, "train.py"]) == 1
    error = capfd.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert sys.exc_info()[0] is None
