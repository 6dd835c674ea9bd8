"""A model, its optimizer and a strategy that splits operators → the same two objects, training in pieces on all ranks.

Every rank is given the same batch, the whole one, and gets the whole output: the user's loop is that of a single
device, and so are its numbers. With `batch="part"` a rank is given, and gets, only the samples that its first operator
works on (`batch_part` says which); a loss of a rank's own output counts for its share, so that what is trained is the
mean over ranks, as DDP has it.

Variables become DTensors, one part per rank, so gradients, clipping and elementwise optimizers work on parts. Forward
is traced for every new kind of input and runs as two graphs of this rank's own (`local`). `state_dict()` of model and
optimizer are those of a single device; they are gathered, so every rank must ask for them.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Node
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.graph.step import make_step
from offbeat.runtime.checkpoint import map_state
from offbeat.runtime.comm import TorchWorld
from offbeat.runtime.fusion import replace_forward
from offbeat.runtime.memory import recomputed
from offbeat.runtime.mixins import Outer, SpreadModel, with_mixin
from offbeat.runtime.sharded.cut import Parts
from offbeat.runtime.sharded.grid import Grid
from offbeat.runtime.sharded.local import trace_parts
from offbeat.runtime.sharded.planning import Planned, plan_splits, samples_layout, tensors_of, variable_layouts
from offbeat.runtime.sharded.randomness import SharedRandom
from offbeat.runtime.sharded.trace import Program, trace_forward
from offbeat.runtime.sharded.weights import shard_state, shard_weights, whole_of
from offbeat.runtime.unit_optimizer import elementwise
from offbeat.runtime.wrapping import already_distributed, begin
from offbeat.sharding.layout import Layout, box_of
from offbeat.sharding.rules import is_random
from offbeat.strategy import Strategy
from offbeat.torch_private import ModelHooks, pytree

log = logging.getLogger("offbeat")


class ShardedRuntime:
    """Everything distribute() attaches to a model and an optimizer for a strategy that splits operators."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        example_inputs: Any,
        loss_fn: Any,
        batch: Literal["whole", "part"] = "whole",
        timeout: timedelta = timedelta(minutes=10),
        world: TorchWorld | None = None,
    ) -> None:
        begin(model, optimizer)
        self.model = model
        self.model_class: Any = type(model)
        self.optimizer = optimizer
        self.strategy = strategy
        self.grid = Grid(world, timeout)
        self.forward = model.forward
        self.random = SharedRandom(self.grid.job, self.grid.device)
        self.layouts: dict[str, Any] | None = None
        self.batch = batch
        self._programs: dict[Any, tuple[Program, Planned]] = {}
        self._parts: dict[Any, Parts] = {}
        _check_supported(strategy)
        _check_ranks_agree(strategy, self.grid)
        self.grid.job.watch(range(self.grid.world))
        for path in strategy.recompute:
            module = model.get_submodule(path)
            replace_forward(module, partial(recomputed, module.forward))
        if example_inputs is not None:
            step = make_step(model, example_inputs, loss_fn)
            self.prepare(step.args, step.kwargs)
        model._offbeat = optimizer._offbeat = self
        model.forward = self.run
        model.__class__ = with_mixin(OuterSplitModel, type(model))
        # Torch marks the hook it is given, which a bound method does not allow.
        model.register_state_dict_post_hook(partial(self._gather_model))
        model.register_load_state_dict_pre_hook(self._scatter_model)
        optimizer.register_state_dict_post_hook(self._gather_optimizer)
        optimizer.register_load_state_dict_pre_hook(self._scatter_optimizer)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Spreads the weights as the operators that read them want them."""
        on_meta = any(tensor.is_meta for tensor in (*self.model.parameters(), *self.model.buffers()))
        if on_meta:
            args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        ranks = {name: parameter.dim() for name, parameter in self.model.named_parameters() if parameter.requires_grad}

        def plan(program: Program, part: Layout | None) -> Planned:
            _check_operators(self.strategy, program)
            self.layouts = variable_layouts(program.operators, self.strategy, self.grid.fine, ranks)
            return plan_splits(program, self.strategy, self.grid.fine, self.layouts, strict=True, part=part)

        found = self._planned(args, kwargs, plan)
        assert self.layouts is not None
        split = sorted(name for name, layout in self.layouts.items() if layout != self.grid.whole)
        if split and not elementwise(type(self.optimizer)):
            raise StrategyError(
                f"optimizer {type(self.optimizer).__name__} cannot update pieces of {split[0]!r} separately; "
                f"use a strategy that keeps variables whole"
            )
        shard_weights(self.model, self.optimizer, self.layouts, self.grid)
        # A model on the meta device is traced again on its own, which may have other operators.
        if not on_meta:
            self._programs[self._kind(args, kwargs)] = found
        log.info("offbeat splits %d operators and %d variables over ranks", len(self.strategy.operators), len(split))

    def _planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Callable[[Program, Layout | None], Planned]
    ) -> tuple[Program, Planned]:
        """The program of a forward, and how it is split."""
        if self.batch == "whole":
            program = trace_forward(self.model, self.forward, args, kwargs)
            return program, plan(program, None)
        samples = next((tensor.shape[0] for tensor in tensors_of((args, kwargs)) if tensor.dim()), 0)

        def enlarged(tensor: Tensor) -> Tensor:
            batched = tensor.dim() and tensor.shape[0] == samples
            return tensor.new_empty((samples * parts, *tensor.shape[1:])) if batched else tensor

        # As many parts as the whole batch is split into that has so many times the samples given here.
        for parts in (parts for parts in range(self.grid.world, 0, -1) if self.grid.world % parts == 0):
            program = trace_forward(self.model, self.forward, *pytree.tree_map_only(Tensor, enlarged, (args, kwargs)))
            part = samples_layout(program, plan(program, None))
            if prod(size for size, axis in zip(self.grid.fine, part, strict=True) if axis == 0) == parts:
                break
        self.batch_part = box_of((parts,), part, self.grid.fine, self.grid.rank).starts[0], parts
        return program, plan(program, part)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in pieces."""
        if self.layouts is None:
            self.prepare(args, kwargs)
        key = self._kind(args, kwargs)
        if key not in self._programs:

            def plan(program: Program, part: Layout | None) -> Planned:
                assert self.layouts is not None
                return plan_splits(program, self.strategy, self.grid.fine, self.layouts, strict=False, part=part)

            self._programs[key] = self._planned(args, kwargs, plan)
        program, planned = self._programs[key]
        buffers = dict(self.model.named_buffers())
        # Backward may still read what is changed here.
        changed = {name for name, _ in program.updates}
        state = {name: buffer.clone() if name in changed else buffer for name, buffer in buffers.items()}
        for name, parameter in self.model.named_parameters():
            state[name] = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        batch = tensors_of((args, kwargs))
        inputs = [state[name] for name in program.state.values()]
        inputs += [batch[position] for position in program.batch.values()] + list(program.constants.values())
        with torch.autocast(self.grid.device.type, enabled=False):
            if not torch.is_grad_enabled():
                inputs = [tensor.detach() for tensor in inputs]
            kind = key, *((tensor.stride(), tensor.requires_grad) for tensor in inputs)
            if kind not in self._parts:
                self._parts[kind] = trace_parts(program, planned, self.grid, inputs)
            draws = any(is_random(split.call) for split in planned.splits.values())
            with self.random if draws else nullcontext():
                found, updates = self._parts[kind](inputs)
        with torch.no_grad():
            for (name, _), value in zip(program.updates, updates, strict=True):
                buffers[name].copy_(value)
        remaining = iter(found)
        leaves = [next(remaining) if isinstance(leaf, Node) else leaf for leaf in program.results]
        return pytree.tree_unflatten(leaves, program.structure)

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Equal for calls that run the same program."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        kinds = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        modes = tuple(module.training for module in self.model.modules())
        return structure, kinds, modes, torch.is_autocast_enabled(self.grid.device.type)

    def release(self) -> None:
        raise StrategyError("this model's operators are already split, which cannot be undone: distribute a new one")

    def _gather_model(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            with self.grid.explained(f"the parts of {name!r}"):
                state[name] = whole_of(state[name], self.grid)

    def _gather_optimizer(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return map_state(state_dict, lambda _, __, value: whole_of(value, self.grid))

    def _scatter_model(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Keeps this rank's part of each variable in a state dict that is being loaded."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = shard_state("", state[prefix + name], parameter, self.grid)

    def _scatter_optimizer(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        parameters = dict(enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)))
        return map_state(state_dict, lambda at, key, value: shard_state(key, value, parameters.get(at), self.grid))


class SplitModel(SpreadModel, ModelHooks):
    """A model whose operators are split over all ranks."""

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Changes nothing: gradients accumulate anyway, and their parts are exchanged as the operators need."""
        yield

    def _before_wrapping(self, wrapper: str) -> None:
        already_distributed(wrapper)


class OuterSplitModel(Outer, SplitModel):
    """The model as distribute() returns it."""

    _offbeat_inner = SplitModel


def _check_supported(strategy: Strategy) -> None:
    """What a strategy may ask for besides splitting operators; the rest would be left out silently."""
    if strategy.variables:
        raise StrategyError(
            f"variables: {next(iter(strategy.variables))!r} has a synchroniser, but a strategy that splits operators "
            f"synchronises variables as the operators need"
        )
    others = {"fusion": [*strategy.fusion], "accumulation": strategy.accumulation, "precision": strategy.precision}
    for name, value in others.items():
        if value not in ([], 1, None):
            raise StrategyError(f"{name}: a strategy that splits operators cannot have it, got {value}")
    if strategy.replicas and len(strategy.replicas) != dist.get_world_size():
        raise StrategyError(f"replicas: operators are split over all ranks, got {list(strategy.replicas)}")


def _check_operators(strategy: Strategy, program: Program) -> None:
    unknown = [name for name in strategy.operators if name not in program.operators]
    if len(unknown) == len(strategy.operators):
        raise StrategyError(f"operators: the model's forward has no operator {unknown[0]!r}, nor any other of them")
    if unknown:
        log.info(
            "%d of %d split operators are not in the model's forward, such as those of a loss outside it: %s",
            len(unknown),
            len(strategy.operators),
            ", ".join(unknown[:5]),
        )


def _check_ranks_agree(strategy: Strategy, grid: Grid) -> None:
    """Ranks with different strategies, or different backends, would wait for each other forever."""
    first, *others = grid.job.all_gather_object((strategy.digest, grid.device.type))
    for rank, (digest, device) in enumerate(others, 1):
        if digest != first[0]:
            raise StrategyError(f"rank {rank} has another strategy than rank 0")
        if device != first[1]:
            raise StrategyError(f"rank {rank} trains on {device}, rank 0 on {first[1]}: move the model before")
