"""Regions as one compiled function, and autocast: the same numbers, and a sentence where it is not possible."""

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import small_models
import torch
from in_memory import distributed, run_ranks
from reference import flat_parameters, graph_of
from torch import nn

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.runtime import fusion
from offbeat.runtime.memory import apply_memory_strategy
from offbeat.strategy import Strategy

# Torch hides this warning of its compiler's by itself, but not from filters that make errors of warnings.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Chain(nn.Module):
    """Three layers that its own forward calls one after another, or with something in between."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
        self.between = between
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(self.first(x))
        return x.sum() if self.skip else self.third(self.second(x)).sum()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The functions that were compiled."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(fusion, "backend", keep)
    return graphs


def trained(model: nn.Module, steps: int = 3) -> torch.Tensor:
    """Gradients after some passes."""
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(4, 5)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


REGION = ("first", "second", "third")


def fused(model: nn.Module, *regions: tuple[str, ...]) -> list[Callable[[], None]]:
    return apply_memory_strategy(model, Strategy(fusion=regions), lambda: None)


def test_modules_that_any_module_calls_one_after_another_are_one_function(compilations: list[Any]) -> None:
    torch.manual_seed(0)
    plain = Chain()
    model = deepcopy(plain)
    undo = fused(model, REGION)
    assert torch.equal(trained(model), trained(plain))
    assert len(compilations) == 1
    # What is copied, and what is looked at outside of the step, is the module itself.
    copied = deepcopy(model)
    x = torch.randn(2, 5)
    assert torch.equal(model.first(x), plain.first(x))
    with torch.no_grad():
        copied.first.weight.zero_()
    assert not torch.equal(copied.first(x), model.first(x))
    assert torch.equal(model.eval()(x), plain.eval()(x))
    for each in undo:
        each()
    assert not any("forward" in vars(module) for module in model.modules())


def test_torch_does_not_give_up_on_many_regions(compilations: list[Any]) -> None:
    """It compiles a function eight times at most, and a model has more layers than that."""
    model = nn.Sequential(
        *(nn.Linear(5, 5) if i % 2 else nn.Tanh() for i in range(20)), nn.Flatten(0), nn.Linear(20, 1)
    )
    fused(model, *((f"{i}", f"{i + 1}") for i in range(0, 20, 2)))
    trained(model)
    assert len(compilations) == 10


def test_modules_with_something_in_between_are_compiled_one_by_one(
    compilations: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plain = Chain(lambda x: x * 2)
    model = deepcopy(plain)
    fused(model, REGION)
    with caplog.at_level(logging.WARNING, "offbeat"):
        assert torch.equal(trained(model), trained(plain))
    assert "compiles the modules first, second, third one by one: they do not run one after another" in caplog.text
    assert len(compilations) == 3


@pytest.mark.usefixtures("compilations")
def test_what_can_be_told_at_once_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    with caplog.at_level(logging.WARNING, "offbeat"):
        fused(model, ("0.0", "1.0"))
    assert "compiles the modules 0.0, 1.0 one by one: no module calls all of them" in caplog.text
    with pytest.raises(StrategyError, match=r"module '0\.0' is compiled twice"):
        fused(model, ("0",), ("0.0",))


@pytest.mark.parametrize("change", ["between", "skip"])
def test_a_step_that_takes_another_path_is_an_error_and_no_wrong_number(compilations: list[Any], change: str) -> None:
    model = Chain()
    fused(model, REGION)
    trained(model)
    setattr(model, change, (lambda x: x + 1) if change == "between" else True)
    with pytest.raises(StrategyError, match="so the two cannot form one region"):
        trained(model)


def test_autocast_in_a_job_is_autocast_by_hand() -> None:
    """Ranks in memory train in bfloat16 as each would alone, but for the average."""
    graph = graph_of("mlp", torch.float32, "sgd")
    cluster = ClusterSpec.homogeneous(nodes=2, devices_per_node=1)

    def by_hand() -> torch.Tensor:
        model = small_models.make("mlp", torch.float32)
        optimizer = small_models.make_optimizer("sgd", model.parameters())
        for step in range(3):
            gradients = []
            for rank in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(*small_models.batch("mlp", step, rank, torch.float32))
                loss.backward()
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
                parameter.grad = (one + other) / 2
            optimizer.step()
        return flat_parameters(model)

    def rank(world: Any, strategy: Strategy) -> tuple[torch.Tensor, torch.dtype]:
        model = small_models.make("mlp", torch.float32)
        optimizer = small_models.make_optimizer("sgd", model.parameters())
        with distributed(world, model, optimizer, (graph, cluster, Strategy.from_json(strategy.to_json()))):
            for step in range(3):
                optimizer.zero_grad()
                loss = model(*small_models.batch("mlp", step, world.rank, torch.float32))
                loss.backward()
                optimizer.step()
            model.flush()
            copied = deepcopy(model)
            assert "forward" not in vars(copied) or not isinstance(copied.forward, fusion.Forward)
            return flat_parameters(model), loss.dtype

    expected = by_hand()
    cast, exact = (
        run_ranks(2, lambda world, strategy=strategy: rank(world, strategy))
        for strategy in (Strategy(precision="bf16"), Strategy())
    )
    assert all(dtype == torch.float32 for _, dtype in cast)
    assert all((found - expected).abs().max() < 1e-6 for found, _ in cast)
    # Without it the numbers are others.
    assert all((found - expected).abs().max() > 1e-5 for found, _ in exact)
