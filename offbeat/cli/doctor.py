"""offbeat doctor: check what works on this machine, with one line for each feature."""

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from typer import Exit

from offbeat import units
from offbeat.cli.app import Json, app
from offbeat.cli.show import print_rows, progress
from offbeat.errors import OffbeatError

PROBE_SECONDS = 60
MINIMUM_PYTHON = (3, 11)


class Finding(NamedTuple):
    """One feature of the machine; training is impossible without a required one."""

    what: str
    works: bool
    verdict: str
    required: bool = False


@app.command(epilog="Example: offbeat doctor")
def doctor(as_json: Json = False) -> None:
    """Check what works on this machine."""
    with progress("checking this machine"):
        findings = examine()
    print_rows([{"what": f.what, "works": f.works, "verdict": f.verdict} for f in findings], as_json)
    raise Exit(int(any(finding.required and not finding.works for finding in findings)))


def examine() -> list[Finding]:
    """All findings, in the order they are shown."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    compiler = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [
        Finding("python", sys.version_info >= MINIMUM_PYTHON, python, required=True),
        *_torch(),
        *_kernel(),
        _gpu_emulation(),
        Finding("compiler", compiler is not None, compiler or "no C++ compiler; Offbeat does not need one"),
        Finding("cores", cores > 1, f"{cores}" + ("" if cores > 1 else ": emulated hosts share it")),
        Finding("memory", memory >= 4 * 2**30, units.format_bytes(memory)),
    ]


def _torch() -> list[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return [Finding("torch", False, f"cannot be imported: {error}", True)]
    if not dist.is_available():
        return [Finding("torch", False, f"{torch.__version__}, built without torch.distributed", True)]
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    present = [name for name, available in backends.items() if available]
    findings = [Finding("torch", bool(present), f"{torch.__version__}, backends: {', '.join(present) or 'none'}", True)]
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    verdict = f"{count} devices: {', '.join(names)}" if count else "no device: training runs on the CPU with gloo"
    findings.append(Finding("cuda", count > 0, verdict))
    return findings


def _gpu_emulation() -> Finding:
    from offbeat.emulate.gpu import find_control, find_gpu

    try:
        find_control()
        name = find_gpu().name
    except OffbeatError as error:
        return Finding("gpu emulation", False, f"not available: {str(error).removeprefix('gpu: ')}")
    return Finding("gpu emulation", True, f"several hosts can share the {name} (offbeat emulate --gpu)")


def _kernel() -> list[Finding]:
    root = os.geteuid() == 0
    findings = [Finding("root", root, "running as root" if root else "not root: emulated hosts need user namespaces")]
    if sys.platform != "linux":
        verdict = "needs Linux: emulated hosts would share the loopback interface"
        return [*findings, Finding("emulation", False, verdict)]
    # In a child process, because a process cannot leave a namespace.
    command = [sys.executable, "-c", "from offbeat.cli.doctor import probe; probe()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        tried = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        tried = {}
    for what, use in (
        ("user namespaces", "hosts can be emulated without root"),
        ("network namespaces", "each emulated host has its own network"),
        ("token bucket (tbf)", "links can be limited in bandwidth"),
        ("delay (netem)", "links can be given latency"),
    ):
        problem = tried.get(what, "could not be tested")
        findings.append(Finding(what, not problem, f"not available: {problem}" if problem else use))
    return findings


def probe() -> None:
    """Tries the steps of an emulated cluster in this process and prints as JSON '' for what works, else why not."""
    from offbeat.emulate import linux

    results: dict[str, str] = {}
    if os.geteuid() != 0:
        results["user namespaces"] = _attempt(linux.enter_user_namespace)
    results["network namespaces"] = _attempt(partial(linux.call, "unshare", linux.CLONE_NEWNET))
    if not results["network namespaces"]:
        results["token bucket (tbf)"] = _attempt(partial(_shape, "tbf", rate=10**6, burst=10**4, limit=10**5))
        results["delay (netem)"] = _attempt(partial(_shape, "netem", delay=1000))
    if os.geteuid() == 0:
        results["user namespaces"] = _attempt(linux.enter_user_namespace)
    print(json.dumps(results))


def _shape(kind: str, **options: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as route:
        route.link("add", ifname=f"{kind}0", kind="veth", peer=f"{kind}1")
        route.tc("add", kind, route.link_lookup(ifname=f"{kind}0")[0], 0x10000, **options)


def _attempt(action: Callable[[], None]) -> str:
    try:
        action()
    except Exception as error:
        # Netlink's errors are no OSErrors, but carry (number, text) alike.
        if error.args and error.args[0] == errno.ENOENT:
            return "not in this kernel"
        return " ".join(str(error.args[-1] if error.args else error).split()) or type(error).__name__
    return ""
