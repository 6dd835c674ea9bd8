"""A message's local gradient → what this rank sends; what arrived → the decoded sum over ranks.

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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class _Setting:
    """What every encoder is made from."""

    encoder: Encoder
    pieces: tuple[_Piece, ...]
    dtype: torch.dtype
    device: torch.device
    seed: int
    world: int
    rank: int


def make_encoder(
    encoder: Encoder,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    world: int,
    rank: int,
) -> "MessageEncoder | None":
    """The encoder of one message on one rank, or None where messages travel as they are.

    `seed` is the same on all ranks and differs between messages; `rank` is the place among the `world` participants.
    """
    if encoder.name == "none":
        return None
    if dtype not in _DTYPES:
        raise OffbeatError(f"encoder {encoder.name!r} takes floating-point gradients, not {dtype}")
    if not 0 <= rank < world:
        raise OffbeatError(f"encoder {encoder.name!r}: rank {rank} is not one of {world} ranks")
    stops = list(accumulate(math.prod(shape) for shape in shapes))
    pieces = tuple(map(_Piece, [0, *stops], stops, map(tuple, shapes)))
    setting = _Setting(encoder, pieces, dtype, torch.device(device), seed, world, rank)
    kinds: dict[str, type[MessageEncoder]] = {
        "fp16": _Cast,
        "bf16": _Cast,
        "topk": _TopK,
        "randomk": _RandomK,
        "sign": _Sign,
        "int8": _Int8,
        "powersgd": _PowerSGD,
    }
    return kinds[encoder.name](setting)


class MessageEncoder(ABC):
    """Encodes, exchanges and decodes one message, and carries its residual. One exchange at a time."""

    summed: bool
    """Payloads are summed on the way (all-reduce); otherwise each rank receives all of them (all-gather)."""
    residual: torch.Tensor | None
    """What error feedback adds to the next step's gradient: flat, in the message's dtype. None without feedback."""

    def __init__(self, setting: _Setting) -> None:
        self._setting = setting
        self._pieces = setting.pieces
        self._dtype = setting.dtype
        # Half-precision messages are worked on in float32.
        self._wide = torch.float64 if setting.dtype == torch.float64 else torch.float32
        self._elements = setting.pieces[-1].stop if setting.pieces else 0
        self.summed = not setting.encoder.gathered
        self.residual = None
        if setting.encoder.feedback:
            self.residual = torch.zeros(self._elements, dtype=setting.dtype, device=setting.device)

    @torch.no_grad()
    def exchange(self, buffer: torch.Tensor, step: int) -> Rounds:
        """Yields what to send, is sent back what arrived, and leaves the decoded sum over ranks in `buffer`.

        What arrives is the sum of the ranks' payloads if `summed`, else their stack (world, n) in rank order. A payload
        is contiguous and may be overwritten. PowerSGD with matrices takes two rounds. All others take one, and their
        residual is final with the payload: a rank that needs no sum may then drop the exchange.
        """
        assert buffer.shape == (self._elements,), f"{buffer.shape} is not a message of {self._elements} elements"
        assert buffer.dtype == self._dtype, f"{buffer.dtype} is not the message's {self._dtype}"
        yield from self._rounds(self._correct(buffer), buffer, step)

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on. Like torch's, it refers to live tensors: copy it to keep it."""
        return {"encoder": self._setting.encoder.name, "residual": self.residual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the encoder that gave `state` was."""
        name = self._setting.encoder.name
        if state.get("encoder") != name:
            raise OffbeatError(f"the state of encoder {state.get('encoder')!r} does not fit encoder {name!r}")
        residual = state.get("residual")
        if (residual is None) != (self.residual is None):
            given = "without" if residual is None else "with"
            raise OffbeatError(f"encoder {name!r}: a state {given} residual does not fit its error feedback")
        if residual is not None:
            self._load(self.residual, residual, "residual")

    def _load(self, into: torch.Tensor, value: torch.Tensor, field: str) -> None:
        if value.shape != into.shape:
            raise OffbeatError(
                f"encoder {self._setting.encoder.name!r}: the state's {field} has shape {list(value.shape)}, "
                f"the message needs {list(into.shape)}"
            )
        into.copy_(value)

    @abstractmethod
    def _rounds(self, corrected: torch.Tensor, buffer: torch.Tensor, step: int) -> Rounds: ...

    def _correct(self, buffer: torch.Tensor) -> torch.Tensor:
        """The gradient plus the residual, wide; the buffer or the residual itself where that needs no copy."""
        if self.residual is None:
            return buffer.to(self._wide)
        # A residual that is wide already is not copied: until `_carry` it holds the corrected gradient.
        return self.residual.to(self._wide).add_(buffer)

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
            self._accumulate(payload if self.summed else payload.unsqueeze(0), corrected, step, sign=-1)
            self._carry(corrected)
        arrived = yield payload
        expected = payload.shape if self.summed else (self._setting.world, *payload.shape)
        assert arrived.shape == expected, f"{tuple(arrived.shape)} arrived instead of {tuple(expected)}"
        self._decode(arrived, buffer, step)

    def _decode(self, arrived: torch.Tensor, buffer: torch.Tensor, step: int) -> None:
        if self._dtype == self._wide:
            self._accumulate(arrived, buffer.zero_(), step)
        else:
            total = torch.zeros_like(buffer, dtype=self._wide)
            self._accumulate(arrived, total, step)
            buffer.copy_(total)

    @abstractmethod
    def _encode(self, corrected: torch.Tensor, step: int) -> torch.Tensor:
        """The payload; leaves `corrected` as it is."""

    @abstractmethod
    def _accumulate(self, arrived: torch.Tensor, total: torch.Tensor, step: int, sign: int = 1) -> None:
        """Adds sign * the decoded sum of what arrived to `total`, rank after rank."""


class _Cast(_OneRound):
    """fp16 and bf16."""

    def _encode(self, corrected: torch.Tensor, step: int) -> torch.Tensor:
        return _narrow(corrected, _HALF[self._setting.encoder.name], self._setting.world)

    def _accumulate(self, arrived: torch.Tensor, total: torch.Tensor, step: int, sign: int = 1) -> None:
        total.add_(arrived, alpha=sign)

    def _decode(self, arrived: torch.Tensor, buffer: torch.Tensor, step: int) -> None:
        buffer.copy_(arrived)


class _TopK(_OneRound):
    """The elements of largest magnitude of each piece. Positions count from the start of the message."""

    def _encode(self, corrected: torch.Tensor, step: int) -> torch.Tensor:
        found = [corrected.new_empty(0, dtype=torch.int64)]
        for piece in self._pieces:
            count = kept(piece.elements, self._setting.encoder.ratio or 1.0)
            found.append(piece.of(corrected).abs().topk(count, sorted=False).indices + piece.start)
        positions = torch.cat(found)
        values = _narrow(corrected[positions], self._dtype)
        return torch.cat([positions.view(torch.uint8), values.view(torch.uint8)])

    def _accumulate(self, arrived: torch.Tensor, total: torch.Tensor, step: int, sign: int = 1) -> None:
        count = arrived.shape[1] // (INDEX_BYTES + self._dtype.itemsize)
        positions = _reinterpret(arrived[:, : count * INDEX_BYTES], torch.int64)
        values = _reinterpret(arrived[:, count * INDEX_BYTES :], self._dtype).to(self._wide)
        # One call per rank: within it no position repeats, so a GPU has no order of additions to choose.
        for index, value in zip(positions, values, strict=True):
            total.index_add_(0, index, value, alpha=sign)


class _RandomK(_OneRound):
    """The same random elements of each piece on all ranks."""

    def __init__(self, setting: _Setting) -> None:
        super().__init__(setting)
        ratio = setting.encoder.ratio or 1.0
        self._counts = [kept(piece.elements, ratio) for piece in self._pieces]
        self._drawn: tuple[int, torch.Tensor] | None = None
        self._factors = None
        if self.residual is None:
            factors = [piece.elements / max(count, 1) for piece, count in zip(self._pieces, self._counts, strict=True)]
            repeated = np.repeat(np.array(factors), np.array(self._counts, dtype=np.int64))
            self._factors = torch.from_numpy(repeated).to(setting.device, self._wide)

    def _positions(self, step: int) -> torch.Tensor:
        """Positions in the message, drawn on the CPU: what a GPU's generator gives depends on the GPU's model."""
        if self._drawn is None or self._drawn[0] != step:
            # numpy draws k of n in O(k), where torch has only a permutation of all n.
            generator = np.random.Generator(np.random.Philox(_mix(self._setting.seed, step)))
            found = [np.empty(0, dtype=np.int64)]
            for piece, count in zip(self._pieces, self._counts, strict=True):
                found.append(generator.choice(piece.elements, count, replace=False, shuffle=False) + piece.start)
            self._drawn = (step, torch.from_numpy(np.concatenate(found)).to(self._setting.device))
        return self._drawn[1]

    def _encode(self, corrected: torch.Tensor, step: int) -> torch.Tensor:
        # Not finite anywhere is not finite in what is sent: the positions may miss the element.
        poison = corrected.sum() * 0
        values = corrected[self._positions(step)].add_(poison)
        return _narrow(values, self._dtype, self._setting.world)

    def _accumulate(self, arrived: torch.Tensor, total: torch.Tensor, step: int, sign: int = 1) -> None:
        values = arrived.to(self._wide)
        if self._factors is not None:
            values = values * self._factors
        total.index_add_(0, self._positions(step), values, alpha=sign)


class _Scaled(_OneRound):
    """A float32 scale per piece, then the codes of all pieces; an element decodes to scale * code."""

    def __init__(self, setting: _Setting) -> None:
        super().__init__(setting)
        self._scale_bytes = SCALE_BYTES * len(self._pieces)
        self._starts: list[int] = [piece.start for piece in self._pieces]
        """Where each piece's codes begin in what `_codes` returns."""

    def _encode(self, corrected: torch.Tensor, step: int) -> torch.Tensor:
        scales = corrected.new_zeros(len(self._pieces))
        for index, piece in enumerate(self._pieces):
            if piece.elements:
                scales[index] = self._scale(piece.of(corrected))
        scales = scales.to(torch.float32)
        return torch.cat([scales.view(torch.uint8), self._quantise(corrected, scales, step).view(torch.uint8)])

    def _accumulate(self, arrived: torch.Tensor, total: torch.Tensor, step: int, sign: int = 1) -> None:
        scales = _reinterpret(arrived[:, : self._scale_bytes], torch.float32).to(self._wide)
        for scale, row in zip(scales, arrived[:, self._scale_bytes :], strict=True):
            codes = self._codes(row)
            for index, (piece, start) in enumerate(zip(self._pieces, self._starts, strict=True)):
                piece.of(total).addcmul_(codes[start : start + piece.elements], scale[index], value=sign)

    @abstractmethod
    def _scale(self, values: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _quantise(self, corrected: torch.Tensor, scales: torch.Tensor, step: int) -> torch.Tensor: ...

    @abstractmethod
    def _codes(self, row: torch.Tensor) -> torch.Tensor:
        """One rank's bytes as numbers of the wide dtype."""


class _Sign(_Scaled):
    """One bit per element, eight to a byte; each piece begins with a new byte. Zero counts as positive."""

    def __init__(self, setting: _Setting) -> None:
        super().__init__(setting)
        self._starts, self._padded = [], 0
        for piece in self._pieces:
            self._starts.append(self._padded)
            self._padded += -(-piece.elements // 8) * 8
        bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
        self._table = (2 * bits - 1).to(setting.device, self._wide)
        """The eight signs that each byte stands for."""

    def _scale(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs().mean()

    def _quantise(self, corrected: torch.Tensor, scales: torch.Tensor, step: int) -> torch.Tensor:
        flags = corrected.new_zeros(self._padded, dtype=torch.uint8)
        for piece, start in zip(self._pieces, self._starts, strict=True):
            flags[start : start + piece.elements] = piece.of(corrected) >= 0
        return ((flags.view(torch.int64) * _PACK >> 56) & 0xFF).to(torch.uint8)

    def _codes(self, row: torch.Tensor) -> torch.Tensor:
        return self._table.index_select(0, row.to(torch.int32)).flatten()


class _Int8(_Scaled):
    """Integers of -127 to 127, rounded up with the probability that makes them right on average."""

    def __init__(self, setting: _Setting) -> None:
        super().__init__(setting)
        self._generator = torch.Generator(setting.device)

    def _scale(self, values: torch.Tensor) -> torch.Tensor:
        low, high = values.aminmax()
        return torch.maximum(-low, high) / 127

    def _quantise(self, corrected: torch.Tensor, scales: torch.Tensor, step: int) -> torch.Tensor:
        divisors = torch.where(scales > 0, scales, 1.0)
        scaled = torch.empty_like(corrected)
        for index, piece in enumerate(self._pieces):
            torch.div(piece.of(corrected), divisors[index], out=piece.of(scaled))
        return scaled.add_(self._noise(step)).floor_().clamp_(-127, 127).to(torch.int8)

    def _noise(self, step: int) -> torch.Tensor:
        """Uniform in (0, 1) with 16 bits each; other noise on every rank, or the errors would add up."""
        self._generator.manual_seed(_mix(self._setting.seed, step, self._setting.rank))
        words = torch.empty(-(-self._elements // 4), dtype=torch.int64, device=self._setting.device)
        words.random_(-(2**63), None, generator=self._generator)
        return words.view(torch.int16)[: self._elements].to(torch.float32).add_(32768.5).div_(65536)

    def _codes(self, row: torch.Tensor) -> torch.Tensor:
        return row.view(torch.int8).to(self._wide)


@dataclass(frozen=True, slots=True)
class _Matrix:
    piece: _Piece
    height: int
    width: int
    rank: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return self.piece.of(flat).view(self.height, self.width)


class _PowerSGD(MessageEncoder):
    """Rank-r factors of each matrix piece; pieces whose factors would not be smaller travel whole, behind P."""

    def __init__(self, setting: _Setting) -> None:
        super().__init__(setting)
        shapes = [factor_shape(piece.shape, setting.encoder.rank or 1) for piece in self._pieces]
        candidates = [_Matrix(piece, *shape) for piece, shape in zip(self._pieces, shapes, strict=True)]
        self._matrices = [matrix for matrix in candidates if matrix.rank]
        self._whole = [matrix.piece for matrix in candidates if not matrix.rank]
        self._p_sizes = [matrix.height * matrix.rank for matrix in self._matrices]
        self._q_sizes = [matrix.width * matrix.rank for matrix in self._matrices]
        self._first = self._draw()
        self._factors = [factor.clone() for factor in self._first]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"factors": list(self._factors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        factors = state.get("factors", [])
        if len(factors) != len(self._factors):
            count = len(self._factors)
            raise OffbeatError(f"encoder 'powersgd': the state has {len(factors)} factors for {count} matrices")
        for index, (into, value) in enumerate(zip(self._factors, factors, strict=True)):
            self._load(into, value, f"factors[{index}]")

    def _draw(self) -> list[torch.Tensor]:
        """The first Q of each matrix, drawn on the CPU so that all kinds of device agree."""
        generator = torch.Generator().manual_seed(_mix(self._setting.seed))
        shapes = [(matrix.width, matrix.rank) for matrix in self._matrices]
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [factor.to(self._setting.device, self._wide) for factor in drawn]

    def _rounds(self, corrected: torch.Tensor, buffer: torch.Tensor, step: int) -> Rounds:
        arrived = yield self._project(corrected)
        split = arrived.to(self._wide).split(self._p_sizes + [piece.elements for piece in self._whole])
        for piece, values in zip(self._whole, split[len(self._matrices) :], strict=True):
            piece.of(buffer).copy_(values)
        if self._matrices:
            bases, payload = self._refine(corrected, split[: len(self._matrices)])
            arrived = yield payload
            self._approximate(arrived, bases, buffer)

    def _project(self, corrected: torch.Tensor) -> torch.Tensor:
        """Round one: P = M Q of every matrix, then the pieces that travel whole."""
        parts = [corrected.new_empty(0)]
        with self._full_precision():
            for matrix, factor, first in zip(self._matrices, self._factors, self._first, strict=True):
                usable = factor.isfinite().all(0) & factor.any(0)
                start = _orthonormalise(torch.where(usable, factor, first))
                parts.append((matrix.of(corrected) @ start).flatten())
        parts += [piece.of(corrected) for piece in self._whole]
        payload = _narrow(torch.cat(parts), self._dtype, self._setting.world)
        if self.residual is not None:
            sent = payload[sum(self._p_sizes) :].split([piece.elements for piece in self._whole])
            for piece, values in zip(self._whole, sent, strict=True):
                piece.of(corrected).sub_(values)
            if not self._matrices:
                self._carry(corrected)
        return payload

    def _refine(
        self, corrected: torch.Tensor, products: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Round two: the orthonormal P of every matrix, and Q = M^T P to send; what they miss is the residual."""
        bases, factors = [], []
        with self._full_precision():
            for matrix, product in zip(self._matrices, products, strict=True):
                values = matrix.of(corrected)
                basis = _orthonormalise(product.view(matrix.height, matrix.rank))
                factor = _narrow(values.T @ basis, self._dtype, self._setting.world)
                if self.residual is not None:
                    values.addmm_(basis, factor.to(self._wide).T, alpha=-1)
                bases.append(basis)
                factors.append(factor.flatten())
        if self.residual is not None:
            self._carry(corrected)
        return bases, torch.cat(factors)

    def _approximate(self, arrived: torch.Tensor, bases: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """P Q^T into the buffer; the next step starts from this Q."""
        split = arrived.to(self._wide).split(self._q_sizes)
        with self._full_precision():
            for matrix, basis, values, factor in zip(self._matrices, bases, split, self._factors, strict=True):
                factor.copy_(values.view_as(factor))
                matrix.of(buffer).copy_(basis @ factor.T)

    def _full_precision(self) -> torch.autocast:
        """Products keep the wide dtype even where the training step runs under autocast."""
        return torch.autocast(self._setting.device.type, enabled=False)


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
