"""Register builders, and find a builder or a strategy file by name."""

import inspect
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError, StrategyError
from offbeat.graph import ModelGraph
from offbeat.strategy.model import Strategy
from offbeat.strategy.validate import check_fits

Builder = Callable[..., Strategy]

_builders: dict[str, Builder] = {}


def register_builder(name: str) -> Callable[[Builder], Builder]:
    """Decorator: makes `build(graph, cluster, **options) -> Strategy` available under `name`."""

    def register(build: Builder) -> Builder:
        known = _builders.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (build.__module__, build.__qualname__):
            raise StrategyError(f"a builder named {name!r} already exists: {known.__module__}.{known.__qualname__}")
        _builders[name] = build
        return build

    return register


def builders() -> tuple[str, ...]:
    """Names of all builders, Offbeat's own and registered ones."""
    return tuple(sorted(_builders))


def build_strategy(name: str, graph: ModelGraph, cluster: ClusterSpec, **options: object) -> Strategy:
    """Builds the strategy of the named builder for this model on this cluster."""
    build = _builders.get(name)
    if build is None:
        raise StrategyError(f"unknown builder {name!r}; known: {', '.join(builders())}")
    accepted = tuple(inspect.signature(build).parameters.values())[2:]
    named = {parameter.name: parameter for parameter in accepted if parameter.kind is not parameter.VAR_KEYWORD}
    unknown = [option for option in options if option not in named]
    if unknown and len(named) == len(accepted):
        raise StrategyError(f"builder {name!r} has no option {unknown[0]!r}; it has {', '.join(named) or 'none'}")
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in options:
            raise StrategyError(f"builder {name!r} needs the option {option!r}")
    with files.problems_named(f"builder {name!r}", StrategyError):
        built = build(graph, cluster, **options)
    if not isinstance(built, Strategy):
        raise StrategyError(f"builder {name!r} returned {type(built).__name__}, not a Strategy")
    made_for = {"model": graph.name, "graph": graph.signature, "cluster": cluster.digest}
    strategy = built.model_copy(update={"name": name, **made_for})
    check_fits(strategy, graph, cluster)
    return strategy


class Recipe(BaseModel):
    """A builder and its options, for a model whose variables are not known yet; a strategy file may hold one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    builder: str
    options: dict[str, Any] = {}

    def build(self, graph: ModelGraph, cluster: ClusterSpec) -> Strategy:
        """The strategy of a model on a cluster."""
        return build_strategy(self.builder, graph, cluster, **self.options)

    def save(self, path: str | PathLike[str]) -> None:
        files.write_atomic(path, orjson.dumps(self.model_dump(), option=orjson.OPT_INDENT_2), "strategy")


def load_strategy(path: str | PathLike[str]) -> Strategy | Recipe:
    """The strategy or recipe in a strategy file."""
    content = files.read_bytes(path, "strategy")
    try:
        raw = files.parse_json(content, str(path), "strategy")
    except OffbeatError:
        raw = None
    if not isinstance(raw, dict) or "builder" not in raw:
        return Strategy.from_json(content, origin=str(path))
    with files.problems_named(f"{path}: not a strategy", StrategyError):
        recipe = Recipe.model_validate(raw)
    if recipe.builder not in _builders:
        raise StrategyError(f"{path}: unknown builder {recipe.builder!r}; known: {', '.join(builders())}")
    return recipe


def find_strategy(named: str | PathLike[str], field: str, **options: Any) -> Strategy | Recipe:
    """The content of a strategy file, or the recipe of a builder's name and options; errors name the field."""
    if named in _builders:
        return Recipe(builder=str(named), options=options)
    if not Path(named).exists():
        known = ", ".join(builders())
        raise StrategyError(f"{field}: {str(named)!r} is neither a builder ({known}) nor a strategy file")
    return load_strategy(named)


def strategy_for(named: str | PathLike[str], graph: ModelGraph, cluster: ClusterSpec, field: str) -> Strategy:
    """The strategy of a file or of a builder's name for this model on this cluster."""
    found = find_strategy(named, field)
    return found.build(graph, cluster) if isinstance(found, Recipe) else found
