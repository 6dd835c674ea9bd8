"""Updates that are applied slice by slice end as those that are applied at once, bit for bit."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.graph.model import ELEMENTWISE
from offbeat.plan import Message, Piece
from offbeat.runtime.engine.components import Portions
from offbeat.runtime.sync import Synchroniser
from offbeat.runtime.unit_optimizer import Unit, UnitOptimizer
from offbeat.strategy import Encoder

SHAPES = ((37, 11), (5,), (130,), (3, 4, 7))
TOTAL = 37 * 11 + 5 + 130 + 84
OPTIONS: dict[str, dict] = {"SGD": {"momentum": 0.9, "weight_decay": 0.01}, "Adam": {"amsgrad": True}}


def make_synchroniser(parameters: dict[str, torch.nn.Parameter]) -> Synchroniser:
    pieces = tuple(Piece(name, tuple((0, length) for length in p.shape)) for name, p in parameters.items())
    message = Message(
        index=0,
        group=0,
        pieces=pieces,
        dtype="float32",
        synchronizer="all_reduce",
        owner=None,
        stations=(),
        reduction_order=(),
        encoder=Encoder(),
        staleness=0,
        asynchronous=False,
        gradient_bytes=4 * TOTAL,
        parameter_bytes=0,
    )
    return Synchroniser(message, parameters, None, 0, 1.0)  # type: ignore[arg-type]


def make_model(name: str, **options) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(1)
    parameters = {
        f"p{place}": torch.nn.Parameter(torch.randn(shape, generator=generator)) for place, shape in enumerate(SHAPES)
    }
    first, *others = parameters.values()
    # Two groups, so that each portion takes its own hyperparameters.
    groups = [{"params": [first], "lr": 0.02}, {"params": others}]
    return parameters, getattr(torch.optim, name)(groups, lr=0.01, **options)


def give_gradients(parameters: dict[str, torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def updated_once() -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer, Portions]:
    """SGD with momentum after one update at once, so that its state is there."""
    parameters, optimizer = make_model("SGD", momentum=0.9)
    synchroniser = make_synchroniser(parameters)
    unit = UnitOptimizer(optimizer, type(optimizer), [Unit(p, p) for p in parameters.values()])
    give_gradients(parameters, 0)
    synchroniser.load()
    unit.step()
    return parameters, optimizer, Portions(synchroniser, unit, ())


def same(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> bool:
    first, second = left.state_dict()["state"], right.state_dict()["state"]
    assert first.keys() == second.keys()
    for place, state in first.items():
        assert state.keys() == second[place].keys()
        for key, value in state.items():
            if not torch.equal(torch.as_tensor(value), torch.as_tensor(second[place][key])):
                return False
    return True


@pytest.mark.parametrize("name", ELEMENTWISE)
@given(cuts=st.lists(st.integers(1, TOTAL - 1), max_size=6, unique=True))
@settings(max_examples=12, deadline=None)
def test_portions_end_as_an_update_at_once(name: str, cuts: list[int]) -> None:
    options = OPTIONS.get(name, {})
    expected, reference = make_model(name, **options)
    parameters, optimizer = make_model(name, **options)
    synchroniser = make_synchroniser(parameters)
    unit = UnitOptimizer(optimizer, type(optimizer), [Unit(p, p) for p in parameters.values()])
    portions = Portions(synchroniser, unit, ())
    assert Portions.fit(synchroniser, unit)
    assert portions.possible() == bool(optimizer.state)
    for step in range(4):
        give_gradients(expected, step)
        reference.step()
        give_gradients(parameters, step)
        synchroniser.load()
        if portions.possible():
            for reached in (*sorted(cuts), TOTAL):
                portions.apply(reached, frozenset())
            portions.end()
        else:
            unit.step()
    assert all(torch.equal(expected[key], parameters[key]) for key in parameters)
    assert same(reference, optimizer)


def test_an_unused_variable_is_left_alone() -> None:
    parameters, optimizer, portions = updated_once()
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    state = copy.deepcopy(optimizer.state[parameters["p2"]])
    give_gradients(parameters, 1)
    portions.synchroniser.load()
    portions.apply(300, frozenset({id(parameters["p2"])}))
    portions.apply(TOTAL, frozenset({id(parameters["p2"])}))
    portions.end()
    assert [torch.equal(before[key], parameters[key]) for key in parameters] == [False, False, True, False]
    assert torch.equal(optimizer.state[parameters["p2"]]["momentum_buffer"], state["momentum_buffer"])


def test_plain_sgd_needs_no_state() -> None:
    parameters, optimizer = make_model("SGD")
    unit = UnitOptimizer(optimizer, type(optimizer), [Unit(p, p) for p in parameters.values()])
    assert Portions(make_synchroniser(parameters), unit, ()).possible()


def test_elements_in_another_order_are_updated_at_once() -> None:
    parameters, optimizer, portions = updated_once()
    assert portions.possible()
    first = parameters["p0"]
    optimizer.state[first]["momentum_buffer"] = optimizer.state[first]["momentum_buffer"].t().contiguous().t()
    assert not portions.possible()
