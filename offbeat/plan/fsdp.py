"""The message stages of FSDP2's units, each with its place in the step.

As torch's `fully_shard` does it: a unit's variables are gathered before its forward, again before its backward where
they were freed in between, and its gradients are reduced and scattered when its backward has ended. Each gather is
issued when the unit `prefetch` places ahead of it begins. With `replicas`, gradients are then summed over the groups of
ranks that hold all parts. Every further micro-batch gathers and reduces anew.
"""

from dataclasses import replace
from typing import NamedTuple

from offbeat.graph.model import ITEM_BYTES, within
from offbeat.plan.model import Draft, Message, Stage, Window
from offbeat.strategy import FullyShard

Groups = tuple[tuple[tuple[int, ...], int | None], ...]


class _Span(NamedTuple):
    """The segments in which a unit computes, in one phase of one micro-batch."""

    first: int
    last: int


def shard_units(draft: Draft) -> None:
    """Gives the messages of a strategy with fsdp their sizes and stages; others are left alone."""
    fsdp = draft.strategy.fsdp
    if fsdp is None:
        return
    ranks, shards = draft.replicas, len(draft.replicas) // fsdp.replicas
    parts: Groups = tuple((ranks[start : start + shards], None) for start in range(0, len(ranks), shards))
    copies: Groups = tuple((ranks[start::shards], None) for start in range(shards)) if fsdp.replicas > 1 else ()
    units = {message.index: fsdp.unit_of(message.variables[0]) for message in draft.messages}
    spans, turns = _spans(draft, fsdp)
    windows = _windows(draft, fsdp, spans, turns)

    def reduced(unit: str, turn: int) -> list[Stage]:
        behind = spans.get((unit, turn, True), spans["", turn, True]).last
        window = Window(behind, len(draft.segments), behind)
        stages = [Stage("reduce_scatter", parts, window=window)]
        return [*stages, Stage("all_reduce", copies, window=window)] if copies else stages

    for message in list(draft.messages):
        unit = units[message.index]
        stages = [*reduced(unit, turns - 1), Stage("update", ((ranks, None),))]
        for turn in range(turns):
            for backward in (False, True):
                window = windows.get((unit, turn, backward))
                if window is not None:
                    group = fsdp.reshard(unit) if backward else True
                    smaller = parts if isinstance(group, bool) else _cut(parts, group)
                    stages.append(Stage("all_gather", smaller, returns=True, window=window))
            if turn < turns - 1 and draft.strategy.accumulation > 1:
                stages += reduced(unit, turn)
        draft.stages[message.index] = tuple(stages)
        draft.messages[message.index] = _sized(message, fsdp, draft, unit)


def _cut(groups: Groups, size: int) -> Groups:
    """Divides each group into groups of `size` consecutive members."""
    return tuple((ranks[at : at + size], None) for ranks, _ in groups for at in range(0, len(ranks), size))


def _sized(message: Message, fsdp: FullyShard, draft: Draft, unit: str) -> Message:
    """With the bytes of its gradients and of its gathered variables; frozen ones of a unit travel with the others."""
    computed = fsdp.param_dtype or message.dtype
    frozen = sum(c.elements for c in draft.graph.constants if c.kind == "frozen" and fsdp.unit_of(c.name) == unit)
    return replace(
        message,
        gradient_bytes=message.elements * ITEM_BYTES[fsdp.reduce_dtype or computed],
        parameter_bytes=(message.elements + frozen) * ITEM_BYTES[computed],
    )


def _spans(draft: Draft, fsdp: FullyShard) -> tuple[dict[tuple[str, int, bool], _Span], int]:
    """By unit, micro-batch and whether backward: where the unit computes; and the number of micro-batches.

    The model itself begins with the phase and ends with it. Units around a unit are at work with it.
    """
    units_of: dict[str, tuple[str, ...]] = {}
    spans: dict[tuple[str, int, bool], _Span] = {}
    for number, segment in enumerate(draft.segments):
        touched = {""}
        for name in segment.operators:
            module = draft.graph.operator(name).module
            if module not in units_of:
                units_of[module] = tuple(path for path in fsdp.wrapped if within(module, path))
            touched.update(units_of[module])
        for unit in touched:
            key = unit, segment.microbatch, segment.phase == "backward"
            spans[key] = _Span(spans[key].first if key in spans else number, number)
    return spans, 1 + max((segment.microbatch for segment in draft.segments), default=0)


def _windows(
    draft: Draft, fsdp: FullyShard, spans: dict[tuple[str, int, bool], _Span], turns: int
) -> dict[tuple[str, int, bool], Window]:
    """When each unit is gathered, by the keys of `spans`."""
    # A GPU's kernels are queued well ahead, so that its next gather begins while the present unit computes.
    implicit = draft.cluster.device_of(draft.replicas[0]).device != "cpu"
    windows: dict[tuple[str, int, bool], Window] = {}
    for turn in range(turns):
        for backward in (False, True):
            here = {key[0]: span for key, span in spans.items() if key[1:] == (turn, backward)}
            # The model itself goes first; units that begin together in the order of wrapping, or backward's reverse.
            wrapped = ["", *(reversed(fsdp.wrapped) if backward else fsdp.wrapped)]
            order = sorted((unit for unit in wrapped if unit in here), key=lambda unit: here[unit].first)
            depth = max(fsdp.prefetch, 1 if backward or implicit else 0)
            for place, unit in enumerate(order):
                kept = fsdp.reshard(unit) is False
                if backward and kept:
                    continue
                ahead = here[order[max(0, place - depth)]].first
                until = spans.get((unit, turn, True), here[unit]).last if kept else here[unit].last
                windows[unit, turn, backward] = Window(ahead, here[unit].first, until)
    return windows
