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

from offbeat.errors import StrategyError
from offbeat.runtime.engine import Engine
from offbeat.runtime.retime import largest
from offbeat.runtime.unit_optimizer import Unit, UnitOptimizer, group_of

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
    state = held_state(optimizer)
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = {id(parameter): number for number, parameter in enumerate(ordered)}
    # The training loop may have taken parameters out of the optimizer's groups; their state stays behind.
    strays = {key: state.pop(key) for key in list(state) if id(key) not in index}
    try:
        with engine.updates.at_work():
            whole = engine.training.optimizer_class.state_dict(optimizer)
    finally:
        state.update(strays)
    for parameter, assembled in _spread_state(engine).items():
        if id(parameter) in index:
            whole["state"][index[id(parameter)]] = assembled
    whole["state"] = dict(sorted(whole["state"].items()))
    return whole


def unite_state(engine: Engine) -> None:
    """Puts all state into the user's optimizer, on every rank."""
    engine.settle_all()
    held_state(engine.training.optimizer).update(_spread_state(engine))


def divide_state(engine: Engine) -> None:
    """Every rank keeps the state that it updates, of what is in the user's optimizer."""
    base = engine.training.optimizer
    _densify(engine)
    keep_parts(engine.updates.optimizers(), base)
    kept = {id(u.tensor) for o in engine.updates.optimizers() if not o.own_state for u in o.units}
    # What nobody updates stays where it is, until its variable comes back to the optimizer's groups.
    divided = group_of(base).keys() - kept
    for name in _spread_variables(engine):
        if id(engine.parameters[name]) in divided:
            held_state(base).pop(engine.parameters[name], None)


def state_to_read(engine: Engine) -> dict[torch.Tensor, dict[str, Any]]:
    """What the training loop or the optimizer itself gets as `optimizer.state`."""
    if not engine.updates.applying:
        engine.settle_all()
        if _is_spread(engine):
            return SpreadState(engine.plan.strategy.name)
    return held_state(engine.training.optimizer)


def replace_state(engine: Engine, state: dict[torch.Tensor, dict[str, Any]]) -> None:
    """The training loop puts another dictionary in the place of `optimizer.state`."""
    engine.settle_all()
    if _is_spread(engine):
        SpreadState(engine.plan.strategy.name).clear()
    vars(engine.training.optimizer)["state"] = state
    keep_parts(engine.updates.optimizers(), engine.training.optimizer)


def _is_spread(engine: Engine) -> bool:
    """Whether ranks hold parts of the state. Before the first step there is none, which libraries look at."""
    apart = (each.optimizer.state for each in engine.updates.optimizers() if each.own_state)
    return not engine.all_replicated and (engine.steps > 0 or any(apart))


class SpreadState(dict):
    """`optimizer.state` where ranks hold parts of it: torch's checkpoints ask whether there is any; nothing else is
    answered."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy

    def __bool__(self) -> bool:
        return True

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise StrategyError(
            f"optimizer.state: strategy {self.strategy!r} spreads it over the ranks; call optimizer.state_dict() on "
            f"every rank, and optimizer.load_state_dict() to change it"
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse
    get = keys = values = items = pop = popitem = update = setdefault = clear = _refuse


def held_state(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """What the optimizer object itself holds, as it is."""
    state: dict[torch.Tensor, dict[str, Any]] = vars(optimizer)["state"]
    return state


def _spread_state(engine: Engine) -> dict[torch.Tensor, dict[str, Any]]:
    """The whole state of variables whose state is spread; every rank must call it."""
    spread = _spread_variables(engine)
    if not spread:
        return {}
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
    return {
        engine.parameters[name]: {
            key: _assemble(engine, engine.parameters[name], held[name], key, kind)
            for key, kind in sorted(kinds[name].items())
        }
        for name in spread
        if name in kinds
    }


def scatter_state(engine: Engine, whole: dict[str, Any]) -> None:
    """Loads a single device's state dict: every rank keeps the state it updates."""
    engine.settle_all()
    base = engine.training.optimizer
    engine.owners.tell("load", state=whole)
    with engine.updates.at_work():
        engine.training.optimizer_class.load_state_dict(base, whole)
    divide_state(engine)


def keep_parts(optimizers: Iterable[UnitOptimizer], base: Optimizer) -> None:
    """Gives optimizers of pieces their parts of the state that `base` has loaded."""
    for optimizer in optimizers:
        if not optimizer.own_state:
            optimizer.optimizer.state = held_state(base)
            continue
        for unit in optimizer.units:
            state = held_state(base).get(unit.parameter, {})
            optimizer.optimizer.state[unit.tensor] = {key: _part(unit, key, value) for key, value in state.items()}


def _densify(engine: Engine) -> None:
    """SGD's momentum of a sparse gradient is sparse, and cannot be added to where gradients arrive dense.

    Spread variables get dense state too, as it is put together.
    """
    sparse = {name for m in engine.plan.messages if m.synchronizer == "sparse_all_gather" for name in m.variables}
    dense = set(_spread_variables(engine)).union(engine.parameters.keys() - sparse)
    for name in dense:
        state = held_state(engine.training.optimizer).get(engine.parameters[name], {})
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
    """For each key the type of a tensor of the variable's shape, 'count' (a number in a tensor) or 'none'."""
    return {
        key: "none" if value is None else str(value.dtype) if _is_piece(key, value, unit.tensor) else "count"
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
    whole = torch.zeros_like(parameter, requires_grad=False, dtype=getattr(torch, kind.removeprefix("torch.")))
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
