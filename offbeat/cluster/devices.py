"""A device's name → what its vendor says it can do.

Figures are peaks of one device. Memory is the nominal capacity, before what the driver and ECC keep. `intra_bandwidth`
is bytes per second in one direction between two devices of a node: half of NVLink's advertised total, or one direction
of PCIe x16 (3.0: 8 GT/s × 16 lanes × 128/130 / 8 = 15.75 GB/s; 4.0: 31.5 GB/s). `intra_latency` is the time per ring
step in NCCL's own model (src/graph/tuning.cc, ring, protocol Simple): 3.4 us over NVLink, 5.7 us over PCIe.
"""

import re
from dataclasses import dataclass

GIB = 2**30
TERA = 1e12
GIGA = 1e9
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
    tensor_flops: float | None
    """FLOP per second of the tensor cores in bf16 (fp16 before Ampere), dense; None if there are none."""
    has_bf16: bool
    memory_bandwidth: float
    """Bytes per second of the device's own memory."""
    intra_bandwidth: float
    intra_latency: float
    aliases: tuple[str, ...] = ()
    """Other spellings, such as the name torch.cuda reports."""

    @property
    def training_flops(self) -> float:
        """The peak of the arithmetic one trains in on it: bf16 where the device has it, else fp32."""
        return self.tensor_flops if self.has_bf16 and self.tensor_flops else self.fp32_flops


def _pcie(
    name: str, gib: int, fp32: float, tensor: float | None, gigabytes: float, *aliases: str, ampere: bool = False
) -> DeviceKind:
    link = PCIE4_BANDWIDTH if ampere else PCIE3_BANDWIDTH
    peak = None if tensor is None else tensor * TERA
    return DeviceKind(name, gib * GIB, fp32 * TERA, peak, ampere, gigabytes * GIGA, link, PCIE_LATENCY, aliases)


def _nvlink(
    name: str, gib: int, fp32: float, tensor: float, gigabytes: float, link: float, *aliases: str, bf16: bool = True
) -> DeviceKind:
    return DeviceKind(
        name, gib * GIB, fp32 * TERA, tensor * TERA, bf16, gigabytes * GIGA, link * GIGA, NVLINK_LATENCY, aliases
    )


# name, GiB, fp32 TFLOP/s, tensor TFLOP/s, memory GB/s, (NVLink GB/s one way), aliases
_KINDS = (
    # GeForce GTX TITAN X specifications (Maxwell, GM200): 3072 cores at 1075 MHz boost, 336.5 GB/s.
    _pcie("TITAN X", 12, 6.6, None, 336.5, "GTX TITAN X"),
    # Tesla M60 datasheet, one of its two GPUs: 2048 cores at 1178 MHz boost, 8 GB, half of 320 GB/s.
    _pcie("M60", 8, 4.825, None, 160),
    # GeForce GTX 1080 Ti specifications: 3584 cores at 1582 MHz boost, 484 GB/s.
    _pcie("GTX 1080 Ti", 11, 11.34, None, 484, "1080 Ti"),
    # Tesla P100 for PCIe datasheet.
    _pcie("P100", 16, 9.3, None, 732, "P100-PCIE-16GB"),
    # T4 datasheet: 65 TFLOP/s mixed precision, 320 GB/s.
    _pcie("T4", 16, 8.1, 65, 320),
    # A10G data sheet (the A10 of AWS's g5): 35 TFLOP/s fp32, 70 TFLOP/s bf16 tensor, 600 GB/s.
    _pcie("A10G", 24, 35, 70, 600, ampere=True),
    # L4 datasheet; 121 TFLOP/s is half of the figure with sparsity.
    _pcie("L4", 24, 30.3, 121, 300, ampere=True),
    # L40S datasheet; 362 TFLOP/s without sparsity.
    _pcie("L40S", 48, 91.6, 362, 864, ampere=True),
    # Tesla V100 SXM2 datasheet: NVLink 300 GB/s in both directions together.
    _nvlink("V100-16GB", 16, 15.7, 125, 900, 150, "V100", "V100-SXM2-16GB", bf16=False),
    _nvlink("V100-32GB", 32, 15.7, 125, 900, 150, "V100-SXM2-32GB", "V100-SXM3-32GB", bf16=False),
    # A100 datasheet, SXM: NVLink 600 GB/s in both directions together.
    _nvlink("A100-40GB", 40, 19.5, 312, 1555, 300, "A100-SXM4-40GB"),
    _nvlink("A100-80GB", 80, 19.5, 312, 2039, 300, "A100", "A100-SXM4-80GB"),
    # H100 datasheet, SXM: 989 TFLOP/s is half of the figure with sparsity; NVLink 900 GB/s in both directions together.
    _nvlink("H100", 80, 67, 989, 3350, 450, "H100 SXM", "H100 80GB HBM3", "H100-80GB"),
    # H200 datasheet, SXM.
    _nvlink("H200", 141, 67, 989, 4800, 450, "H200 SXM"),
)


def _plain(text: str) -> str:
    return re.sub(r"nvidia|tesla|geforce|[^a-z0-9]", "", text.lower())


_BY_NAME = {_plain(spelling): kind for kind in _KINDS for spelling in (kind.name, *kind.aliases)}


def find_device(text: str) -> DeviceKind | None:
    """The kind a text such as 'T4', 'tesla v100-sxm2-16gb' or 'NVIDIA H100 80GB HBM3' names, or None."""
    return _BY_NAME.get(_plain(text))


def device_names() -> tuple[str, ...]:
    """The names of all kinds in the catalogue."""
    return tuple(kind.name for kind in _KINDS)
