"""Read files as validated data, and write files atomically.

Every file that users write or exchange passes through here, so that a bad one gives one sentence that names the file,
the field and the value.
"""

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from offbeat.errors import OffbeatError
from offbeat.units import quote

MAX_BYTES = 256 * 2**20
# People write YAML, programs write JSON; YAML takes seconds per 10 MiB to parse.
MAX_YAML_BYTES = 32 * 2**20
# A parsed value takes up to 230 bytes, so this many stay below a gigabyte; no file of Offbeat comes near.
MAX_VALUES = 4_000_000
_MAX_NESTING = 100
_PHRASES = {"extra_forbidden": "no such field", "too_short": "it has too few items"}
_PHRASES |= dict.fromkeys(("tuple_type", "list_type"), "it must be a list")
_MAPPINGS = ("dict_type", "model_type", "model_attributes_type", "dataclass_type")
_PHRASES |= dict.fromkeys(_MAPPINGS, "it must be a mapping")


def read_bytes(path: str | os.PathLike[str], what: str) -> bytes:
    """The file's content, or a one-sentence error."""
    _check_path(path, what)
    try:
        with open(path, "rb") as stream:
            # Not by the file's size: a pipe or a device has none and may never end.
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise OffbeatError(f"{_name(path)}: cannot read the {what}: {_reason(error)}") from None
    if len(content) > MAX_BYTES:
        raise OffbeatError(f"{path}: larger than {MAX_BYTES} bytes, the limit for a {what} file")
    return content


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """Parsed JSON of any shape."""
    return parse_json(read_bytes(path, what), str(path), what)


def parse_json(content: bytes | str, origin: str, what: str, *, finite: bool = True) -> Any:
    """Parsed JSON of any shape, with finite numbers unless the caller checks them; the error names `origin`."""
    _check_text(content, origin, what)
    # Many small values, such as empty lists, would take far more memory than the file.
    marks: Any = ",[{" if isinstance(content, str) else (b",", b"[", b"{")
    if len(content) > MAX_VALUES and sum(content.count(mark) for mark in marks) > MAX_VALUES:
        raise OffbeatError(f"{origin}: not a {what}: it has more than {MAX_VALUES} values")
    number = _finite if finite else None
    try:
        return json.loads(content, parse_constant=number, parse_float=number)
    except OffbeatError as error:
        raise OffbeatError(f"{origin}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise OffbeatError(f"{origin}: not a {what}: it is not valid JSON ({one_line(error)})") from None


def parse_yaml(content: bytes | str, origin: str, what: str) -> Any:
    """Parsed YAML of any shape. Tags, repeated keys and aliases, by which small files grow large, are refused."""
    _check_text(content, origin, what)
    if len(content) > MAX_YAML_BYTES:
        raise OffbeatError(f"{origin}: larger than {MAX_YAML_BYTES} bytes, the limit for a {what} in YAML")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent):
                raise OffbeatError(f"{origin}: YAML aliases are not allowed in a {what}")
            if getattr(event, "tag", None) is not None:
                raise OffbeatError(f"{origin}: the YAML tag {quote(event.tag)} is not allowed in a {what}")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_NESTING:
                raise OffbeatError(f"{origin}: nested deeper than {_MAX_NESTING} levels")
        return yaml.load(text, Loader=_Loader)
    except OffbeatError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise OffbeatError(f"{origin}: not a {what}: it is not valid YAML ({one_line(error)})") from None


def write_atomic(path: str | os.PathLike[str], content: bytes, what: str) -> None:
    """Writes the whole file or nothing."""
    _check_path(path, what)
    target = Path(path)
    temporary = target.parent / f".{target.name[:32]}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        # Mode 666 less the umask, as for any file the user creates.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise OffbeatError(f"{_name(path)}: cannot write the {what}: {_reason(error)}") from None


def _check_path(path: object, what: str) -> None:
    # A number would be taken for an open file.
    if not isinstance(path, str | os.PathLike):
        raise OffbeatError(f"{what}: the file must be a string or a path, got {quote(path)}")


def _check_text(content: object, origin: str, what: str) -> None:
    if not isinstance(content, str | bytes):
        raise OffbeatError(f"{origin}: a {what} must be text or bytes, got {quote(content)}")


def digest(content: Any) -> str:
    """Sixteen hex digits that are equal for equal JSON values."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@contextmanager
def problems_named(origin: str, kind: type[OffbeatError] = OffbeatError) -> Iterator[None]:
    """Turns pydantic's errors inside the block into one sentence that begins with `origin`."""
    try:
        yield
    except ValidationError as error:
        raise kind(f"{origin}: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first problem pydantic found, as 'field: what is wrong, got value'."""
    problems = error.errors(include_url=False)
    problem = problems[0]
    field = ""
    for step in problem["loc"]:
        name = step if isinstance(step, int) or (step.isprintable() and len(step) <= 80) else quote(step)
        field += f"[{name}]" if isinstance(name, int) else f".{name}" if field else name
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, Exception):
        message = str(cause)
    elif problem["type"] == "missing":
        message = "it is required but not given"
    else:
        text = _PHRASES.get(problem["type"], problem["msg"])
        message = f"{text[:1].lower()}{text[1:]}, got {quote(problem['input'])}"
    # Pydantic also calls a list too short when the items in it are faulty.
    more = sum(other["loc"] != problem["loc"][: len(other["loc"])] for other in problems[1:])
    return (f"{field}: " if field else "") + message + (f" (and {more} more)" if more else "")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # chosen when imported
    """The safe loader, several times faster with libyaml; it rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"the key {quote(key.value)} is given twice in line {key.start_mark.line + 1}")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _name(path: str | os.PathLike[str]) -> str:
    """The path as text without characters that would break the sentence."""
    text = os.fspath(path)
    return text if text.isprintable() else repr(text)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or one_line(error)


def one_line(error: Exception) -> str:
    """The error's text, without line breaks and shortened."""
    return " ".join(str(error).split())[:160]


def _finite(text: str) -> float:
    number = float(text)
    if math.isfinite(number):
        return number
    named = text.endswith(("NaN", "Infinity"))
    raise OffbeatError(f"not valid JSON: the number {text[:40]} is {'not allowed' if named else 'too large'}")
