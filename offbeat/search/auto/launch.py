"""Where trials run: what starts a program on every rank, on this machine too, and which rank a failure began with."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from offbeat.errors import OffbeatError
from offbeat.launch import LOOPBACK, POLL_SECONDS, LocalJob, RankEnd, free_port

TASK = "OFFBEAT_TRIAL_TASK"
"""Variable that names the file which says what the ranks of a job are to do."""
_LOST_PEER = ("WorkerLost", "closed by peer", "reset by peer", "Broken pipe", "connection lost", "timed out waiting")


class Ended(Protocol):
    """How one rank ended; `offbeat.emulate.Result` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def returncode(self) -> int: ...
    @property
    def outcome(self) -> str:
        """'exited', 'stopped' or 'timed out'."""

    @property
    def seconds(self) -> float: ...
    @property
    def stderr(self) -> str: ...


class Machines(Protocol):
    """Where ranks are started: an `offbeat.emulate.Emulation` is one, `LocalRanks` and `LeadNode` are others."""

    @property
    def world_size(self) -> int: ...
    def run(
        self, program: Any, *, timeout: float | None, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Sequence[Ended]: ...


class LocalRanks:
    """Ranks on this machine, which talk over loopback or within the device's interconnect."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise OffbeatError(f"ranks: {world_size} is not at least 1")
        self.world_size = world_size

    def run(
        self,
        program: Sequence[str],
        *,
        timeout: float | None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> list[RankEnd]:
        """Runs a Python program on every rank; all are ended when one fails or time is up."""
        master = (LOOPBACK, free_port(LOOPBACK))
        with LocalJob(program, range(self.world_size), self.world_size, master, env) as job:
            in_time = job.wait(timeout)
            if job.failed:
                # Others that fail for the same reason get a moment to say so.
                time.sleep(POLL_SECONDS)
            ends = job.finish(timed_out=not in_time)
        if check:
            require_success(ends)
        return ends


def require_success(ends: Sequence[Ended]) -> None:
    failed = first_failure(ends)
    if failed is not None:
        raise OffbeatError(f"rank {failed.rank} failed: {last_words(failed)}")


def first_failure(ends: Sequence[Ended]) -> Ended | None:
    """The rank whose error is the cause: one that only lost a peer fails too, and may even be noticed first."""
    failed = [end for end in ends if end.outcome == "exited" and end.returncode]
    return min(failed, key=lambda end: (any(sign in last_words(end) for sign in _LOST_PEER), end.seconds), default=None)


def last_words(end: Ended) -> str:
    """The last line that a rank wrote, which names the error if it was one."""
    words = end.stderr.strip().rpartition("\n")[2].strip()
    return (words or f"exit code {end.returncode}")[:300]
