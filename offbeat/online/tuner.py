"""Phases of a job under way: warm up, record, search beside it, race what it found, keep what is faster, watch.

The search runs in a process of its own (`searcher.py`); training goes on, and the answers are taken at the end of a
step by all ranks alike. DDP's own way is timed with several sizes of buckets, which replay cannot tell apart where
computing and communication share processors. Then the quickest plans of each kind, DDP's way at its best size among
them, run in heats. DDP's way and the quickest of the others go to a final, and are kept only if alternating blocks of
real steps show that they are faster (`verdict.py`). The plan that the job began with has not proven anything either:
against DDP's way it must be the faster one on average. Later, when steps have become longer or shorter than they were,
it looks again. Every decision is told once, on rank 0.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import fmean, median
from typing import Any

import torch

from offbeat.cluster import ClusterSpec
from offbeat.cost.interval import Interval, Trust
from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.online.agreement import Agreement
from offbeat.online.searcher import DDP, Searcher, SearchFailed
from offbeat.online.steps import Steps
from offbeat.online.verdict import NEEDED, Verdict
from offbeat.plan import Plan, lower
from offbeat.profile.blocks import time_encoders
from offbeat.profile.recorder import MemoryRecorder
from offbeat.runtime.distribute import Runtime
from offbeat.runtime.handle import Decision, tell
from offbeat.runtime.retime import link_fit
from offbeat.strategy import Strategy
from offbeat.timeline import Timeline

WARM_UP_STEPS = 6
"""The engine rebuilds its order after step 4."""
UNRECORDED_STEPS = 2
"""The last of these phases, in that order."""
RECORDED_STEPS = 5
ASKED_STEPS = 3
"""Steps between two checks for the answer of the search."""
SETTLING_STEPS = 5
"""Steps of a new plan before it is timed, in which its order is rebuilt."""
BLOCK_STEPS = 3
"""Timed steps of a block; one before them, after the switch, is not."""
PAIR_STEPS = 2 * (1 + BLOCK_STEPS)
"""Of two blocks that are compared in a final."""
MOST_STEPS = 120
"""Spent on trials of what one search has found."""
PATIENCE_SECONDS = 15.0
"""For which a search beside ranks that compute on processors has the others to itself. If it takes longer, because it
must compile its code first, DDP's way is timed meanwhile."""
MOST_CONTENDERS = 3
BEHIND, EVENLY_BEHIND = 0.05, 0.1
"""A contender that was slower than the present plan by more than this share in its heats goes to no final. The second
is for DDP's way, against a plan that has not proven anything, and for sizes of its buckets against the best of them."""
FIRST_SHARE = 0.6
"""Of the steps that are left, for a final after which another one may follow."""
WORTH_TRYING = 0.01
"""Predicted gain from which a switch is worth a trial."""
CLOSE, FAR = 0.25, 1.0
"""A plan of another kind is tried too if its prediction exceeds the present plan's steps, real and predicted, by at
most this share. The second holds for DDP's way if it has not been timed, and for every plan where steps take `SLOW`
times as long as predicted."""
SLOW = 1.1
WATCHED_STEPS = 25
DRIFT = 0.2
"""Share by which steps must have changed before the search starts over."""
start_search: Callable[[], Searcher] = Searcher


@dataclass
class Runner:
    """A plan in a race."""

    name: str
    plan: Plan
    """As it was when it was last in force: its order may have been rebuilt."""
    candidate: dict[str, Any] = field(default_factory=dict)
    """What the search says of it; nothing of the plan in force."""
    heats: list[float] = field(default_factory=list)
    """Seconds of a step, by block."""
    settled: bool = False
    """Its order needs no further rebuilding before it is timed."""

    @property
    def heat(self) -> float:
        return fmean(self.heats) if self.heats else 0.0


class Tuner:
    """Tunes the plan of one job; called at the end of each step."""

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
        self.ranks = Agreement(self.world)
        self.usual = 0.0
        """Seconds of a step with the present plan."""
        self.proven = False
        """The present plan has come out of a race."""
        self.drifted = False
        """Step times have changed, so the link may have changed too."""
        self.steps = Steps(runtime.engine.reports.clock)
        self.phases = self._run()
        next(self.phases)
        # A compiled training loop must not compile this.
        runtime.step_hooks.append(torch.compiler.disable(self.after_step))
        runtime.refit_hooks.append(self._start_over)
        runtime.release_hooks.append(self.close)

    def close(self) -> None:
        """Ends a search or a recording that is under way."""
        self.phases.close()

    def _start_over(self, graph: ModelGraph) -> None:
        """The training loop has changed the model, so the measurements no longer apply."""
        self.graph = graph
        self.close()
        self.phases = self._run()
        next(self.phases)

    def after_step(self) -> None:
        """The end of a step: the only moment at which anything changes."""
        self.steps.ended()
        next(self.phases)
        self.steps.resumed()

    # The phases; each `yield` is one step of training

    def _run(self) -> Generator[None, None, None]:
        self.runtime.settled = False
        yield from self.steps.pass_by(WARM_UP_STEPS + 1 - UNRECORDED_STEPS)
        self.usual = median((yield from self.steps.timed(UNRECORDED_STEPS)))
        while True:
            yield from self._improve()
            self.runtime.settled = True
            yield from self._watch()
            self.drifted = True
            self.runtime.settled = False

    def _improve(self) -> Generator[None, None, None]:
        # Ranks that compute on processors leave none to a search while steps are recorded or timed.
        beside = self.runtime.device.type == "cuda"
        searcher = start_search() if beside and self.rank == 0 else None
        try:
            traces = yield from self._record()
            name = self.runtime.plan.strategy.name
            if traces is None:
                self._tell(f"keeps '{name}': no part of the model was seen at work in the recorded steps")
                return
            if self.rank == 0:
                searcher = searcher or start_search()
                searcher.ask(_request(self, traces))
            state, first = yield from self._answer(searcher, name)
            if state == "failed":
                return
            graph = self.ranks.agree(first["graph"] if first else "")
            recorded = ModelGraph.from_json(graph)
            present = self.running = Runner(name, self.runtime.plan)
            state, found = yield from self._answer(searcher, name, 0.0 if beside else PATIENCE_SECONDS)
            if state == "failed":
                return
            predicted = {each["name"]: each["seconds"] for each in found["candidates"]} if found else {}
            sizes = self.ranks.agree(first["sizes"] if first else [])
            way = yield from self._time_sizes(recorded, present, sizes, predicted)
            if state == "late":
                state, found = yield from self._answer(searcher, name)
        finally:
            if searcher is not None:
                searcher.close()
        self._run_with(present)
        if found:
            self.runtime.predict = partial(_predict, graph, found["costs"])
        chosen = self.ranks.agree(contenders(found, self.usual, way) if found else [])
        if chosen:
            yield from self._race(recorded, present, chosen, way)
        elif state == "answered":
            self._tell(f"keeps '{name}': no other plan is predicted to be faster")

    def _answer(
        self, searcher: Searcher | None, present: str, patience: float = inf
    ) -> Generator[None, None, tuple[str, dict[str, Any] | None]]:
        """Trains until the search answers next ("answered"), fails ("failed") or takes longer than so many seconds
        ("late"); rank 0 also gets the answer."""
        began = time.monotonic()
        while True:
            for _ in range(ASKED_STEPS):
                yield
            found, failure = None, ""
            if searcher is not None:
                try:
                    found = searcher.answer()
                except SearchFailed as error:
                    failure = str(error)
            done = found is not None
            state = self.ranks.agree({"done": done, "failure": failure, "late": time.monotonic() - began > patience})
            if state["failure"]:
                self._tell(f"keeps '{present}': {state['failure']}")
                return "failed", None
            if state["done"] or state["late"]:
                return "answered" if state["done"] else "late", found

    def _time_sizes(
        self, recorded: ModelGraph, present: Runner, sizes: list[dict[str, Any]], predicted: dict[str, float]
    ) -> Generator[None, None, Runner | None]:
        """DDP's own way with the quickest of some sizes of buckets, unless it is too slow for a race with the present
        plan. What is quicker of the two runs on until the search answers.

        A few steps and a prediction, where there is one, are each off by some percent, so that both count.
        """
        timed: list[Runner] = []
        for each in sizes:
            if not (runner := self._runner(recorded, each)) or len(sizes) == 1:
                return runner
            yield from self._time(runner)
            timed.append(runner)
        yield from self._time(present)
        limit = min(runner.heat for runner in (*timed, present)) * (1 + EVENLY_BEHIND)
        again = self.ranks.agree([place for place, runner in enumerate(timed) if runner.heat <= limit])
        for runner in (present, *(timed[place] for place in reversed(again))):
            yield from self._time(runner)
        if not again:
            self._run_with(present)
            return None
        scores = {place: timed[place].heat * predicted.get(timed[place].name, 1.0) for place in again}
        best = timed[self.ranks.agree(min(again, key=scores.__getitem__))]
        best.settled = True
        if self.ranks.agree(best.heat < present.heat):
            self._run_with(best)
        return best

    def _time(self, runner: Runner) -> Generator[None, None, None]:
        """One more block of a plan."""
        self._run_with(runner)
        runner.heats.append((yield from self._block()))

    def _race(
        self, recorded: ModelGraph, present: Runner, chosen: list[dict[str, Any]], way: Runner | None
    ) -> Generator[None, None, None]:
        """Runs the chosen plans against the present one, and goes on with the fastest if it proves to be faster."""
        others = []
        for each in chosen:
            if way is not None and each["name"] == way.name:
                way.candidate, way.heats = each, []
                others.append(way)
            elif runner := self._runner(recorded, each):
                others.append(runner)
                yield
        if not others:
            return
        present.heats.clear()
        spent = yield from self._heats(present, others)
        champion = present
        order = self.ranks.agree(finalists(present, others, self.proven))
        for place, hopeful in order:
            other, verdict = others[place], Verdict(present.heats, others[place].heats)
            even = other.candidate["kind"] == DDP and champion is present and not self.proven
            # Where plans cannot be told apart, something is left for the next one.
            first = place == order[0][0] and sum(hope for _, hope in order) > 1
            most_steps = int((MOST_STEPS - spent) * (FIRST_SHARE if first else 1))
            if hopeful and min(NEEDED) * PAIR_STEPS <= most_steps:
                verdict = Verdict(even=even)
                spent += yield from self._final(champion, other, verdict, most_steps)
                if self.ranks.agree(verdict.kept):
                    champion, self.graph, self.usual = other, recorded, median(verdict.new)
            if verdict.new:
                self._tell_of(other, verdict, kept=other is champion)
        self._run_with(champion)
        self.proven = True

    def _runner(self, recorded: ModelGraph, chosen: dict[str, Any]) -> Runner | None:
        """The chosen plan, if this job can run it."""
        try:
            runner, obstacle = Runner(chosen["name"], self._lowered(recorded, chosen), chosen), ""
            self.runtime.check_switch(runner.plan)
            if left_out := _carried(self.runtime.plan) - _carried(runner.plan):
                obstacle = f"{min(left_out)!r} got no gradient in the recorded steps, and may get one later"
        except OffbeatError as error:
            obstacle = str(error)
        # No rank may switch, and wait for the others, where one of them cannot.
        if obstacle := next(filter(None, self.ranks.ask_all(obstacle)), ""):
            what = f"drops '{chosen['name']}', which this job cannot run: {obstacle}"
            self._tell(what, strategy=chosen["name"])
            return None
        return runner

    def _heats(self, present: Runner, others: list[Runner]) -> Generator[None, None, int]:
        """Some blocks of each plan, if there are several to choose from; the steps it took."""
        spent = 0
        for each in others:
            self._run_with(each)
            spent += yield from self.steps.pass_by(0 if each.settled else SETTLING_STEPS)
            if len(others) > 1:
                yield from self._time(each)
        again = (present, *others, present) if len(others) > 1 else ()
        for each in again:
            yield from self._time(each)
        return spent + sum(len(each.heats) for each in (present, *others)) * (1 + BLOCK_STEPS)

    def _final(self, present: Runner, other: Runner, verdict: Verdict, most_steps: int) -> Generator[None, None, int]:
        """Alternating blocks of the two until the verdict is clear or steps run out; the steps it took."""
        spent = 0
        # They take turns in being first, so that a machine which becomes slower or faster favours neither.
        pair = [other, present]
        while True:
            seconds = {}
            for each in pair:
                self._run_with(each)
                seconds[each is other] = yield from self._block()
            verdict.add(seconds[False], seconds[True])
            pair.reverse()
            spent += PAIR_STEPS
            if self.ranks.agree(verdict.decision != "open" or spent + PAIR_STEPS > most_steps):
                return spent

    def _run_with(self, runner: Runner) -> None:
        """Goes on with this plan, as it was when it was last in force."""
        if runner is not self.running:
            self.running.plan = self.runtime.plan
            self.runtime.switch(runner.plan)
            self.running = runner

    def _tell_of(self, runner: Runner, verdict: Verdict, kept: bool) -> None:
        does = "keeps" if kept else "drops"
        predicted = Interval(runner.candidate["seconds"], *runner.candidate["bounds"].values())
        after = median(verdict.new)
        if self.rank == 0:
            Trust(*runner.candidate["trust"]).remember("trial", predicted.seconds, after)
        self._tell(
            f"{does} '{runner.name}': a step takes {verdict}; predicted: {predicted}",
            strategy=runner.name,
            kept=kept,
            predicted_seconds=predicted.seconds,
            **predicted.fields("predicted"),
            seconds_before=median(verdict.old),
            seconds_after=after,
        )

    def _block(self) -> Generator[None, None, float]:
        """Median seconds of several steps."""
        yield from self.steps.pass_by(1)
        return median((yield from self.steps.timed(BLOCK_STEPS)))

    def _tell(self, what: str, **figures: Any) -> None:
        tell(self.runtime, Decision(self.runtime.steps, what, **figures))

    def _record(self) -> Generator[None, None, list[bytes] | None]:
        """Some steps with a recorder; returns its lines, or None if no part of the model was called on rank 0."""
        recorder = MemoryRecorder(self.runtime)
        with recorder:
            steps = []
            for _ in range(RECORDED_STEPS + 1):
                yield
                recorder.step()
                steps.append(self.steps.last)
        # Recording takes a little time too, which a plan on trial must not win by.
        self.usual = min(self.usual, median(self.steps.seconds(steps[1:])))
        if not self.ranks.agree(any(line.get("forward") for line in recorder.lines)):
            return None
        traces = self.ranks.gather(recorder.lines)
        self.runtime.link = yield from self._measure_link()
        return traces

    def _measure_link(self) -> Generator[None, None, tuple[float, float]]:
        """Every rank takes part, with one all-reduce after each step; no update may be in flight meanwhile."""
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

    def _watch(self) -> Generator[None, None, None]:
        """Returns when step times have changed permanently."""
        off = 0
        while off < 2:
            now = median((yield from self.steps.timed(WATCHED_STEPS)))
            off = off + 1 if self.ranks.agree(abs(now / self.usual - 1) > DRIFT) else 0
        self._tell(f"searches again: steps take {now * 1e3:.1f} ms instead of {self.usual * 1e3:.1f}")
        self.usual = now

    def _lowered(self, graph: ModelGraph, chosen: dict[str, Any]) -> Plan:
        strategy = Strategy.from_json(chosen["strategy"]).model_copy(update={"graph": "", "cluster": ""})
        return lower(graph, self.cluster, strategy, rank=self.rank)


def _request(tuner: Tuner, traces: list[bytes]) -> dict[str, Any]:
    """The input of the search process."""
    return {
        "traces": [packed.hex() for packed in traces],
        "link": tuner.runtime.link,
        "world": tuner.world.size,
        "graph": tuner.graph.to_json().decode(),
        "barrier": _must_wait(tuner.runtime),
        "allow": list(tuner.allow),
        "encoding": tuner.encoding,
    }


def _must_wait(runtime: Runtime) -> bool:
    """Whether no plan can run deferred here, because of the loop or of the current plan."""
    asked = runtime.plan.strategy.schedule.mode == "barrier"
    return runtime.engine.bound_by_loop or (runtime.engine.wanted_mode == "barrier" and not asked)


def contenders(found: dict[str, Any], usual: float, way: Runner | None) -> list[dict[str, Any]]:
    """The quickest candidate of each kind that may be quicker than the present plan, whose steps take `usual` seconds.

    `way` is DDP's, if it is worth a race by its heats or, where it has none, by its prediction. Of more than
    `MOST_CONTENDERS` the quickest stay, and that always.
    """
    present = next(each for each in found["candidates"] if each["name"] == "present")
    slower = max(usual, present["seconds"])
    close = FAR if usual > SLOW * present["seconds"] else CLOSE
    chosen: list[dict[str, Any]] = []
    seen: set[str] = {DDP}
    for each in found["candidates"]:
        kind = each["kind"]
        if way is not None and each["name"] == way.name and (way.heats or each["seconds"] < slower * (1 + FAR)):
            chosen.append(each)
        if each is present or kind in seen:
            continue
        seen.add(kind)
        promising = each["seconds"] < present["seconds"] * (1 - WORTH_TRYING)
        if promising or (kind != present["kind"] and each["seconds"] < slower * (1 + close)):
            chosen.append(each)
    while len(chosen) > MOST_CONTENDERS:
        chosen.remove(next(each for each in reversed(chosen) if each["kind"] != DDP))
    return chosen


def finalists(present: Runner, others: Sequence[Runner], proven: bool) -> list[tuple[int, bool]]:
    """The places of the others, the quickest in the heats first, and whether they go to a final: DDP's way and the
    quickest of the rest, unless the heats leave no hope for them. `proven`: the present plan has won a race.
    """
    found, seen = [], set()
    for place in sorted(range(len(others)), key=_heat_in(others)):
        ddp = others[place].candidate["kind"] == DDP
        behind = EVENLY_BEHIND if ddp and not proven else BEHIND
        found.append((place, ddp not in seen and others[place].heat <= present.heat * (1 + behind)))
        seen.add(ddp)
    return found


def _heat_in(runners: Sequence[Runner]) -> Callable[[int], float]:
    return lambda place: runners[place].heat


def _carried(plan: Plan) -> set[str]:
    """The variables whose gradients it synchronises."""
    return {name for message in plan.messages for name in message.variables}


def _predict(graph: str, costs: dict[str, Any], plan: Plan) -> Timeline:
    """The timeline of a plan's step with the recorded times."""
    # Compiles, which no step must wait for: only who asks for a timeline does.
    from offbeat.simulate import simulate

    everywhere = plan.strategy.model_copy(update={"graph": "", "cluster": ""})
    return simulate(lower(ModelGraph.from_json(graph), plan.cluster, everywhere), Costs.from_dict(costs, "costs"))
