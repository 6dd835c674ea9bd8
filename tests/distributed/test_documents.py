"""Every block of commands in README and in the tutorial does what it says."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import typer

from offbeat.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/tutorial.md")
SECONDS = 150


def commands(document: str) -> list[str]:
    """The lines of all shell blocks, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```", Path(ROOT, document).read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split(" # ")[0].strip() for line in lines if line.strip()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_all_commands_are_understood(document: str) -> None:
    """What can be told without running them: commands and options that exist, values of the right kind."""
    main = typer.main.get_command(app)
    for line in commands(document):
        if line.startswith("offbeat "):
            name, *arguments = shlex.split(line)[1:]
            main.commands[name].make_context(name, arguments)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_all_commands_run(document: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    found = commands(document)
    assert any(line.startswith("offbeat ") for line in found)
    for line in found:
        if line.startswith("make "):
            # They would set up everything again, or run this very test.
            _run(f"make -n -C {shlex.quote(str(ROOT))} {line.removeprefix('make ')}", tmp_path)
        elif line.startswith("pip "):
            # It would take the place of the package under test.
            _run(f"{sys.executable} -m pip install -q --dry-run --no-deps {shlex.quote(str(ROOT))}", tmp_path)
        elif line.startswith("offbeat view"):
            _look(line, tmp_path)
        elif not line.startswith(". "):
            _run(line, tmp_path)


def _environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def _run(line: str, folder: Path) -> None:
    done = subprocess.run(
        shlex.split(line), cwd=folder, env=_environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def _look(line: str, folder: Path) -> None:
    """Starts a page, reads it and ends it with Ctrl-C, as a reader would."""
    with subprocess.Popen(
        shlex.split(line), cwd=folder, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
