"""What integrations decide without a job: buckets for DDP, refusals, schedulers, packages that are not there."""

import importlib
import sys
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError, StrategyError
from offbeat.graph.skeleton import skeleton
from offbeat.integrations import ddp
from offbeat.strategy import Encoder, Shard, Strategy, VariableConfig, build_strategy


def make_model() -> torch.nn.Module:
    sizes = (7, 50, 300, 20, 90, 11)
    return torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in pairwise(sizes)])


def assigned(model: torch.nn.Module, sizes_mb: list[float]) -> list[set[str]]:
    """The buckets that DDP's own rule makes of the gradients in backward's order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ready = [p for layer in reversed(list(model)) for p in layer.parameters()]
    limits = [int(size * 2**20) for size in sizes_mb]
    buckets, _ = dist._compute_bucket_assignment_by_size(ready, limits, [False] * len(ready))
    return [{names[id(ready[index])] for index in bucket} for bucket in buckets]


@pytest.mark.parametrize("bucket", ["2KiB", "8KiB", "30KiB", "1MiB"])
def test_ddp_gets_the_strategys_buckets(bucket: str) -> None:
    model = make_model()
    strategy = build_strategy("overlap", skeleton(model), ClusterSpec.local(2), bucket=bucket)
    found = offbeat.ddp_kwargs(strategy, model)
    plan = offbeat.lower(skeleton(model), ClusterSpec.local(2), strategy.model_copy(update={"cluster": ""}))
    assert assigned(model, found["bucket_cap_mb_list"]) == [set(message.variables) for message in plan.messages]


def test_the_variables_of_a_module_share_a_bucket() -> None:
    """Autograd completes a bias before or after its weight; limits between the two would shift all that follow."""
    model = make_model()
    sizes = ddp.ddp_kwargs("wfbp", model)["bucket_cap_mb_list"]
    assert assigned(model, sizes) == [{f"{n}.weight", f"{n}.bias"} for n in (4, 3, 2, 1, 0)]


def test_variables_that_are_cut_keep_a_bucket_of_their_own() -> None:
    model = make_model()
    config = VariableConfig(partition=(2, 1), shards=(Shard(group=0), Shard(group=1)))
    strategy = Strategy(variables={"2.weight": config, "2.bias": VariableConfig(shards=(Shard(group=1),))})
    sizes = ddp.ddp_kwargs(strategy, model)["bucket_cap_mb_list"]
    assert {"2.weight", "2.bias"} in assigned(model, sizes)
    assert sum(sizes) == sum(p.numel() * 4 for p in model.parameters()) / 2**20


def test_one_size_where_the_list_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double())
    assert ddp.ddp_kwargs("wfbp", mixed)["bucket_cap_mb"] == 72 * 6 / 2**20
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda self, module, bucket_cap_mb=None: None)
    assert "bucket_cap_mb_list" not in ddp.ddp_kwargs("wfbp", make_model())


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("partitioned_ps", r"DDP cannot synchronise '.*' by parameter_server; use offbeat.distribute"),
        (Strategy(accumulation=4), r"DDP cannot run the strategy's accumulation \(4\)"),
        (Strategy(recompute=("0",)), r"DDP cannot run the strategy's recompute \(\('0',\)\)"),
        (
            Strategy(variables={"1.weight": VariableConfig(shards=(Shard(staleness=2),))}),
            "DDP cannot synchronise '1.weight' by stale",
        ),
    ],
)
def test_what_ddp_cannot_do_is_refused(strategy: str | Strategy, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        ddp.ddp_kwargs(strategy, make_model())


def test_auto_needs_a_job() -> None:
    with pytest.raises(OffbeatError, match=r"'auto' measures the link: call torch\.distributed\.init_process_group"):
        ddp.ddp_kwargs("auto", make_model())


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("huggingface", "transformers", "transformers with accelerate is not installed: .*offbeat\\[transformers\\]"),
        ("huggingface", "accelerate", "transformers with accelerate is not installed: .*offbeat\\[transformers\\]"),
        ("lightning", "lightning", "lightning is not installed: run pip install 'offbeat\\[lightning\\]'"),
    ],
)
def test_a_missing_package_names_its_extra(
    module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With None in its place, Python finds no such package.
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"offbeat.integrations.{module}", raising=False)
    with pytest.raises(OffbeatError, match=extra):
        importlib.import_module(f"offbeat.integrations.{module}")


def test_no_hook_without_encoders() -> None:
    """A stand-in for DDP, which cannot be made without a job."""

    class Job:
        _comm_hooks: tuple[object, ...] = ()
        module = make_model()

    assert ddp.add_encoders(Job(), "wfbp") is False  # type: ignore[arg-type]
    Job._comm_hooks = (object(),)
    with pytest.raises(OffbeatError, match="already has a communication hook"):
        ddp.add_encoders(Job(), "wfbp")  # type: ignore[arg-type]


def test_accelerators_with_engines_of_their_own_are_refused() -> None:
    from offbeat.integrations.accelerate import adopt

    class Plugin:
        backend = "INDUCTOR"

    class Accelerator:
        distributed_type = "DEEPSPEED"
        state = type("State", (), {"dynamo_plugin": Plugin()})

    with pytest.raises(OffbeatError, match="distributed_type 'DEEPSPEED' has its own engine"):
        adopt(Accelerator(), make_model(), None)  # type: ignore[arg-type]
    Accelerator.distributed_type = "MULTI_CPU"
    with pytest.raises(OffbeatError, match="dynamo_backend 'INDUCTOR' compiles too late"):
        adopt(Accelerator(), make_model(), None)  # type: ignore[arg-type]


def test_encoders_are_those_of_the_variables() -> None:
    model = make_model()
    half = VariableConfig(shards=(Shard(encoder=Encoder(name="bf16")),))
    hooks = []

    class Job:
        _comm_hooks: tuple[object, ...] = ()
        module = model
        process_group = None

        def register_comm_hook(self, state: object, hook: object) -> None:
            hooks.append(state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda _: 2)
        patch.setattr(dist, "get_rank", lambda _: 0)
        assert ddp.add_encoders(Job(), Strategy(variables={"1.weight": half}))  # type: ignore[arg-type]
    wanted = hooks[0].wanted
    assert wanted["1.weight"].name == "bf16"
    assert wanted["1.bias"].name == "none"
