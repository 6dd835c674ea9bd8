"""A command line → one stage of Offbeat run, and its result printed for people or (`--json`) for programs.

Each command is a short function in one of the modules below. Everything heavy is imported inside the commands, so that
`offbeat --help` starts without torch.
"""

# Importing a module registers its commands; help lists them in this order.
from offbeat.cli import (  # noqa: F401, I001
    catalogue,
    planning,
    frontier,
    profiling,
    report,
    searching,
    emulate,
    launch,
    demo,
    tour,
    doctor,
    tuning,
)
from offbeat.cli.app import app, main

__all__ = ["app", "main"]
