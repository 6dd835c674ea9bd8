"""ModelGraph, its coarsened view and its estimates, on graphs written by hand."""

import dataclasses

import pytest
import torch

from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.graph import Constant, ModelGraph, Operator, TensorSpec, Variable, kinds
from offbeat.graph.coarsen import segments
from offbeat.graph.model import update_operators
from offbeat.graph.skeleton import skeleton
from offbeat.plan import lower
from offbeat.simulate.learned.features import encode
from offbeat.strategy import Strategy, VariableConfig


def op(name: str, phase: str, inputs: tuple[str, ...] = (), **changes) -> Operator:
    values = {
        "name": name,
        "kind": "matmul",
        "target": "aten.mm.default",
        "phase": phase,
        "module": "layer",
        "inputs": inputs,
        "variables": (),
        "outputs": (TensorSpec((2, 3), "float32"),),
        "flops": 100,
        "bytes_read": 40,
        "bytes_written": 20,
        "activation_bytes": 8,
    }
    return Operator(**(values | changes))


@pytest.fixture
def graph() -> ModelGraph:
    variables = (
        Variable("a.weight", (4, 3), "float32", "f1", "b3", factor_rows=2),
        Variable("a.bias", (4,), "float32", "f1", "b3"),
        Variable("table", (1000, 8), "float32", "f3", "b1", sparse=True, sparse_rows=5),
        Variable("unused", (2,), "bfloat16", None, None),
    )
    operators = (
        op("f0", "forward", kind="view", flops=0, bytes_read=0, bytes_written=0),
        op("f1", "forward", ("f0",), variables=("a.weight", "a.bias")),
        op("f2", "forward", ("f1",)),
        op("f3", "forward", ("f2",), variables=("table",)),
        op("b0", "backward", ("f3",), activation_bytes=0),
        op("b1", "backward", ("b0",), activation_bytes=0),
        op("b2", "backward", ("b1", "f1"), activation_bytes=0),
        op("b3", "backward", ("b2",), activation_bytes=0),
        op("b4", "backward", ("b2",), activation_bytes=0),
    )
    return ModelGraph(
        name="hand",
        operators=operators + update_operators(variables, "Adam", 2),
        variables=variables,
        constants=(Constant("frozen", (10, 2), "float16", "frozen"), Constant("mean", (3,), "float32", "buffer")),
        inputs=(TensorSpec((2, 3), "float32"),),
        optimizer="Adam",
        optimizer_slots=2,
    )


def test_json_keeps_everything(graph, tmp_path):
    path = tmp_path / "graph.json"
    graph.save(path)
    loaded = ModelGraph.load(path)
    assert loaded == graph
    assert loaded.digest == graph.digest


def test_digest_sees_the_step_but_not_its_name_or_times(graph):
    assert dataclasses.replace(graph, name="other").digest == graph.digest
    assert graph.with_seconds({"f1": 0.5}).digest == graph.digest
    changed = dataclasses.replace(graph.operators[1], flops=101)
    operators = (graph.operators[0], changed, *graph.operators[2:])
    assert dataclasses.replace(graph, operators=operators).digest != graph.digest
    accumulating = dataclasses.replace(graph, passes=4)
    assert accumulating.digest != graph.digest
    assert ModelGraph.from_json(accumulating.to_json()) == accumulating
    with pytest.raises(OffbeatError, match="passes must be at least 1, got 0"):
        dataclasses.replace(graph, passes=0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"inputs":["f0"]', b'"inputs":["b0"]', "reads 'b0', which does not run before it"),
        (b'"inputs":["f0"]', b'"inputs":["nowhere"]', "reads 'nowhere', which does not run before it"),
        (b'"name":"f1"', b'"name":"f2"', "two operators have the same name"),
        (b'"first_use":"f3"', b'"first_use":"f9"', "'table' names no operator 'f9'"),
        (b'"bfloat16"', b'"float3"', "unknown dtype 'float3'"),
        (b'"format":1', b'"format":2', "format must be 1, got 2"),
        (b'"phase":"backward"', b'"phase":"sideways"', "sideways"),
        (b'"flops":100', b'"flops":"many"', "many"),
    ],
)
def test_a_broken_file_is_refused_with_one_sentence(graph, tmp_path, old, new, message):
    path = tmp_path / "graph.json"
    content = graph.to_json()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(OffbeatError) as error:
        ModelGraph.load(path)
    text = str(error.value)
    assert message in text
    assert str(path) in text
    assert "\n" not in text


def test_sizes(graph):
    assert graph.parameter_count == 12 + 4 + 8000 + 2 + 20
    assert graph.parameter_bytes == 4 * (12 + 4 + 8000) + 2 * 2 + 2 * 20
    assert graph.activation_bytes == 4 * 8
    assert graph.operator("f2").name == "f2"
    assert graph.variable("table").sparse_rows == 5


def test_gradients_are_ordered_by_completion_and_ties_by_use(graph):
    assert [variable.name for variable in graph.gradient_order] == ["table", "a.weight", "a.bias"]


def test_update_operators_touch_weight_gradient_and_state_of_the_rows_that_change(graph):
    weight = graph.operator("update.a.weight")
    assert (weight.bytes_read, weight.bytes_written) == (48 * 4, 48 * 3)
    assert weight.inputs == ("b3",)
    table = graph.operator("update.table")
    assert table.bytes_written == 5 * 8 * 4 * 3
    assert "update.unused" not in graph.operator_index
    sgd = graph.with_optimizer("SGD", 0)
    assert sgd.operator("update.a.weight").bytes_written == 48
    assert len(sgd.operators) == len(graph.operators)


def test_segments_cover_every_operator_once_in_order(graph):
    cut = segments(graph)
    assert [name for segment in cut for name in segment.operators] == [op.name for op in graph.operators]
    assert sum(segment.flops for segment in cut) == graph.flops
    assert sum(segment.activation_bytes for segment in cut) == graph.activation_bytes
    assert len({segment.name for segment in cut}) == len(cut)


def test_segments_are_cut_where_variables_are_first_used_and_gradients_completed(graph):
    cut = [(s.phase, s.operators, s.reads, s.completes) for s in segments(graph)]
    assert cut == [
        ("forward", ("f0",), (), ()),
        ("forward", ("f1", "f2"), ("a.weight", "a.bias"), ()),
        ("forward", ("f3",), ("table",), ()),
        ("backward", ("b0", "b1"), (), ("table",)),
        ("backward", ("b2", "b3"), (), ("a.weight", "a.bias")),
        ("backward", ("b4",), (), ()),
        ("optimizer", ("update.a.weight",), (), ()),
        ("optimizer", ("update.a.bias",), (), ()),
        ("optimizer", ("update.table",), (), ()),
    ]


def test_a_segment_has_a_time_once_all_its_operators_have(graph):
    by_name = {s.operators: s for s in segments(graph.with_seconds({"f1": 0.5, "b0": 0.25, "b1": 0.5}))}
    assert by_name["f1", "f2"].seconds is None
    assert by_name["b0", "b1"].seconds == 0.75
    assert by_name["b0", "b1"].bytes_moved == 120


def test_estimates_are_the_roofline_unless_measured():
    operator = op("f", "forward", flops=1000, bytes_read=300, bytes_written=200)
    assert operator.estimate(100.0, 1e9) == 10.0
    assert operator.estimate(1e9, 100.0) == 5.0
    assert dataclasses.replace(operator, seconds=0.125).estimate(100.0, 1e9) == 0.125
    assert dataclasses.replace(operator, kind="view").estimate(100.0, 1e9) == 0.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mm.default", "matmul"),
        ("convolution_backward.default", "conv"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward.default", "attention"),
        ("native_layer_norm_backward.default", "norm"),
        ("embedding_dense_backward.default", "embedding"),
        ("nll_loss_backward.default", "loss"),
        ("mse_loss.default", "loss"),
        ("gelu_backward.default", "elementwise"),
        ("add_.Tensor", "elementwise"),
        ("native_dropout_backward.default", "elementwise"),
        ("sum.dim_IntList", "reduction"),
        ("_softmax.default", "reduction"),
        ("permute.default", "view"),
        ("split.Tensor", "view"),
        ("unfold.default", "view"),
        ("_unsafe_view.default", "view"),
        ("mkldnn_rnn_layer.default", "rnn"),
        ("arange.default", "other"),
    ],
)
def test_kinds(name, kind):
    packet, overload = name.split(".")
    assert kinds.kind_of(getattr(getattr(torch.ops.aten, packet), overload)) == kind


def test_bytes_count_memory_not_elements():
    aten = torch.ops.aten
    row, table, indices = torch.empty(1, 8), torch.empty(1000, 8), torch.zeros(5, dtype=torch.long)
    wide = row.expand(100, 8)
    assert kinds.bytes_of(aten.add.Tensor, (wide, 1.0), {}, torch.empty(100, 8)) == (32, 3200)
    assert kinds.bytes_of(aten.embedding.default, (table, indices), {}, torch.empty(5, 8)) == (160 + 40, 160)
    assert kinds.bytes_of(aten.t.default, (table,), {}, table.t()) == (0, 0)
    assert kinds.bytes_of(aten.empty_like.default, (table,), {}, table) == (0, 0)


def test_flops_of_operators_torch_has_no_formula_for():
    aten = torch.ops.aten
    matrix, vector = torch.empty(6, 4), torch.empty(4)
    assert kinds.flops_of(aten.mv.default, (matrix, vector), {}, torch.empty(6)) == 48
    assert kinds.flops_of(aten.addmv.default, (torch.empty(6), matrix, vector), {}, torch.empty(6)) == 48
    assert kinds.flops_of(aten.dot.default, (vector, vector), {}, torch.empty(())) == 8
    query = torch.empty(2, 3, 5, 7)
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    assert kinds.flops_of(attention.default, (query, query, query), {}, query) == 2 * 2 * (2 * 3) * 5 * 5 * 7
    gradient = aten._scaled_dot_product_flash_attention_for_cpu_backward
    assert kinds.flops_of(gradient.default, (query, query, query, query), {}, query) == 5 * 2 * (2 * 3) * 5 * 5 * 7


def test_a_graph_without_a_trace_counts_tied_weights_once():
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(50, 4, sparse=True), "head": torch.nn.Linear(4, 50)})
    model["head"].weight = model["table"].weight
    variables = skeleton(model).variables
    assert [(v.name, v.aliases, v.sparse_rows) for v in variables] == [
        ("table.weight", ("head.weight",), 50),
        ("head.bias", (), 0),
    ]
    model["table"].weight.requires_grad_(False)
    frozen = skeleton(model)
    assert [constant.name for constant in frozen.constants] == ["table.weight"]
    assert frozen.parameter_count == 50 * 4 + 50


def branching() -> ModelGraph:
    """stem → (left, then lower left | right) → head; left and right do not depend on each other."""
    names = ("stem", "left", "below", "right", "head")
    variables = tuple(Variable(f"{name}.weight", (4,), "float32", name, f"b.{name}") for name in names)
    operators = (
        op("stem", "forward", variables=("stem.weight",)),
        op("relu", "forward", ("stem",)),
        op("left", "forward", ("relu",), variables=("left.weight",)),
        op("below", "forward", ("left",), variables=("below.weight",)),
        op("right", "forward", ("relu",), variables=("right.weight",)),
        op("add", "forward", ("below", "right")),
        op("head", "forward", ("add",), variables=("head.weight",)),
        *(op(f"b.{name}", "backward") for name in reversed(names)),
    )
    return ModelGraph(name="branching", operators=operators, variables=variables)


def test_variables_are_joined_by_the_models_own_dataflow(graph: ModelGraph) -> None:
    assert set(branching().variable_edges) == {
        ("stem.weight", "left.weight"),
        ("left.weight", "below.weight"),
        ("stem.weight", "right.weight"),
        ("below.weight", "head.weight"),
        ("right.weight", "head.weight"),
    }
    assert set(graph.variable_edges) == {("a.weight", "a.bias"), ("a.weight", "table"), ("a.bias", "table")}


def test_attention_sees_branches_of_the_model_and_shards_of_the_plan() -> None:
    graph, cluster = branching(), ClusterSpec.homogeneous(nodes=2)
    cut = {"right.weight": VariableConfig(partition=(2,))}
    encoded = encode(lower(graph, cluster, Strategy(variables=cut)))
    # Nodes are shards in the order of the variables: stem, left, below, two of right, head.
    between = {(a, b) for a, b in encoded.edges.T.tolist() if a < b}
    assert between == {(0, 1), (1, 2), (0, 3), (0, 4), (3, 4), (2, 5), (3, 5), (4, 5)}
