"""A job under way → a better plan for it, without a restart and without a change in the numbers.

After a warm-up the tuner records some steps in place. Rank 0 makes a profile of them, predicts what other strategies
would take, and puts its choice into the job's store; every rank then switches between the same two steps. The new plan
is kept only if real steps are faster with it. Later, when steps have become longer or shorter than they were, it looks
again. Every decision is logged.
"""

import json
import logging
import time
import zlib
from collections.abc import Generator
from statistics import median
from typing import Any

import orjson
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.plan import lower
from offbeat.profile.measure import Profile, profile_in_place
from offbeat.profile.recorder import MemoryRecorder
from offbeat.runtime.distribute import Runtime
from offbeat.runtime.retime import fit_link
from offbeat.search.candidates import Candidate, candidates
from offbeat.strategy import Strategy

log = logging.getLogger("offbeat")

WARM_UP_STEPS = 6
"""The engine rebuilds its order after step 4."""
UNRECORDED_STEPS = 2
"""The last of these, in that order."""
RECORDED_STEPS = 5
SETTLING_STEPS = 1
TIMED_STEPS = 4
MOST_TRIALS = 3
WORTH_TRYING = 0.01
"""Predicted gain from which a switch is worth a trial."""
CLOSE, CLOSE_WHEN_SLOW = 0.25, 1.0
"""A plan of another kind is tried too if its prediction is within this share of the present plan's real steps, or
within the second where those take `SLOW` times what was predicted: replay knows nothing of processors that compute and
communication share."""
SLOW = 1.1
WATCHED_STEPS = 25
DRIFT = 0.2
"""Share by which steps must have changed before the search starts over."""
MOST_RECORDING_RANKS = 8
_tuners = 0


class Tuner:
    """Watches one job from its steps' ends and improves its plan."""

    def __init__(self, runtime: Runtime, graph: ModelGraph, cluster: ClusterSpec) -> None:
        global _tuners  # noqa: PLW0603 - keys in the store must differ from those of an earlier tuner
        _tuners += 1
        self.runtime = runtime
        self.graph = graph
        self.cluster = cluster
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.store = dist.PrefixStore(f"offbeat/online/{_tuners}", _get_default_store())
        self.questions = 0
        self.usual = 0.0
        """Seconds of a step with the present plan."""
        self.phases = self._run()
        next(self.phases)
        self.ended_at = time.perf_counter()
        self.seconds = 0.0
        self._listen()

    def _listen(self) -> None:
        """Switching makes a new engine, which must be listened to again."""
        hooks = self.runtime.engine.step_hooks
        if self.after_step not in hooks:
            hooks.append(self.after_step)

    def after_step(self) -> None:
        """The end of a step: the only moment at which anything changes."""
        now = time.perf_counter()
        self.seconds, self.ended_at = now - self.ended_at, now
        next(self.phases)
        self._listen()
        # What the tuner itself took is not the next step's.
        self.ended_at = time.perf_counter()

    # The phases; each `yield` is one step of training

    def _run(self) -> Generator[None, None, None]:
        seconds = []
        for _ in range(WARM_UP_STEPS + 1):
            yield
            seconds.append(self.seconds)
        self.usual = median(seconds[-UNRECORDED_STEPS:])
        while True:
            yield from self._improve()
            yield from self._watch()

    def _improve(self) -> Generator[None, None, None]:
        traces = yield from self._record()
        usual = self.usual
        tried: list[str] = []
        for _ in range(MOST_TRIALS):
            chosen = self._agree(self._choose(traces, usual, tried) if self.rank == 0 else None)
            if chosen is None:
                return
            tried.append(chosen["kind"])
            before = self.runtime.plan.strategy
            graph = self.graph
            self.graph = ModelGraph.from_json(chosen["graph"])
            self._switch(Strategy.from_json(chosen["strategy"]))
            found = yield from self._time()
            if self._agree(found < usual):
                log.info("offbeat keeps '%s': %.1f ms instead of %.1f ms", chosen["name"], found * 1e3, usual * 1e3)
                usual = self.usual = found
            else:
                log.info(
                    "offbeat goes back from '%s': %.1f ms, %.1f ms before", chosen["name"], found * 1e3, usual * 1e3
                )
                self.graph = graph
                self._switch(before)

    def _record(self) -> Generator[None, None, list[bytes]]:
        """Some steps with a recorder; returns its lines."""
        recorder = MemoryRecorder()
        with recorder:
            seconds = []
            for number in range(RECORDED_STEPS + 1):
                yield
                recorder.step()
                if number:
                    seconds.append(self.seconds)
        # Recording takes a little time too, which a plan on trial must not win by.
        self.usual = min(self.usual, median(seconds))
        self.link = self._measure_link()
        return self._gather(recorder.lines)

    def _measure_link(self) -> tuple[float, float]:
        """Every rank takes part; outstanding updates must not be on the wire."""
        engine = self.runtime.engine
        engine.settle_all()
        return fit_link(engine.channels.control, next(iter(engine.parameters.values())).device)

    def _gather(self, lines: list[dict[str, Any]]) -> list[bytes]:
        """The recorded lines of the first ranks, on rank 0."""
        recording = range(min(self.world, MOST_RECORDING_RANKS))
        self.questions += 1
        if self.rank in recording and self.rank:
            self.store.set(f"trace/{self.questions}/{self.rank}", zlib.compress(orjson.dumps(lines), 1))
        if self.rank:
            return []
        others = [self.store.get(f"trace/{self.questions}/{rank}") for rank in recording[1:]]
        return [zlib.compress(orjson.dumps(lines), 1), *others]

    def _time(self) -> Generator[None, None, float]:
        for _ in range(SETTLING_STEPS):
            yield
        seconds = []
        for _ in range(TIMED_STEPS):
            yield
            seconds.append(self.seconds)
        return median(seconds)

    def _watch(self) -> Generator[None, None, None]:
        """Returns when steps have become longer or shorter for good."""
        off = 0
        while off < 2:
            seconds = []
            for _ in range(WATCHED_STEPS):
                yield
                seconds.append(self.seconds)
            now = median(seconds)
            off = off + 1 if self._agree(abs(now / self.usual - 1) > DRIFT) else 0
        log.info("offbeat plans again: steps take %.1f ms instead of %.1f ms", now * 1e3, self.usual * 1e3)
        self.usual = now

    # What the ranks agree on

    def _agree(self, answer: Any) -> Any:
        """Rank 0's answer, on every rank."""
        self.questions += 1
        key = f"answer/{self.questions}"
        if self.rank == 0:
            self.store.set(key, json.dumps(answer))
            return answer
        return json.loads(self.store.get(key))

    def _switch(self, strategy: Strategy) -> None:
        plan = lower(self.graph, self.cluster, strategy.model_copy(update={"graph": "", "cluster": ""}), rank=self.rank)
        self.runtime.switch(plan)

    # What rank 0 decides

    def _choose(self, lines: list[bytes], usual: float, tried: list[str]) -> dict[str, Any] | None:
        try:
            profile = self._profile(lines)
            barrier = self._must_wait()
            found = candidates(profile.graph, profile.cluster, profile.costs, profile.strategy, barrier)
        except Exception as error:
            # The other ranks wait for an answer, and a job must not end because it could not be made faster.
            log.warning("offbeat keeps its plan, because the recorded steps cannot be replayed: %s", error)
            return None
        present = next(candidate for candidate in found if candidate.name == "present")
        best = _worth_trying(found, present, usual, tried)
        if best is None:
            return None
        log.info("offbeat predicts %s", _describe(present, best, usual))
        return {
            "name": best.name,
            "kind": best.kind,
            "strategy": best.strategy.to_json(),
            "graph": profile.graph.to_json().decode(),
        }

    def _must_wait(self) -> bool:
        """Whether no plan can run deferred here: because of the loop, or of what the present one would else do."""
        engine = self.runtime.engine
        asked = self.runtime.plan.strategy.schedule.mode == "barrier"
        return engine.bound_by_loop or (engine.wanted_mode == "barrier" and not asked)

    def _profile(self, gathered: list[bytes]) -> Profile:
        recorded = [orjson.loads(zlib.decompress(packed)) for packed in gathered]
        return profile_in_place(recorded, self.link, self.world, self.runtime.plan.strategy, self.graph)


def _worth_trying(found: list[Candidate], present: Candidate, usual: float, tried: list[str]) -> Candidate | None:
    """The quickest candidate of a kind that has not been tried, if it may be quicker than the present plan."""
    close = CLOSE_WHEN_SLOW if usual > SLOW * present.seconds else CLOSE
    for candidate in found:
        if candidate is present or candidate.kind in tried:
            continue
        promising = candidate.seconds < present.seconds * (1 - WORTH_TRYING)
        if promising or (candidate.kind != present.kind and candidate.seconds < usual * (1 + close)):
            return candidate
        tried = [*tried, candidate.kind]
    return None


def _describe(present: Candidate, best: Candidate, usual: float) -> str:
    return (
        f"'{best.name}' to take {best.seconds * 1e3:.1f} ms; the present plan is predicted to take "
        f"{present.seconds * 1e3:.1f} ms and takes {usual * 1e3:.1f} ms"
    )
