"""Docstrings of the public names → docs/api.md.

python tools/api_reference.py [--check]
"""

import inspect
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = """# API

The names that `import offbeat` offers. Made from their docstrings by `tools/api_reference.py`.
"""


def reference() -> str:
    import offbeat

    return "\n".join([HEAD, *(entry(name, getattr(offbeat, name)) for name in sorted(offbeat.__all__, key=str.lower))])


def entry(name: str, value: object) -> str:
    """One name: how it is called, what it says of itself, and its public methods if it is a class."""
    if inspect.ismodule(value):
        return f"## `offbeat.{name}`\n\n{text(value)}\n"
    if not callable(value):
        return f"## `offbeat.{name}`\n\n{type(value).__name__}.\n"
    parts = [f"## `offbeat.{name}{signature(value)}`", text(value)]
    if inspect.isclass(value):
        for method, function in vars(value).items():
            found = getattr(value, method)
            described = isinstance(function, classmethod | staticmethod | property) or inspect.isfunction(function)
            if described and not method.startswith("_") and found.__doc__:
                call = "" if isinstance(function, property) else signature(found)
                parts.append(f"**`.{method}{call}`** {text(found)}")
    return "\n\n".join(parts) + "\n"


def signature(value: object) -> str:
    """Names of the parameters; their types are in the code."""
    try:
        parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type] # callable, checked above
    except (TypeError, ValueError):
        return ""
    names = []
    for parameter in parameters:
        if parameter.name == "self":
            continue
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown = star + parameter.name
        if parameter.default is not parameter.empty:
            plain = isinstance(parameter.default, str | int | float | bool | type(None) | tuple)
            shown += f"={parameter.default!r}" if plain else "=…"
        names.append(shown)
    return f"({', '.join(names)})"


def text(value: object) -> str:
    return inspect.cleandoc(value.__doc__ or "")


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if TARGET.read_text() == reference() else f"{TARGET.name} is not what the docstrings say")
    TARGET.write_text(reference())
