"""The states of a step, from the gradients' point of view.

    IDLE ──gradient──→ BACKWARD ──end──→ TRAVELLING ──wait──→ AVERAGED ──read──→ PUBLISHED
     ↑                                        └──────────────────┴── step() ──────────┘
     └── zero_grad() ── KEPT ←───────────────────────────────────────┘  (where owners keep averages)

A further backward pass before `step()` first goes to PUBLISHED, so that it adds to averaged gradients.
"""

from enum import Enum


class Phase(Enum):
    """What `parameter.grad` holds."""

    IDLE = "what autograd or the training loop has put there"
    BACKWARD = "what autograd is putting there"
    TRAVELLING = "nothing: averages are in flight"
    AVERAGED = "averages, where every replica applies the update"
    PUBLISHED = "averages, everywhere"
    KEPT = "after the step: nothing, if owners keep averages that were neither read nor dropped"

    @property
    def synchronised(self) -> bool:
        """A backward pass has been synchronised, and step() is to apply it."""
        return self in (Phase.TRAVELLING, Phase.AVERAGED, Phase.PUBLISHED)
