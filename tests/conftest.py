"""Fixtures shared by all tests."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import settings

from offbeat.emulate import Emulation

# Before torch is loaded. Several tests run at once, many with a thread for each rank; threads of OpenMP on top of these
# would spend more time waiting for each other than computing.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests neither learn from what this machine's user has run nor add to it; neither do the jobs they start.
os.environ["OFFBEAT_HISTORY"] = os.devnull
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell that starts a job in the background makes it, and all that it starts, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a change breaks the tests, not the day.
settings.register_profile("offbeat", derandomize=True, deadline=None)
settings.load_profile("offbeat")


@pytest.fixture
def emulated_cluster() -> Iterator[Callable[..., Emulation]]:
    """A factory with the arguments of Emulation; its clusters end with the test, which skips where none can be made."""
    with ExitStack() as stack:

        def make(hosts: Any, bandwidth: Any = "1Gbit/s", **options: Any) -> Emulation:
            with warnings.catch_warnings(record=True) as refusals:
                warnings.simplefilter("always")
                emulation = stack.enter_context(Emulation(hosts, bandwidth, **options))
            if emulation.kind == "loopback":
                pytest.skip(f"no emulated network here: {refusals[0].message}")
            return emulation

        yield make
