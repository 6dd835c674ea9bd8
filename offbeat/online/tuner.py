"""Phases of a job under way: warm up, record, search beside it, try in alternating blocks, keep what is faster, watch.

The search runs in a process of its own (`searcher.py`); training goes on, and the answer is taken at the end of a step
by all ranks alike. A new plan is kept only if alternating blocks of real steps show that it is faster (`verdict.py`).
Later, when steps have become longer or shorter than they were, it looks again. Every decision is told once, on rank 0.
"""

import json
import zlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from statistics import median
from typing import Any

import orjson

from offbeat.cluster import ClusterSpec
from offbeat.cost.interval import Interval, Trust
from offbeat.cost.measured import Costs
from offbeat.graph import ModelGraph
from offbeat.online.searcher import Searcher, SearchFailed
from offbeat.online.verdict import Verdict
from offbeat.plan import Plan, lower
from offbeat.profile.blocks import time_encoders
from offbeat.profile.recorder import MemoryRecorder
from offbeat.runtime.distribute import Runtime
from offbeat.runtime.handle import Decision, tell
from offbeat.runtime.retime import link_fit
from offbeat.strategy import Strategy
from offbeat.timeline import Timeline
from offbeat.timeline.clock import Moment

WARM_UP_STEPS = 6
"""The engine rebuilds its order after step 4."""
UNRECORDED_STEPS = 2
"""The last of these, in that order."""
RECORDED_STEPS = 5
ASKED_STEPS = 3
"""Steps between two looks at whether the search has answered."""
SETTLING_STEPS = 5
"""Of a new plan, before it is timed: its order is rebuilt meanwhile."""
BLOCK_STEPS = 3
"""Timed steps of a block; one before them, after the switch, is not."""
MOST_STEPS = 120
"""Spent on trials, for one search."""
MOST_TRIALS = 3
WORTH_TRYING = 0.01
"""Predicted gain from which a switch is worth a trial."""
DDP = "barrier"
"""The kind of plan that does what DDP does."""
SHORTEST_TRIAL = SETTLING_STEPS + 3 * 2 * (1 + BLOCK_STEPS)
"""Steps until the first verdict. As many are kept for DDP's way while other plans are on trial."""
CLOSE, FAR = 0.25, 1.0
"""A plan of another kind is tried too if its prediction exceeds the present plan's real steps by at most this share.
The second holds for DDP's own way, and for every plan where steps take `SLOW` times what was predicted: replay knows
nothing of processors that compute and communication share."""
SLOW = 1.1
WATCHED_STEPS = 25
DRIFT = 0.2
"""Share by which steps must have changed before the search starts over."""
MOST_RECORDING_RANKS = 8
start_search: Callable[[], Searcher] = Searcher


class Tuner:
    """Watches one job from its steps' ends and improves its plan."""

    def __init__(self, runtime: Runtime, graph: ModelGraph, cluster: ClusterSpec, allow: Sequence[str] = ()) -> None:
        self.allow = allow
        self.encoding: dict[str, float] = {}
        """Seconds to encode and decode a byte, by the allowed encoder's name."""
        if allow and not runtime.world.rank:
            # The search is loaded for this only.
            from offbeat.search.passes.encoding import allowed_encoders

            self.encoding = time_encoders(allowed_encoders(allow), runtime.device, runtime.world.size)
        self.runtime = runtime
        self.graph = graph
        self.cluster = cluster
        self.world = runtime.world
        self.rank = self.world.rank
        # Keys in the store must differ from those of an earlier tuner.
        self.keys = f"offbeat/online/{self.world.next_generation()}"
        self.questions = 0
        self.usual = 0.0
        """Seconds of a step with the present plan."""
        self.drifted = False
        """Steps take another time than they did, so the link may too."""
        self.phases = self._run()
        next(self.phases)
        self.clock = runtime.engine.reports.clock
        self.begun = self.clock.now()
        self.step: tuple[Moment, Moment] = self.begun, self.begun
        """The last step: its beginning and its end."""
        runtime.step_hooks.append(self.after_step)
        runtime.refit_hooks.append(self._start_over)

    def _start_over(self, graph: ModelGraph) -> None:
        """The training loop has changed the model: what was measured no longer holds."""
        self.graph = graph
        self.phases.close()
        self.phases = self._run()
        next(self.phases)

    def after_step(self) -> None:
        """The end of a step: the only moment at which anything changes."""
        self.step = self.begun, self.clock.now()
        next(self.phases)
        # What the tuner itself took is not the next step's.
        self.begun = self.clock.now()

    # The phases; each `yield` is one step of training

    def _run(self) -> Generator[None, None, None]:
        self.runtime.settled = False
        yield from self._steps(WARM_UP_STEPS + 1 - UNRECORDED_STEPS)
        self.usual = median((yield from self._timed(UNRECORDED_STEPS)))
        while True:
            yield from self._improve()
            self.runtime.settled = True
            yield from self._watch()
            self.drifted = True
            self.runtime.settled = False

    def _improve(self) -> Generator[None, None, None]:
        searcher = start_search() if self.rank == 0 else None
        try:
            traces = yield from self._record()
            if searcher is not None:
                searcher.ask(self._request(traces))
            answered, found = yield from self._answer(searcher)
        finally:
            if searcher is not None:
                searcher.close()
        if found:
            self.runtime.predict = partial(_predict, found["graph"], found["costs"])
        spent = 0
        tried: list[str] = []
        for _ in range(MOST_TRIALS):
            chosen = self._agree(worth_trying(found, tried, self.usual) if found else None)
            if chosen is None or spent + SHORTEST_TRIAL > MOST_STEPS:
                break
            tried.append(chosen["kind"])
            spent += yield from self._try(chosen, MOST_STEPS - spent)
        if answered and not tried:
            self._tell(f"keeps '{self.runtime.plan.strategy.name}': no other plan is predicted to be faster")

    def _answer(self, searcher: Searcher | None) -> Generator[None, None, tuple[bool, dict[str, Any] | None]]:
        """Trains on until the search has answered or failed: whether it answered, and on rank 0 what it found."""
        while True:
            for _ in range(ASKED_STEPS):
                yield
            found, failure = None, ""
            if searcher is not None:
                try:
                    found = searcher.answer()
                except SearchFailed as error:
                    failure = str(error)
            state = self._agree({"done": found is not None, "failure": failure})
            if state["failure"]:
                self._tell(f"keeps '{self.runtime.plan.strategy.name}': {state['failure']}")
                return False, None
            if state["done"]:
                return True, found

    def _try(self, chosen: dict[str, Any], most_steps: int) -> Generator[None, None, int]:
        """Times the plan in force and another in alternating blocks, and goes on with the faster; the steps it took."""
        graph, old = self.graph, self.runtime.plan
        self.graph = ModelGraph.from_json(chosen["graph"])
        self._switch(Strategy.from_json(chosen["strategy"]))
        spent = yield from self._steps(SETTLING_STEPS)
        verdict, decision = Verdict(), "open"
        idle, new_runs = old, True
        while decision == "open":
            # The two take turns in being first, so that a machine which becomes slower or faster favours neither.
            first = yield from self._block()
            idle = self._go_on_with(idle)
            second = yield from self._block()
            verdict.add(*((second, first) if new_runs else (first, second)))
            new_runs = not new_runs
            spent += 2 * (1 + BLOCK_STEPS)
            over = spent + 2 * (1 + BLOCK_STEPS) > most_steps - chosen["reserved"]
            decision = self._agree("give up" if over and verdict.decision == "open" else verdict.decision)
        before, after = median(verdict.old), median(verdict.new)
        kept = decision == "keep"
        if kept != new_runs:
            self._go_on_with(idle)
        if kept:
            self.usual = after
        else:
            self.graph = graph
        does = "keeps" if kept else "gives up"
        predicted = Interval(chosen["seconds"], *chosen["bounds"].values())
        if self.rank == 0:
            Trust(*chosen["trust"]).remember("trial", predicted.seconds, after)
        self._tell(
            f"{does} '{chosen['name']}': a step takes {verdict}; predicted: {predicted}",
            strategy=chosen["name"],
            kept=kept,
            predicted_seconds=predicted.seconds,
            **predicted.fields("predicted"),
            seconds_before=before,
            seconds_after=after,
        )
        return spent

    def _block(self) -> Generator[None, None, float]:
        """Seconds of a step, in the median of some."""
        yield from self._steps(1)
        return median((yield from self._timed(BLOCK_STEPS)))

    def _timed(self, count: int) -> Generator[None, None, list[float]]:
        """Trains on for some steps; the seconds of each."""
        steps = []
        for _ in range(count):
            yield
            steps.append(self.step)
        return self._seconds(steps)

    def _seconds(self, steps: list[tuple[Moment, Moment]]) -> list[float]:
        self.clock.wait(steps[-1][1])
        return [self.clock.seconds(end) - self.clock.seconds(begin) for begin, end in steps]

    def _steps(self, count: int) -> Generator[None, None, int]:
        for _ in range(count):
            yield
        return count

    def _go_on_with(self, plan: Plan) -> Plan:
        """Switches to a plan as it was in force before; the one in force until now."""
        before = self.runtime.plan
        self.runtime.switch(plan)
        return before

    def _tell(self, what: str, **figures: Any) -> None:
        tell(self.runtime, Decision(self.runtime.steps, what, **figures))

    def _record(self) -> Generator[None, None, list[bytes]]:
        """Some steps with a recorder; returns its lines."""
        recorder = MemoryRecorder()
        with recorder:
            steps = []
            for _ in range(RECORDED_STEPS + 1):
                yield
                recorder.step()
                steps.append(self.step)
        # Recording takes a little time too, which a plan on trial must not win by.
        self.usual = min(self.usual, median(self._seconds(steps[1:])))
        traces = self._gather(recorder.lines)
        self.runtime.link = yield from self._measure_link()
        return traces

    def _measure_link(self) -> Generator[None, None, tuple[float, float]]:
        """Every rank takes part, with one all-reduce after each step; no update must be on the wire meanwhile."""
        if self.runtime.link is not None and not self.drifted:
            return self.runtime.link
        measuring = link_fit(self.runtime.engine.channels.control, self.runtime.device)
        while True:
            self.runtime.engine.settle_all()
            try:
                next(measuring)
            except StopIteration as end:
                return end.value
            yield

    def _gather(self, lines: list[dict[str, Any]]) -> list[bytes]:
        """The recorded lines of the first ranks, on rank 0."""
        recording = range(min(self.world.size, MOST_RECORDING_RANKS))
        self.questions += 1
        if self.rank in recording and self.rank:
            self.world.set(f"{self.keys}/trace/{self.questions}/{self.rank}", zlib.compress(orjson.dumps(lines), 1))
        if self.rank:
            return []
        others = [self.world.get(f"{self.keys}/trace/{self.questions}/{rank}") for rank in recording[1:]]
        return [zlib.compress(orjson.dumps(lines), 1), *others]

    def _watch(self) -> Generator[None, None, None]:
        """Returns when steps have become longer or shorter for good."""
        off = 0
        while off < 2:
            now = median((yield from self._timed(WATCHED_STEPS)))
            off = off + 1 if self._agree(abs(now / self.usual - 1) > DRIFT) else 0
        self._tell(f"plans again: steps take {now * 1e3:.1f} ms instead of {self.usual * 1e3:.1f}")
        self.usual = now

    # What the ranks agree on

    def _agree(self, answer: Any) -> Any:
        """Rank 0's answer, on every rank."""
        self.questions += 1
        key = f"{self.keys}/answer/{self.questions}"
        if self.rank == 0:
            self.world.set(key, json.dumps(answer).encode())
            return answer
        return json.loads(self.world.get(key))

    def _switch(self, strategy: Strategy) -> None:
        plan = lower(self.graph, self.cluster, strategy.model_copy(update={"graph": "", "cluster": ""}), rank=self.rank)
        self.runtime.switch(plan)

    # What rank 0 decides

    def _request(self, traces: list[bytes]) -> dict[str, Any]:
        """What the searching process must know."""
        return {
            "traces": [packed.hex() for packed in traces],
            "link": self.runtime.link,
            "world": self.world.size,
            "graph": self.graph.to_json().decode(),
            "barrier": self._must_wait(),
            "allow": list(self.allow),
            "encoding": self.encoding,
        }

    def _must_wait(self) -> bool:
        """Whether no plan can run deferred here: because of the loop, or of what the present one would else do."""
        engine = self.runtime.engine
        asked = self.runtime.plan.strategy.schedule.mode == "barrier"
        return engine.bound_by_loop or (engine.wanted_mode == "barrier" and not asked)


def worth_trying(found: dict[str, Any], tried: list[str], usual: float) -> dict[str, Any] | None:
    """The quickest candidate of a kind that has not been tried, if it may be quicker than steps of `usual` seconds."""
    present = next(each for each in found["candidates"] if each["name"] == "present")
    seen = list(tried)
    for each in found["candidates"]:
        kind = each["kind"]
        if each is present or kind in seen:
            continue
        close = FAR if kind == DDP or usual > SLOW * present["seconds"] else CLOSE
        promising = each["seconds"] < present["seconds"] * (1 - WORTH_TRYING)
        if promising or (kind != present["kind"] and each["seconds"] < usual * (1 + close)):
            reserved = 0 if DDP in (kind, present["kind"], *tried) else SHORTEST_TRIAL
            return {**each, "graph": found["graph"], "reserved": reserved}
        seen.append(kind)
    return None


def _predict(graph: str, costs: dict[str, Any], plan: Plan) -> Timeline:
    """How a plan's step runs at the times of the recorded steps."""
    # Compiles, which no step must wait for: only who asks for a timeline does.
    from offbeat.simulate import simulate

    everywhere = plan.strategy.model_copy(update={"graph": "", "cluster": ""})
    return simulate(lower(ModelGraph.from_json(graph), plan.cluster, everywhere), Costs.from_dict(costs, "costs"))
