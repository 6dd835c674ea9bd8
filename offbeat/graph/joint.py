"""Capture a ModelGraph with every operator, from the joint forward and backward graph.

The step is traced on fake tensors, so the model is not run and no weight is allocated. Which operator reads which
variable, which storage backward reads and which operator completes a gradient are all found by walking the traced graph
through views.

A variable's first use is the first forward operator that reads its data, not a view of it. Its gradient is complete at
the operator that returns it to autograd, view or not: that is where autograd's own gradient hooks run.

The tracer looks through `torch.utils.checkpoint`: the graph is that of the model without recomputation. It also takes
RNN layers apart into one set of operators per step, and under autocast casts a weight at each use, where autocast keeps
the first copy (`_cast_once`).
"""

import operator as builtin
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx import traceback as fx_traceback

from offbeat import torch_private
from offbeat.graph import kinds
from offbeat.graph.model import Operator, Phase, Variable
from offbeat.graph.step import Step, make_variables, module_calls, sparse_embeddings, standing_in, tensor_spec, tracing
from offbeat.torch_private import descriptors

_MODULE_KEY = "offbeat_module"
_PASS_THROUGH = {"detach", "alias", "lift_fresh"}


def trace_joint(step: Step) -> tuple[tuple[Operator, ...], tuple[Variable, ...]]:
    """Forward and backward operators in execution order, and the variables in order of first use."""
    sparse = {id(module.weight) for module in sparse_embeddings(step.model)}
    try:
        graph, names = joint_graph(step)
    except torch_private.DataDependentOutput:
        with torch_private.as_if_compiling():
            graph, names = joint_graph(step)
    walk = Walk(graph, names)
    operators = walk.operators()
    variables = _variables(step, walk, operators, sparse)
    return _with_sparse_gradients(operators, variables), variables


class _Stateless(nn.Module):
    """The step as a module that owns stand-ins for the model's tensors, so that tied weights are one tensor."""

    def __init__(self, step: Step, fakes: dict[str, Tensor], originals: dict[str, Tensor]):
        super().__init__()
        self.step = step
        self.originals = originals
        for name, fake in fakes.items():
            register = self.register_parameter if isinstance(fake, nn.Parameter) else self.register_buffer
            register(name, fake)

    def forward(self, *tensors: Tensor) -> Tensor:
        stand_ins = {id(tensor): getattr(self, name) for name, tensor in self.originals.items()}
        with standing_in(self.step.model, stand_ins):
            return self.step.loss(tensors)


def joint_graph(step: Step) -> tuple[Graph, dict[str, str]]:
    """The joint graph, and the model's name of each stand-in that is a variable."""
    named = [*step.model.named_parameters(), *step.model.named_buffers()]
    originals = {f"t{index}": tensor for index, (_, tensor) in enumerate(named)}
    names = {f"t{index}": name for index, (name, tensor) in enumerate(named) if tensor.requires_grad}
    inputs = step.input_tensors()
    mode = torch_private.detect_fake_mode([*originals.values(), *inputs])
    mode = mode or torch_private.FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(tracing())
        stack.enter_context(mode)
        fakes = {key: _fake(tensor) for key, tensor in originals.items()}
        fake_inputs = tuple(_fake(tensor) for tensor in inputs)
        # Meta tensors kept as plain attributes would not mix with the fakes.
        held = [value for module in step.model.modules() for value in module.__dict__.values()]
        loose = {id(value): _fake(value) for value in held if isinstance(value, Tensor) and value.device.type == "meta"}
        stack.enter_context(_annotated_modules(step.model))
        stack.enter_context(standing_in(step.model, loose))
        stack.enter_context(patch.object(nn.functional, "dropout", _dropout))
        if any(isinstance(module, nn.RNNBase) for module in step.model.modules()):
            # cuDNN's RNNs do not say what they keep for backward, and under autocast read memory that fakes lack.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        for module in sparse_embeddings(step.model):
            module.sparse = False  # sparse gradients cannot be traced; `standing_in` sets it back
        joint = torch_private.aot_export_joint(stack, _Stateless(step, fakes, originals), fake_inputs)
    device = next(iter(fakes.values())).device.type
    if torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled():
        _cast_once(joint.graph_module.graph)
    return joint.graph_module.graph, names


def _cast_once(graph: Graph) -> None:
    """Lets all readers of a weight's copy in another type read the first such copy, as autocast's cache does."""
    first: dict[tuple[Node, Any], Node] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        source = node.args[0]
        if source.op == "placeholder" and (copy := first.setdefault((source, node.kwargs.get("dtype")), node)) != node:
            node.replace_all_uses_with(copy)
            graph.erase_node(node)


def _fake(tensor: Tensor) -> Tensor:
    """In a fake mode, a tensor without memory that looks the same; one on the meta device is taken to be on the CPU."""
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Returns its input where nothing is dropped, as eager torch does; the tracer would record a copy."""
    return torch.dropout(input, p, training) if training and p > 0 else input


@contextmanager
def _annotated_modules(model: nn.Module) -> Iterator[None]:
    """Traced nodes carry the path of the module whose forward made them."""
    opened: list[Any] = []

    def enter(path: str, module: nn.Module, args: Any) -> None:
        opened.append(fx_traceback.annotate({_MODULE_KEY: path}))
        opened[-1].__enter__()

    def leave(path: str) -> None:
        opened.pop().__exit__(None, None, None)

    with module_calls(model, enter, leave):
        try:
            yield
        finally:
            while opened:
                leave("")


class _Storage(NamedTuple):
    """Memory first written by one node: one of its results, or all of it."""

    node: Node
    result: int | None = None


class Walk:
    """Answers questions about a joint graph."""

    def __init__(self, graph: Graph, names: dict[str, str]):
        self.nodes = [node for node in graph.nodes if node.op == "call_function"]
        inputs = {node: node.meta.get("desc") for node in graph.find_nodes(op="placeholder")}
        self.variable_of = {
            node: names[desc.target]
            for node, desc in inputs.items()
            if isinstance(desc, descriptors.ParamAOTInput) and desc.target in names
        }
        self.gradients = dict(_gradients(graph, names))
        tags = (node.meta.get("partitioner_tag") for node in self.nodes)
        start = next((place for place, tag in enumerate(tags) if tag == "is_backward"), len(self.nodes))
        self.backward = set(self.nodes[start:])
        self.computing = [node for node in self.nodes if _is_operator(node) and not kinds.is_view(node.target)]
        """The operators that read data, not views of it."""
        self.storage: dict[Node, _Storage] = {}
        for node in graph.nodes:
            self.storage[node] = self._storage_of(node)
        self.module = self._modules()

    def operators(self) -> tuple[Operator, ...]:
        kept = self._kept_bytes()
        return tuple(self._operator(node, kept[node]) for node in self.nodes if _is_operator(node))

    def producer(self, node: Node) -> Node | None:
        """The operator whose result the node is, seen through nodes that are no operators."""
        while node.op == "call_function":
            if _is_operator(node):
                return node
            if not node.all_input_nodes:
                return None
            node = node.all_input_nodes[0]
        return None

    def variables_read(self, node: Node) -> tuple[str, ...]:
        names = (self.variable_of.get(self.storage[source].node) for source in node.all_input_nodes)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def readers(self) -> dict[str, list[Node]]:
        """The forward operators that read each variable's data, in order."""
        readers: dict[str, list[Node]] = defaultdict(list)
        for node in self.computing:
            for name in () if node in self.backward else self.variables_read(node):
                readers[name].append(node)
        return readers

    def _operator(self, node: Node, activation_bytes: int) -> Operator:
        args, kwargs, out = _values(node.args), _values(node.kwargs), node.meta["val"]
        bytes_read, bytes_written = kinds.bytes_of(node.target, args, kwargs, out)
        phase: Phase = "backward" if node in self.backward else "forward"
        producers = (self.producer(source) for source in node.all_input_nodes)
        return Operator(
            name=node.name,
            kind=kinds.kind_of(node.target),
            target=str(node.target),
            phase=phase,
            module=self.module[node],
            inputs=tuple(dict.fromkeys(source.name for source in producers if source is not None)),
            variables=self.variables_read(node),
            outputs=tuple(tensor_spec(tensor) for tensor in kinds.tensors_in(out)),
            flops=kinds.flops_of(node.target, args, kwargs, out),
            bytes_read=bytes_read,
            bytes_written=bytes_written,
            activation_bytes=activation_bytes,
        )

    def _storage_of(self, node: Node) -> _Storage:
        if node.op == "call_function" and node.args and isinstance(node.args[0], Node):
            if node.target is builtin.getitem:
                source = self.storage[node.args[0]]
                shared = kinds.is_view(node.args[0].target)
                return source if shared or source.node is not node.args[0] else _Storage(source.node, int(node.args[1]))
            if kinds.is_view(node.target):
                return self.storage[node.args[0]]
        return _Storage(node)

    def _kept_bytes(self) -> Counter[Node]:
        """For each forward operator, the bytes of its own storages that backward reads."""
        read = (source for node in self.computing if node in self.backward for source in node.all_input_nodes)
        total: Counter[Node] = Counter()
        for node, result in set(map(self.storage.__getitem__, read)):
            if node.op == "call_function" and node not in self.backward:
                value = node.meta["val"] if result is None else node.meta["val"][result]
                total[node] += sum(map(kinds.touched_bytes, kinds.tensors_in(value)))
        return total

    def _modules(self) -> dict[Node, str]:
        """The module path of each node; a backward node has its forward node's."""
        forward: dict[int | None, str] = {}
        for node in self.nodes:
            if node not in self.backward:
                forward.setdefault(node.meta.get("seq_nr"), _annotation(node) or "")
        paths: dict[Node, str] = {}
        for node in self.nodes:
            path = _annotation(node)
            if path is None and node.meta.get("is_gradient_acc"):
                # The sum of two gradients belongs where the later one was computed.
                known = [source for source in node.all_input_nodes if source in paths]
                path = paths[known[-1]] if known else None
            elif path is None and node in self.backward:
                path = forward.get(node.meta.get("seq_nr"))
            paths[node] = path or ""
        return paths


def _gradients(graph: Graph, names: dict[str, str]) -> Iterator[tuple[str, Node]]:
    """Each variable's name and the node that is its gradient."""
    output = graph.output_node()
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        if isinstance(desc, descriptors.GradAOTOutput) and isinstance(desc.grad_of, descriptors.ParamAOTInput):
            name = names.get(desc.grad_of.target)
            if name is not None and isinstance(node, Node):
                yield name, node


def _variables(step: Step, walk: Walk, operators: tuple[Operator, ...], tables: set[int]) -> tuple[Variable, ...]:
    """`tables` are the ids of the embeddings whose gradients are sparse."""
    first_backward = next((op.name for op in operators if op.phase == "backward"), None)
    readers = walk.readers()

    def describe(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        uses = readers.get(name, [])
        gradient_from = None
        if (gradient := walk.gradients.get(name)) is not None:
            source = walk.producer(gradient)
            # A gradient that is the loss's own (a parameter returned as the loss) is there from the start.
            gradient_from = source.name if source in walk.backward and source is not None else first_backward
        sparse = id(parameter) in tables and all(kinds.kind_of(use.target) == "embedding" for use in uses)
        looked_up = sum(_values(use.args)[1].numel() for use in uses) if sparse else 0
        return {
            "first_use": uses[0].name if uses else None,
            "gradient_from": gradient_from,
            "sparse": sparse,
            "sparse_rows": min(int(looked_up), parameter.shape[0]) if sparse else 0,
            "factor_rows": _factor_rows(gradient, tuple(parameter.shape)),
        }

    return make_variables(step.model, operators, describe)


def _factor_rows(gradient: Node | None, shape: tuple[int, ...]) -> int:
    """Inner size of the matrix product that the gradient is, seen through views and casts; 0 if it is none."""
    while gradient is not None and gradient.op == "call_function":
        if kinds.base_name(gradient.target) == "mm":
            left, right = _values(gradient.args)[:2]
            is_whole = sorted((left.shape[0], right.shape[1])) == sorted(shape)
            return int(left.shape[1]) if len(shape) == 2 and is_whole else 0
        if not (kinds.is_view(gradient.target) or kinds.base_name(gradient.target) == "_to_copy"):
            return 0
        gradient = gradient.all_input_nodes[0]
    return 0


def _with_sparse_gradients(operators: tuple[Operator, ...], variables: tuple[Variable, ...]) -> tuple[Operator, ...]:
    """The operators with the rows that sparse gradients hold in place of the dense tables that were traced."""
    sparse = {v.gradient_from: v for v in variables if v.sparse}

    def shrunk(operator: Operator) -> Operator:
        variable = sparse.get(operator.name) if operator.kind == "embedding" else None
        if variable is None:
            return operator
        spec = replace(operator.outputs[0], shape=(variable.sparse_rows, *variable.shape[1:]))
        return replace(operator, outputs=(spec,), bytes_written=spec.bytes)

    return tuple(map(shrunk, operators))


def _is_operator(node: Node) -> bool:
    if node.target is builtin.getitem or kinds.base_name(node.target) in _PASS_THROUGH:
        return False
    return bool(kinds.tensors_in(node.meta.get("val")))


def _values(arguments: Any) -> Any:
    return torch.fx.node.map_arg(arguments, lambda node: node.meta.get("val"))


def _annotation(node: Node) -> str | None:
    return (node.meta.get("custom") or {}).get(_MODULE_KEY)
