"""A training script's way of working → how far Offbeat ends up from averaging by hand, or how a mistake is refused."""

from typing import Any

import guest_changes  # noqa: F401 - registers its patterns
import guest_loops  # noqa: F401 - as above
import guest_parameters  # noqa: F401 - as above
import torch
from guest_job import MAKERS, PATTERNS, Job
from guest_mistakes import MISTAKES
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
    return {"equal": equal, "error": worst, "trained": moved, "mode": ours.model.offbeat.mode}


def mistake(what: str) -> dict[str, Any]:
    """The sentence with which a mistake is refused."""
    try:
        with untimed_links():
            MISTAKES[what]()
    except OffbeatError as error:
        return {"refused": str(error)}
    return {"refused": ""}
