"""The public surface: names, commands, file formats and the examples in the documentation.

Run as a script, it writes the JSON Schemas in docs/ again.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.cli import app
from offbeat.cluster import ClusterSpec
from offbeat.plan import lower
from offbeat.strategy import Strategy

ROOT = Path(__file__).parents[2]
SCHEMAS: dict[str, Any] = {
    "strategy.schema.json": Strategy.json_schema,
    "cluster.schema.json": ClusterSpec.json_schema,
}
NAMES = [
    "ClusterSpec",
    "ModelGraph",
    "Monitor",
    "OffbeatError",
    "Plan",
    "Recorder",
    "Strategy",
    "Timeline",
    "build_strategy",
    "builders",
    "capture",
    "ddp_kwargs",
    "distribute",
    "emulate",
    "find_frontier",
    "lower",
    "optimize",
    "register_builder",
    "simulate",
    "transfer",
    "tune",
    "zoo",
]
COMMANDS = {
    "Start here": ["tour", "demo", "doctor"],
    "Make a job faster": ["profile", "report", "view", "replay", "optimize", "run", "tune", "trials"],
    "Plan without a job": ["models", "clusters", "builders", "plan", "explain", "frontier", "calibrate"],
    "Run a script on several hosts": ["emulate", "launch"],
}


def example(document: str) -> str:
    """The code block that a document marks as its example."""
    found = re.search(r"<!-- example -->\n```\w+\n(.*?)```", Path(ROOT, document).read_text(), re.DOTALL)
    assert found, document
    return found[1]


def test_exported_names() -> None:
    assert offbeat.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_can_be_used(name: str) -> None:
    assert getattr(offbeat, name) is not None
    assert name in dir(offbeat)


def test_type_checkers_see_the_names(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import offbeat\n"
        "graph = offbeat.capture(None, None)\n"
        "cluster = offbeat.ClusterSpec.load('cluster.yaml')\n"
        "reveal_type(offbeat.build_strategy('ddp', graph, cluster))\n"
        "reveal_type(offbeat.lower(graph, cluster, offbeat.Strategy.load('s.json')).messages)\n"
        "reveal_type(offbeat.simulate(offbeat.lower(graph, cluster, offbeat.Strategy.load('s.json'))).iteration_time)\n"
        "offbeat.captures\n"
        "class Net: ...\n"
        "class Trainer: ...\n"
        "reveal_type(offbeat.distribute(Net(), Trainer()))\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache")]
    # As where Offbeat is installed from its wheel.
    variables = {**os.environ, "MYPYPATH": str(ROOT)}
    shown = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path, env=variables
    ).stdout
    seen = [line.partition("train.py:")[2] for line in shown.splitlines()]
    assert [line.partition(": ")[0] for line in seen] == ["4", "5", "6", "7", "10"], shown
    assert "offbeat.strategy.model.Strategy" in seen[0]
    assert "offbeat.plan.model.Message" in seen[1]
    assert '"float"' in seen[2]
    assert 'has no attribute "captures"' in seen[3]
    # A script's own classes, so that its names keep their types.
    assert "tuple[train.Net, train.Trainer]" in seen[4]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'captures'"):
        offbeat.captures  # noqa: B018


def test_commands() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "from offbeat.cli import main; main()", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    panels = re.findall(r"^╭─ (.*?) ─+╮\n(.*?)^╰", shown, re.MULTILINE | re.DOTALL)
    listed = {title: re.findall(r"^│ (\w+) {2,}", body, re.MULTILINE) for title, body in panels[1:]}
    assert list(listed.items()) == list(COMMANDS.items())
    names = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert names == [name for listed in COMMANDS.values() for name in listed]


@pytest.mark.parametrize("command", [name for names in COMMANDS.values() for name in names])
def test_every_command_shows_an_example_and_takes_json(command: str) -> None:
    registered = next(c for c in app.registered_commands if c.callback and c.callback.__name__ == command)
    assert f"Example: offbeat {command}" in str(registered.epilog)
    assert "as_json" in registered.callback.__annotations__  # type: ignore[union-attr]


def test_importing_offbeat_leaves_torch_alone() -> None:
    code = "import sys, offbeat.cluster; from offbeat import zoo; zoo.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_capabilities_name_modules_and_tests_that_exist() -> None:
    """The tables of docs/algorithms.md."""
    text = Path(ROOT, "docs/algorithms.md").read_text()
    named = re.findall(r"`((?:unit|distributed|gpu|benchmarks|[a-z_]+)(?:/[a-z_/0-9]+)?\.py)(?:::(\w+))?`", text)
    assert len(named) > 200
    homes = (ROOT, Path(ROOT, "tests"), Path(ROOT, "offbeat"))
    missing = set()
    for path, test in named:
        files = [Path(home, path) for home in homes if Path(home, path).is_file()]
        if not files or (test and f"def {test}(" not in files[0].read_text()):
            missing.add((path, test))
    # Modules that a paragraph names beside their package.
    assert missing <= {("roles.py", ""), ("clockfit.py", "")}


def test_every_capability_has_a_module_and_a_test_or_says_why_not() -> None:
    """Each row of docs/algorithms.md's tables, one table for each paper."""
    tables = Path(ROOT, "docs/algorithms.md").read_text().split("| capability |")[1:]
    rows = [line for table in tables for line in table.splitlines()[2:] if line.startswith("| ")]
    assert len(tables) == 5
    assert len(rows) > 90
    for capability, modules, shown, differs in (row.strip("| ").split(" | ") for row in rows):
        shows = re.search(r"`(?:unit|distributed|gpu)/\w+\.py::\w+`|`benchmarks/\w+\.py`", shown)
        assert modules == "none" or re.search(r"`[a-z_/]+(?:\.py|/)`", modules), capability
        assert shows or (shown == "none" and differs != "None"), capability


@pytest.mark.parametrize("name", SCHEMAS)
def test_published_schema(name: str) -> None:
    assert json.loads(Path(ROOT, "docs", name).read_text()) == SCHEMAS[name]()


def test_example_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = example("README.md")
    assert len(code.splitlines()) <= 20
    exec(compile(code, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ddp", "partitioned_ps", "overlap"]
    assert Strategy.load("strategy.json").name == "overlap"


def test_example_of_the_strategy_file() -> None:
    strategy = Strategy.from_json(example("docs/strategy.md"))
    graph, cluster = offbeat.zoo.capture("mlp", 0.1), ClusterSpec.preset("B9")
    plan = lower(graph, cluster, strategy)
    by_variable = {name: message for message in plan.messages for name in message.variables}
    assert by_variable["body.0.bias"] is by_variable["head.bias"]
    assert by_variable["head.weight"].encoder.name == "bf16"
    assert sorted(m.owner for m in plan.messages if m.variables == ("body.0.weight",)) == [0, 1]  # type: ignore[type-var]


def test_example_of_the_cluster_file() -> None:
    cluster = ClusterSpec.from_yaml(example("docs/cluster.md"))
    assert cluster.world_size == 9
    assert [node.name for node in cluster.nodes] == ["fast-0", "fast-1", "old"]


@pytest.mark.parametrize(
    ("document", "model"),
    [("docs/cluster.md", "cluster"), ("docs/strategy.md", "strategy")],
)
def test_every_field_is_documented(document: str, model: str) -> None:
    schema = SCHEMAS[f"{model}.schema.json"]()
    fields = {name for part in (schema, *schema["$defs"].values()) for name in part["properties"]}
    # The search writes the splits of single operators, so only the field that holds them is described.
    fields -= {"mesh", "inputs", "outputs", "keep"}
    text = Path(ROOT, document).read_text()
    assert {name for name in fields if not re.search(rf"`{name}`|\"{name}\"|^- {name}:|{name}:", text)} == set()


@pytest.mark.parametrize("document", [*Path(ROOT, "docs").glob("*.md"), ROOT / "README.md"], ids=lambda path: path.name)
def test_documents_name_modules_that_exist(document: Path) -> None:
    folders = ("offbeat", "benchmarks", "tests", "tools", "examples")
    known = [f"/{path.relative_to(ROOT)}" for folder in folders for path in Path(ROOT, folder).rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py)(?:::\w+)?`", document.read_text())
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in known)] == []


if __name__ == "__main__":
    for schema_name, make in SCHEMAS.items():
        Path(ROOT, "docs", schema_name).write_text(json.dumps(make(), indent=1) + "\n")
