"""Compressor: encoders → bytes on the wire.

The counts are those of the runtime's encoders, so that what is simulated is what is sent.
"""

import math
from dataclasses import replace

from offbeat.graph.model import ITEM_BYTES, Variable
from offbeat.plan.draft import Draft
from offbeat.plan.model import Message, Piece
from offbeat.strategy import Encoder

INDEX_BYTES = 8
"""Row numbers and element numbers travel as int64."""
SCALE_BYTES = 4
"""One float32 scale per piece of the int8 and sign encoders."""


def compress(draft: Draft) -> None:
    """Sets the encoded size of every message."""
    variables = draft.graph
    for message in draft.messages:
        first = variables.variable(message.pieces[0].variable)
        gradient, back = _sizes(message, first)
        draft.messages[message.index] = replace(message, gradient_bytes=gradient, parameter_bytes=back)


def _sizes(message: Message, variable: Variable) -> tuple[int, int]:
    item = ITEM_BYTES[message.dtype]
    match message.synchronizer:
        case "sparse_all_gather":
            return sparse_bytes(message.pieces[0], variable), 0
        case "sparse_parameter_server":
            rows = sparse_bytes(message.pieces[0], variable)
            return rows, rows
        case "factor_broadcast":
            height = variable.shape[0]
            return variable.factor_rows * (height + variable.elements // height) * item, 0
        case _:
            gradient = sum(encoded_bytes(message.encoder, piece.shape, item) for piece in message.pieces)
            returned = message.bytes if message.synchronizer in ("parameter_server", "sharded") else 0
            return gradient, returned


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


def sparse_bytes(piece: Piece, variable: Variable) -> int:
    """Bytes of the rows, with their numbers, that one step touches in a piece; rows are taken as spread evenly."""
    rows = variable.shape[0]
    height = piece.box[0][1] - piece.box[0][0]
    touched = min(height, math.ceil(variable.sparse_rows * height / max(rows, 1)))
    row_bytes = variable.bytes // max(rows, 1)
    return touched * (row_bytes + INDEX_BYTES)
