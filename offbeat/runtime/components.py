"""Parcels of a plan → components: what is waited for and applied at once."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from offbeat.plan import Plan
from offbeat.runtime.parcels import Parcel, box_slices
from offbeat.runtime.portions import Portions
from offbeat.runtime.row_parcels import SparseParcel
from offbeat.runtime.updates import Unit, UnitOptimizer, group_of


class Component:
    """Parcels that are settled together because they hold parts of the same variables, and the update they allow."""

    def __init__(self, parcels: list[Parcel]) -> None:
        self.parcels = parcels
        self.optimizer: UnitOptimizer | None = None
        """Applies what every replica applies; None if it holds nothing of the kind."""
        self.portions: Portions | None = None
        """Applies the same slice by slice, where it has several and that can be done."""
        self.settled = True
        self.stale = any(parcel.message.staleness for parcel in parcels)

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return dict.fromkeys(parameter for parcel in self.parcels for parameter in parcel.parameters)


def make_components(
    plan: Plan, parcels: list[Parcel], optimizer: Optimizer, optimizer_class: type[Optimizer]
) -> list[Component]:
    """Groups parcels that share a variable, so that a variable is updated once, when all its shards are there."""
    components = [Component([parcels[index] for index in indices]) for indices in plan.components]
    slices = Counter(task.message for task in plan.tasks if task.stage == 0)
    for component in components:
        units = _replicated_units(component, optimizer)
        if units:
            component.optimizer = UnitOptimizer(optimizer, optimizer_class, units)
            parcel, *others = component.parcels
            if not others and slices[parcel.message.index] > 1 and Portions.fit(parcel, component.optimizer):
                component.portions = Portions(parcel, component.optimizer)
    return components


def _replicated_units(component: Component, optimizer: Optimizer) -> list[Unit]:
    """Variables are updated whole; where some shards have an owner, the replicated ones are units of their own."""
    optimized = group_of(optimizer)
    owned = {id(p) for parcel in component.parcels if not parcel.replicated for p in parcel.parameters}
    units: dict[object, Unit] = {}
    for parcel in component.parcels:
        if not parcel.replicated:
            continue
        for place, (piece, parameter) in enumerate(zip(parcel.message.pieces, parcel.parameters, strict=True)):
            if id(parameter) not in optimized:
                continue
            if id(parameter) not in owned:
                units[id(parameter)] = Unit(parameter, parameter)
                continue
            box = box_slices(piece)
            tensor = torch.nn.Parameter(parameter.data[box])
            if isinstance(parcel, SparseParcel):
                parcel.unit = tensor
                units[piece] = Unit(parameter, tensor, None, box)
            else:
                units[piece] = Unit(parameter, tensor, parcel.views[place], box)
    return list(units.values())
