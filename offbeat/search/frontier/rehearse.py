"""A point of FT's frontier → the same point with a better estimate of its memory.

FT adds up the costs of configurations, which makes its search possible. For one strategy more can be said: the parts of
tensors that one device holds form a graph (`local_graph`), whose peak follows from the tensors' lifetimes, as for every
other engine (`offbeat.cost.memory`). Buffers of the exchanges are not counted, nor what backward exchanges
again. FT's time stays: a sum, which does not count that collectives overlap with compute (`offbeat.runtime.sharded`).
"""

from dataclasses import replace

from offbeat.cost.memory import peak_memory
from offbeat.graph.model import ModelGraph, Operator, TensorSpec, Variable, update_operators
from offbeat.graph.share import of_variables
from offbeat.plan import lower
from offbeat.search.frontier.costs import Prices
from offbeat.search.frontier.model import FrontierPoint
from offbeat.sharding.layout import WHOLE, Layout, box_of, layout_of
from offbeat.strategy.model import OperatorConfig, Strategy


def rehearsed(point: FrontierPoint, prices: Prices) -> FrontierPoint:
    """The point with its memory by lifetimes."""
    assert point.strategy is not None
    cluster = prices.mesh.cluster.subset(1)
    local = local_graph(prices.graph, point.strategy, prices.mesh.factors)
    return replace(point, memory_bytes=peak_memory(lower(local, cluster, Strategy()), 0, runtime="torch").total)


def local_graph(graph: ModelGraph, strategy: Strategy, fine: tuple[int, ...]) -> ModelGraph:
    """What the first device computes and holds; where a tensor changes its split, an operator makes the new part."""
    return _Parts(graph, strategy, fine).graph()


class _Parts:
    """The operators of one device, in order, and the layouts of their results."""

    def __init__(self, whole: ModelGraph, strategy: Strategy, fine: tuple[int, ...]) -> None:
        self.whole, self.strategy, self.fine = whole, strategy, fine
        self.unsplit: Layout = (WHOLE,) * len(fine)
        self.made: dict[str, Operator] = {}
        self.layouts: dict[str, Layout] = {}
        self.moved: dict[tuple[str, Layout], str] = {}
        self.copies: dict[tuple[str, str], str] = {}
        """By a result and the module that reads it the copy that stays for backward."""
        self.shapes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        """Of a part by module and whole shape; the module '' stands for any."""
        self.variables: dict[str, Variable] = {}

    def graph(self) -> ModelGraph:
        for operator in self.whole.phase("forward"):
            self._forward(operator)
        variables = tuple(self.variables.get(v.name, v) for v in self.whole.variables)
        own = of_variables(self.whole)
        for operator in self.whole.phase("backward"):
            self._backward(operator, own.get(operator.name, {}))
        updates = update_operators(variables, self.whole.optimizer, self.whole.optimizer_slots)
        return replace(self.whole, operators=(*self.made.values(), *updates), variables=variables, blocks=())

    def _forward(self, operator: Operator) -> None:
        config = self.strategy.operators.get(operator.name)
        count = len(operator.inputs)
        needs = [layout_of(split, config.mesh, self.fine) for split in config.inputs] if config else []
        inputs = []
        for place, name in enumerate(operator.inputs):
            need = needs[place] if place < len(needs) else self.layouts[name]
            inputs.append(name if need == self.layouts[name] else self._move(name, need, operator, config))
            self._note(operator.module, self.whole.operator(name).outputs[0].shape, need)
        for name, layout in zip(operator.variables, needs[count:], strict=False):
            if name not in self.variables:
                variable = self.whole.variable(name)
                self.variables[name] = replace(variable, shape=self._part(variable.shape, layout))
        outputs = operator.outputs
        layout = self.unsplit
        if config and config.outputs:
            maps = [layout_of(split, config.mesh, self.fine) for split in config.outputs]
            layout = maps[0]
            outputs = tuple(
                replace(out, shape=self._part(out.shape, at)) for out, at in zip(outputs, maps, strict=False)
            )
            self._note(operator.module, operator.outputs[0].shape, layout)
        self.layouts[operator.name] = layout
        self.made[operator.name] = _resized(operator, outputs, tuple(inputs))

    def _move(self, name: str, need: Layout, reader: Operator, config: OperatorConfig | None) -> str:
        """The operator that makes the part of a result which a reader wants."""
        source = self.whole.operator(name)
        kept = source.activation_bytes > 0 and config is not None and config.keep != "before"
        copy = self.moved.setdefault((name, need), f"{name}@{reader.name}")
        if kept:
            self.copies[name, reader.module] = copy
        spec = replace(source.outputs[0], shape=self._part(source.outputs[0].shape, need))
        before = self.made.get(copy)
        held = spec.bytes if kept or (before and before.activation_bytes) else 0
        self.made[copy] = Operator(
            copy, "other", "move", "forward", reader.module, (name,), (), (spec,), 0, 0, spec.bytes, held
        )
        return copy

    def _backward(self, operator: Operator, own: dict[int, str]) -> None:
        """Gradients have the parts of what they are gradients of: a variable, or a tensor in the module, by shape."""
        inputs = tuple(self.copies.get((name, operator.module), name) for name in operator.inputs)
        outputs = tuple(self._gradient(out, operator, own) for out in operator.outputs)
        self.made[operator.name] = _resized(operator, outputs, inputs)

    def _gradient(self, out: TensorSpec, operator: Operator, own: dict[int, str]) -> TensorSpec:
        if out.elements in own:
            variable = self.variables.get(own[out.elements])
            return replace(out, shape=variable.shape) if variable is not None else out
        found = self.shapes.get((operator.module, out.shape), self.shapes.get(("", out.shape)))
        return out if found is None else replace(out, shape=found)

    def _note(self, module: str, shape: tuple[int, ...], layout: Layout) -> None:
        part = self._part(shape, layout)
        for where in (module, ""):
            self.shapes.setdefault((where, shape), part)

    def _part(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        return box_of(shape, layout, self.fine, 0).sizes


def _resized(operator: Operator, outputs: tuple[TensorSpec, ...], inputs: tuple[str, ...]) -> Operator:
    before, after = (sum(out.bytes for out in specs) for specs in (operator.outputs, outputs))
    kept = round(operator.activation_bytes * after / before) if before else operator.activation_bytes
    return replace(operator, outputs=outputs, inputs=inputs, activation_bytes=kept)
