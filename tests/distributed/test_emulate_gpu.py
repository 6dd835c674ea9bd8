"""Hosts that share a GPU: its service is started, watched, restarted and ended, and ranks find it.

The service and the GPU are stand-ins on the search path, which note what they are asked.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from emulated_ranks import environment

from offbeat.cli import main
from offbeat.emulate import Emulation, RankError
from offbeat.errors import EmulationError

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
# The daemon stays in the background, as the real one does, and is known by a file in its folder.
CONTROL = """#!/bin/sh
log={log}
alive="$CUDA_MPS_PIPE_DIRECTORY/alive"
if [ "$1" = -d ]; then
  echo "start $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY" >> $log
  {start}
  sleep 600 &
  echo $! > "$alive"
  exit 0
fi
[ -e "$alive" ] || exit 1
while read -r command; do
  echo "$command" >> $log
  [ "$command" = quit ] && kill "$(cat "$alive")"
done
exit 0
"""
QUERY = """#!/bin/sh
echo "{said}"
exit {code}
"""


class Service:
    """Stand-ins for NVIDIA's programs, first on the search path."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.log = folder, folder / "asked"
        self.log.touch()
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.write("nvidia-cuda-mps-control", CONTROL.format(log=self.log, start=""))
        self.write("nvidia-smi", QUERY.format(said="NVIDIA H200, 143771", code=0))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    @property
    def asked(self) -> list[str]:
        return [line.split()[0] for line in self.log.read_text().splitlines()]

    @property
    def pipes(self) -> list[Path]:
        """The folder of each start, in order."""
        return [Path(line.split()[2]) for line in self.log.read_text().splitlines() if line.startswith("start")]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(tmp_path, monkeypatch)


def _ends(pid: int) -> bool:
    until = time.monotonic() + 15
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_service_lives_as_long_as_the_cluster(emulated_cluster, service: Service):
    cluster = emulated_cluster(2, gpu=True)
    [folder] = service.pipes
    daemon = int((folder / "alive").read_text())
    assert len(str(folder)) < 60, "sockets below it need a short name"
    assert cluster.gpu_answers()
    cluster.close()
    assert not folder.exists()
    assert _ends(daemon)
    assert service.asked[0] == "start"
    assert service.asked[-1] == "quit"


def test_ranks_find_the_service_and_talk_as_hosts_of_their_own(emulated_cluster, service: Service):
    cluster = emulated_cluster(2, ranks_per_host=2, gpu=True)
    folder = str(service.pipes[0])
    same = ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"]
    same += ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME"]
    found = cluster.run_function(environment, [*same, "NCCL_HOSTID", "LOCAL_RANK"], timeout=20)
    assert [values[: len(same)] for values in found] == [[folder, folder, "0", "1", "1", "1", "eth0"]] * 4
    assert [tuple(values[len(same) :]) for values in found] == [
        ("host0-0", "0"),
        ("host0-1", "1"),
        ("host1-0", "0"),
        ("host1-1", "1"),
    ]


def test_one_rank_per_host_keeps_the_name_of_its_host(emulated_cluster, service: Service):
    cluster = emulated_cluster(2, gpu=True)
    assert cluster.run_function(environment, ["NCCL_HOSTID"], timeout=20) == [["host0"], ["host1"]]


def test_the_service_is_restarted_after_a_rank_that_failed(emulated_cluster, service: Service):
    cluster = emulated_cluster(2, gpu=True)
    cluster.run(["true"], timeout=10)
    assert service.asked.count("start") == 1
    with pytest.raises(RankError):
        cluster.run(["false"], timeout=10)
    cluster.run(["true"], timeout=10)
    assert service.asked.count("start") == 2
    first, second = service.pipes
    assert not first.exists()
    assert second.exists()


def test_the_service_is_restarted_where_it_does_not_answer(emulated_cluster, service: Service):
    cluster = emulated_cluster(1, gpu=True)
    pipe = service.pipes[0]
    os.kill(int((pipe / "alive").read_text()), signal.SIGKILL)
    (pipe / "alive").unlink()
    assert not cluster.gpu_answers()
    found = cluster.run_function(environment, ["CUDA_MPS_PIPE_DIRECTORY"], timeout=20)
    assert found == [[str(service.pipes[1])]]
    assert cluster.gpu_answers()


def test_the_service_ends_with_whoever_asked_for_it(emulated_cluster, service: Service):
    emulated_cluster(1)
    program = "import time\nfrom offbeat.emulate import Emulation\nwith Emulation(1, gpu=True):\n    time.sleep(600)\n"
    owner = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        until = time.monotonic() + 30
        while not (service.pipes and (service.pipes[0] / "alive").exists()) and time.monotonic() < until:
            time.sleep(0.05)
        [folder] = service.pipes
        daemon = int((folder / "alive").read_text())
    finally:
        owner.kill()
        owner.wait()
    assert _ends(daemon)
    until = time.monotonic() + 10
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists()


def test_what_is_missing_is_one_sentence(service: Service, monkeypatch: pytest.MonkeyPatch):
    service.write("nvidia-smi", QUERY.format(said="No devices were found", code=6))
    with pytest.raises(EmulationError, match=r"^gpu: this machine has no GPU to share: .*No devices were found"):
        Emulation(2, gpu=True).__enter__()
    (service.folder / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(service.folder))
    monkeypatch.setattr("offbeat.emulate.gpu._DRIVER_FOLDERS", "")
    with pytest.raises(EmulationError, match=r"^gpu: this machine has no NVIDIA GPU, or lacks .*nvidia-smi$"):
        Emulation(2, gpu=True).__enter__()
    (service.folder / "nvidia-cuda-mps-control").unlink()
    with pytest.raises(EmulationError, match=r"^gpu: hosts share a GPU through MPS, .*nvidia-cuda-mps-control$"):
        Emulation(2, gpu=True).__enter__()


def test_a_service_that_does_not_start_is_one_sentence_and_nothing_is_left(emulated_cluster, service: Service):
    emulated_cluster(1)
    refused = "echo no permission; exit 1"
    service.write("nvidia-cuda-mps-control", CONTROL.format(log=service.log, start=refused))
    with pytest.raises(EmulationError, match=r"^gpu: MPS does not start: no permission$"):
        Emulation(2, gpu=True).__enter__()
    assert not service.pipes[0].exists()


def test_without_a_gpu_there_is_nothing_to_restart(emulated_cluster):
    with pytest.raises(EmulationError, match="gpu: this emulated cluster was created without one"):
        emulated_cluster(1).restart_gpu()


def test_the_cluster_has_the_figures_of_the_real_gpu(emulated_cluster, service: Service):
    [node, _] = emulated_cluster(2, "10Gbit/s", gpu=True).cluster_spec().nodes
    assert (node.device, node.memory) == ("NVIDIA H200", 143771 * 2**20)
    assert node.peak_flops == 989e12
    assert node.bandwidth == 1.25e9
    service.write("nvidia-smi", QUERY.format(said="Unheard of, 1024", code=0))
    [node] = emulated_cluster(1, gpu=True).cluster_spec().nodes
    assert (node.device, node.memory) == ("Unheard of", 2**30)


def test_the_daemon_gets_the_device_that_the_user_chose(emulated_cluster, service: Service, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    cluster = emulated_cluster(1, gpu=True)
    assert re.match("start 3 ", service.log.read_text())
    assert cluster.run_function(environment, ["CUDA_VISIBLE_DEVICES"], timeout=20) == [["0"]]


def test_commands_know_of_the_gpu(emulated_cluster, service: Service, capsys: pytest.CaptureFixture[str]):
    emulated_cluster(1)
    assert main(["emulate", "--gpu", "--hosts", "1", "--", "sh", "-c", "echo $CUDA_MPS_PIPE_DIRECTORY"]) == 0
    assert capsys.readouterr().out == f"[0] {service.pipes[0]}\n"
    main(["doctor", "--json"])
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["gpu emulation"]["works"]
    assert "NVIDIA H200" in rows["gpu emulation"]["verdict"]
