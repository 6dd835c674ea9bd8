"""`offbeat emulate` ends, whatever it is asked to run."""

import pytest

from offbeat.cli.hosts import run_shown
from offbeat.emulate import Emulation
from offbeat.errors import OffbeatError


@pytest.mark.timeout(60)
def test_a_program_that_does_not_exist_is_an_error_and_no_hang():
    with pytest.raises((OffbeatError, OSError)):
        run_shown(Emulation(2), ["/no/such/program"], 30)
