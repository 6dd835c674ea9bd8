"""A seed → a random training loop, run by the real engine on ranks in memory and by hand, and the first difference."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import loop_models
import torch
from in_memory import run_to_end
from loop_actions import ACTIONS, draw_optimizer, draw_way
from loop_job import TIMEOUT, Job, Way
from memory_job import MemoryJob, MemoryWorld

PARTIAL = ("other_heads", "backward_through_a_part")
"""Actions after which a step may leave parameters out, which find_unused_parameters is for."""


EXACT = {"all_reduce", "ddp", "horovod", "overlap", "partitioned_all_reduce", "random_axis_all_reduce", "tictac"}
SEEDS = range(2200)
OFTEN = SEEDS[:200]
"""Those of `make test`, whose loops are short; the others are those of `make test-slow`."""
Seen = list[tuple[int, str, torch.Tensor]]


@dataclass(frozen=True)
class Loop:
    """A training loop, written down."""

    seed: int
    world: int
    model: str
    optimizer: str
    way: Way
    find_unused: bool
    held_back: bool
    """The head's parameters are not given to the optimizer at first."""
    actions: tuple[tuple[str, int], ...]
    """Names, each with the seed of its choices."""

    def __str__(self) -> str:
        facts = ", ".join(f"{key}={getattr(self, key)!r}" for key in list(self.__dataclass_fields__)[:-1])
        return f"Loop({facts}, actions={self.actions!r})"


def draw_loop(seed: int) -> Loop:
    draw = Random(seed)
    model = draw.choice(sorted(loop_models.MODELS))
    optimizer = draw_optimizer(model, draw)
    find_unused = model == "heads" or draw.random() < 0.3
    names = [name for name in ACTIONS if find_unused or name not in PARTIAL]
    names = [name for name in names if model == "heads" or name != "other_heads"]
    weights = [ACTIONS[name][1] for name in names]
    length = draw.randint(10, 16 if seed in OFTEN else 40)
    actions = [(name, draw.randrange(10**6)) for name in draw.choices(names, weights, k=length)]
    return Loop(
        seed,
        draw.randint(2, 4),
        model,
        optimizer,
        draw_way(draw),
        find_unused,
        draw.random() < 0.2,
        (("ordinary_step", 0), *actions),
    )


def tolerance(loop: Loop) -> float:
    """None where whole variables are updated with sums in the order of the ring; else that of rounding."""
    ways = {loop.way[0]}
    for name, seed in loop.actions:
        if name == "switch":
            ways.add(draw_way(Random(seed))[0])
        elif name == "distribute_again":
            ways.add(draw_optimizer(loop.model, draw := Random(seed)) and draw_way(draw)[0])
    return 0.0 if ways <= EXACT and loop.model != "sparse" else 1e-12


def difference(loop: Loop, tolerance: float = 0.0) -> str:
    """What Offbeat and the reference do differently; empty if nothing."""

    def body(job: Job) -> None:
        for number, (name, seed) in enumerate(loop.actions):
            job.action = number
            try:
                ACTIONS[name][0](job, Random(seed))
            except Exception as error:
                error.add_note(f"in action {number}, {name}, on rank {job.world.rank}")
                raise
        job.action = len(loop.actions)

    return compare(loop, body, tolerance)


def compare(loop: Loop, body: Callable[[Job], None], tolerance: float = 0.0) -> str:
    """The same for a loop that is written as a function of each rank's job."""
    reference, failures = _run(loop, None, body)
    if failures:
        return f"the reference failed: {_report(failures[0])}"
    ours, errors = _run(loop, loop.way, body)
    if errors:
        return _report(errors[0])
    for rank, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        text = _compare(mine, theirs, tolerance)
        if text:
            return f"rank {rank}: {text}"
    return ""


def _report(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _compare(mine: Seen, theirs: Seen, tolerance: float) -> str:
    for (step, what, a), (_, other, b) in zip(mine, theirs, strict=False):
        if what != other:
            return f"action {step} sees {what}, the reference {other}"
        if a.shape != b.shape or not torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True):
            distance = float((a - b).abs().max()) if a.shape == b.shape else f"{a.shape} {b.shape}"
            return f"action {step} sees another {what}: {distance}"
    return "" if len(mine) == len(theirs) else f"{len(mine)} values seen, the reference saw {len(theirs)}"


def _run(loop: Loop, way: Way | None, body: Callable[[Job], None]) -> tuple[list[Seen], list[BaseException]]:
    """What each rank saw, and errors in the order in which they happened."""

    def rank(world: MemoryWorld) -> Seen:
        job = Job(world, loop.model, loop.optimizer, way, loop.find_unused, loop.held_back)
        body(job)
        job.see_all()
        job.close()
        return job.seen

    return run_to_end(MemoryJob(loop.world, seed=None if way is None else loop.seed, timeout=TIMEOUT), rank)


def shrink(loop: Loop, tolerance: float = 0.0) -> Loop:
    """The loop without the actions that its difference does not need."""
    size = len(loop.actions) // 2
    kind = difference(loop, tolerance)[:9]
    while size:
        start = 0
        while start < len(loop.actions):
            shorter = replace(loop, actions=loop.actions[:start] + loop.actions[start + size :])
            if shorter.actions and difference(shorter, tolerance)[:9] == kind:
                loop = shorter
            else:
                start += size
        size //= 2
    return loop
