"""Shut down the sockets of a gloo process group.

Gloo has no call that ends a collective in flight: its abort() and shutdown() do nothing to it, and deleting the group
waits for it. Without connections it fails at once, on every rank, and the group's threads end.
"""

import contextlib
import os
import socket
from pathlib import Path

OpenSocket = tuple[int, int]
"""A descriptor, and the inode that distinguishes it from a later socket with the same descriptor."""

_DESCRIPTORS = Path("/proc/self/fd")


def open_sockets() -> frozenset[OpenSocket]:
    """This process's sockets; none if the system does not list them."""
    found = set()
    if _DESCRIPTORS.exists():
        for entry in os.listdir(_DESCRIPTORS):
            # The listing's own descriptor is gone already, and other threads close theirs.
            with contextlib.suppress(OSError):
                if os.readlink(_DESCRIPTORS / entry).startswith("socket:"):
                    found.add((int(entry), os.fstat(int(entry)).st_ino))
    return frozenset(found)


def shut_down(sockets: frozenset[OpenSocket]) -> None:
    """Shuts these connections down; the owner of the sockets still has to close them."""
    for descriptor, inode in sockets & open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if os.fstat(connection.fileno()).st_ino == inode:
                # Fails for a socket that only listens, which gloo cannot do without.
                connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)
