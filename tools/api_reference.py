"""The source of the public names → docs/api.md: signatures with types, fields, methods and docstrings.

python tools/api_reference.py [--check]
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, TypeVar, get_args, get_origin

TARGET = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = """# API reference

Every public name of `import offbeat`, with types. Errors in arguments and files raise `offbeat.OffbeatError`, whose
text is one sentence. Written from the source by `tools/api_reference.py`.
"""
WIDTH = 110
HIDDEN = {
    "Recorder": ("communication", "local", "collective"),  # what Offbeat's runtime reports to it
    "Emulation": ("popen", "new_port"),
    "Timeline": ("marked_ranks", "mark_rows"),
}
"""Public methods that other parts of Offbeat call, and users do not."""
INNER = ("__func__", "fget", "func")
"""Where class and static methods, properties and cached ones keep their function."""


def sections() -> dict[str, list[tuple[str, object]]]:
    """The page: under each heading, names as users write them and what they stand for."""
    import offbeat
    from offbeat.emulate import Emulation
    from offbeat.runtime.handle import Decision, Handle
    from offbeat.runtime.mixins import OuterModel
    from offbeat.search.auto.tune import TuneResult
    from offbeat.search.frontier.find import ModelFrontier
    from offbeat.search.frontier.model import FrontierPoint
    from offbeat.simulate import simulate

    def own(*names: str) -> list[tuple[str, object]]:
        return [(f"offbeat.{name}", getattr(offbeat, name)) for name in names]

    return {
        "Training": [
            *own("distribute"),
            ("The model that `distribute` returns", OuterModel),
            ("Its handle, `model.offbeat`", Handle),
            ("An entry of `model.offbeat.history`", Decision),
            *own("Monitor", "ddp_kwargs"),
        ],
        "Models, clusters and strategies": own(
            "capture",
            "ModelGraph",
            "ClusterSpec",
            "builders",
            "build_strategy",
            "register_builder",
            "Strategy",
            "transfer",
            "lower",
            "Plan",
        ),
        "Recording and prediction": [*own("Recorder"), ("offbeat.simulate", simulate), *own("Timeline")],
        "Search": [
            *own("optimize", "tune"),
            ("The result of `tune`", TuneResult),
            *own("find_frontier"),
            ("The result of `find_frontier`", ModelFrontier),
            ("A point of a frontier", FrontierPoint),
        ],
        "The rest": [("offbeat.emulate.Emulation", Emulation), *own("zoo", "OffbeatError")],
    }


def reference() -> str:
    parts = [HEAD]
    for heading, names in sections().items():
        parts.append(f"## {heading}\n")
        parts += [entry(name, value) for name, value in names]
    return "\n".join(parts)


def entry(name: str, value: Any) -> str:
    """One name: how it is called, what it says of itself and, of a class, its fields and methods."""
    title = f"### {name}" if " " in name else f"### `{name}`"
    if inspect.ismodule(value):
        functions = [getattr(value, each) for each in ("build", "names", "capture")]
        lines = "\n".join(f"- `{value.__name__}.{call(each, each.__name__)}`" for each in functions)
        return f"{title}\n\n{text(value)}\n\n{lines}\n"
    if not inspect.isclass(value):
        return f"{title}\n\n```python\n{call(value, name, WIDTH)}\n```\n\n{text(value)}\n"
    return "\n".join([title, "", *class_lines(name, value)])


def class_lines(name: str, value: type) -> Iterator[str]:
    # Of what a class of Offbeat's inherits from another one, users see no difference.
    family = [each for each in value.__mro__ if each.__module__.startswith("offbeat") and each.__name__[0] != "_"]
    fields = [line for each in reversed(family) for line in field_lines(each)]
    maker = inspect.unwrap(value.__init__)
    if " " not in name and not fields and isinstance(maker, FunctionType):
        yield f"```python\n{call(maker, name, WIDTH)}\n```\n"
    yield f"{text(value)}\n"
    if fields:
        yield "\n".join(fields) + "\n"
    shown = set(HIDDEN.get(value.__name__, ()))
    for each in family:
        for method, function in vars(each).items():
            attribute = isinstance(function, property | cached_property)
            inner = next((getattr(function, each) for each in INNER if hasattr(function, each)), function)
            plain = inspect.unwrap(inner)
            if method[0] == "_" or method in shown or not isinstance(plain, FunctionType) or not plain.__doc__:
                continue
            shown.add(method)
            called = call(plain, method)
            shape = called.replace("() -> ", ": ") if attribute else called
            yield f"**`.{shape}`** {text(plain)}\n"


def field_lines(value: type) -> Iterator[str]:
    """The annotated attributes of a class as a list; what follows one as a string describes it."""
    body, known = tree(value).body, vars(sys.modules[value.__module__])
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.target.id[0] == "_":
            continue
        given = node.value is not None and not isinstance(node.value, ast.Call)
        default = f" = {written(node.value, known, False)}" if given else ""
        said = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said = f": {' '.join(str(following.value.value).split())}"
        yield f"- `{node.target.id}: {written(node.annotation, known)}{default}`{said}"


def tree(value: Any) -> Any:
    return ast.parse(inspect.cleandoc("\n" + inspect.getsource(value))).body[0]


def call(function: Any, name: str, width: int | None = None) -> str:
    """A function's name, parameters and result, as in its source; with a width, over several lines if it is longer."""
    plain = inspect.unwrap(function)
    node, known = tree(plain), vars(sys.modules[plain.__module__])
    given, parts = node.args, []

    def parameter(argument: ast.arg, default: ast.expr | None, stars: str = "") -> str:
        kind = f": {written(argument.annotation, known)}" if argument.annotation else ""
        return f"{stars}{argument.arg}{kind}" + ("" if default is None else f" = {written(default, known, False)}")

    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    parts = [parameter(each, default) for each, default in zip(given.args, defaults, strict=True)]
    if given.vararg or given.kwonlyargs:
        parts.append(parameter(given.vararg, None, "*") if given.vararg else "*")
    parts += [parameter(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        parts.append(parameter(given.kwarg, None, "**"))
    parts = [part for part in parts if part not in ("self", "cls")]
    result = written(node.returns, known) if node.returns else "None"
    if any(isinstance(each, ast.Name) and each.id == "contextmanager" for each in node.decorator_list):
        result = result.replace("Generator[None, None, None]", "AbstractContextManager[None]")
    end = "" if node.name == "__init__" else f" -> {result}"
    line = f"{name}({', '.join(parts)}){end}"
    if width is None or len(line) <= width:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])


def written(node: ast.expr, known: Mapping[str, Any], is_type: bool = True) -> str:
    """A type or a default as in its source, but for what a reader could not look up: aliases of types and constants."""

    class Plain(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> Any:
            # What else stands in Annotated is for pydantic.
            if isinstance(node.value, ast.Name) and node.value.id == "Annotated" and isinstance(node.slice, ast.Tuple):
                return self.visit(node.slice.elts[0])
            return node if ast.unparse(node.value) == "Literal" else self.generic_visit(node)

        def visit_Constant(self, node: ast.Constant) -> Any:
            # Types that are defined later are written as texts.
            return ast.Name(node.value) if is_type and isinstance(node.value, str) else node

        def visit_Name(self, node: ast.Name) -> Any:
            value = known.get(node.id)
            if isinstance(value, str | int | float | Path):
                return ast.Name(repr(str(value) if isinstance(value, Path) else value))
            if isinstance(value, TypeVar):
                value = value.__bound__
                return ast.Name(value.__name__)
            alias = get_origin(value) is not None and not getattr(value, "__parameters__", ())
            return self.visit(ast.parse(alias_text(value), mode="eval").body) if alias else node

    return ast.unparse(Plain().visit(node))


def alias_text(value: Any) -> str:
    """What an alias of a type stands for, without the modules of names."""
    while get_origin(value) is Annotated:
        value = get_args(value)[0]
    return re.sub(r"(?<![\w.])(?:\w+\.)+(?=\w)", "", inspect.formatannotation(value))


def text(value: object) -> str:
    return inspect.cleandoc(value.__doc__ or "")


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if TARGET.read_text() == reference() else f"{TARGET.name} is not what the docstrings say")
    TARGET.write_text(reference())
