"""A training script's way of working → how far Offbeat ends up from averaging by hand, or how a mistake is refused."""

from contextlib import nullcontext
from typing import Any

import guest_changes  # noqa: F401 - registers its patterns
import guest_loops  # noqa: F401 - as above
import guest_parameters  # noqa: F401 - as above
import torch
import torch.nn.functional as F
from guest_job import MAKERS, PATTERNS, Job, Net
from guest_mistakes import MISTAKES, distributed_model
from torch.nn.parallel import DistributedDataParallel
from training import untimed_links

from offbeat.errors import OffbeatError


def guest(name: str, strategy: str) -> dict[str, Any]:
    """How far a pattern under a strategy ends up from the reference, here and between the ranks."""
    with untimed_links():
        ours, reference = Job(strategy, **MAKERS[name]), Job(None, **MAKERS[name])
    before = [p.detach().clone() for p in reference.model.parameters()]
    for job in (ours, reference):
        with untimed_links():
            PATTERNS[name](job)
    mine = [*ours.seen, *(p.detach() for p in ours.model.parameters())]
    theirs = [*reference.seen, *(p.detach() for p in reference.model.parameters())]
    assert len(mine) == len(theirs)
    equal = all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    worst = max((float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True) if a.numel()), default=0.0)
    after = [p.detach() for p in reference.model.parameters()]
    moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    said = [decision.what for decision in ours.model.offbeat.history]
    return {"equal": equal, "error": worst, "trained": moved, "mode": ours.model.offbeat.mode, "said": said}


def as_with_ddp(optimizer: str, strategy: str) -> dict[str, Any]:
    """Whether a plain loop's losses and parameters are those of DistributedDataParallel, in single precision."""
    kinds = {
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    }

    def train(model: torch.nn.Module, trainer: torch.optim.Optimizer, job: Job) -> list[torch.Tensor]:
        seen = []
        for step in range(10):
            x, y = job.batch(step)
            trainer.zero_grad()
            loss = F.cross_entropy(model(x.float()), y)
            loss.backward()
            trainer.step()
            seen += [loss.detach(), *(p.detach().clone() for p in model.parameters() if step % 3 == 0)]
        return [*seen, *(p.detach().clone() for p in model.parameters())]

    def make() -> torch.nn.Module:
        torch.manual_seed(5)
        return Net()

    theirs = make()
    wrapped = DistributedDataParallel(theirs)
    job = Job(None)
    expected = train(wrapped, kinds[optimizer](theirs.parameters()), job)
    with untimed_links():
        job = Job(strategy, make=make, single=True, optimize=lambda model: kinds[optimizer](model.parameters()))
        mine = train(job.model, job.optimizer, job)
    equal = [torch.equal(a, b) for a, b in zip(mine, expected, strict=True)]
    return {"equal": all(equal), "mode": job.model.offbeat.mode}


def spread_as_with_ddp(kind: str) -> dict[str, float]:
    """Uses `module` and `no_sync()` of a model with split operators or full sharding; distances from one process."""
    x, y = Job(None).batch(0, size=8, rank=0)
    plain = Job(None)
    model = distributed_model(kind)
    model.load_state_dict(plain.model.state_dict())
    with torch.no_grad():
        error = (model.module(x) - plain.model(x)).abs().max().item()
    assert not hasattr(model.module, "module")
    optimizer = model._offbeat.optimizer
    for part in (slice(4), slice(4, 8)):
        F.cross_entropy(plain.model(x[part]), y[part]).backward()
        with model.no_sync() if part.start is None else nullcontext():
            F.cross_entropy(model(x[part]), y[part]).backward()
    torch.optim.SGD(plain.model.parameters(), lr=0.1).step()
    optimizer.step()
    state = plain.model.state_dict()
    worst = max((value - state[name]).abs().max().item() for name, value in model.state_dict().items())
    return {"output": error, "weights": worst}


def mistake(what: str) -> dict[str, Any]:
    """The sentence with which a mistake is refused."""
    try:
        with untimed_links():
            MISTAKES[what]()
    except OffbeatError as error:
        return {"refused": str(error)}
    return {"refused": ""}
