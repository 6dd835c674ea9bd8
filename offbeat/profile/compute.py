"""Build a ModelGraph with measured seconds from traces, and measure its other costs: updates, gaps, slower ranks.

A step that accumulates gradients has several passes, whose mean is the graph's (`ModelGraph.passes`).

Communication slows computing down. Where both share processors, each collective takes some seconds from computing, and
some more for each byte (`Costs.processor_seconds`): as long as the recorded steps waited for a free processor, shared
out over the collectives that were under way (`own_processor_seconds`). Elsewhere, as on a GPU, a span that takes `base`
seconds alone takes `base * (1 + factor * share)` if communication is in flight for `share` of it
(`Costs.interference`). The factor is the slope of a span's relative duration over its share in different steps, pooled
over all spans (`fit_interference`).

A collective begins when its last rank has come to it, so the graph's times are those of whichever rank was last in each
step (`_slowest`). On processors that others use too, delays strike now this rank, now that one, and hardly ever the
same span twice: medians of single spans and single ranks would leave most of them out.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median, mode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.graph.model import Constant, Operator, Phase, TensorSpec, Variable, update_operators
from offbeat.plan.model import sent_per_byte
from offbeat.profile.lines import RankTrace, Step
from offbeat.simulate.predict import taken_until
from offbeat.timeline.observer import covered

STRAGGLER = 0.03
"""A rank that differs from the median by a larger share keeps a factor of its own."""
LEAST_SPREAD = 0.02
"""Least variance of the shares from which a factor is fitted."""
LEAST_SECONDS = 2e-4
"""Shorter spans are mostly noise."""
MOST = 1.0
COLLECTIVE_BYTES = 640 * 2**10
"""Bytes whose sending takes as much processor time as a collective does whatever it sends: 0.3 to 0.75 MiB in six jobs
of gloo with 3 to 160 messages a step, between emulated hosts on two cores."""
MOST_DELAYED = 1.5
"""Seconds for which computing waits for each second of the other threads' work; 0.5 to 1.2 in those jobs, whose hosts
share the two cores."""
Floats = NDArray[np.float64]
Until = Callable[[Floats], Floats]
"""A quantity that has come together up to a time."""
_UNKNOWN: dict[str, Any] = {"kind": "other", "target": "module", "inputs": (), "outputs": ()}
_UNKNOWN |= dict.fromkeys(("flops", "bytes_read", "bytes_written", "activation_bytes"), 0)
"""Fields of an operator that hooks do not tell."""


def measured_graph(
    traces: list[RankTrace], costs: Costs, parts: int = 1, synchronisations: int = 1
) -> tuple[ModelGraph, Costs]:
    """The graph that was run, and the costs with what communication took from computing in these steps.

    It has one forward operator per call of a module with parameters and one backward operator per gradient, with the
    seconds each takes while nothing is sent. `parts` is the number of micro-batches per batch of the training loop.
    """
    first = traces[0]
    calls = mode(tuple(module for module, _, _ in part.forward) for step in first.steps for part in step.passes)
    grads = mode(tuple(parameter for parameter, _, _ in part.backward) for step in first.steps for part in step.passes)
    passes = mode(len(step.passes) for step in first.steps)
    # A pass that follows a synchronising one may have waited for it.
    counted = 1 if synchronisations > 1 else passes
    costs, (forward, backward) = _alone(traces, costs, calls, grads, passes, counted)
    shapes = {name: (shape, dtype) for name, shape, dtype in first.parameters}
    names = [first.gradients[parameter] for parameter in grads]
    modules = [first.modules[module] for module in calls]
    first_call = {module: position for position, module in reversed([*enumerate(modules)])}
    used_at = {name: _first_use(name, first_call) for name in names}
    owners = [name.rpartition(".")[0] for name in names]
    operators = [_operator("forward", i, module, forward[i] * parts) for i, module in enumerate(modules)]
    operators += [_operator("backward", i, owners[i], backward[i] * parts, name) for i, name in enumerate(names)]
    memory = first.memory
    sparse = dict(memory.sparse) if memory else {}
    # Where two backward passes follow one forward, the later one completes the gradient.
    completed = {name: f"backward.{position}" for position, name in enumerate(names)}
    variables = [
        Variable(
            name,
            *shapes[name],
            f"forward.{used_at[name]}" if calls else None,
            completed[name],
            sparse=name in sparse,
            sparse_rows=min(sparse.get(name, 0), *shapes[name][0][:1]) if name in sparse else 0,
        )
        for name in sorted(completed, key=used_at.__getitem__)
    ]
    optimizer, slots = (memory.optimizer, memory.slots) if memory else ("SGD", 1)
    held = [(given * parts, kept * parts) for given, kept in memory.calls] if memory else []
    sized = _with_memory(operators, [used_at[name] for name in names], shapes, held)
    constants = [Constant(name, *shapes[name], "frozen") for name in shapes if name not in first.gradients]
    constants += [Constant("buffers", (memory.buffers,), "uint8", "buffer")] if memory and memory.buffers else []
    graph = ModelGraph(
        name=first.path.parent.name or "job",
        operators=(*sized, *update_operators(variables, optimizer, slots)),
        variables=tuple(variables),
        constants=tuple(constants),
        inputs=(TensorSpec((memory.inputs * parts,), "uint8"),) if memory else (),
        source="hooks",
        optimizer=optimizer,
        optimizer_slots=slots,
        passes=max(1, passes // parts),
    )
    return graph, costs


def _with_memory(
    operators: list[Operator],
    used: list[int],
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    held: list[tuple[int, int]],
) -> list[Operator]:
    """The operators with what they hold: a call's activations until its last gradient is complete, what it was given
    until it has run, and the gradient of that until the next gradient is complete.

    `used` is the call that each gradient belongs to, `held` the bytes given to each call and kept for it.
    """
    count = len(operators) - len(used)
    if len(held) != count or not used:
        return operators
    inputs: list[list[str]] = [[f"forward.{i - 1}"] if i else [] for i in range(count)]
    inputs += [[f"backward.{i - 1}"] if i else [] for i in range(len(used))]
    sizes = [*(given for given, _ in held[1:]), 0]
    for call in range(count):
        own = [place for place, user in enumerate(used) if user == call]
        # A call without gradients of its own is done when backward has come to one before it.
        earlier = [place for place, user in enumerate(used) if user < call]
        last = own[-1] if own else min(earlier, default=len(used) - 1)
        inputs[count + last].append(f"forward.{call}")
    for place, operator in enumerate(operators[count:]):
        own_bytes = sum(TensorSpec(*shapes[name]).bytes for name in operator.variables)
        sizes.append(held[used[place]][0] + own_bytes if used[place] else own_bytes)
    activations = [kept for _, kept in held] + [0] * len(used)
    return [
        replace(
            operator,
            inputs=tuple(inputs[place]),
            outputs=(TensorSpec((sizes[place],), "uint8"),) if sizes[place] else (),
            activation_bytes=activations[place],
        )
        for place, operator in enumerate(operators)
    ]


def with_variables_of(measured: ModelGraph, base: ModelGraph) -> ModelGraph:
    """The measured graph with the variables of another graph of the same model."""
    seen = {variable.name: variable for variable in measured.variables}
    known = {variable.name: variable for variable in base.variables}
    variables = [
        replace(known.get(name, variable), first_use=variable.first_use, gradient_from=variable.gradient_from)
        for name, variable in seen.items()
    ]
    variables += [replace(v, first_use=None, gradient_from=None) for name, v in known.items() if name not in seen]
    compute = tuple(operator for operator in measured.operators if operator.phase != "optimizer")
    updates = update_operators(variables, base.optimizer, base.optimizer_slots)
    return replace(
        measured,
        operators=compute + updates,
        variables=tuple(variables),
        constants=base.constants,
        optimizer=base.optimizer,
        optimizer_slots=base.optimizer_slots,
    )


def _alone(
    traces: list[RankTrace], costs: Costs, calls: tuple[int, ...], grads: tuple[int, ...], passes: int, counted: int
) -> tuple[Costs, tuple[list[float], list[float]]]:
    """The costs with what communication takes from computing, and the seconds of each forward and backward span
    without that.

    Steps that make these calls and gradients in so many passes count, with the first `counted` of their passes.
    """
    told = own_processor_seconds(traces, costs)
    costs = told or replace(costs, processor_seconds=0.0, processor_seconds_per_byte=0.0)
    untils = [_busy(trace) if told is None else taken_by(trace, told) for trace in traces]
    scale = compute_scale(traces)
    phases = []
    for spans, keys in (("forward", calls), ("backward", grads)):
        phase = []
        for trace, until in zip(traces, untils, strict=True):
            steps, s, grown = _spans(trace, spans, keys, passes, until)
            if steps:
                phase.append((scale.get(trace.rank, 1.0), steps, s[:, :counted], grown[:, :counted]))
        phases.append(phase)
    if not all(phases):
        raise OffbeatError(
            f"{traces[0].path.parent}: the passes of a step do not call the same modules in the same order"
        )
    if told is None:
        shares = [(s, busy / np.maximum(s, 1e-12)) for phase in phases for *_, s, busy in phase]
        flat = [(s.reshape(-1, s.shape[-1]), share.reshape(-1, s.shape[-1])) for s, share in shares]
        costs = replace(costs, interference=fit_interference(flat))
        lost = costs.interference / (1 + costs.interference)
    else:
        lost = 1.0
    forward, backward = (
        _slowest([(steps, (s - lost * grown) / factor) for factor, steps, s, grown in phase]) for phase in phases
    )
    return costs, (forward, backward)


def _slowest(ranks: list[tuple[list[int], Floats]]) -> list[float]:
    """Seconds of each span, so that they add up to what the last rank needed in a usual step, up to every span's end.

    For each rank the numbers of its steps, and their spans' seconds: an array (steps, passes, spans).
    """
    common = sorted(set.intersection(*(set(steps) for steps, _ in ranks)))
    reached = [np.cumsum(s[np.searchsorted(steps, common)].mean(axis=1), axis=1) for steps, s in ranks if common]
    reached = reached or [np.cumsum(s.mean(axis=1), axis=1) for _, s in ranks[:1]]
    usual = np.maximum.accumulate(np.median(np.max(reached, axis=0), axis=0))
    return np.diff(np.maximum(usual, 0.0), prepend=0.0).tolist()


def _spans(
    trace: RankTrace, spans: str, wanted: tuple[int, ...], passes: int, until: Until
) -> tuple[list[int], Floats, Floats]:
    """The steps that made the wanted calls, the seconds of each span of `Pass.forward` or `Pass.backward` in them, and
    how much `until` grows in it: arrays (steps, passes, spans).
    """
    numbers, seconds, grown = [], [], []
    for step in trace.steps:
        found = [getattr(part, spans) for part in step.passes]
        if [tuple(key for key, _, _ in part) for part in found] != [wanted] * passes:
            continue
        start = np.array([[begin for _, begin, _ in part] for part in found])
        end = np.array([[finish for _, _, finish in part] for part in found])
        numbers.append(step.number)
        seconds.append(end - start)
        grown.append(until(end) - until(start))
    return numbers, np.array(seconds), np.array(grown)


def _busy(trace: RankTrace) -> Until:
    """Seconds, up to a time, in which at least one collective was under way."""
    rows = [row for step in trace.steps for row in step.communication]
    start, end = np.array([row.issued for row in rows]), np.array([row.finished for row in rows])
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    start = np.maximum(start, np.append(-np.inf, reached)[: len(start)])
    return taken_until(start, np.maximum(reached, start), np.maximum(reached - start, 0.0))


def taken_by(trace: RankTrace, costs: Costs) -> Until:
    """Seconds that communication had taken from computing up to a time."""
    rows = [row for step in trace.steps for row in step.communication]
    start, end = np.array([row.issued for row in rows]), np.array([row.finished for row in rows])
    sent = np.array([row.bytes * sent_per_byte(row.kind, row.ranks) for row in rows])
    taken = costs.processor_seconds + costs.processor_seconds_per_byte * sent
    return taken_until(start, np.maximum(end, start), taken)


def own_processor_seconds(traces: list[RankTrace], costs: Costs) -> Costs | None:
    """The costs with as much taken from computing as the recorded steps waited for a free processor; None where
    traces do not tell.

    Steps also wait while other processes run, so no more counts than what this process's own threads can account for.
    """
    unit = replace(costs, interference=0.0, processor_seconds=float(COLLECTIVE_BYTES), processor_seconds_per_byte=1.0)
    per_byte = []
    for trace in traces if traces[0].device in ("", "cpu") else ():
        until, found = taken_by(trace, unit), []
        for step in trace.steps:
            busy = [*_compute_spans(step), *((start, end) for kind, _, start, end in step.local if kind != "wait")]
            spans = np.array(busy).reshape(-1, 2)
            beside = float((until(spans[:, 1]) - until(spans[:, 0])).sum())
            if step.processor is not None and beside:
                found.append((min(step.processor.delayed, MOST_DELAYED * step.processor.helpers), beside))
        delayed, beside = (sum(column) for column in zip(*found, strict=True)) if found else (0.0, 0.0)
        if delayed:
            per_byte.append(delayed / beside)
    if not per_byte:
        return None
    each = median(per_byte)
    return replace(unit, processor_seconds=each * COLLECTIVE_BYTES, processor_seconds_per_byte=each)


def fit_interference(samples: list[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> float:
    """The factor, from (seconds, shares) of all ranks; 0 where they do not show one."""
    above, below, total, count = 0.0, 0.0, 0.0, 0
    for seconds, shared in samples:
        if len(seconds) < 3:
            continue
        usual = np.median(seconds, axis=0)
        long = usual > LEAST_SECONDS
        relative = np.clip(seconds[:, long] / usual[long], 0.0, 3.0)
        share = shared[:, long]
        moved = share - share.mean(axis=0)
        above += float((moved * (relative - relative.mean(axis=0))).sum())
        below += float((moved**2).sum())
        total += float(share.sum())
        count += share.size
    if not count or below / count < LEAST_SPREAD:
        return 0.0
    slope = max(above / below, 0.0)
    # The durations are relative to the one at the mean share, which already includes interference.
    return min(slope / max(1 - slope * total / count, 0.1), MOST)


def _first_use(variable: str, first_call: dict[str, int]) -> int:
    """The first call of the module that owns the variable, or of the nearest enclosing module that is called."""
    owner = variable.rpartition(".")[0]
    while owner not in first_call and owner:
        owner = owner.rpartition(".")[0]
    return first_call.get(owner, 0)


def _operator(phase: Phase, number: int, module: str, seconds: float, *variables: str) -> Operator:
    name = f"{phase}.{number}"
    return Operator(name=name, phase=phase, module=module, variables=variables, seconds=seconds, **_UNKNOWN)


def _compute_spans(step: Step) -> list[tuple[float, float]]:
    return [(start, end) for part in step.passes for _, start, end in part.forward + part.backward]


def compute_scale(traces: list[RankTrace]) -> dict[int, float]:
    seconds = {
        trace.rank: median(sum(end - start for start, end in _compute_spans(step)) for step in trace.steps)
        for trace in traces
    }
    usual = median(seconds.values())
    return {rank: mine / usual for rank, mine in seconds.items() if usual and abs(mine / usual - 1) > STRAGGLER}


def host_late_share(traces: list[RankTrace]) -> float:
    """The share of a step in which the GPU has nothing to do because the host is late."""
    steps = [step for trace in traces for step in trace.steps]
    return median(step.host_late_ns * 1e-9 / max(step.end - step.begin, 1e-9) for step in steps)


def gap_seconds(traces: list[RankTrace]) -> float:
    """Seconds of a step in which a rank neither computes nor waits nor updates."""
    left = []
    for trace in traces:
        for step in trace.steps:
            busy = [*_compute_spans(step), *((start, end) for _, _, start, end in step.local)]
            left.append(step.end - step.begin - covered([*busy, *_waits_behind_backward(trace, step)]))
    return max(0.0, median(left))


def _waits_behind_backward(trace: RankTrace, step: Step) -> list[tuple[float, float]]:
    """Waits for collectives that no hook shows: DDP's inside backward, and those before another pass."""
    waits = []
    for part, following in pairwise(step.passes):
        sent = [row.finished for row in step.communication if part.begin <= row.queued < following.begin]
        if sent:
            waits.append((part.end, min(max(part.end, *sent), following.reached)))
    last = step.passes[-1]
    if trace.job != "offbeat" and trace.world > 1 and last.backward:
        updates = [start for kind, _, start, _ in step.local if kind == "optimizer" and start >= last.end]
        waits.append((last.end, updates[0] if updates else step.end))
    return waits


def update_costs(traces: list[RankTrace], graph: ModelGraph) -> tuple[float, float]:
    """Seconds per optimizer call and per byte updated."""
    total = sum(variable.bytes for variable in graph.variables)
    steps = [[(kind, end - start) for kind, _, start, end in step.local] for trace in traces for step in trace.steps]
    calls = [[seconds for kind, seconds in step if kind in ("optimizer", "update")] for step in steps]
    count, spent = median(map(len, calls)), median(map(sum, calls))
    if not count or not total:
        return 0.0, 0.0
    # The shortest calls show what a call costs whatever it updates.
    shortest = [min((seconds for kind, seconds in step if kind == "update"), default=0.0) for step in steps]
    per_call = median(shortest) if count > 1 else 0.0
    return per_call, max(0.0, spent - per_call * count) / total
