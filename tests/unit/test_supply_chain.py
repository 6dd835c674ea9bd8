"""What Offbeat depends on is justified and locked, and no file of a user's is ever run as a program."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "offbeat"
PINNED = (ROOT / "constraints.txt").read_text().splitlines()
RUNNERS = ("eval", "exec", "compile", "__import__")
UNSAFE_YAML = ("unsafe_load", "full_load", "unsafe_load_all", "full_load_all")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dependencies", ROOT / "tools" / "dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_justified_with_its_licence(tool: ModuleType) -> None:
    page = tool.PAGE.read_text()
    for group, names in tool.requirements().items():
        for name in names:
            row = re.search(rf"^\| {re.escape(name)} \| (.+) \| (.+) \|$", page, re.MULTILINE)
            assert row, f"{name} ({group or 'needed'}) is missing: run tools/dependencies.py"
            assert row[1] not in ("not installed", "not declared"), name
            assert row[2] == tool.REASONS[name]


@pytest.mark.skipif(f"torch=={torch.__version__.partition('+')[0]}" not in PINNED, reason="another torch is installed")
def test_the_page_is_what_the_tool_writes(tool: ModuleType) -> None:
    page = tool.PAGE.read_text()
    assert tool.with_tables(page) == page, "run tools/dependencies.py"


def test_no_reason_is_given_for_what_is_not_used(tool: ModuleType) -> None:
    asked = {name for names in tool.requirements().values() for name in names}
    assert set(tool.REASONS) == asked


def test_the_lock_holds_every_pinned_version_with_a_hash(tool: ModuleType) -> None:
    text = tool.LOCK.read_text()
    locked = dict(re.findall(r"^(\S+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE))
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {normal(name): version for name, version in locked.items()} == {
        normal(name): version for name, version in pinned.items()
    }, "run tools/dependencies.py --lock"
    assert text.count("==") == len(locked)
    assert "://" not in text, "where a package comes from is the installer's business"


def test_every_needed_package_is_pinned(tool: ModuleType) -> None:
    pinned = {
        normal(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    asked = {normal(name) for names in tool.requirements().values() for name in names}
    assert asked <= pinned


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Every call in a file, with the dotted name of what is called."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [(ast.unparse(node.func), node) for node in nodes if isinstance(node, ast.Call)]


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def dangers(path: Path) -> list[str]:
    """What in a file could run a program that lies in the data it reads."""
    found = [f"imports {name}" for name in imports(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}]
    for name, call in calls(path):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in RUNNERS or name.split(".")[-1] in UNSAFE_YAML:
            found.append(name)
        elif name == "yaml.load" and "Loader" not in keywords:
            found.append("yaml.load without a loader")
        elif name == "yaml.load" and keywords["Loader"] != "_Loader":
            found.append(f"yaml.load with {keywords['Loader']}")
        elif name in ("torch.load", "torch.serialization.load") and keywords.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        elif name in ("np.load", "numpy.load") and keywords.get("allow_pickle") != "False":
            found.append("np.load without allow_pickle=False")
        elif name in ("os.system", "os.popen") or keywords.get("shell") == "True":
            found.append(f"{name} runs a shell")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_format_runs_code(path: Path) -> None:
    assert dangers(path) == []


def test_the_search_for_code_that_runs_finds_it(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "import pickle, yaml, torch, numpy as np, os\n"
        "eval('1')\nexec('1')\ntorch.load('a')\ntorch.load('a', weights_only=False)\nnp.load('a')\n"
        "yaml.load('a', Loader=yaml.Loader)\nyaml.unsafe_load('a')\nos.system('a')\n"
        "torch.load('a', weights_only=True)\n"
    )
    assert len(dangers(path)) == 9


def test_the_yaml_loader_is_a_safe_one() -> None:
    import yaml

    from offbeat.files import _Loader

    assert issubclass(_Loader, (yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
