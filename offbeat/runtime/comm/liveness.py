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
