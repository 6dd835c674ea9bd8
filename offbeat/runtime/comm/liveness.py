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
from contextlib import suppress
from datetime import timedelta

from offbeat.runtime.comm.protocol import World

GRACE = timedelta(seconds=3)
"""How long a rank that met a fault waits for the others to say that they met it too."""
_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 1.0


class Liveness:
    """This rank's port, and the addresses of the others'."""

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.world = world
        self.addresses: dict[int, tuple[str, int]] = {}
        address = _own_address()
        self.port = None if address is None else socket.create_server((address, 0), backlog=1024)
        mine = None if self.port is None else self.port.getsockname()[:2]
        world.set(f"offbeat/liveness/{self.rank}", json.dumps(mine).encode())

    def find(self, ranks: Iterable[int]) -> None:
        """Learns the others' addresses; every rank must have opened its port."""
        for rank in ranks:
            if rank not in self.addresses and rank != self.rank:
                address = json.loads(self.world.get(f"offbeat/liveness/{rank}"))
                if address is not None:
                    self.addresses[rank] = tuple(address)
        self._read()

    def blame(self) -> list[int]:
        """Ranks that are dead, or else those that do not say within the grace time that they met the fault too."""
        heard: set[int] = set()
        deadline = time.monotonic() + GRACE.total_seconds()
        told = False
        while True:
            for rank, blamed in self._read():
                heard.add(rank)
                if blamed:
                    return sorted(blamed)
            missing = [rank for rank in self.addresses if rank not in heard]
            dead = [rank for rank in missing if not self._reach(rank)]
            if dead or not missing or time.monotonic() >= deadline:
                self._tell_all(dead or missing)
                return dead or missing
            if not told:
                self._tell_all([])
                told = True
            time.sleep(_POLL_SECONDS)

    def _tell_all(self, blames: list[int]) -> None:
        for rank in self.addresses:
            self._reach(rank, json.dumps({"rank": self.rank, "blames": blames}).encode())

    def _reach(self, rank: int, message: bytes = b"") -> bool:
        """Whether the rank's port is open; leaves the message there."""
        try:
            with socket.create_connection(self.addresses[rank], timeout=_CONNECT_SECONDS) as connection:
                connection.sendall(message)
        except OSError:
            return False
        return True

    def _read(self) -> list[tuple[int, list[int]]]:
        """The messages that wait at this rank's port: whose they are, and which ranks they blame."""
        messages = []
        while self.port is not None:
            self.port.settimeout(0)
            try:
                connection, _ = self.port.accept()
            except OSError:
                break
            with connection:
                connection.settimeout(_CONNECT_SECONDS)
                # One that is broken, or says nothing, only wants to know that this rank is alive.
                with suppress(OSError, ValueError, TypeError, KeyError):
                    message = json.loads(connection.recv(1 << 16))
                    messages.append((int(message["rank"]), [int(each) for each in message["blames"]]))
        return messages


def _own_address() -> str | None:
    """The address at which the job's other machines reach this one; None where the launcher does not tell."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing, it only chooses the interface.
            probe.connect((os.environ["MASTER_ADDR"], 9))
            return probe.getsockname()[0]
    except (KeyError, OSError):
        return None
