"""Torch's private parts are all there, and one that is missing is named in a sentence."""

import re
from pathlib import Path

import pytest

import offbeat
from offbeat import torch_private
from offbeat.errors import OffbeatError

_PRIVATE = re.compile(r"\btorch\._(?!foreach|_)|\btorch(\.\w+)*\._\w+ import|_execution_engine|\._cdata|import _pytree")


@pytest.mark.parametrize("name", torch_private._REEXPORTED)
def test_every_reexported_name_exists(name: str) -> None:
    assert getattr(torch_private, name) is not None


def test_a_missing_part_of_torch_is_named_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private._REEXPORTED, "lost", ("torch._C:_gone", "does nothing"))
    with pytest.raises(OffbeatError, match=r"has no torch\._C\._gone, with which Offbeat does nothing"):
        _ = torch_private.lost


def test_no_other_module_reaches_into_torch() -> None:
    root = Path(offbeat.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        if path.name not in ("torch_private.py", "kineto.py")  # kineto.py tells users a command
        for line in path.read_text(encoding="utf-8").splitlines()
        if _PRIVATE.search(line)
    ]
    assert not found
