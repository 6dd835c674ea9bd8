"""Shut down all runtimes of this process cleanly, however the script ends.

A backend's thread that needs the interpreter while it goes down, for a callback or because a wait has ended, aborts the
process. So before the interpreter does, every runtime waits for what it has put on the wire, breaks off what does not
end in time, and closes its channels, which joins their threads. Nothing is applied: who wants the last update has read
it or called `flush()`.

Threads of the job's own group stay. A thread of gloo that has ended a collective wakes whoever waits for it, and only
then lets go of its tensors, for which it needs the interpreter; on a busy machine that may be after the script's last
line (pytorch#190489). So the end also waits until these threads sleep.
"""

import atexit
import faulthandler
import importlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger("offbeat")

GRACE_SECONDS = 30.0
"""How far other ranks may be behind at the end; a hanging rank must not keep this one from ending."""
FAILED_GRACE_SECONDS = 1.0
"""The same if the script, and so the job, has failed."""
OWN_SECONDS = 8.0
"""After the grace time, for Offbeat's own part of the end of a failed script; then a GPU's driver whose peer has died
hangs, and the process is ended."""
LAST_RESORT_SECONDS = 60.0
"""The same for everything else that happens at the end."""
LOOKS = 3
"""How often in a row gloo's threads must be seen asleep."""
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
        _load_what_torch_loads_at_exit()
    _alive.add(runtime)


def _load_what_torch_loads_at_exit() -> None:
    """Keeps the exit code of Ctrl-C.

    Python notes that Ctrl-C ended the script, and forgets it when it runs code from text, as each named tuple does.
    It then ends with 1 instead of by the signal. Torch's compiler imports `tabulate` at exit, if it is installed.
    """
    with suppress(ImportError):
        importlib.import_module("tabulate")


def script_failed() -> bool:
    """Whether the interpreter ends by an uncaught exception, including Ctrl-C."""
    return hasattr(sys, "last_type")


def script_ended() -> bool:
    """Whether the main thread is through, and the interpreter ends."""
    return not threading.main_thread().is_alive()


def ends_by_exception() -> bool:
    """Whether the main thread is in an `except` or `finally` block, or reports an uncaught exception."""
    handled = sys._current_exceptions().get(threading.main_thread().ident or 0)
    # A tuple before Python 3.12.
    return script_failed() or (handled[1] if isinstance(handled, tuple) else handled) is not None


def _at_exit(process: int) -> None:
    """Closes everything, and bounds the time it may take. After a failure that holds to the end of the process."""
    if os.getpid() != process:
        # A forked process has none of the threads that would have to end.
        return
    if script_failed():
        _end_after(FAILED_GRACE_SECONDS + OWN_SECONDS)
        _close_all()
        _end_after(LAST_RESORT_SECONDS)
    else:
        _end_after(GRACE_SECONDS + LAST_RESORT_SECONDS)
        _close_all()
        faulthandler.cancel_dump_traceback_later()


def _end_after(seconds: float) -> None:
    """Ends the process then, unless it is called again or cancelled."""
    # No thread of Python's: a call that hangs in a driver may hold the interpreter's lock.
    with suppress(AttributeError, OSError, RuntimeError, ValueError):
        faulthandler.dump_traceback_later(seconds, exit=True)


def _close_all() -> None:
    deadline = time.monotonic() + (FAILED_GRACE_SECONDS if script_failed() else GRACE_SECONDS)
    left = list(_alive)
    while left:
        try:
            left[-1].close(deadline)
        except KeyboardInterrupt:
            # The user does not want to wait.
            deadline = time.monotonic()
            continue
        except Exception:
            log.exception("offbeat could not close its connections")
        left.pop()
    with suppress(KeyboardInterrupt):
        _until_idle(deadline)


def _until_idle(deadline: float) -> None:
    """Waits until gloo's threads sleep, having let go of the tensors of past collectives, or until `deadline`.

    One that holds some runs, is kept from running by other processes, or waits for the interpreter, which it gets
    while this one sleeps. One that sleeps holds none, or waits for other ranks.
    """
    looks = 0
    while looks < LOOKS and time.monotonic() < deadline:
        time.sleep(1e-3)
        looks = looks + 1 if not any(state in "RD" for state in _gloo_threads()) else 0


def _gloo_threads() -> list[str]:
    """The state of each thread that runs gloo's collectives, as Linux has it; none on other systems."""
    found = []
    for entry in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):
            name, _, rest = entry.read_text().partition("(")[2].rpartition(")")
            if name.startswith("pt_gloo"):
                found.append(rest.split()[0])
    return found


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
