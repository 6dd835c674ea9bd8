"""Notice that only some ranks have come to a point where all must meet.

Scripts written for DDP save an optimizer by `if rank == 0: torch.save(optimizer.state_dict())`. Where its state is
spread over ranks, that rank would wait for the others until the backend gives up. So each rank says in the job's store
that it has come, and how many backward passes it has begun: one that has begun a pass more than the rank that waits has
gone on training, and will not come.
"""

from offbeat.errors import StrategyError
from offbeat.plan import Plan
from offbeat.runtime.comm import Channels
from offbeat.runtime.faults import explain


class RollCall:
    """Where the replicas of one plan meet to put the optimizer's state together."""

    def __init__(self, plan: Plan, channels: Channels) -> None:
        self.plan = plan
        self.world = channels.world
        self.key = f"offbeat/{channels.generation}/state"
        self.met = 0
        """How often all ranks have met."""
        self.passes = 0
        self.in_step = not any(message.asynchronous for message in plan.messages)
        """Whether all ranks take the same steps."""
        self._say_passes()

    def backward_begins(self) -> None:
        self.passes += 1
        self._say_passes()

    def _say_passes(self) -> None:
        self.world.set(f"{self.key}/passes/{self.world.rank}", str(self.passes).encode())

    def meet(self) -> None:
        """Waits for all replicas; StrategyError if one of them has gone on instead."""
        here = f"{self.key}/{self.met}"
        self.world.set(f"{here}/{self.world.rank}", b"")
        with explain(self.plan, what="optimizer.state_dict() to be called on every rank, which this strategy needs"):
            self.world.wait_for([f"{here}/{rank}" for rank in self.plan.replicas], self._check)
        self.met += 1

    def _check(self) -> None:
        for rank in self.plan.replicas if self.in_step else ():
            if int(self.world.get(f"{self.key}/passes/{rank}")) > self.passes:
                raise StrategyError(
                    f"optimizer.state_dict(): rank {self.world.rank} asks for the optimizer's state while rank {rank} "
                    f"goes on training, but strategy {self.plan.strategy.name!r} spreads it over the ranks; call "
                    f"state_dict() on every rank, and save what it returns on one"
                )
