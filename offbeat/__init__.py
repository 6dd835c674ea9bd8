"""Offbeat makes distributed PyTorch training as fast as its cluster allows.

Names are imported when they are first used, so that `import offbeat` and the command line start without torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "capture": "offbeat.graph",
    "ModelGraph": "offbeat.graph",
    "ClusterSpec": "offbeat.cluster",
    "Strategy": "offbeat.strategy",
    "build_strategy": "offbeat.strategy",
    "builders": "offbeat.strategy",
    "register_builder": "offbeat.strategy",
    "transfer": "offbeat.strategy",
    "Plan": "offbeat.plan",
    "lower": "offbeat.plan",
    "Timeline": "offbeat.timeline",
    "Recorder": "offbeat.profile.recorder",
    "optimize": "offbeat.search.optimize",
    "tune": "offbeat.search.auto.session",
    "find_frontier": "offbeat.search.frontier.find",
    "distribute": "offbeat.api",
    "ddp_kwargs": "offbeat.integrations.ddp",
    "Monitor": "offbeat.monitor",
    "OffbeatError": "offbeat.errors",
}
_PACKAGES = ("zoo", "simulate", "emulate")

__all__ = [  # noqa: PLE0604 - the table above is the one place that lists the names
    *sorted((*_HOME, *_PACKAGES)),
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _PACKAGES:
        return import_module(f"offbeat.{name}")
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
