"""Write a strategy with fsdp as the equivalent torch code, for a script without Offbeat."""

import re
from itertools import groupby

from offbeat.errors import StrategyError
from offbeat.strategy.model import Strategy


def torch_code(strategy: Strategy, device: str = "cuda") -> str:
    """Python that applies the strategy to `model`, once the process group is there; the optimizer is made behind it."""
    fsdp = strategy.fsdp
    if fsdp is None:
        raise StrategyError("torch_code: the strategy has no fsdp, so there is no equivalent torch code")
    world = "torch.distributed.get_world_size()"
    names = ', mesh_dim_names=("replicate", "shard")' if fsdp.replicas > 1 else ""
    shape = f"({fsdp.replicas}, {world} // {fsdp.replicas})" if fsdp.replicas > 1 else f"({world},)"
    types = {"param_dtype": fsdp.param_dtype, "reduce_dtype": fsdp.reduce_dtype}
    policy = ", ".join(f"{name}=torch.{value}" for name, value in types.items() if value)
    lines = [
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        "",
        f'mesh = init_device_mesh("{device}", {shape}{names})',
        f"options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy({policy}))",
        f"units = {_mapping({path: fsdp.reshard(path) for path in fsdp.wrapped})}",
    ]
    if strategy.accumulation > 1:
        lines.insert(3, f"# Split each batch into {strategy.accumulation} micro-batches, and add their gradients up.")
    if strategy.recompute:
        lines[1:1] = ["from functools import partial", "from torch.utils.checkpoint import checkpoint"]
        lines += [
            f"for path in {_mapping(dict.fromkeys(strategy.recompute, True))}:",
            "    module = model.get_submodule(path)",
            "    module.forward = partial(checkpoint, module.forward, use_reentrant=False)",
        ]
    lines += [
        "for path, reshard in units.items():",
        "    fully_shard(model.get_submodule(path), reshard_after_forward=reshard, **options)",
        f"fully_shard(model, reshard_after_forward={fsdp.reshard('')}, **options)",
    ]
    if fsdp.prefetch and fsdp.wrapped:
        lines += [
            "order = [model.get_submodule(path) for path in units]",
            'for row, phase in ((order, "forward"), (order[::-1], "backward")):',
            "    for place, unit in enumerate([model, *row[:-1]]):",
            f'        getattr(unit, f"set_modules_to_{{phase}}_prefetch")(row[place : place + {fsdp.prefetch}])',
        ]
    return "\n".join(lines) + "\n"


def _mapping(units: dict[str, bool | int]) -> str:
    """A dict's text, with members of a list that are treated alike in one comprehension."""
    texts = []
    for (pattern, value), run in groupby(units.items(), key=lambda item: (re.sub(r"\d+", "{i}", item[0]), item[1])):
        paths = [path for path, _ in run]
        numbers = [int(found[0]) for path in paths if (found := re.findall(r"\d+", path))]
        first = numbers[0] if numbers else 0
        if len(paths) > 2 and pattern.count("{i}") == 1 and numbers == list(range(first, first + len(paths))):
            texts.append(f'**{{f"{pattern}": {value} for i in range({first}, {first + len(paths)})}}')
        else:
            texts += [f'"{path}": {value}' for path in paths]
    return "{" + ", ".join(texts) + "}"
