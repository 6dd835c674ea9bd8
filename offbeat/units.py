"""Convert between human units and numbers: '10Gbit/s' to bytes per second, '50us' to seconds, '16GiB' to bytes.

Decimal prefixes (k, M, G, T, P) are powers of 1000 and binary ones (Ki, Mi, Gi, Ti, Pi) powers of 1024; 'bit' counts
eighths of a byte. Inside Offbeat every quantity is in bytes, seconds, bytes per second or FLOP per second.

Texts are scaled in decimal arithmetic, so '50us' is the float nearest to 50e-6 and not 50 * 1e-6. The `format_`
functions round for people; the `exact_` functions write what the `parse_` functions read back as the same number.
"""

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Context, Decimal
from numbers import Real
from typing import Literal

from offbeat.errors import OffbeatError

_DECIMAL = {"P": 10**15, "T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3, "": 1}
_BINARY = {"Pi": 2**50, "Ti": 2**40, "Gi": 2**30, "Mi": 2**20, "Ki": 2**10}


def _sizes(units: Iterable[str], prefixes: dict[str, int], part: int = 1) -> dict[str, Decimal]:
    """The size of each unit with each prefix, in `part`s."""
    return {f"{prefix}{unit}": Decimal(size) / part for unit in units for prefix, size in prefixes.items()}


_PREFIXES = _DECIMAL | {"K": 10**3} | _BINARY
_BYTES = _sizes(("B", "bytes", ""), _PREFIXES)
_BANDWIDTHS = _sizes(("bit/s", "b/s", "bps"), _PREFIXES, 8) | _sizes(("B/s", "Bps"), _PREFIXES) | {"": Decimal(1)}
_SECONDS = {"h": Decimal(3600), "min": Decimal(60), "s": Decimal(1), "": Decimal(1), "ms": Decimal("1e-3")}
_SECONDS |= dict.fromkeys(("us", "µs", "μs"), Decimal("1e-6")) | {"ns": Decimal("1e-9")}
_FLOPS = _sizes(("FLOP/s", "FLOPs/s", "FLOPS", "FLOPs", "flops", "flop/s"), _DECIMAL | {"K": 10**3})
_FLOPS[""] = Decimal(1)
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*?)\s*")
_LONGEST = 64
# Holds any text of _LONGEST characters times any unit without rounding; overflow gives infinity, not an exception.
_ARITHMETIC = Context(prec=120, Emax=2000, Emin=-2000, traps=[])


def parse_bytes(value: str | float, what: str = "size") -> int:
    """Bytes from '16GiB', '64MB', '4 KiB' or a plain number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**1023:
        return int(value)
    return int(_parse(value, what, _BYTES, "16GiB").to_integral_value())


def parse_bandwidth(value: str | float, what: str = "bandwidth") -> float:
    """Bytes per second from '10Gbit/s', '25 Gbps', '12.5GB/s' or a plain number of bytes per second."""
    return float(_parse(value, what, _BANDWIDTHS, "10Gbit/s"))


def parse_seconds(value: str | float, what: str = "duration") -> float:
    """Seconds from '50us', '1.5ms', '2 s' or a plain number of seconds."""
    return float(_parse(value, what, _SECONDS, "50us"))


def parse_flops(value: str | float, what: str = "peak") -> float:
    """FLOP per second from '65TFLOP/s', '15.7 TFLOPS' or a plain number of FLOP per second."""
    return float(_parse(value, what, _FLOPS, "65TFLOP/s"))


def format_bytes(count: float) -> str:
    """'16 GiB', '1.5 MiB', '312 B'."""
    return _prefixed(count, _BINARY | {"": 1}, "B")


def format_bandwidth(bytes_per_second: float) -> str:
    """'10 Gbit/s'."""
    return _prefixed(bytes_per_second * 8, _DECIMAL, "bit/s")


def format_flops(flops_per_second: float) -> str:
    """'65 TFLOP/s'."""
    return _prefixed(flops_per_second, _DECIMAL, "FLOP/s")


def format_speedup(before_seconds: float, after_seconds: float) -> str:
    """'1.25× as fast', '1.25× as slow', or 'as fast'."""
    ratio = before_seconds / after_seconds if after_seconds > 0 else 1.0
    if abs(ratio - 1) < 5e-3:
        return "as fast"
    return f"{ratio:.2f}× as fast" if ratio > 1 else f"{1 / ratio:.2f}× as slow"


def format_seconds(seconds: float) -> str:
    """'50 us', '1.5 ms', '2 s'."""
    return _prefixed(seconds, {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}, "s")


def exact_bytes(count: int) -> str | int:
    """'16GiB', or the plain number if no short text parses to exactly `count`."""
    return _exact(count, (f"{prefix}B" for prefix in (*_BINARY, *_DECIMAL)), _BYTES) or count


def exact_bandwidth(bytes_per_second: float, unit: Literal["bit/s", "B/s"] = "bit/s") -> str | float:
    """'10Gbit/s' or '1.25GB/s', or the plain number if no short text parses to exactly it."""
    return _exact(bytes_per_second, (f"{prefix}{unit}" for prefix in _DECIMAL), _BANDWIDTHS) or bytes_per_second


def exact_seconds(seconds: float) -> str | float:
    """'50us', or the plain number if no short text parses to exactly it."""
    return _exact(seconds, ("s", "ms", "us", "ns"), _SECONDS) or seconds


def exact_flops(flops_per_second: float) -> str | float:
    """'65TFLOP/s', or the plain number if no short text parses to exactly it."""
    return _exact(flops_per_second, (f"{prefix}FLOP/s" for prefix in _DECIMAL), _FLOPS) or flops_per_second


def quote(value: object) -> str:
    """The value as shown in an error: on one line and short."""
    try:
        shown = repr(value)
    except (ValueError, RecursionError):
        return "a value too long to show"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _parse(value: str | float, what: str, sizes: dict[str, Decimal], example: str) -> Decimal:
    field = f"{what}: " if what else ""
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        raise OffbeatError(f"{field}{quote(value)} is not a number or a text such as '{example}'")
    match = _NUMBER.fullmatch(text) if len(text := _text(value)) <= _LONGEST else None
    if not match:
        raise OffbeatError(f"{field}{quote(value)} is not a number with a unit such as '{example}'")
    number, unit = _ARITHMETIC.create_decimal(match[1]), match[2]
    if number.is_finite() and number >= 0:
        if unit not in sizes:
            raise OffbeatError(f"{field}{quote(value)} has the unknown unit {unit!r}; write it like '{example}'")
        scaled = _ARITHMETIC.multiply(number, sizes[unit])
        if math.isfinite(float(scaled)):
            return scaled
    raise OffbeatError(f"{field}{quote(value)} must be finite and not negative")


def _text(value: str | float) -> str:
    if isinstance(value, str):
        return value
    try:
        return repr(float(value))
    except OverflowError:
        return "inf"


def _exact(value: float, units: Iterable[str], sizes: dict[str, Decimal]) -> str | None:
    number = Decimal(repr(value))
    for unit in units:
        scaled = _ARITHMETIC.normalize(_ARITHMETIC.divide(number, sizes[unit]))
        if 1 <= scaled < 10**6 and len(scaled.as_tuple().digits) <= 9:
            return f"{scaled:f}{unit}"
    return None


def _prefixed(number: float, prefixes: Mapping[str, float], unit: str) -> str:
    """The number with the first prefix that it reaches, otherwise with the last."""
    prefix = next((prefix for prefix, size in prefixes.items() if abs(number) >= size), [*prefixes][-1])
    scaled = number / prefixes[prefix]
    shown = f"{scaled:.0f}" if 1e4 <= abs(scaled) < 1e15 else f"{scaled:.4g}"
    return f"{shown} {prefix}{unit}"
