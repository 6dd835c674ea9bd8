"""What a training loop may do with the objects themselves: their state, their copies, their end, their classes."""

import abc
import copy
import gc
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
from in_memory import run_ranks
from loop_job import Job, Way
from memory_job import MemoryWorld
from test_loops import OVERLAP, PARTS, SERVERS, SHARDED, assert_same, step
from torch import nn

import offbeat
from offbeat.errors import OffbeatError, StrategyError
from offbeat.runtime import wrapping
from offbeat.runtime.distribute import variables_of
from offbeat.runtime.lazy import sharing_memory


def on_two_ranks(body: Callable[[Job], Any], way: Way) -> list[Any]:
    """What `body` returns for a job on each of two ranks."""

    def rank(world: MemoryWorld) -> Any:
        return body(Job(world, "dense", "sgd", way, find_unused=False, held_back=False))

    return run_ranks(2, rank)


@pytest.mark.parametrize("way", [OVERLAP, ("ddp", 0, "auto", True)])
def test_parameters_that_share_their_memory_are_updated_in_turn(way: Way) -> None:
    def body(job: Job) -> None:
        vector = nn.utils.parameters_to_vector(job.model.parameters()).detach()
        step(job)
        # Parts of one memory that do not overlap are nothing special.
        nn.utils.vector_to_parameters(vector, job.model.parameters())
        step(job)
        first, head = job.model.first.weight, job.model.head.weight
        head.data = first.data.view(-1)[: head.numel()].view_as(head)
        step(job)
        step(job)
        job.see("shared", head)

    assert_same(body, way, optimizer="decay")


@pytest.mark.parametrize("way", [SERVERS, SHARDED, PARTS])
def test_memory_that_two_parameters_share_cannot_be_updated_by_several_ranks(way: Way) -> None:
    def body(job: Job) -> str:
        step(job)
        first, head = job.model.first.weight, job.model.head.weight
        head.data = first.data.view(-1)[: head.numel()].view_as(head)
        with pytest.raises(StrategyError) as refusal:
            step(job)
        return str(refusal.value)

    for said in on_two_ranks(body, way):
        assert said.startswith("parameters 'first.weight' and 'head.weight' share their memory")
        assert said.endswith("let both names be one parameter (module.weight = other.weight, not .data)")


def test_memory_that_two_parameters_share_is_not_updated_by_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel for many parameters would update both at once."""
    monkeypatch.setattr(wrapping, "on_gpu", lambda _: True)

    def body(job: Job) -> str:
        step(job)
        job.model.head.weight.data = job.model.first.weight.data.view(-1)[: job.model.head.weight.numel()].view_as(
            job.model.head.weight
        )
        with pytest.raises(StrategyError, match="a GPU updates them at the same time") as refusal:
            step(job)
        return str(refusal.value)

    assert len(on_two_ranks(body, OVERLAP)) == 2


def test_memory_is_shared_where_spans_overlap() -> None:
    memory = torch.zeros(20)
    parts = {"a": memory[:6].view(2, 3), "b": memory[6:12], "c": memory[12:].view(2, 4).t(), "none": memory[3:3]}
    parameters = {name: nn.Parameter(part) for name, part in parts.items()}
    assert sharing_memory(parameters) is None
    assert sharing_memory({**parameters, "d": nn.Parameter(memory[19:])}) == ("c", "d")


@pytest.mark.parametrize("way", [SERVERS, SHARDED, PARTS])
def test_state_that_is_spread_over_ranks_is_not_shown_as_empty(way: Way) -> None:
    def body(job: Job) -> None:
        assert list(job.optimizer.state.items()) == []
        step(job)
        assert job.optimizer.state, "torch's checkpoints would take a step to make some"
        for touch in (
            lambda: job.optimizer.state[job.model.head.weight],
            lambda: list(job.optimizer.state.values()),
            job.optimizer.state.clear,
            lambda: setattr(job.optimizer, "state", defaultdict(dict)),
        ):
            with pytest.raises(StrategyError, match=r"call optimizer\.state_dict\(\) on every rank"):
                touch()
        step(job)
        job.optimizer.load_state_dict(job.optimizer.state_dict())

    on_two_ranks(body, way)


@pytest.mark.parametrize("way", [OVERLAP, SERVERS, SHARDED])
def test_models_that_are_dropped_are_collected(way: Way) -> None:
    def body(job: Job) -> list[weakref.ref[Any]]:
        step(job)
        step(job)
        kept = [weakref.ref(each) for each in (job.model, job.optimizer, job.runtime, job.runtime.engine)]
        job.runtime.engine.settle_all()
        job.model = job.optimizer = job.runtime = None
        return kept

    references = on_two_ranks(body, way)
    gc.collect()
    assert [each() for kept in references for each in kept] == [None] * 8


@pytest.mark.parametrize("way", [OVERLAP, SERVERS])
def test_parameters_without_elements_train_along(way: Way) -> None:
    def body(job: Job) -> None:
        step(job)
        job.model.empty = nn.Parameter(torch.zeros(0, 3).double())
        job.optimizer.add_param_group({"params": [job.model.empty]})
        for _ in range(2):
            job.optimizer.zero_grad()
            job.backward(job.forward() + job.model.empty.sum())
            job.optimizer.step()

    assert_same(body, way)


class OwnClearing(torch.optim.SGD):
    """Counts how often its gradients are cleared."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


def test_an_optimizers_own_way_of_clearing_gradients_is_used() -> None:
    def body(job: Job) -> int:
        job.runtime.release()
        job.optimizer = OwnClearing(job.model.parameters(), lr=0.1)
        job.distribute(OVERLAP)
        step(job)
        step(job)
        return job.optimizer.cleared

    assert on_two_ranks(body, OVERLAP) == [2, 2]


def test_step_takes_a_closure_only() -> None:
    def body(job: Job) -> str:
        with pytest.raises(StrategyError) as refusal:
            job.optimizer.step(scale=2.0)
        return str(refusal.value)

    for said in on_two_ranks(body, OVERLAP):
        assert said.startswith("step() of a distributed optimizer takes a closure only, not 'scale'")


def test_what_reads_every_attribute_of_a_model_is_not_taken_for_a_wrapper() -> None:
    """As torch.jit does."""

    def body(job: Job) -> None:
        for name in dir(job.model):
            getattr(job.model, name)

    on_two_ranks(body, OVERLAP)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


class OwnCopy(Line):
    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnCopy":
        made = OwnCopy()
        made.load_state_dict(self.state_dict())
        made.by = "its own way"  # type: ignore[assignment]
        return made


def test_copies_are_made_in_the_models_own_way() -> None:
    def rank(world: MemoryWorld) -> None:
        for made in (OwnCopy(), torch.fx.symbolic_trace(Line())):
            job = Job(world, "dense", "sgd", None, find_unused=False, held_back=False)
            job.model, job.ours = made, True
            job.optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
            job.distribute((*OVERLAP[:3], False))
            copied, read = copy.deepcopy(job.model), pickle.loads(pickle.dumps(job.model))
            x = torch.ones(1, 3)
            assert torch.equal(copied(x), read(x))
            assert torch.equal(copied(x), made(x))
            assert isinstance(made, torch.fx.GraphModule) or copied.by == "its own way"
            assert type(next(copied.parameters())) is nn.Parameter
            job.close()

    run_ranks(2, rank)


class WithJoin(Line):
    def join(self) -> None:
        """Somebody's own."""


class WithPart(Line):
    def __init__(self) -> None:
        super().__init__()
        self.offbeat = nn.Linear(1, 1)


class AbstractFirst(abc.ABC, nn.Module):
    """Python cannot put another class in the place of such a one."""


class GenericFirst(Generic[TypeVar("T")], nn.Module):
    """As above."""


class Registered(nn.Module):
    def __init_subclass__(cls, *, name: str) -> None:
        assert name


class Named(Registered, name="named"):
    """Of a family that asks more of its classes than a base."""


def test_parameters_without_a_shape_are_refused() -> None:
    said = "parameter 'weight' has no shape yet; call the model with a batch first"
    with pytest.raises(OffbeatError, match=said):
        offbeat.distribute(nn.LazyLinear(2), torch.optim.SGD(Line().parameters(), lr=0.1))


def test_parameters_without_memory_are_refused() -> None:
    graph = offbeat.capture(nn.Linear(2, 2), torch.zeros(1, 2))
    cluster = offbeat.ClusterSpec.local(2)
    plan = offbeat.lower(graph, cluster, offbeat.build_strategy("ddp", graph, cluster))
    with pytest.raises(StrategyError, match="parameter 'weight' is on the meta device; give the model memory"):
        variables_of(nn.Linear(2, 2, device="meta"), plan)


def test_inference_mode_is_refused() -> None:
    model = Line()
    with torch.inference_mode(), pytest.raises(OffbeatError, match="make and distribute models outside"):
        offbeat.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
