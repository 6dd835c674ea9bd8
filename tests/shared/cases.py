"""Many cases of one fact → a few for `make test`, the others for `make test-slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test; cases that are not in `quick` are slow ones. A case with several arguments is a tuple."""
    cases = list(cases)
    unknown = set(quick) - set(cases)
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
