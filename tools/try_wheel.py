"""This checkout → dist/*.whl and dist/*.tar.gz, both tried in an empty environment without development tools.

`make wheel` runs it with the versions of constraints.txt. `make wheel PYTHON=python3.13 TORCH=2.15.0` tries that Python
and that torch with the newest release of everything else.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SCRIPT = """
import importlib.resources, sys
import torch, offbeat
assert importlib.resources.files(offbeat).joinpath("py.typed").is_file()
graph = offbeat.capture(torch.nn.Linear(64, 8), torch.zeros(4, 64))
cluster = offbeat.ClusterSpec.homogeneous(nodes=2, devices_per_node=1, bandwidth="1Gbit/s", latency="50us")
plan = offbeat.lower(graph, cluster, offbeat.build_strategy("overlap", graph, cluster))
assert offbeat.simulate(plan).iteration_time > 0
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {offbeat.__file__}")
"""
EMULATED = ("emulate", "--hosts", "2", "--bandwidth", "1Gbit/s", "--")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", help="this version, and no constraints on the others")
    wanted = parser.parse_args().torch
    with tempfile.TemporaryDirectory() as folder:
        wheel, source = build(Path(folder, "build"))
        attempt(Path(folder, "empty"), wheel, source, wanted)
    print(f"{wheel.name} and {source.name} work in an empty environment with Python {sys.version.split()[0]}")


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel, which is made from the source distribution, and the latter."""
    shutil.rmtree(DIST, ignore_errors=True)
    venv.create(folder, with_pip=True)
    call(folder, folder / "bin" / "pip", "install", "-q", "build")
    call(folder, folder / "bin" / "python", "-m", "build", "-q", "--outdir", DIST, ROOT)
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, source


def attempt(folder: Path, wheel: Path, source: Path, torch: str | None) -> None:
    """Installs both, one after the other, and uses the library, the command line, a recorder and a training job."""
    venv.create(folder, with_pip=True)
    python, pip, offbeat = (folder / "bin" / name for name in ("python", "pip", "offbeat"))
    constraints = [] if torch else ["-c", ROOT / "constraints.txt"]
    example = ROOT / "examples" / "train.py"
    call(folder, pip, "install", "-q", *constraints, f"torch=={torch}" if torch else "torch")
    call(folder, pip, "install", "-q", *constraints, wheel)
    call(folder, python, "-c", SCRIPT)
    call(folder, offbeat, "plan", "mlp", "--cluster", "B7")
    call(folder, offbeat, *EMULATED, offbeat, "profile", example, "-o", "trace")
    # The page is made of files that are no Python, which a wheel may lack.
    call(folder, offbeat, "report", "trace")
    call(folder, offbeat, *EMULATED, example, "--offbeat", "--steps", "30")
    call(folder, pip, "install", "-q", "--force-reinstall", "--no-deps", source)
    call(folder, python, "-c", SCRIPT)


def call(folder: Path, *command: object) -> None:
    """Runs a command elsewhere than in the checkout, whose package would be found first."""
    subprocess.run(list(map(str, command)), check=True, cwd=folder, stdout=sys.stderr)


if __name__ == "__main__":
    main()
