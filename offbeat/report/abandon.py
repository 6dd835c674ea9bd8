"""Run a call that ends as soon as its client has disconnected.

A page that cancels a replay, or is closed, closes its connection. Replays are plain Python around short compiled
kernels, so the thread that replays is interrupted between two of its instructions; a kernel ends first.
"""

import ctypes
import select
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

WATCH_SECONDS = 0.05
_Result = TypeVar("_Result")


class Abandoned(BaseException):
    """The client has left: no `except Exception` on the way may keep the call going."""


def client_has_left(connection: socket.socket, wait_seconds: float = 0.0) -> bool:
    """Whether the other end has closed the connection, told after at most `wait_seconds`."""
    try:
        readable, _, _ = select.select([connection], [], [], wait_seconds)
        return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


@contextmanager
def waiting_turn(lock: threading.Lock, connection: socket.socket) -> Generator[None, None, None]:
    """Holds the lock for the block; Abandoned if the client leaves before it is free."""
    while not lock.acquire(timeout=WATCH_SECONDS):
        if client_has_left(connection):
            raise Abandoned
    try:
        yield
    finally:
        lock.release()


def while_connected(connection: socket.socket, call: Callable[[], _Result]) -> _Result:
    """The result of `call`; raises Abandoned inside it when the client leaves."""
    thread, ended, ending = threading.get_ident(), threading.Event(), threading.Lock()

    def watch() -> None:
        while not ended.is_set():
            if client_has_left(connection, WATCH_SECONDS):
                with ending:
                    if not ended.is_set():
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Abandoned))
                return
            # A client that has sent more than its request makes the connection readable for good.
            ended.wait(WATCH_SECONDS)

    threading.Thread(target=watch, name="offbeat-client", daemon=True).start()
    try:
        return call()
    finally:
        with ending:
            ended.set()
