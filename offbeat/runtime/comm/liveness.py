"""Find the ranks that caused a failure of the job.

When a rank dies, collectives fail on the others one by one, some only because a survivor has ended. So every rank keeps
a port open from the start. The kernel closes it with the process, which tells a dead rank from a busy one, and holds
what others write to it until somebody reads: a survivor that finds the dead rank tells all others before it ends. No
store is needed, which may have died with its rank.

Gloo's collectives fail on the host, which then asks for the cause. Those of NCCL run on the GPU: when a rank dies
they never end, and the host waits with them, such as in `item()`. There a thread (`DeathWatch`) holds a connection to
every rank's port, which breaks with the process at its other end, and ends this process. It leaves a script that ends
by itself alone, for example because all ranks got the same Ctrl-C: the exit code is then the script's own, and
`offbeat.runtime.lifetime` sees to it that the end does not hang.
"""

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

from offbeat.runtime.comm.protocol import World
from offbeat.runtime.lifetime import LAST_RESORT_SECONDS, close_at_exit, ends_by_exception, script_ended, script_failed

GRACE = timedelta(seconds=3)
"""How long a rank that saw a failure waits for the others to report it too."""
_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 1.0
_WATCH_SECONDS = 0.5
_LAST_SECONDS = 2.0
"""Time between a rank's death and the end of a survivor: all survivors must see the death first."""
NO_SIGN = "gave no sign of life"
"""What is said of a lost rank."""


class Liveness:
    """This rank's port, and the addresses of the others'."""

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.world = world
        self.addresses: dict[int, tuple[str, int]] = {}
        self.left: set[int] = set()
        """Ranks that have said goodbye."""
        self._reading = threading.Lock()
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

    def dead(self) -> list[int]:
        """Ranks whose process has ended, as their closed ports show."""
        return [rank for rank in self.addresses if not self._reach(rank)]

    def blame(self) -> list[int]:
        """The dead ranks, or else those that do not report the failure within the grace time."""
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

    def say_farewell(self) -> None:
        """Tells all others that this rank ends because its script does."""
        self._tell_all([], leaves=True)

    def has_left(self, rank: int) -> bool:
        """Whether a rank that is gone said goodbye before."""
        self._read()
        return rank in self.left

    def _tell_all(self, blames: list[int], leaves: bool = False) -> None:
        for rank in self.addresses:
            self._reach(rank, json.dumps({"rank": self.rank, "blames": blames, "leaves": leaves}).encode())

    def _reach(self, rank: int, message: bytes = b"") -> bool:
        """Whether the rank's port is open; leaves the message there."""
        try:
            with socket.create_connection(self.addresses[rank], timeout=_CONNECT_SECONDS) as connection:
                connection.sendall(message)
        except OSError:
            return False
        return True

    def _read(self) -> list[tuple[int, list[int]]]:
        """The messages waiting at this rank's port: their senders, and the ranks they blame."""
        messages = []
        with self._reading:
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
                        if message["leaves"]:
                            self.left.add(int(message["rank"]))
                        else:
                            messages.append((int(message["rank"]), [int(each) for each in message["blames"]]))
        return messages


class DeathWatch(threading.Thread):
    """Ends this process when another rank has died: see above."""

    def __init__(self, liveness: Liveness) -> None:
        super().__init__(name="offbeat-death-watch", daemon=True)
        self.liveness = liveness
        self._held: dict[int, socket.socket] = {}
        close_at_exit(self)
        _watches.append(self)

    def close(self, deadline: float) -> None:
        """At the end of the script: tells the others, or, if it has failed, the user who failed before."""
        if not script_failed():
            self.liveness.say_farewell()
        elif not isinstance(sys.last_value, KeyboardInterrupt) and NO_SIGN not in str(sys.last_value):
            # On a GPU another rank's death may show as any error of NCCL's or the driver's.
            dead = [rank for rank in self.liveness.dead() if not self.liveness.has_left(rank)]
            if dead:
                self._say_who_died("failed", dead)

    def run(self) -> None:
        while not script_ended():
            dead = [rank for rank in list(self.liveness.addresses) if not self._lives(rank)]
            if dead:
                self._end_process(dead)
            # Something to read means that the other end has closed: it never writes.
            broken = select.poll()
            for connection in self._held.values():
                broken.register(connection, select.POLLIN)
            broken.poll(1000 * _WATCH_SECONDS)

    def _end_process(self, dead: list[int]) -> None:
        """Ends this process, unless its script ends first; one that handles an exception has time to."""
        found = running = time.monotonic()
        while True:
            now = time.monotonic()
            if script_ended():
                return
            if ends_by_exception() and now < found + LAST_RESORT_SECONDS:
                running = now
            if now >= running + _LAST_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
        self._say_who_died("cannot go on", dead)
        os._exit(1)

    def _say_who_died(self, what: str, dead: list[int]) -> None:
        who = ", ".join(map(str, dead))
        print(
            f"offbeat: WorkerLost: rank {self.liveness.rank} {what}: rank {who} {NO_SIGN} (its process has ended)",
            file=sys.stderr,
            flush=True,
        )

    def _lives(self, rank: int) -> bool:
        """Whether the rank's process is alive or has said goodbye; reconnects if its port was only read."""
        if rank in self.liveness.left:
            return True
        connection = self._held.get(rank)
        if connection is not None:
            try:
                connection.recv(1)
            except BlockingIOError:
                return True
            except OSError:
                pass
            connection.close()
            del self._held[rank]
        try:
            connection = socket.create_connection(self.liveness.addresses[rank], timeout=_CONNECT_SECONDS)
        except (ConnectionRefusedError, ConnectionResetError):
            return self.liveness.has_left(rank)
        except OSError:
            # A machine that does not answer now may do so later.
            return True
        # Who reads its port must not wait for a message.
        with suppress(OSError):
            connection.sendall(b"{}")
        connection.setblocking(False)
        self._held[rank] = connection
        return True


_watches: list[DeathWatch] = []
"""Kept to say goodbye: the thread ends with the script, before anything is closed."""


def _own_address() -> str | None:
    """The address at which the job's other machines reach this one; None if the launcher does not say."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing, it only chooses the interface.
            probe.connect((os.environ["MASTER_ADDR"], 9))
            return probe.getsockname()[0]
    except (KeyError, OSError):
        return None
