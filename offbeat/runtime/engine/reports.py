"""What the engine does → whoever observes it."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from offbeat.plan import Task
from offbeat.runtime.sync import Synchroniser
from offbeat.timeline import Kind
from offbeat.timeline.observer import Observer


class Reports:
    """Tells a recorder everything, and a timekeeper of collectives only."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.timekeeper: Observer | None = None
        self.step = 0

    def collective(self, synchroniser: Synchroniser, task: Task, queued: float) -> None:
        """A collective has just been issued; its end is reported once the backend says so."""
        work, issued = synchroniser.works.get(task.index), time.perf_counter()
        for observer in (self.observer, self.timekeeper):
            if observer is not None and work is not None:
                work.report_end(partial(observer.communication, self.step, task, queued, issued))

    @contextmanager
    def local(self, kind: Kind, messages: tuple[int, ...] = ()) -> Generator[None, None, None]:
        """Reports how long something took on this rank."""
        if self.observer is None:
            yield
            return
        begin = time.perf_counter()
        yield
        self.observer.local(kind, messages, begin, time.perf_counter())
