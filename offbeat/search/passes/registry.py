"""A pass: candidate → strategies worth replaying; and the open, ordered list of them (dPRO's Graph Pass Registry)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from offbeat.errors import OffbeatError
from offbeat.search.passes.problem import Candidate, Problem
from offbeat.strategy import Strategy

Propose = Callable[[Candidate, Problem], Iterable[Strategy]]
Aim = Literal["speed", "memory"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One optimisation technique. It proposes; what is kept is decided by replay."""

    name: str
    propose: Propose
    aim: Aim
    order: int
    """Passes of one aim run from low to high."""
    default: bool
    """Whether it runs when no passes are named."""


_passes: dict[str, Pass] = {}


def register_pass(
    name: str, *, aim: Aim = "speed", order: int = 100, default: bool = True
) -> Callable[[Propose], Propose]:
    """Decorator: makes `propose(candidate, problem) -> strategies` a pass of every later `optimize`.

    A pass with the aim "memory" runs when a memory limit is exceeded; the others until none of them shortens the step.
    """

    def register(propose: Propose) -> Propose:
        known = _passes.get(name)
        if known is not None and (known.propose.__module__, known.propose.__qualname__) != (
            propose.__module__,
            propose.__qualname__,
        ):
            raise OffbeatError(f"a pass named {name!r} exists already: {known.propose.__module__}")
        if aim not in ("speed", "memory"):
            raise OffbeatError(f"aim: {aim!r} is neither 'speed' nor 'memory'")
        _passes[name] = Pass(name, propose, aim, order, default)
        return propose

    return register


def unregister_pass(name: str) -> None:
    """Takes a pass out of the list."""
    _known(name)
    del _passes[name]


def pass_names() -> tuple[str, ...]:
    """Names of all passes, in the order in which they run."""
    return tuple(each.name for each in _ordered(_passes.values()))


def select_passes(names: Sequence[str] | None) -> tuple[Pass, ...]:
    """The named passes (None: those that run by default), in the order in which they run."""
    if names is None:
        return _ordered(each for each in _passes.values() if each.default)
    if isinstance(names, str):
        raise OffbeatError(f"passes: {names!r} must be a list of names")
    return _ordered({name: _known(name) for name in names}.values())


def _known(name: str) -> Pass:
    if name not in _passes:
        raise OffbeatError(f"passes: there is no pass {name!r}; there are {', '.join(pass_names())}")
    return _passes[name]


def _ordered(chosen: Iterable[Pass]) -> tuple[Pass, ...]:
    return tuple(sorted(chosen, key=lambda each: (each.aim != "memory", each.order, each.name)))
