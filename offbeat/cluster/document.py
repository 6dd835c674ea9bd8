"""A cluster file (YAML or JSON) → its raw value; a ClusterSpec → YAML text as people write it, or a digest.

Equal nodes are merged into one with `count`, and a number gets a unit wherever the text is read back as exactly it.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count, takewhile
from operator import eq
from os import PathLike
from typing import TYPE_CHECKING, Any

import yaml

from offbeat import files, units
from offbeat.cluster.parts import CollectiveTable, Link, Node
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.cluster.spec import ClusterSpec

WHAT = "cluster"
_exact_bytes_per_second = partial(units.exact_bandwidth, unit="B/s")

# Vendors give networks in bits and memory and device links in bytes per second.
_EXACT: dict[str, Callable[[Any], Any]] = {
    "memory": units.exact_bytes,
    "peak_flops": units.exact_flops,
    "memory_bandwidth": _exact_bytes_per_second,
    "bandwidth": units.exact_bandwidth,
    "latency": units.exact_seconds,
    "intra_bandwidth": _exact_bytes_per_second,
    "intra_latency": units.exact_seconds,
    "single_flow_bandwidth": units.exact_bandwidth,
    "sizes_bytes": lambda sizes: [units.exact_bytes(size) for size in sizes],
    "seconds": lambda times: [units.exact_seconds(seconds) for seconds in times],
}


def parse_file(path: str | PathLike[str]) -> Any:
    """The file's raw value; JSON or YAML is told by its content."""
    content = files.read_bytes(path, WHAT)
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return files.parse_yaml(content, str(path), WHAT)
    try:
        return files.parse_json(content, str(path), WHAT)
    except OffbeatError:
        # YAML may also open with a brace; if it is neither, it was most likely meant as JSON.
        with suppress(OffbeatError):
            return files.parse_yaml(content, str(path), WHAT)
        raise


def render_yaml(cluster: "ClusterSpec") -> str:
    """The cluster as YAML text for people."""
    document: dict[str, Any] = {"name": cluster.name, "nodes": _merged(cluster.nodes)}
    if cluster.links:
        document["links"] = [_readable(link) for link in cluster.links]
    if cluster.tables:
        document["tables"] = [_readable(table) for table in cluster.tables]
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def digest(cluster: "ClusterSpec") -> str:
    """Equal for clusters that cost the same."""
    labels = {"name", "address", "count"}
    index = {node.name: position for position, node in enumerate(cluster.nodes)}
    return files.digest(
        {
            "nodes": [
                node.model_dump(mode="json", exclude=labels | ({"role"} if node.role == "worker" else set()))
                for node in cluster.nodes
            ],
            "links": [[*sorted((index[k.a], index[k.b])), k.bandwidth, k.latency] for k in cluster.links],
            "tables": [table.model_dump(mode="json") for table in cluster.tables],
        }
    )


def _merged(nodes: tuple[Node, ...]) -> list[dict[str, Any]]:
    """The entries of a file: equal nodes that are named in order or by position make one entry with `count`."""
    entries: list[dict[str, Any]] = []
    start = 0
    while start < len(nodes):
        first = nodes[start]
        stem = "" if first.name == f"node{start}" else first.name.removesuffix("-0")
        named = (first.named(f"{stem}-{index}" if stem else f"node{start + index}") for index in count())
        alike = takewhile(bool, map(eq, nodes[start:], named))
        length = 1 if first.address else max(1, sum(alike))
        entry = _readable(first)
        if length > 1:
            entry.pop("name")
            entry = ({"name": stem} if stem else {}) | {"count": length} | entry
        entries.append(entry)
        start += length
    return entries


def _readable(part: Node | Link | CollectiveTable) -> dict[str, Any]:
    values = part.model_dump(exclude_none=True)
    if values.get("role") == "worker":
        del values["role"]
    return {field: _EXACT[field](value) if field in _EXACT else value for field, value in values.items()}


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc] # chosen when imported
    """Block style, with lists of numbers on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.Node:
        return super().represent_sequence(tag, sequence, not any(isinstance(item, dict) for item in sequence))

    def ignore_aliases(self, data: Any) -> bool:
        return True
