"""Meshes and tensor maps become layouts, parts tile their tensors, and calls are split as their configuration says."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from operator_calls import CALLS, call, ones
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import offbeat
from offbeat.errors import StrategyError
from offbeat.runtime.sharded.calls import added_once, run_part
from offbeat.runtime.sharded.planning import Split, plan_splits, tensors_of, variable_layouts
from offbeat.runtime.sharded.trace import trace_forward
from offbeat.sharding.calls import Axis, Call
from offbeat.sharding.exchange import plan_exchange
from offbeat.sharding.layout import (
    SUM,
    WHOLE,
    box_of,
    coordinate,
    fine_axes,
    layout_of,
    prime_factors,
    shortest_part,
)
from offbeat.sharding.rules import axes_of, leading_pairs
from offbeat.strategy import OperatorConfig, Strategy

aten = torch.ops.aten


def test_meshes_are_made_of_the_finest_one():
    assert prime_factors(1) == (1,)
    assert prime_factors(12) == (2, 2, 3)
    assert fine_axes((4,), (2, 2)) == ((0, 1),)
    assert fine_axes((2, 2), (2, 2)) == ((0,), (1,))
    assert fine_axes((1, 4), (2, 2)) == ((), (0, 1))
    assert fine_axes((2, 4), (2, 2, 2)) == ((0,), (1, 2))
    assert fine_axes((3, 4), (2, 2, 3)) == ((2,), (0, 1))
    with pytest.raises(StrategyError, match=r"mesh \[2, 4\] has 8 devices, the job has 4 ranks"):
        fine_axes((2, 4), (2, 2))


def test_tensor_maps_become_layouts():
    assert layout_of((-1, 0), (4,), (2, 2)) == (1, 1)
    assert layout_of((1, 0), (2, 2), (2, 2)) == (1, 0)
    assert layout_of((0, -1), (2, 2), (2, 2)) == (0, WHOLE)
    assert layout_of((), (4,), (2, 2)) == (WHOLE, WHOLE)


def test_one_axis_over_a_mesh_of_four_is_four_parts_in_rank_order():
    boxes = [box_of((8, 3), (0, 0), (2, 2), rank) for rank in range(4)]
    assert [box.starts for box in boxes] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert {box.sizes for box in boxes} == {(2, 3)}


@given(
    st.sampled_from([(2,), (2, 2), (3,), (2, 3), (2, 2, 2)]),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.data(),
)
def test_parts_tile_the_tensor(fine: tuple[int, ...], shape: list[int], data: st.DataObject):
    layout = tuple(data.draw(st.integers(WHOLE, len(shape) - 1)) for _ in fine)
    copies = math.prod(size for size, axis in zip(fine, layout, strict=True) if axis == WHOLE)
    covered = torch.zeros(shape, dtype=torch.int64)
    for rank in range(math.prod(fine)):
        covered[box_of(shape, layout, fine, rank).slices] += 1
    assert torch.all(covered == copies)
    for axis, length in enumerate(shape):
        cuts = [size for size, split in zip(fine, layout, strict=True) if split == axis]
        sizes = [box_of(shape, layout, fine, rank).sizes[axis] for rank in range(math.prod(fine))]
        assert shortest_part(length, cuts) == min(sizes)


@given(
    st.sampled_from([(2,), (2, 2), (3,), (2, 3)]),
    st.lists(st.integers(1, 7), min_size=0, max_size=3),
    st.data(),
)
def test_an_exchange_gives_every_rank_its_new_part_once(fine: tuple[int, ...], shape: list[int], data: st.DataObject):
    have, need = (tuple(data.draw(st.integers(WHOLE, len(shape) - 1)) for _ in fine) for _ in range(2))
    world = range(math.prod(fine))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    plans = [plan_exchange(tuple(shape), have, need, fine, rank) for rank in world]
    before = [whole[box_of(shape, have, fine, rank).slices] for rank in world]
    for rank, plan in enumerate(plans):
        expected = whole[box_of(shape, need, fine, rank).slices]
        if plan.local:
            assert plan.sends[rank] is None or torch.equal(before[rank][plan.sends[rank]], expected)
        part, filled = torch.zeros(plan.sizes, dtype=torch.int64), torch.zeros(plan.sizes, dtype=torch.int64)
        for other, region in enumerate(plan.receives):
            sent = plans[other].sends[rank]
            assert (region is None) == (sent is None)
            if region is not None and sent is not None:
                part[region] = before[other][sent]
                filled[region] += 1
        assert torch.equal(part, expected)
        assert torch.all(filled == 1)
    assert len({plan.local for plan in plans}) == 1


@given(st.sampled_from([(2,), (2, 2), (2, 3), (2, 2, 3)]))
def test_ranks_are_in_row_major_order(fine: tuple[int, ...]):
    places = [coordinate(rank, fine) for rank in range(math.prod(fine))]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


def test_views_keep_the_leading_axis_of_merged_ones():
    assert leading_pairs((4, 5, 6), (20, 6)) == [(0, 0), (2, 1)]
    assert leading_pairs((20, 6), (4, 5, 2, 3)) == [(0, 0), (1, 2)]
    assert leading_pairs((1, 7, 1), (7,)) == [(1, 0)]
    assert leading_pairs((6, 4), (4, 6)) == [(0, 0)]


def random_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return torch.randn(tensor.shape, dtype=torch.float64)
    return torch.randint(2, tensor.shape).to(tensor.dtype)


def part_of(call: Call, axis: Axis, inputs: list[torch.Tensor], index: int) -> tuple[torch.Tensor, ...]:
    """What one of two ranks computes of a call that is split along an axis."""
    given, made = (tuple((place,) for place in places) for places in (axis.inputs, axis.outputs))
    split = Split(None, call, (axis,), given, given, made, made)
    rank = SimpleNamespace(place=(index,), box=lambda shape, layout: box_of(shape, layout, (2,), index))
    parts = [t.chunk(2, place)[index] if place >= 0 else t for t, place in zip(inputs, axis.inputs, strict=True)]
    return run_part(split, parts, rank)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_the_sum_or_the_row_of_its_parts(name: str):
    torch.manual_seed(0)
    drawn = CALLS[name]()
    axes = axes_of(drawn)
    assert axes
    inputs = [random_like(tensor) for tensor in drawn.inputs]
    left = iter(inputs)
    args = pytree.tree_map_only(torch.Tensor, lambda _: next(left), drawn.args)
    whole = tensors_of(drawn.target(*args, **drawn.kwargs))
    for axis in axes:
        first, second = (part_of(drawn, axis, inputs, index) for index in range(2))
        for position, expected in enumerate(whole):
            along = axis.outputs[position]
            if along == WHOLE:
                continue
            pieces = first[position], second[position]
            together = sum(pieces) if along == SUM else torch.cat(pieces, along)
            assert torch.allclose(together, expected, rtol=0, atol=1e-12), (axis, position)


@pytest.fixture
def mesh():
    """Two ranks that exchange nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def dtensor_outputs(call: Call, axis: Axis, mesh: DeviceMesh) -> list[int] | None:
    """How DTensor says the results are split; None if it runs no such call, or on other parts."""
    left = iter(zip(call.inputs, axis.inputs, strict=True))

    def part(_: torch.Tensor) -> DTensor:
        tensor, place = next(left)
        placement = Shard(place) if place >= 0 else Replicate()
        return DTensor.from_local(tensor.chunk(2, max(place, 0))[0] if place >= 0 else tensor, mesh, [placement])

    try:
        with CommDebugMode() as traffic:
            results = tensors_of(call.target(*pytree.tree_map_only(torch.Tensor, part, call.args), **call.kwargs))
    except (NotImplementedError, RuntimeError):
        return None
    found = [result.placements[0] for result in results]
    return None if traffic.get_total_counts() else [
        SUM if place.is_partial() else place.dim if place.is_shard() else WHOLE for place in found
    ]  # fmt: skip


@pytest.mark.slow
def test_axes_are_those_of_dtensor_where_it_knows_the_operator(mesh):
    agreed = 0
    # DTensor takes the channels of a convolution that is split by them to be whole.
    for drawn in (make() for name, make in CALLS.items() if "convolution" not in name):
        for axis in axes_of(drawn):
            found = dtensor_outputs(drawn, axis, mesh) if min(axis.inputs) >= WHOLE else None
            assert found in (None, list(axis.outputs)), (drawn.name, axis)
            agreed += found is not None
    assert agreed > 30


def test_an_operator_without_a_rule_and_one_that_draws_have_no_axes():
    assert axes_of(call(aten.linalg_qr.default, ones(4, 4))) == ()
    assert axes_of(call(aten.native_dropout.default, ones(4, 4), 0.5, True)) == ()


def test_samples_of_a_training_batch_norm_stay_together():
    assert axes_of(CALLS["batch_norm"]()) == (Axis((1, 0, 0, 0, 0), (1, 0, 0, 0, 0), 6),)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


@pytest.fixture(scope="module")
def program():
    model = Two()
    return trace_forward(model, model.forward, (ones(4, 6),), {})


def test_the_program_has_the_operators_of_capture(program):
    graph = offbeat.capture(Two(), (ones(4, 6),))
    captured = {op.name: (op.target, op.inputs, op.variables) for op in graph.phase("forward")}
    assert {op.name: (op.target, op.inputs, op.variables) for op in program.operators.values()} == captured


def test_operators_are_split_as_configured(program):
    """The first layer by columns over two ranks and by samples over two, the second by rows."""
    operators = {
        "addmm": OperatorConfig(mesh=(2, 2), inputs=((-1, 1), (1,), (1, -1)), outputs=((0, 1),)),
        "addmm_1": OperatorConfig(mesh=(4,), inputs=((-1, 0), (0, -1), (-1,), (-1, 0)), outputs=((-1, -1),)),
    }
    assert program.operators["addmm"].inputs + program.operators["addmm"].variables == (
        "t",
        "first.bias",
        "first.weight",
    )
    strategy = Strategy(operators=operators)
    ranks = {"first.weight": 2, "first.bias": 1, "second.weight": 2, "second.bias": 1}
    stored = variable_layouts(program.operators, strategy, (2, 2), ranks)
    assert stored == {
        "first.weight": (WHOLE, 0),
        "first.bias": (WHOLE, 0),
        "second.weight": (1, 1),
        "second.bias": (WHOLE, WHOLE),
    }
    splits = plan_splits(program, strategy, (2, 2), stored, strict=True).splits
    first, second = (split for split in splits.values() if split.call.name == "addmm")
    # The batch has no map of its own: it follows the samples of the result.
    assert first.inputs == ((WHOLE, 0), (0, WHOLE), (WHOLE, 1))
    assert first.gradients == ((SUM, 0), (0, SUM), (SUM, 1))
    assert first.results == first.outputs == ((0, 1),)
    assert second.inputs == ((WHOLE, WHOLE), (1, 1), (0, 0))
    assert second.results == ((SUM, SUM),)
    assert second.outputs == ((WHOLE, WHOLE),)
    places = [SimpleNamespace(place=coordinate(rank, (2, 2))) for rank in range(4)]
    assert [added_once(second, 0, torch.ones(1), place).item() for place in places] == [1, 0, 0, 0]


def test_an_operator_without_configuration_follows_its_arguments(program):
    operators = {"addmm": OperatorConfig(mesh=(2,), outputs=((0, -1),))}
    splits = plan_splits(program, Strategy(operators=operators), (2,), {}, strict=True).splits
    outputs = {split.node.name: split.outputs[0] for split in splits.values()}
    assert outputs["relu"] == outputs["addmm_1"] == (0,)
    assert outputs["t"] == (WHOLE,)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (OperatorConfig(mesh=(3,), outputs=((0, -1),)), r"operator 'addmm': mesh \[3\] has 3 devices, the job has 2"),
        (OperatorConfig(mesh=(2,), outputs=((0,),)), r"operator 'addmm': the map \[0\] of 'result 0' has 1 axes"),
        (OperatorConfig(mesh=(2,), inputs=((0, -1),)), "operator 'addmm': 1 input maps are given, it reads"),
        (OperatorConfig(mesh=(2,), outputs=((0, -1), (0,))), "operator 'addmm': 2 output maps are given, it has 1"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(program, config: OperatorConfig, sentence: str):
    with pytest.raises(StrategyError, match=sentence):
        plan_splits(program, Strategy(operators={"addmm": config}), (2,), {}, strict=True)
    # An evaluation pass may have another operator of that name.
    assert plan_splits(program, Strategy(operators={"addmm": config}), (2,), {}, strict=False)
