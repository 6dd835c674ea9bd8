"""The command line: each command runs one stage and prints its result as text or, with `--json`, as JSON.

Each command is a short function in one of the modules below. Everything heavy is imported inside the commands, so that
`offbeat --help` starts without torch.
"""

# Importing a module registers its commands.
from offbeat.cli import demo, doctor, frontier, hosts, planning, profiling, report, searching, tuning  # noqa: F401
from offbeat.cli.app import app, group_commands, main

__all__ = ["app", "main"]

group_commands(
    {
        "Start here": ("tour", "demo", "doctor"),
        "Make a job faster": ("profile", "report", "view", "replay", "optimize", "run", "tune", "trials"),
        "Plan without a job": ("models", "clusters", "builders", "plan", "explain", "frontier", "calibrate"),
        "Run a script on several hosts": ("emulate", "launch"),
    }
)
