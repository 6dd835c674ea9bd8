"""Variables that are frozen for the moment, as a discriminator is while the generator trains.

The plan stays, because such loops freeze and unfreeze in every iteration. Zeros are sent for a frozen variable and
nobody takes over the result: as in torch, `parameter.grad` stays what it was, and the optimizer does with it what it
would do on one device. A variable that stays frozen gets a plan without it.
"""

import torch

LONG_STEPS = 20
"""After so many steps a frozen variable counts as frozen for good: sending zeros then costs more than another plan."""


class FrozenVariables:
    """Which variables of a plan are frozen now, and which were since the last backward pass."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], allowed: bool) -> None:
        """`allowed` says whether the plan may stay: who updates pieces of variables needs a plan that fits."""
        self.names = {id(parameter): name for name, parameter in parameters.items()} if allowed else {}
        self.now: set[str] = set()
        self.lately: set[str] = set()
        """Those that were frozen at some time since the last backward pass."""
        self.steps = 0
        """Steps since the last change."""
        self.changes = 0
        self.held = False
        """The plan must stay for now, however long something is frozen."""

    def change(self, parameter: torch.Tensor, trains: bool) -> bool:
        """A parameter is frozen or unfrozen; whether the plan can stay."""
        self.changes += 1
        self.steps = 0
        name = self.names.get(id(parameter))
        if name is None:
            return False
        if trains:
            self.now.discard(name)
        else:
            self.now.add(name)
            self.lately.add(name)
        return True

    def spares(self, parameter: torch.Tensor) -> bool:
        """Whether it is frozen for the moment."""
        return self.names.get(id(parameter)) in self.now

    def adopt(self, other: "FrozenVariables") -> None:
        """Takes over from another plan of the same model."""
        self.changes, self.held = other.changes, other.held

    def step_ends(self) -> bool:
        """Whether a part is frozen for so long now that a plan without it is due."""
        self.steps += 0 < len(self.now) < len(self.names)
        return self.steps >= LONG_STEPS and not self.held

    def backward_ends(self) -> set[str]:
        """Variables that train now but were frozen at some time since the last backward pass."""
        thawed, self.lately = self.lately - self.now, set(self.now)
        return thawed
