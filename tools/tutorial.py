"""The tutorial's commands, run from top to bottom → its output, its result and its images, all of one run.

    python tools/tutorial.py

Run it on a machine that does nothing else; it takes about four minutes. A block of commands is followed by what its
commands print, all of it or the lines that an `only:` comment names. Blocks that set up the clone are left out.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import screenshots

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(
    r"^(```sh\n(?P<commands>.*?)^```\n)(?:(\n(?:<!-- only: (?P<only>.*?) -->\n)?```text\n).*?^```\n)?",
    re.DOTALL | re.MULTILINE,
)
STEP = re.compile(r"([\d.]+) ms a step")
PREDICTED = re.compile(r"predicted to take .*?: ([\d.]+× as (?:fast|slow)) as DDP")
MARKS = "<!-- result -->\n", "<!-- end of result -->"
SECONDS = 300


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="offbeat-tutorial-") as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        page, printed = written(PAGE.read_text(), Path(folder))
        screenshots.main(Path(folder) / "trace")
    before, rest = page.split(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}{result(printed)}{MARKS[1]}{after}")


def written(page: str, folder: Path) -> tuple[str, str]:
    """The page with the output of its commands, and all of that output."""
    printed = []

    def filled(block: re.Match[str]) -> str:
        lines = block["commands"].splitlines()
        if not all(line.startswith("offbeat ") for line in lines) or "offbeat view" in block["commands"]:
            return block[0]
        shown = "\n".join([run(line, folder) for line in lines])
        printed.append(shown)
        if block[3] is None:
            return block[0]
        kept = [line for line in shown.splitlines() if not block["only"] or re.match(block["only"], line)]
        return block[1] + block[3] + "\n".join(kept).strip("\n") + "\n```\n"

    return BLOCK.sub(filled, page), "\n".join(printed)


def run(line: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{line}\n{done.stdout}")
    return done.stdout


def result(printed: str) -> str:
    """The steps of the three jobs in a table, with what was predicted."""
    ddp, found, auto = map(float, STEP.findall(printed))
    predicted = PREDICTED.search(printed)
    assert predicted, printed
    rows = [
        ("DDP", ddp, ""),
        ("`offbeat run --strategy strategy.json`", found, f"; predicted: {predicted[1]}"),
        ('`strategy="auto"`', auto, ""),
    ]
    lines = [f"| {name} | {step:g} ms | {ddp / step:.2f} ×{more} |" for name, step, more in rows]
    return "\n".join(["| job | step | as fast as DDP |", "|---|---|---|", *lines, ""])


if __name__ == "__main__":
    main()
