"""The device catalogue: vendors' specifications by device name.

Figures are peaks of one device. Memory is the nominal capacity, before what the driver and ECC keep. `intra_bandwidth`
is bytes per second in one direction between two devices of a node: half of NVLink's advertised total, or one direction
of PCIe x16 (3.0: 8 GT/s × 16 lanes × 128/130 / 8 = 15.75 GB/s; 4.0: 31.5 GB/s). `intra_latency` is the time per ring
step in NCCL's own model (src/graph/tuning.cc, ring, protocol Simple): 3.4 us over NVLink, 5.7 us over PCIe.
"""

import re
from dataclasses import dataclass

NVLINK_LATENCY = 3.4e-6
PCIE_LATENCY = 5.7e-6
PCIE3_BANDWIDTH = 15.75e9
PCIE4_BANDWIDTH = 31.5e9


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Vendor figures of one kind of device."""

    name: str
    memory: int
    """Bytes."""
    fp32_flops: float
    """FLOP per second in single precision without tensor cores."""
    bf16_flops: float | None
    """FLOP per second of the tensor cores in bf16, dense; None before Ampere."""
    memory_bandwidth: float
    """Bytes per second of the device's own memory."""
    intra_bandwidth: float
    intra_latency: float
    aliases: tuple[str, ...] = ()
    """Other spellings, such as the name torch.cuda reports."""

    @property
    def training_flops(self) -> float:
        """The peak of the arithmetic one trains in on it: bf16 where the device has it, else fp32."""
        return self.bf16_flops or self.fp32_flops


def _kind(
    name: str, gib: int, fp32: float, bf16: float | None, gigabytes: float, *aliases: str, nvlink: float | None = None
) -> DeviceKind:
    pcie_bandwidth = PCIE3_BANDWIDTH if bf16 is None else PCIE4_BANDWIDTH
    return DeviceKind(
        name=name,
        memory=gib * 2**30,
        fp32_flops=fp32 * 1e12,
        bf16_flops=None if bf16 is None else bf16 * 1e12,
        memory_bandwidth=gigabytes * 1e9,
        intra_bandwidth=pcie_bandwidth if nvlink is None else nvlink * 1e9,
        intra_latency=PCIE_LATENCY if nvlink is None else NVLINK_LATENCY,
        aliases=aliases,
    )


# name, GiB, fp32 TFLOP/s, bf16 TFLOP/s, memory GB/s, aliases, NVLink GB/s one way
_KINDS = (
    # GeForce GTX TITAN X specifications (Maxwell, GM200): 3072 cores at 1075 MHz boost, 336.5 GB/s.
    _kind("TITAN X", 12, 6.6, None, 336.5, "GTX TITAN X"),
    # Tesla M60 datasheet, one of its two GPUs: 2048 cores at 1178 MHz boost, 8 GB, half of 320 GB/s.
    _kind("M60", 8, 4.825, None, 160),
    # GeForce GTX 1080 Ti specifications: 3584 cores at 1582 MHz boost, 484 GB/s.
    _kind("GTX 1080 Ti", 11, 11.34, None, 484, "1080 Ti"),
    # Tesla P100 for PCIe datasheet.
    _kind("P100", 16, 9.3, None, 732, "P100-PCIE-16GB"),
    # T4 datasheet.
    _kind("T4", 16, 8.1, None, 320),
    # A10G data sheet (the A10 of AWS's g5): 35 TFLOP/s fp32, 70 TFLOP/s bf16 tensor, 600 GB/s.
    _kind("A10G", 24, 35, 70, 600),
    # L4 datasheet; 121 TFLOP/s is half of the figure with sparsity.
    _kind("L4", 24, 30.3, 121, 300),
    # L40S datasheet; 362 TFLOP/s without sparsity.
    _kind("L40S", 48, 91.6, 362, 864),
    # Tesla V100 SXM2 datasheet: NVLink 300 GB/s in both directions together.
    _kind("V100-16GB", 16, 15.7, None, 900, "V100", "V100-SXM2-16GB", nvlink=150),
    _kind("V100-32GB", 32, 15.7, None, 900, "V100-SXM2-32GB", "V100-SXM3-32GB", nvlink=150),
    # A100 datasheet, SXM: NVLink 600 GB/s in both directions together.
    _kind("A100-40GB", 40, 19.5, 312, 1555, "A100-SXM4-40GB", nvlink=300),
    _kind("A100-80GB", 80, 19.5, 312, 2039, "A100", "A100-SXM4-80GB", nvlink=300),
    # H100 datasheet, SXM: 989 TFLOP/s is half of the figure with sparsity; NVLink 900 GB/s in both directions together.
    _kind("H100", 80, 67, 989, 3350, "H100 SXM", "H100 80GB HBM3", "H100-80GB", nvlink=450),
    # H200 datasheet, SXM.
    _kind("H200", 141, 67, 989, 4800, "H200 SXM", nvlink=450),
)


def _plain(text: str) -> str:
    return re.sub(r"nvidia|tesla|geforce|[^a-z0-9]", "", text.lower())


_BY_NAME = {_plain(spelling): kind for kind in _KINDS for spelling in (kind.name, *kind.aliases)}


def find_device(text: str) -> DeviceKind | None:
    """The kind a text such as 'T4', 'tesla v100-sxm2-16gb' or 'NVIDIA H100 80GB HBM3' names, or None."""
    return _BY_NAME.get(_plain(text))
