"""Strategies: their data model, builders and validation."""

# First, because importing the package binds its name here, and the function of that name must win.
import offbeat.strategy.builders  # noqa: F401 - registers the builders
from offbeat.strategy.describe import describe
from offbeat.strategy.model import Encoder, FullyShard, OperatorConfig, Schedule, Shard, Slice, Strategy, VariableConfig
from offbeat.strategy.registry import (
    Recipe,
    build_strategy,
    builders,
    find_strategy,
    load_strategy,
    register_builder,
    strategy_for,
)
from offbeat.strategy.validate import check_fits, transfer

__all__ = [
    "Encoder",
    "FullyShard",
    "OperatorConfig",
    "Recipe",
    "Schedule",
    "Shard",
    "Slice",
    "Strategy",
    "VariableConfig",
    "build_strategy",
    "builders",
    "check_fits",
    "describe",
    "find_strategy",
    "load_strategy",
    "register_builder",
    "strategy_for",
    "transfer",
]
