"""What a simulator is trained with: measured plans, and the schedule of the training. Needs no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.errors import OffbeatError
from offbeat.simulate.learned.features import Encoded


@dataclass(frozen=True)
class Schedule:
    """How a simulator is trained; the defaults are the paper's."""

    epochs: int = 200
    learning_rate: float = 1e-3
    decay: float = 0.3
    decay_epochs: tuple[int, ...] = (80, 160)
    clip: float = 0.25
    batch: int = 32
    """Plans in a batch; all pairs among them are compared."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 2:
            raise OffbeatError(f"schedule: {self.epochs} epochs with batches of {self.batch} plans train nothing")


@dataclass(frozen=True)
class Samples:
    """Plans of one domain with their measured seconds."""

    plans: Sequence[Encoded]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.plans) != len(self.seconds):
            raise OffbeatError(f"samples: {len(self.plans)} plans have {len(self.seconds)} times")
        if not all(0 < value < math.inf for value in self.seconds):
            raise OffbeatError("samples: every time must be positive and finite")
