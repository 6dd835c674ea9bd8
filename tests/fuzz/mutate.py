"""A valid file and a random generator → a damaged or hostile one.

`damage` works on bytes: flips, cuts, copies, splices, and tokens that parsers stumble over. `distort` works on parsed
JSON: types swapped, numbers out of range, deep nesting, long texts, keys removed or renamed. `render` writes the result
as JSON and may give a key twice, which a parsed document cannot hold.
"""

import json
import marshal
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

TOKENS = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-1e999",
    b"1e308",
    b"-0",
    b"9" * 400,
    b"9" * 5000,
    b"18446744073709551616",
    b"-9223372036854775809",
    b"null",
    b"true",
    b'"\\ud800"',
    b'"\\u0000"',
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x00",
    b"\x1b[2J",
    b"[" * 200,
    b'{"a":' * 200,
    b"[[]," * 500,
    b"}{",
    b"},{",
    b'"',
    b"\\",
    b"\n",
    b"\r\n",
    b",,",
    b"/*",
    b"&a [*a]",
    b"!!python/object/apply:os.system [x]",
    b"---\n",
    b": ",
    b"../../../../x",
    b"\xe2\x80\xa8",
    b"\xf0\x9f\x98\x80" * 50,
)


def hostile_value(chance: Random) -> Any:
    """A JSON value that a careful reader refuses and a careless one trips over."""
    if chance.random() < 0.75:
        return chance.choice(chance.choice(_SCALARS))
    return chance.choice(_MAKERS)(chance)


_SCALARS: tuple[tuple[Any, ...], ...] = (
    (None, True, False, [], {}),
    (float("nan"), float("inf"), float("-inf")),
    (10**20, -(10**20), 10**400, 2**63, -(2**63) - 1, 2**31, 2**62, 2**53 + 1),
    (-1, 0, 1, 2, 3, 7, 1000, 10**6, 10**9),
    (0.0, -0.0, -1.5, 1e-320, 1e308, -1e308, 0.5, 1e18, 1e12),
    ("\ud800", "\udfff\ud800", "x" * 20_000, "²", "٣", "１", "a\nb", "../../../x", "/etc/x", "", "\0"),
    ("1", "-1", "1.5", "1e999", "nan", "9" * 5000, "0x10", "1_0", "10Gbit/s", "16GiB", "50us"),
)
_MAKERS: tuple[Callable[[Random], Any], ...] = (
    lambda chance: "".join(chance.choices("ab\0\n\r\t\"\\'{}[]:,&*!é漢\u202e\U0001f600 ", k=chance.randrange(12))),
    lambda chance: nested([], chance.choice([3, 70, 150, 900, 3000])),
    lambda chance: nested({}, chance.choice([3, 70, 150, 900])),
    lambda chance: [hostile_value(chance) for _ in range(chance.randrange(4))],
    lambda chance: {hostile_text(chance): hostile_value(chance) for _ in range(chance.randrange(3))},
    lambda chance: [chance.choice([0, 1, -1, 2**62])] * chance.choice([2, 100, 5000]),
    lambda chance: [[1, 2], [3]],
    lambda chance: chance.random() * 10 ** chance.randrange(-12, 12),
)


def hostile_text(chance: Random) -> str:
    return chance.choice(["", "a", "\0", "x" * 300, "format", "\ud800", "a\nb", "../x", "name", "é", "__class__"])


def nested(inner: Any, depth: int) -> Any:
    """`depth` lists or mappings around nothing."""
    value = inner
    for _ in range(depth):
        value = [value] if isinstance(inner, list) else {"a": value}
    return value


def distort(document: Any, chance: Random, others: Sequence[Any] = ()) -> Any:
    """A copy with one to four random changes; `others` are documents to take parts from."""
    # Several times quicker than copy.deepcopy, and enough for what JSON can hold.
    result = marshal.loads(marshal.dumps(document))
    for _ in range(chance.choice([1, 1, 1, 2, 2, 3, 4])):
        place = _place(result, chance)
        if place is None:
            return hostile_value(chance)
        try:
            _change(*place, chance, others)
        except (RecursionError, ValueError):
            # An earlier change was too deep to be copied; it is hostile enough.
            continue
    return result


def _place(document: Any, chance: Random) -> tuple[Any, Any] | None:
    """(container, key) of a random value inside, at any depth; None if there is none."""
    value, found = document, None
    while isinstance(value, (dict, list)) and value and (found is None or chance.random() < 0.75):
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        found, value = (value, key), value[key]
    return found


def _change(container: Any, key: Any, chance: Random, others: Sequence[Any]) -> None:
    value = container[key]
    kind = chance.randrange(10)
    if kind <= 4:
        container[key] = hostile_value(chance)
    elif kind == 5:
        del container[key]
    elif kind == 6 and isinstance(value, (int, float)) and abs(value) < 1e290:
        container[key] = chance.choice([-value, value + 1, value * 1e9, value / 1e9, int(value)])
    elif kind == 6:
        container[key] = str(value)[:1000] if not isinstance(value, str) else [value]
    elif kind == 7 and isinstance(container, list):
        container[key:key] = [marshal.loads(marshal.dumps(value)) for _ in range(chance.choice([1, 2, 30]))]
    elif kind == 7:
        container[hostile_text(chance)] = container.pop(key)
    elif kind == 8:
        part, where = (_place(chance.choice(others), chance) if others else None) or (container, key)
        container[key] = marshal.loads(marshal.dumps(part[where]))
    else:
        container[key] = [value] if chance.random() < 0.5 else {"value": value}


def render(document: Any, chance: Random) -> bytes:
    """JSON text, sometimes indented, sometimes with raw UTF-8, sometimes with a key given twice."""
    try:
        indent = 1 if chance.random() < 0.1 else None
        text = json.dumps(document, indent=indent, ensure_ascii=chance.random() < 0.8)
    except (RecursionError, ValueError):
        return b"[" * 3000 + b"]" * 3000
    if chance.random() < 0.03 and (place := text.find('{"')) >= 0:
        end = text.find(",", place)
        if end > 0:
            text = text[: place + 1] + text[place + 1 : end] + "," + text[place + 1 :]
    return text.encode("utf-8", "surrogatepass")


def damage(content: bytes, chance: Random, others: Sequence[bytes] = ()) -> bytes:
    """A copy with one to six random changes."""
    data = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 2, 3, 6])):
        _damage_once(data, chance, others)
    return bytes(data)


def _damage_once(data: bytearray, chance: Random, others: Sequence[bytes]) -> None:
    kind = chance.randrange(10)
    size = len(data)
    at = chance.randrange(size + 1)
    if kind <= 1 and size:
        data[at % size] ^= 1 << chance.randrange(8)
    elif kind == 2 and size:
        data[at % size] = chance.randrange(256)
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        del data[at : at + chance.choice([1, 2, 10, 100])]
    elif kind == 5:
        data[at:at] = chance.choice(TOKENS)
    elif kind == 6:
        token = chance.choice(TOKENS)
        data[at : at + len(token)] = token
    elif kind == 7:
        start = chance.randrange(size + 1)
        data[at:at] = data[start : start + chance.choice([1, 8, 64, 512])]
    elif kind == 8 and others:
        other = chance.choice(others)
        start = chance.randrange(len(other) + 1)
        data[at:] = other[start:]
    else:
        data[at:at] = noise(chance, chance.choice([1, 4, 32]))


def noise(chance: Random, longest: int = 2000) -> bytes:
    """Random bytes, or random characters of JSON and YAML."""
    length = chance.randrange(longest + 1)
    if chance.random() < 0.5:
        return chance.randbytes(length)
    return bytes(chance.choices(b'{}[]",:0123456789.eE+-truefalsn\\ \n#&*!|>%@`?a', k=length))
