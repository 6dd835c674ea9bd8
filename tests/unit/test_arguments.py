"""Wrong arguments of the public functions: one sentence that names the argument and says what to pass."""

import inspect
import io
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from offbeat.arguments import _interface, checked
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError

GRAPH, CLUSTER = offbeat.zoo.capture("mlp", 0.1), ClusterSpec.preset("B9")


def linear() -> torch.nn.Module:
    return torch.nn.Linear(4, 2)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def frozen() -> torch.nn.Module:
    return linear().requires_grad_(False)


def on_two_devices() -> torch.nn.Module:
    return torch.nn.Sequential(linear(), linear().to("meta"))


MODEL = linear()
OPTIMIZER = sgd(MODEL)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((MODEL, None), {}, "optimizer must be a torch.optim.Optimizer, got None"),
        ((MODEL, [OPTIMIZER, OPTIMIZER]), {}, "optimizer must be a torch.optim.Optimizer, got list"),
        ((OPTIMIZER, MODEL), {}, "model must be a torch.nn.Module, got SGD"),
        ((torch.nn.Linear, OPTIMIZER), {}, "model must be a torch.nn.Module, got the class Linear"),
        ((lambda x: x, OPTIMIZER), {}, "model must be a torch.nn.Module, got function"),
        ((MODEL, OPTIMIZER, 3), {}, "strategy must be a text, a path or a Strategy, got 3"),
        ((MODEL, OPTIMIZER, None), {}, "strategy must be a text, a path or a Strategy, got None"),
        ((MODEL, OPTIMIZER), {"timeout": 30}, "timeout must be a timedelta or None, got 30"),
        ((MODEL, OPTIMIZER), {"timeout": timedelta(0)}, "timeout must be longer than zero, got 0:00:00"),
        ((MODEL, OPTIMIZER), {"cluster": "B9"}, "cluster must be a ClusterSpec or None, got 'B9'"),
        ((frozen(), OPTIMIZER), {}, "model Linear has no trainable parameter; pass one with"),
        ((torch.nn.ReLU(), OPTIMIZER), {}, "model ReLU has no trainable parameter; pass one with"),
        ((on_two_devices(), OPTIMIZER), {}, "has parameters on cpu and meta; move it to one device"),
    ],
)
def test_distribute(arguments: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    """Before there is a process group, so that a mistake ends the script at once."""
    with pytest.raises(OffbeatError) as refusal:
        offbeat.distribute(*arguments, **options)
    assert str(refusal.value).startswith("distribute: ")
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: offbeat.capture(None, torch.ones(1)), "capture: model must be a torch.nn.Module, got None"),
        (lambda: offbeat.capture(MODEL, torch.ones(1, 4), 3), "capture: loss_fn must be a function or None, got 3"),
        (lambda: offbeat.lower(MODEL, CLUSTER, offbeat.Strategy()), "lower: graph must be a ModelGraph, got Linear"),
        (lambda: offbeat.lower(GRAPH, "B9", offbeat.Strategy()), "lower: cluster must be a ClusterSpec, got 'B9'"),
        (lambda: offbeat.lower(GRAPH, CLUSTER, "ddp"), "lower: strategy must be a Strategy, got 'ddp'"),
        (lambda: offbeat.simulate(GRAPH), "simulate: plan must be a Plan, got ModelGraph"),
        (lambda: offbeat.simulate(None), "simulate: plan must be a Plan, got None"),
        (lambda: offbeat.optimize(MODEL, CLUSTER), "optimize: graph must be a ModelGraph, got Linear"),
        (lambda: offbeat.optimize(GRAPH, CLUSTER, time_limit="1"), "optimize: time_limit must be a number, got '1'"),
        (lambda: offbeat.optimize(GRAPH, CLUSTER, time_limit=True), "optimize: time_limit must be a number, got True"),
        (lambda: offbeat.find_frontier(CLUSTER, GRAPH), "find_frontier: graph must be a ModelGraph, got ClusterSpec"),
        (
            lambda: offbeat.build_strategy(GRAPH, "ddp", CLUSTER),
            "build_strategy: name must be a text, got ModelGraph",
        ),
        (lambda: offbeat.build_strategy("ddp", GRAPH, None), "build_strategy: cluster must be a ClusterSpec, got None"),
        (lambda: offbeat.transfer("s.json", GRAPH, CLUSTER), "transfer: strategy must be a Strategy, got 's.json'"),
        (lambda: offbeat.register_builder(None), "register_builder: name must be a text, got None"),
        (lambda: offbeat.ddp_kwargs("ddp", None), "ddp_kwargs: model must be a torch.nn.Module, got None"),
        (lambda: offbeat.tune(None), "tune: target must be a text, a path or a function, got None"),
        (lambda: offbeat.tune("t.py", "--batch 8"), "tune: arguments must be a sequence, got '--batch 8'"),
        (lambda: offbeat.tune("t.py", trials=2.5), "tune: trials must be a whole number, got 2.5"),
        (lambda: ClusterSpec.load(None), "cluster: the file must be a string or a path, got None"),
        (lambda: offbeat.Strategy.load(3), "strategy: the file must be a string or a path, got 3"),
        (lambda: offbeat.Strategy.from_json(None), "strategy: a strategy must be text or bytes, got None"),
        (lambda: offbeat.Timeline.load(None), "Timeline.load: path must be a text or a path, got None"),
        (lambda: offbeat.emulate.Emulation(None), "Emulation: hosts must be a whole number or a sequence, got None"),
        (lambda: offbeat.Recorder(None), "Recorder: folder must be a text or a path, got None"),
        (lambda: offbeat.Monitor("model"), "Monitor: model must be a torch.nn.Module, got 'model'"),
    ],
)
def test_other_functions(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(OffbeatError) as refusal:
        call()
    assert str(refusal.value) == said


def test_the_types_of_every_public_function_are_known() -> None:
    """Else a wrong argument would end in an error of the check itself."""
    functions = [getattr(offbeat, name) for name in offbeat.__all__]
    functions = [function for function in functions if isinstance(function, FunctionType)]
    assert len(functions) >= 10
    for function in functions:
        plain = inspect.unwrap(function)
        signature, hints = _interface(plain)
        single = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        assert set(hints) == {parameter.name for parameter in single}, plain.__name__


def test_what_fits_passes() -> None:
    @checked
    def take(number: float, count: int = 1, path: "str | Path | None" = None, names: tuple[str, ...] = ()) -> Any:
        return number, count, path, names

    assert take(np.float32(2), np.int64(3), Path("x"), ["a"]) == (2.0, 3, Path("x"), ["a"])
    assert take(1) == (1, 1, None, ())
    assert offbeat.Monitor(MODEL, stream=io.StringIO()).model is MODEL
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'number'"):
        take()  # type: ignore[call-arg]
