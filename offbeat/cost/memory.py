"""Estimate the peak memory of a rank: the bytes of each kind of tensor at the peak.

The estimate replays the operators in the order of the plan's segments, as dPRO estimates peak memory from its dataflow
graph (section 5, table 3). A result is allocated when its operator runs and freed after its last reader; of a forward
result only what backward reads stays (`Operator.activation_bytes`) once forward has done with it. Views share their
source's memory. Recomputed modules run again before their backward, and micro-batches hold a share of the batch each.

What does not come and go with operators is added beside: weights, the optimizer's slots (on the ranks that apply the
update), the batch, and the buffers of Offbeat's runtime. Gradients are allocated as backward makes them; Offbeat's
runtime copies them into flat buffers that persist, torch's own loop keeps them until `zero_grad()`. On GPUs cuBLAS is
taken to have a workspace of its default size; those of convolutions are not known.

With `fully_shard`, what persists is a rank's own parts. Each unit's variables come and go beside them (`_add_units`):
the flat buffer they are gathered into, from when that is issued; they themselves, until they are freed; and the flat
buffer of gradients that is reduced while the next unit computes.

Not counted: the process itself, the CUDA context, the allocator's fragmentation.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.graph.model import ITEM_BYTES, ModelGraph, Operator, Variable
from offbeat.plan.model import Message, Plan

Runtime = Literal["offbeat", "torch"]

SCALAR_BYTES = 4
"""The step counter that Adam and similar optimizers keep for each variable."""
COUNTING = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Adagrad", "Rprop", "RMSprop", "Adadelta")
SINGLE_TEMPORARIES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Adagrad": 2, "Adadelta": 2}
"""Tensors of a variable's size that torch's single-tensor update holds at once (its default on CPUs): the square root
and its quotient, for Adam."""
FOREACH_TEMPORARIES = {"Adam": 1, "AdamW": 1, "NAdam": 1, "RAdam": 2, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2}
"""The same for the foreach update (its default on GPUs), which holds them for all variables at once."""
BLAS_WORKSPACE_BYTES = 8 * 2**20 + 128 * 2**10
"""cuBLAS's workspace on GPUs (CUBLAS_WORKSPACE_CONFIG :4096:2:16:8), one for each handle and stream."""
HOPPER_WORKSPACE_BYTES = 32 * 2**20
HOPPER = ("H100", "H200", "GH200")


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank at the moment of its peak, by what holds them."""

    weights: int
    """Variables, frozen parameters and buffers, and copies of them that the runtime sends from."""
    gradients: int
    """Gradients made by autograd, and the flat buffers in which they are sent."""
    optimizer_state: int
    activations: int
    """Results of operators: kept for backward, or passed on to the next operator."""
    communication: int
    """Encoded payloads, received data, residuals, messages still in flight."""
    inputs: int
    """The whole batch, data and labels."""
    workspace: int
    """Temporary tensors of the optimizer's step, and the libraries' workspaces."""
    peak_at: str = ""
    """The operator that runs at the peak; 'optimizer' for the optimizer's step."""

    @property
    def total(self) -> int:
        return sum(value for value in astuple(self) if isinstance(value, int))


def peak_memory(plan: Plan, rank: int | None = None, *, runtime: Runtime = "offbeat") -> MemoryEstimate:
    """What `rank` holds at its peak, from the second step on (when the optimizer's state exists).

    `rank` may be left out of a plan for one rank. `runtime="torch"` is a plain training loop on one device, with
    `zero_grad(set_to_none=True)`.
    """
    if rank is None:
        rank = plan.rank if plan.rank is not None else plan.replicas[0]
    if not 0 <= rank < plan.cluster.world_size:
        raise OffbeatError(f"memory: rank {rank} is outside the cluster of {plan.cluster.world_size} ranks")
    held, at_step = _standing(plan, rank, runtime)
    names, passing = _replay(plan, runtime) if rank in plan.replicas else ((), {})
    totals = sum(passing.values(), np.zeros(len(names), np.int64))
    if at_step.total() >= totals.max(initial=0):
        held.update(at_step)
        at = "optimizer"
    else:
        peak = int(totals.argmax())
        held.update({kind: int(held_bytes[peak]) for kind, held_bytes in passing.items()})
        at = names[peak]
    kinds = (each.name for each in fields(MemoryEstimate) if each.name != "peak_at")
    return MemoryEstimate(**{kind: held[kind] for kind in kinds}, peak_at=at)


Bytes = Counter[str]
"""By the fields of MemoryEstimate."""


def _standing(plan: Plan, rank: int, runtime: Runtime) -> tuple[Bytes, Bytes]:
    """Memory allocated whichever operator runs, and the additional memory of the optimizer's step."""
    graph, device = plan.graph, plan.cluster.device_of(rank).device
    hopper = any(name in device.upper() for name in HOPPER)
    library = HOPPER_WORKSPACE_BYTES if hopper else BLAS_WORKSPACE_BYTES
    held = Counter(
        weights=sum(v.bytes for v in graph.variables) + sum(c.bytes for c in graph.constants),
        inputs=sum(tensor.bytes for tensor in graph.inputs),
        workspace=0 if device == "cpu" else library,
    )
    at_step: Bytes = Counter()
    if runtime == "torch":
        at_step["gradients"] = sum(gradient_bytes(variable) for variable in graph.gradient_order)
        _add_updates(held, at_step, [variable.bytes for variable in graph.gradient_order], plan, rank)
        return held, at_step
    if plan.strategy.fsdp is not None:
        _add_parts(held, at_step, plan, rank)
        return held, at_step
    if len(plan.replicas) > 1:
        held["communication"] = sum(c.bytes for c in graph.constants if c.kind == "buffer")
    for message in plan.messages if rank in plan.replicas else [m for m in plan.messages if rank in m.servers]:
        _add_message(held, at_step, message, plan, rank)
    return held, at_step


def _add_parts(held: Bytes, at_step: Bytes, plan: Plan, rank: int) -> None:
    """A rank's own shards of fully sharded variables: values, gradients and state."""
    sizes = [variable.bytes for variable in plan.graph.gradient_order]
    frozen = sum(constant.bytes for constant in plan.graph.constants if constant.kind == "frozen")
    whole = sum(variable.bytes for variable in plan.graph.variables) + frozen
    held["weights"] -= whole - whole // plan.shards
    at_step["gradients"] = sum(sizes) // plan.shards
    if plan.strategy.accumulation > 1:
        # The sum of the earlier micro-batches' gradients is kept aside.
        held["gradients"] = sum(sizes) // plan.shards
    _add_updates(held, at_step, sizes, plan, rank, 1 / plan.shards)


def _add_message(held: Bytes, at_step: Bytes, message: Message, plan: Plan, rank: int) -> None:
    graph, ranks = plan.graph, len(plan.replicas)
    if message.synchronizer in ("sparse_all_gather", "sparse_parameter_server"):
        received = message.gradient_bytes * (ranks if rank == message.owner or message.owner is None else 1)
        at_step["gradients"] += sum(gradient_bytes(graph.variable(name)) for name in message.variables)
        at_step["communication"] += received + message.parameter_bytes
    else:
        held["gradients"] += message.bytes
        parts = sum(p.elements for p in message.pieces if p.shape != graph.variable(p.variable).shape)
        # A part of a variable cannot be a view of the whole variable's gradient or value.
        at_step["gradients"] += parts * ITEM_BYTES[message.dtype]
        if message.synchronizer in ("parameter_server", "sharded"):
            held["weights"] += parts * ITEM_BYTES[message.dtype]
        persistent, under_way = _message_buffers(message, ranks)
        held["communication"] += persistent
        at_step["communication"] += under_way
    if plan.strategy.accumulation > 1:
        at_step["gradients"] += message.bytes
    share = 1.0
    if message.owner is not None or rank not in plan.replicas:
        share = float(rank == message.owner)
    elif message.synchronizer == "sharded":
        share = 1.0 / ranks
    if share:
        elements: Counter[str] = Counter()
        for piece in message.pieces:
            elements[piece.variable] += piece.elements
        sizes = [count * ITEM_BYTES[graph.variable(name).dtype] for name, count in elements.items()]
        _add_updates(held, at_step, sizes, plan, rank, share)


def _add_updates(held: Bytes, at_step: Bytes, sizes: Sequence[int], plan: Plan, rank: int, share: float = 1.0) -> None:
    """State of variables of these sizes, of which the rank updates a share, and temporaries of the largest update."""
    optimizer = plan.graph.optimizer
    updated = int(sum(sizes) * share)
    counters = SCALAR_BYTES * len(sizes) if optimizer in COUNTING else 0
    held["optimizer_state"] += plan.graph.optimizer_slots * updated + counters
    if plan.cluster.device_of(rank).device == "cpu":
        # A rank's part of a message may hold the largest variable whole.
        largest = min(max(sizes, default=0), updated)
        at_step["workspace"] = max(at_step["workspace"], SINGLE_TEMPORARIES.get(optimizer, 0) * largest)
        return
    temporaries = FOREACH_TEMPORARIES.get(optimizer, 0) * updated
    # With a barrier one step updates all messages; deferred updates come one message at a time.
    together = at_step["workspace"] + temporaries
    at_step["workspace"] = together if plan.mode == "barrier" else max(at_step["workspace"], temporaries)


def gradient_bytes(variable: Variable) -> int:
    """Bytes of the gradient that autograd makes: as many as the variable, or a sparse one's rows and their numbers."""
    if not variable.sparse:
        return variable.bytes
    return variable.updated_elements * ITEM_BYTES[variable.dtype] + variable.sparse_rows * ITEM_BYTES["int64"]


def _message_buffers(message: Message, ranks: int) -> tuple[int, int]:
    """(bytes that persist, bytes while the message is in flight), in addition to its flat buffer."""
    persistent = message.bytes if message.encoder.feedback else 0
    persistent += message.bytes * (message.staleness + 1 if message.staleness else 0)
    under_way = 0
    if message.synchronizer == "factor_broadcast":
        under_way = message.gradient_bytes * (ranks + 1)
    elif message.synchronizer == "sharded":
        # Its own part of the gradient, as it came and as it is applied; then the parameters of all.
        persistent += (message.bytes + message.gradient_bytes) // ranks
        under_way = message.bytes + message.bytes // ranks if ranks > 1 else 0
        under_way += message.gradient_bytes if message.encoder.name != "none" else 0
    elif message.encoder.name != "none":
        under_way = message.gradient_bytes * (1 + ranks if message.encoder.gathered else 1)
    return persistent, under_way


@dataclass(slots=True)
class _Result:
    """The memory that one run of an operator allocates."""

    operator: Operator
    made: int
    """Position in the order of execution."""
    read_whole: int
    """Position of the last reader that may read all of it."""
    kept_until: int
    """Position of the last backward operator that reads what forward keeps."""
    sources: tuple["_Result", ...] = ()
    """What its operator reads."""
    summed_into: "_Result | None" = None
    """The memory it may take over, if it is the sum of two gradients."""
    gradients: list[Variable] = field(default_factory=list)
    """The variables whose gradient is (a part of) it."""
    of_weights: bool = False
    """It is shaped like a weight, so a smaller batch does not shrink it."""


def _replay(plan: Plan, runtime: Runtime) -> tuple[list[str], dict[str, NDArray[np.int64]]]:
    """Operators of the last micro-batch, each twice, and by kind the bytes that come and go, held before it runs and
    while it does; of the gradients, those beside the flat buffers of Offbeat's runtime."""
    # The operators of one micro-batch as they run, each with whether it runs as a part of forward.
    order = [
        (plan.graph.operator(name), segment.phase == "forward" or segment.recomputed)
        for segment in plan.segments
        if segment.microbatch == 0
        for name in segment.operators
    ]
    results, latest = _results(order)
    _assign_gradients(plan.graph, latest)
    count = plan.strategy.accumulation
    length = len(order)
    changes = {kind: np.zeros(2 * length + 2, np.int64) for kind in ("activations", "gradients")}
    activations, gradients = changes.values()
    kept_until = _gradient_ends(plan, results, length, runtime)
    for result in results:
        share = 1 if result.of_weights else count
        # A sum that takes over the memory of its first term allocates nothing until that is free.
        in_place = result.summed_into is not None and result.summed_into.kept_until == result.made
        made = result.made + in_place
        size = sum(tensor.bytes for tensor in result.operator.outputs)
        owned = 0
        for variable in result.gradients:
            # The last micro-batch's gradient is added to the sum of the others at once.
            end = kept_until[variable.name] if count == 1 or plan.strategy.fsdp is not None else result.made
            _hold(gradients, made, end, gradient_bytes(variable))
            owned += variable.bytes
        passed_on = max(0, size - owned) // share
        _hold(activations, made, result.read_whole, passed_on)
        if result.kept_until > result.read_whole:
            kept = passed_on if result.operator.phase == "backward" else result.operator.activation_bytes // share
            _hold(activations, result.read_whole + 1, result.kept_until, kept)
    if plan.strategy.fsdp is not None:
        changes |= {kind: np.zeros(2 * length + 2, np.int64) for kind in ("weights", "communication")}
        _add_units(changes, plan)
    for variable in plan.graph.gradient_order if count > 1 and plan.strategy.fsdp is None else ():
        # The sum of the earlier micro-batches' gradients; Offbeat also holds its scaled copy until that is sent.
        gradients[0] += gradient_bytes(variable)
        if runtime == "offbeat":
            _hold(gradients, 0, kept_until[variable.name], gradient_bytes(variable))
    names = [operator.name for operator, _ in order for _ in range(2)]
    return names, {kind: np.cumsum(changed)[: 2 * length] for kind, changed in changes.items()}


def _add_units(changes: dict[str, NDArray[np.int64]], plan: Plan) -> None:
    """What fully sharded units hold beside a rank's own parts, in one micro-batch.

    Before the first operator that needs a unit, its variables are copied out of the buffer that was gathered. On GPUs
    torch keeps the buffer of a forward gather until the next unit's has been copied or forward ends. The buffer that is
    reduced it keeps until the next unit's gradients are complete; before it copies gradients into that buffer, it frees
    the variables.
    """
    ends = _segment_ends(plan)
    weights, communication, gradients = (changes[kind] for kind in ("weights", "communication", "gradients"))
    last = ends[-1] - 1
    backward = next((number for number, segment in enumerate(plan.segments) if segment.phase == "backward"), 0)
    streams = plan.cluster.device_of(plan.replicas[0]).device != "cpu"
    mine = [(task, window) for task in plan.tasks if (window := task.window) and window.issued < len(ends)]
    gathers = [each for each in mine if each[0].kind == "all_gather"]
    in_parts: dict[int, int] = {}
    for (task, window), later in zip(gathers, [*gathers[1:], None], strict=True):
        message = plan.messages[task.message]
        begin, end = _before(ends, window.needed), ends[window.freed] - 1
        forward = plan.segments[window.needed].phase == "forward"
        _hold(weights, begin, end, message.parameter_bytes)
        until = begin
        if forward and streams:
            until = _before(ends, backward if later is None else min(later[1].needed, backward))
        _hold(communication, _before(ends, window.issued), until, message.parameter_bytes)
        if forward:
            in_parts[message.index] = end + 1
        elif len(task.ranks) < plan.shards:
            _hold(weights, in_parts[message.index], begin, message.parameter_bytes // len(task.ranks))
    reductions = [each for each in mine if each[0].kind == "reduce_scatter"]
    for (task, window), later in zip(reductions, [*reductions[1:], None], strict=True):
        message, at = plan.messages[task.message], ends[window.issued] - 1
        until = last if later is None else ends[later[1].issued] - 1
        if at < last:
            _hold(gradients, at + 1, last, message.bytes // plan.shards)
            _hold(communication, at + 1, max(at + 1, until), message.gradient_bytes)
        # Where gradients are reduced in a wider type than variables are gathered in.
        _hold(communication, at, at, max(0, message.gradient_bytes - message.parameter_bytes))


def _segment_ends(plan: Plan) -> list[int]:
    """Of each segment of a micro-batch, the number of operators that have run when it ends."""
    return list(accumulate(len(segment.operators) for segment in plan.segments if segment.microbatch == 0))


def _before(ends: Sequence[int], segment: int) -> float:
    """The moment before a segment's first operator."""
    return (ends[segment - 1] if segment else 0) - 0.5


def _hold(changes: NDArray[np.int64], first: float, last: float, size: int) -> None:
    """Bytes that are held from one operator to another, by their positions; half of one is the moment before it."""
    changes[int(2 * first) + 1] += size
    changes[int(2 * last) + 2] -= size


def _results(order: list[tuple[Operator, bool]]) -> tuple[list[_Result], dict[str, _Result | None]]:
    """All memory that operators allocate; and what each leaves: memory of its own, or that of the result it is a view
    of. An operator that runs again leaves a new result, which is the one that later readers read."""
    latest: dict[str, _Result | None] = {}
    results: list[_Result] = []
    for position, (operator, forward) in enumerate(order):
        sources = tuple(source for name in operator.inputs if (source := latest.get(name)) is not None)
        for source in sources:
            if forward or source.operator.phase == "backward":
                source.read_whole = position
            source.kept_until = position
        if operator.kind == "view":
            viewed = sources[0] if sources else None
        else:
            summed = operator.phase == "backward" and operator.target == "aten.add.Tensor" and len(operator.inputs) > 1
            first = latest.get(operator.inputs[0]) if summed else None
            # Autograd may add the second gradient into the first one, unless that is a view of something else.
            into = first if first is not None and first.operator.name == operator.inputs[0] else None
            # Autocast's copy of a weight has no batch dimension.
            cast = operator.target.startswith("aten._to_copy") and bool(operator.variables) and not operator.inputs
            viewed = _Result(operator, position, position, position, sources, into, of_weights=cast)
            results.append(viewed)
        latest[operator.name] = viewed
    return results, latest


def _assign_gradients(graph: ModelGraph, latest: dict[str, _Result | None]) -> None:
    """Gives each result the variables whose gradient it is.

    The terms of such a sum (tied weights), and what the gradient was cast from, are shaped like the weight.
    """
    for variable in graph.gradient_order:
        result = latest.get(variable.gradient_from or "")
        if result is not None and result.operator.phase == "backward":
            result.gradients.append(variable)
            terms = [result]
            while terms:
                term = terms.pop()
                if term.operator.target.startswith(("aten.add.", "aten._to_copy.")):
                    for source in term.sources:
                        source.of_weights = True
                    terms += term.sources


def _gradient_ends(plan: Plan, results: list[_Result], length: int, runtime: Runtime) -> dict[str, int]:
    """Position up to which autograd's own gradient of each variable is held."""
    made = {v.name: result.made for result in results for v in result.gradients}
    if runtime == "torch":
        return dict.fromkeys(made, length - 1)
    ends: dict[str, int] = {}
    if plan.strategy.fsdp is not None:
        segment_ends = _segment_ends(plan)
        places = {t.message: t.window.issued for t in reversed(plan.tasks) if t.window and t.kind == "reduce_scatter"}
        last = {index: segment_ends[min(at, len(segment_ends) - 1)] - 1 for index, at in places.items()}
        return {name: last[message.index] for message in plan.messages for name in message.variables}
    for message in plan.messages:
        loaded = max((made.get(name, 0) for name in message.variables), default=0)
        sparse = message.synchronizer in ("sparse_all_gather", "sparse_parameter_server")
        for piece in message.pieces:
            whole = piece.shape == plan.graph.variable(piece.variable).shape and not sparse
            ends[piece.variable] = max(ends.get(piece.variable, 0), loaded if whole else length - 1)
    return ends
