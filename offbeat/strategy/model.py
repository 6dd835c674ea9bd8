"""Strategy: how each variable is synchronised, how the step is scheduled, and how operators are split.

The two-level representation of AutoDist §2.2 (graph level, and per variable with a configuration per shard), with
PACE's schedule, dPRO's memory and fusion decisions and TensorOpt's operator splits. Frozen data: builders and
searches make strategies, `offbeat.lower` reads them. JSON files hold only what differs from the defaults.
"""

import json
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import accumulate, islice, pairwise
from os import PathLike
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator

from offbeat import files
from offbeat.errors import OffbeatError, StrategyError
from offbeat.graph.model import within
from offbeat.strategy.describe import describe
from offbeat.units import quote

FORMAT: Final = 1

Synchronizer = Literal[
    "all_reduce",
    "parameter_server",
    "sharded",
    "sparse_all_gather",
    "sparse_parameter_server",
    "factor_broadcast",
    "summation_server",
]
EncoderName = Literal["none", "fp16", "bf16", "topk", "randomk", "sign", "int8", "powersgd"]
Rank = Annotated[int, Field(ge=0)]
SERVERS = ("parameter_server", "sparse_parameter_server")
Engine = Literal["replicated", "sharded", "fsdp", "split"]
"""What runs a strategy: replicas with all variables, replicas that update a part of them each (ZeRO), torch's
`fully_shard`, or operators that are split over devices."""
ENGINES: tuple[Engine, ...] = get_args(Engine)


def _list(values: Iterable[int]) -> str:
    return quote(list(values))


class _Frozen(BaseModel):
    """Data that reports its own errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        problem = next(self._problems(), None)
        if problem is not None:
            raise StrategyError(problem)
        return self

    @abstractmethod
    def _problems(self) -> Iterator[str]:
        """One sentence for each problem."""


class Encoder(_Frozen):
    """How a message is encoded before it is sent. Lossy encoders change the training; the default is none."""

    name: EncoderName = "none"
    ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the elements that topk and randomk keep."""
    rank: Annotated[int, Field(ge=1)] | None = None
    """Rank of PowerSGD's approximation."""
    error_feedback: bool | None = None
    """Adds the encoding error to the next step's gradient; None means yes for every encoder but fp16 and bf16."""

    def _problems(self) -> Iterator[str]:
        for option, encoders in (("ratio", ("topk", "randomk")), ("rank", ("powersgd",))):
            given = getattr(self, option) is not None
            if given != (self.name in encoders):
                yield f"encoder {self.name!r} {'takes no' if given else 'needs a'} {option}"

    @property
    def feedback(self) -> bool:
        wanted = not self.sliceable if self.error_feedback is None else self.error_feedback
        return wanted and self.name != "none"

    @property
    def gathered(self) -> bool:
        """Encoded messages cannot be summed on the way, so every rank receives all of them."""
        return self.name in ("topk", "sign", "int8")

    @property
    def sliceable(self) -> bool:
        """A message can be cut anywhere without changing its encoding."""
        return self.name in ("none", "fp16", "bf16")


class Shard(_Frozen):
    """How one shard of a variable is synchronised."""

    synchronizer: Synchronizer = "all_reduce"
    placement: tuple[Rank, ...] = ()
    """Ranks that hold the shard: one for a parameter server (its owner); () is every replica. For summation servers:
    the ranks that sum it, each as much as its link allows; () is the ranks with spare link capacity."""
    stations: tuple[Rank, ...] = ()
    """Transfer stations of a hierarchical server: replicas on a station's node reduce to it first."""
    reduction_order: tuple[Rank, ...] = ()
    """Order of the ranks in the ring; () is ascending."""
    group: Annotated[int, Field(ge=0)] | None = None
    """Shards with the same number and kind share one message; None is sent alone."""
    encoder: Encoder = Encoder()
    staleness: Annotated[int, Field(ge=0)] = 0
    """The fastest replica may be this many steps ahead of the slowest."""
    asynchronous: bool = False
    """No bound at all: a server applies each replica's gradient as it arrives."""

    def _problems(self) -> Iterator[str]:
        kind = self.synchronizer
        if kind in SERVERS and len(self.placement) != 1:
            yield f"a {kind} shard is placed on one rank, its owner, not on {_list(self.placement)}"
        if self.stations and kind != "parameter_server":
            yield f"stations {_list(self.stations)} belong to a parameter_server shard, not to {kind}"
        if self.asynchronous and (kind != "parameter_server" or self.staleness):
            yield f"an asynchronous shard needs a parameter_server without staleness, not {kind}"
        if self.staleness and kind not in ("all_reduce", "parameter_server"):
            yield f"a {kind} shard takes no staleness, not {self.staleness}"
        if (self.asynchronous or self.staleness) and (self.encoder.name != "none" or self.stations):
            yield "a stale or asynchronous shard takes neither an encoder nor stations"
        if self.encoder.name != "none" and kind not in ("all_reduce", "parameter_server", "sharded"):
            yield f"a {kind} shard takes no encoder, not {self.encoder.name!r}"
        if self.encoder.name == "powersgd" and kind != "all_reduce":
            yield f"the powersgd encoder takes two rounds and needs all_reduce, not {kind}"
        if kind == "sharded" and not self.encoder.sliceable:
            yield f"a sharded shard takes the encoders none, fp16 and bf16, not {self.encoder.name!r}"
        for field in ("placement", "stations", "reduction_order"):
            ranks = getattr(self, field)
            if len(set(ranks)) != len(ranks):
                yield f"{field} {_list(ranks)} names a rank twice"

    @property
    def owner(self) -> int | None:
        """The server's rank, for server shards."""
        return self.placement[0] if self.synchronizer in SERVERS else None


class VariableConfig(_Frozen):
    """A variable's partition vector (AutoDist's p_i) and the configuration of each of its shards."""

    partition: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Number of shards along each axis; () keeps the variable whole."""
    cuts: tuple[tuple[Annotated[int, Field(ge=1)], ...], ...] = ()
    """Where each axis is cut, for shards of given sizes; () cuts as evenly as whole elements allow."""
    shards: Annotated[tuple[Shard, ...], Field(min_length=1)] = (Shard(),)
    """One per shard in row-major order, or a single one for all."""

    def _problems(self) -> Iterator[str]:
        count = self.shard_count
        if len(self.shards) not in (1, count):
            yield f"partition {_list(self.partition)} makes {count} shards, but {len(self.shards)} are given"
        if self.cuts:
            if len(self.cuts) != len(self.partition):
                yield f"cuts are given for {len(self.cuts)} axes, the partition has {len(self.partition)}"
            for axis, (cuts, parts) in enumerate(zip(self.cuts, self.partition, strict=True)):
                if len(cuts) != parts - 1:
                    yield f"axis {axis} is cut {len(cuts)} times, {parts} shards need {parts - 1} cuts"
                if any(a >= b for a, b in pairwise(cuts)):
                    yield f"cuts {_list(cuts)} of axis {axis} make overlapping shards; they must ascend"
        if len({(shard.staleness, shard.asynchronous) for shard in self.shards}) > 1:
            yield "the shards of a variable must agree on staleness and asynchronous"

    @property
    def shard_count(self) -> int:
        return math.prod(self.partition)

    @property
    def summed(self) -> "VariableConfig":
        """The same with every plainly all-reduced shard summed by ranks with spare links, preferably servers."""
        shards = (
            shard.model_copy(update={"synchronizer": "summation_server", "placement": (), "reduction_order": ()})
            if shard.synchronizer == "all_reduce" and shard.encoder.name == "none" and not shard.staleness
            else shard
            for shard in self.shards
        )
        return self.model_copy(update={"shards": tuple(shards)})

    def shard(self, index: int) -> Shard:
        return self.shards[0] if len(self.shards) == 1 else self.shards[index]


class Slice(_Frozen):
    """A range of elements of one group's message."""

    group: Annotated[int, Field(ge=0)]
    start: Annotated[int, Field(ge=0)]
    stop: Annotated[int, Field(ge=1)]

    def _problems(self) -> Iterator[str]:
        if self.stop <= self.start:
            yield f"slice {self.start}:{self.stop} of group {self.group} is empty"


class Schedule(_Frozen):
    """When messages are issued."""

    policy: Literal["fifo", "priority", "explicit"] = "fifo"
    """fifo: as gradients become ready; priority: among ready messages, the one the next forward needs first; explicit:
    `order`. A running job rebuilds the order from measured times, unless it is pinned."""
    slice_bytes: Annotated[int, Field(ge=1024)] | None = None
    """Longer messages are cut into slices of this size, so that a more urgent one need not wait for all of it."""
    in_flight: Annotated[int, Field(ge=1, le=64)] = 2
    """Collectives in flight at once."""
    credit_bytes: Annotated[int, Field(ge=1024)] | None = None
    """Bytes in flight at once (ByteScheduler's credit): a message waits until it fits in with those in flight, or
    until there are none. Policies account for this: started messages are not overtaken."""
    mode: Literal["auto", "deferred", "barrier"] = "auto"
    """deferred: the next forward waits per module; barrier: the optimizer's step waits for everything; auto: deferred
    if the training loop allows it."""
    order: tuple[Slice, ...] = ()
    """Issue order of an explicit schedule; every group's message is covered once."""
    pinned: bool = False
    """Whether a running job keeps exactly `order`, whatever it measures."""

    def beside(self, before: Sequence[int], size: int) -> int:
        """How many of the messages before one of `size` bytes may still be in flight when it starts.

        `before` has their bytes, the latest last.
        """
        most = min(self.in_flight - 1, len(before))
        if self.credit_bytes is None:
            return most
        total = accumulate(reversed(before[len(before) - most :]), initial=size)
        return sum(held <= self.credit_bytes for held in islice(total, 1, None))

    def _problems(self) -> Iterator[str]:
        if bool(self.order) != (self.policy == "explicit"):
            need = "needs" if self.policy == "explicit" else "takes no"
            yield f"the {self.policy} schedule {need} order"
        if self.pinned and self.policy != "explicit":
            yield f"pinned keeps an explicit order, and the {self.policy} schedule has none"
        slices = sorted((item.group, item.start, item.stop) for item in self.order)
        for (group, _, stop), (next_group, start, later) in pairwise(slices):
            if group == next_group and start < stop:
                yield f"overlapping slices of group {group}: {start}:{later} begins before {stop}"


TensorMap = tuple[Annotated[int, Field(ge=-1)], ...]


class OperatorConfig(_Frozen):
    """How one operator is split over devices (TensorOpt §2.1)."""

    mesh: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    """Logical arrangement of the devices, such as (4,) or (2, 2)."""
    inputs: tuple[TensorMap, ...] = ()
    """For each input, the mesh axis that splits each of its axes; -1 does not split it."""
    outputs: tuple[TensorMap, ...] = ()
    keep: Literal["before", "after", "both"] = "both"
    """Which copies of a re-scheduled tensor are kept for backward."""

    def _problems(self) -> Iterator[str]:
        for tensor_map in self.inputs + self.outputs:
            used = [axis for axis in tensor_map if axis >= 0]
            if len(set(used)) != len(used) or any(axis >= len(self.mesh) for axis in used):
                yield f"tensor map {_list(tensor_map)} does not fit mesh {_list(self.mesh)}"


Reshard = StrictBool | Annotated[StrictInt, Field(ge=2)]
Precision = Literal["float16", "bfloat16", "float32", "float64"]


class FullyShard(_Frozen):
    """torch's `fully_shard` (FSDP2): every variable is sharded over the ranks and gathered when it is needed."""

    units: dict[str, Reshard] = {}
    """Modules whose variables are gathered together and whose gradients are reduced together, in wrapping order. True
    frees the gathered variables after forward and gathers them again in backward, False keeps them, a number N keeps
    them sharded over groups of N ranks. Variables outside all units belong to the model itself, the last unit, which
    keeps its variables unless it is named here, as ''."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Units gathered ahead of the one being computed. Backward always gathers at least one ahead."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Groups of ranks that each hold all shards (HSDP); gradients are also summed over the groups."""
    param_dtype: Precision | None = None
    """Dtype in which variables are gathered and used in compute; None is their own."""
    reduce_dtype: Precision | None = None
    """Dtype in which gradients are reduced; None is that of the gathered variables."""

    def _problems(self) -> Iterator[str]:
        wrapped: list[str] = []
        for path in self.wrapped:
            outer = next((unit for unit in wrapped if path.startswith(f"{unit}.")), None)
            if outer is not None:
                yield f"fsdp: unit {path!r} lies in {outer!r}, which is wrapped before it"
            wrapped.append(path)

    @property
    def wrapped(self) -> tuple[str, ...]:
        """The units except the model itself, in wrapping order."""
        return tuple(path for path in self.units if path)

    def reshard(self, unit: str) -> Reshard:
        """What happens to a unit's variables after forward."""
        return self.units.get(unit, False)

    def unit_of(self, name: str) -> str:
        """The unit that holds a variable, or the innermost one around a module."""
        return next((path for path in self.wrapped if within(name, path)), "")


class Strategy(_Frozen):
    """Everything that distinguishes one way of running a step from another."""

    format: Literal[1] = FORMAT
    name: str = "custom"
    """The builder or search that made it."""
    model: str = ""
    graph: str = ""
    """Signature of the graph it was made for; '' fits any graph with these variables."""
    cluster: str = ""
    """Digest of the cluster it was made for; '' fits any cluster with these ranks."""
    replicas: tuple[Rank, ...] = ()
    """The ranks that train, in the order of `weights`; () is every worker of the cluster, ascending. Other ranks may
    only be servers."""
    weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Share of each replica in the average, for replicas with unequal batches; () is equal shares."""
    accumulation: Annotated[int, Field(ge=1)] = 1
    """Micro-batches whose gradients are summed before they are synchronised."""
    recompute: tuple[str, ...] = ()
    """Modules whose activations are recomputed in backward instead of being kept."""
    fusion: tuple[tuple[str, ...], ...] = ()
    """Regions of modules that run one after another. Each is compiled as one unit, and planned as one."""
    precision: Literal["bf16"] | None = None
    """Forward runs under torch's autocast to bfloat16, which changes the results; None computes as the model does."""
    schedule: Schedule = Schedule()
    variables: dict[str, VariableConfig] = {}
    """Configuration by variable name; a variable not named is whole and all-reduced separately."""
    operators: dict[str, OperatorConfig] = {}
    fsdp: FullyShard | None = None
    """Every variable sharded by torch's `fully_shard`; `variables` are then empty."""

    def _problems(self) -> Iterator[str]:
        if len(set(self.replicas)) != len(self.replicas):
            yield f"replicas {_list(self.replicas)} name a rank twice"
        if self.weights and self.replicas and len(self.weights) != len(self.replicas):
            yield f"{len(self.weights)} weights are given for {len(self.replicas)} replicas"
        if self.precision is not None and (self.operators or self.fsdp is not None):
            instead = "fsdp has param_dtype instead" if self.fsdp is not None else "split operators take none"
            yield f"precision: {self.precision!r} is for replicated models; {instead}"
        if self.fsdp is not None:
            beside = ("variables", "operators", "weights", "replicas")
            for field in (field for field in beside if getattr(self, field)):
                yield f"{field}: a strategy with fsdp takes none, because fully_shard treats all ranks alike"

    def __repr__(self) -> str:
        made_for = f" for {self.model}" if self.model else ""
        return f"<Strategy {self.name!r}{made_for}: {len(self.variables)} variables, {self.digest[:8]}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """The description in words, for notebooks."""
        clauses = "".join(f"<li>{escape(clause)}</li>" for clause in describe(self))
        return f"<b>{escape(repr(self))}</b><ul>{clauses}</ul>"

    def config(self, variable: str) -> VariableConfig:
        """How one variable is synchronised, named in `variables` or not."""
        if self.fsdp is not None:
            unit = self.fsdp.unit_of(variable)
            group = self.fsdp.wrapped.index(unit) if unit else len(self.fsdp.wrapped)
            return VariableConfig(shards=(Shard(synchronizer="sharded", group=group),))
        return self.variables.get(variable, _DEFAULT_CONFIG)

    @property
    def engine(self) -> Engine:
        if self.operators:
            return "split"
        if self.fsdp is not None:
            return "fsdp"
        kinds = {shard.synchronizer for config in self.variables.values() for shard in config.shards}
        return "sharded" if "sharded" in kinds else "replicated"

    @property
    def digest(self) -> str:
        """Equal only for equal strategies."""
        # Not cached: pydantic's model_copy would carry the old value over to the changed copy.
        return files.digest(self.model_dump(mode="json", exclude_defaults=True))

    def to_json(self) -> str:
        """The content of a strategy file."""
        content = self.model_dump(mode="json", exclude_defaults=True)
        return json.dumps({"format": self.format, **content}, indent=1) + "\n"

    @classmethod
    def from_json(cls, content: bytes | str, origin: str = "strategy") -> "Strategy":
        """Validates everything; the error names `origin`, the field and the value."""
        try:
            data = files.parse_json(content, origin, "strategy", finite=False)
        except OffbeatError as error:
            raise StrategyError(str(error)) from None
        if isinstance(data, dict) and data.get("format") not in (FORMAT, None):
            given = quote(data["format"])
            raise StrategyError(f"{origin}: format: {given} is not a format this Offbeat reads ({FORMAT})")
        with files.problems_named(f"{origin}: not a strategy", StrategyError):
            return cls.model_validate(data)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the strategy file atomically."""
        files.write_atomic(path, self.to_json().encode(), "strategy")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Strategy":
        """Reads a strategy file; errors are one sentence."""
        return cls.from_json(files.read_bytes(path, "strategy"), origin=str(path))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of a strategy file."""
        return cls.model_json_schema() | {"$id": f"offbeat-strategy-{FORMAT}", "title": "Offbeat strategy"}


_DEFAULT_CONFIG = VariableConfig()
