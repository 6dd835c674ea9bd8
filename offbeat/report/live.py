"""The state behind the live page: a recording or a model with the changes set on the page.

Where the job's plan is known, or another strategy is asked for, the changed plan is simulated with the measured costs;
else the trace itself, or the last steps of a long one, is replayed on other links and devices. Slow answers are
requested separately: memory, the other strategies one by one, and the search for a better one.
"""

import base64
import time
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.cluster.devices import find_device
from offbeat.cost.measured import Costs
from offbeat.cost.memory import MemoryEstimate, peak_memory
from offbeat.cost.outcomes import Kind
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.plan import Plan, lower
from offbeat.profile.measure import Profile
from offbeat.profile.plans import ANYWHERE
from offbeat.profile.source import load_recording
from offbeat.profile.whatif import (
    WIRES,
    Change,
    changed,
    kind_of,
    plan_known,
    resized,
    trust_in,
    what_if,
    with_tensor_names,
    with_workers,
)
from offbeat.report.scene import kinds_of, pack_timeline
from offbeat.report.steps import TimelineSteps, parts_legend, parts_of, rank_rows, with_marks
from offbeat.search.optimize import search
from offbeat.simulate import step_seconds
from offbeat.simulate.predict import BARRIER_STEPS, DEFERRED_STEPS, simulate
from offbeat.simulate.roles import find_roles
from offbeat.strategy import Strategy, build_strategy, builders, transfer
from offbeat.strategy.model import SERVERS
from offbeat.timeline import Timeline
from offbeat.timeline.diagnosis import IDLE, diagnose, name_ranks, short_name
from offbeat.units import quote

RECORDED, OPTIMISED = "recorded", "optimised"
MOST_WORKERS = 4096
MOST_SERVER_PARTS = 400_000
"""Limit on shards held by servers times workers, which do not fold: about ten seconds of replay, which the page can
cancel."""
MOST_REPLAYED_SPANS = 60_000
"""Most spans of a trace without a plan that are replayed: those of its last steps."""
SEARCH_SECONDS = 4.0
CAPTURED_STRATEGY = "ddp"
"""The baseline of a model that was not recorded."""
_REMEMBERED_PLANS = 6
_MEMORY_PARTS = [field.name for field in fields(MemoryEstimate) if field.name != "peak_at"]

Factor = Annotated[float, Field(ge=1 / 1024, le=1024)]


class State(BaseModel):
    """The differences from the recorded job; a factor of 2 is twice the bandwidth, latency or speed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    bandwidth: Factor = 1.0
    latency: Factor = 1.0
    compute: Factor = 1.0
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = None
    """None for as many as recorded."""
    strategy: Annotated[str, Field(max_length=100)] = RECORDED
    """'recorded', 'optimised' or a builder."""
    wire: Literal["recorded", "none", "fp16", "bf16"] = "recorded"
    straggler_rank: Annotated[int, Field(ge=0, lt=MOST_WORKERS)] = 0
    straggler: Factor = 1.0
    """Factor by which that rank's compute is slower."""

    @classmethod
    def read(cls, raw: Any) -> "State":
        """From plain values, such as parsed JSON."""
        with files.problems_named("state"):
            return cls.model_validate(raw)

    def changes(self) -> list[Change]:
        """The differences, in the words of `offbeat replay --what-if`."""
        possible = (
            Change("bandwidth", factor=self.bandwidth),
            Change("latency", factor=self.latency),
            Change("compute", factor=self.compute),
            Change("workers", number=self.workers or 0),
            Change("strategy", name=self.strategy),
            Change("wire", name=self.wire),
            Change("straggler", factor=self.straggler, number=self.straggler_rank),
        )
        return [change for change in possible if self.differs(change.kind)]

    def differs(self, field: str) -> bool:
        """Whether a field has another value than the recorded job."""
        return getattr(self, field) != type(self).model_fields[field].default


class Session:
    """The recording or model that the live page shows. Its methods may be called from several threads."""

    def __init__(self, recorded: Profile | Timeline, title: str, *, captured: bool = False) -> None:
        """`captured`: nothing was measured, `recorded` has a model's graph and the replay of a first strategy."""
        self.title = title
        self.captured = captured
        self.profile = recorded if isinstance(recorded, Profile) else None
        whole = recorded.timeline if isinstance(recorded, Profile) else recorded
        self.measured_seconds = whole.iteration_time if whole.marks.size and not captured else None
        self.timeline = _last_steps(with_marks(whole))
        self.notes = tuple(dict.fromkeys(self.timeline.notes))
        self.world = self.profile.cluster.world_size if self.profile else len(self.timeline.ranks)
        self.trust = trust_in(recorded)
        self._found: list[tuple[Strategy, int]] = []
        """The strategy that each search has found, and for how many workers."""
        self._last_search: dict[str, Any] | None = None
        self._plan_of = lru_cache(_REMEMBERED_PLANS)(self._make_plan)
        self.scale = 1.0
        """The measured step over its replay, with which every prediction is multiplied."""
        self.replayed_seconds = self._timeline(self._checked(State())).iteration_time
        self.base_seconds = self.measured_seconds or self.replayed_seconds
        self.scale = self.base_seconds / self.replayed_seconds if self.replayed_seconds else 1.0
        self._recorded = None if self.measured_seconds is None else diagnose(with_marks(whole))

    @classmethod
    def of_recording(cls, path: str | Path) -> "Session":
        """Of a folder that the recorder wrote, torch.profiler's traces, or a saved timeline."""
        return cls(load_recording(path), Path(path).resolve().name)

    @classmethod
    def of_model(cls, graph: ModelGraph, cluster: ClusterSpec) -> "Session":
        """Of a model that was not run: costs come from the devices' and the links' figures."""
        strategy = build_strategy(CAPTURED_STRATEGY, graph, cluster).model_copy(update=ANYWHERE)
        timeline = simulate(lower(graph, cluster, strategy), memory=False)
        profile = Profile(timeline, graph, cluster, strategy, Costs(), job="offbeat")
        return cls(profile, f"{graph.name} on {cluster.name}", captured=True)

    def about(self, _: State | None = None) -> dict[str, Any]:
        """The page's data before the first replay."""
        nodes = self.profile.cluster.nodes if self.profile else ()
        node = nodes[0] if len(nodes) > 1 else None
        strategies = [RECORDED, *([OPTIMISED, *builders()] if self.profile else ())]
        return {
            "title": self.title,
            "captured": self.captured,
            "recorded_strategy": self.profile.strategy.name if self.profile else None,
            "world": self.world,
            "workers": self._worker_choices(),
            "strategies": strategies,
            "quick_first": sorted(strategies, key=self._served),
            "wires": ["recorded", *reversed(WIRES)] if self.profile else ["recorded"],
            "unavailable": self._unavailable(),
            "bandwidth_bytes_per_second": node.bandwidth if node else None,
            "latency_seconds": node.latency if node else None,
            "measured_seconds": self.measured_seconds,
            "base_seconds": self.base_seconds,
            "replayed_seconds": self.replayed_seconds,
            "parts": parts_legend(),
            "idle": IDLE,
            "found": self._last_search,
            "memory_parts": _MEMORY_PARTS,
            "notes": list(self.notes[:8]),
        }

    def replay(self, state: State) -> dict[str, Any]:
        """The changed step: its time, parts and lower bound, and the timeline to draw."""
        begun = time.perf_counter()
        state = self._checked(state)
        # Nothing changed: what was measured, as in the report.
        recorded = None if state.changes() else self._recorded
        timeline = self.timeline if recorded else self._timeline(state)
        diagnosis = recorded or diagnose(timeline)
        seconds = diagnosis.step_seconds
        bounds = ("compute_seconds", "network_seconds")
        longest = {bound: max(getattr(rank, bound) for rank in diagnosis.ranks) for bound in bounds}
        return {
            "words": self._words(state),
            "measured": recorded is not None,
            "step_seconds": seconds,
            **self._interval(seconds, state, measured=recorded is not None),
            "base_seconds": self.base_seconds,
            "speedup": self.base_seconds / seconds if seconds else 1.0,
            "mean": parts_of(diagnosis),
            "idle": diagnosis.idle_by_reason,
            "hidden_seconds": diagnosis.mean("overlap_seconds"),
            "ranks": rank_rows(diagnosis.ranks),
            "bound": None if diagnosis.ideal_seconds is None else {"seconds": diagnosis.ideal_seconds, **longest},
            "straggler": None if diagnosis.straggler is None else diagnosis.straggler.rank,
            "blame": [
                {"name": short_name(blame.name)[:200], "seconds": blame.exposed_seconds, "bytes": blame.bytes}
                for blame in diagnosis.blame
            ],
            "kinds": kinds_of(timeline),
            "notes": list(timeline.notes[:4]),
            "scene": base64.b64encode(pack_timeline(timeline, self._nodes(state))).decode(),
            "replay_milliseconds": 1e3 * (time.perf_counter() - begun),
        }

    def memory(self, state: State) -> dict[str, Any]:
        """Peak bytes of each rank by what holds them; ranks that are alike share a row."""
        state = self._checked(state)
        if not self._planned(state):
            return {"rows": [], "why": "the trace does not tell what is kept in memory"}
        plan, _ = self._plan(state)
        rows = []
        for ranks in find_roles(plan, {}).ranks:
            estimate = peak_memory(plan, ranks[0])
            node = plan.cluster.device_of(ranks[0])
            # Of a recorded job's device nothing but its name is known.
            limit = node.memory if self.captured or find_device(node.device) else None
            row = {"label": name_ranks(ranks), "total_bytes": estimate.total, "limit_bytes": limit}
            rows.append(row | {"bytes": {part: getattr(estimate, part) for part in _MEMORY_PARTS}})
        known = any(operator.activation_bytes for operator in plan.graph.operators)
        return {"rows": rows, "why": "" if known else "without activations, which a recording does not tell"}

    def rank(self, state: State) -> dict[str, Any]:
        """The step time of the state's strategy alone, for the ranking."""
        state = self._checked(state)
        planned = self._planned(state)
        if not state.changes():
            seconds = self.base_seconds
        elif planned:
            seconds = self.scale * step_seconds(*self._plan(state))
        else:
            seconds = self._timeline(state).iteration_time
        measured = not state.changes() and self.measured_seconds is not None
        return {"strategy": state.strategy, "step_seconds": seconds, **self._interval(seconds, state, measured)}

    def search(self, state: State) -> dict[str, Any]:
        """Searches for the best strategy on these links, devices and workers; it is 'optimised' from then on."""
        state = self._checked(state)
        if self.profile is None:
            raise OffbeatError("search: the trace does not tell the job's plan, so there is nothing to search")
        here = state.model_copy(update={"strategy": RECORDED, "wire": "recorded"})
        plan, costs = self._plan(here)
        best = search(plan.graph, plan.cluster, costs=costs, time_limit=SEARCH_SECONDS)
        self._found.append((best.strategy, plan.cluster.world_size))
        seconds = self.scale * best.seconds
        interval = self._interval(seconds, here.model_copy(update={"strategy": OPTIMISED}), measured=False)
        self._last_search = {"step_seconds": seconds, **interval, "for": self._words(here)}
        return self._last_search

    def strategy(self, state: State) -> dict[str, Any]:
        """The state's strategy as a file that `offbeat run --strategy` and `distribute` take."""
        state = self._checked(state)
        if not self._planned(state):
            raise OffbeatError("strategy: the recording does not tell the job's plan; choose a strategy first")
        made = self._plan(state)[0].strategy
        return {"file": f"{state.strategy}.json", "content": made.to_json()}

    def _checked(self, state: State) -> State:
        """The state without values that equal the recording; OffbeatError if it cannot be replayed."""
        if state.workers == self.world:
            state = state.model_copy(update={"workers": None})
        for kind, why in self._unavailable().items():
            if state.differs(kind):
                raise OffbeatError(f"{kind}: {why}")
        if state.strategy not in (RECORDED, OPTIMISED, *builders()):
            raise OffbeatError(f"strategy: unknown strategy {quote(state.strategy)}; known: {', '.join(builders())}")
        if state.strategy == OPTIMISED and not self._found:
            raise OffbeatError("strategy: 'optimised' is not known before a search")
        for field in () if self._planned(state) else ("wire", "workers"):
            if state.differs(field):
                raise OffbeatError(f"{field}: the recording does not tell the job's plan; choose a strategy too")
        return state

    def _interval(self, seconds: float, state: State, measured: bool) -> dict[str, Any]:
        """The bounds of a predicted step."""
        if measured:
            return {}
        kind: Kind = "model" if self.captured else kind_of(state.changes())
        interval = self.trust.interval(seconds, kind)
        return interval.fields() | {"bounds": interval.bounds} if self.captured else interval.shown(self.base_seconds)

    def _words(self, state: State) -> str:
        return ", ".join(map(str, state.changes())) or f"as {'captured' if self.captured else 'recorded'}"

    def _unavailable(self) -> dict[str, str]:
        """Why some controls have no effect here."""
        if self.profile is None:
            why = "the trace does not tell the job's plan"
            return dict.fromkeys(("workers", "strategy", "wire"), why)
        if self.captured and len(self.profile.cluster.nodes) == 1:
            return dict.fromkeys(("bandwidth", "latency"), "all ranks are on one node, whose links the page keeps")
        return {}

    def _worker_choices(self) -> list[int]:
        if self.profile is None:
            return [self.world]
        choices = []
        wanted = {2**power for power in range(MOST_WORKERS.bit_length())} | {3, 6, 12, 24, 48, 96, self.world}
        for count in sorted(wanted):
            with suppress(OffbeatError):
                choices.append(with_workers(self.profile.cluster, count).world_size)
        return choices

    def _served(self, name: str) -> int:
        """Shards that a strategy puts on servers; the replay time grows with them."""
        if self.profile is None or name in (RECORDED, OPTIMISED):
            return 0
        try:
            return _parts_on_servers(build_strategy(name, self.profile.graph, self.profile.cluster))
        except OffbeatError:
            return MOST_SERVER_PARTS

    def _planned(self, state: State) -> bool:
        """Whether a plan is simulated, and not the trace replayed."""
        return self.profile is not None and (state.strategy != RECORDED or plan_known(self.profile))

    def _timeline(self, state: State) -> Timeline:
        if not self._planned(state):
            return what_if(self.timeline, state.changes())[0].scaled(self.scale)
        plan, costs = self._plan(state)
        # With a barrier all steps are alike; where servers keep ranks from folding, further steps would take too long.
        steps = DEFERRED_STEPS if any(message.owner is not None for message in plan.messages) else None
        steps = BARRIER_STEPS if plan.mode == "barrier" else steps
        return with_tensor_names(simulate(plan, costs, memory=False, steps=steps), plan).scaled(self.scale)

    def _plan(self, state: State) -> tuple[Plan, Costs]:
        """The plan and the costs of the changed job; those of the last states are remembered."""
        return self._plan_of(state, len(self._found) if state.strategy == OPTIMISED else 0)

    def _make_plan(self, state: State, search: int) -> tuple[Plan, Costs]:
        assert self.profile is not None
        moved = self.profile.with_links(state.bandwidth, state.latency)
        cluster, costs = moved.cluster, moved.costs
        if state.workers is not None:
            cluster, costs = resized(cluster, costs, state.workers)
        if state.strategy not in (RECORDED, OPTIMISED):
            strategy = build_strategy(state.strategy, moved.graph, cluster)
        else:
            strategy, workers = self._found[search - 1] if search else (moved.strategy, self.world)
            if workers != cluster.world_size:
                strategy = transfer(strategy, moved.graph, cluster)
        served = _parts_on_servers(strategy)
        if served * cluster.world_size > MOST_SERVER_PARTS:
            raise OffbeatError(
                f"strategy {strategy.name!r}: {served} shards on servers for {cluster.world_size} workers take too "
                f"long for this page; offbeat replay has no such limit"
            )
        moved = replace(moved, cluster=cluster, costs=costs, strategy=strategy)
        rest = [change for change in state.changes() if change.kind in ("compute", "wire", "straggler")]
        return changed(moved, rest)

    def _nodes(self, state: State) -> dict[int, str]:
        """The node of each rank, where nodes have several."""
        if self.profile is None:
            return {}
        cluster = self._plan(state)[0].cluster if self._planned(state) else self.profile.cluster
        if len(cluster.nodes) == cluster.world_size or cluster.world_size > MOST_WORKERS:
            return {}
        return {rank: cluster.nodes[node].name for rank, node in enumerate(cluster.node_of_rank)}


def _last_steps(timeline: Timeline) -> Timeline:
    """The last steps of a long trace, as many as are replayed at once."""
    if len(timeline) <= MOST_REPLAYED_SPANS:
        return timeline
    steps = TimelineSteps(timeline)
    part = steps.last(MOST_REPLAYED_SPANS) or steps.part(len(steps) - 1, len(steps) - 1)
    if part is None:
        return timeline
    kept = part.marks.shape[1] - 1
    note = f"of {len(steps)} steps the last {kept} are replayed" if kept > 1 else "the last step is replayed"
    return replace(part, notes=(*timeline.notes, note))


def _parts_on_servers(strategy: Strategy) -> int:
    return sum(shard.synchronizer in SERVERS for config in strategy.variables.values() for shard in config.shards)
