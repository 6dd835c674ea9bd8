"""`offbeat emulate` ends, whatever it is asked to run."""

import pytest

from offbeat.emulate import emulate_command
from offbeat.errors import OffbeatError


@pytest.mark.timeout(60)
def test_a_program_that_does_not_exist_is_an_error_and_no_hang():
    with pytest.raises((OffbeatError, OSError)):
        emulate_command(2, "1Gbit/s", 1, ["/no/such/program"], 30)
