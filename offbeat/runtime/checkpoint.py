"""Optimizer state spread over owners ↔ the state dict of a single-device optimizer.

What every replica updates has its state on every replica already. What has an owner, or is spread over the ranks, is
put together from their parts when the state is saved, and taken apart when it is loaded. Saving is then a collective:
every rank must call `optimizer.state_dict()`, and every rank gets the whole.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from offbeat.runtime.channel import wait
from offbeat.runtime.updates import Unit, UnitOptimizer

if TYPE_CHECKING:
    from offbeat.runtime.engine import Engine


def gather_state(engine: "Engine") -> dict[str, Any]:
    """The optimizer's state dict as a single device would have it."""
    engine.settle_all()
    whole = engine.optimizer_class.state_dict(engine.optimizer)
    spread = _spread_variables(engine)
    if not spread:
        return whole
    names = {id(parameter): name for name, parameter in engine.parameters.items()}
    held: dict[str, list[tuple[Unit, dict[str, Any]]]] = {}
    for unit, state in _units(engine):
        held.setdefault(names[id(unit.parameter)], []).append((unit, state))
    kinds = _agreed_kinds({name: parts[0] for name, parts in held.items()})
    index = _state_index(engine)
    for name in spread:
        if name in kinds:
            parameter = engine.parameters[name]
            parts = held.get(name, [])
            whole["state"][index[id(parameter)]] = {
                key: _assemble(engine, parameter, parts, key, kind) for key, kind in sorted(kinds[name].items())
            }
    return whole


def scatter_state(engine: "Engine", whole: dict[str, Any]) -> None:
    """Loads a single device's state dict: every rank keeps what it updates."""
    engine.settle_all()
    base = engine.optimizer
    engine.optimizer_class.load_state_dict(base, whole)
    for optimizer in engine.unit_optimizers():
        if not optimizer.own_state:
            optimizer.optimizer.state = base.state
            continue
        for unit in optimizer.units:
            state = base.state.get(unit.parameter, {})
            optimizer.optimizer.state[unit.tensor] = {key: _part(unit, key, value) for key, value in state.items()}
    kept = {id(u.tensor) for o in engine.unit_optimizers() if not o.own_state for u in o.units}
    for name in _spread_variables(engine):
        if id(engine.parameters[name]) not in kept:
            base.state.pop(engine.parameters[name], None)


def _spread_variables(engine: "Engine") -> list[str]:
    """Variables whose state is not whole on every replica."""
    return sorted({name for parcel in engine.parcels if not parcel.replicated for name in parcel.message.variables})


def _units(engine: "Engine") -> Iterator[tuple[Unit, dict[str, Any]]]:
    """Units of spread variables with their state; of those that all replicas hold, the first replica's only."""
    first = engine.plan.rank == engine.plan.replicas[0]
    owned = list(engine.owned.values())
    for optimizer in engine.unit_optimizers():
        if optimizer in owned or (optimizer.own_state and first):
            yield from _with_state(optimizer)


def _with_state(optimizer: UnitOptimizer) -> Iterator[tuple[Unit, dict[str, Any]]]:
    for unit in optimizer.units:
        state = optimizer.optimizer.state.get(unit.tensor)
        if state:
            yield unit, state


def _agreed_kinds(mine: dict[str, tuple[Unit, dict[str, Any]]]) -> dict[str, dict[str, str]]:
    """For each variable and key: 'tensor' (of the variable's shape), 'count' (a number in a tensor) or 'none'."""
    kinds = {
        name: {key: _kind(key, value, unit) for key, value in state.items()} for name, (unit, state) in mine.items()
    }
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, kinds)
    return {name: keys for one in everybodys for name, keys in one.items()}


def _kind(key: str, value: Any, unit: Unit) -> str:
    if value is None:
        return "none"
    return "tensor" if _is_piece(key, value, unit.tensor) else "count"


def _is_piece(key: str, value: Any, like: torch.Tensor) -> bool:
    """Whether a state value has an element for each element of its variable, rather than being one number."""
    return key != "step" and isinstance(value, torch.Tensor) and value.shape == like.shape


def _assemble(
    engine: "Engine", parameter: torch.nn.Parameter, parts: list[tuple[Unit, dict[str, Any]]], key: str, kind: str
) -> Any:
    if kind == "none":
        return None
    channel = engine.channels.control
    if kind == "count":
        number = max((float(state[key]) for _, state in parts), default=0.0)
        counts = torch.tensor([number], dtype=torch.float64, device=parameter.device)
        gathered = counts.new_empty(channel.size)
        wait(channel.all_gather(gathered, counts))
        return gathered.max().to(torch.float32).cpu()
    whole = torch.zeros_like(parameter, requires_grad=False)
    for unit, state in parts:
        value = state[key]
        unit.write(whole, value.to_dense() if value.layout != torch.strided else value)
    if channel.size > 1:
        wait(channel.all_reduce(whole))
    return whole


def _part(unit: Unit, key: str, value: Any) -> Any:
    if _is_piece(key, value, unit.parameter):
        return unit.read(value).clone().view_as(unit.tensor)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _state_index(engine: "Engine") -> dict[int, int]:
    """The number a state dict gives each parameter."""
    ordered = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): index for index, parameter in enumerate(ordered)}
