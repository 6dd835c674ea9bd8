"""Make public functions reject arguments whose type differs from their annotation.

Functions check themselves what annotations cannot say: ranges, shapes, arguments that exclude each other.
"""

import inspect
import numbers
from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from offbeat.errors import OffbeatError
from offbeat.units import quote

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_NUMBERS = {int: numbers.Integral, float: numbers.Real}
"""Types that count as numbers: numpy's too, but neither True nor False."""
_WORDS = {
    "Module": "torch.nn.Module",
    "Optimizer": "torch.optim.Optimizer",
    "NoneType": "None",
    "PathLike": "path",
    "str": "text",
    "int": "whole number",
    "float": "number",
    "type": "class",
    "Callable": "function",
    "Sequence": "sequence",
}


def checked(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Checks the types of the arguments whenever the function is called."""

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        signature, hints = _interface(function)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            # Python's own error says which argument is missing or unknown.
            return function(*args, **kwargs)
        for name, value in given.items():
            kinds = _kinds(hints.get(name, Any))
            if not any(_fits(value, kind) for kind in kinds):
                called = function.__qualname__.removesuffix(".__init__")
                words = list(dict.fromkeys(word for kind in kinds for word in _words(kind)))
                wanted = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
                raise OffbeatError(f"{called}: {name} must be {wanted}, got {_shown(value)}")
        return function(*args, **kwargs)

    return call


@cache
def _interface(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """The signature, and the types of all parameters but *args and **kwargs."""
    signature = inspect.signature(function)
    try:
        hints = get_type_hints(function)
    except NameError:
        # Modules that start without torch name its types for type checkers only.
        import torch

        hints = get_type_hints(function, localns={"torch": torch})
    single = (p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return signature, {parameter.name: hints[parameter.name] for parameter in single if parameter.name in hints}


def _kinds(hint: Any) -> list[Any]:
    """The types that a union allows, or the one type; of a type variable, those of its bound."""
    if isinstance(hint, TypeVar):
        return _kinds(hint.__bound__)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return [kind for one in get_args(hint) for kind in _kinds(one)]
    return _kinds(get_args(hint)[0]) if origin is Annotated else [hint]


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has a type; items of containers are not checked."""
    kind = get_origin(hint) or hint
    if kind is Literal:
        return value in get_args(hint)
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    if kind in (tuple, Sequence):
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    # isinstance() does not take typing's own kinds, such as Any, TextIO and protocols.
    if not isinstance(kind, type) or kind.__module__ == "typing" or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _words(hint: Any) -> list[str]:
    """A type in words; several for a literal."""
    origin = get_origin(hint)
    if origin is Literal:
        return [repr(value) for value in get_args(hint)]
    name = getattr(origin or hint, "__name__", str(hint))
    word = _WORDS.get(name, name)
    return [word if word == "None" else f"{'an' if word[0] in 'AEIOUaeiou' else 'a'} {word}"]


def _shown(value: object) -> str:
    """The value if it is short, otherwise its type."""
    if value is None or isinstance(value, str | numbers.Number):
        return quote(value)
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
