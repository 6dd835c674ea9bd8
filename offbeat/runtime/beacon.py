"""A fault of the job → the ranks to blame for it.

When a rank dies, collectives fail on the others one by one, some only because a survivor has ended. So every rank keeps
a port open from the start. The kernel closes it with the process, which tells a dead rank from a busy one, and holds
what others write to it until somebody reads: a survivor that finds the dead rank tells all others before it ends. No
thread is needed, and no store, which may have died with its rank.
"""

import json
import os
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

GRACE = timedelta(seconds=3)
"""How long a rank that met a fault waits for the others to say that they met it too."""
_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 1.0


class Beacon:
    """This rank's port, and the addresses of the others'."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.job = _get_default_store()
        self.addresses: dict[int, tuple[str, int]] = {}
        address = _own_address()
        self.port = None if address is None else socket.create_server((address, 0), backlog=1024)
        store = dist.PrefixStore("offbeat/beacons", self.job)
        store.set(str(rank), json.dumps(None if self.port is None else self.port.getsockname()[:2]))

    def find(self, ranks: Iterable[int]) -> None:
        """Learns the others' addresses; every rank must have made its beacon."""
        store = dist.PrefixStore("offbeat/beacons", self.job)
        for rank in ranks:
            if rank not in self.addresses and rank != self.rank:
                address = json.loads(store.get(str(rank)))
                if address is not None:
                    self.addresses[rank] = (address[0], address[1])
        self._read()

    def blame(self) -> list[int]:
        """Ranks that are dead, or else those that do not say within the grace time that they met the fault too."""
        heard: set[int] = set()
        deadline = time.monotonic() + GRACE.total_seconds()
        told = False
        while True:
            for message in self._read():
                heard.add(message["rank"])
                if message["blames"]:
                    return sorted(message["blames"])
            missing = [rank for rank in self.addresses if rank not in heard]
            dead = [rank for rank in missing if not self._tell(rank, None)]
            over = time.monotonic() >= deadline
            if dead or over or not missing:
                blamed = dead or missing
                self._tell_all(blamed)
                return blamed
            if not told:
                self._tell_all([])
                told = True
            time.sleep(_POLL_SECONDS)

    def _tell_all(self, blames: list[int]) -> None:
        for rank in self.addresses:
            self._tell(rank, {"rank": self.rank, "blames": blames})

    def _tell(self, rank: int, message: dict[str, Any] | None) -> bool:
        """Whether the rank's port is open; leaves a message there if there is one."""
        try:
            with socket.create_connection(self.addresses[rank], timeout=_CONNECT_SECONDS) as connection:
                if message is not None:
                    connection.sendall(json.dumps(message).encode())
        except OSError:
            return False
        return True

    def _read(self) -> list[dict[str, Any]]:
        """The messages that wait at this rank's port."""
        messages = []
        while self.port is not None:
            self.port.settimeout(0)
            try:
                connection, _ = self.port.accept()
            except OSError:
                break
            with connection:
                connection.settimeout(_CONNECT_SECONDS)
                try:
                    message = json.loads(connection.recv(1 << 16))
                    messages.append({"rank": int(message["rank"]), "blames": [int(each) for each in message["blames"]]})
                except (OSError, ValueError, TypeError, KeyError):
                    continue
        return messages


_lit: Beacon | None = None


def light(ranks: Iterable[int]) -> None:
    """Opens this process's port, once for a job, and finds those of the given ranks."""
    global _lit  # noqa: PLW0603 - one port serves every distribute() of a job
    if _lit is None or _lit.job is not _get_default_store():
        _lit = Beacon(dist.get_rank())
    _lit.find(ranks)


def lost_ranks() -> list[int]:
    """Whom a fault that this rank has met is to be blamed on; nobody if that cannot be told."""
    return _lit.blame() if _lit is not None and _lit.addresses else []


def _own_address() -> str | None:
    """The address at which the job's other machines reach this one; None where the launcher does not tell."""
    if "MASTER_ADDR" not in os.environ:
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing, it only chooses the interface.
            probe.connect((os.environ["MASTER_ADDR"], 9))
            return probe.getsockname()[0]
    except OSError:
        return None
