"""A builder's name → its function; a function → a registered builder."""

import inspect
from collections.abc import Callable
from os import PathLike
from pathlib import Path

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
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
            raise StrategyError(f"a builder named {name!r} exists already: {known.__module__}.{known.__qualname__}")
        _builders[name] = build
        return build

    return register


def builders() -> tuple[str, ...]:
    """Names of all builders, Offbeat's own and registered ones."""
    return tuple(sorted(_builders))


def saved_strategy(named: str | PathLike[str], field: str) -> Strategy | None:
    """The strategy in a file, or None for a builder's name; anything else is refused by the name of the field."""
    if named in _builders:
        return None
    if not Path(named).exists():
        known = ", ".join(builders())
        raise StrategyError(f"{field}: {str(named)!r} is neither a builder ({known}) nor a strategy file")
    return Strategy.load(named)


def build_strategy(name: str, graph: ModelGraph, cluster: ClusterSpec, **options: object) -> Strategy:
    """The strategy the named builder makes for this model on this cluster."""
    build = _builders.get(name)
    if build is None:
        raise StrategyError(f"there is no builder {name!r}; there are {', '.join(builders())}")
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
