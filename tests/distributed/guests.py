"""A training script's way of working → how far Offbeat ends up from averaging by hand, or how a mistake is refused."""

from typing import Any

import guest_changes  # noqa: F401 - registers its patterns
import guest_loops  # noqa: F401 - as above
import guest_parameters  # noqa: F401 - as above
import torch
from guest_job import MAKERS, PATTERNS, Job, Net
from torch.nn.parallel import DistributedDataParallel
from training import untimed_links

import offbeat
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


def mistake(what: str) -> dict[str, Any]:
    """The sentence with which a mistake is refused."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        match what:
            case "ddp before":
                offbeat.distribute(DistributedDataParallel(net), optimizer)
            case "ddp after":
                DistributedDataParallel(offbeat.distribute(net, optimizer, "overlap")[0])
            case "fsdp before":
                from torch.distributed.fsdp import fully_shard

                fully_shard(net)
                offbeat.distribute(net, optimizer)
            case "fsdp after":
                from torch.distributed.fsdp import fully_shard

                fully_shard(offbeat.distribute(net, optimizer, "overlap")[0])
            case "zero redundancy":
                from torch.distributed.optim import ZeroRedundancyOptimizer

                optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
                offbeat.distribute(net, optimizer, "overlap")
            case "absent later":
                model, _ = offbeat.distribute(net, optimizer, "overlap")
                model(torch.ones(2, 9)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                model.first(torch.ones(2, 9)).sum().backward()
    except OffbeatError as error:
        return {"refused": str(error)}
    return {"refused": ""}
