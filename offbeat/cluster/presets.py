"""The nodes of each cluster preset.

Clusters of the papers: A1, A2 and B1 to B12 of AutoSync (supplement, Table 2), the testbeds of PACE, dPRO (section 7.1)
and TensorOpt (section 5); and common ones of today. Bandwidths are the papers'. The papers trained in single precision,
so their nodes' peak is fp32; today's is bf16 where the device has it.

Latency is not in the papers: Ethernet has the default of a node, RDMA networks the time per ring step in NCCL's own
model (src/graph/tuning.cc, ring, protocol Simple). `offbeat calibrate` measures the real one.
"""

from typing import Any

from offbeat import units
from offbeat.cluster.devices import find_device
from offbeat.cluster.parts import MAX_NODES, Node
from offbeat.errors import OffbeatError

_RDMA_LATENCY = 14e-6
# "Due to AWS constraints, they all have 10GbE single-flow bandwidth" (AutoSync supplement, section 9.1).
_AWS: dict[str, Any] = {"single_flow_bandwidth": "10Gbit/s"}


def _machine(name: str, device: str, devices: int, bandwidth: str, *, fp32: bool = False, **fields: Any) -> Node:
    """A kind of node; its peak is the device's fp32 one if asked, and its other figures are the catalogue's."""
    kind = find_device(device)
    assert kind is not None, device
    if fp32:
        fields["peak_flops"] = kind.fp32_flops
    return Node.model_validate({"name": name, "device": device, "devices": devices, "bandwidth": bandwidth, **fields})


# "each equipped with a GeForce TITAN X GPU [...] interconnected via a 40-Gigabit Ethernet switch" (section 9.1).
_TITAN = _machine("titan", "TITAN X", 1, "40Gbit/s", fp32=True)
# AWS prices: on demand, Linux, us-east-1.
_G3_4 = _machine("g3.4xlarge", "M60", 1, "10Gbit/s", **_AWS, price_per_hour=1.14, fp32=True)
_G3_16 = _machine("g3.16xlarge", "M60", 4, "25Gbit/s", **_AWS, price_per_hour=4.56, fp32=True)
_G4DN_2 = _machine("g4dn.2xlarge", "T4", 1, "25Gbit/s", **_AWS, price_per_hour=0.752, fp32=True)
_G4DN_12 = _machine("g4dn.12xlarge", "T4", 4, "50Gbit/s", **_AWS, price_per_hour=3.912, fp32=True)
_G5_12 = _machine("g5.12xlarge", "A10G", 4, "40Gbit/s", **_AWS, price_per_hour=5.672)
# "8 GPU servers [...] The peak bandwidth between any two servers is about 25Gbps [...] two GTX 1080Ti GPUs" (PACE).
_PACE = _machine("pace", "GTX 1080 Ti", 2, "25Gbit/s", fp32=True)
_PACE_10G = _machine("pace", "GTX 1080 Ti", 2, "10Gbit/s", fp32=True)
# "up to 128 Tesla V100 32GB GPUs (on 16 servers) [...] NVLinks and interconnected with 100Gbps" (dPRO).
_DPRO = _machine("dpro", "V100-32GB", 8, "100Gbit/s", latency=_RDMA_LATENCY, fp32=True)
# "8 NVIDIA Tesla V100 GPUs (with 16 GB [...]) NVLink [...] RDMA on 100 Gbps EDR Infiniband" (TensorOpt).
_TENSOROPT = _machine("tensoropt", "V100-16GB", 8, "100Gbit/s", latency=_RDMA_LATENCY, fp32=True)
_H100 = _machine("h100", "H100", 8, "400Gbit/s", latency=_RDMA_LATENCY)
_A100 = _machine("a100", "A100-80GB", 8, "200Gbit/s", latency=_RDMA_LATENCY)

# Bandwidth and latency are gloo's between two processes of a small machine (2 cores: 64 MiB sent in 27 ms, 1 KiB in
# 0.16 ms); memory and peaks are rough.
LOCALHOST = {
    "name": "localhost",
    "address": "127.0.0.1",
    "device": "cpu",
    "memory": "4GiB",
    "peak_flops": "50GFLOP/s",
    "memory_bandwidth": "10GB/s",
    "intra_bandwidth": "2.5GB/s",
    "intra_latency": "160us",
}

PRESETS: dict[str, tuple[tuple[int, Node], ...]] = {
    "A1": ((16, _TITAN),),
    "A2": ((11, _TITAN),),
    "B1": ((2, _G3_16),),
    "B2": ((3, _G3_16),),
    "B3": ((4, _G3_16),),
    "B4": ((1, _G4DN_12),),
    "B5": ((2, _G4DN_12),),
    "B6": ((3, _G4DN_12),),
    "B7": ((4, _G4DN_12),),
    "B8": ((8, _G4DN_12),),
    "B9": ((1, _G3_4), (1, _G3_16)),
    "B10": ((1, _G3_16), (1, _G4DN_12)),
    "B11": ((2, _G3_16), (2, _G4DN_12)),
    "B12": ((1, _G4DN_2), (1, _G4DN_12)),
    "pace": ((8, _PACE),),
    "pace_10g": ((6, _PACE_10G),),
    "dpro": ((16, _DPRO),),
    "dpro_16": ((2, _DPRO),),
    "tensoropt": ((2, _TENSOROPT),),
    "tensoropt_8": ((1, _TENSOROPT),),
    "h100": ((4, _H100),),
    "a100": ((4, _A100),),
    "t4": ((4, _G4DN_12),),
    "a10g": ((4, _G5_12),),
}


def nodes_of(name: str, nodes: int | None = None) -> tuple[str, tuple[Node, ...]]:
    """The preset's name as listed, and its nodes by kind; `nodes` changes how many there are of the one kind it has."""
    known = {listed.lower(): listed for listed in PRESETS}
    listed = known.get(name.lower()) if isinstance(name, str) else None
    if listed is None:
        raise OffbeatError(f"unknown cluster preset {units.quote(name)}; known: {', '.join(PRESETS)}")
    parts = PRESETS[listed]
    if nodes is not None:
        check_node_count(nodes)
        if len(parts) > 1:
            raise OffbeatError(f"nodes: {nodes} does not fit preset {listed!r}, whose nodes are of several kinds")
        parts = ((nodes, parts[0][1]),)
    return listed, tuple(node.model_copy(update={"count": count}) for count, node in parts)


def check_node_count(nodes: int) -> None:
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MAX_NODES:
        raise OffbeatError(f"nodes: {units.quote(nodes)} must be a whole number from 1 to {MAX_NODES}")
