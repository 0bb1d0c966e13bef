"""Top-k within chunks, and its exchange of places and codes."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsify.comm import Comm, virtual
from sparsify.exchange import AllGather
from sparsify.feedback import DecayedFeedback, ErrorFeedback, NoFeedback
from sparsify.method import Sparsifier
from sparsify.methods._chunked import ChunkGather, ChunkTopK
from sparsify.ranges import AverageOver, CodeName
from sparsify.select import TopK
from sparsify.types import DENSE_AT_DENSITY_1, NOTHING_IS_LOST, SparseVector
from tests.conftest import there
from tests.sparsify.laws import check_alike, check_excuses, check_laws, gradient, live
from tests.sparsify.methods.replays import CONTEXT

WIDE: list[tuple[int, ...]] = [(64, 128), (67,), (0, 3), (67, 65), (64,)]  # tiles, runs, nothing, runs, a run


def build(
    density: float = 0.05, feedback: Any = None, warmup: tuple[float, ...] = (), **choices: Any
) -> Sparsifier:
    select = ChunkTopK(choices.get("side", 64))
    exchange = ChunkGather(**choices)
    return Sparsifier(density, select, feedback or ErrorFeedback(), exchange, "global", warmup)


@pytest.mark.parametrize("code", get_args(CodeName))
def test_the_laws_hold_of_every_code(code: CodeName) -> None:
    """However coarse it is, what was seen was applied or is owed."""
    settings: list[tuple[int, float, torch.dtype, dict[str, Any]]] = [
        (1, 0.01, torch.float64, {}),
        (2, 1 / 64, torch.float64, {"side": 4}),
        (3, 0.3, torch.float64, {"clip": True}),
        (3, 0.05, torch.float32, {"clip": True, "average": "senders"}),
        (3, 0.05, torch.bfloat16, {"clip": True, "average": "senders"}),
    ]
    for size, density, dtype, choices in settings:
        method = build(density, code=code, **choices)
        lived = live(method, size, 3, shapes=WIDE, dtype=dtype)
        check_laws(method, lived, 1e-10)
        promises = map(there, lived[0].predicted_bytes)
        assert all(promise.least == promise.most for promise in promises), choices
        assert lived[0].host_syncs == [0] * 3, choices


@pytest.mark.parametrize(
    ("choices", "broken"),
    [
        ({"code": "as_is"}, set()),
        ({"code": "fp32"}, set()),
        ({"code": "bf16"}, {DENSE_AT_DENSITY_1}),
        ({"code": "fp32", "average": "senders"}, {NOTHING_IS_LOST}),
        ({"code": "fp32", "clip": True}, {NOTHING_IS_LOST, DENSE_AT_DENSITY_1}),
        ({"code": "fp32", "feedback": DecayedFeedback(0.9)}, {NOTHING_IS_LOST}),
        ({"code": "fp32", "feedback": DecayedFeedback(1.0)}, set()),
    ],
)
def test_laws_that_do_not_hold_are_named(choices: dict[str, Any], broken: set[str]) -> None:
    assert set(build(**choices).broken_laws()) == broken
    check_excuses(build(**choices), build(1.0, **choices))


@pytest.mark.parametrize(
    ("choices", "scales"),
    [
        ({"code": "statistical2"}, 16),
        ({"code": "symmetric2"}, 8),
        ({"code": "symmetric2", "clip": True}, 12),  # norms travel
    ],
)
def test_a_chunk_of_64_in_2_bits_takes_112_bytes(choices: dict[str, Any], scales: int) -> None:
    """That are 146.3 times fewer than in fp32. And each of two tensors takes its scales."""
    lived = live(build(1 / 64, **choices), 2, 1, shapes=[(256, 128), (128, 64)], dtype=torch.float32)
    assert lived[0].counted_bytes == [10 * 112 + 2 * scales]


@pytest.mark.parametrize("average", get_args(AverageOver))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_averages_over_senders_and_clipping_are_those_of_an_oracle(size: int, average: AverageOver) -> None:
    """The oracle is in numpy.

    Norms of each tensor are cut to the median's, the lower of two; then the mean over those that sent an
    element. Clipping does not change what is owed.
    """
    ends = np.cumsum([torch.Size(shape).numel() for shape in reversed(WIDE)])[:-1]
    residuals = []
    for clip in (False, True):
        method = build(0.2, code="as_is", average=average, clip=clip)
        lived = live(method, size, 1, lambda rank, *where: gradient(rank, *where) * 10**rank, WIDE)
        residuals.append(torch.cat([rank.residual for rank in lived]))
        sent = np.array([(rank.gradients[0] - rank.residual).numpy() for rank in lived])
        senders = (sent != 0).sum(0).clip(1) if average == "senders" else size
        for part in np.split(sent, ends, axis=1) if clip else []:
            norms = np.linalg.norm(part, axis=1)
            limit = np.sort(norms)[(size - 1) // 2]
            part *= np.minimum(1, limit / np.where(norms > 0, norms, 1))[:, None]
        tolerance = 1e-6 if clip else 1e-12  # norms travel as fp32
        expected = sent.sum(0) / senders
        np.testing.assert_allclose(lived[0].updates[0].numpy(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(*residuals)


def test_a_worker_that_is_not_finite_moves_no_ones_limit() -> None:
    def make(rank: int, step: int, shape: tuple[int, ...]) -> Tensor:
        values = gradient(rank, step, shape)
        return values.index_fill(0, torch.tensor([3]), torch.nan) if rank == 1 else values

    update = live(build(1 / 64, code="symmetric2", clip=True), 3, 1, make, [(64, 64)])[0].updates[0]
    assert update.isnan().sum() == 64  # all that this worker sent
    assert (update.nan_to_num() != 0).sum() > 64


def test_zeros_are_clipped_to_nothing() -> None:
    lived = live(build(code="as_is", clip=True), 3, 1, lambda *where: torch.zeros(where[2]).double())
    assert not lived[0].updates[0].any()


def test_the_average_over_senders_is_counted_anew_in_each_step() -> None:
    method = build(0.05, NoFeedback(), (0.3, 0.1, 0.2), code="as_is", average="senders")
    lived = live(method, 1, 4)[0]
    for update, grad, selected in zip(lived.updates, lived.gradients, lived.selected, strict=True):
        assert update.count_nonzero() == selected
        assert torch.equal(update, grad * (update != 0))


def test_parts_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"given TopK\(\); take ChunkTopK\(side=64\), or AllGather"):
        Sparsifier(0.1, TopK(), NoFeedback(), ChunkGather())
    with pytest.raises(ValueError, match=r"sides are at most 32, .* given ChunkTopK\(side=64\)"):
        Sparsifier(0.1, ChunkTopK(), NoFeedback(), ChunkGather(side=32))
    with pytest.raises(ValueError, match=r"no code 'fp8'"):
        ChunkGather(code="fp8")  # type: ignore[arg-type]  # a wrong word, as an unchecked script has it
    with pytest.raises(ValueError, match=r"side=128 is out of range"):
        ChunkTopK(side=128)

    def body(comm: Comm) -> None:
        exchange = ChunkGather()
        part = SparseVector(torch.arange(5), torch.ones(5))
        exchange.exchange(part, 64, 1, comm, exchange.init(torch.ones(64), CONTEXT))

    with pytest.raises(ValueError, match=r"5 elements were chosen, and chunks .* have 1 for k=1 of 64"):
        virtual.run(1, body)


def test_chunks_go_through_an_ordinary_exchange_and_decay_alike_together_and_alone() -> None:
    plain = Sparsifier(0.05, ChunkTopK(8), ErrorFeedback(), AllGather(), "global")
    decaying = Sparsifier(0.05, TopK(), DecayedFeedback(0.9), AllGather(), "layer")
    check_alike(live(plain, 2), live(build(code="as_is", side=8), 2))
    check_alike(live(decaying, 2), live(decaying, 2, together=False))


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5])
def test_the_residual_decays_before_the_gradient_is_added(decay: float) -> None:
    lived = live(build(0.1, DecayedFeedback(decay), code="symmetric2"), 1, 7)[0]
    residual = torch.zeros_like(lived.residual)
    for grad, update in zip(lived.gradients, lived.updates, strict=True):
        residual = decay * residual + grad - update
    torch.testing.assert_close(lived.residual, residual, rtol=0, atol=1e-12)
