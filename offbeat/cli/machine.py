"""This machine → findings: what Offbeat can do here, each with a one-line verdict."""

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from offbeat import units

PROBE_SECONDS = 60
MINIMUM_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    what: str
    works: bool
    verdict: str
    required: bool = False
    """Nothing can be trained without it."""


def examine() -> list[Finding]:
    """Everything worth knowing before a first run."""
    return [_python(), *_torch(), *_kernel(), _compiler(), _cores(), _memory()]


def _python() -> Finding:
    works = sys.version_info >= MINIMUM_PYTHON
    return Finding("python", works, f"{platform.python_version()} on {platform.system()} {platform.machine()}", True)


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


def _kernel() -> list[Finding]:
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    findings = [Finding("root", root, "running as root" if root else "not root: emulated hosts need user namespaces")]
    if sys.platform != "linux":
        return [
            *findings,
            Finding("emulation", False, "needs Linux: emulated hosts would share the loopback interface"),
        ]
    user, network = _probe("user"), _probe("network")
    for what, tried, use in (
        ("user namespaces", user.get("user"), "hosts can be emulated without root"),
        ("network namespaces", network.get("namespace"), "each emulated host has a network of its own"),
        ("token bucket (tbf)", network.get("tbf"), "links can be limited in bandwidth"),
        ("delay (netem)", network.get("netem"), "links can be given latency"),
    ):
        findings.append(
            Finding(what, tried == "", use if tried == "" else f"not here: {tried or 'could not be tried'}")
        )
    return findings


def _compiler() -> Finding:
    found = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
    return Finding("compiler", found is not None, found or "no C++ compiler; Offbeat does not need one")


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("cores", count > 1, f"{count}" + ("" if count > 1 else ": emulated hosts take turns on it"))


def _memory() -> Finding:
    if not hasattr(os, "sysconf"):
        return Finding("memory", True, "size unknown")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Finding("memory", total >= 4 * 2**30, units.format_bytes(total))


def _probe(what: str) -> dict[str, str]:
    """'' for each step that works, else why not. A process of its own, because entering a namespace is for good."""
    code = f"from offbeat.cli.machine import probe; probe({what!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
        return json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return {}


def probe(what: str) -> None:
    """Tries the steps of an emulated cluster in the calling process, and prints what became of each."""
    from offbeat.emulate import linux

    results: dict[str, str] = {}
    if what == "user":
        results["user"] = _attempt(linux.enter_user_namespace)
    else:
        if os.geteuid() != 0:
            _attempt(linux.enter_user_namespace)
        results["namespace"] = _attempt(lambda: linux.unshare(linux.CLONE_NEWNET))
        if not results["namespace"]:
            for kind, options in (("tbf", {"rate": 10**6, "burst": 10**4, "limit": 10**5}), ("netem", {"delay": 1000})):
                results[kind] = _attempt(lambda kind=kind, options=options: _shape(kind, options))  # type: ignore[misc]
    print(json.dumps(results))


def _shape(kind: str, options: dict[str, int]) -> None:
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
            return "this kernel does not have it"
        return " ".join(str(error.args[-1] if error.args else error).split()) or type(error).__name__
    return ""
