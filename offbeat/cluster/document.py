"""A cluster file (YAML or JSON) ↔ the fields of a ClusterSpec.

The file form is what people write: a node may carry `count` to stand for several, and numbers may carry units. Writing
merges equal nodes back into `count` and uses a unit wherever the text is read back as exactly the same number.
"""

from collections.abc import Callable
from os import PathLike
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from offbeat import files, units
from offbeat.cluster.fields import Count, Label
from offbeat.cluster.parts import MAX_NODES, CollectiveTable, Link, Node
from offbeat.errors import OffbeatError

_WHAT = "cluster"


def _exact_bytes_per_second(rate: float) -> str | float:
    return units.exact_bandwidth(rate, "B/s")


# Vendors give networks in bits and memory and device links in bytes per second.
_EXACT: dict[str, Callable[[Any], str | float]] = {
    "memory": units.exact_bytes,
    "peak_flops": units.exact_flops,
    "memory_bandwidth": _exact_bytes_per_second,
    "bandwidth": units.exact_bandwidth,
    "latency": units.exact_seconds,
    "intra_bandwidth": _exact_bytes_per_second,
    "intra_latency": units.exact_seconds,
    "single_flow_bandwidth": units.exact_bandwidth,
}


class NodeEntry(Node):
    """A node as a file gives it: `count` of them if that is given."""

    count: Count | None = None
    """Number of such nodes; with a name, they are called name-0, name-1, …"""

    @field_validator("count")
    @classmethod
    def _one_address_each(cls, count: int | None, info: ValidationInfo) -> int | None:
        address = info.data.get("address")
        if address is not None and (count or 1) > 1:
            raise OffbeatError(f"{count} nodes cannot share the address {units.quote(address)}")
        return count

    def expand(self) -> list[Node]:
        node = Node.model_construct(**{field: getattr(self, field) for field in Node.model_fields})
        if self.count is None:
            return [node]
        names = (f"{self.name}-{index}" if self.name else "" for index in range(self.count))
        return [node.named(name) for name in names]


class ClusterFile(BaseModel):
    """A cluster as a file gives it."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Offbeat cluster")

    name: Label = "cluster"
    nodes: Annotated[tuple[NodeEntry, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
    tables: tuple[CollectiveTable, ...] = ()


def parse_file(path: str | PathLike[str]) -> Any:
    """The file's raw value; JSON or YAML is told by its content."""
    content = files.read_bytes(path, _WHAT)
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return files.parse_yaml(content, str(path), _WHAT)
    try:
        return files.parse_json(content, str(path), _WHAT)
    except OffbeatError as error:
        # YAML may also open with a brace; if it is neither, it was most likely meant as JSON.
        try:
            return files.parse_yaml(content, str(path), _WHAT)
        except OffbeatError:
            raise error from None


def parse_yaml(text: str, origin: str) -> Any:
    return files.parse_yaml(text, origin, _WHAT)


def parse_json(content: bytes | str, origin: str) -> Any:
    return files.parse_json(content, origin, _WHAT)


def fields_of(raw: Any, origin: str) -> dict[str, Any]:
    """The validated fields of a ClusterSpec, nodes expanded; the error names `origin`, the field and the value."""
    if not isinstance(raw, dict):
        shown = "nothing" if raw is None else units.quote(raw)
        raise OffbeatError(f"{origin}: not a cluster: it must hold a mapping with 'nodes', got {shown}")
    try:
        file = ClusterFile.model_validate(raw)
    except ValidationError as error:
        raise OffbeatError(f"{origin}: not a cluster: {files.first_problem(error)}") from None
    total = sum(entry.count or 1 for entry in file.nodes)
    if total > MAX_NODES:
        raise OffbeatError(f"{origin}: not a cluster: nodes: {total} nodes are more than the {MAX_NODES} it may have")
    nodes = tuple(node for entry in file.nodes for node in entry.expand())
    return {"name": file.name, "nodes": nodes, "links": file.links, "tables": file.tables}


def render_yaml(
    name: str, nodes: tuple[Node, ...], links: tuple[Link, ...], tables: tuple[CollectiveTable, ...]
) -> str:
    """The cluster as YAML text for people."""
    document: dict[str, Any] = {"name": name, "nodes": _merged(nodes)}
    if links:
        document["links"] = [_readable(link) for link in links]
    if tables:
        document["tables"] = [_table(table) for table in tables]
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def write(path: str | PathLike[str], text: str) -> None:
    files.write_atomic(path, text.encode(), _WHAT)


def _merged(nodes: tuple[Node, ...]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    start = 0
    while start < len(nodes):
        stem, length = _run(nodes, start)
        entry = _readable(nodes[start])
        if length > 1:
            entry.pop("name")
            entry = ({"name": stem} if stem else {}) | {"count": length} | entry
        entries.append(entry)
        start += length
    return entries


def _run(nodes: tuple[Node, ...], start: int) -> tuple[str, int]:
    """How many nodes from `start` one entry with `count` can stand for, and the name it needs ('' for none)."""
    first = nodes[start]
    if first.name == f"node{start}":
        stem, expected = "", lambda offset: f"node{start + offset}"
    elif first.name.endswith("-0") and first.name != "-0":
        stem, expected = first.name[:-2], lambda offset: f"{first.name[:-1]}{offset}"
    else:
        return "", 1
    length = 1
    while start + length < len(nodes):
        node = nodes[start + length]
        if first.address is not None or node.name != expected(length) or node != first.named(node.name):
            break
        length += 1
    return stem, length


def _readable(part: Node | Link) -> dict[str, Any]:
    values = part.model_dump(exclude_none=True)
    return {field: _EXACT[field](value) if field in _EXACT else value for field, value in values.items()}


def _table(table: CollectiveTable) -> dict[str, Any]:
    return {
        "collective": table.collective,
        "groups": [list(group) for group in table.groups],
        "sizes_bytes": [units.exact_bytes(size) for size in table.sizes_bytes],
        "seconds": [units.exact_seconds(seconds) for seconds in table.seconds],
    }


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc] # chosen when imported
    """Block style, with lists of numbers on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.Node:
        return super().represent_sequence(tag, sequence, not any(isinstance(item, dict) for item in sequence))

    def ignore_aliases(self, data: Any) -> bool:
        return True
