"""Sharding rules and configurations: what can be split together, checked against torch's own results."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from operator_calls import CALLS

import offbeat
from offbeat.cluster import ClusterSpec
from offbeat.graph import kinds
from offbeat.graph.model import ModelGraph, Operator, TensorSpec, Variable
from offbeat.runtime.sharded.planning import make_call, tensor_nodes
from offbeat.runtime.sharded.trace import trace_forward
from offbeat.search.frontier.configs import NONE, configurations, operator_configs
from offbeat.search.frontier.units import Rule, group, rule_of
from offbeat.sharding.captured import captured_axes
from offbeat.sharding.layout import groups_of
from offbeat.sharding.rescheduling import FineMesh, code_of
from offbeat.sharding.rules import all_axes


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def operator(name, target, kind, inputs=(), variables=(), outputs=(), flops=1) -> Operator:
    outputs = tuple(spec(*shape) for shape in outputs)
    return Operator(name, kind, target, "forward", "", inputs, variables, outputs, flops, 0, 0, 0)


def captured(target, kind, inputs, outputs, variables=(), data=()) -> tuple[Operator, ModelGraph]:
    """An operator that reads results of the given shapes, and its graph."""
    sources = [operator(f"s{i}", "aten.relu.default", "elementwise", outputs=[shape]) for i, shape in enumerate(inputs)]
    names = tuple(source.name for source in sources)
    tensors = tuple(Variable(f"v{i}", shape, "float32", None, None) for i, shape in enumerate(variables))
    op = operator("op", target, kind, names, tuple(v.name for v in tensors), outputs)
    return op, ModelGraph("g", (*sources, op), tensors, inputs=tuple(spec(*shape) for shape in data))


def rule_for(target, kind, inputs, outputs, variables=(), data=()) -> Rule:
    return rule_of(*captured(target, kind, inputs, outputs, variables, data))


@pytest.mark.parametrize("name", CALLS)
def test_the_shapes_of_a_call_tell_its_axes(name: str):
    call = CALLS[name]()
    inputs, outputs = ([tuple(tensor.shape) for tensor in tensors] for tensors in (call.inputs, call.outputs))
    found = captured_axes(*captured(str(call.target), kinds.kind_of(call.target), inputs, outputs)).axes
    exact = {(tuple(max(split, -1) for split in axis.inputs), axis.outputs) for axis in all_axes(call)}
    told = {(axis.inputs, axis.outputs) for axis in found}
    assert told == exact


def test_an_embedding_split_by_rows_gives_terms_of_a_sum():
    rule = rule_for("aten.embedding.default", "embedding", [], [(4, 8, 16)], [(32, 16)], data=[(4, 8)])
    rows = next(iter(rule.sums))
    assert rule.variables[0][0] == rows
    assert rule.data == (((4, 8), rule.outputs[0][:2]),)


def test_a_norm_keeps_the_axis_it_normalises_whole():
    name = "aten.native_layer_norm.default"
    rule = rule_for(name, "norm", [(4, 6, 8)], [(4, 6, 8), (4, 6, 1), (4, 6, 1)], [(8,), (8,)])
    assert rule.inputs[0][-1] == -1
    assert rule.variables == ((-1,), (-1,))


def test_a_reshape_keeps_the_first_axis_of_each_group():
    rule = rule_for("aten.view.default", "view", [(4, 6, 8)], [(24, 8)])
    assert rule.sizes == (4, 8)
    assert rule.inputs == ((0, -1, 1),)
    assert rule.outputs == ((0, 1),)


def test_axes_that_the_shapes_do_not_tell_apart_stay_whole():
    swapped = rule_for("aten.transpose.int", "view", [(4, 6, 6)], [(4, 6, 6)])
    assert swapped.inputs == ((0, -1, -1),)
    summed = rule_for("aten.sum.dim_IntList", "reduction", [(6, 6, 8)], [(6, 8)])
    assert summed.inputs[0][:2] == (-1, -1)


def test_an_unknown_operator_stays_whole_and_says_so():
    rule = rule_for("aten.flip.default", "elementwise", [(4, 6)], [(4, 6)])
    assert rule.inputs == ((-1, -1),)
    assert "flip" in rule.note


class Mixed(torch.nn.Module):
    """Operators of every kind, with weights that are read directly and through views."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(16, 8)
        self.block = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = torch.nn.Sequential(torch.nn.Conv1d(6, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.MaxPool1d(2))
        self.shift = torch.nn.Parameter(torch.zeros(12, 4))
        self.head = torch.nn.Linear(12, 5)

    def forward(self, tokens, classes):
        x = self.body(self.block(self.words(tokens))).flatten(1) + self.shift[:, 0]
        return torch.nn.functional.cross_entropy(self.head(x.softmax(1)), classes) + x.mean()


def test_what_shapes_tell_of_a_captured_operator_is_true_of_its_call():
    """The search prices no split that the runtime would have no axis for."""
    model, batch = Mixed(), (torch.randint(16, (4, 6)), torch.randint(5, (4,)))
    graph = offbeat.capture(model, batch, name="mixed")
    program = trace_forward(model, model.forward, batch, {})
    compared = 0
    for node in program.nodes:
        if node.name not in program.operators:
            continue
        names = program.operators[node.name].inputs + program.operators[node.name].variables
        read = [program.reads.get(source, "") for source in tensor_nodes(node)]
        known = [names.index(name) if name in names else None for name in read]
        exact = {
            (
                axis.outputs,
                tuple((at, max(split, -1)) for at, split in zip(known, axis.inputs, strict=True) if at is not None),
            )
            for axis in all_axes(make_call(node))
        }
        for axis in captured_axes(graph.operator(node.name), graph).axes:
            assert (axis.outputs, tuple((at, axis.inputs[at]) for at in known if at is not None)) in exact, node.name
            compared += 1
    assert compared > 60


def small_graph() -> ModelGraph:
    """x (8, 4) → linear → relu → linear, with weights stored as torch stores them."""
    operators = (
        operator("t", "aten.t.default", "view", (), ("w",), [(4, 8)]),
        operator("mm", "aten.mm.default", "matmul", ("t",), ("w",), [(8, 8)]),
        operator("relu", "aten.relu.default", "elementwise", ("mm",), (), [(8, 8)]),
        operator("t2", "aten.t.default", "view", (), ("v",), [(8, 4)]),
        operator("mm2", "aten.mm.default", "matmul", ("relu", "t2"), ("v",), [(8, 4)]),
    )
    variables = (Variable("w", (8, 4), "float32", "mm", None), Variable("v", (4, 8), "float32", "mm2", None))
    return ModelGraph("small", operators, variables, inputs=(spec(8, 4),))


def test_what_follows_a_product_and_keeps_its_axes_joins_its_unit():
    units = group(small_graph())
    members = [[member.operator.name for member in unit.members] for unit in units.units]
    assert members == [["t", "mm", "relu"], ["t2", "mm2"]]
    assert [(flow.source, flow.target, flow.bytes) for flow in units.flows] == [(0, 1, 4 * 8 * 8)]
    assert units.owner == {"w": 0, "v": 1}


def test_every_configuration_is_a_mesh_of_all_devices_with_maps_that_divide():
    unit = group(small_graph()).units[0]
    configs = configurations(unit, (2, 2), (0, 0), most=1000)
    meshes = set()
    for index in range(len(configs)):
        made = operator_configs(unit, configs, index, (2, 2))
        meshes.add(made[0].mesh)
        shapes = {"t": [(8, 4), (4, 8)], "mm": [(4, 8), (8, 4), (8, 8)], "relu": [(8, 8), (8, 8)]}
        for member, config in zip(unit.members, made, strict=True):
            assert prod(config.mesh) == 4
            for shape, split in zip(shapes[member.operator.name], config.inputs + config.outputs, strict=True):
                assert len(split) == len(shape)
                assert all(axis < 0 or size % config.mesh[axis] == 0 for size, axis in zip(shape, split, strict=True))
    assert meshes == {(4,), (2, 2)}
    replicated = [NONE, NONE]
    assert replicated in configs.before.tolist()


def test_partial_sums_are_reduced_to_all_or_scattered():
    unit = group(small_graph()).units[0]
    configs = configurations(unit, (2,), (0,), most=1000)
    summed = next(iter(unit.sums))
    rows = [index for index in range(len(configs)) if configs.before[index, 0] == summed]
    results = {operator_configs(unit, configs, index, (2,))[1].outputs[0] for index in rows}
    assert results == {(-1, -1), (0, -1), (-1, 0)}


def cluster(nodes: int = 2, devices: int = 2) -> ClusterSpec:
    return ClusterSpec.homogeneous(nodes=nodes, devices_per_node=devices, bandwidth="10Gbit/s", latency="10us")


def test_layouts_are_numbered():
    every = list(product(range(-1, 2), repeat=3))
    assert code_of(every, 2).tolist() == [code_of(layout, 2) for layout in every] == list(range(27))


def test_moving_a_split_costs_one_all_to_all_where_that_is_cheapest():
    mesh = FineMesh(cluster(1, 4))
    size = 2**24
    paths = mesh.paths(2, size)
    rows, columns = code_of((0, 0), 2), code_of((1, 1), 2)
    assert paths[rows, columns] == pytest.approx(mesh.seconds("all_to_all", (0, 1), size / 4), rel=0.2)
    assert paths[rows, columns] < paths[rows, code_of((-1, -1), 2)]
    assert paths[code_of((-1, -1), 2), rows] < 1e-7


def test_paths_are_never_longer_than_a_detour():
    paths = FineMesh(cluster()).paths(2, 2**20)
    assert (paths[:, None, :] <= paths[:, :, None] + paths[None, :, :] + 1e-12).all()
    assert np.isfinite(paths).all()


def test_groups_that_share_an_interface_are_slower():
    mesh = FineMesh(cluster(2, 2))
    across, within = groups_of((0,), mesh.factors), groups_of((1,), mesh.factors)
    assert across == ((0, 2), (1, 3))
    assert within == ((0, 1), (2, 3))
    alone = FineMesh(cluster(2, 1)).seconds("all_reduce", (0,), 2**26)
    assert mesh.seconds("all_reduce", (0,), 2**26) == pytest.approx(2 * alone, rel=0.05)


def test_partial_gradients_are_scattered_where_their_reader_wants_parts():
    mesh = FineMesh(cluster(1, 2))
    size = 2**24
    done = mesh.completed(1, size, (-1,), (0,))
    assert done[code_of((-1,), 1)] == pytest.approx(mesh.seconds("all_reduce", (0,), size), rel=1e-3)
    assert done[code_of((0,), 1)] == pytest.approx(mesh.seconds("reduce_scatter", (0,), size), rel=1e-3)
