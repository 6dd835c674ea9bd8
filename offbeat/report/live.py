"""A recording or a model, and a State of sliders and switches → what the live page shows of the changed job.

Where the job's plan is known, or another strategy is asked for, the changed plan is simulated with what was measured;
else the trace itself is replayed on other links and devices, the last steps of a long one. What takes long is asked for
on its own: memory, the other strategies one by one, and the search for a better one.
"""

import base64
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.cost.memory import MemoryEstimate, peak_memory
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.plan import Plan, lower
from offbeat.profile.measure import ANYWHERE, Profile
from offbeat.profile.source import load_recording
from offbeat.profile.whatif import (
    WIRES,
    Change,
    changed,
    costs_of_workers,
    plan_known,
    what_if,
    with_workers,
)
from offbeat.report.pack import pack_timeline
from offbeat.report.windows import Windows, with_marks
from offbeat.search.optimize import search
from offbeat.search.oracle import step_seconds
from offbeat.simulate.predict import BARRIER_STEPS, DEFERRED_STEPS, simulate
from offbeat.simulate.roles import find_roles
from offbeat.strategy import Strategy, build_strategy, builders, transfer
from offbeat.strategy.model import SERVERS
from offbeat.timeline import KINDS, Timeline
from offbeat.timeline.diagnosis import Diagnosis, RankTime, diagnose, short_name
from offbeat.units import quote

RECORDED, OPTIMISED = "recorded", "optimised"
PARTS = ("compute", "exposed", "waiting", "idle")
MOST_WORKERS = 4096
MOST_SERVER_PARTS = 20_000
"""Shards that servers hold, times workers: what about three seconds of replay can take."""
MOST_REPLAYED_SPANS = 60_000
"""Of a trace without a plan: its last steps with at most so many are replayed."""
SEARCH_SECONDS = 4.0
CAPTURED_STRATEGY = "ddp"
"""What a model that was not recorded is compared with."""
_FACTOR = Field(ge=1 / 1024, le=1024)
_REMEMBERED_PLANS = 6

Factor = Annotated[float, _FACTOR]


class State(BaseModel):
    """What is different from the job as it was recorded. Factors: 2 times the bandwidth, the latency, the speed."""

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
    """How many times as long that rank computes."""

    @classmethod
    def read(cls, raw: Any) -> "State":
        """From plain values, such as parsed JSON."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise OffbeatError(f"state: {files.first_problem(error)}") from None

    def changes(self) -> list[Change]:
        """The differences, in the words of `offbeat replay --what-if`."""
        found = [
            Change(kind, factor=getattr(self, kind))
            for kind in ("bandwidth", "latency", "compute")
            if getattr(self, kind) != 1.0
        ]
        if self.workers is not None:
            found.append(Change("workers", number=self.workers))
        if self.strategy != RECORDED:
            found.append(Change("strategy", name=self.strategy))
        if self.wire != "recorded":
            found.append(Change("wire", name=self.wire))
        if self.straggler != 1.0:
            found.append(Change("straggler", factor=self.straggler, number=self.straggler_rank))
        return found


@dataclass(frozen=True)
class _Found:
    """What a search has found, and where it searched."""

    strategy: Strategy
    workers: int
    words: str
    seconds: float
    number: int


class Session:
    """One recording or model that the live page looks at. Its methods may be called from several threads."""

    def __init__(self, recorded: Profile | Timeline, title: str, *, captured: bool = False) -> None:
        """`captured`: nothing was measured, `recorded` has a model's graph and the replay of a first strategy."""
        self.title = title
        self.captured = captured
        self.profile = recorded if isinstance(recorded, Profile) else None
        whole = recorded.timeline if isinstance(recorded, Profile) else recorded
        self.measured_seconds = whole.iteration_time if whole.marks.size and not captured else None
        self.timeline = _last_steps(with_marks(whole))
        self.notes = tuple(dict.fromkeys((*(self.profile.notes if self.profile else ()), *self.timeline.notes)))
        self.world = self.profile.cluster.world_size if self.profile else len(self.timeline.ranks)
        self._found: _Found | None = None
        self._plans = _Recent(_REMEMBERED_PLANS)
        self._memories = _Recent(_REMEMBERED_PLANS)
        self.base_seconds = self._timeline(self._checked(State())).iteration_time

    @classmethod
    def of_recording(cls, path: str | Path) -> "Session":
        """Of a folder that the recorder wrote, torch.profiler's traces, or a saved timeline."""
        return cls(load_recording(path), Path(path).resolve().name)

    @classmethod
    def of_model(cls, graph: ModelGraph, cluster: ClusterSpec) -> "Session":
        """Of a model that was not run: costs come from the devices' and the links' figures."""
        strategy = build_strategy(CAPTURED_STRATEGY, graph, cluster).model_copy(update=ANYWHERE)
        timeline = simulate(lower(graph, cluster, strategy), memory=False)
        profile = Profile(timeline, graph, cluster, strategy, Costs(), job="offbeat", notes=())
        return cls(profile, f"{graph.name} on {cluster.name}", captured=True)

    def about(self) -> dict[str, Any]:
        """What the page must know before the first replay."""
        cluster = self.profile.cluster if self.profile else None
        across = cluster is not None and len(cluster.nodes) > 1
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
            "bandwidth_bytes_per_second": cluster.nodes[0].bandwidth if cluster and across else None,
            "latency_seconds": cluster.nodes[0].latency if cluster and across else None,
            "measured_seconds": self.measured_seconds,
            "base_seconds": self.base_seconds,
            "parts": list(PARTS),
            "memory_parts": [field.name for field in fields(MemoryEstimate) if field.name != "peak_at"],
            "notes": list(self.notes[:8]),
        }

    def replay(self, state: State) -> dict[str, Any]:
        """The step as it would be: seconds, where they go, what bounds them, and the timeline to draw."""
        begun = time.perf_counter()
        state = self._checked(state)
        timeline = self._timeline(state)
        diagnosis = diagnose(timeline)
        seconds = timeline.iteration_time
        return {
            "words": ", ".join(map(str, state.changes())) or f"as {'captured' if self.captured else 'recorded'}",
            "step_seconds": seconds,
            "base_seconds": self.base_seconds,
            "speedup": self.base_seconds / seconds if seconds else 1.0,
            "mean": {part: diagnosis.mean(f"{part}_seconds") for part in PARTS},
            "hidden_seconds": diagnosis.mean("overlap_seconds"),
            "ranks": _rank_rows(diagnosis.ranks),
            "bound": _bound(diagnosis),
            "straggler": None if diagnosis.straggler is None else diagnosis.straggler.rank,
            "blame": [
                {"name": short_name(blame.name)[:200], "seconds": blame.exposed_seconds, "bytes": blame.bytes}
                for blame in diagnosis.blame
            ],
            "kinds": [KINDS[number] for number in sorted(set(timeline.kind.tolist()))],
            "notes": list(timeline.notes[:4]),
            "scene": base64.b64encode(pack_timeline(timeline, self._nodes(state))).decode(),
            "replay_milliseconds": 1e3 * (time.perf_counter() - begun),
        }

    def memory(self, state: State) -> dict[str, Any]:
        """Bytes on each rank at its peak, by what holds them; ranks that are alike in one row."""
        state = self._checked(state)
        if not self._planned(state):
            return {"rows": [], "why": "the trace does not tell what is kept in memory"}
        key = (state.strategy, state.workers, state.wire, self._found_number(state))
        rows = self._memories.get(key)
        if rows is None:
            plan, _ = self._plan(state)
            rows = [_memory_row(plan, ranks) for ranks in find_roles(plan, {}).ranks]
            self._memories.put(key, rows)
        assert self.profile is not None
        known = any(operator.activation_bytes for operator in self.profile.graph.operators)
        return {"rows": rows, "why": "" if known else "without activations, which a recording does not tell"}

    def rank(self, state: State) -> dict[str, Any]:
        """The step time of the state's strategy alone, for the ranking."""
        state = self._checked(state)
        if not self._planned(state):
            return {"strategy": state.strategy, "step_seconds": self._timeline(state).iteration_time}
        plan, costs = self._plan(state)
        return {"strategy": state.strategy, "step_seconds": step_seconds(plan, costs)}

    def search(self, state: State) -> dict[str, Any]:
        """Searches for the best strategy on these links, devices and workers; it is 'optimised' from then on."""
        state = self._checked(state)
        if self.profile is None:
            raise OffbeatError("search: the trace does not tell the job's plan, so there is nothing to search in")
        here = state.model_copy(update={"strategy": RECORDED, "wire": "recorded"})
        plan, costs = self._plan(here)
        best = search(plan.graph, plan.cluster, costs=costs, time_limit=SEARCH_SECONDS)
        words = ", ".join(map(str, here.changes())) or "as recorded"
        number = self._found.number + 1 if self._found else 1
        self._found = _Found(best.strategy, plan.cluster.world_size, words, best.seconds, number)
        return {"strategy": OPTIMISED, "step_seconds": best.seconds, "decisions": list(best.decisions), "for": words}

    def _checked(self, state: State) -> State:
        """The state with what equals the recording left out, or one sentence why it cannot be replayed."""
        if state.workers == self.world:
            state = state.model_copy(update={"workers": None})
        for kind, why in self._unavailable().items():
            if getattr(state, kind) != State.model_fields[kind].default:
                raise OffbeatError(f"{kind}: {why}")
        if state.strategy not in (RECORDED, OPTIMISED, *builders()):
            raise OffbeatError(f"strategy: there is no {quote(state.strategy)}; there are {', '.join(builders())}")
        if state.strategy == OPTIMISED and self._found is None:
            raise OffbeatError("strategy: 'optimised' is not known before a search")
        if state.wire != "recorded" and not self._planned(state):
            raise OffbeatError("wire: the recording does not tell the job's plan; choose a strategy too")
        if state.workers is not None and not self._planned(state):
            raise OffbeatError("workers: the recording does not tell the job's plan; choose a strategy too")
        return state

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
        wanted = {2**power for power in range(MOST_WORKERS.bit_length())} | {3, 6, 12, 24, 48, 96, self.world}
        return [count for count in sorted(wanted) if _possible(self.profile.cluster, count)]

    def _served(self, name: str) -> int:
        """Parts that a strategy puts on servers: the more, the longer its replay takes."""
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
            return what_if(self.timeline, state.changes())[0]
        plan, costs = self._plan(state)
        return simulate(plan, costs, memory=False, steps=_fewest_steps(plan))

    def _plan(self, state: State) -> tuple[Plan, Costs]:
        """The plan and the costs of the changed job; those of the last states are remembered."""
        key = (state, self._found_number(state))
        known = self._plans.get(key)
        if known is None:
            assert self.profile is not None
            moved = self.profile.with_links(state.bandwidth, state.latency)
            cluster, costs = moved.cluster, moved.costs
            if state.workers is not None:
                cluster = with_workers(moved.cluster, state.workers)
                costs = costs_of_workers(costs, self.world, cluster.world_size)
            strategy = self._strategy(state, cluster)
            _check_size(strategy, cluster)
            moved = replace(moved, cluster=cluster, costs=costs, strategy=strategy)
            rest = [change for change in state.changes() if change.kind in ("compute", "wire", "straggler")]
            known = changed(moved, rest)
            self._plans.put(key, known)
        return known

    def _strategy(self, state: State, cluster: ClusterSpec) -> Strategy:
        assert self.profile is not None
        graph, workers = self.profile.graph, self.world
        if state.strategy == RECORDED:
            strategy = self.profile.strategy
        elif state.strategy == OPTIMISED:
            assert self._found is not None
            strategy, workers = self._found.strategy, self._found.workers
        else:
            return build_strategy(state.strategy, graph, cluster)
        return strategy if workers == cluster.world_size else transfer(strategy, graph, cluster)

    def _found_number(self, state: State) -> int:
        return self._found.number if self._found and state.strategy == OPTIMISED else 0

    def _nodes(self, state: State) -> dict[int, str]:
        """The node of each rank, where nodes have several."""
        if self.profile is None:
            return {}
        cluster = self._plan(state)[0].cluster if self._planned(state) else self.profile.cluster
        if len(cluster.nodes) == cluster.world_size or cluster.world_size > MOST_WORKERS:
            return {}
        return {rank: cluster.nodes[node].name for rank, node in enumerate(cluster.node_of_rank)}


class _Recent:
    """The last few values by key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> Any:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: Any) -> None:
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)


def _last_steps(timeline: Timeline) -> Timeline:
    """The last steps of a long trace, as many as are replayed at once."""
    if len(timeline) <= MOST_REPLAYED_SPANS:
        return timeline
    windows = Windows(timeline)
    first = windows.last_with(MOST_REPLAYED_SPANS)
    part = windows.part(len(windows) - 1 if first is None else first, len(windows) - 1)
    if part is None:
        return timeline
    steps = part.marks.shape[1] - 1
    note = f"of {len(windows)} steps the last {steps} are replayed" if steps > 1 else "the last step is replayed"
    return replace(part, notes=(*timeline.notes, note))


def _possible(cluster: ClusterSpec, workers: int) -> bool:
    try:
        with_workers(cluster, workers)
    except OffbeatError:
        return False
    return True


def _check_size(strategy: Strategy, cluster: ClusterSpec) -> None:
    """Ranks that serve are all different, so that nothing folds: refuses what would take too long."""
    served = _parts_on_servers(strategy)
    if served * cluster.world_size > MOST_SERVER_PARTS:
        raise OffbeatError(
            f"strategy {strategy.name!r}: {served} parts on servers for {cluster.world_size} workers take too long for "
            f"this page; offbeat replay has no such limit"
        )


def _parts_on_servers(strategy: Strategy) -> int:
    return sum(shard.synchronizer in SERVERS for config in strategy.variables.values() for shard in config.shards)


def _fewest_steps(plan: Plan) -> int | None:
    """With a barrier all steps are alike; where servers keep ranks from folding, further steps would take too long."""
    if plan.mode == "barrier":
        return BARRIER_STEPS
    return DEFERRED_STEPS if any(message.owner is not None for message in plan.messages) else None


def _bound(diagnosis: Diagnosis) -> dict[str, float] | None:
    """The longest that any rank computes and that any link sends: no order of the same work is faster."""
    if diagnosis.ideal_seconds is None:
        return None
    compute = max(rank.compute_seconds for rank in diagnosis.ranks)
    network = max(rank.network_seconds for rank in diagnosis.ranks)
    return {"seconds": max(compute, network), "compute_seconds": compute, "network_seconds": network}


def _rank_rows(ranks: Sequence[RankTime]) -> list[dict[str, Any]]:
    """Ranks that spend their step alike in one row."""
    alike: dict[tuple[float, ...], list[RankTime]] = {}
    for rank in ranks:
        key = tuple(round(getattr(rank, f"{part}_seconds"), 7) for part in PARTS)
        alike.setdefault(key, []).append(rank)
    return [
        {
            "label": name_ranks(rank.rank for rank in members),
            "values": {part: getattr(members[0], f"{part}_seconds") for part in PARTS},
        }
        for members in alike.values()
    ]


def _memory_row(plan: Plan, ranks: Sequence[int]) -> dict[str, Any]:
    estimate = peak_memory(plan, ranks[0])
    parts = {field.name: getattr(estimate, field.name) for field in fields(estimate) if field.name != "peak_at"}
    limit = plan.cluster.device_of(ranks[0]).memory
    return {"label": name_ranks(ranks), "bytes": parts, "total_bytes": estimate.total, "limit_bytes": limit}


def name_ranks(ranks: Iterable[int]) -> str:
    """'rank 3', 'ranks 0–15' or 'ranks 0–2, 5, 9 and 4 more'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in runs[:3])
    left = sum(last - first + 1 for first, last in runs[3:])
    alone = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if alone else 's'} {shown}" + (f" and {left} more" if left else "")
