"""Strategies + a cluster to run on → trials: what each took, or how it failed.

Trials run in processes of their own, one for each rank, launched with the variables torchrun sets: on this machine
(`launch`), on several (`nodes`) or on an emulated cluster. Whatever a trial does (crash, hang, run out of memory) is
recorded, and the next one starts in fresh processes. Trials of a 'package.module:function' share processes as long as
all goes well, because starting torch takes longer than a trial; they are handed over when their job has ended.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.graph.estimate import operator_seconds
from offbeat.search.auto.launch import TASK, Ended, Machines, first_failure, last_words
from offbeat.search.auto.store import Status, Trial
from offbeat.strategy import Strategy

JOB = ("-m", "offbeat.search.auto.job")
_OUT_OF_MEMORY = ("out of memory", "MemoryError", "Cannot allocate memory", "can't allocate memory", "bad_alloc")


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
        check_target(self.target)
        if self.target.endswith(".py"):
            self.target = os.path.abspath(self.target)

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
            task = {
                "target": self.target,
                "arguments": list(self.arguments),
                "path": [entry for entry in sys.path if entry],
                "strategies": [json.loads(strategy.to_json()) for strategy in strategies],
                "graph": None if graph is None else json.loads(graph.to_json()),
                "cluster": None if cluster is None else cluster.model_dump_json(),
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


def check_target(target: str) -> None:
    """Refuses what is neither a script that exists nor the name of a function."""
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise OffbeatError(f"{target}: there is no such script")
    elif ":" not in target:
        raise OffbeatError(f"{target!r} is neither a script (.py) nor package.module:function")


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


def _failure(ends: Sequence[Ended], timeout_seconds: float) -> tuple[Status, str]:
    """What ended a job that gave too few results."""
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
