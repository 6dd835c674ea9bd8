"""ModelGraph: the operators and variables of one training step on one device.

Operators are in execution order: forward, then backward, then one optimizer operator per variable. Variables are in the
order of their first use in forward. Sizes are bytes, work is FLOP, times are seconds; all for one replica's batch, or
for one of them where a step accumulates the gradients of several (`passes`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from os import PathLike
from typing import Literal

import orjson
from pydantic import TypeAdapter

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.units import quote

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop")
"""torch.optim classes that treat every element alone, so that pieces of a variable can be updated separately."""
Phase = Literal["forward", "backward", "optimizer"]

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64", "complex64"), 8),
    "complex128": 16,
}


class _Sized:
    """Sizes of anything that has a shape and an element type."""

    __slots__ = ()
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorSpec(_Sized):
    """Shape and element type of a tensor that need not exist."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of a tensor operator."""

    name: str
    kind: str
    """matmul, conv, attention, norm, embedding, elementwise, reduction, view, loss, rnn, optimizer or other."""
    target: str
    """What is called, such as 'aten.mm.default'."""
    phase: Phase
    module: str
    """Dotted path of the module the call belongs to; '' is the model itself."""
    inputs: tuple[str, ...]
    """Names of the operators whose results it reads."""
    variables: tuple[str, ...]
    """Names of the variables it reads directly or through views."""
    outputs: tuple[TensorSpec, ...]
    flops: int
    bytes_read: int
    bytes_written: int
    activation_bytes: int
    """Bytes of its result that stay allocated until backward has used them."""
    seconds: float | None = None
    """Measured time, where the graph was profiled."""

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    def estimate(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Its measured seconds; else the roofline, the slower of computing and moving memory, or 0 for a view."""
        if self.seconds is not None or self.kind == "view":
            return self.seconds or 0.0
        return max(self.flops / flops_per_second, self.bytes_moved / bytes_per_second)


@dataclass(frozen=True, slots=True)
class Variable(_Sized):
    """A trainable tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    first_use: str | None
    """Forward operator that reads it first; None if forward never does."""
    gradient_from: str | None
    """Backward operator that completes its gradient; None if it gets none."""
    sparse: bool = False
    """Its gradient names only the rows that were used (`sparse=True` embeddings)."""
    sparse_rows: int = 0
    """Rows a sparse gradient can hold at most: the indices looked up in one step."""
    factor_rows: int = 0
    """Rows of the two matrices whose product is the gradient of a dense layer's weight; 0 if it is no such product."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor in the model (tied weights)."""

    @property
    def updated_elements(self) -> int:
        """Elements that one step changes: all, or the rows of a sparse gradient."""
        return self.sparse_rows * math.prod(self.shape[1:]) if self.sparse else self.elements


@dataclass(frozen=True, slots=True)
class Constant(_Sized):
    """A tensor of the model that is not trained: a buffer or a frozen parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Literal["buffer", "frozen"]


def within(module: str, path: str) -> bool:
    """Whether a module lies in, or is, the module at `path`."""
    return module == path or module.startswith(f"{path}.")


Way = Literal["eager", "compiled", "recomputed", "bf16", "compiled bf16"]
"""How a block is computed: plain, by torch.compile, with its forward repeated in backward, under autocast."""


@dataclass(frozen=True)
class BlockTimes:
    """Measured times of consecutive modules on one device."""

    modules: tuple[str, ...]
    """Their paths, in the order in which they run."""
    seconds: Mapping[Way, tuple[float, float]]
    """Of forward and backward in a step on the device; 'eager' is always among them."""
    host: Mapping[Way, tuple[float, float]] = field(default_factory=dict)
    """Seconds in which the host launches them, where that is apart from the device's work; the same ways."""

    def __post_init__(self) -> None:
        pairs = (*self.seconds.values(), *self.host.values())
        known = all(0 <= seconds < math.inf for pair in pairs for seconds in pair)
        if "eager" not in self.seconds or not known or (self.host and self.host.keys() != self.seconds.keys()):
            raise OffbeatError(f"block {quote(' '.join(self.modules))} has no comparable seconds")

    def taken(self, way: Way) -> tuple[float, float]:
        """Seconds of forward and backward that way, of the host or the device, whichever is slower; those of 'eager'
        where the way was not measured."""
        way = way if way in self.seconds else "eager"
        forward, backward = map(max, self.seconds[way], self.host.get(way, (0.0, 0.0)))
        return forward, backward

    def factor(self, way: Way, phase: Phase) -> float:
        """By how much a phase takes longer that way; 1 where that was not measured."""
        place = ("forward", "backward").index(phase)
        before, after = self.taken("eager")[place], self.taken(way)[place]
        return after / before if before else 1.0

    def recomputing(self) -> float | None:
        """The cost of recomputation as a share of the forward; None if not measured."""
        before = self.taken("eager")
        if "recomputed" not in self.seconds or not before[0]:
            return None
        return max(0.0, sum(self.taken("recomputed")) - sum(before)) / before[0]

    def share(self, parts: int) -> "BlockTimes":
        """The times with one of `parts` equal parts of the batch, whose launching takes no less."""
        seconds = {way: (forth / parts, back / parts) for way, (forth, back) in self.seconds.items()}
        return replace(self, seconds=seconds)

    def holds(self, module: str) -> bool:
        """Whether a module is, or lies in, one of the block's."""
        return any(within(module, path) for path in self.modules)


@dataclass(frozen=True)
class ModelGraph:
    """The captured operators and variables of one training step."""

    name: str
    operators: tuple[Operator, ...]
    variables: tuple[Variable, ...]
    constants: tuple[Constant, ...] = ()
    inputs: tuple[TensorSpec, ...] = ()
    source: Literal["joint", "hooks", "skeleton"] = "joint"
    """'joint': every operator, from the joint forward and backward graph; 'hooks': one per module, from a run."""
    optimizer: str = "SGD"
    optimizer_slots: int = 0
    """Tensors of a variable's size that the optimizer keeps for it: 0 for plain SGD, 1 with momentum, 2 for Adam."""
    passes: int = 1
    """Forward and backward passes of a step in which the training loop accumulates gradients. The operators are those
    of one pass; only the last pass synchronises, and one update follows it."""
    blocks: tuple[BlockTimes, ...] = ()
    """Measured times of the model's blocks when computed differently."""
    format: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        problem = next(self._problems(), None)
        if problem is not None:
            raise OffbeatError(f"graph {quote(self.name)}: {problem}")

    def _problems(self) -> Iterator[str]:
        operators = self.operator_index
        if self.format != 1:
            yield f"format must be 1, got {self.format}"
        if self.passes < 1:
            yield f"passes must be at least 1, got {self.passes}"
        if len(operators) != len(self.operators):
            yield "two operators have the same name"
        if len(self.variable_index) != len(self.variables):
            yield "two variables have the same name"
        for position, operator in enumerate(self.operators):
            for name in operator.inputs:
                if operators.get(name, position) >= position:
                    yield f"operator {quote(operator.name)} reads {quote(name)}, which does not run before it"
            for name in operator.variables:
                if name not in self.variable_index:
                    yield f"operator {quote(operator.name)} reads no variable {quote(name)}"
        for variable in self.variables:
            for used in (variable.first_use, variable.gradient_from):
                if used is not None and used not in operators:
                    yield f"variable {quote(variable.name)} names no operator {quote(used)}"
        outputs = (output for operator in self.operators for output in operator.outputs)
        tensors: tuple[_Sized, ...] = (*self.variables, *self.constants, *self.inputs, *outputs)
        unknown = {tensor.dtype for tensor in tensors} - ITEM_BYTES.keys()
        if unknown:
            yield f"unknown dtype {quote(min(unknown))}"

    @cached_property
    def operator_index(self) -> dict[str, int]:
        """Position of each operator, by name."""
        return {operator.name: position for position, operator in enumerate(self.operators)}

    @cached_property
    def variable_index(self) -> dict[str, int]:
        """Position of each variable, by name."""
        return {variable.name: position for position, variable in enumerate(self.variables)}

    def variable(self, name: str) -> Variable:
        return self.variables[self.variable_index[name]]

    def operator(self, name: str) -> Operator:
        return self.operators[self.operator_index[name]]

    def phase(self, phase: Phase) -> tuple[Operator, ...]:
        """The operators of one phase, in order."""
        return tuple(operator for operator in self.operators if operator.phase == phase)

    @cached_property
    def gradient_order(self) -> tuple[Variable, ...]:
        """The variables that get a gradient, in the order in which backward completes them."""
        ready = [v for v in self.variables if v.gradient_from is not None and v.elements]
        position = self.operator_index
        # Autograd stores the gradients that one operator makes in the order of its arguments: weight, then bias.
        return tuple(sorted(ready, key=lambda variable: position[variable.gradient_from or ""]))

    @cached_property
    def variable_edges(self) -> tuple[tuple[str, str], ...]:
        """The forward dataflow between variables: one is read by an operator, the other by the same operator or by the
        next reading operator on some path."""
        edges: dict[tuple[str, str], None] = {}
        reached: dict[str, frozenset[str]] = {}
        """By operator, the variables whose operators were passed last on the ways to it."""
        for operator in self.phase("forward"):
            before = frozenset[str]().union(*(reached.get(name, ()) for name in operator.inputs))
            own = operator.variables
            edges |= dict.fromkeys((a, b) for b in own for a in sorted(before) if a != b)
            edges |= dict.fromkeys(pairwise(own))
            reached[operator.name] = frozenset(own) or before
        return tuple(edges)

    @property
    def parameter_count(self) -> int:
        """Elements of all variables and frozen parameters; tied weights count once."""
        frozen = sum(c.elements for c in self.constants if c.kind == "frozen")
        return frozen + sum(variable.elements for variable in self.variables)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the same."""
        return sum(v.bytes for v in self.variables) + sum(c.bytes for c in self.constants if c.kind == "frozen")

    @property
    def flops(self) -> int:
        """Floating-point operations of one pass of one rank."""
        return sum(operator.flops for operator in self.operators)

    @property
    def activation_bytes(self) -> int:
        """Bytes kept from forward for backward."""
        return sum(operator.activation_bytes for operator in self.operators)

    @cached_property
    def digest(self) -> str:
        """Equal for graphs of the same step, profiled or not and whatever their name."""
        content = asdict(self)
        content.pop("name")
        content.pop("blocks")
        if self.passes == 1:
            # Trials kept from before the field existed are found by their digest.
            content.pop("passes")
        for operator in content["operators"]:
            operator.pop("seconds")
        return files.digest(content)

    @cached_property
    def signature(self) -> str:
        """Equal for graphs with the same variables, whatever their batch and order; a strategy is made for one."""
        return files.digest(sorted((v.name, v.shape, v.dtype, v.sparse) for v in self.variables))

    def with_seconds(self, seconds: dict[str, float]) -> "ModelGraph":
        """The same graph with measured operator times."""
        timed = (replace(operator, seconds=seconds.get(operator.name, operator.seconds)) for operator in self.operators)
        return replace(self, operators=tuple(timed))

    def with_blocks(self, blocks: Iterable[BlockTimes]) -> "ModelGraph":
        """The same graph with the measured times of blocks.

        Unmeasured operators of a block share its seconds in proportion to what they compute and move; those outside
        all blocks are assumed to be as fast.
        """
        measured, found = tuple(blocks), dict[str, float]()
        for place, phase in enumerate[Phase](("forward", "backward")):
            operators = [op for op in self.phase(phase) if op.seconds is None]
            weight = {op.name: 0 if op.kind == "view" else op.flops + op.bytes_moved for op in operators}
            waiting = {op.name: op for op in operators}
            taken = heavy = 0.0
            for block in measured:
                mine = {name: weight[name] for name, op in waiting.items() if block.holds(op.module)}
                waiting = {name: op for name, op in waiting.items() if name not in mine}
                found |= divided(block.taken("eager")[place], mine)
                taken, heavy = taken + block.taken("eager")[place], heavy + sum(mine.values())
            found |= {name: weight[name] * taken / heavy for name in waiting} if heavy else {}
        return replace(self.with_seconds(found), blocks=measured)

    def with_optimizer(self, name: str, slots: int) -> "ModelGraph":
        """The same graph trained by another optimizer."""
        kept = tuple(operator for operator in self.operators if operator.phase != "optimizer")
        updates = update_operators(self.variables, name, slots)
        return replace(self, operators=kept + updates, optimizer=name, optimizer_slots=slots)

    def to_json(self) -> bytes:
        return orjson.dumps(self, option=orjson.OPT_SERIALIZE_DATACLASS)

    @classmethod
    def from_json(cls, content: bytes | str, origin: str = "graph") -> "ModelGraph":
        """Validates everything; the error names `origin`, the field and the value."""
        with files.problems_named(f"{origin}: not a model graph"):
            graph = _adapter().validate_json(content)
        try:
            # Numbers beyond 64 bits could be read, but never written again.
            graph.to_json()
        except orjson.JSONEncodeError as error:
            raise OffbeatError(f"{origin}: not a model graph: {error}") from None
        return graph

    def save(self, path: str | PathLike[str]) -> None:
        """Writes JSON atomically."""
        files.write_atomic(path, self.to_json(), "model graph")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "ModelGraph":
        """Reads what `save` wrote."""
        return cls.from_json(files.read_bytes(path, "model graph"), origin=str(path))


def update_operators(variables: Iterable[Variable], optimizer: str, slots: int) -> tuple[Operator, ...]:
    """One optimizer operator per variable that gets a gradient: it reads weight, gradient and state, and writes all but
    the gradient. A sparse gradient changes only its own rows."""
    return tuple(
        Operator(
            name=f"update.{variable.name}",
            kind="optimizer",
            target=optimizer,
            phase="optimizer",
            module=variable.name.rpartition(".")[0],
            inputs=(variable.gradient_from,),
            variables=(variable.name,),
            outputs=(),
            flops=variable.updated_elements * (2 + 4 * slots),
            bytes_read=variable.updated_elements * ITEM_BYTES[variable.dtype] * (2 + slots),
            bytes_written=variable.updated_elements * ITEM_BYTES[variable.dtype] * (1 + slots),
            activation_bytes=0,
        )
        for variable in variables
        if variable.gradient_from is not None
    )


def divided(seconds: float, weights: Mapping[str, float]) -> dict[str, float]:
    """Shares of some seconds in proportion to weights, or equal ones if all of these are 0."""
    whole = sum(weights.values())
    return {name: seconds * (weight / whole if whole else 1 / len(weights)) for name, weight in weights.items()}


@cache
def _adapter() -> TypeAdapter[ModelGraph]:
    # Building the validator takes milliseconds, which only readers of files need to wait for.
    return TypeAdapter(ModelGraph)
