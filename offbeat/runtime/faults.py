"""An error of the communication backend → one that names the task and the ranks it was waiting for."""

import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.plan import Plan, Task
from offbeat.runtime.channel import CommunicationFailed

if TYPE_CHECKING:
    from offbeat.runtime.parcels import Parcel

GRACE = timedelta(seconds=3)
"""How long a rank that met a fault waits for the others to say that they are alive."""


class WorkerLost(RuntimeError):
    """Another rank died or stopped answering."""


@contextmanager
def explain(
    plan: Plan, parcel: "Parcel | None" = None, task: Task | None = None, what: str = ""
) -> Generator[None, None, None]:
    """Turns a backend error into WorkerLost, naming the task, its variables and the ranks that gave no sign of life."""
    try:
        yield
    except CommunicationFailed as error:
        raise WorkerLost(_sentence(plan, what or _name(plan, parcel, task), error)) from error


def _name(plan: Plan, parcel: "Parcel | None", task: Task | None) -> str:
    assert parcel is not None
    message = parcel.message
    waiting = task or next((t for t in plan.tasks if t.index in parcel.works), None)
    waiting = waiting or next(t for t in plan.tasks if t.message == message.index)
    names = ", ".join(message.variables[:3]) + (", …" if len(message.variables) > 3 else "")
    return f"task {waiting.name} ({names}) with ranks {list(waiting.ranks)}"


def _sentence(plan: Plan, what: str, error: Exception) -> str:
    silent = _silent_ranks(plan)
    who = f"rank {', '.join(map(str, silent))} gave no sign of life" if silent else "a rank failed or left"
    cause = " ".join(str(error).split())[:200]
    return f"rank {plan.rank} was waiting for {what}: {who} ({cause})"


def _silent_ranks(plan: Plan) -> list[int]:
    """The ranks to blame: dead ones, or else those that do not report the fault themselves within the grace time.

    Ranks that ended because of the same fault have reported it before.
    """
    if not dist.is_initialized():
        return []
    store = dist.PrefixStore("offbeat/faults", _get_default_store())
    dead = [rank for rank in plan.replicas if not _beacon_lit(rank)]
    if not _reported(store, plan.rank, mine=True):
        # The store lives on rank 0, unless a launcher holds it.
        return [] if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else [0]
    guilty = [rank for rank in dead if not _reported(store, rank)]
    if guilty:
        return guilty
    deadline = time.monotonic() + GRACE.total_seconds()
    missing = [rank for rank in plan.replicas if not _reported(store, rank)]
    while missing and time.monotonic() < deadline:
        time.sleep(0.05)
        missing = [rank for rank in missing if not _reported(store, rank)]
    return missing


def _reported(store: dist.Store, rank: int | None, mine: bool = False) -> bool:
    """Whether a rank has met the fault and said so; this one says so first."""
    try:
        if mine:
            store.set(f"{rank}", "met")
        store.wait([f"{rank}"], GRACE if mine else timedelta(milliseconds=10))
    except RuntimeError:
        return False
    return True


_beacon: socket.socket | None = None
_addresses: dict[int, tuple[str, int]] = {}


def light_beacon(plan: Plan) -> None:
    """Opens a port that the kernel closes with this process, and learns the other ranks' ports.

    A collective fails on every rank, sooner or later, when one of them dies; whose port is closed tells which.
    """
    global _beacon  # noqa: PLW0603 - one port serves every distribute() of a process
    store = dist.PrefixStore("offbeat/beacons", _get_default_store())
    if _beacon is None:
        _beacon = socket.create_server((_own_address(), 0), backlog=1024)
        host, port = _beacon.getsockname()[:2]
        store.set(f"{dist.get_rank()}", f"{host} {port}")
    for rank in plan.replicas:
        if rank not in _addresses:
            host, _, port = store.get(f"{rank}").decode().partition(" ")
            _addresses[rank] = host, int(port)


def _own_address() -> str:
    """The address of this machine that the job's other machines can reach."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing, it only chooses the interface.
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def _beacon_lit(rank: int) -> bool:
    address = _addresses.get(rank)
    if address is None:
        return True
    try:
        socket.create_connection(address, timeout=GRACE.total_seconds()).close()
    except OSError:
        return False
    return True
