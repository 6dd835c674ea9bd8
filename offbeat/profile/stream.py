"""A trace file, plain or gzip → its events in batches, and its header, in little memory whatever its size.

Batches between two '},{' are parsed at once by orjson. Where that fails (the cut lies inside an event, or an event
holds NaN or broken text) the exact scanner cuts event by event and only the odd event goes through slower parsers.
"""

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from offbeat.errors import OffbeatError
from offbeat.units import format_bytes

_CHUNK = 2**20
_MOST_VALUE_BYTES = 16 * 2**20
_MOST_DEPTH = 64
_MOST_RATIO = 200
"""Traces shrink 10 to 30 times; what shrinks more was made to fill memory or disk."""
_FREE_BYTES = 64 * 2**20
_HEADER_BYTES = 2**20

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]"]', re.DOTALL)
_SCALAR_END = re.compile(rb"[,\]}\s]")
_SPACE = re.compile(rb"[\s,]*+")
_CUT = re.compile(rb"\}\s*,\s*\{")
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"%PDF", "a PDF document"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x04", "a pickle"),
)


class EventStream:
    """Iterates over lists of events; `header` holds the wanted top-level values once the iteration has ended."""

    def __init__(self, path: str | os.PathLike[str], wanted: tuple[str, ...]) -> None:
        self.path = Path(path)
        self.wanted = wanted
        self.header: dict[str, Any] = {}
        self._buffer = b""
        self._at = 0
        self._ended = False
        self._read = 0
        self._size = 0
        self._file: BinaryIO | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        try:
            with self.path.open("rb") as raw:
                self._size = os.fstat(raw.fileno()).st_size
                start = raw.read(4096)
                for magic, what in _FOREIGN:
                    if start.startswith(magic):
                        raise self._error(f"it is {what}, not a trace in JSON")
                raw.seek(0)
                self._file = gzip.GzipFile(fileobj=raw) if start.startswith(b"\x1f\x8b") else raw  # type: ignore[assignment]
                yield from self._document()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._error(f"the compressed data is damaged or cut off ({error})") from None
        except OSError as error:
            raise self._error(f"it cannot be read: {error.strerror or error}") from None

    def _document(self) -> Iterator[list[Any]]:
        opening = self._next_byte()
        if opening == b"":
            raise self._error("it is empty")
        if opening == b"[":
            self._at += 1
            yield from self._array()
            return
        if opening != b"{":
            raise self._error("it is not JSON")
        self._at += 1
        found = False
        while (mark := self._next_byte()) != b"}":
            if mark != b'"':
                raise self._truncated() if mark == b"" else self._error("it is not valid JSON")
            key = self._parse(self._value())
            if self._next_byte() != b":":
                raise self._truncated() if self._ended else self._error("it is not valid JSON")
            self._at += 1
            if key == "traceEvents":
                if self._next_byte() != b"[":
                    raise self._error("its field 'traceEvents' is not a list")
                self._at += 1
                found = True
                yield from self._array()
            else:
                self._keep(key)
        if not found:
            raise self._error("it has no field 'traceEvents', so it is not a profiler trace")

    def _keep(self, key: Any) -> None:
        if self._next_byte() == b"":
            raise self._truncated()
        value = self._value()
        if key in self.wanted and len(value) <= _HEADER_BYTES:
            self.header[key] = self._parse(value)

    def _array(self) -> Iterator[list[Any]]:
        """The elements up to the closing bracket, in batches."""
        while (mark := self._next_byte()) != b"]":
            if mark == b"":
                raise self._truncated()
            if len(self._buffer) - self._at < _CHUNK // 2:
                self._more()
            batch = self._batch()
            if batch is None:
                batch = [self._parse(self._value())]
                while len(batch) < 4096 and self._next_byte() not in (b"]", b""):
                    batch.append(self._parse(self._value()))
            yield batch
        self._at += 1

    def _batch(self) -> list[Any] | None:
        """All elements before the last '},{' in the buffer, if that cut is one between elements."""
        tail = max(self._at, len(self._buffer) - _CHUNK // 8)
        cuts = list(_CUT.finditer(self._buffer, tail))
        if not cuts:
            return None
        end = cuts[-1].start() + 1
        try:
            batch = orjson.loads(b"[" + self._buffer[self._at : end] + b"]")
        except orjson.JSONDecodeError:
            return None
        self._at = end
        return batch

    def _value(self) -> bytes:
        """The bytes of the JSON value that begins here, which is then passed."""
        depth, scanned = 0, 0
        while True:
            depth, scanned, whole = self._scan(depth, scanned)
            if whole:
                value = self._buffer[self._at : self._at + scanned]
                self._at += scanned
                return value
            if len(self._buffer) - self._at > _MOST_VALUE_BYTES:
                raise self._error(f"one of its values is larger than {format_bytes(_MOST_VALUE_BYTES)}")
            if not self._more():
                raise self._truncated()

    def _scan(self, depth: int, scanned: int) -> tuple[int, int, bool]:
        """Goes on where an earlier scan of this value ended: nesting there, bytes passed, and whether that is all."""
        first = self._buffer[self._at : self._at + 1]
        if first not in (b"{", b"[", b'"'):
            scalar = _SCALAR_END.search(self._buffer, self._at)
            return (0, scalar.start() - self._at, True) if scalar else (0, 0, False)
        for token in _TOKEN.finditer(self._buffer, self._at + scanned):
            text = token.group()
            if text == b'"':
                break
            if text in (b"{", b"["):
                depth += 1
                if depth > _MOST_DEPTH:
                    raise self._error(f"it is nested deeper than {_MOST_DEPTH} levels, which no trace is")
            elif text in (b"}", b"]"):
                depth -= 1
            scanned = token.end() - self._at
            if depth == 0:
                return depth, scanned, True
        return depth, scanned, False

    def _parse(self, value: bytes) -> Any:
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            pass
        try:
            # Kineto writes NaN where a counter failed, and names of kernels as the compiler left them.
            return json.loads(value.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            shown = value[:60].decode("utf-8", "replace").replace("\n", " ")
            raise self._error(f"it is not valid JSON near {shown!r}") from None

    def _next_byte(self) -> bytes:
        """The next byte that is neither space nor comma, not yet passed; empty at the end."""
        while True:
            gap = _SPACE.match(self._buffer, self._at)
            self._at = gap.end() if gap else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at : self._at + 1]
            if not self._more():
                return b""

    def _more(self) -> bool:
        assert self._file is not None
        chunk = b"" if self._ended else self._file.read(_CHUNK)
        self._ended = not chunk
        self._read += len(chunk)
        if self._read > max(_FREE_BYTES, _MOST_RATIO * self._size):
            raise self._error(f"it unpacks to more than {_MOST_RATIO} times its {format_bytes(self._size)}")
        self._buffer = self._buffer[self._at :] + chunk
        self._at = 0
        return bool(chunk)

    def _truncated(self) -> OffbeatError:
        return self._error("it is cut off before its end")

    def _error(self, why: str) -> OffbeatError:
        return OffbeatError(f"{self.path}: cannot read the trace: {why}")
