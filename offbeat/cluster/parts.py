"""The parts of a cluster: Node (a machine), Link (a path that differs), CollectiveTable (measured collectives).

Sizes are bytes, rates bytes or FLOP per second, times seconds. A file may write any of them with a unit.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from offbeat import units
from offbeat.cluster.devices import PCIE3_BANDWIDTH, PCIE_LATENCY, find_device
from offbeat.errors import OffbeatError

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "send"]
Groups = tuple[tuple[int, ...], ...]

MAX_NODES = 100_000

# A modest cloud GPU behind ordinary Ethernet, for what a file leaves out about a device the catalogue does not know.
DEFAULT_MEMORY = 16 * 2**30
DEFAULT_PEAK_FLOPS = 10e12
DEFAULT_MEMORY_BANDWIDTH = 500e9
DEFAULT_BANDWIDTH = 10e9 / 8
DEFAULT_LATENCY = 50e-6
_LONGEST_LABEL = 200


def _quantity(parse: Callable[[Any, str], float], *, zero: bool, example: str) -> tuple[Any, Any]:
    """Accepts a plain number or a text with a unit, also in the JSON Schema."""

    def checked(value: Any) -> float:
        number = parse(value, "")
        if number == 0 and not zero:
            raise OffbeatError(f"{units.quote(value)} must be more than zero")
        return number

    bound = {"minimum": 0} if zero else {"exclusiveMinimum": 0}
    text = {"type": "string", "pattern": r"^\s*\+?[0-9.]", "examples": [example]}
    return BeforeValidator(checked), WithJsonSchema({"anyOf": [{"type": "number", **bound}, text]})


def _label(value: str) -> str:
    if not value.strip() or not value.isprintable() or len(value) > _LONGEST_LABEL:
        raise OffbeatError(f"{units.quote(value)} must be 1 to {_LONGEST_LABEL} printable characters")
    return value


Bandwidth = Annotated[float, *_quantity(units.parse_bandwidth, zero=False, example="10Gbit/s")]
"""Bytes per second, more than zero."""
Latency = Annotated[float, *_quantity(units.parse_seconds, zero=True, example="50us")]
"""Seconds, zero allowed."""
Seconds = Annotated[float, *_quantity(units.parse_seconds, zero=False, example="1.5ms")]
"""Seconds, more than zero."""
Bytes = Annotated[int, *_quantity(units.parse_bytes, zero=False, example="16GiB")]
"""Bytes, more than zero."""
Flops = Annotated[float, *_quantity(units.parse_flops, zero=False, example="65TFLOP/s")]
"""FLOP per second, more than zero."""
Price = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
"""Dollars per hour."""
Count = Annotated[int, Field(strict=True, ge=1, le=100_000)]
Rank = Annotated[int, Field(strict=True, ge=0)]
Label = Annotated[str, AfterValidator(_label)]
"""A readable name: printable and not blank."""
NodeName = Annotated[str, AfterValidator(lambda name: _label(name) if name else name)]
"""A label, or '' for a node named by its position."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Node(_Part):
    """A machine with equal devices.

    What is left out comes from the device catalogue if it knows `device`, else from the defaults below.
    """

    name: NodeName = ""
    """Unique in the cluster; a node without a name is called node0, node1, … by its position."""
    address: Label | None = None
    """Host name or IP address of a real node."""
    device: Label = "generic"
    """Kind of its devices, such as 'T4'."""
    devices: Count = 1
    role: Literal["worker", "server"] = "worker"
    """A server's processes hold no replica; they keep parameters for the others."""
    memory: Bytes = DEFAULT_MEMORY
    """Bytes of each device."""
    peak_flops: Flops = DEFAULT_PEAK_FLOPS
    """FLOP per second of each device, in the arithmetic used for training."""
    memory_bandwidth: Bandwidth = DEFAULT_MEMORY_BANDWIDTH
    """Bytes per second between each device and its memory."""
    bandwidth: Bandwidth = DEFAULT_BANDWIDTH
    """Bytes per second of the network interface in each direction, shared by the node's devices."""
    latency: Latency = DEFAULT_LATENCY
    """Seconds for the first byte of a message to another node."""
    intra_bandwidth: Bandwidth = PCIE3_BANDWIDTH
    """Bytes per second in each direction between two devices of the node."""
    intra_latency: Latency = PCIE_LATENCY
    """Seconds for the first byte of a message between two devices of the node."""
    single_flow_bandwidth: Bandwidth | None = None
    """Maximum bytes per second of one connection to another node, if less than the interface's."""
    price_per_hour: Price | None = None
    """Dollars per hour of the whole node."""
    count: Count | None = None
    """Number of such nodes, which a cluster lists one by one; with a name, they are called name-0, name-1, …"""

    @model_validator(mode="before")
    @classmethod
    def _from_catalogue(cls, values: Any) -> Any:
        """Fills in missing values from the device catalogue."""
        device = values.get("device") if isinstance(values, dict) else None
        kind = find_device(device) if isinstance(device, str) else None
        if kind is None:
            return values
        figures = ("memory", "memory_bandwidth", "intra_bandwidth", "intra_latency")
        return {"peak_flops": kind.training_flops, **{name: getattr(kind, name) for name in figures}} | values

    @field_validator("count")
    @classmethod
    def _one_address_each(cls, count: int | None, info: ValidationInfo) -> int | None:
        address = info.data.get("address")
        if address is not None and (count or 1) > 1:
            raise OffbeatError(f"{count} nodes cannot share the address {units.quote(address)}")
        return count

    def named(self, name: str) -> "Node":
        """One such node under another name."""
        return self.model_copy(update={"name": name, "count": None})

    def listed(self) -> list["Node"]:
        """The nodes that this entry stands for, one by one."""
        if self.count is None:
            return [self]
        return [self.named(f"{self.name}-{index}" if self.name else "") for index in range(self.count)]


class Link(_Part):
    """The path between two nodes, in both directions, if it differs from their network interfaces."""

    a: Label
    b: Label
    bandwidth: Bandwidth | None = None
    """Bytes per second in each direction; None keeps the interfaces' bandwidth."""
    latency: Latency | None = None
    """Seconds; None keeps the nodes' latency."""

    @field_validator("b")
    @classmethod
    def _another_node(cls, b: str, info: ValidationInfo) -> str:
        if b == info.data.get("a"):
            raise OffbeatError(f"{units.quote(b)} is the same node as a, and a link joins two nodes")
        return b

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.bandwidth is None and self.latency is None:
            raise OffbeatError(
                f"neither bandwidth nor latency is given for {units.quote(self.a)} to {units.quote(self.b)}"
            )
        return self


class CollectiveTable(_Part):
    """Measured seconds of one collective under one device partitioning (TensorOpt, section 3.2).

    All groups communicate at once, each over the same number of bytes, so the times include how the groups contend.
    """

    collective: Collective
    groups: Annotated[tuple[Annotated[tuple[Rank, ...], Field(min_length=1)], ...], Field(min_length=1)]
    """Disjoint groups of ranks."""
    sizes_bytes: Annotated[tuple[Bytes, ...], Field(min_length=1)]
    """Bytes of each rank's whole input tensor, ascending; 2^i in the paper."""
    seconds: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    """Time of the slowest group, one for each size."""

    @field_validator("groups")
    @classmethod
    def _disjoint(cls, groups: Groups) -> Groups:
        counts = Counter(chain.from_iterable(groups))
        if repeated := [rank for rank, count in counts.items() if count > 1]:
            raise OffbeatError(f"rank {repeated[0]} appears twice, and the groups must be disjoint")
        return groups

    @field_validator("sizes_bytes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        for smaller, larger in pairwise(sizes):
            if larger <= smaller:
                raise OffbeatError(f"the sizes must ascend, got {larger} after {smaller}")
        return sizes

    @field_validator("seconds")
    @classmethod
    def _one_time_per_size(cls, seconds: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        sizes = info.data.get("sizes_bytes", seconds)
        if len(seconds) != len(sizes):
            raise OffbeatError(f"{len(seconds)} times are given for {len(sizes)} sizes")
        return seconds

    def renumbered(self, new_ranks: Mapping[int, int]) -> "CollectiveTable":
        """The same measurements with the ranks renumbered."""
        return self.model_copy(update={"groups": tuple(tuple(new_ranks[rank] for rank in g) for g in self.groups)})

    def scaled(self, bandwidth: float, latency: float) -> "CollectiveTable":
        """The table with bandwidth and latency multiplied; the smallest size's time counts as latency."""
        first = self.seconds[0]
        seconds = tuple(first * latency + (taken - first) / bandwidth for taken in self.seconds)
        return self.model_copy(update={"seconds": seconds})


def canonical_groups(groups: Iterable[Iterable[int]]) -> Groups:
    """The same device partitioning, whatever order its groups and their ranks were written in."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def check_links(links: tuple[Link, ...], nodes: tuple[Node, ...]) -> None:
    """Rejects a link to an unknown node, and two links between the same nodes."""
    known = {node.name for node in nodes}
    pairs: set[frozenset[str]] = set()
    for index, link in enumerate(links):
        for end, name in (("a", link.a), ("b", link.b)):
            if name not in known:
                raise OffbeatError(f"links[{index}].{end}: no node has the name {units.quote(name)}")
        if frozenset((link.a, link.b)) in pairs:
            raise OffbeatError(f"links[{index}]: {units.quote(link.a)} to {units.quote(link.b)} is given twice")
        pairs.add(frozenset((link.a, link.b)))


def check_tables(tables: tuple[CollectiveTable, ...], nodes: tuple[Node, ...]) -> None:
    """Rejects a table of unknown ranks, and two tables of the same groups."""
    last = sum(node.devices for node in nodes) - 1
    measured: set[tuple[str, Groups]] = set()
    for index, table in enumerate(tables):
        highest = max(max(group) for group in table.groups)
        if highest > last:
            raise OffbeatError(f"tables[{index}].groups: rank {highest} is outside the cluster's ranks 0 to {last}")
        key = (table.collective, canonical_groups(table.groups))
        if key in measured:
            raise OffbeatError(f"tables[{index}]: {table.collective} for these groups is given twice")
        measured.add(key)
