"""What `parameter.grad` shows between two backward passes.

A message that is loaded takes its gradients away: `parameter.grad` is empty until the average is shown there. So
nothing that autograd adds meanwhile can get into a buffer that is on the wire, and whatever is found there when the
average comes is a fresh gradient to be added to it. Somebody who reads `parameter.grad` earlier waits for the average.

The states of a step:

    IDLE ──gradient──→ BACKWARD ──end──→ TRAVELLING ──wait──→ AVERAGED ──read──→ PUBLISHED
     ↑                                        └──────────────────┴── step() ──────────┘
     └── zero_grad() ── KEPT ←───────────────────────────────────────┘  (where owners keep averages)

A further backward pass before `step()` first goes to PUBLISHED, so that it adds to averaged gradients.
"""

from collections import Counter
from collections.abc import Collection
from enum import Enum

import torch

from offbeat.errors import StrategyError
from offbeat.runtime.comm import Channel, Work
from offbeat.runtime.engine.components import Component
from offbeat.runtime.engine.frozen import FrozenVariables
from offbeat.runtime.engine.owners import Owners
from offbeat.runtime.engine.training import Training
from offbeat.runtime.faults import explain
from offbeat.runtime.lazy import outside_inference_mode, raw_gradient, set_gradient, without_grad
from offbeat.runtime.sync import Synchroniser, box_slices

_NONE: frozenset[int] = frozenset()


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


class UnusedParameters:
    """Finds the variables that no replica used.

    A variable some replica used is averaged with zeros from the others. One that no replica used must keep no gradient,
    or momentum and weight decay would still move it; only all ranks together can know. The first step asks them; later
    ones ask again only if it found such a variable, or if the user says so, as each question costs a small collective.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], channel: Channel, track: bool | None) -> None:
        self.place = {name: index for index, name in enumerate(parameters)}
        self.channel = channel
        device = next(iter(parameters.values())).device
        self.used = torch.ones(len(parameters), dtype=torch.int32, device=device)
        self.track = track
        """Whether to ask the other ranks; None until the first step has shown whether it is needed."""
        self.work: Work | None = None
        self.nowhere: list[str] = []

    def backward_ended(self, absent: list[str], thawed: Collection[str] = ()) -> None:
        """Starts asking the other ranks, if needed; variables in `thawed` may have been frozen in the forward."""
        # Gradients that were forgotten leave their question on the wire, and this one uses the same memory.
        self.unused()
        self.nowhere = []
        if self.channel.size == 1:
            self.nowhere = absent
            return
        if self.track is False:
            if lost := [name for name in absent if name not in thawed]:
                raise StrategyError(
                    f"parameter {lost[0]!r} got no gradient in this step, but every parameter did in the first: "
                    f"pass find_unused_parameters=True to distribute(), so that ranks check this in every step"
                )
            if not thawed:
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


class Gradients:
    """The gradients of one plan's messages on one rank."""

    def __init__(
        self,
        training: Training,
        components: list[Component],
        owners: Owners,
        unused: UnusedParameters,
        frozen: FrozenVariables,
    ) -> None:
        self.training = training
        self.parameters = training.parameters
        self.components = components
        self.component_of_message = {index: each for each in components for index in each.messages}
        self.owners = owners
        self.unused = unused
        self.frozen = frozen
        self.phase = Phase.IDLE
        self.in_rounds = [each for each in training.synchronisers if each.replicated and each.later_rounds]
        """Messages that all ranks must finish in one order, whichever they need first."""
        self.dropped: frozenset[int] | None = None
        """Parameters (by id) without a gradient at step(), if the training loop has seen the averages before."""
        self.carried = Counter(name for each in training.plan.messages for name in each.variables)
        """The number of messages in which each variable is sent."""
        self.untaken = self.carried.copy()
        """Of these, the number not loaded in this pass."""

    # Backward

    def backward_begins(self) -> None:
        """Gradients in flight or kept elsewhere must be shown first, because the pass adds to them."""
        self.publish_all()
        self.owners.prepared = self.owners.reduced = False
        self.phase = Phase.BACKWARD
        self.untaken = self.carried.copy()

    def take(self, index: int) -> None:
        """Loads a message: its gradients now belong to the synchroniser."""
        synchroniser = self.training.synchronisers[index]
        if self.frozen.now:
            self._load_beside_frozen(synchroniser)
        else:
            synchroniser.load()
        if synchroniser.relaxed:
            return
        hidden = self.component_of_message[index].hidden
        for name in synchroniser.message.variables:
            self.untaken[name] -= 1
            if not self.untaken[name] and name not in self.frozen.now:
                parameter = self.parameters[name]
                hidden.add(id(parameter))
                set_gradient(parameter, None)

    def _load_beside_frozen(self, synchroniser: Synchroniser) -> None:
        """Loads a message without the gradients that frozen variables have kept."""
        frozen = [self.parameters[name] for name in synchroniser.message.variables if name in self.frozen.now]
        kept = [raw_gradient(parameter) for parameter in frozen]
        for parameter in frozen:
            set_gradient(parameter, None)
        # Averages that are shown lie in the buffer.
        kept = [gradient if gradient is None else gradient.clone() for gradient in kept]
        synchroniser.load()
        for parameter, gradient in zip(frozen, kept, strict=True):
            set_gradient(parameter, gradient)

    def lacking(self, arrived: Counter[str]) -> list[str]:
        """Variables that neither this backward pass nor an earlier one of the same step has reached."""
        missing = (name for name in self.carried if not arrived[name] and name not in self.frozen.now)
        return [name for name in missing if raw_gradient(self.parameters[name]) is None]

    # Averages

    def finish(self, synchroniser: Synchroniser) -> None:
        """Finishes a message and, if ranks could otherwise disagree on the order, those before it."""
        rounds = self.in_rounds
        earlier = rounds[: rounds.index(synchroniser)] if synchroniser in rounds else []
        for each in (*earlier, synchroniser):
            if each.loaded:
                with explain(self.training.plan, each):
                    each.finish()

    def average(self) -> None:
        """Waits until `parameter.grad` holds the average, for everything that all replicas apply."""
        if self.phase is Phase.TRAVELLING:
            for component in self.components:
                self.show(component)
            self.phase = Phase.AVERAGED

    def publish(self) -> None:
        """Also shows the averages that owners have: they send them to every replica."""
        self.average()
        if self.phase is Phase.AVERAGED:
            self.owners.reduce()
            self._publish()
            self.phase = Phase.PUBLISHED

    def publish_all(self) -> None:
        """Puts all averages into `parameter.grad` on every replica, before or after a step."""
        self.publish()
        if self.phase is Phase.KEPT:
            self.publish_kept()

    def publish_kept(self) -> None:
        """After the step: sends averages that owners keep to every replica, unless they were dropped."""
        self._publish()
        self.phase = Phase.IDLE

    def _publish(self) -> None:
        for component in self.components:
            for synchroniser in component.synchronisers if component.hidden else ():
                if not synchroniser.replicated:
                    self.owners.publish(synchroniser)
            self.show(component, published=True)

    @outside_inference_mode
    @without_grad
    def show(self, component: Component, *, published: bool = False) -> None:
        """Puts the averages into `parameter.grad`, and what autograd has added there meanwhile on top of them.

        Only those that every replica has: of all parameters if they are `published`, else of those without owners.
        """
        for synchroniser in component.synchronisers:
            # What is sent for frozen variables is shown nowhere.
            if synchroniser.replicated and (component.hidden or not component.relaxed):
                self.finish(synchroniser)
        if not component.hidden:
            return
        unused = self.unused_parameters()
        if not unused and len(component.hidden) == len(component.averages):
            component.hidden.clear()
            for parameter, average in component.averages:
                fresh = raw_gradient(parameter)
                if fresh is not None and fresh is not average:
                    average.add_(fresh)
                set_gradient(parameter, average)
            return
        for parameter, pieces in component.pieces.items():
            if id(parameter) not in component.hidden or not (published or all(each.replicated for each, _ in pieces)):
                continue
            component.hidden.remove(id(parameter))
            if id(parameter) in unused:
                continue
            average, fresh = _assembled(parameter, pieces), raw_gradient(parameter)
            if fresh is not None and fresh is not average:
                average = average.add_(fresh) if average.layout == torch.strided else average + fresh
            set_gradient(parameter, average)

    def unused_parameters(self) -> frozenset[int]:
        """Parameters, by id, that no replica used: they keep no gradient, so that the optimizer leaves them alone."""
        if self.unused.work is None and not self.unused.nowhere:
            return _NONE
        with explain(self.training.plan, what="word of which variables each rank used"):
            return frozenset(id(self.parameters[name]) for name in self.unused.unused())

    # What the training loop does with them

    def adopt(self) -> None:
        """Treats the content of `parameter.grad` as averages, because step() is called without a backward pass."""
        self.publish_all()
        self.owners.prepared = self.owners.reduced = True
        self.phase = Phase.PUBLISHED

    def take_back(self) -> None:
        """Takes published gradients back for the update, because the training loop may have changed them."""
        self.dropped = None
        if self.phase is Phase.PUBLISHED:
            for synchroniser in self.training.synchronisers:
                if not synchroniser.relaxed:
                    synchroniser.reload()
            self.dropped = frozenset(id(p) for p in self.parameters.values() if raw_gradient(p) is None)

    def discard(self) -> None:
        """Waits for the gradients in flight, and drops them."""
        self.owners.tell("discard")
        self.owners.prepare()
        for synchroniser in self.training.synchronisers:
            if synchroniser.replicated and not synchroniser.relaxed:
                self.finish(synchroniser)
            else:
                with explain(self.training.plan, synchroniser):
                    synchroniser.drop()
        for component in self.components:
            component.hidden.clear()
        self.phase = Phase.IDLE

    def step_ends(self) -> None:
        """The step is applied, or will be when parameters are needed."""
        self.phase = Phase.KEPT if self.owners.tail and self.phase is not Phase.PUBLISHED else Phase.IDLE


def _assembled(parameter: torch.nn.Parameter, pieces: list[tuple[Synchroniser, int]]) -> torch.Tensor:
    """The averaged gradient of a variable, from that of its pieces."""
    first, place = pieces[0]
    averages = [synchroniser.averaged(other) for synchroniser, other in pieces]
    sparse = [average.layout != torch.strided for average in averages]
    if all(sparse):
        average = sum(averages[1:], averages[0]).coalesce()
        return average.to_dense() if first.densify else average
    if len(pieces) == 1 and first.whole[place]:
        return averages[0]
    whole = torch.zeros_like(parameter, requires_grad=False)
    for (synchroniser, other), average, rows in zip(pieces, averages, sparse, strict=True):
        box = box_slices(synchroniser.message.pieces[other])
        whole[box] = average.to_dense()[box] if rows else average
    return whole
