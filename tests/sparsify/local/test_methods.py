"""The published methods of local steps against programs of their own, without this library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.local.strategy import HeavyBall, Nesterov, Plain
from sparsify.method import Dense
from sparsify.methods.noloco import PairAverage
from sparsify.methods.qgz import QuantisedReduce
from tests.sparsify.local.test_local import INNER, Inner, anchor, flat, live, model_of, there, wrapped

SIZE, EVERY, ROUNDS, SIDE, K = 3, 4, 6, 4, 2
SHAPE = (8, 12)  # six chunks of 4 x 4


def moved(rank: int, turn: int) -> Tensor:
    """By how much the local steps of a round move a worker's parameters, whatever they are."""
    draws = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(SHAPE, generator=draws, dtype=torch.float64)


def anchors(strategy: Any) -> list[Tensor]:
    """The anchor at the end of the rounds, of each worker."""

    def body(comm: Comm) -> Tensor:
        model = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.float64)
        optimiser = wrapped(INNER.sgd, model, strategy, comm)
        with torch.no_grad():
            model.weight.zero_()
            optimiser.fragments[0].anchor[0].zero_()
        for turn in range(ROUNDS):
            for step in range(EVERY):
                model.weight.grad = -moved(comm.rank, turn) / 0.05 * (step == 0)
                optimiser.step()
        return anchor(optimiser, model)

    return virtual.run(SIZE, body)


def chunks(matrix: Any) -> Any:
    """A view (6, 4, 4) of its chunks, as a copy; and back by `whole`."""
    rows, columns = SHAPE
    return matrix.reshape(rows // SIDE, SIDE, columns // SIDE, SIDE).swapaxes(1, 2).reshape(-1, SIDE * SIDE)


def whole(parts: Any) -> Any:
    rows, columns = SHAPE
    return parts.reshape(rows // SIDE, columns // SIDE, SIDE, SIDE).swapaxes(1, 2).reshape(rows, columns)


def sparseloco_in_numpy(lr: float, decay: float, senders: bool, clip: bool, momentum: float) -> Any:
    """Algorithm 1, with the changes that public codes make to it."""
    theta, velocity = np.zeros(SHAPE), np.zeros(SHAPE)
    residuals = [np.zeros(SHAPE) for _ in range(SIZE)]
    for turn in range(ROUNDS):
        sent = []
        for rank in range(SIZE):
            acc = decay * residuals[rank] - moved(rank, turn).numpy()
            rows, kept = chunks(acc), np.zeros((6, SIDE * SIDE))
            best = np.argsort(-np.abs(rows), axis=1)[:, :K]
            np.put_along_axis(kept, best, np.take_along_axis(rows, best, 1), 1)
            sent.append(whole(kept))
            residuals[rank] = acc - sent[-1]
        if clip:
            norms = [float(np.float32(np.linalg.norm(part))) for part in sent]
            sent = [part * min(1.0, sorted(norms)[1] / norm) for part, norm in zip(sent, norms, strict=True)]
        count = sum((part != 0).astype(float) for part in sent).clip(1) if senders else SIZE
        velocity = momentum * velocity + sum(sent) / count
        theta = theta - lr * velocity
    return theta


@pytest.mark.parametrize("senders", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("decay", "momentum"), [(0.95, 0.0), (1.0, 0.0), (0.9, 0.5)])
def test_sparseloco_is_algorithm_1_whatever_is_switched_on(
    senders: bool, clip: bool, decay: float, momentum: float
) -> None:
    strategy = sparsify.sparseloco(
        every=EVERY, density=K / SIDE**2, decay=decay, lr=0.8, code="as_is", clip=clip, momentum=momentum,
        average="senders" if senders else "workers", side=SIDE,
    )  # fmt: skip
    first, *others = anchors(strategy)
    assert all(torch.equal(first, other) for other in others)
    expected = sparseloco_in_numpy(0.8, decay, senders, clip, momentum)
    # Norms travel as fp32.
    np.testing.assert_allclose(first.view(SHAPE).numpy(), expected, rtol=0, atol=1e-6 if clip else 1e-12)


def test_sparseloco_whole_without_decay_is_local_sgd() -> None:
    """Density 1, no decay, plain numbers: plain averaging of the drift."""
    strategy = sparsify.sparseloco(every=EVERY, density=1.0, decay=1.0, code="as_is")
    for ours, theirs in zip(
        live(strategy)[0].anchors, live(sparsify.localsgd(every=EVERY))[0].anchors, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inner", Inner._fields)
@pytest.mark.parametrize("name", ["sparseloco", "streaming_diloco", "muloco", "diloco", "localsgd"])
def test_published_methods_agree_with_every_inner_optimiser(name: str, inner: str) -> None:
    own: dict[str, Any] = {"fragments": 2} if name == "streaming_diloco" else {}
    strategy = sparsify.build(name, every=EVERY, **own)
    first, *others = live(strategy, inner=getattr(INNER, inner))
    for other in others:
        assert torch.equal(first.anchors[-1], other.anchors[-1])
    assert not torch.equal(first.anchors[-1], flat(model_of()))


def test_a_chunk_of_4096_takes_112_bytes_and_a_tensor_its_scales() -> None:
    """64 places of 12 bits and 64 codes of 2 bits; four fp32 means of bins besides, for the whole tensor."""

    def body(comm: Comm) -> int:
        model = nn.Linear(256, 128, bias=False)  # eight chunks of 64 x 64
        optimiser = wrapped(INNER.sgd, model, sparsify.sparseloco(every=1), comm)
        model.weight.grad = torch.randn(128, 256, generator=torch.Generator().manual_seed(comm.rank))
        optimiser.step()
        return int(there(optimiser).wire_bytes)

    assert virtual.run(2, body) == [8 * 112 + 16] * 2


def test_streaming_sends_four_bits_and_reads_the_nearest_power_of_two() -> None:
    strategy = sparsify.streaming_diloco(every=2, fragments=1, delay=0, mix=0.0)

    def body(comm: Comm) -> tuple[Tensor, int]:
        model = nn.Linear(8, 1, bias=False)
        optimiser = wrapped(INNER.sgd, model, strategy, comm)
        with torch.no_grad():
            model.weight.zero_()
            optimiser.fragments[0].anchor[0].zero_()
        optimiser.step()
        model.weight.grad = torch.tensor([[1.0, -0.7, 0.3, 0.2, 0.05, 0.009, 0.007, -0.0]]) / 0.05
        drifts: list[Tensor] = []
        optimiser.fragments[0].watch = lambda average: drifts.extend(piece.clone() for piece in average)
        optimiser.step()
        return drifts[0], there(optimiser).wire_bytes

    (drift, nbytes), _ = virtual.run(2, body)
    assert drift.tolist() == [1.0, -0.5, 0.25, 0.25, 0.0625, 0.015625, 0.0, 0.0]
    assert nbytes == 8 // 2 + 4


def test_published_defaults_are_those_of_the_papers() -> None:
    assert sparsify.diloco().outer == Nesterov(0.7, 0.9)
    assert sparsify.localsgd().averages_models
    assert sparsify.sparseloco().outer == Plain(1.0)
    assert sparsify.sparseloco(momentum=0.95).outer == HeavyBall(1.0, 0.95)
    assert isinstance(sparsify.muloco(bits=4).method, QuantisedReduce)
    assert sparsify.muloco() == sparsify.diloco(lr=0.9, momentum=0.8)
    assert isinstance(sparsify.noloco().method, PairAverage)
    assert isinstance(sparsify.streaming_diloco(code="fp32").method, Dense)
    with pytest.raises(ValueError, match="nesterov=True with momentum=0 is a plain step"):
        sparsify.sparseloco(nesterov=True)
    with pytest.raises(ValueError, match="code=fp32 rounds nothing"):
        sparsify.streaming_diloco(code="fp32", feedback="gradient")
