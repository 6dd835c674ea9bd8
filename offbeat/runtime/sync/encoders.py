"""Encode a message's local gradient for sending, and decode what arrived to the sum over ranks.

A message is a flat tensor with several pieces one after another. It holds the local gradient times this rank's share of
the average, so ranks are summed, never averaged, here. The sizes sent are those of `offbeat.plan.compress`.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD"), `MessageEncoder.exchange`:

    corrected = local + residual,   sent = decode(encode(corrected)),   residual = corrected - sent

so that on every rank sent + residual = local + previous residual, up to rounding: nothing is lost, only delayed.

| encoder | what travels | combined by |
|---|---|---|
| fp16, bf16 | the elements in 16 bits; the all-reduce also adds in 16 bits | sum |
| topk | int64 positions, then values, of each piece's largest elements | gather |
| randomk | values at positions that all ranks draw alike from (seed, step) | sum |
| sign | a float32 scale, mean abs(x), per piece, then one bit per element (1-bit SGD) | gather |
| int8 | a float32 scale, max abs(x) / 127, per piece, then stochastically rounded int8 (QSGD) | gather |
| powersgd | P and vectors, then Q: two rounds (Vogels et al. 2019, algorithm 1) | sum |

randomk without feedback multiplies by elements / kept, which makes it unbiased; with feedback it must not, because the
residual would grow (it needs a contraction).

PowerSGD approximates the sum M of the ranks' matrices M_r by P Q^T with orthonormal P and Q = M^T P = sum of M_r^T P,
so rank r's own part is P (M_r^T P)^T and its residual M_r - P P^T M_r. These parts add up to what is applied, and a
residual is never longer than its M_r. (torch's powerSGD_hook subtracts the average on every rank instead: the same sum
over ranks, but the differences between ranks stay in the residuals and grow.) Unlike the paper, Q is orthonormalised
before it is used, or P would shrink with the square of the gradient and vanish in 16 bits; and a column that has died,
after a gradient of zeros or an overflow, restarts from the seed.

Values too large for 16 bits are cut to what all ranks can add up without overflow. A gradient that is not finite stays
visible as such on all ranks, so that a loss scaler can skip the step, and leaves no trace in the residual. Everything
repeats exactly for equal seed, step and rank, and the decoded sum is the same, bit by bit, on ranks of one device kind.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from functools import cache, cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from offbeat.errors import OffbeatError
from offbeat.plan.compress import INDEX_BYTES, SCALE_BYTES, factor_shape, kept
from offbeat.strategy import Encoder

Rounds = Generator[torch.Tensor, torch.Tensor, None]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Multiplied by a word of eight 0/1 bytes, brings byte i's bit to bit 56 + i without carries.
_PACK = 0x0102040810204080


def make_encoder(encoder: Encoder, *message: Any) -> "MessageEncoder | None":
    """The encoder of one message on one rank, made of what `MessageEncoder` takes; None where messages travel as is."""
    kinds: dict[str, type[MessageEncoder]] = {"fp16": _Cast, "bf16": _Cast, "topk": _TopK, "randomk": _RandomK}
    kinds |= {"sign": _Sign, "int8": _Int8, "powersgd": _PowerSGD}
    return None if encoder.name == "none" else kinds[encoder.name](encoder, *message)


class MessageEncoder(ABC):
    """Encodes, exchanges and decodes one message, and carries its residual. One exchange at a time."""

    summed: bool
    """Payloads are summed on the way (all-reduce); otherwise each rank receives all of them (all-gather)."""
    residual: torch.Tensor | None
    """What error feedback adds to the next step's gradient: flat, in the message's dtype. None without feedback."""

    def __init__(
        self,
        encoder: Encoder,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        world: int,
        rank: int,
    ) -> None:
        """`shapes` are the pieces'. `seed` is the same on all ranks and differs between messages; `rank` is the place
        among the `world` participants."""
        if dtype not in _DTYPES:
            raise OffbeatError(f"encoder {encoder.name!r} takes floating-point gradients, not {dtype}")
        if not 0 <= rank < world:
            raise OffbeatError(f"encoder {encoder.name!r}: rank {rank} is not one of {world} ranks")
        self._encoder = encoder
        self._sizes = [math.prod(shape) for shape in shapes]
        self._elements = sum(self._sizes)
        self._starts = list(accumulate(self._sizes, initial=0))[:-1]
        self._counts = [kept(size, encoder.ratio or 1.0) for size in self._sizes]
        """Elements of each piece that a sparsifying encoder sends."""
        self._dtype, self._device = dtype, torch.device(device)
        # Half-precision messages are worked on in float32.
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._seed, self._world, self._rank = seed, world, rank
        self.summed = not encoder.gathered
        self.residual = torch.zeros(self._elements, dtype=dtype, device=device) if encoder.feedback else None

    @torch.no_grad()
    def exchange(self, buffer: torch.Tensor, step: int) -> Rounds:
        """Yields what to send, is sent back what arrived, and leaves the decoded sum over ranks in `buffer`.

        What arrives is the sum of the ranks' payloads if `summed`, else their stack (world, n) in rank order. A payload
        is contiguous and may be overwritten. PowerSGD with matrices takes two rounds. All others take one, and their
        residual is final with the payload: a rank that needs no sum may then drop the exchange.
        """
        assert buffer.shape == (self._elements,), f"{buffer.shape} is not a message of {self._elements} elements"
        assert buffer.dtype == self._dtype, f"{buffer.dtype} is not the message's {self._dtype}"
        if self.residual is None:
            corrected = buffer.to(self._wide)
        else:
            # A residual that is wide already is not copied: until `_carry` it holds the corrected gradient.
            corrected = self.residual.to(self._wide).add_(buffer)
        yield from self._rounds(corrected, buffer, step)

    @abstractmethod
    def _rounds(self, corrected: torch.Tensor, buffer: torch.Tensor, step: int) -> Rounds:
        """The exchange of the gradient plus the residual, in the wide dtype."""

    def _carry(self, unsent: torch.Tensor) -> None:
        assert self.residual is not None
        if unsent is not self.residual:
            self.residual.copy_(_narrow(unsent, self._dtype))
        self.residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class _OneRound(MessageEncoder):
    """Encoders with a single exchange, whose decoding is a sum of what each rank sent."""

    def _rounds(self, corrected: torch.Tensor, buffer: torch.Tensor, step: int) -> Rounds:
        payload = self._encode(corrected, step)
        if self.residual is not None:
            self._accumulate(payload if self.summed else payload.unsqueeze(0), corrected, sign=-1)
            self._carry(corrected)
        arrived = yield payload
        expected = payload.shape if self.summed else (self._world, *payload.shape)
        assert arrived.shape == expected, f"{tuple(arrived.shape)} arrived instead of {tuple(expected)}"
        self._decode(arrived, buffer)

    def _decode(self, arrived: torch.Tensor, buffer: torch.Tensor) -> None:
        if self._dtype == self._wide:
            self._accumulate(arrived, buffer.zero_())
        else:
            total = torch.zeros_like(buffer, dtype=self._wide)
            self._accumulate(arrived, total)
            buffer.copy_(total)

    @abstractmethod
    def _encode(self, corrected: torch.Tensor, step: int) -> torch.Tensor:
        """The payload; does not change `corrected`."""

    @abstractmethod
    def _accumulate(self, arrived: torch.Tensor, total: torch.Tensor, sign: int = 1) -> None:
        """Adds sign * the decoded sum of what arrived to `total`, rank after rank."""


class _Cast(_OneRound):
    """fp16 and bf16."""

    def _encode(self, corrected: torch.Tensor, step: int) -> torch.Tensor:
        return _narrow(corrected, _HALF[self._encoder.name], self._world)

    def _accumulate(self, arrived: torch.Tensor, total: torch.Tensor, sign: int = 1) -> None:
        total.add_(arrived, alpha=sign)

    def _decode(self, arrived: torch.Tensor, buffer: torch.Tensor) -> None:
        buffer.copy_(arrived)


class _TopK(_OneRound):
    """The elements of largest magnitude of each piece. Positions count from the start of the message."""

    def _encode(self, corrected: torch.Tensor, step: int) -> torch.Tensor:
        found = [corrected.new_empty(0, dtype=torch.int64)]
        for values, start, count in zip(corrected.split(self._sizes), self._starts, self._counts, strict=True):
            found.append(values.abs().topk(count, sorted=False).indices + start)
        positions = torch.cat(found)
        values = _narrow(corrected[positions], self._dtype)
        return torch.cat([positions.view(torch.uint8), values.view(torch.uint8)])

    def _accumulate(self, arrived: torch.Tensor, total: torch.Tensor, sign: int = 1) -> None:
        count = arrived.shape[1] // (INDEX_BYTES + self._dtype.itemsize)
        positions = _reinterpret(arrived[:, : count * INDEX_BYTES], torch.int64)
        values = _reinterpret(arrived[:, count * INDEX_BYTES :], self._dtype).to(self._wide)
        # One call per rank: within it no position repeats, so a GPU has no order of additions to choose.
        for index, value in zip(positions, values, strict=True):
            total.index_add_(0, index, value, alpha=sign)


class _RandomK(_OneRound):
    """The same random elements of each piece on all ranks."""

    _positions: torch.Tensor
    """Of the elements that this exchange sends."""

    @cached_property
    def _factors(self) -> torch.Tensor:
        """What makes each value that is sent unbiased."""
        factors = [size / max(count, 1) for size, count in zip(self._sizes, self._counts, strict=True)]
        repeated = np.repeat(np.array(factors), np.array(self._counts, dtype=np.int64))
        return torch.from_numpy(repeated).to(self._device, self._wide)

    def _draw(self, step: int) -> torch.Tensor:
        """Positions in the message, drawn on the CPU: what a GPU's generator gives depends on the GPU's model."""
        # numpy draws k of n in O(k), where torch has only a permutation of all n.
        generator = np.random.Generator(np.random.Philox(_mix(self._seed, step)))
        found = [np.empty(0, dtype=np.int64)]
        for size, start, count in zip(self._sizes, self._starts, self._counts, strict=True):
            found.append(generator.choice(size, count, replace=False, shuffle=False) + start)
        return torch.from_numpy(np.concatenate(found)).to(self._device)

    def _encode(self, corrected: torch.Tensor, step: int) -> torch.Tensor:
        self._positions = self._draw(step)
        # Not finite anywhere is not finite in what is sent: the positions may miss the element.
        poison = corrected.sum() * 0
        values = corrected[self._positions].add_(poison)
        return _narrow(values, self._dtype, self._world)

    def _accumulate(self, arrived: torch.Tensor, total: torch.Tensor, sign: int = 1) -> None:
        values = arrived.to(self._wide)
        if self.residual is None:
            values = values * self._factors
        total.index_add_(0, self._positions, values, alpha=sign)


class _Scaled(_OneRound):
    """A float32 scale per piece, then the codes of all pieces; an element decodes to scale * code."""

    _codes_per_block = 1
    """The number of codes per piece is a multiple of this; the last ones may represent no element."""

    @cached_property
    def _code_sizes(self) -> list[int]:
        return [-(-size // self._codes_per_block) * self._codes_per_block for size in self._sizes]

    def _encode(self, corrected: torch.Tensor, step: int) -> torch.Tensor:
        scales = corrected.new_zeros(len(self._sizes))
        for index, values in enumerate(corrected.split(self._sizes)):
            if values.numel():
                scales[index] = self._scale(values)
        scales = scales.to(torch.float32)
        return torch.cat([scales.view(torch.uint8), self._quantise(corrected, scales, step).view(torch.uint8)])

    def _accumulate(self, arrived: torch.Tensor, total: torch.Tensor, sign: int = 1) -> None:
        scale_bytes = SCALE_BYTES * len(self._sizes)
        scales = _reinterpret(arrived[:, :scale_bytes], torch.float32).to(self._wide)
        for scale, row in zip(scales, arrived[:, scale_bytes:], strict=True):
            codes = self._codes(row).split(self._code_sizes)
            for values, code, one in zip(total.split(self._sizes), codes, scale, strict=True):
                values.addcmul_(code[: values.numel()], one, value=sign)

    @abstractmethod
    def _scale(self, values: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _quantise(self, corrected: torch.Tensor, scales: torch.Tensor, step: int) -> torch.Tensor: ...

    @abstractmethod
    def _codes(self, row: torch.Tensor) -> torch.Tensor:
        """One rank's bytes as numbers of the wide dtype."""


class _Sign(_Scaled):
    """One bit per element, eight to a byte; each piece begins with a new byte. Zero counts as positive."""

    _codes_per_block = 8

    def _scale(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs().mean()

    def _quantise(self, corrected: torch.Tensor, scales: torch.Tensor, step: int) -> torch.Tensor:
        flags = corrected.new_zeros(sum(self._code_sizes), dtype=torch.uint8)
        for values, code in zip(corrected.split(self._sizes), flags.split(self._code_sizes), strict=True):
            code[: values.numel()] = values >= 0
        return ((flags.view(torch.int64) * _PACK >> 56) & 0xFF).to(torch.uint8)

    def _codes(self, row: torch.Tensor) -> torch.Tensor:
        return _signs(row.device, self._wide).index_select(0, row.to(torch.int32)).flatten()


class _Int8(_Scaled):
    """Integers of -127 to 127, rounded up with the probability that makes them right on average."""

    def _scale(self, values: torch.Tensor) -> torch.Tensor:
        low, high = values.aminmax()
        return torch.maximum(-low, high) / 127

    def _quantise(self, corrected: torch.Tensor, scales: torch.Tensor, step: int) -> torch.Tensor:
        divisors = torch.where(scales > 0, scales, 1.0)
        scaled = torch.empty_like(corrected)
        for values, divisor, out in zip(corrected.split(self._sizes), divisors, scaled.split(self._sizes), strict=True):
            torch.div(values, divisor, out=out)
        return scaled.add_(self._noise(step)).floor_().clamp_(-127, 127).to(torch.int8)

    def _noise(self, step: int) -> torch.Tensor:
        """Uniform in (0, 1) with 16 bits each; other noise on every rank, or the errors would add up."""
        generator = torch.Generator(self._device).manual_seed(_mix(self._seed, step, self._rank))
        words = torch.empty(-(-self._elements // 4), dtype=torch.int64, device=self._device)
        words.random_(-(2**63), None, generator=generator)
        return words.view(torch.int16)[: self._elements].to(torch.float32).add_(32768.5).div_(65536)

    def _codes(self, row: torch.Tensor) -> torch.Tensor:
        return row.view(torch.int8).to(self._wide)


class _PowerSGD(MessageEncoder):
    """Rank-r factors of each matrix piece; pieces whose factors would not be smaller travel whole, behind P."""

    def __init__(self, encoder: Encoder, shapes: Sequence[tuple[int, ...]], *rest: Any) -> None:
        super().__init__(encoder, shapes, *rest)
        self._factored = [factor_shape(shape, encoder.rank or 1) for shape in shapes]
        """(height, width, rank) of each piece; rank 0 where it travels whole."""
        matrices = [shape for shape in self._factored if shape[2]]
        self._p_shapes = [(height, rank) for height, _, rank in matrices]
        self._whole_sizes = [size for size, (_, _, rank) in zip(self._sizes, self._factored, strict=True) if not rank]
        # The first Q of each matrix, drawn on the CPU so that all kinds of device agree.
        generator = torch.Generator().manual_seed(_mix(self._seed))
        drawn = [torch.randn((width, rank), generator=generator, dtype=torch.float64) for _, width, rank in matrices]
        self._first = [factor.to(self._device, self._wide) for factor in drawn]
        self._factors = [factor.clone() for factor in self._first]

    def _parts(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The matrices in a message, and the pieces that travel whole."""
        pieces = list(zip(flat.split(self._sizes), self._factored, strict=True))
        matrices = [piece.view(height, width) for piece, (height, width, rank) in pieces if rank]
        return matrices, [piece for piece, (_, _, rank) in pieces if not rank]

    def _rounds(self, corrected: torch.Tensor, buffer: torch.Tensor, step: int) -> Rounds:
        arrived = yield self._project(corrected)
        sizes = [math.prod(shape) for shape in self._p_shapes]
        products, sums = arrived.to(self._wide).split([sum(sizes), sum(self._whole_sizes)])
        for piece, values in zip(self._parts(buffer)[1], sums.split(self._whole_sizes), strict=True):
            piece.copy_(values)
        if sizes:
            bases, payload = self._refine(corrected, products.split(sizes))
            arrived = yield payload
            self._approximate(arrived, bases, buffer)

    def _project(self, corrected: torch.Tensor) -> torch.Tensor:
        """Round one: P = M Q of every matrix, then the pieces that travel whole."""
        matrices, whole = self._parts(corrected)
        parts = [corrected.new_empty(0)]
        with self._full_precision():
            for matrix, factor, first in zip(matrices, self._factors, self._first, strict=True):
                usable = factor.isfinite().all(0) & factor.any(0)
                start = _orthonormalise(torch.where(usable, factor, first))
                parts.append((matrix @ start).flatten())
        payload = _narrow(torch.cat([*parts, *whole]), self._dtype, self._world)
        if self.residual is not None:
            sent = payload[payload.numel() - sum(self._whole_sizes) :].split(self._whole_sizes)
            for piece, values in zip(whole, sent, strict=True):
                piece.sub_(values)
            if not matrices:
                self._carry(corrected)
        return payload

    def _refine(
        self, corrected: torch.Tensor, products: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Round two: the orthonormal P of every matrix, and Q = M^T P to send; what they miss is the residual."""
        bases, factors = [], []
        with self._full_precision():
            for matrix, product, shape in zip(self._parts(corrected)[0], products, self._p_shapes, strict=True):
                basis = _orthonormalise(product.view(shape))
                factor = _narrow(matrix.T @ basis, self._dtype, self._world)
                if self.residual is not None:
                    matrix.addmm_(basis, factor.to(self._wide).T, alpha=-1)
                bases.append(basis)
                factors.append(factor.flatten())
        if self.residual is not None:
            self._carry(corrected)
        return bases, torch.cat(factors)

    def _approximate(self, arrived: torch.Tensor, bases: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """P Q^T into the buffer; the next step starts from this Q."""
        split = arrived.to(self._wide).split([factor.numel() for factor in self._factors])
        with self._full_precision():
            for matrix, basis, values, factor in zip(self._parts(buffer)[0], bases, split, self._factors, strict=True):
                factor.copy_(values.view_as(factor))
                matrix.copy_(basis @ factor.T)

    def _full_precision(self) -> torch.autocast:
        """Products keep the wide dtype even where the training step runs under autocast."""
        return torch.autocast(self._device.type, enabled=False)


@cache
def _signs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The eight signs in each byte."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return (2 * bits - 1).to(device, dtype)


def _narrow(values: torch.Tensor, dtype: torch.dtype, world: int = 1) -> torch.Tensor:
    """Cast so that `world` such values add up to something finite; what is infinite already becomes NaN."""
    if values.dtype == dtype:
        return values
    limits = torch.finfo(dtype)
    # The exponential leaves room for the rounding of every addition.
    bound = limits.max / world * math.exp(-world * limits.eps)
    # Adding zero times the values is the cheapest way to keep what is not finite so.
    return values.clamp(-bound, bound).add_(values, alpha=0).to(dtype)


def _reinterpret(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of bytes as rows of another type; copied, because a row may begin at an address the type does not allow."""
    flat = rows.clone(memory_format=torch.contiguous_format).flatten()
    return flat.view(dtype).view(rows.shape[0], rows.shape[1] // dtype.itemsize)


def _mix(*numbers: int) -> int:
    """A seed of 63 bits that differs wherever one of the numbers does."""
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") >> 1


def _orthonormalise(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns with the span of `matrix`; a column that adds nothing to those before it becomes zero.

    Gram-Schmidt rather than QR, whose column for such a direction is rounding noise that other hardware computes
    differently.
    """
    # Squares of the elements must neither overflow nor vanish. Zeros and overflows turn into NaN, which is not `alive`.
    columns = matrix.T / matrix.abs().amax(0).unsqueeze(1)
    noise = 64 * torch.finfo(matrix.dtype).eps * torch.linalg.vector_norm(columns, dim=1)
    basis = torch.zeros_like(columns)
    for index, column in enumerate(columns):
        rest, done = column, basis[:index]
        # A second projection removes what rounding left of the first.
        for _ in range(2 if index else 0):
            rest = rest - (done @ rest) @ done
        length = torch.linalg.vector_norm(rest)
        alive = length > noise[index]
        basis[index] = torch.where(alive, rest / length, 0.0)
    return basis.T
