"""Convert between arrangements of a step's gradients and strategies."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from offbeat.simulate.fast.gradients import Arrangement, Gradients
from offbeat.strategy import Schedule, Slice, Strategy, VariableConfig

MOST_PARTS = 64
"""More cuts than this of one message are not tried."""


def rescheduled(strategy: Strategy, **changes: Any) -> Strategy:
    """The strategy with other fields of its schedule."""
    return strategy.model_copy(update={"schedule": strategy.schedule.model_copy(update=changes)})


def arrangement_of(gradients: Gradients, strategy: Strategy) -> Arrangement:
    """The arrangement closest to a strategy: its groups, as far as they are neighbours here, and its parts."""
    groups = [strategy.config(names[0]).shards[0].group for names in gradients.names]
    alone = [i == 0 or group is None or group != groups[i - 1] for i, group in enumerate(groups)]
    borders = np.array(alone, np.bool_) | gradients.forced
    parts = np.ones(len(gradients), np.int64)
    if strategy.schedule.slice_bytes is not None:
        parts = gradients.even_parts(borders, strategy.schedule.slice_bytes)
    shortest: dict[int, int] = {}
    for item in strategy.schedule.order:
        shortest[item.group] = min(shortest.get(item.group, item.stop), item.stop - item.start)
    for units in gradients.groups(borders) if shortest else ():
        total = int(gradients.elements[list(units)].sum())
        length = shortest.get(groups[units[0]] or 0, total)
        parts[units[0]] = min(MOST_PARTS, max(1, round(total / length)))
    return replace(gradients.arrangement(barrier=strategy.schedule.mode == "barrier"), borders=borders, parts=parts)


def arranged(gradients: Gradients, arrangement: Arrangement, base: Strategy) -> Strategy:
    """`base` with the groups, slices and order of an arrangement."""
    _, slices, made, _ = gradients.run(arrangement)
    order = ((int(group), int(start), int(stop)) for group, start, stop in slices[:made])
    return explicit(gradients, gradients.groups(arrangement.borders), order, base, barrier=arrangement.barrier)


def explicit(
    gradients: Gradients,
    groups: Iterable[tuple[int, ...]],
    order: Iterable[tuple[int, int, int]],
    base: Strategy,
    *,
    barrier: bool = False,
) -> Strategy:
    """`base` with these groups of units, and (group, start, stop) in this order."""
    configs: dict[str, VariableConfig] = {}
    for number, units in enumerate(groups):
        for unit in units:
            shard = gradients.shards[unit].model_copy(update={"group": number})
            configs |= dict.fromkeys(gradients.names[unit], VariableConfig(shards=(shard,)))
    kept = base.schedule.mode if base.schedule.mode != "barrier" else "auto"
    issued = tuple(Slice(group=group, start=start, stop=stop) for group, start, stop in order)
    schedule = Schedule(
        policy="explicit" if issued else "fifo",
        order=issued,
        # Only one message at a time keeps the order: two in flight share the link.
        in_flight=1,
        mode="barrier" if barrier else kept,
    )
    # Variables keep the order of the base, so that two strategies compare line by line.
    return base.model_copy(update={"variables": {**base.variables, **configs}, "schedule": schedule})
