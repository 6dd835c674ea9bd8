"""Pools of ranks that all distributed tests share."""

from collections.abc import Generator

import pytest
from harness import Pools


@pytest.fixture(scope="session")
def pools() -> Generator[Pools, None, None]:
    started = Pools()
    yield started
    started.close()
