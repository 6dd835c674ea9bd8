"""Human units ↔ numbers: '10Gbit/s' → bytes per second, '50us' → seconds, '16GiB' → bytes.

Decimal prefixes (k, M, G, T, P) are powers of 1000 and binary ones (Ki, Mi, Gi, Ti, Pi) powers of 1024; 'bit' counts
eighths of a byte. Inside Offbeat every quantity is in bytes, seconds, bytes per second or FLOP per second.

Texts are scaled in decimal arithmetic, so '50us' is the float nearest to 50e-6 and not 50 * 1e-6. The `format_`
functions round for people; the `exact_` functions write what the `parse_` functions read back as the same number.
"""

import math
import re
from collections.abc import Callable
from decimal import Context, Decimal
from numbers import Real
from typing import Literal

from offbeat.errors import OffbeatError

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIX = {name: Decimal(size) for name, size in (_DECIMAL | _BINARY).items()}
_SECONDS = {name: Decimal(size) for name, size in (("h", 3600), ("min", 60), ("s", 1))} | {
    name: Decimal(size)
    for name, size in (("ms", "1e-3"), ("us", "1e-6"), ("µs", "1e-6"), ("μs", "1e-6"), ("ns", "1e-9"))
}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*?)\s*")
_LONGEST = 64
# Holds any text of _LONGEST characters times any unit without rounding; overflow gives infinity, not an exception.
_ARITHMETIC = Context(prec=120, Emax=2000, Emin=-2000, traps=[])


def parse_bytes(value: str | float, what: str = "size") -> int:
    """Bytes from '16GiB', '64MB', '4 KiB' or a plain number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**1023:
        return int(value)
    number, unit = _split(value, what, "16GiB")
    match = re.fullmatch(r"(Ki|Mi|Gi|Ti|Pi|k|K|M|G|T|P|)(?:B|bytes)?", unit)
    if not match:
        raise _unknown_unit(value, unit, what, "16GiB")
    _finite(_ARITHMETIC.multiply(number, _PREFIX[match[1]]), value, what)
    return int(_ARITHMETIC.multiply(number, _PREFIX[match[1]]).to_integral_value())


def parse_bandwidth(value: str | float, what: str = "bandwidth") -> float:
    """Bytes per second from '10Gbit/s', '25 Gbps', '12.5GB/s' or a plain number of bytes per second."""
    number, unit = _split(value, what, "10Gbit/s")
    if unit == "":
        return _finite(number, value, what)
    match = re.fullmatch(r"(Ki|Mi|Gi|Ti|Pi|k|K|M|G|T|P|)(bit/s|b/s|bps|Bps|B/s)", unit)
    if not match:
        raise _unknown_unit(value, unit, what, "10Gbit/s")
    per_byte = Decimal(1 if match[2] in ("B/s", "Bps") else 8)
    return _finite(_ARITHMETIC.divide(_ARITHMETIC.multiply(number, _PREFIX[match[1]]), per_byte), value, what)


def parse_seconds(value: str | float, what: str = "duration") -> float:
    """Seconds from '50us', '1.5ms', '2 s' or a plain number of seconds."""
    number, unit = _split(value, what, "50us")
    if unit and unit not in _SECONDS:
        raise _unknown_unit(value, unit, what, "50us")
    return _finite(_ARITHMETIC.multiply(number, _SECONDS[unit or "s"]), value, what)


def parse_flops(value: str | float, what: str = "peak") -> float:
    """FLOP per second from '65TFLOP/s', '15.7 TFLOPS' or a plain number of FLOP per second."""
    number, unit = _split(value, what, "65TFLOP/s")
    if unit == "":
        return _finite(number, value, what)
    match = re.fullmatch(r"(k|K|M|G|T|P|)(?:FLOP/s|FLOPs/s|FLOPS|FLOPs|flops|flop/s)", unit)
    if not match:
        raise _unknown_unit(value, unit, what, "65TFLOP/s")
    return _finite(_ARITHMETIC.multiply(number, _PREFIX[match[1]]), value, what)


def format_bytes(count: float) -> str:
    """'16 GiB', '1.5 MiB', '312 B'."""
    for prefix in ("Pi", "Ti", "Gi", "Mi", "Ki"):
        if abs(count) >= _BINARY[prefix]:
            return f"{_short(count / _BINARY[prefix])} {prefix}B"
    return f"{_short(count)} B"


def format_bandwidth(bytes_per_second: float) -> str:
    """'10 Gbit/s'."""
    return _decimal_prefix(bytes_per_second * 8, "bit/s")


def format_flops(flops_per_second: float) -> str:
    """'65 TFLOP/s'."""
    return _decimal_prefix(flops_per_second, "FLOP/s")


def format_seconds(seconds: float) -> str:
    """'50 us', '1.5 ms', '2 s'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds / 1e-9)} ns"


def exact_bytes(count: int) -> str | int:
    """'16GiB', or the plain number where no short text is read back as exactly `count`."""
    sizes = {f"{prefix}B": _PREFIX[prefix] for prefix in ("Pi", "Ti", "Gi", "Mi", "Ki", "P", "T", "G", "M", "k", "")}
    return _exact(count, sizes, parse_bytes) or count


def exact_bandwidth(bytes_per_second: float, unit: Literal["bit/s", "B/s"] = "bit/s") -> str | float:
    """'10Gbit/s' or '1.25GB/s', or the plain number where no short text is read back as exactly it."""
    share = 8 if unit == "bit/s" else 1
    sizes = {f"{prefix}{unit}": _PREFIX[prefix] / share for prefix in ("P", "T", "G", "M", "k", "")}
    return _exact(bytes_per_second, sizes, parse_bandwidth) or bytes_per_second


def exact_seconds(seconds: float) -> str | float:
    """'50us', or the plain number where no short text is read back as exactly it."""
    return _exact(seconds, {unit: _SECONDS[unit] for unit in ("s", "ms", "us", "ns")}, parse_seconds) or seconds


def exact_flops(flops_per_second: float) -> str | float:
    """'65TFLOP/s', or the plain number where no short text is read back as exactly it."""
    sizes = {f"{prefix}FLOP/s": _PREFIX[prefix] for prefix in ("P", "T", "G", "M", "k", "")}
    return _exact(flops_per_second, sizes, parse_flops) or flops_per_second


def quote(value: object) -> str:
    """The value as an error sentence shows it: on one line and short."""
    try:
        shown = repr(value)
    except (ValueError, RecursionError):
        return "a value too long to show"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _exact(value: float, sizes: dict[str, Decimal], parse: Callable[[str], float]) -> str | None:
    number = Decimal(repr(value))
    for unit, size in sizes.items():
        scaled = _ARITHMETIC.normalize(_ARITHMETIC.divide(number, size))
        if 1 <= scaled < 10**6 and len(scaled.as_tuple().digits) <= 9:
            text = f"{scaled:f}{unit}"
            if parse(text) == value:
                return text
    return None


def _split(value: str | float, what: str, example: str) -> tuple[Decimal, str]:
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        raise OffbeatError(f"{_field(what)}{quote(value)} is not a number or a text such as '{example}'")
    match = _NUMBER.fullmatch(text) if len(text := _text(value)) <= _LONGEST else None
    if not match:
        raise OffbeatError(f"{_field(what)}{quote(value)} is not a number with a unit such as '{example}'")
    number = _ARITHMETIC.create_decimal(match[1])
    if not number.is_finite() or number < 0:
        raise OffbeatError(f"{_field(what)}{quote(value)} must be finite and not negative")
    return number, match[2]


def _text(value: str | float) -> str:
    if isinstance(value, str):
        return value
    try:
        return repr(float(value))
    except OverflowError:
        return "inf"


def _finite(number: Decimal, value: str | float, what: str) -> float:
    result = float(number)
    if not math.isfinite(result):
        raise OffbeatError(f"{_field(what)}{quote(value)} must be finite and not negative")
    return result


def _unknown_unit(value: str | float, unit: str, what: str, example: str) -> OffbeatError:
    return OffbeatError(f"{_field(what)}{quote(value)} has the unknown unit {unit!r}; write it like '{example}'")


def _field(what: str) -> str:
    return f"{what}: " if what else ""


def _decimal_prefix(number: float, unit: str) -> str:
    for prefix in ("P", "T", "G", "M", "k"):
        if abs(number) >= _DECIMAL[prefix]:
            return f"{_short(number / _DECIMAL[prefix])} {prefix}{unit}"
    return f"{_short(number)} {unit}"


def _short(number: float) -> str:
    return f"{number:.0f}" if 1e4 <= abs(number) < 1e15 else f"{number:.4g}"
