"""Jobs of exit_job.py, two ranks each, and how they ended."""

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import free_port, stop_ranks
from zygote import zygote

JOB = Path(__file__).with_name("exit_job.py")
PATIENCE_SECONDS = 90.0
"""A job that has not ended by then hangs."""


@dataclass(frozen=True)
class Ended:
    """How one rank of a job ended."""

    code: int | None
    """As subprocess has it: negative for a signal, None if the rank had to be killed."""
    seconds: float
    """From the moment at which the first rank had done its steps."""
    said: str


def run_job(
    folder: Path,
    *arguments: str,
    after: str = "",
    signals: Sequence[tuple[int, int]] = (),
    delay: float = 0.0,
    leave: tuple[int, ...] = (),
) -> list[Ended]:
    """Runs a job to its end; `signals` (rank, number) are sent when all ranks have printed the line `after`.

    `delay` seconds pass before the first, and before each that differs from the one before it.

    Ranks in `leave` are not waited for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = folder / f"rank{rank}.log"
        ranks.append(zygote().start(JOB, arguments, log, {**job, **place}, pipes=False, whole_end=True))
    running = dict(enumerate(ranks))
    ended: dict[int, tuple[int | None, float]] = {}
    began = time.monotonic()
    deadline = began + PATIENCE_SECONDS
    hit = 0.0
    try:
        while set(running) - set(leave) and time.monotonic() < deadline:
            time.sleep(0.03)
            if after and not hit and all(f"{after}\n" in said(folder, rank) for rank in range(len(ranks))):
                hit = time.monotonic()
                for number, blows in itertools.groupby(signals, key=lambda blow: blow[1]):
                    time.sleep(delay)
                    # All at once: a rank that loses another one before it is hit ends as it should, with 1.
                    for rank in {rank for rank, _ in blows} & set(running):
                        os.kill(ranks[rank].pid, number)
            for rank, process in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[rank]
                    ended[rank] = code, time.monotonic() - (hit or began)
    finally:
        stop_ranks(ranks)
    return [Ended(*ended.get(rank, (None, PATIENCE_SECONDS)), said(folder, rank)) for rank in range(len(ranks))]


def said(folder: Path, rank: int) -> str:
    path = folder / f"rank{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""
