"""Peak memory: by hand for a small network, against torch's allocator for the papers' models, and per rank."""

import gc
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import mostly_slow
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from offbeat.cluster import ClusterSpec
from offbeat.cost.memory import HOPPER_WORKSPACE_BYTES, MemoryEstimate, gradient_bytes, peak_memory
from offbeat.errors import OffbeatError
from offbeat.graph.capture import capture
from offbeat.plan import lower
from offbeat.runtime.fsdp import apply_units
from offbeat.runtime.memory import apply_memory_strategy
from offbeat.strategy import Encoder, Schedule, Shard, Strategy, VariableConfig, build_strategy
from offbeat.torch_private import gather_asynchronously
from offbeat.zoo import build as build_zoo
from offbeat.zoo import capture as capture_zoo

BATCH, INPUT, HIDDEN, OUTPUT = 512, 16, 64, 32
SCALARS = 64
"""Bytes that losses and other single numbers may take."""

CPU = ClusterSpec.local(1)
TWO = ClusterSpec.local(2)


def mlp(batch=BATCH, optimizer=None):
    model = nn.Sequential(nn.Linear(INPUT, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, OUTPUT, bias=False))
    return capture(model, torch.zeros(batch, INPUT), loss_fn=lambda out: out.square().sum(), optimizer=optimizer)


def estimate(graph, strategy=Strategy(), cluster=CPU, rank=0, runtime="torch"):  # noqa: B008 - frozen
    return peak_memory(lower(graph, cluster, strategy), rank, runtime=runtime)


def everywhere(graph, shard):
    return Strategy(variables={v.name: VariableConfig(shards=(shard,)) for v in graph.variables})


def test_a_small_network_by_hand():
    weights = 4 * (INPUT * HIDDEN + HIDDEN * OUTPUT)
    hidden, last_gradient = 4 * BATCH * HIDDEN, 4 * HIDDEN * OUTPUT
    found = estimate(mlp())
    assert found.weights == weights
    assert found.inputs == 4 * BATCH * INPUT
    assert found.optimizer_state == 0
    assert found.communication == 0
    # Backward of the ReLU reads its output and the gradient, and writes another gradient; the last layer has its own.
    assert found.peak_at == "threshold_backward"
    assert found.gradients == last_gradient
    assert 3 * hidden <= found.activations <= 3 * hidden + SCALARS
    parts = [getattr(found, name) for name in MemoryEstimate.__dataclass_fields__ if name != "peak_at"]
    assert found.total == sum(parts)


def test_the_flat_buffers_of_the_runtime_persist():
    graph = mlp()
    plain, ours = estimate(graph), estimate(graph, runtime="offbeat")
    assert ours.gradients == plain.weights, "all gradients' buffers, and none of autograd's own"
    assert ours.activations == plain.activations
    together = everywhere(graph, Shard(group=0))
    # Grouped gradients are loaded when the first layer's is there too, so the last layer's is still autograd's own.
    assert estimate(graph, together, runtime="offbeat").gradients == plain.weights + 4 * HIDDEN * OUTPUT


@pytest.mark.parametrize(("optimizer", "slots"), [("SGD", 0), ("SGD", 1), ("Adam", 2)])
def test_the_optimizer_keeps_its_slots(optimizer, slots):
    graph = mlp(batch=1).with_optimizer(optimizer, slots)
    found = estimate(graph)
    counters = 4 * 2 if optimizer == "Adam" else 0
    assert found.optimizer_state == slots * found.weights + counters
    if optimizer == "Adam":
        assert found.peak_at == "optimizer"
        assert found.gradients == found.weights
        assert found.workspace == 2 * 4 * HIDDEN * OUTPUT, "the square root and its quotient, of the larger weight"


def test_foreach_on_a_gpu_holds_a_copy_of_everything():
    gpu = ClusterSpec.homogeneous(nodes=1, device="V100")
    graph = mlp(batch=1).with_optimizer("AdamW", 2)
    found = estimate(graph, cluster=gpu)
    blas = estimate(mlp(batch=10**4), cluster=gpu).workspace
    assert blas >= 8 * 2**20
    assert found.workspace == blas + found.weights


def test_larger_batches_hold_more():
    totals = [estimate(mlp(batch)).total for batch in (8, 64, 512, 4096)]
    assert totals == sorted(totals)
    assert totals[-1] > 7 * totals[-2]


def test_micro_batches_hold_a_share_of_the_activations():
    graph = mlp()
    whole, parts = estimate(graph), estimate(graph, Strategy(accumulation=4))
    assert parts.activations == pytest.approx(whole.activations / 4, abs=SCALARS)
    assert parts.inputs == whole.inputs
    assert parts.gradients == whole.weights, "the sum so far, to which each new gradient is added at once"


def test_recomputed_modules_keep_only_their_input():
    # Wide inside, narrow between: what is kept inside the blocks is nearly everything.
    blocks = [nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8)) for _ in range(6)]
    graph = capture(nn.Sequential(*blocks), torch.zeros(1024, 8), loss_fn=lambda out: out.sum())
    kept = estimate(graph)
    again = estimate(graph, Strategy(recompute=tuple(str(index) for index in range(6))))
    inside = 4 * 1024 * 256
    assert kept.activations > 6 * inside
    assert again.activations < 4.5 * inside, "one block's, and the gradients on their way through it"


def test_a_server_holds_the_state_and_the_others_none():
    graph = mlp().with_optimizer("AdamW", 2)
    strategy = everywhere(graph, Shard(synchronizer="parameter_server", placement=(1,)))
    plan = lower(graph, TWO, strategy)
    found = [peak_memory(plan, rank) for rank in plan.replicas]
    assert found[0].optimizer_state == 0
    assert found[1].optimizer_state == pytest.approx(2 * found[1].weights, abs=SCALARS)
    assert found[0].weights == found[1].weights


def test_sharded_state_is_spread_over_the_ranks():
    graph = mlp().with_optimizer("AdamW", 2)
    plan = lower(graph, TWO, everywhere(graph, Shard(synchronizer="sharded")))
    for rank in plan.replicas:
        found = peak_memory(plan, rank)
        assert found.optimizer_state == pytest.approx(found.weights, abs=SCALARS)
        assert found.communication >= found.weights, "its parts of the gradients, as they came and as they are applied"


def test_encoders_hold_residuals_and_what_others_sent():
    graph = mlp(batch=1)
    topk = Encoder(name="topk", ratio=0.1)
    plain = estimate(graph, everywhere(graph, Shard()), TWO, runtime="offbeat")
    encoded = estimate(graph, everywhere(graph, Shard(encoder=topk)), TWO, runtime="offbeat")
    assert plain.communication == 0
    assert encoded.communication >= plain.weights, "error feedback keeps what was not sent"


def test_half_precision_halves_what_it_stores():
    def of(dtype):
        model = nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUT)).to(dtype)
        return estimate(capture(model, torch.zeros(BATCH, INPUT, dtype=dtype), loss_fn=lambda out: out.sum()))

    assert of(torch.bfloat16).total == pytest.approx(of(torch.float32).total / 2, abs=SCALARS)


def test_sparse_gradients_hold_their_rows():
    embedding = nn.Embedding(10_000, 8, sparse=True)
    graph = capture(embedding, torch.zeros(16, dtype=torch.int64), loss_fn=lambda out: out.sum())
    assert gradient_bytes(graph.variables[0]) == 16 * (8 * 4 + 8)
    assert estimate(graph).gradients < 4 * 10_000 * 8 / 10


def test_a_rank_outside_the_cluster_is_refused():
    plan = lower(mlp(), TWO, Strategy())
    with pytest.raises(OffbeatError, match="rank 2 is outside the cluster of 2 ranks"):
        peak_memory(plan, 2)


def test_every_strategy_of_the_plan_layer_has_an_estimate():
    graph = replace(capture_zoo("ncf_sparse", 0.05, 8), optimizer="SGD")
    strategies = [
        Strategy(),
        everywhere(graph, Shard(staleness=2)),
        Strategy(schedule=Schedule(mode="barrier")),
        Strategy(
            variables={
                v.name: VariableConfig(shards=(Shard(synchronizer="sparse_all_gather" if v.sparse else "all_reduce"),))
                for v in graph.variables
            }
        ),
    ]
    totals = [estimate(graph, strategy, TWO, runtime="offbeat").total for strategy in strategies]
    assert all(total > graph.parameter_bytes for total in totals)
    assert totals[1] > totals[0], "messages under way are held"
    assert totals[3] < totals[0], "sparse rows need no buffer of the whole table"


def _benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "memory_accuracy.py"
    spec = importlib.util.spec_from_file_location("memory_accuracy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw"])
@pytest.mark.parametrize(
    "name", mostly_slow(["vgg16", "resnet50", "bert_base", "gpt2", "transformer"], ["resnet50", "gpt2"])
)
def test_the_estimate_is_what_torch_allocates(name, optimizer):
    run = _benchmark().compare(name, scale=0.12, batch=4, optimizer=optimizer)
    assert abs(run["relative_error"]) < 0.06, run


def test_tied_weights_and_micro_batches_are_what_torch_allocates():
    scale, batch, parts = 0.12, 8, 4
    benchmark = _benchmark()
    graph = capture_zoo("bert_base", scale, batch).with_optimizer("SGD", 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, inputs = build_zoo("bert_base", scale, batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(2):
            with torch.profiler.record_function("step"):
                optimizer.zero_grad()
                for part in zip(*(tensor.chunk(parts) for tensor in inputs), strict=True):
                    model(*part).backward()
                optimizer.step()
    measured = benchmark.peak_of(profiler)
    assert estimate(graph, Strategy(accumulation=parts)).total == pytest.approx(measured, rel=0.02)


@pytest.fixture(scope="module")
def two_ranks():
    """A mesh of two ranks, of which only this one exists: gloo's threads would free memory unseen by the profiler."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


UNITS = {
    "each block": ("gpt2", {}),
    "the root too": ("llama_1b", {"root": True, "prefetch": 2}),
    "early gathers": ("gpt2", {"prefetch": 3}),
    "kept": ("gpt2", {"reshard": False}),
    "recomputed": ("gpt2", {"recompute": True, "prefetch": 0}),
    "reduced in bf16": ("gpt2", {"reduce_dtype": "bfloat16"}),
    "one unit": ("bert_base", {"units": []}),
    "a Llama kept": ("llama_1b", {"reshard": False}),
}


@pytest.mark.parametrize("case", mostly_slow(list(UNITS), list(UNITS)[:3]))
def test_fully_sharded_units_are_what_torch_allocates(two_ranks, case):
    name, options = UNITS[case]
    scale, batch = 0.12, 2
    graph = capture_zoo(name, scale, batch).with_optimizer("AdamW", 2)
    plan = lower(graph, TWO, build_strategy("fsdp", graph, TWO, **options))
    # What an earlier model has left must not be freed meanwhile.
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, inputs = build_zoo(name, scale, batch)
        apply_memory_strategy(model, plan.strategy, None)
        apply_units(model, plan.strategy.fsdp, two_ranks)
        gather_asynchronously(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with torch.profiler.record_function("step"):
                optimizer.zero_grad()
                model(*inputs).backward()
                optimizer.step()
    measured = _benchmark().peak_of(profiler)
    assert peak_memory(plan).total == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("device", ["H200", "NVIDIA H200", "NVIDIA GH200 480GB"])
def test_the_workspace_of_a_device_goes_by_any_of_its_names(device):
    cluster = ClusterSpec.homogeneous(nodes=1, device=device)
    assert estimate(mlp(), cluster=cluster).workspace >= HOPPER_WORKSPACE_BYTES
