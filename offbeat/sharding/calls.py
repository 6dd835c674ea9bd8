"""An operator call, and the axes along which it divides into independent calls.

An axis names, for every tensor argument and every result, the tensor axis that is split along with it. An argument
without that axis is given whole to every part; a result without it is a sum over the parts, or the same for all. This
is enough to run an operator split in any way: its backward splits in the same way, and the gradient of an argument
given whole is the sum of what the parts contribute. The rules themselves are in `rules`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offbeat.graph import kinds
from offbeat.sharding.layout import WHOLE
from offbeat.torch_private import schema_of

ONCE = -3
"""An argument that only one of the parts may add: the bias of a product whose terms are summed."""


@dataclass(frozen=True)
class Axis:
    """One way to split a call."""

    inputs: tuple[int, ...]
    """For each tensor argument the axis that is split, WHOLE or ONCE."""
    outputs: tuple[int, ...]
    """For each result the axis that is split, SUM or WHOLE."""
    length: int
    even: tuple[int, ...] = ()
    """Lengths that the number of parts must divide; () where any number of parts will do."""
    statistics: int = 0
    """Numbers that the parts must average among themselves, in forward and in backward."""


@dataclass(frozen=True)
class Call:
    """An operator with its arguments, of which only shapes are read."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Tensor, ...]
    """Tensors among the arguments, in order, repeated ones as often as they are given."""
    outputs: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        return kinds.base_name(self.target)

    def argument(self, name: str, default: Any = None) -> Any:
        """The value of the argument that the operator's schema calls `name`."""
        arguments = schema_of(self.target).arguments
        values = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        values |= zip((argument.name for argument in arguments), self.args, strict=False)
        return (values | self.kwargs).get(name, default)


Rule = Callable[[Call], list[Axis]]
RULES: dict[str, Rule] = {}
"""Rule of each operator by its base name; pointwise operators need no entry."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operators of these base names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def aligned(shape: Sequence[int], axis: int, rank: int) -> int:
    """The axis of a tensor that broadcasting aligns with `axis` of a result of that rank."""
    own = axis - (rank - len(shape))
    return own if own >= 0 and shape[own] != 1 else WHOLE
