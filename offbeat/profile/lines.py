"""Read the JSON lines of a rank's recorder as a RankTrace: steps with their passes, waits and collectives."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import orjson
from pydantic import BaseModel, Field, StrictBool, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from offbeat.cpu_steal import ProcessorTime
from offbeat.errors import OffbeatError
from offbeat.files import first_problem
from offbeat.graph.model import ITEM_BYTES
from offbeat.plan import Piece
from offbeat.profile.plans import ANYWHERE, RecordedPlan
from offbeat.strategy import Strategy
from offbeat.timeline import Kind
from offbeat.units import quote

FORMAT = 2
MOST_TASKS, MOST_TURNS = 2**20, 2**10
"""Limits on the collectives of a plan, and on how often a step may issue each."""
MAX_LINE_BYTES = 64 * 2**20
MOST_RANKS = 16_384
MOST_SECONDS = 1e10
"""Three hundred years; no clock has run for longer."""

Seconds = Annotated[float, Field(strict=True, gt=-MOST_SECONDS, lt=MOST_SECONDS)]
Number = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Size = Annotated[int, Field(strict=True, ge=0, lt=2**60)]
Tick = tuple[Number, Seconds, Seconds]
"""(other rank, sent, answered) on rank 0; (own rank, received, received) elsewhere. See `Recorder._tick`."""


class Collective(NamedTuple):
    """One collective as one rank saw it; times on that rank's clock."""

    task: Annotated[Number, Field(lt=MOST_TASKS)]
    kind: str
    name: str
    bytes: Size
    ranks: Number
    queued: Seconds
    issued: Seconds
    finished: Seconds
    turn: int = 0
    """How many times the step had issued this task before: more than 0 where every backward pass synchronises."""


class Transaction(NamedTuple):
    """One side of a message between two ranks (dPRO's SEND or RECV); times on that rank's clock."""

    kind: Literal["send", "recv"]
    peer: Number
    tag: Annotated[int, Field(strict=True, gt=-(2**31), lt=2**31)]
    number: Number
    """How many messages with this tag went the same way before, since the recording began."""
    bytes: Size
    queued: Seconds
    finished: Seconds


@dataclass(frozen=True)
class Pass:
    """A forward and the backward that follows it; times on the rank's clock."""

    begin: float
    reached: float
    """When its first module was reached."""
    forward: tuple[tuple[int, float, float], ...]
    """(module, start, end) of each call of a module with parameters: until the next one is reached."""
    backward: tuple[tuple[int, float, float], ...]
    """(parameter, start, end) of each gradient: from the gradient before it until its own is complete."""
    end: float
    """When its last gradient was complete."""


@dataclass(frozen=True)
class Step:
    """One step of one rank; times on that rank's clock."""

    number: int
    begin: float
    end: float
    passes: tuple[Pass, ...]
    """One, or several where the training loop accumulates gradients."""
    local: tuple[tuple[Kind, tuple[int, ...], float, float], ...]
    """Waits and updates: (kind, messages, start, end)."""
    communication: tuple[Collective, ...]
    plan: RecordedPlan | None = None
    """The plan in force, in an Offbeat job."""
    transactions: tuple[Transaction, ...] = ()
    """Messages from rank to rank, where they were asked for."""
    host_late_ns: int = 0
    """Nanoseconds in which a GPU had done all that the host had given it."""
    processor: ProcessorTime | None = None
    """Where steps compute on processors, in traces that tell."""


@checked_dataclass(frozen=True, kw_only=True)
class Header:
    """The first line of a trace."""

    rank: Number
    world: Annotated[int, Field(strict=True, ge=1, lt=MOST_RANKS)]
    job: str
    machine: str
    node: str = ""
    """The name of its node, equal for ranks that share one; '' in traces that do not tell."""
    local_rank: Annotated[int, Field(strict=True, ge=-1, lt=MOST_RANKS)] = -1
    local_world: Annotated[int, Field(strict=True, ge=-1, lt=MOST_RANKS)] = -1
    """This rank's number on its node and how many ranks that has, where the launcher says."""
    backend: str = ""
    device: str = ""
    """'cpu' or the name of the GPU; '' in traces that do not tell."""
    modules: tuple[str, ...]
    parameters: tuple[tuple[str, tuple[Size, ...], str], ...]
    """Name, shape and type."""
    gradients: tuple[str, ...]
    servers: tuple[Number, ...] = ()
    """Ranks of the job that hold no replica, and record nothing."""

    def __post_init__(self) -> None:
        if self.rank >= self.world:
            raise ValueError(f"rank {self.rank} is outside the job of {self.world} ranks")
        if any(rank >= self.world or rank == self.rank for rank in self.servers):
            raise ValueError(f"servers: {quote(self.servers)} are not other ranks of the job of {self.world}")
        dtypes = {name: dtype for name, _, dtype in self.parameters}
        for name in self.gradients:
            if name not in dtypes:
                raise ValueError(f"the gradient {quote(name)} belongs to no parameter")
            if dtypes[name] not in ITEM_BYTES:
                raise ValueError(f"{quote(dtypes[name])} is not a gradient's dtype")
        for name, shape, _ in self.parameters:
            if len(shape) > 64 or math.prod(shape) >= 2**60:
                raise ValueError(f"{quote(name)}: {quote(shape)} is not a tensor's shape")


@checked_dataclass(frozen=True, kw_only=True)
class Memory:
    """What one step held, beside parameters and gradients (`offbeat.profile.footprint`); in bytes."""

    calls: tuple[tuple[Size, Size], ...]
    """Given to the module, and kept for its backward, of each call of `Pass.forward`."""
    inputs: Size
    optimizer: str
    slots: Annotated[int, Field(strict=True, ge=0, lt=64)]
    """Tensors of a variable's size that the optimizer keeps for it."""
    sparse: tuple[tuple[str, Size], ...]
    """Variables with a sparse gradient, and its rows."""
    buffers: Size


@dataclass(frozen=True, kw_only=True)
class RankTrace(Header):
    """Everything one rank recorded."""

    path: Path
    steps: tuple[Step, ...]
    ticks: tuple[tuple[Tick, ...], ...] = ()
    """Messages exchanged with rank 0 to compare clocks, before and after the steps."""
    memory: Memory | None = None
    """None in traces that do not tell."""
    notes: tuple[str, ...] = ()


class _PlanLine(BaseModel):
    """A plan; a line tells only the fields that have changed."""

    strategy: dict[str, Any]
    messages: tuple[tuple[tuple[str, tuple[tuple[Size, Size], ...]], ...], ...]
    order: tuple[tuple[Number, Size], ...]


class _StepLine(BaseModel):
    """What a rank noted between two calls of `Recorder.step`."""

    step: Number
    begin: Seconds
    end: Seconds
    calls: list[tuple[Seconds, Seconds]]
    forward: list[tuple[Number, Seconds, Seconds]]
    backward: list[tuple[Number, Seconds]]
    local: list[tuple[Kind, tuple[Number, ...], Seconds, Seconds]]
    complete: StrictBool
    updated: StrictBool
    communication: list[Collective]
    """What ended meanwhile; it may belong to an earlier step."""
    transactions: list[Transaction] = []
    host_late_ns: Size = 0
    processor: tuple[Seconds, Seconds] | None = None


_HEADER = TypeAdapter(Header)
_MEMORY = TypeAdapter(Memory)
_CLOCK = TypeAdapter(tuple[Tick, ...])
_COLLECTIVES = TypeAdapter(list[Collective])
_TRANSACTIONS = TypeAdapter(list[Transaction])


def read_rank(path: Path, noted: Sequence[dict[str, Any]] | None = None) -> RankTrace:
    """One rank's trace, from its file or from the lines `noted` in memory; errors name `path`.

    A last line that was cut off by a crash is left out.
    """
    lines = _lines(path) if noted is None else iter(noted)
    first = next(lines, None)
    if not isinstance(first, dict) or first.get("offbeat_trace") != FORMAT:
        raise OffbeatError(f"{path}: not a trace of Offbeat's recorder: its first line lacks 'offbeat_trace': {FORMAT}")
    notes: tuple[str, ...] = ()
    try:
        header = _HEADER.validate_python(first)
        steps: list[tuple[_StepLine, RecordedPlan | None]] = []
        rows: list[Collective] = []
        transactions: list[Transaction] = []
        ticks: list[tuple[Tick, ...]] = []
        plans: list[RecordedPlan] = []
        told: dict[str, Any] = {}
        memory: Memory | None = None
        for line in lines:
            match line:
                case None:
                    notes = (f"{path}: the last line is cut off; its step is left out",)
                    break
                case {"clock": clock}:
                    ticks.append(_CLOCK.validate_python(clock))
                case {"plan": dict(changed)}:
                    told |= changed
                    plan = _plan(_PlanLine.model_validate(told), path)
                    plans.append(next((known for known in plans if known == plan), plan))
                case {"memory": seen}:
                    memory = _MEMORY.validate_python(seen)
                case {"late": late}:
                    rows += _COLLECTIVES.validate_python(late)
                    transactions += _TRANSACTIONS.validate_python(line.get("transactions", []))
                case _:
                    steps.append((_StepLine.model_validate(line), plans[-1] if plans else None))
                    rows += steps[-1][0].communication
                    transactions += steps[-1][0].transactions
        return RankTrace(
            path=path,
            **vars(header),
            # A collective of one rank sends nothing.
            steps=_steps(steps, [row for row in rows if row.ranks > 1], transactions, header),
            # Drift shows only between the two ends of a recording.
            ticks=tuple(ticks) if len(ticks) == 2 else (),
            memory=memory,
            notes=notes,
        )
    except OffbeatError:
        raise
    except ValueError as error:
        said = first_problem(error) if isinstance(error, ValidationError) else error
        raise OffbeatError(f"{path}: not a trace of Offbeat's recorder: {said}") from None


def _plan(line: _PlanLine, path: Path) -> RecordedPlan:
    if any(message >= len(line.messages) for message, _ in line.order):
        raise ValueError("a plan's order names a message that the plan does not have")
    strategy = Strategy.from_json(orjson.dumps(line.strategy), str(path)).model_copy(update=ANYWHERE)
    messages = tuple(tuple(Piece(*piece) for piece in pieces) for pieces in line.messages)
    return RecordedPlan(strategy, messages, line.order)


def _lines(path: Path) -> Iterator[Any]:
    """The parsed lines; None stands for a last one that was cut off."""
    try:
        with path.open("rb") as stream:
            while raw := stream.readline(MAX_LINE_BYTES):
                try:
                    yield orjson.loads(raw)
                except orjson.JSONDecodeError as error:
                    if not raw.endswith(b"\n") and len(raw) < MAX_LINE_BYTES:
                        yield None
                        return
                    raise OffbeatError(f"{path}: not a trace: {error}") from None
    except OSError as error:
        raise OffbeatError(f"{path}: cannot read the trace: {error.strerror}") from None


def _steps(
    lines: list[tuple[_StepLine, RecordedPlan | None]],
    collectives: list[Collective],
    transactions: list[Transaction],
    header: Header,
) -> tuple[Step, ...]:
    """The complete optimizer steps: lines without one belong to the next step.

    In a job without a torch optimizer, each line is a step.
    """
    if any(row.peer >= header.world for row in transactions):
        raise ValueError(f"a message names a rank outside the job of {header.world} ranks")
    collectives.sort(key=lambda collective: collective.queued)
    transactions.sort(key=lambda transaction: transaction.queued)
    queued, sent = (np.array([row.queued for row in rows]) for rows in (collectives, transactions))
    optimized = any(line.updated for line, _ in lines)
    steps: list[Step] = []
    waiting: list[_StepLine] = []
    for last, plan in lines:
        waiting.append(last)
        if optimized and not last.updated:
            continue
        joined, waiting = waiting, []
        if not all(each.complete for each in joined):
            continue
        parts = ("calls", "forward", "backward", "local")
        noted = {name: [row for each in joined for row in getattr(each, name)] for name in parts}
        line = last.model_copy(update={**noted, "begin": joined[0].begin})
        if line.end < line.begin:
            raise ValueError(f"step {line.step} ends at {line.end} before it begins at {line.begin}")
        if steps and line.step <= steps[-1].number:
            raise ValueError(f"step {line.step} comes after step {steps[-1].number}")
        for rows, names in ((line.forward, header.modules), (line.backward, header.gradients)):
            if any(row[0] >= len(names) for row in rows):
                raise ValueError(f"step {line.step} names a module or a gradient that the job does not have")
        turns: defaultdict[int, count[int]] = defaultdict(count)
        own = collectives[slice(*np.searchsorted(queued, (line.begin, line.end)))]
        numbered = tuple(row._replace(turn=next(turns[row.task])) for row in own)
        for row in numbered:
            if row.turn >= MOST_TURNS:
                raise ValueError(f"a step issues task {row.task} more than {MOST_TURNS} times")
        late = sum(each.host_late_ns for each in joined)
        messages = tuple(transactions[slice(*np.searchsorted(sent, (line.begin, line.end)))])
        passes = _passes(line)
        told = [each.processor for each in joined if each.processor is not None]
        processor = ProcessorTime(*map(sum, zip(*told, strict=True))) if len(told) == len(joined) else None
        local = tuple(line.local)
        steps.append(Step(line.step, line.begin, line.end, passes, local, numbered, plan, messages, late, processor))
    return tuple(steps)


def _passes(line: _StepLine) -> tuple[Pass, ...]:
    """A forward begins a new pass if a gradient has been completed since the last pass began."""
    calls = sorted(line.calls)
    complete = sorted(at for _, at in line.backward)
    starts = [calls[0][0] if calls else line.begin]
    for start, _ in calls[1:]:
        if bisect_right(complete, starts[-1]) < bisect_right(complete, start):
            starts.append(start)
    passes = []
    for start, (since, until) in zip(starts, pairwise([-math.inf, *starts[1:], math.inf]), strict=True):
        called = [row for row in line.forward if since <= row[1] < until]
        forward_end = max((end for at, end in calls if since <= at < until), default=start)
        reached = [*(at for _, at, _ in called), forward_end]
        forward = [(row[0], row[2], max(row[2], end)) for row, end in zip(called, reached[1:], strict=True)]
        grads = [row for row in line.backward if since < row[1] <= until]
        ends = list(accumulate((at for _, at in grads), max, initial=forward_end))
        backward = [(row[0], *span) for row, span in zip(grads, pairwise(ends), strict=True)]
        passes.append(Pass(start, reached[0] if called else start, tuple(forward), tuple(backward), ends[-1]))
    return tuple(passes)
