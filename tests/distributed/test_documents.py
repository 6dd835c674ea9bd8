"""README and the tutorial, read from top to bottom on a fresh clone: every command does what it says."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

import pytest
import typer

from offbeat.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
READ_THROUGH = ("README.md", "docs/tutorial.md")
SECONDS = 600
NOT_IN_A_CLONE = shutil.ignore_patterns(".venv", ".git", "dist", "build", "*.egg-info", "__pycache__", ".*_cache")


def commands(document: Path) -> list[str]:
    """The lines of all shell blocks, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split(" # ")[0].strip() for line in lines if line.strip()]


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_all_commands_are_understood(document: Path) -> None:
    """What can be told without running them: commands and options that exist, values of the right kind."""
    main = typer.main.get_command(app)
    for line in re.findall(r"^(?: {4})?((?:offbeat|make) \S[^\n]*)$", document.read_text(), re.MULTILINE):
        program, name, *arguments = shlex.split(line, comments=True)
        if program == "offbeat":
            main.commands[name].make_context(name, arguments)
        else:
            subprocess.run(["make", "-n", "-C", str(ROOT), name], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_commands_run(tmp_path: Path) -> None:
    """Every line of their shell blocks, as it stands there, in a copy of the checkout that has nothing installed."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=NOT_IN_A_CLONE)
    # The environment that README supposes, and the one that `make` would set up.
    venv.create(clone / ".venv", with_pip=True)
    ran = [line for document in READ_THROUGH for line in commands(clone / document)]
    for line in ran:
        (_look if line.startswith("offbeat view") else _run)(line, clone)
    assert {"pip install .", "make demo", "make install"} <= set(ran)
    assert len([line for line in ran if line.startswith("offbeat ")]) > 15
    for name in ("report.html", "strategy.json", "trace/rank1.jsonl"):
        assert (clone / name).is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=NOT_IN_A_CLONE)
    _run("make wheel", clone)
    assert sorted(path.suffix for path in (clone / "dist").iterdir()) == [".gz", ".whl"]


def _environment(clone: Path) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    # The versions under test, also where README leaves the choice to pip.
    pinned = {"PIP_CONSTRAINT": str(clone / "constraints.txt")}
    return kept | pinned | {"PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def _run(line: str, clone: Path) -> None:
    made_by = f"make PYTHON={shlex.quote(sys.executable)} "
    done = subprocess.run(
        ["bash", "-c", line.replace("make ", made_by, 1) if line.startswith("make ") else line],
        cwd=clone,
        env=_environment(clone),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def _look(line: str, clone: Path) -> None:
    """Starts a page, reads it and ends it with Ctrl-C, as a reader would."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=clone,
        env=_environment(clone),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as page:
        try:
            assert page.stdout is not None
            shown = ""
            while not (address := re.search(r"http://\S+", shown)):
                text = page.stdout.readline()
                assert text, f"{line} ended and printed {shown!r}"
                shown += text
            with urllib.request.urlopen(address[0], timeout=20) as answer:
                assert answer.status == 200
            page.send_signal(signal.SIGINT)
            assert page.wait(20) in (0, 130)
        finally:
            page.kill()
