"""Splitting operators over ranks: random strategies, and how far training with them is from a single device.

Runs on every rank.
"""

import copy
import math
import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import small_models
import split_points
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat.runtime.lifetime import _gloo_threads
from offbeat.runtime.sharded import runtime as sharded_runtime
from offbeat.runtime.sharded.grid import Grid, c10d
from offbeat.runtime.sharded.overlap import is_collective
from offbeat.runtime.sharded.planning import is_getitem, make_call, tensor_nodes
from offbeat.runtime.sharded.trace import Program, trace_forward
from offbeat.sharding.rules import axes_of
from offbeat.strategy import OperatorConfig, Strategy
from offbeat.torch_private import storage_of

BATCH = 6
STEPS = 5


@cache
def _program(name: str) -> Program:
    """Traced once for all strategies: it takes longer than five steps."""
    model = small_models.make(name)
    return trace_forward(model, model.forward, small_models.batch(name, 0, 0, size=BATCH), {})


@contextmanager
def _traced_once(name: str) -> Iterator[None]:
    sharded_runtime.trace_forward = lambda *_: _program(name)
    try:
        yield
    finally:
        sharded_runtime.trace_forward = trace_forward


def _random_mesh(world: int, draw: random.Random) -> tuple[int, ...]:
    return draw.choice([(world,), (1, world), (world, 1), *([(2, 2)] * 3 if world == 4 else [])])


def _random_map(rank: int, mesh: tuple[int, ...], draw: random.Random) -> tuple[int, ...]:
    """Any map at all: mesh axes on different tensor axes, some on none."""
    tensor_map = [-1] * rank
    for axis in range(len(mesh)):
        free = [place for place, used in enumerate(tensor_map) if used == -1]
        if free and draw.random() < 0.7:
            tensor_map[draw.choice(free)] = axis
    return tuple(tensor_map)


def _fitting_maps(axes: tuple[Any, ...], ranks: list[int], count: int, mesh: tuple[int, ...], draw: random.Random):
    """Maps of arguments and results of a call that is split along one of its own axes by each mesh axis."""
    maps = [[-1] * rank for rank in ranks]
    left = list(axes)
    for mesh_axis in range(len(mesh)):
        if left and draw.random() < 0.85:
            chosen = left.pop(draw.randrange(len(left)))
            for tensor_map, axis in zip(maps, (*chosen.inputs, *chosen.outputs), strict=True):
                if axis >= 0:
                    tensor_map[axis] = mesh_axis
    plain = [tuple(tensor_map) for tensor_map in maps]
    return plain[:count], plain[count:]


def random_configs(program: Program, variables: dict[str, int], world: int, seed: int, style: str) -> Strategy:
    """A configuration for every operator: 'fitting' ones as a search makes them, or 'arbitrary' ones."""
    draw = random.Random(seed)
    ranks = {name: len(op.outputs[0].shape) for name, op in program.operators.items()} | variables
    operators = {}
    for node in program.nodes:
        if is_getitem(node) or node.name not in program.operators:
            continue
        operator, call = program.operators[node.name], make_call(node)
        if style == "fitting" and operator.kind == "view" and draw.random() < 0.6:
            # Searches leave most views to follow what they are views of.
            continue
        mesh = _random_mesh(world, draw)
        names = operator.inputs + operator.variables
        maps = {name: _random_map(ranks[name], mesh, draw) for name in names}
        outputs = [_random_map(len(spec.shape), mesh, draw) for spec in operator.outputs]
        if style == "fitting":
            dims = [tensor.dim() for tensor in (*call.inputs, *call.outputs)]
            inputs, outputs = _fitting_maps(axes_of(call), dims, len(call.inputs), mesh, draw)
            for source, tensor_map in zip(tensor_nodes(node), inputs, strict=True):
                if program.reads.get(source) in maps and len(tensor_map) == ranks[program.reads[source]]:
                    maps[program.reads[source]] = tensor_map
        keep = draw.choice(["before", "after", "both"])
        operators[node.name] = OperatorConfig(
            mesh=mesh, inputs=tuple(maps[name] for name in names), outputs=tuple(outputs), keep=keep
        )
    return Strategy(name=f"random{seed}", operators=operators)


def _strategy(name: str, seed: int, style: str) -> Strategy:
    variables = {key: parameter.dim() for key, parameter in small_models.make(name).named_parameters()}
    return random_configs(_program(name), variables, dist.get_world_size(), seed, style)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = model(*small_models.batch(name, step, 0, size=BATCH))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def _single_device(name: str, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = small_models.make(name)
    losses = _steps(model, small_models.make_optimizer(kind, model.parameters()), name, 0, STEPS)
    return losses, model.state_dict()


def _distance(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert state.keys() == expected.keys()
    assert not any(isinstance(value, DTensor) for value in state.values())
    return max(float((value - expected[key]).abs().max()) for key, value in state.items())


def random_splits(name: str, kind: str, style: str, seeds: list[int]) -> list[dict[str, float]]:
    """For each seed the distances of losses, of all weights and buffers, and how much of the weights a rank holds."""
    losses, weights = _single_device(name, kind)
    answers = []
    with _traced_once(name):
        for seed in seeds:
            # Only rank 0's weights count.
            model = small_models.make(name, seed=0 if dist.get_rank() == 0 else 99)
            optimizer = small_models.make_optimizer(kind, model.parameters())
            offbeat.distribute(model, optimizer, _strategy(name, seed, style))
            mine = _steps(model, optimizer, name, 0, STEPS)
            held = sum(parameter.to_local().numel() for parameter in model.parameters())
            answers.append(
                {
                    "losses": max(abs(a - b) for a, b in zip(mine, losses, strict=True)),
                    "weights": _distance(model.state_dict(), weights),
                    "held": held / sum(math.prod(parameter.shape) for parameter in model.parameters()),
                }
            )
    return answers


def checkpointed(name: str, kind: str, seed: int, directory: str) -> dict[str, float]:
    """Sharded → file → a single device → sharded in another way: distances from a run that never stopped."""
    losses, weights = _single_device(name, kind)
    with _traced_once(name):
        model = small_models.make(name)
        optimizer = small_models.make_optimizer(kind, model.parameters())
        offbeat.distribute(model, optimizer, _strategy(name, seed, "fitting"))
        mine = _steps(model, optimizer, name, 0, 2)
        path = Path(directory) / "sharded.pt"
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if dist.get_rank() == 0:
            torch.save(states, path)
        dist.barrier()
        alone = small_models.make(name, seed=5)
        lone = small_models.make_optimizer(kind, alone.parameters())
        states = torch.load(path, weights_only=True)
        alone.load_state_dict(states["model"])
        lone.load_state_dict(states["optimizer"])
        mine += _steps(alone, lone, name, 2, 4)
        model = small_models.make(name, seed=6)
        optimizer = small_models.make_optimizer(kind, model.parameters())
        offbeat.distribute(model, optimizer, _strategy(name, seed + 1, "fitting"))
        # Before the first step of a job its weights are still plain; after it they are parts.
        _steps(model, optimizer, name, 0, 1)
        model.load_state_dict(alone.state_dict())
        optimizer.load_state_dict(copy.deepcopy(lone.state_dict()))
        mine += _steps(model, optimizer, name, 4, STEPS)
    return {
        "losses": max(abs(a - b) for a, b in zip(mine, losses, strict=True)),
        "weights": _distance(model.state_dict(), weights),
    }


def frontier_points(name: str, count: int) -> dict[str, Any]:
    """Strategies that the frontier's search made, and how far training with them is from a single device."""
    return split_points.run_points(name, count)


class Noisy(nn.Module):
    """Dropout, a loss outside the model, a part of the model that is not trained, and a frozen layer."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.rate = rate
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.last = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = nn.functional.dropout(self.first(x).relu(), self.rate, self.training)
        with torch.no_grad():
            scale = 1 + self.first.weight.square().mean()
        return {"scores": self.last(self.frozen(hidden) * scale), "hidden": hidden}


def _noisy_strategy() -> Strategy:
    world = dist.get_world_size()
    mesh = (world,)
    return Strategy(
        operators={
            "addmm": OperatorConfig(mesh=mesh, inputs=((-1, 0), (0,), (0, -1)), outputs=((-1, 0),)),
            "relu": OperatorConfig(mesh=mesh, inputs=((0, -1),), outputs=((0, -1),)),
            "mean": OperatorConfig(mesh=mesh, inputs=((0, -1),), outputs=((),)),
        }
    )


def with_a_loss_outside(rate: float) -> dict[str, Any]:
    """Three steps, a clipped gradient, another batch size and an evaluation: distances from a single device."""
    finals = []
    evaluated = []
    for sharded in (False, True):
        torch.manual_seed(3)
        model = Noisy(rate).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        g = torch.Generator().manual_seed(1)
        if sharded:
            offbeat.distribute(model, optimizer, _noisy_strategy())
        torch.manual_seed(11 if dist.get_rank() == 0 else 100 + dist.get_rank())
        for size in (8, 8, 5):
            x, y = torch.randn(size, 6, generator=g).double(), torch.randint(3, (size,), generator=g)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x)["scores"], y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if sharded:
                # What a rank draws for itself must not change what is dropped.
                torch.rand(dist.get_rank() + 1)
        model.eval()
        with torch.no_grad():
            evaluated.append(model(torch.ones(4, 6).double())["scores"])
        finals.append({key: value.clone() for key, value in model.state_dict().items()})
    return {
        "weights": _distance(finals[1], finals[0]),
        "evaluated": float((evaluated[1] - evaluated[0]).abs().max()),
        "mine": finals[1]["first.weight"].flatten().tolist(),
    }


@contextmanager
def _in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def drawn_on_meta(name: str) -> dict[str, Any]:
    """A model built on the meta device, drawn when it is spread: its losses and those of one drawn on one device."""
    make = {"mlp": small_models.Mlp, "cnn": small_models.Cnn}[name]
    with _in_double(), torch.device("meta"):
        model = make()
    optimizer = small_models.make_optimizer("sgd", model.parameters())
    strategy = _strategy(name, 1, "fitting")
    torch.manual_seed(0 if dist.get_rank() == 0 else 50)
    batch = small_models.batch(name, 0, 0, size=BATCH)
    offbeat.distribute(model, optimizer, strategy, example_inputs=batch)
    losses = _steps(model, optimizer, name, 0, STEPS)
    torch.manual_seed(0)
    with _in_double():
        alone = make()
    expected = _steps(alone, small_models.make_optimizer("sgd", alone.parameters()), name, 0, STEPS)
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "weights": _distance(model.state_dict(), alone.state_dict()),
    }


def threads_of_a_group() -> int:
    """How many threads run the collectives of a group that parts are exchanged on."""
    before = _gloo_threads()
    name = Grid().group((0,))
    # A thread has its name once it runs: the only one, when a collective has ended; a second one soon after.
    c10d.wait_tensor(c10d.all_reduce(torch.ones(1), "sum", name))
    time.sleep(0.2)
    return len(_gloo_threads()) - len(before)


class Blocks(nn.Module):
    """Two blocks that backward may compute again, with dropout, and a loss outside."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x))
        return self.head(x)


def _saved_bytes(parts: Any) -> int:
    """What forward keeps for backward, beside its inputs."""
    graph = parts.forward.graph
    held = {storage_of(node.meta["val"]) for node in graph.find_nodes(op="placeholder")}
    saved = [node.meta["val"] for node in graph.output_node().args[0][parts.outputs + parts.updates :]]
    return sum({storage_of(value): value.nbytes for value in saved if storage_of(value) not in held}.values())


def recomputed_and_accumulated(how: str) -> dict[str, float]:
    """Two micro-batches a step and blocks that are computed again: distances from a single device, and what is kept."""
    world = dist.get_world_size()
    found: list[dict[str, torch.Tensor]] = []
    kept = []
    for sharded in (False, True):
        torch.manual_seed(3)
        model = Blocks(recomputed=how == "checkpoint").double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(8, 8).double()
        if sharded:
            products = [f"addmm_{index}" if index else "addmm" for index in range(5)]
            split = OperatorConfig(mesh=(world,), outputs=((0, -1),))
            recompute = ("blocks.0", "blocks.1") if how == "strategy" else ()
            strategy = Strategy(operators=dict.fromkeys(products[::2], split), recompute=recompute)
            offbeat.distribute(model, optimizer, strategy)
        torch.manual_seed(11 + dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            for part in x.chunk(2):
                (nn.functional.mse_loss(model(part), part[:, :4]) / 2).backward()
            optimizer.step()
        found.append({key: value.clone() for key, value in model.state_dict().items()})
        if sharded:
            kept.append(_saved_bytes(*model._offbeat._parts.values()))
    return {"weights": _distance(found[1], found[0]), "kept": kept[0]}


def parts_of_the_batch(mesh: list[int], where: str) -> dict[str, Any]:
    """Each rank gives its samples only: distances of losses and weights, and which part it was asked for."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = mesh[0]
    mine = rank // (world // shards)
    finals, losses = [], []
    for sharded in (False, True):
        torch.manual_seed(3)
        model = (
            Classifier() if where == "inside" else nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        ).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if sharded:
            rows = OperatorConfig(mesh=tuple(mesh), outputs=((0, 1 if len(mesh) > 1 else -1),))
            strategy = Strategy(operators={"addmm": rows, "relu": rows, "addmm_1": rows})
            offbeat.distribute(model, optimizer, strategy, batch="part")
        g = torch.Generator().manual_seed(1)
        for _ in range(3):
            x, y = torch.randn(8, 6, generator=g).double(), torch.randint(4, (8,), generator=g)
            if sharded:
                x, y = x.chunk(shards)[mine], y.chunk(shards)[mine]
            optimizer.zero_grad()
            output = model(x, y) if where == "inside" else model(x)
            assert where == "inside" or len(output) == len(x)
            loss = output if where == "inside" else nn.functional.cross_entropy(output, y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        finals.append({key: value.clone() for key, value in model.state_dict().items()})
    return {
        "weights": _distance(finals[1], finals[0]),
        "losses": abs(losses[1] - losses[0]) if where == "inside" else 0.0,
        "part": model._offbeat.batch_part,
        "expected": (mine, shards),
    }


class Classifier(nn.Module):
    """Its loss is part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), y)


class Wide(nn.Module):
    """Dense layers whose weights are nearly all of the memory."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _address_space() -> int:
    """Bytes of private memory this process has mapped, which RLIMIT_DATA limits."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024


def within_a_limit(how: str, extra_bytes: int, width: int, depth: int) -> dict[str, Any]:
    """Trains a wide model with so many bytes more than the process has now; the losses, or what it died of."""
    world = dist.get_world_size()
    operators = {}
    for layer in range(depth):
        name = "addmm" if layer == 0 else f"addmm_{layer}"
        operators[name] = OperatorConfig(
            mesh=(world,),
            inputs=((-1, 0), (0,), (0, -1)) if layer == 0 else ((-1, -1), (-1, 0), (0,), (0, -1)),
            outputs=((-1, -1),),
        )
    strategy: Strategy | str = Strategy(operators=operators) if how == "sharded" else "all_reduce"
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _address_space() + extra_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    losses: list[float] = []
    try:
        with torch.device("meta" if how == "sharded" else "cpu"):
            model = Wide(width, depth)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
        x = torch.ones(2, width)
        offbeat.distribute(model, optimizer, strategy, example_inputs=(x,) if how == "sharded" else None)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    except (RuntimeError, MemoryError) as error:
        return {"losses": losses, "died": f"{type(error).__name__}: {error}"}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return {"losses": losses, "died": "", "weights": sum(p.numel() for p in model.parameters()) * 4}


def kept(copies: str) -> dict[str, Any]:
    """A layer whose input, the result of a relu, is gathered to be used: what is kept of it, and backward's traffic.

    Both the relu and the product need it in backward."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 32)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    rows = OperatorConfig(mesh=(world,), outputs=((0, -1),))
    columns = OperatorConfig(mesh=(world,), inputs=((-1, -1), (-1, 0), (0,), (0, -1)), outputs=((-1, 0),), keep=copies)
    offbeat.distribute(model, optimizer, Strategy(operators={"addmm": rows, "relu": rows, "addmm_1": columns}))
    model(x).square().mean().backward()
    (parts,) = model._offbeat._parts.values()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return {
        "saved": _saved_bytes(parts),
        "exchanges": sum(map(is_collective, parts.backward.graph.nodes)),
        "error": max(float((mine - alone).abs().max()) for mine, alone in zip(gradients, expected, strict=True)),
    }


def refused(case: str) -> str:
    """The sentence with which a strategy is refused."""
    name = "mlp"
    model = small_models.make(name)
    optimizer: torch.optim.Optimizer = small_models.make_optimizer("sgd", model.parameters())
    config = OperatorConfig(mesh=(dist.get_world_size(),), outputs=((0, -1),))
    strategy = Strategy(operators={"addmm": config})
    batch = small_models.batch(name, 0, 0, size=BATCH)
    match case:
        case "unknown":
            strategy = Strategy(operators={"nothing": config})
        case "mesh":
            strategy = Strategy(operators={"addmm": OperatorConfig(mesh=(7,), outputs=((0, -1),))})
        case "accumulation":
            strategy = strategy.model_copy(update={"accumulation": 2})
        case "optimizer":
            weight = OperatorConfig(mesh=(dist.get_world_size(),), inputs=((-1, 0), (0,), (0, -1)))
            strategy = Strategy(operators={"addmm": weight})
            optimizer = torch.optim.Adafactor(model.parameters())
        case "meta":
            with torch.device("meta"):
                model = small_models.Transformer()
            optimizer = small_models.make_optimizer("sgd", model.parameters())
            batch = small_models.batch("transformer", 0, 0, size=BATCH)
        case "differs":
            strategy = strategy.model_copy(update={"name": f"of rank {dist.get_rank()}"})
    try:
        offbeat.distribute(model, optimizer, strategy, example_inputs=batch)
    except offbeat.OffbeatError as error:
        return str(error)
    return ""
