"""A model, its optimizer and a strategy that splits operators → the same two objects, training in pieces on all ranks.

Every rank is given the same batch, the whole one, and gets the whole output: the user's loop is that of a single
device, and so are its numbers. Each rank works on the parts that the strategy gives it; where the first operator is
split along its samples, a rank takes its own samples from the batch.

Variables become DTensors, one part per rank, so gradients, clipping and elementwise optimizers work on parts. Forward
is traced for every new kind of input and replayed in pieces. `state_dict()` of model and optimizer are those of a
single device; they are gathered, so every rank must ask for them.
"""

import logging
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.graph.step import make_step
from offbeat.runtime.checkpoint import map_state
from offbeat.runtime.sharded.execute import Executor
from offbeat.runtime.sharded.grid import Grid
from offbeat.runtime.sharded.planning import plan_splits, tensors_of, variable_layouts
from offbeat.runtime.sharded.randomness import SharedRandom
from offbeat.runtime.sharded.trace import Program, trace_forward
from offbeat.runtime.sharded.weights import shard_state, shard_weights, whole_of
from offbeat.runtime.unit_optimizer import elementwise
from offbeat.strategy import Strategy
from offbeat.torch_private import pytree

log = logging.getLogger("offbeat")


class ShardedRuntime:
    """Everything distribute() attaches to a model and an optimizer for a strategy that splits operators."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, example_inputs: Any, loss_fn: Any
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.grid = Grid()
        self.forward = model.forward
        self.random = SharedRandom(self.grid.device)
        self.layouts: dict[str, Any] | None = None
        self._executors: dict[Any, Executor] = {}
        _check_supported(strategy)
        _check_ranks_agree(strategy)
        if example_inputs is not None:
            step = make_step(model, example_inputs, loss_fn)
            self.prepare(step.args, step.kwargs)
        model._offbeat = self
        model.forward = self.run
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
        program = trace_forward(self.model, self.forward, args, kwargs)
        _check_operators(self.strategy, program)
        ranks = {name: parameter.dim() for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        layouts = variable_layouts(program.operators, self.strategy, self.grid.fine, ranks)
        plan = plan_splits(program, self.strategy, self.grid.fine, layouts, strict=True)
        split = sorted(name for name, layout in layouts.items() if layout != self.grid.whole)
        if split and not elementwise(type(self.optimizer)):
            raise StrategyError(
                f"optimizer {type(self.optimizer).__name__} cannot update pieces of {split[0]!r} separately; "
                f"use a strategy that keeps variables whole"
            )
        shard_weights(self.model, self.optimizer, layouts, self.grid)
        self.layouts = layouts
        # A model on the meta device is traced again on its own, which may have other operators.
        if not on_meta:
            self._executors[self._kind(args, kwargs)] = Executor(program, plan, self.grid, self.random)
        log.info("offbeat splits %d operators and %d variables over ranks", len(self.strategy.operators), len(split))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in pieces."""
        if self.layouts is None:
            self.prepare(args, kwargs)
        assert self.layouts is not None
        key = self._kind(args, kwargs)
        if key not in self._executors:
            program = trace_forward(self.model, self.forward, args, kwargs)
            plan = plan_splits(program, self.strategy, self.grid.fine, self.layouts, strict=False)
            self._executors[key] = Executor(program, plan, self.grid, self.random)
        executor = self._executors[key]
        buffers = dict(self.model.named_buffers())
        # Backward may still read what is changed here.
        changed = {name for name, _ in executor.program.updates}
        state = {name: buffer.clone() if name in changed else buffer for name, buffer in buffers.items()}
        for name, parameter in self.model.named_parameters():
            state[name] = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        with torch.autocast(self.grid.device.type, enabled=False):
            output, updates = executor.run(state, tensors_of((args, kwargs)))
        with torch.no_grad():
            for name, value in updates.items():
                buffers[name].copy_(value)
        return output

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Equal for calls that run the same program."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        kinds = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        modes = tuple(module.training for module in self.model.modules())
        return structure, kinds, modes, torch.is_autocast_enabled(self.grid.device.type)

    def _gather_model(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
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


def _check_supported(strategy: Strategy) -> None:
    """What a strategy may ask for besides splitting operators; the rest would be left out silently."""
    if strategy.variables:
        raise StrategyError(
            f"variables: {next(iter(strategy.variables))!r} has a synchroniser, but a strategy that splits operators "
            f"synchronises variables as the operators need"
        )
    others = {"recompute": [*strategy.recompute], "fusion": [*strategy.fusion], "accumulation": strategy.accumulation}
    for name, value in others.items():
        if value not in ([], 1):
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


def _check_ranks_agree(strategy: Strategy) -> None:
    """Ranks with different strategies would wait for each other forever."""
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, strategy.digest)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise StrategyError(f"rank {rank} has another strategy than rank 0")
