"""Files are read whole or refused with one sentence, and written whole or not at all."""

import json
import os
import resource
import tempfile
import time

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from offbeat import files
from offbeat.errors import OffbeatError


def refused(call, *arguments):
    with pytest.raises(OffbeatError) as caught:
        call(*arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_write_then_read(tmp_path):
    path = tmp_path / "a.json"
    files.write_atomic(path, b'{"a": [1, 2.5]}', "plan")
    assert files.read_json(path, "plan") == {"a": [1, 2.5]}
    files.write_atomic(path, b"3", "plan")
    assert files.read_json(path, "plan") == 3
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_long_name_can_be_written(tmp_path):
    path = tmp_path / ("n" * 255)
    files.write_atomic(path, b"1", "plan")
    assert path.read_bytes() == b"1"


def test_the_umask_decides_who_may_read(tmp_path):
    old = os.umask(0o077)
    try:
        files.write_atomic(tmp_path / "secret", b"1", "plan")
    finally:
        os.umask(old)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_writing_into_a_missing_directory(tmp_path):
    path = tmp_path / "missing" / "a.json"
    assert (
        refused(files.write_atomic, path, b"1", "plan") == f"{path}: cannot write the plan: No such file or directory"
    )
    assert os.listdir(tmp_path) == []


def test_writing_over_a_directory_leaves_nothing_behind(tmp_path):
    (tmp_path / "a").mkdir()
    assert "cannot write the plan" in refused(files.write_atomic, tmp_path / "a", b"1", "plan")
    assert os.listdir(tmp_path) == ["a"]


def test_writing_into_a_read_only_directory():
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o555)
        try:
            if user == 0:
                os.seteuid(65534)
            path = f"{directory}/a"
            assert (
                refused(files.write_atomic, path, b"1", "plan") == f"{path}: cannot write the plan: Permission denied"
            )
        finally:
            os.seteuid(user)
            os.chmod(directory, 0o755)
        assert os.listdir(directory) == []


def test_a_full_disk_keeps_the_old_file_and_nothing_else(tmp_path):
    """The file-size limit makes the kernel refuse in mid-write, as a full disk does."""
    path = write(tmp_path / "a", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        sentence = refused(files.write_atomic, path, b"x" * 100_000, "plan")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sentence == f"{path}: cannot write the plan: File too large"
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_an_interrupt_in_mid_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(tmp_path / "a", b"1", "plan")
    assert os.listdir(tmp_path) == []


def test_unreadable_files(tmp_path):
    missing = tmp_path / "none"
    assert refused(files.read_bytes, missing, "plan") == f"{missing}: cannot read the plan: No such file or directory"
    assert refused(files.read_bytes, tmp_path, "plan") == f"{tmp_path}: cannot read the plan: Is a directory"
    assert refused(files.read_bytes, "a\0b", "plan") == r"'a\x00b': cannot read the plan: embedded null byte"
    assert "embedded null byte" in refused(files.write_atomic, "a\0b", b"", "plan")


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    path = write(tmp_path / "a", b"1" * 1001)
    assert refused(files.read_bytes, path, "plan") == f"{path}: larger than 1000 bytes, the limit for a plan file"
    assert files.read_bytes(write(tmp_path / "b", b"1" * 1000), "plan") == b"1" * 1000
    assert "larger than 1000 bytes" in refused(files.read_bytes, "/dev/zero", "plan")


def test_a_large_sparse_file_is_refused_quickly(tmp_path):
    path = tmp_path / "huge.yaml"
    with open(path, "wb") as stream:
        stream.truncate(files.MAX_YAML_BYTES + 1)
    started = time.perf_counter()
    assert refused(files.parse_yaml, files.read_bytes(path, "cluster"), str(path), "cluster").endswith(
        "bytes, the limit for a cluster in YAML"
    )
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    "text",
    ['{"a": [1, 2', '{"a"', "", "{'a': 1}", "[" * 200_000, '{"a":' * 200_000, b"\xff\xfe\xff", "1" * 5000],
    ids=["list", "key", "empty", "quotes", "deep list", "deep map", "not utf-8", "long integer"],
)
def test_bad_json(tmp_path, text):
    path = write(tmp_path / "a.json", text)
    assert refused(files.read_json, path, "plan").startswith(f"{path}: not a plan: it is not valid JSON (")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_json_numbers_are_finite(tmp_path, number):
    path = write(tmp_path / "a.json", f'{{"a": {number}}}')
    sentence = refused(files.read_json, path, "plan")
    assert sentence.startswith(f"{path}: not valid JSON: the number {number} is ")


def test_every_cut_of_a_json_file_is_refused():
    whole = json.dumps({"nodes": [{"a": 1.5, "b": "text"}], "c": None})
    for end in range(len(whole)):
        refused(files.parse_json, whole[:end], "cut.json", "plan")


def test_yaml_alias_bomb():
    text = "\n".join(["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)])
    started = time.perf_counter()
    assert refused(files.parse_yaml, text, "a.yaml", "cluster") == "a.yaml: YAML aliases are not allowed in a cluster"
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "- " * 5000], ids=["list", "map", "block"])
def test_yaml_nested_deeply(text):
    assert "nested deeper than 100 levels" in refused(files.parse_yaml, text, "a.yaml", "cluster")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", "it is not valid YAML"),
        ("a: 1\n b: 2", "it is not valid YAML"),
        ("a: 1\na: 2", "the key 'a' is given twice in line 2"),
        ("a: 2020-13-45", "it is not valid YAML"),
        ("--- 1\n--- 2", "it is not valid YAML"),
        (b"a: \xff", "it is not valid YAML"),
        ("a: !!int x", "the YAML tag 'tag:yaml.org,2002:int' is not allowed"),
        ("a: !!timestamp x", "is not allowed"),
        ("!!python/object/apply:os.system [ls]", "is not allowed"),
        ("? [a]\n: 1", "it is not valid YAML"),
    ],
)
def test_bad_yaml(text, reason):
    sentence = refused(files.parse_yaml, text, "a.yaml", "cluster")
    assert sentence.startswith("a.yaml: ")
    assert reason in sentence


def test_good_yaml():
    assert files.parse_yaml(b"\xef\xbb\xbfa: [1, {b: 2.5}]\n", "a.yaml", "cluster") == {"a": [1, {"b": 2.5}]}


def test_digest_depends_on_values_only():
    assert files.digest({"a": 1, "b": [2.5]}) == files.digest({"b": [2.5], "a": 1})
    assert files.digest({"a": 1}) != files.digest({"a": 2})
    assert len(files.digest(None)) == 16


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = Field(ge=1)

    @field_validator("size")
    @classmethod
    def _odd(cls, size):
        if size % 2 == 0:
            raise OffbeatError(f"{size} is even")
        return size


class Outer(BaseModel):
    items: tuple[Inner, ...] = Field(min_length=1)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"items": [{"size": 1}, {"size": 0}]}, "items[1].size: input should be greater than or equal to 1, got 0"),
        ({"items": [{"size": 2}]}, "items[0].size: 2 is even"),
        ({"items": [{}]}, "items[0].size: it is required but not given"),
        ({"items": [{"size": 1, "Size": "T4"}]}, "items[0].Size: no such field, got 'T4'"),
        ({"items": []}, "items: it has too few items, got []"),
        ({"items": 3}, "items: it must be a list, got 3"),
        ({"items": [3]}, "items[0]: it must be a mapping, got 3"),
        (
            {"items": [{"size": 0}, {"size": 2}]},
            "items[0].size: input should be greater than or equal to 1, got 0 (and 1 more)",
        ),
        ({"items": "x" * 200}, "items: it must be a list, got '" + "x" * 76 + "..."),
    ],
)
def test_first_problem(value, sentence):
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(value)
    assert files.first_problem(caught.value) == sentence
