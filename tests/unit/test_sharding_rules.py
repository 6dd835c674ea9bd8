"""Sharding rules and configurations: what can be split together, checked against torch's own results."""

from math import prod

import numpy as np
import pytest
import torch

from offbeat.cluster import ClusterSpec
from offbeat.graph.model import ModelGraph, Operator, TensorSpec, Variable
from offbeat.search.frontier.configs import NONE, configurations, operator_configs
from offbeat.search.frontier.resharding import FineMesh, code_of, layout_of, prime_factors
from offbeat.search.frontier.rules import Rule, rule_of
from offbeat.search.frontier.units import group

aten = torch.ops.aten


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def operator(name, target, kind, inputs=(), variables=(), outputs=(), flops=1) -> Operator:
    outputs = tuple(spec(*shape) for shape in outputs)
    return Operator(name, kind, target, "forward", "", inputs, variables, outputs, flops, 0, 0, 0)


def rule_for(target, kind, inputs, outputs, variables=(), data=()) -> Rule:
    """The rule of one operator that reads results of the given shapes."""
    sources = [operator(f"s{i}", "aten.relu.default", "elementwise", outputs=[shape]) for i, shape in enumerate(inputs)]
    names = tuple(source.name for source in sources)
    tensors = tuple(Variable(f"v{i}", shape, "float32", None, None) for i, shape in enumerate(variables))
    op = operator("op", target, kind, names, tuple(v.name for v in tensors), outputs)
    graph = ModelGraph("g", (*sources, op), tensors, inputs=tuple(spec(*shape) for shape in data))
    return rule_of(op, graph)


def parts(tensor: torch.Tensor, labels, label: int, count: int) -> list[torch.Tensor]:
    return list(tensor.chunk(count, labels.index(label))) if label in labels else [tensor] * count


def assert_splits(rule: Rule, call, tensors: list[torch.Tensor]) -> int:
    """Each label, split in two, gives the parts of the whole result, or terms that add up to it."""
    whole = call(*tensors)
    checked = 0
    for label, size in enumerate(rule.sizes):
        if size % 2:
            continue
        maps = (*rule.inputs, *rule.variables)
        pieces = [parts(tensor, labels, label, 2) for tensor, labels in zip(tensors, maps, strict=True)]
        results = [call(*arguments) for arguments in zip(*pieces, strict=True)]
        if label in rule.sums:
            joined = results[0] + results[1]
        else:
            joined = torch.cat(results, dim=rule.outputs[0].index(label))
        torch.testing.assert_close(joined, whole)
        checked += 1
    return checked


@pytest.mark.parametrize(
    ("target", "kind", "call", "shapes", "expected"),
    [
        ("aten.mm.default", "matmul", aten.mm, [(4, 6), (6, 8)], 3),
        ("aten.bmm.default", "matmul", aten.bmm, [(2, 4, 6), (2, 6, 8)], 4),
        ("aten.mm.default", "matmul", aten.mm, [(4, 4), (4, 4)], 3),
        ("aten.relu.default", "elementwise", aten.relu, [(4, 6)], 2),
        ("aten.add.Tensor", "elementwise", aten.add, [(4, 6, 8), (6, 8)], 3),
        ("aten.mul.Tensor", "elementwise", aten.mul, [(4, 1, 8), (6, 8)], 3),
        ("aten._softmax.default", "reduction", lambda x: aten._softmax(x, -1, False), [(4, 6)], 1),
        ("aten.sum.dim_IntList", "reduction", lambda x: x.sum((1,)), [(4, 6, 8)], 3),
        ("aten.amax.default", "reduction", lambda x: x.amax(1), [(4, 6, 8)], 2),
        ("aten.permute.default", "view", lambda x: x.permute(2, 0, 1), [(4, 6, 8)], 3),
        ("aten.transpose.int", "view", lambda x: x.transpose(1, 2), [(4, 6, 8, 2)], 4),
        ("aten.cat.default", "elementwise", lambda x, y: torch.cat([x, y], 1), [(4, 6, 8), (4, 2, 8)], 2),
        ("aten.slice.Tensor", "view", lambda x: x[:, 1:4], [(4, 6, 8)], 2),
        ("aten.select.int", "view", lambda x: x[:, 1], [(4, 6, 8)], 2),
        ("aten.triu.default", "elementwise", aten.triu, [(4, 6, 6)], 1),
        ("aten.max_pool2d_with_indices.default", "reduction", lambda x: torch.max_pool2d(x, 2), [(4, 2, 8, 8)], 2),
    ],
)
def test_a_label_can_be_split_without_changing_the_result(target, kind, call, shapes, expected):
    tensors = [torch.randn(shape) for shape in shapes]
    rule = rule_for(target, kind, shapes, [tuple(call(*tensors).shape)])
    assert not rule.note
    assert assert_splits(rule, call, tensors) == expected


def test_a_convolution_splits_samples_and_both_kinds_of_channels():
    call = lambda x, w: torch.conv2d(x, w, padding=1)  # noqa: E731 - one expression, used as an operator
    rule = rule_for("aten.convolution.default", "conv", [(4, 6, 8, 8)], [(4, 10, 8, 8)], [(10, 6, 3, 3)])
    # Sums of 54 products in another order differ by more than single precision allows.
    assert assert_splits(rule, call, [torch.randn(4, 6, 8, 8).double(), torch.randn(10, 6, 3, 3).double()]) == 3


def test_a_depthwise_convolution_splits_its_channels_together():
    call = lambda x, w: torch.conv2d(x, w, padding=1, groups=x.shape[1])  # noqa: E731 - as above
    rule = rule_for("aten.convolution.default", "conv", [(4, 6, 8, 8)], [(4, 6, 8, 8)], [(6, 1, 3, 3)])
    assert assert_splits(rule, call, [torch.randn(4, 6, 8, 8), torch.randn(6, 1, 3, 3)]) == 2
    assert not rule.sums


def test_an_embedding_split_by_rows_gives_terms_of_a_sum():
    rule = rule_for("aten.embedding.default", "embedding", [], [(4, 8, 16)], [(32, 16)], data=[(4, 8)])
    rows = next(iter(rule.sums))
    assert rule.variables[0][0] == rows
    assert rule.data == (((4, 8), rule.outputs[0][:2]),)


def test_attention_splits_batch_and_heads():
    shape = (4, 8, 16, 6)
    rule = rule_for("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention", [shape] * 3, [shape])
    call = torch.nn.functional.scaled_dot_product_attention
    assert assert_splits(rule, call, [torch.randn(shape) for _ in range(3)]) == 2


def test_a_norm_keeps_the_axis_it_normalises_whole():
    name = "aten.native_layer_norm.default"
    rule = rule_for(name, "norm", [(4, 6, 8)], [(4, 6, 8), (4, 6, 1), (4, 6, 1)], [(8,), (8,)])
    assert rule.inputs[0][-1] == -1
    assert rule.variables == ((-1,), (-1,))
    tensors = [torch.randn(4, 6, 8), torch.ones(8), torch.zeros(8)]
    assert assert_splits(rule, lambda x, w, b: torch.layer_norm(x, (8,), w, b), tensors) == 2


def test_a_reshape_keeps_the_first_axis_of_each_group():
    rule = rule_for("aten.view.default", "view", [(4, 6, 8)], [(24, 8)])
    assert rule.sizes == (4, 8)
    assert rule.inputs == ((0, -1, 1),)
    assert rule.outputs == ((0, 1),)
    back = rule_for("aten.view.default", "view", [(4, 6, 16)], [(4, 6, 8, 2)])
    assert assert_splits(back, lambda x: x.reshape(x.shape[0], x.shape[1], -1, 2), [torch.randn(4, 6, 16)]) == 3


def test_axes_that_the_shapes_do_not_tell_apart_stay_whole():
    swapped = rule_for("aten.transpose.int", "view", [(4, 6, 6)], [(4, 6, 6)])
    assert swapped.inputs == ((0, -1, -1),)
    summed = rule_for("aten.sum.dim_IntList", "reduction", [(6, 6, 8)], [(6, 8)])
    assert summed.inputs[0][:2] == (-1, -1)


def test_an_unknown_operator_stays_whole_and_says_so():
    rule = rule_for("aten.flip.default", "elementwise", [(4, 6)], [(4, 6)])
    assert rule.inputs == ((-1, -1),)
    assert "flip" in rule.note


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
    assert [(flow.source, flow.target, flow.shape) for flow in units.flows] == [(0, 1, (8, 8))]
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


def test_layouts_are_numbered_and_read_back():
    assert prime_factors(12) == (2, 2, 3)
    for code in range(27):
        assert code_of(layout_of(code, 2, 3), 2) == code


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
    across, within = mesh.groups((0,)), mesh.groups((1,))
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
