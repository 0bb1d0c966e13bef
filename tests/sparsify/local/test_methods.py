"""The published methods of local steps against programs of their own, without this library.

And what another program publishes of one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.local.strategy import HeavyBall, LocalSteps, Nesterov, PlainStep
from sparsify.method import Dense
from sparsify.methods.noloco import PairwiseAverage, draw_pair_routes
from sparsify.methods.qgz import QuantisedAllReduce
from sparsify.types import ANCHORS_AGREE, BucketContext, BucketStep
from tests.conftest import there
from tests.sparsify.local.rounds import EVERY, INNER, SIZE, Worker, flat, live, model_of

ROUNDS, SIDE = 6, 4
SHAPE = (8, 12)  # six chunks of 4 x 4


def drift(rank: int, turn: int) -> Tensor:
    """Return anchor less parameters after the local steps of a round, whatever they are."""
    draws = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(SHAPE, generator=draws, dtype=torch.float64)


def begin_at_zero(model: nn.Linear, strategy: LocalSteps, comm: Comm, **options: Any) -> Worker:
    """Wrap a model of one fragment, with zeros for parameters and anchor."""
    nn.init.zeros_(model.weight)
    return Worker(strategy, comm, INNER.sgd, model, **options)


def anchors(strategy: LocalSteps, size: int = SIZE, **options: Any) -> list[Tensor]:
    """Return the anchor of each worker at the end of the rounds, in which only first steps move anything."""

    def body(comm: Comm) -> Tensor:
        model = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.float64)
        worker = begin_at_zero(model, strategy, comm, **options)
        for turn in range(ROUNDS):
            for step in range(EVERY):
                model.weight.grad = drift(comm.rank, turn) / 0.05 * (step == 0)
                worker.optimizer.step()
        return worker.anchor().view(SHAPE)

    return virtual.run(size, body)


def chunks(matrix: Any) -> Any:
    """Return the chunks (6, 4, 4) of a matrix as rows, a copy; `whole` is the way back."""
    rows, columns = SHAPE
    return matrix.reshape(rows // SIDE, SIDE, columns // SIDE, SIDE).swapaxes(1, 2).reshape(-1, SIDE * SIDE)


def whole(parts: Any) -> Any:
    rows, columns = SHAPE
    return parts.reshape(rows // SIDE, columns // SIDE, SIDE, SIDE).swapaxes(1, 2).reshape(rows, columns)


def sparseloco_in_numpy(k: int, lr: float, decay: float, senders: bool, clip: bool, momentum: float) -> Any:
    """Return the last anchor of algorithm 1, with the changes that public codes make to it."""
    theta = np.zeros(SHAPE)
    velocity = np.zeros(SHAPE)
    residuals = [np.zeros(SHAPE) for _ in range(SIZE)]
    for turn in range(ROUNDS):
        sent = []
        for rank in range(SIZE):
            acc = decay * residuals[rank] + drift(rank, turn).numpy()
            rows = chunks(acc)
            kept = np.zeros((6, SIDE * SIDE))
            best = np.argsort(-np.abs(rows), axis=1)[:, :k]
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


@pytest.mark.parametrize(
    ("k", "senders", "clip", "decay", "momentum"),
    [
        (2, False, False, 0.95, 0.0), (2, True, True, 0.95, 0.0), (2, True, False, 1.0, 0.0),
        (2, False, True, 1.0, 0.0), (2, True, True, 0.9, 0.5), (16, False, False, 1.0, 0.0),  # and all of it
    ],
)  # fmt: skip
def test_sparseloco_is_algorithm_1_whatever_is_switched_on(
    k: int, senders: bool, clip: bool, decay: float, momentum: float
) -> None:
    strategy = sparsify.sparseloco(
        every=EVERY, density=k / SIDE**2, decay=decay, lr=0.8, code="as_is", clip=clip, momentum=momentum,
        average="senders" if senders else "workers", side=SIDE,
    )  # fmt: skip
    first, *others = anchors(strategy)
    assert all(torch.equal(first, other) for other in others)
    expected = sparseloco_in_numpy(k, 0.8, decay, senders, clip, momentum)
    # Norms travel as fp32.
    np.testing.assert_allclose(first.numpy(), expected, rtol=0, atol=1e-6 if clip else 1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_noloco_is_its_formula_and_its_anchors_differ_as_it_says(size: int) -> None:
    """Worker by worker."""
    strategy = sparsify.noloco(every=EVERY, lr=0.6, momentum=0.5)
    assert ANCHORS_AGREE in strategy.broken_laws()
    found = anchors(strategy, size, seed=3)
    phi = [torch.zeros(SHAPE, dtype=torch.float64)] * size
    momentum = list(phi)
    draws = strategy.method.init(torch.empty(phi[0].numel()), BucketContext(3, 0, 0))
    for turn in range(ROUNDS):
        routes = dict(draw_pair_routes(size, draws.next_key()))
        pulled = []
        for rank in range(size):
            both = [rank, routes.get(rank, rank)]
            moved = torch.stack([drift(each, turn) for each in both]).mean(0)
            mean = torch.stack([phi[each] for each in both]).mean(0)
            momentum[rank] = 0.5 * momentum[rank] - 0.6 * moved + 0.6 * (mean - phi[rank])
            pulled.append(phi[rank] + momentum[rank])
        phi = pulled
    torch.testing.assert_close(found, phi, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[0], found[1]) == (size == 2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_noloco_counts_two_models_a_round_and_an_odd_worker_out_sends_none_of_them(size: int) -> None:
    """All are charged what a worker with a partner sends, as for every collective; nobody alone counts."""
    strategy = sparsify.noloco(every=EVERY)
    histories = live(strategy, size, ROUNDS * EVERY, check=False)
    n = flat(model_of()).numel()
    nbytes = n * torch.float64.itemsize * (size > 1)
    for history in histories:
        assert history.worker.optimizer.num_elements == n
        assert history.sent == history.counted == [*[0] * (EVERY - 1), 2 * nbytes] * ROUNDS
    seen = BucketStep(((n,),), n, torch.float64, size, 0, [])
    assert strategy.method.predict_bytes(seen) == (nbytes, nbytes)
    draws = strategy.method.init(torch.empty(n), BucketContext(0, 0, 0))
    for _ in range(ROUNDS):
        route = draw_pair_routes(size, draws.next_key())
        assert len({source for source, _ in route}) == len(route) == size - size % 2


def test_a_chunk_of_4096_takes_112_bytes_and_a_tensor_its_scales() -> None:
    """64 places of 12 bits and 64 codes of 2 bits; four fp32 means of bins besides, for the whole tensor."""

    def body(comm: Comm) -> int:
        model = nn.Linear(256, 128, bias=False)  # eight chunks of 64 x 64
        worker = Worker(sparsify.sparseloco(every=1), comm, INNER.sgd, model)
        model.weight.grad = torch.randn(128, 256, generator=torch.Generator().manual_seed(comm.rank))
        worker.optimizer.step()
        return worker.report().wire_bytes

    assert virtual.run(2, body) == [8 * 112 + 16] * 2


def test_streaming_sends_four_bits_and_reads_the_nearest_power_of_two() -> None:
    strategy = sparsify.streaming_diloco(every=2, fragments=1, delay=0, mix=0.0)

    def body(comm: Comm) -> tuple[Tensor, int]:
        model = nn.Linear(8, 1, bias=False)
        optimizer = begin_at_zero(model, strategy, comm).optimizer
        optimizer.step()
        model.weight.grad = torch.tensor([[1.0, -0.7, 0.3, 0.2, 0.05, 0.009, 0.007, -0.0]]) / 0.05
        averages: list[Tensor] = []
        optimizer.fragments[0].on_average = lambda average: averages.extend(
            piece.clone() for piece in average
        )
        optimizer.step()
        return averages[0], there(optimizer.last_report).wire_bytes

    (average, nbytes), _ = virtual.run(2, body)
    assert average.tolist() == [1.0, -0.5, 0.25, 0.25, 0.0625, 0.015625, 0.0, 0.0]
    assert nbytes == 8 // 2 + 4


def test_published_defaults_are_those_of_the_papers() -> None:
    assert sparsify.diloco().outer == Nesterov(0.7, 0.9)
    assert sparsify.localsgd().averages_models
    assert sparsify.sparseloco().outer == PlainStep(1.0)
    assert sparsify.sparseloco(momentum=0.95).outer == HeavyBall(1.0, 0.95)
    assert isinstance(sparsify.muloco(bits=4).method, QuantisedAllReduce)
    assert sparsify.muloco() == sparsify.diloco(lr=0.9, momentum=0.8)
    assert isinstance(sparsify.noloco().method, PairwiseAverage)
    assert isinstance(sparsify.streaming_diloco(code="fp32").method, Dense)
    with pytest.raises(ValueError, match="nesterov=True with momentum=0 is a plain step"):
        sparsify.sparseloco(nesterov=True)
    with pytest.raises(ValueError, match="code=fp32 rounds nothing"):
        sparsify.streaming_diloco(code="fp32", feedback="gradient")


# What torchft publishes of streaming DiLoCo, number by number: facts from its test fixtures (BSD 3-Clause,
# test_fixtures/*DiLoCoMockedUpdateTest*.json). Two replicas, a model of two parameters, each a fragment; each
# gradient is 2, the inner step subtracts it, the outer step moves the anchor by twice the average drift, once
# in 6 steps.
# By delay and mix: of the fragment that a step of 3, 6, 9, 12, 15 exchanges, the replica and its anchor then.
# Where the last anchor is missing, theirs stopped before it wrote it. Their mix of 1 is left out: no replica
# would ever see the others, which `LocalSteps` refuses.
PUBLISHED = """
    delay  mix   replica                      anchor
    0      0.0   -11 -23 -35   -47 -59        -11 -23 -35 -47
    0      0.5   -8  -17 -24.5 -32 -40.25     -11 -23 -29 -35
    1      0.0   -7  -19 -27   -39 -47        -7  -19 -27 -39 -47
    1      0.5   -6  -15 -21.5 -29 -35.75     -7  -19 -25 -31 -38
"""


@pytest.mark.parametrize("row", PUBLISHED.splitlines()[2:])
def test_fragments_delay_and_mix_give_torchfts_published_numbers(row: str) -> None:
    """Torchft takes the drift `delay` steps before it is due, ours when it is due.

    Ours applies it later, as the paper does: the same but for the first round, so ours begins with as many
    steps that change nothing.
    """
    delay, mix, *published = map(float, row.split())
    first = 1 - int(delay)
    strategy = LocalSteps(6, Dense("layer"), PlainStep(2.0), fragments=2, delay=int(delay), mix=mix)

    def body(comm: Comm) -> list[float]:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for p in model.parameters():
            nn.init.ones_(p)
        worker = Worker(strategy, comm, lambda ps: torch.optim.SGD(ps, lr=1.0), model)
        own = list[float]()
        anchors = list[float]()
        for step in range(first, 16):
            for p in model.parameters():
                p.grad = torch.full_like(p, 2.0 if step > 0 else 0.0)
            worker.optimizer.step()
            if step in range(3, 16, 3):
                which = 1 if step % 2 else 0  # ours exchanges the first fragment at the end of a round
                own.append(float(worker.own()[which]))
                anchors.append(float(worker.anchor()[which]))
        return own + anchors

    for found in virtual.run(2, body):
        assert found[: len(published)] == published
