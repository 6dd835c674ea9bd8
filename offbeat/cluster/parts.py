"""The parts of a cluster: Node (a machine), Link (a path unlike the others), CollectiveTable (measured collectives).

Sizes are bytes, rates bytes or FLOP per second, times seconds. A file may write any of them with a unit.
"""

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from offbeat import units
from offbeat.cluster.devices import PCIE3_BANDWIDTH, PCIE_LATENCY, find_device
from offbeat.cluster.fields import Bandwidth, Bytes, Count, Flops, Label, Latency, NodeName, Price, Rank, Seconds
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


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Node(_Part):
    """A machine with equal devices.

    What is left out comes from the device catalogue if it knows `device`, else from the defaults below.
    """

    name: NodeName = ""
    """Unique in the cluster; a node without a name is called node0, node1, … by its position."""
    address: Label | None = None
    """Host name or IP address, where the node is a real one."""
    device: Label = "generic"
    """Kind of its devices, such as 'T4'."""
    devices: Count = 1
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
    """Bytes per second that one connection to another node can reach, where that is less than the interface."""
    price_per_hour: Price | None = None
    """Dollars per hour of the whole node."""

    @model_validator(mode="before")
    @classmethod
    def _from_catalogue(cls, values: Any) -> Any:
        """Fills in what the device catalogue knows and the values leave out."""
        if not isinstance(values, dict) or not isinstance(values.get("device"), str):
            return values
        kind = find_device(values["device"])
        if kind is None:
            return values
        known = {
            "memory": kind.memory,
            "peak_flops": kind.training_flops,
            "memory_bandwidth": kind.memory_bandwidth,
            "intra_bandwidth": kind.intra_bandwidth,
            "intra_latency": kind.intra_latency,
        }
        return known | values

    def named(self, name: str) -> "Node":
        """The same node under another name."""
        return self.model_copy(update={"name": name})


class Link(_Part):
    """The path between two nodes, both ways, where it is not what their network interfaces give."""

    a: Label
    b: Label
    bandwidth: Bandwidth | None = None
    """Bytes per second in each direction; None keeps what the interfaces give."""
    latency: Latency | None = None
    """Seconds; None keeps what the nodes say."""

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
        seen: set[int] = set()
        for group in groups:
            for rank in group:
                if rank in seen:
                    raise OffbeatError(f"rank {rank} appears twice, and the groups must be disjoint")
                seen.add(rank)
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


def canonical_groups(groups: Groups) -> Groups:
    """The same device partitioning, whatever order its groups and their ranks were written in."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))
