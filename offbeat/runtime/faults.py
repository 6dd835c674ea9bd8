"""Turn an error of the communication backend into one that names the task and the ranks it was waiting for."""

from offbeat.plan import Plan, Task
from offbeat.runtime.comm import CommunicationFailed
from offbeat.runtime.sync import Synchroniser


class WorkerLost(RuntimeError):
    """Another rank died or stopped answering."""


class explain:
    """Turns a backend error into WorkerLost, naming what was waited for and the ranks that gave no sign of life.

    Of a synchroniser that is the task, by default the first in flight, and its variables. Every message passes through
    several of these, and a generator as context manager would take several times as long.
    """

    __slots__ = ("plan", "task", "what")

    def __init__(self, plan: Plan, what: Synchroniser | str, task: Task | None = None) -> None:
        self.plan, self.what, self.task = plan, what, task

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CommunicationFailed):
            what = self.what if isinstance(self.what, str) else _name(self.plan, self.what, self.task)
            raise worker_lost(self.plan.rank, what, error) from error


def worker_lost(rank: int | None, waited_for: str, error: CommunicationFailed) -> WorkerLost:
    """The error that this rank ends with."""
    silent = error.lost_ranks()
    who = f"rank {', '.join(map(str, silent))} gave no sign of life" if silent else "a rank failed or left"
    cause = " ".join(str(error).split())[:200]
    return WorkerLost(f"rank {rank} was waiting for {waited_for}: {who} ({cause})")


def _name(plan: Plan, synchroniser: Synchroniser, task: Task | None) -> str:
    message = synchroniser.message
    waiting = task or next((t for t in plan.tasks if t.index in synchroniser.works), None)
    waiting = waiting or next(t for t in plan.tasks if t.message == message.index)
    names = ", ".join(message.variables[:3]) + (", …" if len(message.variables) > 3 else "")
    return f"task {waiting.name} ({names}) with ranks {list(waiting.ranks)}"
