"""A value from a cluster file → a checked number in SI units, or one sentence quoting the value.

Each type accepts a plain number or a text with a unit, and tells JSON Schema so.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from offbeat import units
from offbeat.errors import OffbeatError

_LONGEST_LABEL = 200


def _quantity(parse: Callable[[Any, str], float], *, zero: bool, example: str) -> tuple[Any, Any]:
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


def _label_or_none(value: str) -> str:
    return _label(value) if value else value


_BANDWIDTH = _quantity(units.parse_bandwidth, zero=False, example="10Gbit/s")
_LATENCY = _quantity(units.parse_seconds, zero=True, example="50us")
_SECONDS = _quantity(units.parse_seconds, zero=False, example="1.5ms")
_BYTES = _quantity(units.parse_bytes, zero=False, example="16GiB")
_FLOPS = _quantity(units.parse_flops, zero=False, example="65TFLOP/s")

Bandwidth = Annotated[float, _BANDWIDTH[0], _BANDWIDTH[1]]
"""Bytes per second, more than zero."""
Latency = Annotated[float, _LATENCY[0], _LATENCY[1]]
"""Seconds, zero allowed."""
Seconds = Annotated[float, _SECONDS[0], _SECONDS[1]]
"""Seconds, more than zero."""
Bytes = Annotated[int, _BYTES[0], _BYTES[1]]
"""Bytes, more than zero."""
Flops = Annotated[float, _FLOPS[0], _FLOPS[1]]
"""FLOP per second, more than zero."""
Price = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
"""Dollars per hour."""
Count = Annotated[int, Field(strict=True, ge=1, le=100_000)]
Rank = Annotated[int, Field(strict=True, ge=0)]
Label = Annotated[str, AfterValidator(_label)]
"""A name people read: printable and not blank."""
NodeName = Annotated[str, AfterValidator(_label_or_none)]
"""A label, or '' for a node that is named by its position."""
