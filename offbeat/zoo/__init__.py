"""The model zoo: a model, an example batch and a ModelGraph by name.

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
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.graph.model import ModelGraph
    from offbeat.zoo.blocks import Built


class Listed(NamedTuple):
    """A model at scale 1; of one step of one rank's batch, the FLOPs of forward and backward."""

    module: str
    """Where a function has the model's name. A string, so that listing the models does not import torch."""
    parameters: int
    tensors: int
    batch: int
    flops: int


# Sizes are kept, because counting takes half a minute; a test counts again.
MODELS = {
    "vgg16": Listed("convolutional", 138_357_544, 32, 32, 2_966_279_767_888),
    "resnet50": Listed("convolutional", 25_557_032, 161, 32, 779_362_263_429),
    "resnet101": Listed("convolutional", 44_549_160, 314, 32, 1_493_020_178_872),
    "wide_resnet": Listed("convolutional", 68_883_240, 161, 32, 2_183_166_269_317),
    "densenet121": Listed("convolutional", 7_978_856, 364, 32, 539_355_852_873),
    "inception_v3": Listed("inception", 23_834_568, 284, 32, 1_097_546_900_718),
    "transformer": Listed("transformers", 63_047_680, 161, 80, 1_979_337_072_647),
    "bert_3l": Listed("transformers", 10_884_884, 62, 32, 98_929_227_577),
    "bert_6l": Listed("transformers", 36_223_564, 110, 32, 563_963_828_137),
    "bert_base": Listed("transformers", 110_106_428, 206, 32, 2_248_796_013_241),
    "bert_large": Listed("transformers", 336_226_108, 398, 8, 1_933_006_944_265),
    "gpt2": Listed("transformers", 124_439_808, 148, 8, 7_158_265_744_640),
    "gpt2_medium": Listed("transformers", 354_823_168, 292, 8, 20_267_240_135_680),
    "gpt2_large": Listed("transformers", 774_030_080, 436, 8, 43_376_685_325_056),
    "gpt2_xl": Listed("transformers", 1_557_611_200, 580, 8, 85_471_916_195_776),
    "llama_1b": Listed("llama", 1_235_814_400, 146, 8, 64_614_336_212_992),
    "seq2seq": Listed("recurrent", 67_192_164, 32, 128, 843_011_707_592),
    "lm1b": Listed("recurrent", 832_213_886, 13, 128, 353_173_391_360),
    "ncf_dense": Listed("dense", 122_122_801, 10, 256, 248_572_258),
    "ncf_sparse": Listed("dense", 122_122_801, 10, 256, 4_373_138),
    "mlp": Listed("dense", 2_383_370, 8, 64, 816_728_212),
}


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
    return tuple(MODELS)


def build(name: str, scale: float = 1.0, batch: int | None = None, **options: Any) -> "Built":
    """The model and one example batch.

    `scale` is in (0, 1]; `batch` is the number of samples and defaults to the papers', shrunk by `scale`. `options` are
    the keyword arguments of the model's own function, such as `dropout` or wide_resnet's `width`.
    """
    if name not in MODELS:
        raise OffbeatError(f"unknown model {name!r}; the zoo has {', '.join(MODELS)}")
    builder = getattr(importlib.import_module(f"offbeat.zoo.{MODELS[name].module}"), name)
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
