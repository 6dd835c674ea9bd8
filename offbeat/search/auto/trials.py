"""Strategies + a cluster to run on → trials: what each took, or how it failed.

Trials run in processes of their own, one for each rank, launched with the variables torchrun sets. Whatever a trial
does (crash, hang, run out of memory) is recorded, and the next one starts in fresh processes. Trials of a
'package.module:function' share processes as long as all goes well, because starting torch takes longer than a trial.
"""

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.graph.estimate import operator_seconds
from offbeat.search.auto.store import Status, Trial
from offbeat.strategy import Strategy

JOB = ("-m", "offbeat.search.auto.job")
TASK = "OFFBEAT_TRIAL_TASK"
"""Variable that names a job's task file; the same as in `job`, which imports torch."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
_OUT_OF_MEMORY = ("out of memory", "MemoryError", "Cannot allocate memory", "can't allocate memory", "bad_alloc")


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
    """Where ranks are started: an `offbeat.emulate.Emulation` is one, `LocalRanks` another."""

    @property
    def world_size(self) -> int: ...
    def run(
        self, program: Any, *, timeout: float | None, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Sequence[Ended]: ...


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank on this machine ended."""

    rank: int
    returncode: int
    outcome: str
    seconds: float
    stderr: str


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
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with contextlib.ExitStack() as stack:
            logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(self.world_size)]
            began = time.monotonic()
            ranks: list[subprocess.Popen[bytes]] = []
            try:
                for rank, log in enumerate(logs):
                    variables = {**os.environ, **self._environment(rank, port), **(env or {})}
                    command = [sys.executable, *program]
                    # A session of its own: Ctrl-C is for the search, which then ends its ranks itself.
                    ranks.append(
                        subprocess.Popen(
                            command,
                            stdout=log,
                            stderr=log,
                            stdin=subprocess.DEVNULL,
                            env=variables,
                            start_new_session=True,
                        )
                    )
                ends = _await(ranks, began, timeout)
            finally:
                _end(ranks)
            texts = [_tail(log) for log in logs]
        ended = [
            RankEnd(rank, process.returncode, *ends.get(rank, ("stopped", time.monotonic() - began)), texts[rank])
            for rank, process in enumerate(ranks)
        ]
        failed = _first_failure(ended)
        if check and failed is not None:
            raise OffbeatError(f"rank {failed.rank} failed: {_last_words(failed)}")
        return ended

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        world = str(self.world_size)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


@dataclass(frozen=True)
class TrialOptions:
    """How long a trial lasts. The numbers of steps are the paper's."""

    warm_up: int = 10
    timed: int = 40
    early_steps: int = 5
    """Timed steps after which a clearly bad trial is stopped."""
    stop_ratio: float | None = 1.5
    """Times the best so far beyond which a trial is clearly bad; None lets all run to their end."""
    timeout_seconds: float = 300.0
    """Of one trial, with the start of its processes."""
    batch: int = 4
    """Trials that may share processes."""

    def __post_init__(self) -> None:
        for name in ("warm_up", "timed", "early_steps", "batch"):
            if getattr(self, name) < 1:
                raise OffbeatError(f"{name}: {getattr(self, name)} is not at least 1")
        if self.timeout_seconds <= 0:
            raise OffbeatError(f"timeout_seconds: {self.timeout_seconds} is not a duration")
        if self.stop_ratio is not None and self.stop_ratio <= 1:
            raise OffbeatError(f"stop_ratio: {self.stop_ratio} is not above 1")


@dataclass
class TrialRunner:
    """Runs strategies of one target: a training script, or 'package.module:function'."""

    machines: Machines
    target: str
    arguments: tuple[str, ...] = ()
    options: TrialOptions = field(default_factory=TrialOptions)
    launches: int = 0
    """Jobs started so far."""

    def __post_init__(self) -> None:
        if self.target.endswith(".py"):
            if not Path(self.target).is_file():
                raise OffbeatError(f"{self.target}: there is no such script")
            self.target = os.path.abspath(self.target)
        elif ":" not in self.target:
            raise OffbeatError(f"{self.target!r} is neither a script (.py) nor package.module:function")

    @property
    def batch(self) -> int:
        """Strategies one job can try; a script distributes its model once."""
        return 1 if self.target.endswith(".py") else self.options.batch

    def discover(self) -> ModelGraph:
        """The step's graph with measured compute times, from a run in which every rank trains alone."""
        lines, ends = self._launch([], None, None, None)
        if not lines or lines[0]["status"] != "done":
            failure = _failure(ends, self.options.timeout_seconds)
            said = lines[0]["error"] if lines else failure[1]
            raise OffbeatError(f"{self.target}: cannot be run once by itself: {said}")
        graph = ModelGraph.from_json(json.dumps(lines[0]["graph"]), origin=self.target)
        return with_compute_seconds(graph, lines[0]["forward_seconds"], lines[0]["backward_seconds"])

    def run(
        self,
        graph: ModelGraph,
        cluster: ClusterSpec,
        strategies: Sequence[Strategy],
        best_seconds: float | None = None,
    ) -> Iterator[Trial]:
        """One trial for each strategy, in order; a job that fails costs the strategy it was at, and no other."""
        tried = 0
        while tried < len(strategies):
            waiting = strategies[tried : tried + self.batch]
            lines, ends = self._launch(waiting, graph, cluster, best_seconds)
            trials = [_trial(strategy, line) for strategy, line in zip(waiting, lines, strict=False)]
            if len(lines) < len(waiting):
                status, error = _failure(ends, self.options.timeout_seconds * len(waiting))
                trials.append(Trial(waiting[len(lines)], status, error=error))
            done = [trial.seconds for trial in trials if trial.status == "done" and trial.seconds]
            best_seconds = min((*done, *(() if best_seconds is None else (best_seconds,))), default=None)
            tried += len(trials)
            yield from trials

    def _launch(
        self,
        strategies: Sequence[Strategy],
        graph: ModelGraph | None,
        cluster: ClusterSpec | None,
        best_seconds: float | None,
    ) -> tuple[list[dict[str, Any]], Sequence[Ended]]:
        options = self.options
        ratio = options.stop_ratio
        with tempfile.TemporaryDirectory(prefix="offbeat-trial-") as folder:
            here = Path(folder)
            if graph is not None and cluster is not None:
                (here / "graph.json").write_bytes(graph.to_json())
                (here / "cluster.json").write_text(cluster.model_dump_json())
            task = {
                "target": self.target,
                "arguments": list(self.arguments),
                "path": [entry for entry in sys.path if entry],
                "strategies": [json.loads(strategy.to_json()) for strategy in strategies],
                "graph": str(here / "graph.json"),
                "cluster": str(here / "cluster.json"),
                "results": str(here / "results.jsonl"),
                "warm_up": options.warm_up,
                "timed": options.timed,
                "early_steps": options.early_steps,
                "stop_above_seconds": None if ratio is None or best_seconds is None else ratio * best_seconds,
                "timeout_seconds": options.timeout_seconds,
            }
            (here / "task.json").write_text(json.dumps(task))
            self.launches += 1
            ends = self.machines.run(
                list(JOB),
                timeout=options.timeout_seconds * max(1, len(strategies)),
                env={TASK: str(here / "task.json"), "PYTHONPATH": os.pathsep.join(task["path"])},  # type: ignore[arg-type]
                check=False,
            )
            results = here / "results.jsonl"
            text = files.read_bytes(results, "results").decode() if results.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")], ends


def with_compute_seconds(graph: ModelGraph, forward_seconds: float, backward_seconds: float) -> ModelGraph:
    """The graph with both phases' measured times, shared out over its operators by their work."""
    seconds: dict[str, float] = {}
    totals = {"forward": forward_seconds, "backward": backward_seconds}
    for phase, total in totals.items():
        operators = [operator for operator in graph.operators if operator.phase == phase]
        # Peaks of an ordinary core: only the proportions count.
        work = [operator_seconds(operator, 5e10, 1e10) for operator in operators]
        whole = sum(work)
        for operator, share in zip(operators, work, strict=True):
            seconds[operator.name] = total * (share / whole if whole else 1 / len(operators))
    return graph.with_seconds(seconds)


def _trial(strategy: Strategy, line: dict[str, Any]) -> Trial:
    steps = tuple(float(value) for value in line["steps"])
    seconds = statistics.median(steps) if steps else None
    return Trial(strategy, line["status"], seconds, steps=steps, error=line.get("error", ""))


def _first_failure(ends: Sequence[Ended]) -> Ended | None:
    failed = [end for end in ends if end.outcome == "exited" and end.returncode]
    return min(failed, key=lambda end: end.seconds, default=None)


def _failure(ends: Sequence[Ended], timeout_seconds: float) -> tuple[Status, str]:
    """What ended a job that gave too few results."""
    failed = _first_failure(ends)
    if failed is None:
        late = [str(end.rank) for end in ends if end.outcome == "timed out"]
        if late:
            return "hung", f"after {timeout_seconds:g} s these ranks still ran: {', '.join(late)}"
        return "crashed", "the job ended without a result"
    # A rank that lost its peer fails soon after it, and may even be noticed first.
    for end in ends:
        if end.returncode == -signal.SIGKILL and end.outcome == "exited":
            return "out_of_memory", f"rank {end.rank} was killed, as the system does when memory runs out"
        if any(sign in end.stderr for sign in _OUT_OF_MEMORY):
            return "out_of_memory", f"rank {end.rank} ran out of memory: {_last_words(end)}"
    return "crashed", f"rank {failed.rank}: {_last_words(failed)}"


def _last_words(end: Ended) -> str:
    words = end.stderr.strip().rpartition("\n")[2].strip()
    return (words or f"exit code {end.returncode}")[:300]


def _await(
    ranks: Sequence["subprocess.Popen[bytes]"], began: float, timeout: float | None
) -> dict[int, tuple[str, float]]:
    """How and when each rank ended by itself, until all have, one has failed or time is up."""
    ends: dict[int, tuple[str, float]] = {}
    while len(ends) < len(ranks):
        for rank, process in enumerate(ranks):
            if rank not in ends and process.poll() is not None:
                ends[rank] = ("exited", time.monotonic() - began)
        if any(ranks[rank].returncode for rank in ends):
            # Others that fail for the same reason get a moment to say so.
            time.sleep(POLL_SECONDS)
            break
        if timeout is not None and time.monotonic() - began > timeout:
            late = {rank: ("timed out", timeout) for rank in range(len(ranks)) if rank not in ends}
            return ends | late
        time.sleep(POLL_SECONDS)
    return ends


def _end(ranks: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ends what still runs: asked first, then made."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + GRACE_SECONDS
        for process in ranks:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))


def _tail(log: Any, length: int = 8192) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - length))
    return log.read().decode(errors="replace")
