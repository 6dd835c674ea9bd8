"""Hand-made graphs, and hypothesis strategies that draw small random graphs and random valid strategies for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, Operator, TensorSpec, Variable
from offbeat.graph.model import update_operators
from offbeat.strategy import Encoder, OperatorConfig, Schedule, Shard, Slice, Strategy, VariableConfig

BATCH = 4


@dataclass(frozen=True)
class Weight:
    """A variable of a hand-made graph."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    sparse: bool = False
    factor_rows: int = 0
    trained: bool = True


@dataclass(frozen=True)
class Layer:
    """One forward operator, and one backward operator that completes the gradients of its weights."""

    weights: tuple[Weight, ...] = ()
    flops: int = 1000
    seconds: float | None = None
    """Measured time of its backward operator."""
    reuses: tuple[str, ...] = ()
    """Weights of earlier layers that it reads too (tied weights)."""


def make_graph(layers: Sequence[Layer], unused: Sequence[Weight] = (), name: str = "hand-made") -> ModelGraph:
    """A chain of layers; `unused` weights are read by none."""
    operators, variables = [], []
    for index, layer in enumerate(layers):
        before = (f"forward{index - 1}",) if index else ()
        operators.append(_operator(f"forward{index}", index, layer, before))
        for weight in layer.weights:
            gradient = f"backward{index}" if weight.trained else None
            variables.append(_variable(weight, f"forward{index}", gradient))
    before = (operators[-1].name,) if operators else ()
    for index, layer in reversed(tuple(enumerate(layers))):
        operators.append(_operator(f"backward{index}", index, layer, before))
        before = (f"backward{index}",)
    variables.extend(_variable(weight, None, None) for weight in unused)
    updates = update_operators(variables, "SGD", 0)
    return ModelGraph(name=name, operators=(*operators, *updates), variables=tuple(variables))


def _operator(name: str, index: int, layer: Layer, before: tuple[str, ...]) -> Operator:
    forward = name.startswith("forward")
    return Operator(
        name=name,
        kind="matmul",
        target="aten.mm.default",
        phase="forward" if forward else "backward",
        module=f"layers.{index}",
        inputs=before,
        variables=(*(weight.name for weight in layer.weights), *layer.reuses),
        outputs=(TensorSpec((BATCH, 8), "float32"),),
        flops=layer.flops if forward else 2 * layer.flops,
        bytes_read=4 * BATCH * 8,
        bytes_written=4 * BATCH * 8,
        activation_bytes=4 * BATCH * 8 if forward else 0,
        seconds=None if forward else layer.seconds,
    )


def _variable(weight: Weight, first_use: str | None, gradient_from: str | None) -> Variable:
    return Variable(
        name=weight.name,
        shape=weight.shape,
        dtype=weight.dtype,
        first_use=first_use,
        gradient_from=gradient_from,
        sparse=weight.sparse,
        sparse_rows=BATCH if weight.sparse else 0,
        factor_rows=weight.factor_rows,
    )


@st.composite
def random_graphs(draw: DrawFn) -> ModelGraph:
    """Chains of dense, sparse, one-dimensional and scalar variables of several dtypes, some tied, frozen or unused."""
    layers: list[Layer] = []
    matrices: list[str] = []
    for index in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(("float32", "float32", "float16", "bfloat16", "float64")))
        weights = draw(_layer_weights(f"layers.{index}", dtype))
        reuses = (draw(st.sampled_from(matrices)),) if matrices and draw(st.booleans()) else ()
        layers.append(Layer(weights, draw(st.integers(0, 10**9)), draw(_seconds()), reuses))
        matrices += [weight.name for weight in weights if len(weight.shape) == 2 and weight.trained]
    unused = (Weight("unused", (3,)),) if draw(st.booleans()) else ()
    return make_graph(layers, unused)


def _seconds() -> SearchStrategy[float | None]:
    return st.none() | st.floats(0, 0.02)


@st.composite
def _layer_weights(draw: DrawFn, prefix: str, dtype: str) -> tuple[Weight, ...]:
    length = st.integers(1, 12)
    kind = draw(st.sampled_from(("dense", "embedding", "norm", "scalar", "conv", "frozen", "none")))
    if kind == "dense":
        weight = Weight(
            f"{prefix}.weight", (draw(length), draw(length)), dtype, factor_rows=draw(st.sampled_from((0, BATCH)))
        )
        bias = Weight(f"{prefix}.bias", weight.shape[:1], dtype)
        return (weight, bias) if draw(st.booleans()) else (weight,)
    shapes: dict[str, SearchStrategy[tuple[int, ...]]] = {
        "embedding": st.tuples(length, length),
        "norm": st.tuples(length),
        "scalar": st.just(()),
        "conv": st.tuples(length, length, st.integers(1, 3), st.integers(1, 3)),
        "frozen": st.tuples(length),
    }
    if kind == "none":
        return ()
    return (
        Weight(f"{prefix}.{kind}", draw(shapes[kind]), dtype, sparse=kind == "embedding", trained=kind != "frozen"),
    )


@st.composite
def random_strategies(draw: DrawFn, graph: ModelGraph, cluster: ClusterSpec, *, everything: bool = False) -> Strategy:
    """Strategies that fit the graph and the cluster.

    Replicas in any order, any weights, partitions over several axes with and without cuts, every synchroniser with its
    own options per shard. `everything` adds what lowering reads elsewhere: explicit orders, fused regions, operators.
    """
    ranks = tuple(range(cluster.world_size))
    replicas: tuple[int, ...] = draw(st.just(()) | st.permutations(ranks).map(tuple))
    weights = draw(st.just(()) | st.tuples(*(st.floats(0.25, 4.0) for _ in ranks)))
    modules = sorted({operator.module for operator in graph.operators if operator.phase == "forward"})
    chosen = st.lists(st.sampled_from(modules), unique=True, max_size=2).map(tuple)
    explicit = everything and bool(graph.gradient_order) and draw(st.booleans())
    if explicit:
        variables, schedule = draw(_explicit(graph))
    else:
        configs = {each.name: _configs(each, ranks, cluster) for each in graph.gradient_order}
        variables = draw(st.fixed_dictionaries({}, optional=configs))
        schedule = draw(_schedules())
    return Strategy(
        name=draw(st.sampled_from(("custom", "drawn"))),
        model=graph.name,
        graph=graph.signature,
        cluster=cluster.digest,
        replicas=replicas,
        weights=weights,
        accumulation=draw(st.integers(1, 3)),
        recompute=draw(chosen),
        fusion=draw(st.lists(chosen, max_size=2).map(tuple)) if everything else (),
        schedule=schedule,
        variables=variables,
        operators=draw(_operator_configs(graph)) if everything else {},
    )


@st.composite
def _configs(draw: DrawFn, variable: Variable, members: tuple[int, ...], cluster: ClusterSpec) -> VariableConfig:
    partition = draw(st.just(()) | st.tuples(*(st.integers(1, min(length, 3)) for length in variable.shape)))
    cuts: tuple[tuple[int, ...], ...] = ()
    if partition and draw(st.booleans()):
        cuts = tuple(
            tuple(sorted(draw(st.lists(st.integers(1, length - 1), min_size=n - 1, max_size=n - 1, unique=True))))
            if n > 1
            else ()
            for n, length in zip(partition, variable.shape, strict=True)
        )
    count = math.prod(partition)
    bridging = draw(st.sampled_from(((0, False),) * 4 + ((1, False), (2, False), (0, True))))
    shard = _shards(variable, partition, members, cluster, bridging)
    number = draw(st.sampled_from((1, count)))
    return VariableConfig(partition=partition, cuts=cuts, shards=tuple(draw(shard) for _ in range(number)))


@st.composite
def _shards(
    draw: DrawFn,
    variable: Variable,
    partition: tuple[int, ...],
    members: tuple[int, ...],
    cluster: ClusterSpec,
    bridging: tuple[int, bool],
) -> Shard:
    staleness, asynchronous = bridging
    if staleness or asynchronous:
        kind = "parameter_server" if asynchronous else draw(st.sampled_from(("all_reduce", "parameter_server")))
        return Shard(
            synchronizer=kind,
            placement=(draw(st.sampled_from(members)),) if kind == "parameter_server" else (),
            group=draw(st.none() | st.integers(0, 3)),
            staleness=staleness,
            asynchronous=asynchronous,
        )
    kinds = ["all_reduce", "parameter_server", "sharded"]
    if variable.sparse and math.prod(partition[1:]) == 1:
        kinds += ["sparse_all_gather", "sparse_parameter_server"]
    if variable.factor_rows and math.prod(partition) == 1:
        kinds.append("factor_broadcast")
    kind = draw(st.sampled_from(kinds))
    served = kind in ("parameter_server", "sparse_parameter_server")
    return Shard(
        synchronizer=kind,
        placement=(draw(st.sampled_from(members)),) if served else draw(st.sampled_from(((), members))),
        stations=draw(_stations(members, cluster)) if kind == "parameter_server" else (),
        reduction_order=draw(st.just(()) | st.permutations(members).map(tuple)) if kind == "all_reduce" else (),
        group=draw(st.none() | st.integers(0, 3)),
        encoder=draw(_encoders(kind)),
    )


@st.composite
def _stations(draw: DrawFn, members: tuple[int, ...], cluster: ClusterSpec) -> tuple[int, ...]:
    by_node: dict[int, list[int]] = {}
    for rank in members:
        by_node.setdefault(cluster.node_of(rank), []).append(rank)
    return tuple(draw(st.sampled_from(ranks)) for ranks in by_node.values() if draw(st.booleans()))


def _encoders(kind: str) -> SearchStrategy[Encoder]:
    if kind not in ("all_reduce", "parameter_server", "sharded"):
        return st.just(Encoder())
    plain = ("none", "none", "fp16", "bf16") if kind == "sharded" else ("none", "none", "fp16", "bf16", "sign", "int8")
    feedback = st.sampled_from((None, True, False))
    simple = st.builds(Encoder, name=st.sampled_from(plain), error_feedback=feedback)
    if kind == "sharded":
        return simple
    sparse = st.builds(
        Encoder, name=st.sampled_from(("topk", "randomk")), ratio=st.floats(0.01, 1.0), error_feedback=feedback
    )
    if kind == "parameter_server":
        return simple | sparse
    low_rank = st.builds(Encoder, name=st.just("powersgd"), rank=st.integers(1, 4), error_feedback=feedback)
    return simple | sparse | low_rank


def _schedules() -> SearchStrategy[Schedule]:
    size = st.none() | st.integers(1024, 2**16)
    return st.builds(
        Schedule,
        policy=st.sampled_from(("fifo", "priority")),
        slice_bytes=size,
        in_flight=st.integers(1, 4),
        credit_bytes=size,
        mode=st.sampled_from(("auto", "deferred", "barrier")),
    )


@st.composite
def _explicit(draw: DrawFn, graph: ModelGraph) -> tuple[dict[str, VariableConfig], Schedule]:
    """Every gradient all-reduced in some group of its dtype, and the groups' messages cut and shuffled."""
    groups: dict[tuple[str, int], int] = {}
    lengths: dict[int, int] = {}
    variables = {}
    for variable in graph.gradient_order:
        group = groups.setdefault((variable.dtype, draw(st.integers(0, 1))), len(groups))
        lengths[group] = lengths.get(group, 0) + variable.elements
        variables[variable.name] = VariableConfig(shards=(Shard(group=group),))
    slices = []
    for group, length in lengths.items():
        inner = draw(st.lists(st.integers(1, length - 1), unique=True, max_size=3)) if length > 1 else []
        bounds = [0, *sorted(inner), length]
        slices += [Slice(group=group, start=a, stop=b) for a, b in pairwise(bounds)]
    return variables, Schedule(policy="explicit", order=tuple(draw(st.permutations(slices))))


@st.composite
def _operator_configs(draw: DrawFn, graph: ModelGraph) -> dict[str, OperatorConfig]:
    names = [operator.name for operator in graph.phase("forward")]
    tensor_map = st.sampled_from(((-1, -1), (0, -1), (-1, 0)))
    config = st.builds(
        OperatorConfig,
        mesh=st.sampled_from(((2,), (4,), (2, 2))),
        inputs=st.lists(tensor_map, max_size=2).map(tuple),
        outputs=st.tuples(tensor_map),
        keep=st.sampled_from(("before", "after", "both")),
    )
    return draw(st.dictionaries(st.sampled_from(names), config, max_size=2))
