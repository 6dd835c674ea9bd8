"""Convert between optimizer state spread over owners and the state dict of a single-device optimizer.

What every replica updates has its state on every replica already. What has an owner, or is spread over the ranks, is
put together from their parts when the state is saved, and taken apart when it is loaded. Saving is then a collective:
every rank must call `optimizer.state_dict()`, and every rank gets the whole.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.runtime.engine import Engine
from offbeat.runtime.retime import largest
from offbeat.runtime.unit_optimizer import Unit, UnitOptimizer

Held = tuple[Unit, dict[str, Any]]
"""A unit and the optimizer's state for it."""


def map_state(state_dict: dict[str, Any], change: Callable[[int, str, Any], Any]) -> dict[str, Any]:
    """An optimizer's state dict with every value of its state changed."""
    state = {
        index: {key: change(index, key, value) for key, value in held.items()}
        for index, held in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def gather_state(engine: Engine) -> dict[str, Any]:
    """The optimizer's state dict as a single device would have it."""
    engine.settle_all()
    optimizer = engine.training.optimizer
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = {id(parameter): number for number, parameter in enumerate(ordered)}
    # The training loop may have taken parameters out of the optimizer's groups; their state stays behind.
    strays = {key: optimizer.state.pop(key) for key in list(optimizer.state) if id(key) not in index}
    try:
        whole = engine.training.optimizer_class.state_dict(optimizer)
    finally:
        optimizer.state.update(strays)
    spread = _spread_variables(engine)
    if not spread:
        return whole
    if engine.roll_call is not None:
        engine.roll_call.meet()
    held = _held(engine)
    engine.owners.tell("state")
    commands = engine.channels.commands
    if commands is not None:
        for server in commands.servers:
            for name, tensor, ends, state in commands.receive(server):
                box = None if ends is None else tuple(slice(*each) for each in ends)
                held[name].append((Unit(engine.parameters[name], tensor, None, box), state))
    mine = {name: _kinds(*parts[0]) for name, parts in held.items()}
    # What this rank holds nothing of, another may.
    kinds = {name: keys for one in engine.channels.world.all_gather_object(mine) for name, keys in one.items()}
    for name in spread:
        parameter = engine.parameters[name]
        if name in kinds and id(parameter) in index:
            whole["state"][index[id(parameter)]] = {
                key: _assemble(engine, parameter, held[name], key, kind) for key, kind in sorted(kinds[name].items())
            }
    whole["state"] = dict(sorted(whole["state"].items()))
    return whole


def scatter_state(engine: Engine, whole: dict[str, Any]) -> None:
    """Loads a single device's state dict: every rank keeps the state it updates."""
    engine.settle_all()
    base = engine.training.optimizer
    engine.owners.tell("load", state=whole)
    engine.training.optimizer_class.load_state_dict(base, whole)
    _densify(engine)
    keep_parts(engine.updates.optimizers(), base)
    kept = {id(u.tensor) for o in engine.updates.optimizers() if not o.own_state for u in o.units}
    for name in _spread_variables(engine):
        if id(engine.parameters[name]) not in kept:
            base.state.pop(engine.parameters[name], None)


def keep_parts(optimizers: Iterable[UnitOptimizer], base: Optimizer) -> None:
    """Gives optimizers of pieces their parts of the state that `base` has loaded."""
    for optimizer in optimizers:
        if not optimizer.own_state:
            optimizer.optimizer.state = base.state
            continue
        for unit in optimizer.units:
            state = base.state.get(unit.parameter, {})
            optimizer.optimizer.state[unit.tensor] = {key: _part(unit, key, value) for key, value in state.items()}


def _densify(engine: Engine) -> None:
    """SGD's momentum of a sparse gradient is sparse, and cannot be added to where gradients arrive dense.

    Spread variables get dense state too, as it is put together.
    """
    sparse = {name for m in engine.plan.messages if m.synchronizer == "sparse_all_gather" for name in m.variables}
    dense = set(_spread_variables(engine)).union(engine.parameters.keys() - sparse)
    for name in dense:
        state = engine.training.optimizer.state.get(engine.parameters[name], {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                state[key] = value.to_dense()


def _spread_variables(engine: Engine) -> list[str]:
    """Variables whose state is not whole on every replica, or is kept apart with that of such variables."""
    names = {id(parameter): name for name, parameter in engine.parameters.items()}
    apart = {names[id(unit.parameter)] for each in engine.updates.optimizers() if each.own_state for unit in each.units}
    served = {name for each in engine.synchronisers if not each.replicated for name in each.message.variables}
    return sorted(apart | served)


def _held(engine: Engine) -> dict[str, list[Held]]:
    """The state that this rank holds of spread variables; of state on all replicas, only the first replica's."""
    names = {id(parameter): name for name, parameter in engine.parameters.items()}
    first = engine.plan.rank == engine.plan.replicas[0]
    owned = list(engine.owners.optimizers.values())
    held: dict[str, list[Held]] = defaultdict(list)
    for optimizer in engine.updates.optimizers():
        if optimizer in owned or (optimizer.own_state and first):
            for unit in optimizer.units:
                state = optimizer.optimizer.state.get(unit.tensor)
                if state:
                    held[names[id(unit.parameter)]].append((unit, state))
    return held


def _kinds(unit: Unit, state: dict[str, Any]) -> dict[str, str]:
    """For each key 'tensor' (of the variable's shape), 'count' (a number in a tensor) or 'none'."""
    return {
        key: "none" if value is None else "tensor" if _is_piece(key, value, unit.tensor) else "count"
        for key, value in state.items()
    }


def _is_piece(key: str, value: Any, like: torch.Tensor) -> bool:
    """Whether a state value has an element for each element of its variable, rather than being one number."""
    return key != "step" and isinstance(value, torch.Tensor) and value.shape == like.shape


def _assemble(engine: Engine, parameter: torch.nn.Parameter, parts: list[Held], key: str, kind: str) -> Any:
    if kind == "none":
        return None
    channel = engine.channels.control
    if kind == "count":
        number = max((float(state[key]) for _, state in parts), default=0.0)
        count = torch.tensor([number], dtype=torch.float64, device=parameter.device)
        return largest(channel, count)[0].to(torch.float32).cpu()
    whole = torch.zeros_like(parameter, requires_grad=False)
    for unit, state in parts:
        value = state[key]
        unit.write(whole, value.to_dense() if value.layout != torch.strided else value)
    if channel.size > 1:
        channel.all_reduce(whole).wait()
    return whole


def _part(unit: Unit, key: str, value: Any) -> Any:
    if _is_piece(key, value, unit.parameter):
        return unit.read(value).clone().view_as(unit.tensor)
    return value.clone() if isinstance(value, torch.Tensor) else value
