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
    import torch
    from torch import nn

    from offbeat.graph.model import ModelGraph

# Strings, so that listing the names does not import torch.
_BUILDERS = {
    "vgg16": "vgg:vgg16",
    "resnet50": "resnet:resnet50",
    "resnet101": "resnet:resnet101",
    "inception_v3": "inception:inception_v3",
    "densenet121": "densenet:densenet121",
    "wide_resnet": "resnet:wide_resnet",
    "transformer": "transformer:transformer",
    "seq2seq": "recurrent:seq2seq",
    "ncf_dense": "ncf:ncf_dense",
    "ncf_sparse": "ncf:ncf_sparse",
    "lm1b": "recurrent:lm1b",
    "bert_3l": "bert:bert_3l",
    "bert_6l": "bert:bert_6l",
    "bert_base": "bert:bert_base",
    "bert_large": "bert:bert_large",
    "gpt2": "gpt2:gpt2",
    "gpt2_medium": "gpt2:gpt2_medium",
    "gpt2_xl": "gpt2:gpt2_xl",
    "mlp": "mlp:mlp",
}


def names() -> tuple[str, ...]:
    """The names `build` and `capture` know."""
    return tuple(_BUILDERS)


def build(
    name: str, scale: float = 1.0, batch: int | None = None, **options: Any
) -> "tuple[nn.Module, tuple[torch.Tensor, ...]]":
    """The model and one example batch.

    `scale` is in (0, 1]; `batch` is the number of samples and defaults to the papers', shrunk by `scale`. `options` are
    the keyword arguments of the model's own function, such as `dropout` or wide_resnet's `width`.
    """
    builder = _builder(name)
    if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale) or not 0 < scale <= 1:
        raise OffbeatError(f"scale: {scale!r} must be a number above 0 and at most 1")
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise OffbeatError(f"batch: {batch!r} must be a whole number of samples, at least 1")
    known = [option for option in inspect.signature(builder).parameters if option not in ("scale", "batch")]
    for option in options:
        if option not in known:
            raise OffbeatError(f"{option}: model {name!r} has no such option; it has {', '.join(known) or 'none'}")
    return builder(float(scale), batch, **options)


def capture(name: str, scale: float = 1.0, batch: int | None = None, **options: Any) -> "ModelGraph":
    """The model's training step as a graph, without allocating its weights."""
    import torch

    from offbeat.graph.capture import capture as capture_graph

    with torch.device("meta"):
        model, example_inputs = build(name, scale, batch, **options)
    return capture_graph(model, example_inputs, name=name)


def _builder(name: str) -> Callable[..., Any]:
    if name not in _BUILDERS:
        raise OffbeatError(f"no model is called {name!r}; the zoo has {', '.join(_BUILDERS)}")
    module, function = _BUILDERS[name].split(":")
    return getattr(importlib.import_module(f"offbeat.zoo.{module}"), function)


__all__ = ["build", "capture", "names"]
