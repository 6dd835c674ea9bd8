"""Find variables that a backward pass did not reach, on this rank or on any.

A variable some replica used is averaged with zeros from the others. One that no replica used must keep no gradient,
or momentum and weight decay would still move it; only all ranks together can know. The first step asks them; later ones
ask again only if it found such a variable, or if the user says so, as each question costs a small collective.
"""

import torch

from offbeat.errors import StrategyError
from offbeat.runtime.comm import Channel, Work


class UnusedParameters:
    """Finds the variables that no replica used."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], channel: Channel, track: bool | None) -> None:
        self.place = {name: index for index, name in enumerate(parameters)}
        self.channel = channel
        device = next(iter(parameters.values())).device
        self.used = torch.ones(len(parameters), dtype=torch.int32, device=device)
        self.track = track
        """Whether to ask the other ranks; None until the first step has shown whether it is needed."""
        self.work: Work | None = None
        self.nowhere: list[str] = []

    def backward_ended(self, absent: list[str]) -> None:
        """Starts asking the other ranks, if needed."""
        # Gradients that were forgotten leave their question on the wire, and this one uses the same memory.
        self.unused()
        self.nowhere = []
        if self.channel.size == 1:
            self.nowhere = absent
            return
        if self.track is False:
            if absent:
                raise StrategyError(
                    f"parameter {absent[0]!r} got no gradient in this step, but every parameter did in the first: "
                    f"pass find_unused_parameters=True to distribute(), so that ranks check this in every step"
                )
            return
        self.used.fill_(1)
        for name in absent:
            self.used[self.place[name]] = 0
        self.work = self.channel.all_reduce(self.used)

    def unused(self) -> list[str]:
        """Variables that no replica used in the last backward pass."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            counts = self.used.tolist()
            if self.track is None:
                self.track = min(counts) < self.channel.size
            self.nowhere = [name for name, count in zip(self.place, counts, strict=True) if not count]
        return self.nowhere
