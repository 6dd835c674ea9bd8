"""Execution traces of Chakra: written, read back, and read by protobuf itself."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.strategy import build_strategy
from offbeat.timeline import Timeline, chakra
from offbeat.timeline.model import Builder

COLUMNS = ("start", "end", "queued", "rank", "kind", "step", "bytes", "task")
VALUES = ("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64")
VALUES += ("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes")


def replayed() -> Timeline:
    graph, cluster = offbeat.zoo.capture("mlp", 0.1), ClusterSpec.homogeneous(nodes=2, devices_per_node=1)
    plan = offbeat.lower(graph, cluster, build_strategy("sharded", graph, cluster))
    return offbeat.simulate(plan)


def schema() -> dict[str, Any]:
    """Chakra's messages as protobuf makes them from the published field numbers."""
    descriptor = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    kind = descriptor.FieldDescriptorProto
    document = descriptor.FileDescriptorProto(name="et.proto", package="ChakraProtoMsg", syntax="proto3")

    def add(message: Any, name: str, number: int, type_: str, repeated: bool = False) -> None:
        label = kind.LABEL_REPEATED if repeated else kind.LABEL_OPTIONAL
        plain = not type_[0].isupper()
        field = message.field.add(name=name, number=number, label=label)
        field.type = getattr(kind, f"TYPE_{type_.upper()}") if plain else kind.TYPE_MESSAGE
        if not plain:
            field.type_name = f".ChakraProtoMsg.{type_}"

    attribute = document.message_type.add(name="AttributeProto")
    add(attribute, "name", 1, "string")
    for place, type_ in enumerate(VALUES):
        add(document.message_type.add(name=f"{type_.title()}List"), "values", 1, type_, repeated=True)
        add(attribute, f"{type_}_val", 3 + 2 * place, type_)
        add(attribute, f"{type_}_list", 4 + 2 * place, f"{type_.title()}List")
    metadata = document.message_type.add(name="GlobalMetadata")
    add(metadata, "version", 1, "string")
    add(metadata, "attr", 2, "AttributeProto", repeated=True)
    node = document.message_type.add(name="Node")
    fields = {"id": 1, "type": 3, "ctrl_deps": 4, "data_deps": 5, "start_time_micros": 6, "duration_micros": 7}
    add(node, "name", 2, "string")
    for name, number in fields.items():
        add(node, name, number, "uint64", repeated=name.endswith("deps"))
    add(node, "attr", 10, "AttributeProto", repeated=True)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(document)
    return {
        name.rpartition(".")[2]: cls
        for name, cls in message_factory.GetMessageClassesForFiles(["et.proto"], pool).items()
    }


def check_equal(one: Timeline, other: Timeline) -> None:
    for column in COLUMNS:
        np.testing.assert_allclose(getattr(one, column), getattr(other, column), atol=5.1e-10, rtol=0)
    assert [span.name for span in one.spans] == [span.name for span in other.spans]
    assert [span.track for span in one.spans] == [span.track for span in other.spans]
    np.testing.assert_allclose(one.marks, other.marks, atol=5.1e-10, rtol=0)
    assert (one.source, one.notes, one.peak_memory) == (other.source, other.notes, other.peak_memory)


def test_a_timeline_comes_back(tmp_path: Path) -> None:
    timeline = replayed()
    paths = chakra.write(timeline, tmp_path / "job")
    assert [path.name for path in paths] == ["job.0.et", "job.1.et"]
    back = chakra.read(tmp_path / "job")
    check_equal(timeline, back)
    assert timeline.critical is not None
    assert back.critical is not None
    assert back.critical.tolist() == timeline.critical.tolist()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(("forward", "backward", "communication", "wait", "update")),
            st.text(max_size=8),
            st.integers(-(10**12), 10**12),
            st.integers(0, 10**9),
            st.integers(-1, 2**40),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_any_spans_come_back(rows: list[tuple[int, Any, str, int, int, int]]) -> None:
    builder = Builder()
    for rank, kind, name, start, length, size in rows:
        track = "network" if kind == "communication" else "compute"
        builder.add(rank, track, kind, name, start / 1e6, (start + length) / 1e6, bytes=max(0, size), step=size % 7 - 1)
    with tempfile.TemporaryDirectory() as folder:
        chakra.write(builder.build(), f"{folder}/x")
        back = chakra.read(f"{folder}/x")
    assert [(s.rank, s.kind, s.name, s.bytes, s.step) for s in back.spans] == [
        (rank, kind, name, max(0, size), size % 7 - 1) for rank, kind, name, _, _, size in rows
    ]
    np.testing.assert_allclose(back.start, [row[3] / 1e6 for row in rows], atol=1e-9, rtol=1e-15)


def test_nodes_follow_what_they_waited_for(tmp_path: Path) -> None:
    builder = Builder()
    builder.add(0, "compute", "forward", "f", 0.0, 1.0)
    builder.add(0, "compute", "backward", "b1", 1.0, 2.0)
    builder.add(0, "compute", "backward", "b2", 2.0, 4.0)
    builder.add(0, "network", "communication", "m0.all_gather[0:4]", 2.5, 5.0, queued=2.0, bytes=16, task=0)
    builder.add(0, "compute", "wait", "wait", 4.0, 5.0)
    builder.add(0, "compute", "update", "u", 5.0, 6.0)
    (path,) = chakra.write(builder.build(), tmp_path / "t")
    head, nodes = chakra.read_file(path)
    assert head["offbeat_source"] == "measured"
    by_name = {node.name: node for node in nodes}
    ids = {name: node.id for name, node in by_name.items()}
    assert {name: node.deps for name, node in by_name.items()} == {
        "f": (),
        "b1": (ids["f"],),
        "b2": (ids["b1"],),
        # Ready when b1 had ended, though it went later.
        "m0.all_gather[0:4]": (ids["b1"],),
        "wait": (),
        "u": (ids["b2"], ids["m0.all_gather[0:4]"]),
    }
    sent = by_name["m0.all_gather[0:4]"]
    assert (sent.type, sent.attributes["comm_type"], sent.attributes["comm_size"]) == (chakra.COLLECTIVE, 2, 16)
    assert (sent.start_micros, sent.duration_micros) == (2_500_000, 2_500_000)
    assert by_name["wait"].type == chakra.METADATA
    assert by_name["u"].type == chakra.COMPUTING


def test_protobuf_reads_what_is_written(tmp_path: Path) -> None:
    classes = schema()
    from google.protobuf.unknown_fields import UnknownFieldSet

    timeline = replayed()
    for path in chakra.write(timeline, tmp_path / "job"):
        first, *others = chakra._messages(path.read_bytes())
        head = classes["GlobalMetadata"].FromString(first)
        assert head.version == chakra.VERSION
        assert head.attr[0].string_val == "predicted"
        _, nodes = chakra.read_file(path)
        for raw, node in zip(others, nodes, strict=True):
            theirs = classes["Node"].FromString(raw)
            assert all(len(UnknownFieldSet(part)) == 0 for part in (theirs, *theirs.attr))
            assert (theirs.id, theirs.name, theirs.type) == (node.id, node.name, node.type)
            assert tuple(theirs.data_deps) == node.deps
            assert (theirs.start_time_micros, theirs.duration_micros) == (node.start_micros, node.duration_micros)
            assert {a.name for a in theirs.attr} == set(node.attributes)
            assert next(a for a in theirs.attr if a.name == "is_cpu_op").bool_val is False


def test_attributes_of_other_tools_are_read(tmp_path: Path) -> None:
    """A trace of another tool, as protobuf writes it: packed lists, negative numbers, fields that are not known."""
    classes = schema()
    values = dict(zip(VALUES, (1.5, 0.25, -7, -(2**40), 7, 2**63, -9, -(2**50)), strict=False))
    values |= {"fixed32": 5, "fixed64": 2**60, "sfixed32": -5, "sfixed64": -(2**60), "bool": True}
    values |= {"string": "täxt", "bytes": b"\x00\xff"}
    node = classes["Node"](
        id=3, name="ncclAllReduce", type=7, start_time_micros=10, duration_micros=20, ctrl_deps=[1, 2]
    )
    for type_, value in values.items():
        node.attr.add(name=type_, **{f"{type_}_val": value})
        listed = node.attr.add(name=f"{type_}s")
        getattr(listed, f"{type_}_list").values.extend([value, value])
    node.attr.add(name="comm_size", int64_val=4096)
    compute = classes["Node"](id=1, name="aten::mm", type=4, start_time_micros=0, duration_micros=10)
    unknown = b"\x9a\x06\x03abc"  # field 99, three bytes
    messages = [classes["GlobalMetadata"](version="0.0.4"), compute, node]
    path = tmp_path / "other.0.et"
    raw = [message.SerializeToString() for message in messages]
    path.write_bytes(b"".join(chakra._delimited(part) for part in (*raw[:2], raw[2] + unknown)))
    _, (first, second) = chakra.read_file(path)
    assert first.name == "aten::mm"
    assert second.deps == (1, 2)
    for type_, value in values.items():
        known = type_ in ("int32", "int64", "uint32", "uint64", "bool", "string")
        assert second.attributes[type_] == (value if known else None)
        assert second.attributes[f"{type_}s"] == ([value, value] if known else None)
    timeline = chakra.read(tmp_path / "other")
    assert [(s.kind, s.track, s.bytes, s.task, round(s.end * 1e6)) for s in timeline.spans] == [
        ("other", "compute", 0, -1, 10),
        ("communication", "network", 4096, 0, 30),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"\x05abc", "it ends in the middle of a message of 5 bytes"),
        (b"\x02\x0b\x00", "field 1 has the unknown wire type 3"),
        (b"\x00\x03\x12\x09a", "field 2 is cut off"),
        (b"\xff" * 11, "a number has more than 64 bits"),
        (b"\x00\x02\x10\x05", "found the number 5 instead of a text or a message"),
    ],
)
def test_other_files_are_refused_in_one_sentence(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.0.et"
    path.write_bytes(content)
    with pytest.raises(OffbeatError, match=rf"bad.0.et: not a Chakra execution trace \({said}\)"):
        chakra.read(tmp_path / "bad")


def test_what_is_no_timeline(tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match="no such execution trace"):
        chakra.read(tmp_path / "none")
    node = chakra._field(1, 1) + chakra._field(2, "x") + chakra._field(3, 7)
    (tmp_path / "plan.0.et").write_bytes(chakra._delimited(chakra._field(1, "0.0.4")) + chakra._delimited(node))
    with pytest.raises(OffbeatError, match="the execution trace has no durations"):
        chakra.read(tmp_path / "plan")


def test_damaged_attributes_are_one_sentence(tmp_path: Path) -> None:
    head = chakra._field(1, chakra.VERSION) + chakra._field(2, chakra._attr("tracks", "string", ["compute"]))
    node = chakra._field(1, 1) + chakra._field(10, chakra._attr("kind", "string", "forward"))
    (tmp_path / "job.0.et").write_bytes(chakra._delimited(head) + chakra._delimited(node))
    with pytest.raises(OffbeatError, match=r"job: the execution trace has damaged attributes \('times_ns'\)"):
        chakra.read(tmp_path / "job")
