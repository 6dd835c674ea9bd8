"""A command line → one stage of Offbeat run, and its result printed for people or (`--json`) for programs.

Each command is a short function in one of the modules below. Everything heavy is imported inside the commands, so that
`offbeat --help` starts without torch.
"""

from offbeat.cli import catalogue, frontier, planning, profiling, reporting, searching, trying, tuning, viewing
from offbeat.cli.app import app, main

__all__ = [
    "app",
    "catalogue",
    "frontier",
    "main",
    "planning",
    "profiling",
    "reporting",
    "searching",
    "trying",
    "tuning",
    "viewing",
]
