"""Run strategies as trials on a cluster, and report their times or failures.

Trials run in processes of their own, one for each rank, launched with the variables torchrun sets: on this machine
(`LocalRanks`), on several (`nodes`) or on an emulated cluster. Whatever a trial does (crash, hang, run out of memory)
is recorded, and the next one starts in fresh processes. Trials of a 'package.module:function' share processes as long
as all goes well, because starting torch takes longer than a trial; they are handed over when their job has ended.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.graph.model import divided
from offbeat.launch import (
    LOOPBACK,
    POLL_SECONDS,
    LocalJob,
    RankEnd,
    first_failure,
    free_port,
    last_words,
    servers_environment,
)
from offbeat.search.auto.store import Status, Trial
from offbeat.strategy import Strategy

JOB = ("-m", "offbeat.search.auto.job")
TASK = "OFFBEAT_TRIAL_TASK"
"""Variable with the name of the task file of a job's ranks."""
_OUT_OF_MEMORY = ("out of memory", "MemoryError", "Cannot allocate memory", "can't allocate memory", "bad_alloc")


class Machines(Protocol):
    """Where ranks are started: an `offbeat.emulate.Emulation` is one, `LocalRanks` and `LeadNode` are others."""

    @property
    def world_size(self) -> int: ...
    def cluster_spec(self) -> ClusterSpec:
        """The machines as known before anything is measured."""

    def run(
        self, program: Any, *, timeout: float | None, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Sequence[RankEnd]: ...


class LocalRanks:
    """Ranks on this machine, which communicate over loopback or the device's interconnect."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise OffbeatError(f"ranks: {world_size} is not at least 1")
        self.world_size = world_size

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec.local(self.world_size)

    def run(
        self, program: Sequence[str], *, timeout: float | None, env: Mapping[str, str] | None = None, check: bool = True
    ) -> list[RankEnd]:
        """Runs a Python program on every rank; all are ended when one fails or on timeout."""
        with LocalJob(program, range(self.world_size), self.world_size, (LOOPBACK, free_port(LOOPBACK)), env) as job:
            in_time = job.wait(timeout)
            if job.failed:
                # Others that fail for the same reason get a moment to say so.
                time.sleep(POLL_SECONDS)
            ends = job.finish(timed_out=not in_time)
        if check:
            require_success(ends)
        return ends


@dataclass(frozen=True)
class TrialOptions:
    """How long a trial lasts. The numbers of steps are the paper's."""

    warm_up: int = 10
    timed: int = 40
    early_steps: int = 5
    """Timed steps after which a clearly bad trial is stopped."""
    stop_ratio: float | None = 1.5
    """A trial slower than this many times the best so far is clearly bad; None never stops one."""
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

    def __post_init__(self) -> None:
        check_target(self.target)
        if self.target.endswith(".py"):
            self.target = os.path.abspath(self.target)

    def discover(self, servers: Sequence[int] = ()) -> ModelGraph:
        """The step's graph with measured compute times, from a run in which every rank but `servers` trains alone."""
        lines, ends = self._launch([], servers)
        found = lines[0] if lines else {}
        if found.get("status") != "done":
            said = found.get("error") or _failure(ends, self.options.timeout_seconds)[1]
            raise OffbeatError(f"{self.target}: failed in a single-process run: {said}")
        graph = ModelGraph.from_json(json.dumps(found["graph"]), origin=self.target)
        return with_compute_seconds(graph, found["forward_seconds"], found["backward_seconds"])

    def run(
        self, graph: ModelGraph, cluster: ClusterSpec, strategies: Sequence[Strategy], best_seconds: float | None = None
    ) -> Iterator[Trial]:
        """One trial per strategy, in order; a failing job costs only the strategy it was running."""
        # A script distributes its model once.
        batch = 1 if self.target.endswith(".py") else self.options.batch
        tried = 0
        while tried < len(strategies):
            waiting = strategies[tried : tried + batch]
            task = {"graph": json.loads(graph.to_json()), "cluster": cluster.model_dump_json()}
            if best_seconds is not None and self.options.stop_ratio is not None:
                task["stop_above_seconds"] = self.options.stop_ratio * best_seconds
            lines, ends = self._launch(waiting, cluster.servers, **task)
            trials = [_trial(strategy, line) for strategy, line in zip(waiting, lines, strict=False)]
            if len(lines) < len(waiting):
                status, error = _failure(ends, self.options.timeout_seconds * len(waiting))
                trials.append(Trial(waiting[len(lines)], status, error=error))
            done = [trial.took for trial in trials if trial.status == "done"]
            best_seconds = min(done if best_seconds is None else [*done, best_seconds], default=None)
            tried += len(trials)
            yield from trials

    def _launch(
        self, strategies: Sequence[Strategy], servers: Sequence[int], **task: Any
    ) -> tuple[list[dict[str, Any]], Sequence[RankEnd]]:
        """Runs one job; the lines it wrote, and how its ranks ended. `task` says what only trials need."""
        path = [entry for entry in sys.path if entry]
        with tempfile.TemporaryDirectory(prefix="offbeat-trial-") as folder:
            results, file = Path(folder) / "results.jsonl", Path(folder) / "task.json"
            task |= asdict(self.options) | {
                "target": self.target,
                "arguments": list(self.arguments),
                "path": path,
                "strategies": [json.loads(strategy.to_json()) for strategy in strategies],
                "results": str(results),
            }
            file.write_text(json.dumps(task))
            ends = self.machines.run(
                list(JOB),
                timeout=self.options.timeout_seconds * max(1, len(strategies)),
                env={TASK: str(file), "PYTHONPATH": os.pathsep.join(path), **servers_environment(servers)},
                check=False,
            )
            text = files.read_bytes(results, "results").decode() if results.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")], ends


def check_target(target: str) -> None:
    """Rejects a target that is neither an existing script nor the name of a function."""
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise OffbeatError(f"{target}: no such script")
    elif ":" not in target:
        raise OffbeatError(f"{target!r} is neither a script (.py) nor package.module:function")


def with_compute_seconds(graph: ModelGraph, forward_seconds: float, backward_seconds: float) -> ModelGraph:
    """The graph with both phases' measured times, distributed over its operators by their work."""
    seconds: dict[str, float] = {}
    for operators, total in ((graph.phase("forward"), forward_seconds), (graph.phase("backward"), backward_seconds)):
        # Peaks of an ordinary core: only the proportions count.
        seconds |= divided(total, {operator.name: operator.estimate(5e10, 1e10) for operator in operators})
    return graph.with_seconds(seconds)


def _trial(strategy: Strategy, line: dict[str, Any]) -> Trial:
    steps = tuple(float(value) for value in line["steps"])
    seconds = statistics.median(steps) if steps else None
    return Trial(strategy, line["status"], seconds, steps=steps, error=line.get("error", ""))


def _failure(ends: Sequence[RankEnd], timeout_seconds: float) -> tuple[Status, str]:
    """Why a job gave too few results."""
    failed = first_failure(ends)
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
            return "out_of_memory", f"rank {end.rank} ran out of memory: {last_words(end)}"
    return "crashed", f"rank {failed.rank}: {last_words(failed)}"


def require_success(ends: Sequence[RankEnd]) -> None:
    failed = first_failure(ends)
    if failed is not None:
        raise OffbeatError(f"rank {failed.rank} failed: {last_words(failed)}")
