"""Build a Profile from torch.profiler traces of a DDP job; its notes list the assumptions.

The profiler shows when autograd completed each gradient (AccumulateGrad) and what each bucket's all-reduce sent, but no
names. A gradient is a variable of its own where the gradients, in the order in which they are completed, add up to the
buckets; else each bucket is one. On a GPU a gradient is complete when all kernels launched before it have ended.
Modules are not in a trace: forward is taken to use variables in the reverse order of their gradients, each for a share
of the time that its gradient takes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mode
from typing import NamedTuple

import numpy as np

from offbeat.cost.measured import CollectiveFit
from offbeat.cost.tables import fit_linear
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.graph.capture import optimizer_state
from offbeat.profile.compute import with_variables_of
from offbeat.profile.kineto import load_folder
from offbeat.profile.lines import MOST_RANKS, Collective, Memory, Pass, RankTrace, Step
from offbeat.profile.measure import Profile, make_profile
from offbeat.profile.tracefile import Collective as Seen
from offbeat.profile.tracefile import Gradient, Trace, product
from offbeat.runtime.comm import known_costs
from offbeat.timeline import KINDS
from offbeat.units import quote

ASSUMED_OVERHEAD_SECONDS = {"nccl": 7e-5, "gloo": 5e-4}
"""Of a collective, where all buckets have one size: what 1 KiB took between emulated hosts."""
_DTYPES = {"float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16"}
_BY_BYTES = {2: "float16", 4: "float32", 8: "float64"}

Tensor = tuple[tuple[int, ...], str]
"""Shape and type of a variable."""


class _Layout(NamedTuple):
    """What a step reduces."""

    tensors: tuple[Tensor, ...]
    """The variables, in the order of their gradients."""
    buckets: tuple[tuple[int, ...], ...]
    """The variables that each all-reduce sends."""
    single: bool
    """Whether a variable is one gradient, not a bucket."""


class _Step(NamedTuple):
    """One step of one rank, in seconds since its trace's origin."""

    number: int
    begin: float
    end: float
    forward: tuple[float, float]
    complete: tuple[float, ...]
    """When each variable's gradient was complete."""
    layout: _Layout
    reduced: tuple[Seen, ...]
    update: tuple[float, float] | None


def load_ddp_profile(folder: Path, workers: int | None = None, model: ModelGraph | None = None) -> tuple[Profile, bool]:
    """The profile of a folder of traces, whose timeline's notes say what was assumed, and whether its variables have
    the model's names. `workers` is the number of ranks where no trace tells it."""
    traces, notes = load_folder(folder)
    world = max(len(traces), traces[-1].rank + 1, *(trace.world for trace in traces))
    world = workers if world == 1 and workers else world
    if not 1 < world < MOST_RANKS:
        raise OffbeatError(f"{folder}: the traces name no number of ranks above 1; pass --workers")
    if len(traces) < world:
        notes.append(f"{len(traces)} of {world} ranks have a trace; the others are assumed to be alike")
    if len(traces) == 1:
        notes.append("with a trace of one rank only, waiting for other ranks counts as network time")
    steps = {trace.rank: _steps(trace, model) for trace in traces}
    layout = mode([step.layout for step in steps[traces[0].rank]] or [None])
    if layout is None:
        raise OffbeatError(
            f"{traces[0].path}: no step of DDP, which is a ProfilerStep range with a backward pass and all-reduces"
        )
    ranks, zero = [], min(trace.origin_ns for trace in traces)
    names = _names(layout, model)
    for trace in traces:
        alike = [step for step in steps[trace.rank] if step.layout == layout]
        if len(alike) < len(trace.steps):
            notes.append(f"{trace.path}: {len(trace.steps) - len(alike)} of {len(trace.steps)} steps are left out")
        ranks.append(_rank_trace(trace, alike, world, names, (trace.origin_ns - zero) * 1e-9))
    named = model is not None and layout.single
    optimizer, slots = optimizer_state(traces[0].optimizer or None)
    if model is not None and named:
        memory = _memory(model, ranks[0].modules, optimizer, slots)
        ranks = [replace(rank, memory=memory) for rank in ranks]
    notes += _assumed(traces[0], layout, model)
    backend = traces[0].backend or ("nccl" if traces[0].on_device else "gloo")
    fits = {("all_reduce", world): _fit(ranks, backend, notes)}
    profile = make_profile(ranks, replace(known_costs(backend, world), collectives=fits), notes=notes)
    if model is not None and named:
        profile = replace(profile, graph=with_variables_of(profile.graph, model))
    return replace(profile, graph=profile.graph.with_optimizer(optimizer, slots)), named


def _assumed(trace: Trace, layout: _Layout, model: ModelGraph | None) -> list[str]:
    notes = []
    if not layout.single:
        seen = "do not add up to what the all-reduces send" if trace.gradients else "are not in the traces"
        notes.append(f"the single gradients {seen}, so each bucket counts as one variable")
    elif model is None and trace.gradients[0].shape is None:
        notes.append("shapes were not recorded, so all gradients of a bucket are assumed to have equal size")
    notes.append("forward is assumed to use variables in the reverse order of their gradients, in equal shares of time")
    if model is None:
        notes.append("profiler traces do not contain activations, so no memory limit counts them")
    elif layout.single:
        notes.append("activations are those of --model's example batch")
    return notes


def _memory(model: ModelGraph, modules: Sequence[str], optimizer: str, slots: int) -> Memory:
    """What the captured model keeps for backward, by the module with parameters that was last reached."""
    kept, reached = dict.fromkeys(modules, 0), modules[0]
    for operator in model.phase("forward"):
        reached = operator.module if operator.module in kept else reached
        kept[reached] += operator.activation_bytes
    return Memory(
        calls=tuple((0, size) for size in kept.values()),
        inputs=sum(tensor.bytes for tensor in model.inputs),
        optimizer=optimizer,
        slots=slots,
        sparse=tuple((variable.name, variable.sparse_rows) for variable in model.variables if variable.sparse),
        buffers=sum(constant.bytes for constant in model.constants if constant.kind == "buffer"),
    )


def _steps(trace: Trace, model: ModelGraph | None) -> list[_Step]:
    """The steps in which gradients were reduced; of a GPU on its own clock."""
    work, launched = trace.work, trace.launched
    computing = np.isin(work.kind, [KINDS.index("forward"), KINDS.index("backward")])
    order = np.flatnonzero(computing)[np.argsort(launched[computing], kind="stable")]
    at, until = launched[order], np.maximum.accumulate(work.end[order])

    def complete(host: float) -> float:
        """When what the host has launched until then has ended."""
        place = int(np.searchsorted(at, host)) - 1
        return float(until[place]) if trace.on_device and place >= 0 else host

    def span(kind: str, begin: float, end: float) -> tuple[float, float] | None:
        rows = (launched >= begin) & (launched < end) & (work.kind == KINDS.index(kind))
        return (float(work.start[rows].min()), float(work.end[rows].max())) if rows.any() else None

    found: list[_Step] = []
    for number, (begin, end) in trace.steps.items():
        gradients = [each for each in trace.gradients if begin <= each.host < end]
        sent = [each for each in trace.collectives if each.kind == "all_reduce" and begin <= _asked(each) < end]
        reduced = tuple(each for each in sent if each.elements and (not gradients or _asked(each) >= gradients[0].host))
        backward = span("backward", begin, end)
        if backward is None or not reduced:
            continue
        layout = _layout(gradients, reduced, model)
        hosts = [each.host for each in gradients] if layout.single else [_asked(each) for each in reduced]
        ends = tuple(accumulate(map(complete, hosts), max))
        forward = span("forward", begin, hosts[0]) or backward
        update = span("optimizer", hosts[-1], end)
        first = min(forward[0], ends[0])
        last = max(ends[-1], *(each.end for each in reduced), update[1] if update else 0.0)
        edges = (first, last) if trace.on_device else (begin, max(end, last))
        turned = min(max(first, backward[0]), ends[0])
        found.append(_Step(number, *edges, (first, turned), ends, layout, reduced, update))
    if trace.on_device:
        # A device's step lasts until the next one's first kernel.
        nexts = {step.number: after.begin for step, after in pairwise(found) if after.number == step.number + 1}
        found = [step._replace(end=nexts.get(step.number, step.end)) for step in found]
    return found


def _asked(event: Seen) -> float:
    return event.start if np.isnan(event.queued) else event.queued


def _layout(gradients: Sequence[Gradient], reduced: Sequence[Seen], model: ModelGraph | None) -> _Layout:
    """Gradients fill the buckets one after another; where they do not, each bucket is a variable."""
    whole = _Layout(
        tuple(((each.elements,), _BY_BYTES.get(each.bytes // each.elements, "float32")) for each in reduced),
        tuple((place,) for place in range(len(reduced))),
        single=False,
    )
    known = [] if model is None else [(variable.shape, variable.dtype) for variable in model.gradient_order]
    tensors: list[Tensor] = []
    if all(each.shape is not None for each in gradients):
        types = (each.dtype.lower().removeprefix("c10::") for each in gradients)
        tensors = [
            (each.shape or (), _DTYPES.get(dtype, "float32")) for each, dtype in zip(gradients, types, strict=True)
        ]
    elif len(known) == len(gradients):
        tensors = known
    else:
        moments = [-np.inf, *map(_asked, reduced)]
        for (since, until), bucket in zip(pairwise(moments), reduced, strict=True):
            count = sum(since < each.host <= until for each in gradients)
            share = bucket.elements // max(1, count)
            sizes = [share] * (count - 1) + [bucket.elements - share * (count - 1)] if count else []
            tensors += [((size,), _BY_BYTES.get(bucket.bytes // bucket.elements, "float32")) for size in sizes]
    if not tensors or len(tensors) != len(gradients):
        return whole
    buckets, place = [], 0
    for bucket in reduced:
        first, left = place, bucket.elements
        while left > 0 and place < len(tensors):
            left -= product(list(tensors[place][0]))
            place += 1
        if left:
            return whole
        buckets.append(tuple(range(first, place)))
    return _Layout(tuple(tensors), tuple(buckets), single=True) if place == len(tensors) else whole


def _names(layout: _Layout, model: ModelGraph | None) -> list[str]:
    """The variables' names: the model's, by shape and order, or numbers in the order of the forward."""
    last = len(layout.tensors) - 1
    if model is None or not layout.single:
        return [f"{last - place}.gradient" for place in range(last + 1)]
    waiting: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for variable in reversed(model.gradient_order):
        waiting[variable.shape].append(variable.name)
    names = []
    for shape, _ in layout.tensors:
        if not waiting[shape]:
            raise OffbeatError(
                f"--model: the trace has one more gradient of shape {quote(shape)} than {model.name!r} has parameters"
            )
        names.append(waiting[shape].pop())
    return names


def _rank_trace(trace: Trace, steps: Sequence[_Step], world: int, names: Sequence[str], shift: float) -> RankTrace:
    """The trace in the form of the recorder's, later by `shift`."""
    if not steps:
        raise OffbeatError(f"{trace.path}: none of its steps matches those of the other ranks")
    owners = [name.rpartition(".")[0] for name in names]
    modules = list(dict.fromkeys(reversed(owners)))
    tensors = steps[0].layout.tensors
    made = []
    for step in steps:
        spans = list(pairwise((step.forward[1], *step.complete)))
        taken = dict.fromkeys(modules, 0.0)
        for owner, (begin, end) in zip(owners, spans, strict=True):
            taken[owner] += end - begin
        scale = (step.forward[1] - step.forward[0]) / (sum(taken.values()) or 1.0)
        cuts = list(accumulate((taken[module] * scale for module in modules), initial=step.forward[0] + shift))
        backward = tuple((place, begin + shift, end + shift) for place, (begin, end) in enumerate(spans))
        forward = tuple((place, *cut) for place, cut in enumerate(pairwise(cuts)))
        rows = []
        for task, (event, members) in enumerate(zip(step.reduced, step.layout.buckets, strict=True)):
            queued = min(step.complete[members[-1]], event.start)
            name = ",".join(names[member] for member in members)
            queued, issued, finished = (moment + shift for moment in (queued, event.start, event.end))
            rows.append(Collective(task, "all_reduce", name, event.bytes, world, queued, issued, finished))
        update = step.update
        made.append(
            Step(
                number=step.number,
                begin=step.begin + shift,
                end=step.end + shift,
                passes=(Pass(cuts[0], cuts[0], forward, backward, backward[-1][2]),),
                local=(("optimizer", (), update[0] + shift, update[1] + shift),) if update else (),
                communication=tuple(rows),
            )
        )
    return RankTrace(
        rank=trace.rank,
        world=world,
        job="ddp",
        machine=trace.host,
        node=trace.host,
        backend=trace.backend,
        device="" if trace.on_device else "cpu",
        modules=tuple(modules),
        parameters=tuple((name, *tensor) for name, tensor in zip(names, tensors, strict=True)),
        gradients=tuple(names),
        path=trace.path,
        steps=tuple(made),
        notes=tuple(trace.notes),
    )


def _fit(ranks: Sequence[RankTrace], backend: str, notes: list[str]) -> CollectiveFit:
    """What all-reduces cost, from the rank that each time waited least for the others."""
    seconds: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    sizes: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for step in rank.steps:
            for row in step.communication:
                seconds[step.number, row.task].append(max(row.finished - row.issued, 1e-9))
                sizes[step.number, row.task] = row.bytes
    shortest = [min(seconds[key]) for key in sizes]
    found = fit_linear(list(sizes.values()), shortest)
    overhead = found.latency_seconds
    if not overhead:
        overhead = min(ASSUMED_OVERHEAD_SECONDS.get(backend, 5e-4), min(shortest) / 2)
        notes.append(
            f"buckets of these sizes do not show the time of a small all-reduce; {overhead * 1e3:.2g} ms is assumed"
        )
    return CollectiveFit(overhead, 0.0, found.seconds_per_byte)
