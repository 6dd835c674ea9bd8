"""One rank of a job with two workers and two servers that hold no replica: `server_job.py JSON`.

A worker writes what it found to `rank{r}.json` beside the script's log, or in the case's `folder`. On a server,
distribute() does not return. Models are put on a GPU where there is one; servers take theirs back to host memory.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))
import small_models
import torch
from reference import flat_parameters, reference_run

import offbeat
from offbeat.launch import SERVERS_VARIABLE
from offbeat.profile import calibrate
from offbeat.runtime.comm.torch_channel import TorchChannel
from offbeat.strategy import Shard, Strategy, VariableConfig

WORKERS, STEPS = 2, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLUSTER = offbeat.ClusterSpec(nodes=[{}, {}, {"role": "server"}, {"role": "server"}])
GIVEN = None if SERVERS_VARIABLE in os.environ else CLUSTER
"""Where the launcher has named the servers, `distribute` is given no cluster."""


def exact(strategy: str, steps: int = STEPS) -> dict[str, Any]:
    """How far training is from that of one process, after a few steps."""
    model = small_models.make("mlp").to(DEVICE)
    optimizer = small_models.make_optimizer("adamw", model.parameters())
    offbeat.distribute(model, optimizer, strategy, cluster=GIVEN)
    rank = int(os.environ["RANK"])
    for step in range(steps):
        optimizer.zero_grad()
        model(*(tensor.to(DEVICE) for tensor in small_models.batch("mlp", step, rank))).backward()
        optimizer.step()
    sizes = (4,) * WORKERS
    expected = reference_run("mlp", "adamw", torch.float64, steps, WORKERS, (1.0,) * WORKERS, sizes)
    return {"error": float((flat_parameters(model).cpu() - expected).abs().max()), "said": model.offbeat.summary()}


def relaxed(**field: Any) -> dict[str, Any]:
    """The steps that a variable whose gradient is always 1 has moved, after each of this worker's steps."""
    model = _One().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shard = Shard(synchronizer="parameter_server", placement=(2,), **field)
    strategy = Strategy(variables={"weight": VariableConfig(shards=(shard,))})
    offbeat.distribute(model, optimizer, strategy, cluster=CLUSTER)
    moved = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1, device=DEVICE)).backward()
        optimizer.step()
        moved.append(-float(model.weight.detach()[0]))
    return {"moved": moved}


def slowed(late: float) -> dict[str, Any]:
    """Trains until the recorder ends it, with a half of a variable on each of two asynchronous servers. What comes to
    the second one comes so many seconds late."""
    if os.environ["RANK"] == "3":
        receive = TorchChannel.recv

        def late_receive(*arguments: Any) -> None:
            time.sleep(late)
            receive(*arguments)

        TorchChannel.recv = late_receive  # type: ignore[method-assign]
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    owned = (Shard(synchronizer="parameter_server", placement=(rank,), asynchronous=True) for rank in (2, 3))
    strategy = Strategy(variables={"weight": VariableConfig(partition=(2, 1), shards=tuple(owned))})
    offbeat.distribute(model, optimizer, strategy, cluster=CLUSTER)
    while True:
        optimizer.zero_grad()
        model(torch.ones(8, 64)).mean().backward()
        optimizer.step()


def forever(builder: str) -> dict[str, Any]:
    """Trains until somebody ends it; tells of every step."""
    model = small_models.make("mlp").to(DEVICE)
    optimizer = small_models.make_optimizer("sgd", model.parameters())
    offbeat.distribute(model, optimizer, builder, cluster=CLUSTER)
    step = 0
    while True:
        optimizer.zero_grad()
        model(*(tensor.to(DEVICE) for tensor in small_models.batch("mlp", step, 0))).backward()
        optimizer.step()
        step += 1
        print(step, flush=True)


class _One(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.weight).sum()


if __name__ == "__main__":
    # Where the job is recorded, roughly is enough.
    calibrate.ATTEMPTS = calibrate.REPEATS = calibrate.SMALL_REPEATS = 1
    calibrate.SIZES = (2**12, 2**16, 2**18, 2**20)
    torch.set_num_threads(1)
    case = json.loads(sys.argv[1])
    folder = Path(case.pop("folder", "."))
    found = {"exact": exact, "relaxed": relaxed, "slowed": slowed, "forever": forever}[case.pop("what")](**case)
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
