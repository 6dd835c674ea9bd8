"""Read the events and header of a Chrome trace file, plain or gzip, in batches and with little memory.

All events before the last '},{' of a chunk are parsed at once by orjson. Where that fails (the cut lies inside an
event, or one holds NaN or control characters) the events are parsed one by one by the json module.
"""

import codecs
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
_MOST_VALUE_LENGTH = 64 * 2**20
_MOST_RATIO = 400
"""Traces compress 10 to 30 times; a file beyond this ratio was made to fill memory or disk."""
_FREE_BYTES = 64 * 2**20
"""The ratio of smaller files is not checked."""

_SPACE = re.compile(r"[\s,]*+")
_CUT = re.compile(r"\}\s*,\s*\{")
_PARTIAL_TOKEN = re.compile(r"[\w+\-.]{0,16}\Z")
_DECODER = json.JSONDecoder(strict=False)
_FOREIGN = {b"PK\x03\x04": "a zip archive", b"\x80\x02": "a pickle", b"\x80\x04": "a pickle"}
_FOREIGN |= {b"SQLite format 3": "an SQLite database", b"%PDF": "a PDF document", b"\x89PNG": "a PNG picture"}
_FOREIGN |= {b"\xff\xd8\xff": "a JPEG picture", b"\x7fELF": "a program"}
"""First bytes of files of other kinds."""


class EventStream:
    """Iterates over lists of events; `header` holds the wanted top-level values once the iteration has ended."""

    def __init__(self, path: str | os.PathLike[str], wanted: tuple[str, ...]) -> None:
        self.path = Path(path)
        self.wanted = wanted
        self.header: dict[str, Any] = {}
        # Kineto writes names of kernels that need not be UTF-8.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._at = 0
        self._read = 0
        self._size = 0
        self._file: BinaryIO | gzip.GzipFile | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        try:
            with self.path.open("rb") as raw:
                self._size = os.fstat(raw.fileno()).st_size
                start = raw.read(16)
                for magic, what in _FOREIGN.items():
                    if start.startswith(magic):
                        raise self._error(f"it is {what}, not a trace in JSON")
                raw.seek(0)
                self._file = gzip.GzipFile(fileobj=raw) if start.startswith(b"\x1f\x8b") else raw
                yield from self._document()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._error(f"the compressed data is damaged or cut off ({error})") from None
        except OffbeatError:
            raise
        except (OSError, ValueError) as error:
            raise self._error(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None

    def _document(self) -> Iterator[list[Any]]:
        match self._next():
            case "":
                raise self._error("it is empty")
            case "[":
                yield from self._array()
                return
            case "{":
                self._at += 1
            case _:
                raise self._error("it is not JSON")
        found = False
        while self._next() != "}":
            key = self._value()
            self._expect(":", "it is not valid JSON")
            if key == "traceEvents":
                found = True
                yield from self._array()
            else:
                self._next()
                value = self._value()
                if key in self.wanted:
                    self.header[key] = value
        if not found:
            raise self._error("it has no field 'traceEvents', so it is not a profiler trace")

    def _array(self) -> Iterator[list[Any]]:
        """The elements of the list that begins here, in batches."""
        self._expect("[", "its field 'traceEvents' is not a list")
        while self._next() != "]":
            if len(self._text) - self._at < _CHUNK // 2:
                self._more()
            batch = self._batch()
            if not batch:
                batch = [self._value()]
                while len(batch) < 4096 and self._next() not in ("]", ""):
                    batch.append(self._value())
            yield batch
        self._at += 1

    def _batch(self) -> list[Any]:
        """All elements before the last '},{' in the buffer; none if that is not between two elements."""
        tail = max(self._at, len(self._text) - _CHUNK // 8)
        cuts = list(_CUT.finditer(self._text, tail))
        if not cuts:
            return []
        end = cuts[-1].start() + 1
        try:
            batch: list[Any] = orjson.loads(f"[{self._text[self._at : end]}]")
        except orjson.JSONDecodeError:
            return []
        self._at = end
        return batch

    def _value(self) -> Any:
        """Parses the value that begins here; one that the buffer cuts off, again with twice as much of the file."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not (error.msg.startswith("Unterminated") or _PARTIAL_TOKEN.match(self._text, error.pos)):
                    shown = self._text[self._at : self._at + 60]
                    raise self._error(f"it is not valid JSON near {shown!r}") from None
            except (RecursionError, ValueError):
                raise self._error("it is nested deeper, or has longer numbers, than any trace") from None
            else:
                # At the end of the buffer a number may go on.
                if end < len(self._text):
                    self._at = end
                    return value
            if len(self._text) - self._at > _MOST_VALUE_LENGTH:
                raise self._error(f"one of its values is larger than {format_bytes(_MOST_VALUE_LENGTH)}")
            if not self._more():
                raise self._truncated()

    def _expect(self, mark: str, problem: str) -> None:
        found = self._next()
        if found != mark:
            raise self._error(problem) if found else self._truncated()
        self._at += 1

    def _next(self) -> str:
        """Peeks at the next character that is neither space nor comma; empty at the end."""
        while True:
            gap = _SPACE.match(self._text, self._at)
            self._at = gap.end() if gap else self._at
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _more(self) -> bool:
        """Reads a chunk, or as much as the buffer still holds; False at the end."""
        assert self._file is not None
        chunk = self._file.read(max(_CHUNK, len(self._text) - self._at))
        self._read += len(chunk)
        if self._read > max(_FREE_BYTES, _MOST_RATIO * self._size):
            raise self._error(f"it unpacks to more than {_MOST_RATIO} times its {format_bytes(self._size)}")
        self._text = self._text[self._at :] + self._decoder.decode(chunk, final=not chunk)
        self._at = 0
        return bool(chunk)

    def _truncated(self) -> OffbeatError:
        return self._error("it is cut off before its end")

    def _error(self, why: str) -> OffbeatError:
        shown = str(self.path) if str(self.path).isprintable() else repr(str(self.path))
        return OffbeatError(f"{shown}: cannot read the trace: {why}")
