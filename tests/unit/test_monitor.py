"""The live view: what it shows, when it looks, and what it costs."""

import io
import itertools
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.errors import OffbeatError
from offbeat.monitor import Monitor, Reading, describe
from offbeat.timeline import Timeline


def steps(model: torch.nn.Module, count: int, accumulate: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        for _ in range(accumulate):
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


class Engine:
    """As much of Offbeat's engine as the monitor sees."""

    def __init__(self, name: str = "overlap") -> None:
        self.reports = SimpleNamespace(observer=None)
        self.steps = 0
        self.mode = "deferred"
        self.step_hooks: list[Any] = []
        self.plan = SimpleNamespace(strategy=SimpleNamespace(name=name))

    def step(self, waited: float = 0.0) -> bool:
        """Whether somebody was told of it."""
        told = self.reports.observer is not None
        if told:
            self.reports.observer.local("wait", (0,), 1.0, 1.0 + waited)
            self.reports.observer.local("update", (0,), 0.0, 5.0)
            for issued, finished in ((1.0, 1.5), (1.25, 2.0), (3.0, 3.5)):
                at = 10 * self.steps + issued
                self.reports.observer.communication(0, None, at, at, at + finished - issued)
        self.steps += 1
        return told


def attach(model: torch.nn.Module, engine: Engine) -> Engine:
    model._offbeat = SimpleNamespace(engine=engine)
    return engine


def test_a_line_every_so_many_steps() -> None:
    model, stream = torch.nn.Linear(4, 4), io.StringIO()
    with Monitor(model, every=3, predicted=0.5, stream=stream) as monitor:
        steps(model, 8, accumulate=2)
        with torch.no_grad():
            model(torch.ones(1, 4))
    # The last step's end is not seen, because no training forward follows it.
    assert [reading.step for reading in monitor.readings] == [3, 6]
    lines = stream.getvalue().splitlines()
    assert lines == [describe(reading) for reading in monitor.readings]
    assert lines[0].startswith("offbeat  step 3: ")
    assert "predicted 500 ms (-" in lines[0]
    steps(model, 4)
    assert len(monitor.readings) == 2


def test_the_line_tells_everything() -> None:
    reading = Reading(120, 0.0412, 0.0031, 0.022, 0.04, "overlap in deferred mode")
    assert describe(reading) == (
        "offbeat  step 120: 41.2 ms, exposed communication 3.1 ms (8%), network busy 22 ms, predicted 40 ms (+3.0%), "
        "overlap in deferred mode"
    )
    assert describe(Reading(20, 0.5)) == "offbeat  step 20: 500 ms"


@pytest.fixture
def equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every step takes equally long."""
    ticks = itertools.count(0.0, 0.5)
    monkeypatch.setattr("offbeat.monitor.time", SimpleNamespace(perf_counter=lambda: next(ticks)))


@pytest.mark.usefixtures("equal_steps")
def test_the_engine_is_observed_in_the_last_steps_of_a_period_only() -> None:
    model = torch.nn.Linear(4, 4)
    engine = attach(model, Engine())
    told = []
    with Monitor(model, every=5, stream=io.StringIO()) as monitor:
        for number in range(16):
            model(torch.ones(1, 4))
            told.append(engine.step(waited=number))
    assert [number for number, seen in enumerate(told) if seen] == [3, 4, 8, 9, 13, 14]
    assert [reading.exposed_seconds for reading in monitor.readings] == [3.5, 8.5, 13.5]
    # Two of the collectives overlap.
    # Collectives of 3 s each were under way beyond the steps that were observed.
    assert [reading.network_seconds for reading in monitor.readings] == [r.step_seconds for r in monitor.readings]
    assert monitor.readings[0].strategy == "overlap in deferred mode"
    assert engine.reports.observer is None


@pytest.mark.usefixtures("equal_steps")
def test_a_recorder_comes_first_and_a_new_engine_is_followed() -> None:
    model = torch.nn.Linear(4, 4)
    engine, recorder = attach(model, Engine()), SimpleNamespace(local=lambda *_: None, communication=lambda *_: None)
    with Monitor(model, every=2, stream=io.StringIO()) as monitor:
        engine.reports.observer = recorder
        for _ in range(3):
            model(torch.ones(1, 4))
            engine.step()
        assert engine.reports.observer is recorder
        engine = attach(model, Engine("searched"))
        for _ in range(4):
            model(torch.ones(1, 4))
            engine.step(waited=2.0)
    assert [(r.strategy, r.exposed_seconds) for r in monitor.readings] == [
        ("overlap in deferred mode", None),
        ("searched in deferred mode", 2.0),
        ("searched in deferred mode", 2.0),
    ]


def test_predictions_and_mistakes() -> None:
    model = torch.nn.Linear(4, 4)
    timeline = Timeline(marks=np.array([[0.0, 0.25, 0.5]]))
    assert Monitor(model, predicted=timeline).predicted_seconds == 0.25
    for every, said in (
        (0, "every: 0 is not a number of steps"),
        (-1, "every: -1 is not a number of steps"),
        (2.5, "every must be a whole number, got 2.5"),
    ):
        with pytest.raises(OffbeatError, match=said):
            Monitor(model, every=every)  # type: ignore[arg-type]
    for predicted, said in (
        (0.0, "predicted: 0.0 is not a number of seconds above 0"),
        ("fast", "predicted must be a number, a Timeline, 'measure' or None, got 'fast'"),
        (True, "predicted must be a number, a Timeline, 'measure' or None, got True"),
    ):
        with pytest.raises(OffbeatError, match=said):
            Monitor(model, predicted=predicted)  # type: ignore[arg-type]


def test_tensorboard_is_optional(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(OffbeatError, match=r"tensorboard is not installed: run pip install 'offbeat\[tensorboard\]'"):
        Monitor(torch.nn.Linear(4, 4), tensorboard=tmp_path)


@pytest.mark.timing
def test_it_takes_little_of_a_step() -> None:
    """0.1 ms is one percent of a step of 10 ms. The quickest of many periods, whatever else the machine does."""
    model = torch.nn.Linear(4, 4)
    engine = attach(model, Engine())
    spent = [0.0]
    with Monitor(model, every=20, stream=io.StringIO()) as monitor:
        for _ in range(30):
            for _ in range(20):
                model(torch.ones(1, 4))
                engine.step()
            spent.append(monitor.spent_seconds)
    assert len(monitor.readings) >= 29
    assert min(after - before for before, after in pairwise(spent)) / 20 < 1e-4
