"""A model's name → the model, an example batch, its ModelGraph.

The models of the five papers, in plain torch. Every model takes its example inputs (data and labels) and returns the
scalar loss, so `model(*example_inputs).backward()` is a training step. `scale=1` is the published model; a smaller
scale shrinks widths, depths, image sizes, vocabularies, sequences and the batch together and keeps the topology.
Dropout is 0 unless asked for (`dropout=0.1`), so that runs can be repeated exactly.

Weights and example inputs are drawn from torch's global generator: seed it to repeat them.
"""

import importlib
import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.graph.model import ModelGraph
    from offbeat.zoo.blocks import Built

# The models by module, where each one's function has its name. Strings, so that listing them does not import torch.
_FAMILIES = {
    "convolutional": ("vgg16", "resnet50", "resnet101", "wide_resnet", "densenet121"),
    "inception": ("inception_v3",),
    "transformers": ("transformer", "bert_3l", "bert_6l", "bert_base", "bert_large", "gpt2", "gpt2_medium", "gpt2_xl"),
    "recurrent": ("seq2seq", "lm1b"),
    "dense": ("ncf_dense", "ncf_sparse", "mlp"),
}
_MODULES = {name: module for module, names in _FAMILIES.items() for name in names}


def _is_number(value: Any, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


# What the models' own options that are numbers must be.
_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dropout": (lambda value: _is_number(value) and 0 <= value < 1, "a probability from 0 to below 1"),
    "width": (lambda value: _is_number(value) and 0 < value < math.inf, "a number above 0"),
    "sequence": (lambda value: _is_number(value, int) and value > 0, "a whole number above 0"),
    "vocabulary": (lambda value: _is_number(value, int) and value > 1, "at least 2, the padding and one word"),
}


def names() -> tuple[str, ...]:
    """The names `build` and `capture` know."""
    return tuple(_MODULES)


def build(name: str, scale: float = 1.0, batch: int | None = None, **options: Any) -> "Built":
    """The model and one example batch.

    `scale` is in (0, 1]; `batch` is the number of samples and defaults to the papers', shrunk by `scale`. `options` are
    the keyword arguments of the model's own function, such as `dropout` or wide_resnet's `width`.
    """
    if name not in _MODULES:
        raise OffbeatError(f"no model is called {name!r}; the zoo has {', '.join(_MODULES)}")
    builder = getattr(importlib.import_module(f"offbeat.zoo.{_MODULES[name]}"), name)
    if not (_is_number(scale) and 0 < scale <= 1):
        raise OffbeatError(f"scale: {scale!r} must be a number above 0 and at most 1")
    if batch is not None and not (_is_number(batch, int) and batch >= 1):
        raise OffbeatError(f"batch: {batch!r} must be a whole number of samples, at least 1")
    known = [option for option in inspect.signature(builder).parameters if option not in ("scale", "batch")]
    for option, value in options.items():
        if option not in known:
            raise OffbeatError(f"{option}: model {name!r} has no such option; it has {', '.join(known) or 'none'}")
        fits, words = _OPTIONS.get(option, (lambda _: True, ""))
        if not fits(value):
            raise OffbeatError(f"{option}: {value!r} must be {words}")
    return builder(float(scale), batch, **options)


def capture(name: str, scale: float = 1.0, batch: int | None = None, **options: Any) -> "ModelGraph":
    """The model's training step as a graph, without allocating its weights."""
    import torch

    from offbeat.graph.capture import capture as capture_graph

    with torch.device("meta"):
        model, example_inputs = build(name, scale, batch, **options)
    return capture_graph(model, example_inputs, name=name)


__all__ = ["build", "capture", "names"]
