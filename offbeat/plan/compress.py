"""The bytes on the wire of encoded messages.

The counts are those of the runtime's encoders, so that what is simulated is what is sent.
"""

import math
from dataclasses import replace

from offbeat.graph.model import ITEM_BYTES, Variable
from offbeat.plan.model import Draft, Message
from offbeat.strategy import Encoder, Shard

INDEX_BYTES = 8
"""Row numbers and element numbers travel as int64."""
SCALE_BYTES = 4
"""One float32 scale per piece of the int8 and sign encoders."""


def compress(draft: Draft) -> None:
    """Sets the encoded size of every message."""
    for message in draft.messages:
        size = sum(gradient_bytes(message, p.shape, draft.graph.variable(p.variable)) for p in message.pieces)
        back = {"parameter_server": message.bytes, "sharded": message.bytes, "sparse_parameter_server": size}
        draft.messages[message.index] = replace(
            message, gradient_bytes=size, parameter_bytes=back.get(message.synchronizer, 0)
        )


def gradient_bytes(carrier: Message | Shard, shape: tuple[int, ...], variable: Variable) -> int:
    """Encoded bytes of one replica's gradient of a piece of a variable, which has this shape."""
    item = ITEM_BYTES[variable.dtype]
    match carrier.synchronizer:
        case "sparse_all_gather" | "sparse_parameter_server":
            # The rows that a step touches, taken as spread evenly, with their numbers.
            rows = max(variable.shape[0], 1)
            touched = min(shape[0], math.ceil(variable.sparse_rows * shape[0] / rows))
            return touched * (variable.bytes // rows + INDEX_BYTES)
        case "factor_broadcast":
            height = variable.shape[0]
            return variable.factor_rows * (height + variable.elements // height) * item
        case _:
            return encoded_bytes(carrier.encoder, shape, item)


def encoded_bytes(encoder: Encoder, shape: tuple[int, ...], item_bytes: int) -> int:
    """Bytes of one encoded tensor of this shape."""
    elements = math.prod(shape)
    match encoder.name:
        case "fp16" | "bf16":
            return elements * min(2, item_bytes)
        case "topk":
            return kept(elements, encoder.ratio or 1.0) * (item_bytes + INDEX_BYTES)
        case "randomk":
            # Every rank draws the same positions from a shared seed, so only values travel.
            return kept(elements, encoder.ratio or 1.0) * item_bytes
        case "sign":
            return (elements + 7) // 8 + SCALE_BYTES
        case "int8":
            return elements + SCALE_BYTES
        case "powersgd":
            height, width, rank = factor_shape(shape, encoder.rank or 1)
            return (height + width) * rank * item_bytes if rank else elements * item_bytes
        case _:
            return elements * item_bytes


def kept(elements: int, ratio: float) -> int:
    """Elements that topk and randomk keep: at least one, if there is any."""
    return min(elements, max(1, math.ceil(elements * ratio)))


def factor_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int, int]:
    """(height, width, rank) of PowerSGD's factors; rank 0 where the factors would not be smaller than the tensor."""
    if len(shape) < 2:
        return math.prod(shape), 1, 0
    height, width = shape[0], math.prod(shape[1:])
    rank = min(rank, height, width)
    return (height, width, rank) if (height + width) * rank < height * width else (height, width, 0)
