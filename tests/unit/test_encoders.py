"""Encoders: sizes on the wire, what is decoded, what error feedback keeps, and that training with them still works.

Ranks are simulated side by side in one process: their payloads are summed or stacked as a collective would.
"""

import math
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import pytest
import torch
from cases import mostly_slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat.errors import OffbeatError
from offbeat.plan.compress import encoded_bytes, factor_shape, kept
from offbeat.runtime.sync.encoders import MessageEncoder, make_encoder
from offbeat.strategy import Encoder

Shapes = Sequence[tuple[int, ...]]

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
MIXED: Shapes = ((12, 10), (7,), (3, 4, 5), (), (40,), (2, 2), (0, 3), (1, 9))
ELEMENTS = sum(map(math.prod, MIXED))


def encoder_of(name: str, feedback: bool | None = None) -> Encoder:
    options = {"topk": {"ratio": 0.2}, "randomk": {"ratio": 0.2}, "powersgd": {"rank": 2}}
    return Encoder(name=name, error_feedback=feedback, **options.get(name, {}))


ALL = [encoder_of(name) for name in ("fp16", "bf16", "topk", "randomk", "sign", "int8", "powersgd")]
WITH_FEEDBACK = [encoder_of(encoder.name, feedback=True) for encoder in ALL]
by_name = pytest.mark.parametrize("encoder", ALL, ids=lambda encoder: encoder.name)
by_name_with_feedback = pytest.mark.parametrize("encoder", WITH_FEEDBACK, ids=lambda encoder: encoder.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
on_each_device = pytest.mark.parametrize("device", DEVICES)


def make_ranks(
    encoder: Encoder, shapes: Shapes, world: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 5
) -> list[MessageEncoder]:
    made = [make_encoder(encoder, shapes, dtype, torch.device(device), seed, world, rank) for rank in range(world)]
    assert all(one is not None for one in made)
    return made  # type: ignore[return-value] # checked above


def drive(ranks: list[MessageEncoder], buffers: list[torch.Tensor], step: int) -> list[list[torch.Tensor]]:
    """Runs one exchange on all ranks; returns each round's payloads."""
    exchanges = [rank.exchange(buffer, step) for rank, buffer in zip(ranks, buffers, strict=True)]
    rounds = []
    payloads = [next(exchange) for exchange in exchanges]
    while payloads:
        assert all(payload.is_contiguous() and not payload.requires_grad for payload in payloads)
        rounds.append([payload.clone() for payload in payloads])
        total = reduce(torch.add, rounds[-1]) if ranks[0].summed else torch.stack(payloads)
        for payload in payloads:
            # A collective may overwrite what it sends.
            payload.fill_(payload.new_tensor(77))
        payloads = []
        for exchange in exchanges:
            try:
                payloads.append(exchange.send(total.clone()))
            except StopIteration:
                continue
        assert len(payloads) in (0, len(ranks))
    return rounds


def gradients(shapes: Shapes, world: int, seed: int, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    elements = sum(map(math.prod, shapes))
    drawn = [torch.randn(elements, generator=generator, dtype=torch.float64) / world for _ in range(world)]
    return [gradient.to(device, dtype) for gradient in drawn]


def pieces_of(flat: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split(list(map(math.prod, shapes))), shapes, strict=True)]


def rounding(dtype: torch.dtype) -> float:
    return 16 * torch.finfo(dtype).eps


def own_part(encoder: Encoder, shapes: Shapes, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a gathered or 16-bit payload says, decoded by the definition."""
    flat = torch.zeros(sum(map(math.prod, shapes)), dtype=torch.float64)
    stops = [0]
    for shape in shapes:
        stops.append(stops[-1] + math.prod(shape))
    data = payload.cpu()
    match encoder.name:
        case "fp16" | "bf16":
            return data.double()
        case "topk":
            count = sum(kept(math.prod(shape), encoder.ratio) for shape in shapes)
            positions, values = data[: 8 * count].view(torch.int64), data[8 * count :].clone().view(dtype)
            assert len(set(positions.tolist())) == count
            for position, value in zip(positions.tolist(), values.tolist(), strict=True):
                flat[position] = value
        case "sign":
            scales = data[: 4 * len(shapes)].clone().view(torch.float32).tolist()
            bits, at = data[4 * len(shapes) :].tolist(), 0
            for scale, (start, stop) in zip(scales, pairwise(stops), strict=True):
                for offset in range(stop - start):
                    flat[start + offset] = scale if bits[at + offset // 8] >> (offset % 8) & 1 else -scale
                at += (stop - start + 7) // 8
            assert at == len(bits)
        case "int8":
            scales = data[: 4 * len(shapes)].clone().view(torch.float32).tolist()
            codes = data[4 * len(shapes) :].view(torch.int8).double()
            for scale, (start, stop) in zip(scales, pairwise(stops), strict=True):
                flat[start:stop] = codes[start:stop] * scale
        case other:
            raise AssertionError(other)
    return flat


shape_lists = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=5)


@by_name
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    shapes=shape_lists,
    world=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    feedback=st.booleans(),
    amount=st.floats(0.01, 1.0),
    rank=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_sizes_agreement_and_kept_gradient(
    encoder: Encoder,
    shapes: Shapes,
    world: int,
    dtype: torch.dtype,
    feedback: bool,
    amount: float,
    rank: int,
    seed: int,
) -> None:
    options = {"topk": {"ratio": amount}, "randomk": {"ratio": amount}, "powersgd": {"rank": rank}}
    encoder = Encoder(name=encoder.name, error_feedback=feedback, **options.get(encoder.name, {}))
    ranks = make_ranks(encoder, shapes, world, dtype, seed=seed)
    expected = sum(encoded_bytes(encoder, shape, dtype.itemsize) for shape in shapes)
    given_total = torch.zeros(sum(map(math.prod, shapes)), dtype=torch.float64)
    applied = torch.zeros_like(given_total)
    for step in range(3):
        buffers = gradients(shapes, world, seed + step, dtype)
        given_total += sum(buffer.double() for buffer in buffers)
        rounds = drive(ranks, buffers, step)
        for payloads in zip(*rounds, strict=True):
            assert sum(payload.nbytes for payload in payloads) == expected
        assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)
        assert buffers[0].isfinite().all()
        applied += buffers[0].double()
        assert all((one.residual is not None) == feedback for one in ranks)
        if feedback:
            waiting = sum(one.residual.double() for one in ranks)
            coarse = encoder.name if encoder.name in ("fp16", "bf16") else None
            unit = rounding({"fp16": torch.float16, "bf16": torch.bfloat16}[coarse] if coarse else dtype)
            # Sums on the wire are rounded to the payload's precision, which no residual sees.
            torch.testing.assert_close(applied + waiting, given_total, rtol=0, atol=10 * max(unit, rounding(dtype)))


@pytest.mark.parametrize(
    "encoder", [one for one in ALL if one.name not in ("randomk", "powersgd")], ids=lambda e: e.name
)
@by_dtype
@on_each_device
def test_decoded_sum_is_the_sum_of_what_each_rank_sent(encoder: Encoder, dtype: torch.dtype, device: str) -> None:
    ranks = make_ranks(encoder, MIXED, 3, dtype, device)
    for step in range(2):
        buffers = gradients(MIXED, 3, 40 + step, dtype, device)
        (payloads,) = drive(ranks, buffers, step)
        total = sum(own_part(encoder, MIXED, payload, dtype) for payload in payloads)
        unit = rounding(payloads[0].dtype if encoder.name in ("fp16", "bf16") else dtype)
        torch.testing.assert_close(buffers[0].cpu().double(), total, rtol=unit, atol=unit)


@by_name_with_feedback
@by_dtype
@on_each_device
def test_each_rank_keeps_what_it_did_not_send(encoder: Encoder, dtype: torch.dtype, device: str) -> None:
    """sent + residual = local + previous residual, on every rank and step; one rank, so the sum is what it sent."""
    (one,) = make_ranks(encoder, MIXED, 1, dtype, device)
    for step in range(30):
        (buffer,) = gradients(MIXED, 1, 100 + step, dtype, device)
        assert one.residual is not None
        before = buffer.double() + one.residual.double()
        drive([one], [buffer], step)
        after = buffer.double() + one.residual.double()
        assert one.residual.dtype == dtype
        torch.testing.assert_close(after, before, rtol=rounding(dtype), atol=rounding(dtype))


@by_name_with_feedback
def test_ranks_together_keep_everything_over_many_steps(encoder: Encoder) -> None:
    world = 4
    ranks = make_ranks(encoder, MIXED, world, torch.float64)
    given_total, applied = torch.zeros(ELEMENTS, dtype=torch.float64), torch.zeros(ELEMENTS, dtype=torch.float64)
    for step in range(100):
        buffers = gradients(MIXED, world, step, torch.float64)
        given_total += sum(buffers)
        drive(ranks, buffers, step)
        applied += buffers[0]
        if encoder.name in ("fp16", "bf16"):
            continue
        waiting = sum(one.residual for one in ranks)
        torch.testing.assert_close(applied + waiting, given_total, rtol=1e-12, atol=1e-11)
    # Bounded: a residual holds some steps' worth of gradient, not the sum of all.
    assert all(one.residual.norm() < 0.5 * 100 * buffers[0].norm() for one in ranks)


@by_name
def test_half_precision_is_what_travels(encoder: Encoder) -> None:
    (one,) = make_ranks(encoder, MIXED, 1)
    payload = next(one.exchange(gradients(MIXED, 1, 0, torch.float32)[0], 0))
    assert payload.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16, "randomk": torch.float32}.get(
        encoder.name, torch.float32 if encoder.name == "powersgd" else torch.uint8
    )


def test_none_needs_no_encoder() -> None:
    assert make_encoder(Encoder(), [(3,)], torch.float32, torch.device("cpu"), 0, 2, 0) is None


def test_fp16_saturates_where_the_sum_would_overflow() -> None:
    for world in (1, 2, 3, 64, 700):
        ranks = make_ranks(encoder_of("fp16", feedback=True), [(3,)], world)
        buffers = [torch.tensor([1e6, -3e38, 1.0 / world]) for _ in range(world)]
        drive(ranks, buffers, 0)
        assert buffers[0].isfinite().all()
        assert buffers[0][0] > 65504 * math.exp(-world * 2**-9)
        assert buffers[0][1] < -65504 * math.exp(-world * 2**-9)
        assert ranks[0].residual[0] == pytest.approx(1e6 - buffers[0][0].item() / world, rel=0.01)


@by_name_with_feedback
@by_dtype
@on_each_device
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_overflow_stays_visible_and_leaves_no_trace(
    encoder: Encoder, dtype: torch.dtype, device: str, bad: float
) -> None:
    """A loss scaler must see it on every rank and can then skip the step; later steps are clean."""
    shapes: Shapes = ((12, 10), (20,))
    ranks = make_ranks(encoder, shapes, 2, dtype, device)
    for step, place in enumerate((3, 130)):
        buffers = gradients(shapes, 2, step, dtype, device)
        buffers[1][place] = bad
        drive(ranks, buffers, step)
        assert all(not buffer.isfinite().all() for buffer in buffers)
        assert all(one.residual.isfinite().all() for one in ranks)
    buffers = gradients(shapes, 2, 9, dtype, device)
    total = sum(buffer.double() + one.residual.double() for buffer, one in zip(buffers, ranks, strict=True))
    drive(ranks, buffers, 9)
    assert buffers[0].isfinite().all()
    assert buffers[0].abs().sum() > 0
    kept_back = sum(one.residual.double() for one in ranks)
    unit = 1e-1 if encoder.name == "bf16" else 1e-2
    torch.testing.assert_close(buffers[0].double() + kept_back, total, rtol=unit, atol=max(unit, rounding(dtype)))


@by_name
@by_dtype
@on_each_device
def test_zeros_stay_zeros_and_do_not_stop_what_follows(encoder: Encoder, dtype: torch.dtype, device: str) -> None:
    ranks = make_ranks(encoder, MIXED, 2, dtype, device)
    for step in range(2):
        buffers = [torch.zeros(ELEMENTS, dtype=dtype, device=device) for _ in range(2)]
        drive(ranks, buffers, step)
        assert all(torch.equal(buffer, torch.zeros_like(buffer)) for buffer in buffers)
    sent = torch.zeros(ELEMENTS, dtype=dtype, device=device)
    for step in range(2, 40):
        buffers = [torch.ones(ELEMENTS, dtype=dtype, device=device) for _ in range(2)]
        drive(ranks, buffers, step)
        sent += buffers[0]
    assert (sent > 0).all()


@by_name
def test_message_without_elements(encoder: Encoder) -> None:
    for shapes in ([], [(0,)], [(0, 4), (3, 0)]):
        ranks = make_ranks(encoder, shapes, 2)
        buffers = [torch.empty(0), torch.empty(0)]
        (payloads,) = drive(ranks, buffers, 0)
        assert payloads[0].nbytes == sum(encoded_bytes(encoder, shape, 4) for shape in shapes)


@by_name
@by_dtype
def test_tiny_and_huge_gradients_decode_finite(encoder: Encoder, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    for size in (limits.smallest_normal, limits.smallest_normal / 4, min(limits.max, 1e30) / 64):
        ranks = make_ranks(encoder, MIXED, 2, dtype)
        buffers = [(gradient.double().clamp(-4, 4) * size).to(dtype) for gradient in gradients(MIXED, 2, 3, dtype)]
        drive(ranks, buffers, 0)
        assert buffers[0].isfinite().all()
        assert all(one.residual is None or one.residual.isfinite().all() for one in ranks)


@by_dtype
def test_topk_keeps_the_largest_of_each_piece(dtype: torch.dtype) -> None:
    shapes: Shapes = ((10,), (4, 5))
    (one,) = make_ranks(encoder_of("topk"), shapes, 1, dtype)
    values = torch.arange(30).to(dtype) * torch.tensor([1, -1]).repeat(15).to(dtype)
    buffer = values.clone()
    drive([one], [buffer], 0)
    kept_places = {8, 9, 26, 27, 28, 29}
    assert set(buffer.nonzero().flatten().tolist()) == kept_places
    assert all(buffer[place] == values[place] and one.residual[place] == 0 for place in kept_places)
    assert torch.equal(buffer + one.residual, values)


def test_topk_adds_up_positions_that_ranks_share() -> None:
    ranks = make_ranks(Encoder(name="topk", ratio=0.01), [(5,)], 3)
    buffers = [
        torch.tensor([0.0, 4.0, 1.0, 0, 0]),
        torch.tensor([0.0, 4.0, 0, 0, 2.0]),
        torch.tensor([9.0, 0, 0, 0, 0]),
    ]
    drive(ranks, buffers, 0)
    assert buffers[1].tolist() == [9.0, 8.0, 0, 0, 0]


def test_randomk_without_feedback_is_unbiased_and_with_feedback_unscaled() -> None:
    shapes: Shapes = ((30,), (5, 2))
    start = gradients(shapes, 1, 8, torch.float64)[0]
    plain, carrying = (make_ranks(encoder_of("randomk", on), shapes, 1, torch.float64)[0] for on in (False, True))
    mean, steps = torch.zeros_like(start), 4000
    for step in range(steps):
        buffer = start.clone()
        drive([plain], [buffer], step)
        found = buffer.nonzero().flatten()
        assert len(found) == 6 + 2
        torch.testing.assert_close(buffer[found], 5 * start[found])
        mean += buffer / steps
    # The mean of 5 * x with probability 1/5 has deviation 2 abs(x) / sqrt(steps).
    assert ((mean - start).abs() < 5 * 2 * start.abs() / math.sqrt(steps)).all()
    buffer = start.clone()
    drive([carrying], [buffer], 0)
    found = buffer.nonzero().flatten()
    assert torch.equal(buffer[found], start[found])


def test_randomk_draws_other_positions_each_step_and_seed() -> None:
    def places(seed: int, step: int) -> tuple[int, ...]:
        buffer = torch.ones(1000)
        drive(make_ranks(Encoder(name="randomk", ratio=0.01), [(1000,)], 1, seed=seed), [buffer], step)
        return tuple(buffer.nonzero().flatten().tolist())

    drawn = {places(seed, step) for seed in range(3) for step in range(10)}
    assert len(drawn) == 30
    assert all(len(one) == 10 for one in drawn)


def test_sign_sends_the_mean_magnitude() -> None:
    (one,) = make_ranks(encoder_of("sign"), [(4,), (9,)], 1)
    buffer = torch.tensor([1.0, -2.0, 3.0, -6.0] + [-0.5] * 9)
    drive([one], [buffer], 0)
    assert buffer.tolist() == [3.0, -3.0, 3.0, -3.0] + [-0.5] * 9
    assert one.residual.tolist() == [-2.0, 1.0, 0.0, -3.0] + [0.0] * 9


@on_each_device
def test_int8_rounding_is_unbiased_and_differs_between_ranks(device: str) -> None:
    start = gradients([(64,)], 1, 8, torch.float32, device)[0]
    ranks = make_ranks(encoder_of("int8", feedback=False), [(64,)], 4, device=device)
    scale, steps = start.abs().max() / 127, 1500
    errors = torch.zeros(steps, 64, device=device)
    for step in range(steps):
        buffers = [start.clone() for _ in ranks]
        (payloads,) = drive(ranks, buffers, step)
        errors[step] = buffers[0] - 4 * start
    assert not torch.equal(payloads[0], payloads[1])
    # One rounding has variance f (1 - f) scale^2 at most scale^2 / 4; four independent ones scale^2 in all.
    assert (errors.mean(0).abs() < 5 * scale / math.sqrt(steps)).all()
    assert (errors.var(0) < 1.2 * scale**2).all()
    assert (errors.abs() <= 4.001 * scale).all()


def test_int8_keeps_multiples_of_its_scale() -> None:
    (one,) = make_ranks(encoder_of("int8"), [(255,)], 1)
    values = torch.arange(-127, 128) / 8
    for step in range(20):
        buffer = values.clone()
        drive([one], [buffer], step)
        assert torch.equal(buffer, values)


@on_each_device
@pytest.mark.parametrize(("true_rank", "rank"), [(1, 1), (1, 3), (2, 2), (2, 4)])
def test_powersgd_is_exact_for_low_rank_sums(true_rank: int, rank: int, device: str) -> None:
    """The sum over ranks has the low rank; the ranks' own matrices need not."""
    generator = torch.Generator().manual_seed(true_rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes: Shapes = ((20, 5, 6), (11,), (14, 25))
    first, second = (draw(height, true_rank) @ draw(true_rank, width) for height, width in ((20, 30), (14, 25)))
    total = torch.cat([first.flatten(), draw(11), second.flatten()])
    noise = draw(total.numel())
    buffers = [(total * 0.25 + noise).to(device), (total * 0.75 - noise).to(device)]
    ranks = make_ranks(Encoder(name="powersgd", rank=rank), shapes, 2, torch.float64, device)
    drive(ranks, buffers, 0)
    torch.testing.assert_close(buffers[0].cpu(), total, rtol=1e-9, atol=1e-9)


def test_powersgd_finds_the_best_approximation_of_a_constant_gradient() -> None:
    """Warm-started power iteration: without feedback the error falls to that of the truncated SVD."""
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.linalg.qr(torch.randn(30, 12, generator=generator).double())[0] for _ in range(2))
    matrix = left @ torch.diag(0.5 ** torch.arange(12.0).double()) @ right.T
    best = math.sqrt(sum(0.25**index for index in range(3, 12)))
    (one,) = make_ranks(Encoder(name="powersgd", rank=3, error_feedback=False), [(30, 30)], 1, torch.float64)
    errors = []
    for step in range(15):
        buffer = matrix.flatten().clone()
        drive([one], [buffer], step)
        errors.append((buffer.view(30, 30) - matrix).norm().item())
    assert errors[0] > 1.05 * best
    assert errors[-1] == pytest.approx(best, rel=1e-4)


def test_powersgd_residuals_are_projections() -> None:
    ranks = make_ranks(Encoder(name="powersgd", rank=2), [(12, 10)], 3, torch.float64)
    buffers = gradients([(12, 10)], 3, 1, torch.float64)
    lengths = [buffer.norm() for buffer in buffers]
    drive(ranks, buffers, 0)
    assert torch.linalg.matrix_rank(buffers[0].view(12, 10)) == 2
    for one, length in zip(ranks, lengths, strict=True):
        assert one.residual.norm() <= length
        # The residual has nothing left in the span that was sent.
        left = torch.linalg.svd(buffers[0].view(12, 10))[0][:, :2]
        assert (left.T @ one.residual.view(12, 10)).norm() < 1e-12


def test_powersgd_sends_small_pieces_whole() -> None:
    shapes: Shapes = ((2, 2), (5,), (), (3, 2, 2))
    assert all(factor_shape(shape, 2)[2] == 0 for shape in shapes)
    ranks = make_ranks(Encoder(name="powersgd", rank=2), shapes, 2)
    buffers = gradients(shapes, 2, 1, torch.float32)
    total = sum(buffers)
    assert len(drive(ranks, buffers, 0)) == 1
    assert torch.equal(buffers[0], total)


@by_name_with_feedback
def test_autocast_and_grad_mode_change_nothing(encoder: Encoder) -> None:
    results = []
    for inside in (False, True):
        ranks = make_ranks(encoder, MIXED, 2)
        for step in range(3):
            buffers = [buffer.requires_grad_(inside) for buffer in gradients(MIXED, 2, step, torch.float32)]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside), torch.set_grad_enabled(inside):
                drive(ranks, buffers, step)
                assert torch.is_grad_enabled() == inside
        assert not ranks[0].residual.requires_grad
        results.append(buffers[0].detach())
    assert torch.equal(*results)


def test_suspended_exchange_does_not_switch_gradients_off() -> None:
    (one,) = make_ranks(encoder_of("powersgd"), [(6, 8)], 1)
    exchange = one.exchange(torch.ones(48), 0)
    payload = next(exchange)
    weight = torch.ones(3, requires_grad=True)
    assert (weight * 2).requires_grad
    exchange.send(payload)
    assert (weight * 2).requires_grad


@by_name_with_feedback
@by_dtype
@on_each_device
def test_reruns_repeat_exactly(encoder: Encoder, dtype: torch.dtype, device: str) -> None:
    runs = []
    for _ in range(2):
        ranks = make_ranks(encoder, MIXED, 3, dtype, device)
        seen = []
        for step in range(5):
            torch.rand(step + 1)
            buffers = gradients(MIXED, 3, step, dtype, device)
            drive(ranks, buffers, step)
            seen.append(buffers[0])
        runs.append(torch.cat(seen))
    assert torch.equal(*runs)


def test_unfitting_arguments_are_refused() -> None:
    with pytest.raises(OffbeatError, match=r"floating-point gradients, not torch\.int32"):
        make_encoder(encoder_of("sign"), [(4,)], torch.int32, torch.device("cpu"), 0, 1, 0)
    with pytest.raises(OffbeatError, match="rank 2 is not one of 2 ranks"):
        make_encoder(encoder_of("sign"), [(4,)], torch.float32, torch.device("cpu"), 0, 2, 2)


Shard = tuple[torch.Tensor, torch.Tensor]


def mean_loss(shards: Sequence[Shard], weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return sum(((inputs @ weight.T + bias - targets) ** 2).sum(1).mean() for inputs, targets in shards) / len(shards)


def train(shards: Sequence[Shard], encoder: Encoder) -> float:
    """The mean loss after gradient descent from zero, each rank with data of its own."""
    shapes: Shapes = ((12, 10), (12,))
    parameters = torch.zeros(132)
    ranks = make_ranks(encoder, shapes, len(shards)) if encoder.name != "none" else []
    for step in range(400):
        weight, bias = (part.requires_grad_() for part in pieces_of(parameters.clone(), shapes))
        losses = [mean_loss([shard], weight, bias) / len(shards) for shard in shards]
        found = [torch.autograd.grad(loss, (weight, bias)) for loss in losses]
        buffers = [torch.cat([gradient.flatten() for gradient in pair]) for pair in found]
        if ranks:
            drive(ranks, buffers, step)
            update = buffers[0]
        else:
            update = sum(buffers)
        parameters -= (0.04 if step < 250 else 0.01) * update
    return mean_loss(shards, *pieces_of(parameters, shapes)).item()


@pytest.fixture(scope="module")
def shards() -> list[Shard]:
    """Least squares on four ranks that disagree about the best weights, with noise that keeps the loss above zero."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    common = draw(12, 10)
    made = []
    for rank in range(4):
        inputs = draw(40, 10)
        made.append((inputs, inputs @ (common + 0.3 * draw(12, 10)).T + 0.3 * draw(40, 12) + 0.2 * rank))
    return made


@pytest.fixture(scope="module")
def plain_loss(shards: list[Shard]) -> float:
    loss = train(shards, Encoder())
    inputs, targets = (torch.cat(parts) for parts in zip(*shards, strict=True))
    extended = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    best = (extended @ torch.linalg.lstsq(extended, targets).solution - targets).pow(2).sum(1).mean().item()
    assert loss == pytest.approx(best, rel=1e-3)
    return loss


@pytest.mark.parametrize("name", mostly_slow([encoder.name for encoder in ALL], ["bf16", "topk", "powersgd"]))
def test_training_reaches_the_uncompressed_loss(name: str, shards: list[Shard], plain_loss: float) -> None:
    assert train(shards, encoder_of(name, feedback=True)) == pytest.approx(plain_loss, rel=0.02)


@pytest.mark.parametrize("name", mostly_slow(["sign", "topk"], ["sign"]))
def test_biased_encoders_need_feedback(name: str, shards: list[Shard], plain_loss: float) -> None:
    assert train(shards, encoder_of(name, feedback=False)) > 1.02 * plain_loss
