"""What users get wrong: each mistake gets one helpful sentence, and Ctrl-C ends every command at once."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import mostly_slow

import offbeat
from offbeat.cli import main
from offbeat.cli.app import app
from offbeat.errors import OffbeatError
from offbeat.strategy import Strategy
from offbeat.timeline import Timeline

ENDLESS = "import time\ntime.sleep(100)\n"
OFFBEAT = (sys.executable, "-m", "offbeat")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    graph = offbeat.zoo.capture("mlp")
    cluster = offbeat.ClusterSpec.homogeneous(nodes=2, devices_per_node=1, bandwidth="1Gbit/s", latency="50us")
    return offbeat.simulate(offbeat.lower(graph, cluster, offbeat.build_strategy("ddp", graph, cluster)))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence with which a command ends."""
    assert main(list(arguments)) != 0
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("offbeat: ")
    return lines[0]


@pytest.mark.parametrize("command", ["replay", "report", "view", "optimize"])
def test_a_wrong_path(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere" in refused(capsys, command, "nowhere/trace")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("command", [("plan",), ("frontier",), ("optimize",), ("view", "--model")])
def test_a_wrong_model(command: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, *command, "resnet5", "--cluster", "B9")
    assert "unknown model 'resnet5'" in sentence
    assert "resnet50" in sentence, "it suggests what may have been meant"


def test_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    from offbeat.cli import doctor

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    root = next(finding for finding in doctor.examine() if finding.what == "root")
    assert not root.works
    assert "user namespaces" in root.verdict, "what is needed instead"


def test_a_port_that_is_taken(folder: Path, timeline: Timeline, capsys: pytest.CaptureFixture[str]) -> None:
    timeline.save("t.json")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        sentence = refused(capsys, "view", "t.json", "--port", port)
    assert port in sentence
    assert "--port" in sentence


def test_a_cluster_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    cluster = offbeat.ClusterSpec.homogeneous(nodes=4, devices_per_node=1, bandwidth="1Gbit/s", latency="50us")
    monkeypatch.setattr("offbeat.api.join_job", lambda *_, **__: None)
    job = SimpleNamespace(size=2, rank=0, global_ranks=lambda: [0, 1])
    monkeypatch.setattr("offbeat.api.torch_world", lambda group, device: job)
    with pytest.raises(OffbeatError, match="has 4 devices, the job has 2 ranks"):
        offbeat.distribute(model, torch.optim.SGD(model.parameters()), cluster=cluster)


@pytest.mark.parametrize(
    ("device", "servers", "backend"),
    [
        ("cpu", False, "gloo"),
        ("cuda", False, "nccl"),
        ("cuda", True, "cpu:gloo,cuda:nccl"),
        ("cpu", True, "cpu:gloo,cuda:nccl"),
    ],
)
def test_a_job_joins_with_the_backend_of_its_model(
    monkeypatch: pytest.MonkeyPatch, device: str, servers: bool, backend: str
) -> None:
    """Ranks that train on processors need no GPU each, on a machine that has one."""
    from offbeat import api

    joined: list[str] = []
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(api.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(api.dist, "rendezvous", lambda url: iter([(torch.distributed.HashStore(), 0, 2)]))
    monkeypatch.setattr(api.dist, "init_process_group", lambda backend, **_: joined.append(backend))
    api.join_job(None, torch.device(device), servers)
    assert joined == [backend]


def test_no_gpu() -> None:
    from offbeat.cli import doctor

    cuda = next(finding for finding in doctor.examine() if finding.what == "cuda")
    assert cuda.works == torch.cuda.is_available()
    assert cuda.works or "gloo" in cuda.verdict, "what runs instead"


def test_an_old_strategy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(Strategy().to_json())
    Path("old.json").write_text(json.dumps(content | {"format": 0}))
    sentence = refused(capsys, "plan", "mlp", "--cluster", "B9", "--strategy", "old.json")
    assert "old.json" in sentence
    assert "format" in sentence


@pytest.mark.parametrize("content", [b"\x00\x01\x02", b"", b"[1, 2", b"\x1f\x8b\x08broken"])
@pytest.mark.parametrize("command", ["replay", "report", "view"])
def test_a_trace_that_cannot_be_read(
    command: str, content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("trace").mkdir()
    Path("trace/rank0.json").write_bytes(content)
    assert "rank0.json" in refused(capsys, command, "trace")
    assert not Path("report.html").exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("plan", "mlp", "--cluster", "B9", "-o", "disk/s.json"), marks=pytest.mark.slow),
        pytest.param(("replay", "t.json", "-o", "disk/t.json"), marks=pytest.mark.slow),
        ("report", "t.json", "-o", "disk/r.html"),
    ],
)
def test_a_full_disk(arguments: tuple[str, ...], folder: Path, timeline: Timeline) -> None:
    timeline.save("t.json")
    Path("disk").mkdir()
    fill = "mount -t tmpfs -o size=4k none disk && head -c 4096 /dev/zero > disk/full; exec "
    command = ["unshare", "-m", "sh", "-c", fill + '"$@"', "sh", *OFFBEAT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "No space left" in done.stderr


LONG = {
    "models": (),
    "clusters": (),
    "builders": (),
    "plan": ("bert_large", "--cluster", "B7"),
    "explain": ("overlap", "--model", "bert_large", "--cluster", "B7"),
    "frontier": ("bert_large", "--cluster", "tensoropt"),
    "profile": ("endless.py", "-n", "2"),
    "replay": ("t.json",),
    "calibrate": ("-n", "2"),
    "optimize": ("resnet50", "--cluster", "B7"),
    "run": ("endless.py", "-n", "2"),
    "emulate": ("--", "endless.py"),
    "launch": ("--cluster", "nodes.yaml", "--ssh", "sh wait.sh", "endless.py"),
    "demo": (),
    "tour": (),
    "doctor": (),
    "tune": ("endless.py", "-n", "2"),
    "trials": ("--store", "trials.sqlite"),
    "report": ("t.json",),
    "view": ("t.json", "--port", "0"),
}


SHORT = ("models", "clusters", "builders", "replay", "doctor", "trials", "report", "view")
"""These may have ended by then; Ctrl-C is how a page is closed."""


def test_every_command_is_interrupted_somewhere() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    assert names == set(LONG)


@pytest.mark.parametrize("command", mostly_slow(LONG, ("clusters", "optimize", "run", "emulate", "demo", "view")))
def test_ctrl_c(command: str, folder: Path, timeline: Timeline) -> None:
    timeline.save("t.json")
    Path("endless.py").write_text(ENDLESS)
    Path("nodes.yaml").write_text("name: one\nnodes:\n- {name: one, address: 127.0.0.1}\n")
    Path("wait.sh").write_text("exec sleep 600\n")
    with subprocess.Popen(
        [*OFFBEAT, command, *LONG[command]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            errors = _interrupt(job)
        finally:
            job.kill()
    # Pressed twice, the signal itself ends a program that is about to end.
    interrupted = job.returncode in (130, -signal.SIGINT)
    assert interrupted or command in SHORT, errors
    assert "Traceback" not in errors
    if job.returncode == 130:
        assert "interrupted" in errors


def test_ctrl_c_in_a_callback_of_a_compiled_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python cannot raise through C: it would only print that the interrupt was ignored."""

    def compiling(**_: Any) -> None:
        ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
        time.sleep(60)

    monkeypatch.setattr(sys.modules[main.__module__], "app", compiling)
    began = time.monotonic()
    assert main(["doctor"]) == 130
    assert time.monotonic() - began < 30


def _interrupt(job: subprocess.Popen[str]) -> str:
    """What it says; pressed again where a library swallowed the first while it was being loaded."""
    for _ in range(5):
        try:
            return job.communicate(timeout=1.5 if job.poll() is None else 10)[1]
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGINT)
    return job.communicate(timeout=30)[1]
