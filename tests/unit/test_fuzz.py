"""Hostile files are read or refused in one sentence, quickly; the long runs are `python -m tests.fuzz.run`."""

import json
import sqlite3
import time
import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.profile.measure import Profile
from offbeat.profile.source import load_recording
from offbeat.profile.traces import read_rank, read_traces
from offbeat.search.auto.store import Domain, TrialStore
from offbeat.strategy import Strategy
from offbeat.strategy.validate import check_fits
from offbeat.timeline import Timeline, stream
from tests.fuzz import seeds
from tests.fuzz.run import MOST_SECONDS, fuzz
from tests.fuzz.targets import TARGETS, attempt

INPUTS = 120


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_hostile_inputs_are_refused_in_one_sentence(target: str) -> None:
    result = fuzz(target, 0, INPUTS, seed=1, memory=False)
    assert result["failures"] == {}
    assert result["inputs"] == INPUTS
    assert result["refused"] > 0
    assert result["slowest_seconds"] < MOST_SECONDS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_the_seeds_themselves_are_valid(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every input would be refused for a reason that has nothing to do with its change."""
    monkeypatch.setattr("tests.fuzz.mutate.damage", lambda content, *_: content)
    monkeypatch.setattr("tests.fuzz.mutate.distort", lambda document, *_: document)
    monkeypatch.setattr("tests.fuzz.mutate.noise", lambda *_: b"")
    monkeypatch.setattr("tests.fuzz.targets._changed_cells", lambda base, _: base)
    accepted = 0
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        accepted += attempt(TARGETS[target], Random(number), folder) == ""
    assert accepted >= 6


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
few = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused_or_read(read: Any, *arguments: Any) -> None:
    try:
        read(*arguments)
    except OffbeatError as error:
        sentence = str(error)
        assert sentence
        assert "\n" not in sentence


@few
@given(st.dictionaries(st.sampled_from([*Strategy.model_fields, "other"]), json_values, max_size=5))
def test_any_document_is_a_strategy_or_refused(document: dict[str, Any]) -> None:
    refused_or_read(Strategy.from_json, json.dumps(document))


@few
@given(st.sampled_from(["step", "begin", "forward", "local", "communication", "late", "clock", "plan"]), json_values)
def test_any_line_of_a_recording_is_read_or_refused(tmp_path: Path, field: str, value: Any) -> None:
    lines = [dict(line) for line in seeds.recording()["rank0.jsonl"]]
    lines[5][field] = value
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused_or_read(load_recording, tmp_path)


@few
@given(st.binary(max_size=300))
def test_any_bytes_are_no_file_of_ours_or_one(tmp_path: Path, content: bytes) -> None:
    path, store = tmp_path / "rank0.json", tmp_path / "t.sqlite"
    for place in (path, store):
        place.write_bytes(content)
    refused_or_read(Strategy.load, path)
    refused_or_read(load_recording, path)
    refused_or_read(lambda: TrialStore(store).close())


def write_recording(folder: Path, **changes: Any) -> Path:
    lines = [dict(line) for line in seeds.recording()["rank0.jsonl"]]
    for name, value in changes.items():
        place, _, field = name.partition("_")
        lines[int(place[1:])][field] = value
    path = folder / "rank0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"l0_world": 10**12}, "world: .* got 1000000000000"),
        ({"l0_rank": 2}, "rank 2 is outside the job of 2 ranks"),
        ({"l0_gradients": ["lost.weight"]}, "the gradient 'lost.weight' belongs to no parameter"),
        ({"l0_parameters": [["a", [-1], "float32"]], "l0_gradients": []}, r"parameters\[0\].* got -1"),
        ({"l0_parameters": [["a", [2**39] * 9, "float32"]], "l0_gradients": []}, "is not a tensor's shape"),
        ({"l0_parameters": [["a", [1], "float7"]], "l0_gradients": ["a"]}, "'float7' is not a gradient's dtype"),
        ({"l5_forward": [[7, 0.0, 0.0]]}, "step 2 names a module or a gradient that the job does not have"),
        ({"l5_backward": [[-1, 0.0]]}, r"backward\[0\]\[0\]: .* got -1"),
        ({"l5_local": [["sleep", [], 0.0, 0.0]]}, r"local\[0\]\[0\]: .* got 'sleep'"),
        ({"l5_begin": 1e300}, r"begin: .* got 1e\+300"),
        ({"l5_communication": [[0, "all_reduce", "m0", -5, 2, 0.0, 0.0, 0.0]]}, r"communication\[0\]\[3\]: .* got -5"),
        ({"l6_step": 1}, "step 1 comes after step 2"),
        ({"l2_plan": {"order": []}}, "strategy: it is required but not given"),
        ({"l2_plan": {"strategy": {}, "messages": [[]], "order": [[1, 0]]}}, "order names a message"),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OffbeatError, match=rf"not a trace of Offbeat's recorder: .*{sentence}"):
        read_rank(write_recording(tmp_path, **changes))


def test_a_line_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    path = write_recording(tmp_path)
    path.write_text(path.read_text() + "[1]\n")
    with pytest.raises(OffbeatError, match=r"it must be a mapping, got \[1\]"):
        read_rank(path)


def test_a_recording_of_thousands_of_ranks_names_some_that_are_missing(tmp_path: Path) -> None:
    write_recording(tmp_path, l0_world=16_000)
    _, notes = read_traces(tmp_path)
    assert notes[0].endswith(
        "ranks without a readable trace, of 16000: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, …"
    )


@pytest.mark.parametrize(
    "digest", ["../../..", "/../../x", "..", "a/b/c/d/", "\0\0\0\0\0\0\0\0"], ids=["up", "root", "dots", "down", "null"]
)
def test_a_domain_never_leaves_its_folder(tmp_path: Path, digest: str) -> None:
    for domain in (
        Domain(digest, "b", "m", "c", 1),
        Domain("a", digest, "m", "c", 1),
        Domain("a", "b", digest, "c", 1),
    ):
        assert Path(domain.name).name == domain.name
        assert domain.name not in ("", ".", "..")
        (tmp_path / domain.name).mkdir(exist_ok=True)


def changed_store(folder: Path, *statements: str, values: tuple[Any, ...] = ()) -> Path:
    path = folder / "t.sqlite"
    path.write_bytes(seeds.store())
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement, values)
    connection.commit()
    connection.close()
    return path


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW v AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c",
        "CREATE TRIGGER v AFTER INSERT ON trials BEGIN DELETE FROM trials; END",
        "CREATE TABLE v (x)",
    ],
    ids=["view", "trigger", "table"],
)
def test_a_store_with_anything_else_in_it_is_refused(tmp_path: Path, statement: str) -> None:
    path = changed_store(tmp_path, statement)
    with pytest.raises(OffbeatError, match=r"t.sqlite: not a trial store: it contains the unknown \w+ 'v'"):
        TrialStore(path)


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("strategy", b"\x00\x01", "is not a text"),
        ("steps", "[1", "not valid JSON"),
        ("steps", "{}", "not a trial: steps: it must be a list"),
        ("steps", '["a"]', r"not a trial: steps\[0\]: "),
        ("seconds", "soon", "not a trial: seconds: "),
        ("seconds", float("inf"), "not a trial: seconds: .* finite"),
        ("status", "lost", "not a trial: status: .* got 'lost'"),
        ("created", b"x", "not a trial"),
    ],
)
def test_a_store_with_wrong_cells_is_refused(tmp_path: Path, column: str, value: Any, sentence: str) -> None:
    path = changed_store(tmp_path, f"UPDATE trials SET {column} = ? WHERE id = 1", values=(value,))
    with TrialStore(path) as store, pytest.raises(OffbeatError, match=rf"t.sqlite: .*{sentence}"):
        store.trials()


def test_a_graph_that_unpacks_to_a_huge_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = zlib.compress(b" " * 10_000_000)
    path = changed_store(tmp_path, "UPDATE domains SET graph = ?", values=(packed,))
    monkeypatch.setattr(files, "MAX_BYTES", 1_000_000)
    with TrialStore(path) as store, pytest.raises(OffbeatError, match="unpacks to 1000000 bytes or more"):
        store.load_domain(store.domains()[0])
    damaged = changed_store(tmp_path, "UPDATE domains SET graph = ?", values=(b"x" + packed,))
    with TrialStore(damaged) as store, pytest.raises(OffbeatError, match="a model graph in it is damaged"):
        store.load_domain(store.domains()[0])


def test_a_field_with_odd_characters_is_named_on_one_line() -> None:
    with pytest.raises(OffbeatError) as caught:
        Strategy.from_json('{"a\\nb": 1}')
    assert str(caught.value) == "strategy: not a strategy: 'a\\nb': no such field, got 1"


def test_millions_of_values_are_refused_before_they_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_VALUES", 1000)
    many = "[" + "[]," * 1200 + "[]]"
    for read in (Strategy.from_json, lambda text: files.parse_json(text, "a.json", "plan")):
        for content in (many, many.encode()):
            with pytest.raises(OffbeatError, match="it has more than 1000 values"):
                read(content)


def test_a_long_value_is_scanned_a_few_times_however_the_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anew for every piece that is read it would take a hundred times as long as in one piece."""
    path = tmp_path / "rank0.json"
    path.write_bytes(b'{"x": [' + b"[]," * 130_000 + b'[]], "traceEvents": []}')

    def seconds(chunk: int) -> float:
        monkeypatch.setattr(stream, "_CHUNK", chunk)
        began = time.process_time()
        with pytest.raises(OffbeatError, match="no event has a start"):
            load_recording(path)
        return time.process_time() - began

    assert seconds(4096) < 20 * seconds(2**20)


@pytest.mark.parametrize(
    ("kind", "place", "args"),
    [
        ("cuda", "kernel", {"External id": [1], "In msg nelems": 2**61}),
        ("cuda", "record_param_comms", {"External id": {"a": 1}}),
        ("gloo", "c10d::send", {"Concrete Inputs": ["", "", "²"], "Input Dims": [[[5]]]}),
        ("gloo", "c10d::send", {"Concrete Inputs": ["", "", "9" * 5000], "Input Dims": [[[5]]]}),
        ("gloo", "gloo:all_reduce", {"Input Dims": [[[2**61] * 40, [2**61]]], "Input type": [["x"]]}),
        ("gloo", "gloo:all_reduce", {"Input Dims": [[-1, 2**61]]}),
    ],
)
def test_odd_arguments_of_a_profiler_event_are_harmless(tmp_path: Path, kind: str, place: str, args: Any) -> None:
    document = json.loads(json.dumps(seeds.profiler_traces()[f"{kind}/rank0.json"]))
    for event in document["traceEvents"]:
        if place in (event.get("cat"), event["name"]):
            event["args"] |= args
    (tmp_path / "rank0.json").write_text(json.dumps(document))
    found = load_recording(tmp_path)
    assert isinstance(found, Timeline)
    assert (found.bytes >= 0).all()


def test_an_origin_beyond_all_numbers_is_ignored(tmp_path: Path) -> None:
    document = seeds.profiler_traces()["gloo/rank0.json"] | {"baseTimeNanoseconds": 10**400, "distributedInfo": [1]}
    (tmp_path / "rank0.json").write_text(json.dumps(document))
    found = load_recording(tmp_path)
    assert isinstance(found, Timeline)
    assert found.iteration_time == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("value", [10**400, -1.0, "soon", None, [1]])
def test_a_calibration_with_odd_numbers_is_refused(tmp_path: Path, value: Any) -> None:
    for name in ("rank0.jsonl", "rank1.jsonl", "calibration.json"):
        documents = json.loads(json.dumps(seeds.recording()[name]))
        if name == "calibration.json":
            documents[0]["costs"]["collectives"][0]["overhead_seconds"] = value
        (tmp_path / name).write_text("".join(json.dumps(document) + "\n" for document in documents))
    with pytest.raises(OffbeatError, match=r"calibration.json: not a costs file: collectives\[0\].overhead_seconds: "):
        load_recording(tmp_path)


def test_a_calibration_of_nothing_but_zeros_is_used(tmp_path: Path) -> None:
    for name in ("rank0.jsonl", "rank1.jsonl", "calibration.json"):
        documents = json.loads(json.dumps(seeds.recording()[name]))
        if name == "calibration.json":
            documents[0]["costs"]["collectives"][0] |= {
                "overhead_seconds": 0,
                "latency_seconds": 0,
                "seconds_per_byte": 0,
            }
        (tmp_path / name).write_text("".join(json.dumps(document) + "\n" for document in documents))
    found = load_recording(tmp_path)
    assert isinstance(found, Profile)
    assert found.costs.collectives["all_reduce", 2].seconds_per_byte == 0


def test_a_refusal_stays_short_however_much_it_quotes() -> None:
    ranks = list(range(5000))
    with pytest.raises(OffbeatError) as caught:
        Strategy.from_json(json.dumps({"replicas": [*ranks, 0]}))
    assert len(str(caught.value)) < 300
    with pytest.raises(OffbeatError) as caught:
        Strategy.from_json(json.dumps({"format": ranks}))
    assert len(str(caught.value)) < 300
    unknown = Strategy.from_json(json.dumps({"variables": {"x" * 5000: {}}}))
    with pytest.raises(OffbeatError, match="has no trainable variable 'xxx") as caught:
        check_fits(unknown, seeds.graph(), seeds.cluster())
    assert len(str(caught.value)) < 300


def test_a_graph_with_numbers_beyond_64_bits_is_refused() -> None:
    document = json.loads(seeds.graph().to_json())
    document["operators"][0]["flops"] = 2**70
    with pytest.raises(OffbeatError, match="graph: not a model graph: Integer exceeds 64-bit range"):
        ModelGraph.from_json(json.dumps(document))
    document["operators"][0]["flops"] = 1
    document["variables"][0]["dtype"] = "x" * 5000
    with pytest.raises(OffbeatError, match="unknown dtype") as caught:
        ModelGraph.from_json(json.dumps(document))
    assert len(str(caught.value)) < 300
