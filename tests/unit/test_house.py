"""Limits that keep the package readable."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "offbeat"
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
MOST_CLASS_LINES = 320


def classes(source: str) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def long_classes(source: str) -> list[str]:
    lines = {one.name: (one.end_lineno or 0) - one.lineno + 1 for one in classes(source)}
    return [f"{name} has {count} lines" for name, count in lines.items() if count > MOST_CLASS_LINES]


def class_questions(source: str, names: set[str]) -> list[str]:
    """Calls of isinstance and issubclass that name one of these classes."""
    return [
        ast.unparse(call)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("isinstance", "issubclass")
        if names & {part.id for part in ast.walk(call.args[1]) if isinstance(part, ast.Name)}
        | names & {part.attr for part in ast.walk(call.args[1]) if isinstance(part, ast.Attribute)}
    ]


def synchronisers() -> set[str]:
    """The class that a message is synchronised by, and all that inherit from it."""
    every = [one for path, source in SOURCES.items() if path.parent.name == "sync" for one in classes(source)]
    found = {"Synchroniser"}
    while more := {one.name for one in every if found & {ast.unparse(base) for base in one.bases}} - found:
        found |= more
    return found


def test_no_class_is_longer_than_one_can_read() -> None:
    assert {path.name: found for path, source in SOURCES.items() if (found := long_classes(source))} == {}


def test_nobody_asks_a_synchroniser_for_its_class() -> None:
    names = synchronisers()
    assert names > {"Synchroniser", "ServerSynchroniser", "SparseGather", "StaleAllReduce"}
    assert {path.name: found for path, source in SOURCES.items() if (found := class_questions(source, names))} == {}


def test_every_attribute_is_known_to_the_type_checker() -> None:
    assert [path.name for path, source in SOURCES.items() if "ignore[attr-defined" in source] == []


@pytest.mark.parametrize("question", ["isinstance(a, Synchroniser)", "issubclass(type(a), x.Synchroniser | int)"])
def test_the_limits_can_be_exceeded(question: str) -> None:
    assert class_questions(question, {"Synchroniser"}) == [question]
    assert long_classes("class A:\n" + "    a = 1\n" * MOST_CLASS_LINES) == ["A has 321 lines"]
