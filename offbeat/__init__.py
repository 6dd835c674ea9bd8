"""Offbeat makes distributed PyTorch training as fast as its cluster allows.

Names are imported when they are first used, so that `import offbeat` and the command line start without torch.
Functions refuse arguments of wrong types in one sentence (`offbeat.arguments`).
"""

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # What type checkers see, from the modules that define it; at run time the table below finds names.
    from offbeat import emulate, zoo
    from offbeat.api import distribute, optimize
    from offbeat.cluster import ClusterSpec
    from offbeat.errors import OffbeatError
    from offbeat.graph.capture import capture
    from offbeat.graph.model import ModelGraph
    from offbeat.integrations.ddp import ddp_kwargs
    from offbeat.monitor import Monitor
    from offbeat.plan.lower import lower
    from offbeat.plan.model import Plan
    from offbeat.profile.recorder import Recorder
    from offbeat.search.auto.session import tune
    from offbeat.search.frontier.find import find_frontier
    from offbeat.simulate.predict import simulate
    from offbeat.strategy.model import Strategy
    from offbeat.strategy.registry import build_strategy, builders, register_builder
    from offbeat.strategy.validate import transfer
    from offbeat.timeline import Timeline

__version__ = "0.1.0"

_NAMES = {
    "offbeat.graph": ("ModelGraph", "capture"),
    "offbeat.cluster": ("ClusterSpec",),
    "offbeat.strategy": ("Strategy", "build_strategy", "builders", "register_builder", "transfer"),
    "offbeat.plan": ("Plan", "lower"),
    "offbeat.timeline": ("Timeline",),
    "offbeat.profile.recorder": ("Recorder",),
    "offbeat.search.auto.session": ("tune",),
    "offbeat.search.frontier.find": ("find_frontier",),
    "offbeat.api": ("distribute", "optimize"),
    "offbeat.integrations.ddp": ("ddp_kwargs",),
    "offbeat.monitor": ("Monitor",),
    "offbeat.errors": ("OffbeatError",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = ("zoo", "simulate", "emulate")

__all__ = [
    "ClusterSpec",
    "ModelGraph",
    "Monitor",
    "OffbeatError",
    "Plan",
    "Recorder",
    "Strategy",
    "Timeline",
    "build_strategy",
    "builders",
    "capture",
    "ddp_kwargs",
    "distribute",
    "emulate",
    "find_frontier",
    "lower",
    "optimize",
    "register_builder",
    "simulate",
    "transfer",
    "tune",
    "zoo",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            found = getattr(import_module(_HOME[name]), name)
            if isinstance(found, FunctionType):
                from offbeat.arguments import checked

                found = checked(found)
            # The next use finds it without asking.
            globals()[name] = found
            return found
        if name in _PACKAGES:
            return import_module(f"offbeat.{name}")
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
