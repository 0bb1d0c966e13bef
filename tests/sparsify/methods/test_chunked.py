"""Top-k within chunks, and its exchange of places and codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsify.comm import Comm, CountingComm, virtual
from sparsify.core.chunks import Tiles
from sparsify.core.timer import PhaseTimer
from sparsify.doors import states
from sparsify.exchange import AllGather, Exchange
from sparsify.feedback import DecayedFeedback, ErrorFeedback, NoFeedback
from sparsify.method import Sparsifier, Step, num_selected
from sparsify.methods._chunked import ChunkGather, ChunkTopK
from sparsify.ranges import AverageOver, Code
from sparsify.select import TopK
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    BucketContext,
    Delivery,
    SeenStep,
    Selection,
    Sparse,
)
from tests.sparsify.laws import SHAPES, gradient, live, mass

CODES = get_args(Code)
CONTEXT = BucketContext(0, 0, 0)
WIDE: list[tuple[int, ...]] = [(64, 128), (67,), (0, 3), (67, 65), (64,)]  # tiles, runs, nothing, runs, a run


def method(density: float = 0.05, **choices: Any) -> Sparsifier:
    feedback = choices.pop("feedback", ErrorFeedback())
    side = choices.get("side", 64)
    return Sparsifier(density, ChunkTopK(side), feedback, ChunkGather(**choices), "global")


def numel(shapes: list[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def exchanged(
    exchange: ChunkGather,
    accs: list[Tensor],
    shapes: list[tuple[int, ...]],
    density: float,
    dtype: torch.dtype = torch.float64,
) -> list[tuple[Tensor, Delivery, int]]:
    """Of each worker: the total (n,), its delivery, and the bytes that it sent."""

    def body(own: Comm) -> tuple[Tensor, Delivery, int]:
        comm = CountingComm(own)
        acc = accs[comm.rank].to(dtype)
        context = BucketContext(0, comm.rank, 0, tuple(shapes))
        selector = ChunkTopK(exchange.side)
        k = num_selected(acc.numel(), density)
        part = selector.select(acc, k, comm, selector.init(acc, context)).of(acc)
        delivery = exchange.exchange(part, acc.numel(), k, comm, exchange.init(acc, context))
        total = torch.zeros_like(acc)
        for one in delivery.total:
            one.add_to(total)
        return total, delivery, comm.sent_bytes

    return virtual.run(len(accs), body)


def numbers(size: int, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [torch.cat([gradient(rank, 7, shape).view(-1) for shape in shapes]) for rank in range(size)]


def dense(part: Any, n: int) -> Tensor:
    """(n,), zero where the part has nothing."""
    full = torch.zeros(n, dtype=part.values.dtype)
    part.add_to(full)
    return full


@pytest.mark.parametrize("side", [4, 64])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_laws_of_every_step(code: Code, size: int, side: int) -> None:
    """Workers agree to the bit; bytes counted are bytes promised; what was seen was applied or is owed, to
    rounding in float64, however coarse the code.
    """
    own = method(code=code, side=side)
    lived = live(own, size, steps=6)
    for rank in lived:
        assert all(torch.equal(a, b) for a, b in zip(rank.updates, lived[0].updates, strict=True))
        assert rank.wire_bytes == rank.counted_bytes
        assert [(nbytes, nbytes) for nbytes in rank.counted_bytes] == rank.promised_bytes
        assert rank.host_syncs == [0] * 6
    torch.testing.assert_close(*mass(lived), rtol=1e-10, atol=1e-10)
    assert NOTHING_IS_LOST not in own.broken_laws()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("code", CODES)
def test_workers_agree_in_other_types_too(code: Code, dtype: torch.dtype) -> None:
    lived = live(method(code=code, average="senders", clip=True), 3, dtype=dtype)
    for rank in lived:
        assert all(torch.equal(a, b) for a, b in zip(rank.updates, lived[0].updates, strict=True))
        assert [(nbytes, nbytes) for nbytes in rank.counted_bytes] == rank.promised_bytes
    assert torch.stack(lived[0].updates).isfinite().all()


@pytest.mark.parametrize("average", get_args(AverageOver))
def test_at_density_1_it_is_the_average(average: AverageOver) -> None:
    lived = live(method(1.0, code="as_is", average=average), 3, steps=1)
    mean = torch.stack([rank.gradients[0] for rank in lived]).mean(dim=0)
    torch.testing.assert_close(lived[0].updates[0], mean, rtol=0, atol=1e-12)


def test_laws_that_do_not_hold_are_named() -> None:
    expected: dict[tuple[Any, ...], set[str]] = {
        (("code", "fp32"),): set(),
        (("code", "bf16"),): {DENSE_AT_DENSITY_1},
        (("code", "fp32"), ("average", "senders")): {NOTHING_IS_LOST},
        (("code", "fp32"), ("clip", True)): {NOTHING_IS_LOST, DENSE_AT_DENSITY_1},
        (("code", "fp32"), ("feedback", DecayedFeedback(0.9))): {NOTHING_IS_LOST},
        (("code", "fp32"), ("feedback", DecayedFeedback(1.0))): set(),
    }
    for choice, broken in expected.items():
        own, at_1 = method(**dict(choice)), method(1.0, **dict(choice))
        assert set(own.broken_laws()) == broken, choice
        seen, accounted = mass(live(own, 4, steps=6))
        assert torch.allclose(accounted, seen, rtol=1e-6, atol=1e-6) is (NOTHING_IS_LOST not in broken), (
            choice
        )
        first = live(at_1, 4, steps=1)
        mean = torch.stack([rank.gradients[0] for rank in first]).mean(dim=0)
        distance = (first[0].updates[0] - mean).abs().max()
        assert (distance < 1e-6) == (DENSE_AT_DENSITY_1 not in broken), choice


def test_what_was_rounded_off_is_owed() -> None:
    lived = live(method(1.0, code="symmetric2"), 1, steps=1)[0]
    assert lived.residual.norm() > 0
    torch.testing.assert_close(lived.updates[0] + lived.residual, lived.gradients[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("code", CODES)
def test_what_is_delivered_is_what_all_workers_read(code: Code) -> None:
    n = numel(WIDE)
    for _, delivery, _ in exchanged(ChunkGather(code), numbers(3, WIDE), WIDE, 1 / 64):
        (own,) = delivery.delivered
        assert isinstance(own, Sparse)
        copies = [one for one in delivery.total if torch.equal(dense(one, n), dense(own, n))]
        assert len(copies) == 1


def test_a_chunk_of_64_in_2_bits_takes_112_bytes() -> None:
    """And its tensor 16 for the published code, 8 for the symmetric one, and 4 more where norms travel."""
    shapes: list[tuple[int, ...]] = [(256, 128), (128, 64)]
    for choices, scales in (
        ({"code": "statistical2"}, 16),
        ({"code": "symmetric2"}, 8),
        ({"code": "symmetric2", "clip": True}, 12),
    ):
        exchange = ChunkGather(**choices)
        seen = SeenStep(tuple(shapes), num_selected(10 * 4096, 1 / 64), torch.float32, 2, 0, [640, 640])
        promised = exchange.promised(seen)
        assert promised == (10 * 112 + 2 * scales,) * 2
        assert 10 * 112 == 10 * 4096 * 4 / (16384 / 112)  # 146.3 times fewer than fp32
        for _, _, sent in exchanged(exchange, numbers(2, shapes), shapes, 1 / 64, torch.float32):
            assert sent == promised.most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_bytes_counted_are_bytes_promised(code: Code, clip: bool, dtype: torch.dtype) -> None:
    for size, density in ((1, 0.01), (2, 1 / 64), (3, 0.3)):
        exchange, n = ChunkGather(code, clip=clip), numel(WIDE)
        k = num_selected(n, density)
        sent = [Tiles(WIDE).quota(k).total] * size
        promised = exchange.promised(SeenStep(tuple(WIDE), k, dtype, size, 0, sent))
        counted = [nbytes for _, _, nbytes in exchanged(exchange, numbers(size, WIDE), WIDE, density, dtype)]
        assert counted == [promised.least] * size == [promised.most] * size


def chosen(accs: list[Tensor], shapes: list[tuple[int, ...]], density: float) -> list[dict[int, float]]:
    """What each worker sends, by index."""
    found = list[dict[int, float]]()
    for acc in accs:
        tiles = Tiles(shapes)
        part = tiles.largest(acc, num_selected(acc.numel(), density))
        found.append(dict(zip(part.indices.tolist(), part.values.tolist(), strict=True)))
    return found


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_averages_over_senders_and_clipping_are_those_of_an_oracle(size: int, clip: bool) -> None:
    """numpy, element by element: norms of each tensor are cut to the median's, the lower of two; then the
    mean over those that sent an element, times P, since the method divides by P.
    """
    density, n = 0.2, numel(WIDE)
    accs = [acc * (1 + rank) for rank, acc in enumerate(numbers(size, WIDE))]
    sent = chosen(accs, WIDE, density)
    ends = np.cumsum([torch.Size(shape).numel() for shape in WIDE])
    tensor_of = np.searchsorted(ends, np.arange(n), side="right")
    factors = np.ones((size, len(WIDE)))
    if clip:
        squares = np.zeros((size, len(WIDE)))
        for rank, part in enumerate(sent):
            for index, value in part.items():
                squares[rank, tensor_of[index]] += value**2
        norms = np.sqrt(squares)
        median = np.sort(norms, axis=0)[(size - 1) // 2]
        factors = np.minimum(1, median / np.where(norms > 0, norms, 1))
        factors[norms == 0] = 1
    for average in get_args(AverageOver):
        expected = np.zeros(n)
        for index in range(n):
            terms = [p[index] * factors[r, tensor_of[index]] for r, p in enumerate(sent) if index in p]
            if terms:
                expected[index] = sum(terms) * (size / len(terms) if average == "senders" else 1)
        found = exchanged(ChunkGather("as_is", average, clip), accs, WIDE, density)
        tolerance = 1e-6 if clip else 1e-12  # norms travel as fp32
        for total, _, _ in found:
            np.testing.assert_allclose(total.numpy(), expected, rtol=tolerance, atol=tolerance)
            assert torch.equal(total, found[0][0])


def test_clipping_does_not_change_what_is_owed() -> None:
    accs = [acc * 10**rank for rank, acc in enumerate(numbers(3, WIDE))]
    plain, clipped = (exchanged(ChunkGather("as_is", clip=clip), accs, WIDE, 0.1) for clip in (False, True))
    for (_, one, _), (_, other, _) in zip(plain, clipped, strict=True):
        assert torch.equal(dense(one.delivered[0], numel(WIDE)), dense(other.delivered[0], numel(WIDE)))


def test_a_worker_that_is_not_finite_moves_no_ones_limit() -> None:
    shapes: list[tuple[int, ...]] = [(64, 64)]
    accs = numbers(3, shapes)
    accs[1] = accs[1].clone()
    accs[1][5] = torch.nan
    found = exchanged(ChunkGather("symmetric2", clip=True), accs, shapes, 1 / 64)
    for _, delivery, _ in found:
        first, second, third = (part.values for part in delivery.total)
        assert second.isnan().all()
        assert first.isfinite().all()
        assert third.isfinite().all()


def test_zeros_are_clipped_to_nothing() -> None:
    found = exchanged(ChunkGather("as_is", clip=True), 3 * [torch.zeros(numel(WIDE))], WIDE, 0.1)
    assert not found[0][0].any()


def test_the_average_over_senders_is_counted_anew_in_each_step() -> None:
    exchange, acc = ChunkGather("as_is", "senders"), torch.arange(64.0)
    state = exchange.init(acc, CONTEXT._replace(shapes=((64,),)))
    tiles = Tiles([(64,)])

    def body(comm: Comm) -> list[Delivery]:
        return [exchange.exchange(tiles.largest(acc, k), 64, k, comm, state) for k in (3, 7, 3)]

    deliveries = virtual.run(1, body)[0]
    assert [dense(one.total[0], 64).count_nonzero().item() for one in deliveries] == [3, 7, 3]
    assert state.senders is not None
    assert not state.senders.any()
    for one in deliveries:
        assert torch.equal(dense(one.total[0], 64), dense(one.delivered[0], 64))


def test_parts_that_do_not_fit_together_are_refused() -> None:
    def built(select: Any, exchange: Exchange) -> Callable[[], Sparsifier]:
        return lambda: Sparsifier(0.1, select, NoFeedback(), exchange)

    with pytest.raises(ValueError, match=r"given TopK\(\); take ChunkTopK\(side=64\), or AllGather"):
        built(TopK(), ChunkGather())()
    with pytest.raises(ValueError, match=r"sides are at most 32, .* given ChunkTopK\(side=64\)"):
        built(ChunkTopK(), ChunkGather(side=32))()
    with pytest.raises(ValueError, match=r"no code 'fp8'"):
        ChunkGather(code="fp8")  # type: ignore[arg-type]  # a wrong word, as an unchecked script has it
    with pytest.raises(ValueError, match=r"side=128 is out of range"):
        ChunkTopK(side=128)
    built(ChunkTopK(), AllGather())()

    def body(comm: Comm) -> None:
        exchange = ChunkGather()
        part = Sparse(torch.arange(5), torch.ones(5))
        exchange.exchange(part, 64, 1, comm, exchange.init(torch.ones(64), CONTEXT))

    with pytest.raises(ValueError, match=r"5 elements were chosen, and chunks .* have 1 for k=1 of 64"):
        virtual.run(1, body)


def test_it_also_goes_through_an_ordinary_exchange() -> None:
    own = Sparsifier(0.05, ChunkTopK(8), ErrorFeedback(), AllGather(), "global")
    lived, coded = live(own, 2), live(method(code="as_is", side=8), 2)
    for ours, theirs in zip(lived, coded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.updates, theirs.updates, strict=True))
        assert torch.equal(ours.residual, theirs.residual)


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5])
def test_what_decays_is_all_that_is_lost(decay: float) -> None:
    """What was sent is what was seen, less e(T), less (1 - decay) times the sum of e(t) over t < T."""
    own, shapes, steps = method(0.1, code="symmetric2", feedback=DecayedFeedback(decay)), SHAPES, 7

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        n = numel(shapes)
        context = BucketContext(0, comm.rank, 0, tuple(shapes))
        state = own.init(torch.zeros(n, dtype=torch.float64), context)
        seen, sent, decayed = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
        for step in range(steps):
            grad = torch.cat([gradient(comm.rank, step, shape).view(-1) for shape in shapes])
            seen += grad
            held = own.residual(state)
            assert held is not None
            decayed += (1 - decay) * held  # e(t), before this step
            own.aggregate(grad, Step(0.1), state, comm, PhaseTimer("serialised"))
            sent += grad * comm.size
        held = own.residual(state)
        assert held is not None
        return seen - held - decayed, sent

    found = virtual.run(2, body)
    accounted = sum(one for one, _ in found)
    torch.testing.assert_close(found[0][1], accounted, rtol=0, atol=1e-12)


def test_decay_weakens_the_residual_before_the_gradient_is_added() -> None:
    feedback, grad = DecayedFeedback(0.5), torch.tensor([1.0, 2.0])
    residual = feedback.init(grad)
    assert feedback.accumulate(grad, 1.0, residual).tolist() == [1.0, 2.0]
    feedback.retain(Delivery([], [Sparse(torch.tensor([1]), torch.tensor([1.5]))]), residual)
    assert feedback.accumulate(grad, 1.0, residual).tolist() == [1.5, 2.25]
    assert grad.tolist() == [1.0, 2.0]


def test_decay_of_several_buckets_together_is_that_of_each() -> None:
    own = Sparsifier(0.05, TopK(), DecayedFeedback(0.9), AllGather(), "layer")
    alone, together = (live(own, 2, together=is_joined) for is_joined in (False, True))
    for ours, theirs in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.updates, theirs.updates, strict=True))
        assert torch.equal(ours.residual, theirs.residual)


def test_a_selection_has_distinct_indices_and_their_values() -> None:
    acc = numbers(1, WIDE)[0]
    selector = ChunkTopK()
    state = selector.init(acc, CONTEXT._replace(shapes=tuple(WIDE)))
    found = virtual.run(1, lambda comm: selector.select(acc, acc.numel() // 64, comm, state))[0]
    assert isinstance(found, Selection)
    assert found.values is not None
    assert len(set(found.indices.tolist())) == len(found.indices)
    assert torch.equal(found.values, acc[found.indices])


def test_a_run_goes_on_from_what_was_saved() -> None:
    """The residual is all there is to save: chunks follow from the shapes."""
    n = numel(WIDE)
    own = method(1 / 64, average="senders", feedback=DecayedFeedback(0.9))

    def body(comm: Comm) -> None:
        context = BucketContext(0, comm.rank, 0, tuple(WIDE))
        first, second = (own.init(torch.zeros(n), context) for _ in range(2))
        for step in range(4):
            if step == 2:
                states.restore(second, states.dump(first))
            grads = [numbers(1, WIDE)[0].float() * (1 + step + comm.rank) for _ in range(2)]
            own.aggregate(grads[0], Step(1 / 64), first, comm, PhaseTimer("serialised"))
            if step >= 2:
                own.aggregate(grads[1], Step(1 / 64), second, comm, PhaseTimer("serialised"))
                assert torch.equal(*grads)

    virtual.run(2, body)
