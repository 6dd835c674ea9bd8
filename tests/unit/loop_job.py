"""A model under training on one rank: by Offbeat, or by hand as an obvious reference.

The reference is a plain model whose gradients are averaged after every backward pass that synchronises, in the order in
which ranks in memory add up, and whose buffers are rank 0's before each forward that DDP sends them before.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import loop_models
import torch
from memory_job import MemoryWorld
from random_strategies import random_strategy
from small_strategies import OPTIONS
from torch import nn
from torch.optim.swa_utils import AveragedModel

from offbeat.cluster import ClusterSpec
from offbeat.graph.skeleton import skeleton
from offbeat.plan import Plan, lower
from offbeat.runtime.distribute import Runtime
from offbeat.strategy import Strategy, build_strategy

TIMEOUT = timedelta(seconds=60)

Way = tuple[str, int, str, bool]
"""A builder's name or "random", a seed, a mode, and whether the model is captured."""


class Job:
    """One rank of a loop."""

    def __init__(
        self, world: MemoryWorld, model: str, optimizer: str, way: Way | None, find_unused: bool, held_back: bool
    ) -> None:
        self.world = world
        self.name = model
        self.optimizer_name = optimizer
        self.ours = way is not None
        self.find_unused = True if find_unused else None
        self.model: Any = loop_models.make(model, seed=world.rank if self.ours else 0)
        left_out = set(map(id, self.model.head.parameters())) if held_back else set()
        self.optimizer = loop_models.OPTIMIZERS[optimizer](p for p in self.model.parameters() if id(p) not in left_out)
        self.runtime: Runtime | None = None
        self.synchronise = True
        """Off inside no_sync()."""
        self.buffers_due = True
        """The next forward gets `root`'s buffers."""
        self.root = 0
        self.forwards = 0
        self.seen: list[tuple[int, str, torch.Tensor]] = []
        """What the loop has looked at: in which action, what, and the value."""
        self.action = 0
        self.kept: list[torch.Tensor] = []
        """Views of parameters."""
        self.saved: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.average: AveragedModel | None = None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        if way is not None:
            self.distribute(way)

    # What Offbeat does, or the reference by hand

    def distribute(self, way: Way | None) -> None:
        """Hands model and optimizer to Offbeat, the first time or again."""
        if self.ours:
            assert way is not None
            self.runtime = Runtime(
                self.model, self.optimizer, self.plan(way), TIMEOUT, self.world, find_unused=self.find_unused
            )
        else:
            self._broadcast_buffers()
        self.buffers_due = True

    def switch(self, way: Way) -> None:
        if self.runtime is not None:
            self.runtime.switch(self.plan(way))

    def plan(self, way: Way) -> Plan:
        builder, seed, mode, captured = way
        trains = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        graph = skeleton(self.model)
        if captured and self.name != "heads":
            known = loop_models.graph_of(self.name)
            if {variable.name for variable in known.variables} == set(trains):
                graph = known
        cluster = ClusterSpec.local(self.world.size)
        if builder == "random":
            strategy = random_strategy(seed, graph, cluster).model_copy(update={"weights": ()})
        else:
            strategy = build_strategy(builder, graph, cluster, **OPTIONS.get(builder, {}))
        return lower(graph, cluster, _in_mode(strategy, mode), rank=self.world.rank)

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        self.synchronise = False
        with self.model.no_sync() if self.ours else nullcontext():
            yield
        self.synchronise = True

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)
        if not self.ours and self.synchronise:
            self._average()

    def join(self, steps: list[int], passes: int, optimize: Callable[[], None]) -> None:
        """Each rank takes so many steps of so many passes; the reference knows how many the others take."""
        mine = steps[self.world.rank]
        if self.ours:
            with self.model.join():
                for _ in range(mine):
                    for _ in range(passes):
                        self.backward(self.forward())
                    optimize()
            return
        for number in range(max(steps)):
            self.root = max(rank for rank, each in enumerate(steps) if each > number)
            for _ in range(passes):
                if number < mine:
                    self.backward(self.forward())
                else:
                    self._pass_without_data()
            if number < mine:
                optimize()
            else:
                self.optimizer.step()
        self._broadcast_buffers()
        self.root = 0

    def _pass_without_data(self) -> None:
        if self.buffers_due:
            self._broadcast_buffers()
        self.buffers_due = True
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = None
        self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            used = torch.tensor([parameter.grad is not None and parameter.requires_grad], dtype=torch.int32)
            self.world.channel.all_reduce(used).wait()
            if not used.item():
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            average = (gradient.to_dense() if gradient.is_sparse else gradient) * (1 / self.world.size)
            self.world.channel.all_reduce(average).wait()
            parameter.grad = average

    def _broadcast_buffers(self) -> None:
        for buffer in self.model.buffers():
            self.world.broadcast(buffer.data, self.root)

    # What every loop does

    def forward(self, size: int = 4, weights: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The loss of another batch, by these weights if they are given."""
        self.forwards += 1
        if not self.ours and self.buffers_due:
            self._broadcast_buffers()
        self.buffers_due = torch.is_grad_enabled() and self.synchronise
        batch = loop_models.batch(self.name, self.forwards, self.world.rank, size)
        return self.model(*batch) if weights is None else torch.func.functional_call(self.model, weights, batch)

    def hidden(self) -> torch.Tensor:
        """The output of a part of the model that is called alone."""
        self.forwards += 1
        return self.model.hidden(loop_models.batch(self.name, self.forwards, self.world.rank)[0])

    def see(self, what: str, value: torch.Tensor | None) -> None:
        if value is None:
            value = torch.tensor(torch.nan)
        value = value.detach()
        self.seen.append((self.action, what, value.to_dense().clone() if value.is_sparse else value.clone()))

    def see_all(self) -> None:
        """At the end: parameters everywhere, and the buffers that count."""
        for name, parameter in self.model.named_parameters():
            self.see(name, parameter)
        if self.world.rank == 0:
            for name, buffer in self.model.named_buffers():
                self.see(name, buffer)

    def parameter(self, pick: Callable[[list[str]], str]) -> tuple[str, nn.Parameter]:
        """One of the model's parameters."""
        named = dict(self.model.named_parameters())
        name = pick(sorted(named))
        return name, named[name]

    def close(self) -> None:
        if self.runtime is not None:
            self.runtime.engine.detach()
            self.runtime.engine.channels.close()


def _in_mode(strategy: Strategy, mode: str) -> Strategy:
    schedule = strategy.schedule.model_copy(update={"mode": mode})
    return strategy.model_copy(update={"schedule": schedule, "graph": "", "cluster": ""})
