"""Time a model's blocks and encoders on this device, so that replay need not guess.

A block is run alone, forward and backward, on the shapes that the model gives it: as it is, compiled, recomputed, under
autocast; one way after another, since on processors compiled code brings threads of its own. On GPUs launching is timed
apart from the device's work (`stopwatch.py`). Called under autocast, all ways are those of a forward under it. Blocks
that are alike (`layers.0`, `layers.1`) are timed once, and what was timed is kept in the user's cache folder under what
it is: the modules' structure and code, shapes, element types, device, torch's version.

Modules that run one after another, each on what the one before returned, are one region from each weight matrix to the
next: a convolution with the normalisation and activation behind it. No large gradient then waits for another one.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.graph.blocks import blocks
from offbeat.graph.model import BlockTimes, Way
from offbeat.profile.stopwatch import LEAST_ROUNDS, MOST_ROUNDS, ROUNDS_SECONDS, Lap, Timer, time_laps
from offbeat.runtime.fusion import compiled, in_turn
from offbeat.runtime.memory import autocast, recomputed
from offbeat.runtime.sync.encoders import make_encoder
from offbeat.strategy import Encoder
from offbeat.timeline.clock import clock_of
from offbeat.torch_private import pytree

ENCODED_SHAPE = (512, 1024)
"""A message of 2 MiB, as sliced ones are."""
Times = dict[Way, tuple[Lap, Lap]]
"""Forward and backward of each way."""
Errors = dict[Way, str]


@dataclass(frozen=True)
class Call:
    """How the model calls a module."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


def time_blocks(
    graph: ModelGraph,
    model: nn.Module,
    example_inputs: Any,
    ways: Sequence[Way] = ("compiled", "recomputed"),
    modules: Sequence[str] | None = None,
) -> tuple[ModelGraph, list[str]]:
    """The graph with what its blocks take on the device where the model lies, as they are and in these ways; and notes
    on what could not be timed, and why.

    The blocks are those of `offbeat.graph.blocks` unless `modules` names others. The model's parameters, buffers and
    random numbers stay as they are.
    """
    inputs = example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise OffbeatError(f"{graph.name}: its blocks cannot be timed, because the model is on the meta device")
    with untouched(model):
        calls = _calls(model, modules or blocks(graph), inputs)
        regions = _regions(model, calls)
        kept = {path: (_detached(mine[0]), len(mine)) for path, mine in calls.items()}
        del calls
        wanted: list[tuple[tuple[str, ...], tuple[Way, ...]]] = [(region, ("eager", *ways)) for region in regions]
        if "recomputed" in ways:
            wanted += [((path,), ("eager", "recomputed")) for region in regions if len(region) > 1 for path in region]
        known: dict[str, tuple[Times, Errors]] = {}
        found, failed = [], dict[str, str]()
        for paths, asked in wanted:
            modules = [model.get_submodule(path) for path in paths]
            call, count = kept[paths[0]]
            key = _key(modules, call, asked)
            if key not in known:
                known[key] = _timed(key, modules, call, asked)
            times, errors = known[key]
            failed |= {f"{key} {way}": f"{' '.join(paths)}, {way}: {why}" for way, why in errors.items()}
            if times:
                found.append(_block_times(paths, times, count))
        if not found:
            raise OffbeatError(f"{graph.name}: no block of the model could be timed: {_first(failed)}")
        notes = [f"{len(failed)} of the model's blocks could not be timed: {_first(failed)}"] if failed else []
        return graph.with_blocks(found), notes


def _block_times(paths: tuple[str, ...], times: Times, count: int) -> BlockTimes:
    """The times of a block that is called so often in a step."""
    seconds = {way: (fw.device * count, bw.device * count) for way, (fw, bw) in times.items()}
    host = {way: (fw.host * count, bw.host * count) for way, (fw, bw) in times.items()}
    return BlockTimes(paths, seconds, {} if host == seconds else host)


def _first(failed: Mapping[str, str]) -> str:
    return next(iter(failed.values()), "it calls none of its modules")


def time_encoders(encoders: Sequence[Encoder], device: torch.device, world: int) -> dict[str, float]:
    """Seconds in which a rank among `world` encodes and decodes a byte of a gradient, by the encoder's name."""
    return {encoder.name: _encoding(encoder, device, world) for encoder in encoders}


def _encoding(encoder: Encoder, device: torch.device, world: int) -> float:
    gradient = torch.randn(ENCODED_SHAPE, device=device).flatten()
    made = make_encoder(encoder, [ENCODED_SHAPE], torch.float32, device, 0, world, 0)
    assert made is not None
    clock, began = clock_of(device), time.perf_counter()
    spent: list[float] = []
    while len(spent) < LEAST_ROUNDS or (len(spent) < MOST_ROUNDS and time.perf_counter() - began < ROUNDS_SECONDS / 5):
        buffer = gradient.clone()
        begin = clock.now()
        rounds = made.exchange(buffer, len(spent))
        payload = next(rounds)
        with suppress(StopIteration):
            while True:
                # What the others sent is as long; a sum costs nothing here, because it is made on the way.
                payload = rounds.send(payload if made.summed else payload.expand(world, -1))
        end = clock.now()
        clock.wait(end)
        spent.append(clock.seconds(end) - clock.seconds(begin))
    return median(spent[1:]) / (gradient.numel() * gradient.element_size())


def _calls(model: nn.Module, paths: Sequence[str], inputs: Sequence[Any]) -> dict[str, list[Call]]:
    """How a training step's forward calls these modules, in order."""
    calls: dict[str, list[Call]] = defaultdict(list)
    handles = []
    for path in paths:

        def called(_: nn.Module, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            calls[path].append(Call(path, args, kwargs, result))

        handles.append(model.get_submodule(path).register_forward_hook(called, with_kwargs=True))
    was_training = model.training
    try:
        # What backward would need is not kept: a model that needs sharding may not fit with it.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_dropped, _dropped):
            model.train()
            model(*inputs)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return dict(calls)


def _dropped(_: Any) -> None:
    pass


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Running statistics and random numbers are afterwards what they were."""
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng([device.index for device in devices]):
            yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def _regions(model: nn.Module, calls: Mapping[str, list[Call]]) -> list[tuple[str, ...]]:
    """The called modules; those that run one after another together, from each weight matrix to the next."""
    regions: list[list[str]] = []
    before: Call | None = None
    for path, mine in calls.items():
        module, call = model.get_submodule(path), mine[0]
        follows = (
            before is not None
            and len(mine) == len(calls[before.path]) == 1
            and path.rpartition(".")[0] == before.path.rpartition(".")[0]
            and not call.kwargs
            and len(call.args) == 1
            and call.args[0] is before.result
        )
        if follows and not any(parameter.dim() > 1 for parameter in module.parameters()):
            regions[-1].append(path)
        else:
            regions.append([path])
        before = call
    return [tuple(region) for region in regions]


def _detached(call: Call) -> Call:
    args, kwargs = pytree.tree_map_only(Tensor, _fresh, (call.args, call.kwargs))
    return Call(call.path, args, kwargs, None)


def _device(call: Call, modules: Sequence[nn.Module]) -> torch.device:
    """Where the call computes."""
    tensors = [*pytree.tree_leaves((call.args, call.kwargs)), *(p for module in modules for p in module.parameters())]
    return next((value.device for value in tensors if isinstance(value, Tensor)), torch.device("cpu"))


def _key(modules: Sequence[nn.Module], call: Call, ways: Sequence[Way]) -> str:
    """The name under which times are kept: equal for what is timed alike."""

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            return [list(value.shape), list(value.stride()), str(value.dtype), value.requires_grad]
        return repr(value)[:200]

    device = _device(call, modules)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    parts = [part for module in modules for part in module.modules()]
    code = [_code(getattr(type(part).forward, "__code__", None)) for part in parts]
    content = {
        "modules": [repr(module) for module in modules],
        "classes": [f"{type(part).__module__}.{type(part).__qualname__}" for part in parts],
        "code": code,
        "parameters": [[list(p.shape), str(p.dtype), p.requires_grad] for m in modules for p in m.parameters()],
        "call": [described(value) for value in pytree.tree_leaves((call.args, call.kwargs))],
        "device": [device.type, name, torch.get_num_threads()],
        "autocast": torch.is_autocast_enabled(device.type) and str(torch.get_autocast_dtype(device.type)),
        "torch": torch.__version__,
        "ways": list(ways),
        "laps": Lap._fields,
    }
    return files.digest(content)


def _code(function: CodeType | None) -> Any:
    """What a function does, without where it stands."""
    if function is None:
        return None
    constants = [_code(value) if isinstance(value, CodeType) else repr(value) for value in function.co_consts]
    return [function.co_code.hex(), function.co_names, constants]


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def _timed(key: str, modules: Sequence[nn.Module], call: Call, ways: Sequence[Way]) -> tuple[Times, Errors]:
    """(seconds of each way, why others failed): kept ones, else measured here and now."""
    path = cache_folder() / "blocks" / f"{key}.json"
    with suppress(OffbeatError, OSError, KeyError, TypeError, ValueError):
        kept = json.loads(path.read_bytes())
        return {way: (_lap(kept[way][0]), _lap(kept[way][1])) for way in ways}, {}
    own = deepcopy(list(modules))
    forwards = [module.forward for module in own]
    device = _device(call, modules)
    runs: dict[Way, Callable[..., Any]] = {}
    for way in ways:
        run = (compiled if way.startswith("compiled") else in_turn)(forwards)
        if way == "recomputed":
            run = partial(recomputed, run)
        runs[way] = partial(autocast, run, device.type) if way.endswith("bf16") else run
    errors: Errors = {}
    found: Times = {}
    for way in sorted(ways, key=lambda way: way.startswith("compiled")):
        try:
            forward, backward = time_laps(partial(_run, runs[way], own, call, device), device)
        except Exception as error:
            errors[way] = f"{type(error).__name__}: {files.one_line(error)}"
        else:
            found[way] = forward, backward
    if "eager" not in found:
        return {}, errors
    if not errors:
        with suppress(OffbeatError, OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(path, json.dumps(found).encode(), "times of a block")
    return found, errors


def _lap(raw: Any) -> Lap:
    lap = Lap(*(float(seconds) for seconds in raw))
    if not min(lap) >= 0:
        raise ValueError("seconds are not negative")
    return lap


def _run(run: Callable[..., Any], modules: Sequence[nn.Module], call: Call, device: torch.device, timed: Timer) -> None:
    """Times forward and backward of one call."""
    for module in modules:
        module.zero_grad(set_to_none=True)
    args, kwargs = pytree.tree_map_only(Tensor, _fresh, (call.args, call.kwargs))
    result = timed(partial(run, *args, **kwargs))
    outputs = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor) and value.requires_grad]
    gradients = [torch.ones_like(value) for value in outputs]
    # What autocast keeps of weights ends with a forward, and backward is not under it.
    torch.clear_autocast_cache()
    with torch.autocast(device.type, enabled=False):
        timed(partial(torch.autograd.backward, outputs, gradients) if outputs else _nothing)


def _nothing() -> None:
    pass


def _fresh(value: Tensor) -> Tensor:
    """The same values, as if another module had just made them."""
    return value.detach().requires_grad_(value.requires_grad)


def cache_folder() -> Path:
    """Where Offbeat keeps what it need not find out again; it may not exist, and nothing depends on it."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "offbeat"
    except RuntimeError:
        return Path(os.devnull)
