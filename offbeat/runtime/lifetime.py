"""Shut down all runtimes of this process cleanly, however the script ends.

A backend's thread that needs the interpreter while it goes down, for a callback or because a wait has ended, aborts the
process. So before the interpreter does, every runtime waits for what it has put on the wire, breaks off what does not
end in time, and closes its channels, which joins their threads. Nothing is applied: who wants the last update has read
it or called `flush()`.
"""

import atexit
import faulthandler
import logging
import os
import sys
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

log = logging.getLogger("offbeat")

GRACE_SECONDS = 30.0
"""How far other ranks may be behind at the end; a hanging rank must not keep this one from ending."""
FAILED_GRACE_SECONDS = 1.0
"""The same if the script, and so the job, has failed."""
LAST_RESORT_SECONDS = 60.0
"""After the grace time: a process that still hangs then, such as in a GPU's driver whose peer has died, is ended."""
CALLBACK_SECONDS = 0.05
"""Time for a thread that has run a Python callback to release it."""


class Closable(Protocol):
    """What must end before the interpreter does."""

    def close(self, deadline: float) -> None:
        """Waits for collectives in flight until `deadline` (time.monotonic) and releases threads and connections."""


_alive: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_exit(runtime: Closable) -> None:
    """Makes sure that `runtime` is closed before the interpreter shuts down."""
    if not len(_alive):
        # Registered late, so that it runs before what torch itself has registered.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit, os.getpid())
    _alive.add(runtime)


def script_failed() -> bool:
    """Whether the interpreter ends by an uncaught exception, including Ctrl-C."""
    return hasattr(sys, "last_type")


def _at_exit(process: int) -> None:
    """Closes everything, and bounds the time it may take. After a failure that holds to the end of the process."""
    if os.getpid() != process:
        # A forked process has none of the threads that would have to end.
        return
    # No thread of Python's: a call that hangs in a driver may hold the interpreter's lock.
    with suppress(AttributeError, OSError, RuntimeError, ValueError):
        grace = FAILED_GRACE_SECONDS if script_failed() else GRACE_SECONDS
        faulthandler.dump_traceback_later(grace + LAST_RESORT_SECONDS, exit=True)
    _close_all()
    if not script_failed():
        faulthandler.cancel_dump_traceback_later()


def _close_all() -> None:
    deadline = time.monotonic() + (FAILED_GRACE_SECONDS if script_failed() else GRACE_SECONDS)
    for runtime in list(_alive):
        try:
            runtime.close(deadline)
        except KeyboardInterrupt:
            # The user does not want to wait.
            deadline = time.monotonic()
            runtime.close(deadline)
        except Exception:
            log.exception("offbeat could not close its connections")


class Callbacks:
    """Works whose ends the backend's threads report in Python, which they cannot do once the interpreter ends."""

    def __init__(self) -> None:
        self.works: deque[Any] = deque()

    def add(self, work: Any) -> None:
        if not self.works:
            close_at_exit(self)
        while len(self.works) > 1 and self.works[0].is_completed():
            self.works.popleft()
        self.works.append(work)

    def close(self, deadline: float) -> None:
        """Waits for the callbacks until `deadline` (time.monotonic)."""
        while not all(work.is_completed() for work in self.works) and time.monotonic() < deadline:
            time.sleep(1e-3)
        time.sleep(CALLBACK_SECONDS)
        self.works.clear()


callbacks = Callbacks()
"""Per process: the caller may be gone before its collective has ended."""
