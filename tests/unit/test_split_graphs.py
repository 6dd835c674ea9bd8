"""What a rank runs of a split model: graphs whose collectives have one order on all ranks and overlap with work."""

from itertools import cycle
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx import Graph, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from offbeat.runtime.sharded.cut import Parts
from offbeat.runtime.sharded.grid import MOVE_KEY, Grid
from offbeat.runtime.sharded.local import trace_parts
from offbeat.runtime.sharded.overlap import is_collective, is_wait
from offbeat.runtime.sharded.planning import plan_splits, variable_layouts
from offbeat.runtime.sharded.trace import Program, annotation, trace_forward
from offbeat.sharding.layout import WHOLE, coordinate, prime_factors
from offbeat.strategy import OperatorConfig, Strategy


class Stage(Grid):
    """A rank's place in a job of which no other rank exists."""

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank, self.fine = world, rank, prime_factors(world)
        self.place = coordinate(rank, self.fine)
        self.whole = (WHOLE,) * len(self.fine)
        self.device = torch.device("cpu")

    def group(self, axes: tuple[int, ...]) -> str:
        return str(axes)


class Fake(Grid):
    """A rank of a job whose collectives do nothing."""

    def group(self, axes: tuple[int, ...]) -> str:
        return dist.group.WORLD.group_name


class Layers(nn.Module):
    """Dense layers of lengths that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


MODEL, BATCH = Layers(), torch.randn(6, 6)


@pytest.fixture(scope="module")
def program() -> Program:
    return trace_forward(MODEL, MODEL.forward, (BATCH,), {})


def parts_of(program: Program, operators: dict[str, OperatorConfig], grid: Grid) -> tuple[Parts, list[torch.Tensor]]:
    """The graphs of a rank, and some tensors for their inputs."""
    strategy = Strategy(operators=operators)
    named = dict(MODEL.named_parameters())
    stored = variable_layouts(
        program.operators, strategy, grid.fine, {name: tensor.dim() for name, tensor in named.items()}
    )
    plan = plan_splits(program, strategy, grid.fine, stored, strict=True)
    torch.manual_seed(0)
    inputs = [
        torch.randn(grid.box(node.meta["val"].shape, plan.layouts[node]).sizes, requires_grad=node in program.state)
        for node in program.inputs
    ]
    return trace_parts(program, plan, grid, inputs), inputs


def collectives_of(graph: Graph) -> list[tuple[str, Any, Any]]:
    """Each collective's name, group and, unless it serves several, the whole tensor's shape and the two layouts."""
    started = [node for node in graph.nodes if is_collective(node)]
    return [(str(node.target), node.args[-1], (annotation(node, MOVE_KEY) or ())[1:]) for node in started]


def computes(node: Node) -> bool:
    return "mm" in str(node.target)


@pytest.mark.parametrize("maps", [((0, -1), (1, -1)), ((0, 1), (-1, 0)), ((1, 0), (0, -1), (-1, 1))])
def test_all_ranks_communicate_in_the_same_order(program: Program, maps: tuple[tuple[int, int], ...]):
    """Also where some of them have nothing to send, as with the first of these."""
    turns = zip(("addmm", "relu", "addmm_1", "tanh", "addmm_2"), cycle(maps), cycle(("before", "after")), strict=False)
    operators = {name: OperatorConfig(mesh=(2, 2), outputs=(found,), keep=keep) for name, found, keep in turns}
    ranks = [parts_of(program, operators, Stage(4, rank))[0] for rank in range(4)]
    for graphs in ([rank.forward.graph for rank in ranks], [rank.backward.graph for rank in ranks]):
        assert len({str(collectives_of(graph)) for graph in graphs}) == 1


def test_gradients_are_summed_together_and_waited_for_last(program: Program):
    rows = OperatorConfig(mesh=(2,), outputs=((0, -1),))
    parts, _ = parts_of(program, dict.fromkeys(("addmm", "relu", "addmm_1", "tanh", "addmm_2"), rows), Stage(2, 0))
    assert [name for name, *_ in collectives_of(parts.backward.graph)] == [
        "_c10d_functional.all_reduce_coalesced.default"
    ]
    nodes = list(parts.backward.graph.nodes)
    assert min(map(nodes.index, filter(is_wait, nodes))) > max(map(nodes.index, filter(computes, nodes)))


def test_a_weight_is_gathered_while_the_layer_before_it_computes(program: Program):
    stored = OperatorConfig(mesh=(2,), inputs=((0, -1),), outputs=((-1, 0),))
    used = OperatorConfig(mesh=(2,), outputs=((0, -1),))
    operators = {"t": stored, "t_1": stored, "t_2": stored, "addmm": used, "addmm_1": used, "addmm_2": used}
    parts, _ = parts_of(program, operators, Stage(2, 0))
    marks = "".join(
        "s" if is_collective(node) else "w" if is_wait(node) else "c" if computes(node) else ""
        for node in parts.forward.graph.nodes
    )
    assert marks.startswith("swscwscwc")


def test_the_graph_can_be_compiled(program: Program):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        split = OperatorConfig(mesh=(2,), outputs=((0, -1),))
        parts, inputs = parts_of(program, {"addmm": split, "addmm_2": split}, Fake())
        assert prod(inputs[0].shape) > 0
        with torch.no_grad():
            eager = parts.forward(*inputs)
            compiled = torch.compile(parts.forward, backend="aot_eager")(*inputs)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(eager, compiled, strict=True))
    finally:
        dist.destroy_process_group()
