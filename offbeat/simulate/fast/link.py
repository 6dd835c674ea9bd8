"""Numba kernels for the link: slices and the seconds of a step from units, borders, parts and urgencies.

`offbeat.simulate.fast.gradients` says what is modelled and makes the arrays.
"""

from collections import namedtuple
from typing import Any

import numpy as np

from offbeat.compiled import compiled

Arrays = namedtuple(
    "Arrays",
    "ready elements wire update overhead per_byte lag forward_order before as_it_arrives "
    "after backward gap update_call",
)
"""`Gradients` as the kernels take them; the fields are theirs."""
_Groups = namedtuple("_Groups", "group_of first ready wire update urgency elements parts")
"""Sums over the units of each group."""


@compiled
def serve(units: Any, borders: Any, parts: Any, urgency: Any, barrier: bool) -> Any:
    """Step seconds, slices (group, start, stop), their number, arrival of each group."""
    groups = _grouped(units, borders, parts, urgency)
    slices, made, arrival, ends = _serve_link(units, groups)
    return _finish(units, groups, slices, made, arrival, ends, barrier), slices, made, arrival


@compiled
def _grouped(units: Any, borders: Any, parts: Any, urgency: Any) -> Any:
    count = 0
    for unit in range(len(borders)):
        count += borders[unit]
    group_of = np.empty(len(borders), np.int64)
    first = np.empty(count, np.int64)
    ready, wire, update, least = np.zeros(count), np.zeros(count), np.zeros(count), np.full(count, np.inf)
    elements = np.zeros(count, np.int64)
    group = -1
    for unit in range(len(borders)):
        if borders[unit]:
            group += 1
            first[group] = unit
        group_of[unit] = group
        ready[group] = max(ready[group], units.ready[unit])
        wire[group] += units.wire[unit]
        update[group] += units.update[unit]
        elements[group] += units.elements[unit]
        least[group] = min(least[group], urgency[unit])
    cuts = np.empty(count, np.int64)
    for group in range(count):
        cuts[group] = max(1, min(parts[first[group]], elements[group]))
    return _Groups(group_of, first, ready, wire, update, least, elements, cuts)


@compiled
def _serve_link(units: Any, groups: Any) -> Any:
    """Slices, their number, when each group's last one has arrived, and when each has."""
    count = len(groups.first)
    slices = np.empty((groups.parts.sum(), 3), np.int64)
    ends = np.empty(len(slices))
    made = 0
    arrival = np.zeros(count)
    sent = np.zeros(count, np.int64)
    by_ready = np.argsort(groups.ready, kind="mergesort")
    # Ready groups, the most urgent last.
    waiting = np.empty(count, np.int64)
    size = 0
    arrived = 0
    now = 0.0
    while size or arrived < count:
        if size == 0:
            now = max(now, groups.ready[by_ready[arrived]])
        size, arrived = _admit(waiting, size, arrived, by_ready, groups, now)
        size -= 1
        group = waiting[size]
        head = groups.first[group]
        begin = _edge(groups, group, sent[group])
        stop = begin
        now += units.overhead[head]
        while True:
            sent[group] += 1
            reached = _edge(groups, group, sent[group])
            now += units.per_byte[head] * groups.wire[group] * (reached - stop) / groups.elements[group]
            stop = reached
            if sent[group] == groups.parts[group]:
                arrival[group] = now + units.lag[head]
                break
            size, arrived = _admit(waiting, size, arrived, by_ready, groups, now)
            if size and groups.urgency[waiting[size - 1]] < groups.urgency[group]:
                size = _queue(waiting, size, group, groups.urgency)
                break
        slices[made, 0] = group
        slices[made, 1] = begin
        slices[made, 2] = stop
        ends[made] = now + units.lag[head]
        made += 1
    return slices, made, arrival, ends


@compiled
def _edge(groups: Any, group: int, part: int) -> int:
    """Where a part begins: parts are as even as whole elements allow, the first ones one longer."""
    total, cuts = groups.elements[group], groups.parts[group]
    return part * (total // cuts) + min(part, total % cuts)


@compiled
def _admit(waiting: Any, size: int, arrived: int, by_ready: Any, groups: Any, now: float) -> Any:
    while arrived < len(by_ready) and groups.ready[by_ready[arrived]] <= now:
        size = _queue(waiting, size, by_ready[arrived], groups.urgency)
        arrived += 1
    return size, arrived


@compiled
def _finish(units: Any, groups: Any, slices: Any, made: int, arrival: Any, ends: Any, barrier: bool) -> float:
    """Seconds from the start of backward to the end of the next forward."""
    clock = units.backward
    if barrier:
        for group in range(len(arrival)):
            clock = max(clock, arrival[group])
        return clock + units.update_call + units.gap + units.after + units.before.sum() + units.update.sum()
    clock += units.gap
    update, applied = _updates(units, groups, slices, made, arrival, ends)
    settled = np.zeros(len(arrival), np.bool_)
    for place in range(len(units.forward_order)):
        clock += units.before[place]
        group = groups.group_of[units.forward_order[place]]
        if not settled[group]:
            settled[group] = True
            clock = max(clock + update[group], applied[group])
    return clock + units.after


@compiled
def _updates(units: Any, groups: Any, slices: Any, made: int, arrival: Any, ends: Any) -> Any:
    """Seconds of each group's update, and when it is done if only the link delays it."""
    update = units.update_call + groups.update
    applied = arrival + update
    for group in range(len(arrival)):
        if units.as_it_arrives[groups.first[group]]:
            update[group], applied[group] = 0.0, 0.0
    for position in range(made - 1, -1, -1):
        group, length = slices[position, 0], slices[position, 2] - slices[position, 1]
        if units.as_it_arrives[groups.first[group]]:
            update[group] += units.update_call + groups.update[group] * length / groups.elements[group]
            applied[group] = max(applied[group], ends[position] + update[group])
    return update, applied


@compiled
def _queue(waiting: Any, size: int, group: int, urgency: Any) -> int:
    position = size
    while position > 0 and urgency[waiting[position - 1]] < urgency[group]:
        waiting[position] = waiting[position - 1]
        position -= 1
    waiting[position] = group
    return size + 1
