"""Hosts + bandwidth → a cluster on one machine: network namespaces, shaped links, paced compute."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.emulate.command import emulate_command
    from offbeat.emulate.control import Worker
    from offbeat.emulate.emulation import Emulation, Host
    from offbeat.emulate.launch import RankError, Result
    from offbeat.emulate.paced import DeviceClock, PacedLayer, PacedModel

__all__ = [
    "DeviceClock",
    "Emulation",
    "Host",
    "PacedLayer",
    "PacedModel",
    "RankError",
    "Result",
    "Worker",
    "emulate_command",
]

_MODULES = {
    "DeviceClock": "paced",
    "Emulation": "emulation",
    "Host": "emulation",
    "PacedLayer": "paced",
    "PacedModel": "paced",
    "RankError": "launch",
    "Result": "launch",
    "Worker": "control",
    "emulate_command": "command",
}


def __getattr__(name: str) -> Any:
    # The keeper and the ranks of run_function start from here many times and must not load torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"offbeat.emulate.{_MODULES[name]}"), name)
