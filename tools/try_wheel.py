"""dist/*.whl → a smoke test in an empty environment, without development tools; run by `make wheel`."""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """
import torch, offbeat
graph = offbeat.capture(torch.nn.Linear(64, 8), torch.zeros(4, 64))
cluster = offbeat.ClusterSpec.homogeneous(nodes=2, devices_per_node=1, bandwidth="1Gbit/s", latency="50us")
plan = offbeat.lower(graph, cluster, offbeat.build_strategy("overlap", graph, cluster))
assert offbeat.simulate(plan).iteration_time > 0
"""


def main() -> None:
    """Installs the wheel with the versions of constraints.txt, then uses the library, a command and a training job."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    assert len(list((ROOT / "dist").glob("*.tar.gz"))) == 1
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder, "bin")
        pip = [programs / "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
        for command in (
            [*pip, "torch"],
            [*pip, wheel],
            [programs / "python", "-c", SCRIPT],
            [programs / "offbeat", "plan", "vgg16", "--cluster", "B7", "--strategy", "overlap"],
            [
                programs / "offbeat",
                "emulate",
                "--hosts",
                "2",
                "--bandwidth",
                "1Gbit/s",
                "--",
                ROOT / "examples" / "train.py",
            ],
        ):
            # Elsewhere than in the checkout, whose package would be found first.
            subprocess.run([str(part) for part in command], check=True, cwd=folder, stdout=sys.stderr)
    print(f"{wheel.name} works in an empty environment")


if __name__ == "__main__":
    main()
