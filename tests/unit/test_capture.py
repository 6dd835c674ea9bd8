"""What capture says about real models, against hand-computed sizes and against torch itself."""

import copy
import os
import random
import resource
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import mostly_slow
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import offbeat.graph
from offbeat.errors import CaptureError
from offbeat.graph import ModelGraph, capture
from offbeat.graph.capture import optimizer_state
from offbeat.graph.coarsen import segments

PACKAGE_ROOT = str(Path(offbeat.graph.__file__).parents[2])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        return self.head(torch.relu_(self.norm(self.conv(images))).mean((2, 3)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return nn.functional.cross_entropy(
            self.head(self.block(self.embedding(tokens))).flatten(0, 1), tokens.flatten()
        )


class Branching(nn.Module):
    """Which layers run depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.positive = nn.Linear(8, 8)
        self.negative = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, batch):
        self.calls += 1
        hidden = self.norm(torch.relu(self.first(batch))) * self.scale
        if nn.functional.dropout(hidden, 0.1).square().sum() >= 0:
            return self.positive(hidden) + hidden
        return self.negative(hidden)


class Recurrent(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, sparse=sparse)
        self.lstm = nn.LSTM(16, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


def encoder(dropout: float = 0.0) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def captured_by_run(model: nn.Module, inputs) -> ModelGraph:
    with pytest.warns(UserWarning, match="cannot be traced"):
        return capture(model, inputs)


def test_an_mlps_operators_have_hand_computed_sizes():
    graph = capture(mlp(), torch.empty(4, 16))
    computing = [op for op in graph.operators if op.kind != "view" and op.phase != "optimizer"]
    sizes = [(op.phase, op.target, op.module, op.flops, op.bytes_read, op.bytes_written) for op in computing]
    assert sizes == [
        ("forward", "aten.addmm.default", "0", 2 * 4 * 16 * 32, 4 * (64 + 512 + 32), 4 * 128),
        ("forward", "aten.relu.default", "1", 128, 4 * 128, 4 * 128),
        ("forward", "aten.addmm.default", "2", 2 * 4 * 32 * 8, 4 * (128 + 256 + 8), 4 * 32),
        ("forward", "aten.sum.default", "", 32, 4 * 32, 4),
        ("backward", "aten.mm.default", "2", 2 * 4 * 8 * 32, 4 * (1 + 256), 4 * 128),
        ("backward", "aten.mm.default", "2", 2 * 8 * 4 * 32, 4 * (1 + 128), 4 * 256),
        ("backward", "aten.sum.dim_IntList", "2", 32, 4, 4 * 8),
        ("backward", "aten.threshold_backward.default", "1", 128, 4 * 256, 4 * 128),
        ("backward", "aten.mm.default", "0", 2 * 32 * 4 * 16, 4 * (128 + 64), 4 * 512),
        ("backward", "aten.sum.dim_IntList", "0", 128, 4 * 128, 4 * 32),
    ]
    # Backward needs the ReLU's result (for its own gradient and for the second weight's), nothing else.
    assert [op.activation_bytes for op in computing if op.activation_bytes] == [4 * 128]
    assert all(op.flops == op.bytes_read == op.bytes_written == 0 for op in graph.operators if op.kind == "view")
    assert graph.source == "joint"
    assert graph.inputs[0].shape == (4, 16)


def test_an_mlps_variables():
    graph = capture(mlp(), torch.empty(4, 16), name="two layers")
    assert graph.name == "two layers"
    assert [(v.name, v.shape, v.factor_rows) for v in graph.variables] == [
        ("0.weight", (32, 16), 4),
        ("0.bias", (32,), 0),
        ("2.weight", (8, 32), 4),
        ("2.bias", (8,), 0),
    ]
    assert [graph.operator(v.first_use).target for v in graph.variables] == ["aten.addmm.default"] * 4
    assert {v.first_use for v in graph.variables[:2]} != {v.first_use for v in graph.variables[2:]}
    assert graph.operator(graph.variables[0].first_use).variables == ("0.bias", "0.weight")


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (mlp(), torch.randn(4, 16)),
        (encoder(), torch.randn(2, 7, 32)),
        (encoder(dropout=0.1), torch.randn(2, 7, 32)),
        (ConvNet(), torch.randn(2, 3, 9, 9)),
        (Tied(), torch.randint(0, 10, (2, 4))),
    ],
    ids=["mlp", "encoder", "encoder with dropout", "convolutions", "tied"],
)
def test_flops_and_gradient_order_are_those_of_a_real_step(model, inputs):
    graph = capture(model, inputs)
    ready: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    with FlopCounterMode(display=False) as counter:
        model(inputs).sum().backward()
    products = sum(op.flops for op in graph.operators if op.kind in ("matmul", "conv"))
    assert products == counter.get_total_flops()
    assert [variable.name for variable in graph.gradient_order] == ready
    assert graph.source == "joint"


@pytest.mark.parametrize(
    ("model", "inputs"),
    [(mlp(), torch.randn(4, 16)), (encoder(), torch.randn(2, 7, 32))],
    ids=["mlp", "encoder"],
)
def test_memory_kept_for_backward_is_what_autograd_saves(model, inputs):
    graph = capture(model, inputs)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), inputs]}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(inputs).sum()
    assert loss.requires_grad
    assert graph.activation_bytes == sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_convolution_and_batch_norm():
    graph = capture(ConvNet(), (torch.empty(2, 3, 9, 9), torch.zeros(2, dtype=torch.long)), nn.CrossEntropyLoss())
    conv = next(op for op in graph.operators if op.kind == "conv")
    assert conv.flops == 2 * 2 * 7 * 7 * 8 * 3 * 3 * 3
    assert conv.module == "conv"
    assert {op.module for op in graph.operators if op.kind == "norm"} == {"norm"}
    assert [(c.name, c.kind) for c in graph.constants] == [
        ("norm.running_mean", "buffer"),
        ("norm.running_var", "buffer"),
        ("norm.num_batches_tracked", "buffer"),
    ]
    assert graph.variable("conv.weight").factor_rows == 0
    assert len(graph.inputs) == 2
    assert {"loss"} <= {op.kind for op in graph.operators}


def test_a_tied_weight_is_one_variable_whose_gradient_ends_with_the_embedding():
    graph = capture(Tied(), torch.zeros(2, 4, dtype=torch.long))
    tied = graph.variable("embedding.weight")
    assert tied.aliases == ("head.weight",)
    assert "head.weight" not in graph.variable_index
    assert graph.operator(tied.first_use).target == "aten.embedding.default"
    assert graph.operator(tied.gradient_from).target == "aten.add.Tensor"
    assert graph.gradient_order[-1] is tied
    assert tied.factor_rows == 0
    readers = {op.module for op in graph.phase("forward") if "embedding.weight" in op.variables}
    assert readers == {"embedding", "head"}


def test_frozen_parameters_are_constants():
    model = mlp()
    model[0].requires_grad_(False)
    graph = capture(model, torch.empty(4, 16))
    assert [(c.name, c.kind) for c in graph.constants] == [("0.weight", "frozen"), ("0.bias", "frozen")]
    assert [v.name for v in graph.variables] == ["2.weight", "2.bias"]
    assert graph.parameter_count == sum(p.numel() for p in model.parameters())


def test_unused_parameters_are_variables_without_gradient():
    model = mlp()
    model.spare = nn.Linear(3, 3)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    graph = capture(model, torch.empty(4, 16))
    assert [(v.name, v.first_use, v.gradient_from) for v in graph.variables[-2:]] == [
        ("spare.weight", None, None),
        ("spare.bias", None, None),
    ]
    assert "update.spare.weight" not in graph.operator_index


def test_sparse_embeddings():
    model = Recurrent(sparse=True)
    graph = capture(model, torch.zeros(4, 7, dtype=torch.long))
    table = graph.variable("embedding.weight")
    assert (table.sparse, table.sparse_rows) == (True, 28)
    assert graph.operator(table.gradient_from).bytes_written == 28 * 16 * 4
    assert graph.operator("update.embedding.weight").bytes_written == 28 * 16 * 4
    assert model.embedding.sparse is True
    assert capture(model, torch.zeros(40, 7, dtype=torch.long)).variable("embedding.weight").sparse_rows == 50
    assert not capture(Recurrent(), torch.zeros(4, 7, dtype=torch.long)).variable("embedding.weight").sparse


def test_a_sparse_embedding_that_is_also_a_dense_weight_has_a_dense_gradient():
    model = Tied()
    model.embedding.sparse = True
    assert not capture(model, torch.zeros(2, 4, dtype=torch.long)).variable("embedding.weight").sparse


def test_embedding_bag():
    bag = nn.EmbeddingBag(100, 8, mode="sum", sparse=True)
    graph = capture(bag, torch.zeros(3, 5, dtype=torch.long))
    assert graph.source == "joint"
    assert (graph.variables[0].sparse, graph.variables[0].sparse_rows) == (True, 15)


def test_lstm():
    graph = capture(Recurrent(), torch.zeros(4, 7, dtype=torch.long))
    assert graph.source == "joint"
    assert len(graph.variables) == 11
    assert all(v.gradient_from and v.first_use for v in graph.variables)
    assert {op.module for op in graph.operators} == {"embedding", "lstm", "head", ""}
    weights = sum(v.elements for v in graph.variables if v.name.startswith("lstm.weight"))
    forward = sum(op.flops for op in graph.phase("forward") if op.kind == "matmul" and op.module == "lstm")
    assert forward == 2 * 4 * 7 * weights


class Returning(nn.Module):
    def __init__(self, shape) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.shape = shape

    def forward(self, batch):
        return self.shape(self.layer(batch))


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize(
    ("shape", "forward"),
    [
        (lambda y: y.mean(), ["addmm", "mean"]),
        (lambda y: {"logits": y, "loss": y.mean()}, ["addmm", "mean"]),
        (lambda y: Output(y.mean(), y * 2), ["addmm", "mean"]),
        (lambda y: (torch.arange(3), y.mean(), y * 2), ["addmm", "mean"]),
        (lambda y: y, ["addmm", "sum"]),
        (lambda y: [y, {"twice": y * 2, "flag": torch.ones(1)}, 3], ["addmm", "mul", "sum", "sum", "add"]),
    ],
    ids=["scalar", "dict", "object", "tuple", "tensor", "nested"],
)
def test_the_loss_is_found_in_what_the_model_returns(shape, forward):
    graph = capture(Returning(shape), torch.empty(3, 4))
    called = [op.target.split(".")[1] for op in graph.phase("forward") if op.kind != "view"]
    assert called == forward


def test_inputs_may_be_positional_or_named_and_a_loss_may_take_the_target():
    model, batch, target = mlp(), torch.empty(4, 16), torch.empty(4, 8)
    by_position = capture(model, (batch, target), nn.functional.mse_loss)
    assert by_position.digest == capture(model, [batch, target], nn.MSELoss()).digest
    assert by_position.digest != capture(model, batch, lambda output: output.square().mean()).digest
    named = capture(model, {"input": batch})
    assert named.digest == capture(model, batch).digest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((lambda x: x, torch.empty(1)), "model must be a torch.nn.Module, got function"),
        ((mlp().requires_grad_(False), torch.empty(4, 16)), "no parameter that requires grad"),
        ((mlp(), torch.empty(4, 16), nn.functional.mse_loss), "whose last element is the target, got Tensor"),
        ((mlp(), torch.empty(4, 16), lambda a, b, c: a), "not 3 arguments"),
        ((mlp(), torch.empty(4, 16), lambda y: y), r"one element, got a tensor of shape \(4, 8\)"),
        ((mlp(), torch.empty(4, 16), lambda y: y.detach().sum()), "depends on no trainable parameter"),
        ((Returning(lambda y: "nothing"), torch.empty(3, 4)), "holds no floating-point tensor"),
        ((mlp(), torch.empty(4, 17)), "fails on the example inputs: RuntimeError: mat1 and mat2"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message):
    with pytest.raises(CaptureError, match=message) as error:
        capture(*arguments)
    assert "\n" not in str(error.value)


class Unknown(torch.optim.SGD):
    pass


def test_optimizer_state_is_counted():
    parameters = list(mlp().parameters())
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    assert optimizer_state(None) == ("SGD", 0)
    assert optimizer_state("adamw") == ("AdamW", 2)
    assert optimizer_state("Novel") == ("Novel", 2)
    assert optimizer_state(torch.optim.Adagrad) == ("Adagrad", 1)
    assert optimizer_state(sgd(parameters, lr=1)) == ("SGD", 0)
    assert optimizer_state(sgd(parameters, lr=1, momentum=0.9)) == ("SGD", 1)
    assert optimizer_state(adam(parameters)) == ("Adam", 2)
    assert optimizer_state(adam(parameters, amsgrad=True)) == ("Adam", 3)
    assert optimizer_state(torch.optim.RMSprop(parameters, momentum=0.9, centered=True)) == ("RMSprop", 3)
    unknown = Unknown(parameters, lr=0.0, momentum=0.9)
    assert optimizer_state(unknown) == ("Unknown", 2)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    unknown.step()
    assert optimizer_state(unknown) == ("Unknown", 1)
    with pytest.raises(CaptureError, match="its class or its name, got int"):
        optimizer_state(3)
    graph = capture(mlp(), torch.empty(4, 16), optimizer="Adam")
    assert (graph.optimizer, graph.optimizer_slots) == ("Adam", 2)
    assert graph.operator("update.0.bias").bytes_read == 32 * 4 * 4


def test_the_amount_of_state_torch_really_keeps():
    """The table of slots against what each optimizer holds after a step."""
    for name in ("SGD", "ASGD", "Adagrad", "RMSprop", "Adadelta", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "Rprop"):
        parameter = nn.Parameter(torch.ones(3, 5))
        optimizer = getattr(torch.optim, name)([parameter], lr=1e-3)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        held = sum(
            value.shape == parameter.shape for value in optimizer.state[parameter].values() if torch.is_tensor(value)
        )
        assert optimizer_state(name) == (name, held)


def test_a_model_that_branches_on_values_is_run_once_with_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = capture(Branching(), torch.randn(5, 4))
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 1
    assert "Branching was run once because it cannot be traced" in messages[0]
    assert "depends on the values of a tensor" in messages[0]
    assert "coarser" in messages[0]
    assert graph.source == "hooks"
    by_module = {op.module: op for op in graph.phase("forward") if op.module}
    assert set(by_module) == {"first", "norm", "positive"}
    assert by_module["first"].flops == 2 * 5 * 4 * 8
    assert by_module["first"].variables == ("first.weight", "first.bias")
    assert by_module["norm"].kind == "norm"
    # Its input, the ReLU's result, is booked to the model; its own are two statistics, its result and a count.
    assert by_module["norm"].activation_bytes == 4 * (8 + 8 + 5 * 8)
    backward = [op.module for op in graph.phase("backward") if op.module]
    assert backward == ["positive", "norm", "first"]
    assert graph.operator("backward.first").inputs[-1].startswith("backward.")
    assert [(v.name, v.first_use is None, v.gradient_from is None) for v in graph.variables[-2:]] == [
        ("negative.weight", True, True),
        ("negative.bias", True, True),
    ]
    assert graph.variable("first.weight").factor_rows == 5
    assert graph.variable("scale").gradient_from == "backward.model#1"
    assert [v.name for v in graph.gradient_order][-2:] == ["first.weight", "first.bias"]


@pytest.mark.parametrize(
    ("model", "inputs"),
    [(mlp(), torch.randn(4, 16)), (encoder(), torch.randn(2, 7, 32)), (ConvNet(), torch.randn(2, 3, 9, 9))],
    ids=["mlp", "encoder", "convolutions"],
)
def test_running_and_tracing_agree(model, inputs, monkeypatch):
    traced = capture(model, inputs)
    monkeypatch.setattr("offbeat.graph.joint.trace_joint", _refuse)
    run = captured_by_run(model, inputs)
    assert run.flops == pytest.approx(traced.flops, rel=1e-3)
    assert run.activation_bytes == pytest.approx(traced.activation_bytes, rel=1e-2)
    assert [v.name for v in run.variables] == [v.name for v in traced.variables]
    finished = [
        list(dict.fromkeys(graph.operator(variable.gradient_from).module for variable in graph.gradient_order))
        for graph in (run, traced)
    ]
    assert finished[0] == finished[1]


def _refuse(step):
    raise NotImplementedError("no tracing today")


def test_sparse_gradients_and_tied_weights_are_seen_in_a_run_too(monkeypatch):
    monkeypatch.setattr("offbeat.graph.joint.trace_joint", _refuse)
    graph = captured_by_run(Recurrent(sparse=True), torch.randint(0, 50, (4, 7)))
    assert (graph.variable("embedding.weight").sparse, graph.variable("embedding.weight").sparse_rows) == (True, 28)
    assert {op.kind for op in graph.phase("forward") if op.module == "embedding"} == {"embedding"}
    tied = captured_by_run(Tied(), torch.zeros(2, 4, dtype=torch.long))
    assert tied.variable("embedding.weight").aliases == ("head.weight",)
    assert tied.gradient_order[-1].name == "embedding.weight"


def snapshot(model: nn.Module) -> tuple:
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    attributes = [set(module.__dict__) for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    flags = [module.training for module in model.modules()]
    return copy.deepcopy(model.state_dict()), grads, attributes, hooks, flags, getattr(model, "calls", 0)


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("make", [ConvNet, Branching, lambda: Recurrent(sparse=True)], ids=["traced", "run", "rnn"])
def test_the_model_is_left_as_it_was(make, fails):
    model = make()
    inputs = {ConvNet: torch.randn(2, 3, 9, 9), Branching: torch.randn(5, 4)}.get(type(model), torch.zeros(2, 3).long())
    for module in list(model.children())[:1]:
        module.eval()
    for parameter in list(model.parameters())[:2]:
        parameter.grad = torch.randn_like(parameter)
        parameter.register_post_accumulate_grad_hook(lambda p: pytest.fail("the user's own hook ran"))
    kept = {name: (parameter, parameter.grad) for name, parameter in model.named_parameters()}
    before = snapshot(model)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def loss_fn(output):
        random.random()
        np.random.rand()
        torch.rand(3)
        if fails:
            raise KeyError("broken on purpose")
        return output.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if fails:
            with pytest.raises(CaptureError, match="KeyError: 'broken on purpose'"):
                capture(model, inputs, loss_fn)
        else:
            capture(model, inputs, loss_fn)
    for old, new in zip(before, snapshot(model), strict=True):
        assert same(old, new)
    for name, parameter in model.named_parameters():
        assert parameter is kept[name][0]
        assert parameter.grad is kept[name][1]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])
    assert not torch.nn.modules.module._global_forward_pre_hooks
    with torch.no_grad():
        model(inputs)


def test_grad_mode_of_the_caller_does_not_matter():
    model, batch = mlp(), torch.empty(4, 16)
    expected = capture(model, batch).digest
    with torch.no_grad():
        assert capture(model, batch).digest == expected
    with torch.inference_mode():
        assert capture(model, batch).digest == expected


def test_real_meta_and_fake_models_give_the_same_graph():
    images = (2, 3, 9, 9)
    expected = capture(ConvNet(), torch.empty(images)).digest
    with torch.device("meta"):
        meta = ConvNet()
        assert capture(meta, torch.empty(images)).digest == expected
    assert capture(meta, torch.empty(images, device="cpu")).digest == expected
    with FakeTensorMode() as mode:
        fake, fake_input = ConvNet(), torch.empty(images)
        assert capture(fake, fake_input).digest == expected
    assert capture(fake, fake_input).digest == expected
    assert capture(ConvNet(), mode.from_tensor(torch.empty(images))).digest == expected


def test_without_data_a_model_that_must_run_is_refused():
    with torch.device("meta"):
        model = Branching()
    with pytest.raises(CaptureError, match="its tensors are fake or on the meta device"):
        capture(model, torch.empty(5, 4))


def test_a_compiled_model_is_its_original():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    assert capture(compiled, torch.empty(4, 16)).digest == capture(model, torch.empty(4, 16)).digest
    part = mlp()
    part[0] = torch.compile(part[0], backend="eager")
    assert capture(part, torch.empty(4, 16)).source == "joint"


def test_a_model_under_autocast_is_captured_as_it_runs():
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(mlp(), torch.empty(4, 16))
    products = [op for op in graph.operators if op.kind == "matmul"]
    assert {output.dtype for op in products for output in op.outputs} == {"bfloat16"}
    assert graph.variables[0].dtype == "float32"
    assert graph.variable("0.weight").factor_rows == 4


def test_under_autocast_a_weight_is_copied_once_however_often_it_is_used():
    layer = nn.Linear(64, 64, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(nn.Sequential(*[layer] * 5), torch.randn(8, 64))
    casts = [op for op in graph.phase("forward") if op.target == "aten._to_copy.default" and op.variables]
    # As the copies that autograd keeps in a real step, of which there is one.
    assert [op.outputs[0].bytes for op in casts] == [op.activation_bytes for op in casts] == [2 * 64 * 64]


def test_no_memory_is_used_for_weights():
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(10)))
    graph = capture(model, torch.empty(8, 16384, device="meta"))
    assert graph.parameter_bytes > 10 * 2**30
    assert graph.flops > 3 * 10 * 2 * 8 * 16384**2 * 0.9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak_before < 2**28


def test_a_capture_is_whole_and_survives_json():
    graph = capture(encoder(), torch.empty(2, 7, 32), optimizer="AdamW")
    loaded = ModelGraph.from_json(graph.to_json())
    assert loaded == graph
    assert loaded.digest == graph.digest
    cut = segments(graph)
    assert [name for segment in cut for name in segment.operators] == [op.name for op in graph.operators]
    assert sorted(name for s in cut for name in s.reads) == sorted(v.name for v in graph.variables)
    assert [name for s in cut for name in s.completes] == [v.name for v in graph.gradient_order]
    assert {op.module for op in graph.phase("backward")} >= {"layers.0.self_attn", "layers.1.linear2", "layers.0.norm1"}
    attention = [op for op in graph.operators if op.kind == "attention"]
    assert [op.phase for op in attention] == ["forward", "forward", "backward", "backward"]


def test_digests_are_equal_in_another_process():
    script = (
        "import torch; from torch import nn; from offbeat.graph import capture\n"
        "layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)\n"
        "print(capture(nn.TransformerEncoder(layer, 2), torch.empty(2, 7, 32)).digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12", "PYTHONPATH": PACKAGE_ROOT}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == capture(encoder(), torch.empty(2, 7, 32)).digest


def test_the_package_is_imported_without_torch():
    """Commands that only read files start fast."""
    script = "import sys, offbeat.graph, offbeat.graph.coarsen; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": PACKAGE_ROOT}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0


@pytest.mark.slow
def test_a_large_model_is_captured_within_a_minute_and_two_gibibytes():
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
        model = nn.Sequential(nn.Embedding(30522, 1024), nn.TransformerEncoder(layer, 24), nn.Linear(1024, 30522))
        tokens = torch.empty(8, 512, dtype=torch.long)
    started = time.monotonic()
    graph = capture(model, tokens)
    assert time.monotonic() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2 * 2**30
    assert graph.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    # Six FLOP per weight and token in products with weights, and attention on top.
    weights = graph.parameter_count - 30522 * 1024
    assert 1.0 < graph.flops / (6 * weights * 8 * 512) < 1.2


def transformers_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**small))
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("with_mask", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", mostly_slow(["bert", "gpt2", "llama", "t5"], ["gpt2", "llama"]))
def test_transformers_models_are_traced(name, with_mask):
    model = transformers_model(name)
    tokens = torch.randint(3, 100, (2, 16))
    inputs = {"input_ids": tokens, "labels": tokens}
    if with_mask:
        inputs["attention_mask"] = torch.ones_like(tokens)
    graph = capture(model, inputs)
    assert graph.source == "joint"
    assert graph.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    model(**inputs).loss.backward()
    trained = {variable_name for variable_name, p in model.named_parameters() if p.grad is not None}
    assert {v.name for v in graph.gradient_order} == trained
    assert {op.module for op in graph.operators} - {""} <= {path for path, _ in model.named_modules()}
    assert any(v.aliases for v in graph.variables) == (name != "llama")
