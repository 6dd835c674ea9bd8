"""Strategy builders: one module per known system, whose `build` is registered under the module's name."""

from importlib import import_module
from pkgutil import iter_modules

from offbeat.strategy.registry import register_builder

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        register_builder(_module.name)(import_module(f"{__name__}.{_module.name}").build)
