"""What holds for every method of the registry, without its being named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import sparsify
from sparsify.aggregate import Aggregator, num_selected
from sparsify.comm import Metered, virtual
from sparsify.timer import PhaseTimer

METHODS = sparsify.names()
SIZES = [1, 2, 3, 4, 7, 8]
SCOPES = ["global", "layer"]
SHAPES = [(40, 5), (5,), (7, 3), (1,)]  # of the toy model's tensors: 227 elements, not divisible by most P


class Lived(NamedTuple):
    """What one rank saw in each step, and what it holds at the end."""

    gradients: list[Tensor]  # (n,) before aggregation
    updates: list[Tensor]  # (n,) after
    residual: Tensor  # (n,)
    wire_bytes: int  # as the method says
    counted_bytes: int  # as the communicator counted
    selected: list[int]


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> Tensor:
    own = torch.Generator().manual_seed(1000 * step + 10 * rank + len(shape))
    return torch.randn(shape, generator=own, dtype=torch.float64)


def build(name: str, density: float, scope: str) -> Any:
    known = sparsify.defaults(name)
    wanted = {"density": density, "scope": scope}
    return sparsify.build(name, **{key: value for key, value in wanted.items() if key in known})


def live(
    method: Any,
    size: int,
    steps: int = 5,
    make: Callable[[int, int, tuple[int, ...]], Tensor] = gradient,
    shapes: list[tuple[int, ...]] = SHAPES,
) -> list[Lived]:
    """Run the method on `size` virtual ranks over a toy model whose gradients are given."""

    def body(comm: virtual.VirtualComm) -> Lived:
        timer = PhaseTimer("serialised", comm.now)
        metered = Metered(comm, timer)
        parameters = [
            (f"p{i}", Parameter(torch.zeros(shape, dtype=torch.float64))) for i, shape in enumerate(shapes)
        ]
        aggregator = Aggregator(method, parameters, metered, timer, seed=3)
        before, after, wire_bytes, selected = [], [], 0, []
        for step in range(steps):
            aggregator.gradients.zero_()
            for _, p in parameters:
                assert p.grad is not None
                p.grad.copy_(make(comm.rank, step, tuple(p.shape)))
            before.append(aggregator.gradients.flat.clone())
            with timer.step():
                report = aggregator.aggregate(epoch=step)
            after.append(aggregator.gradients.flat.clone())
            wire_bytes += report.wire_bytes
            selected.append(report.selected)
        residuals = [method.residual(state) for state in aggregator.states]
        held = [
            torch.zeros_like(b) if r is None else r
            for r, b in zip(residuals, aggregator.gradients.buckets, strict=True)
        ]
        return Lived(before, after, torch.cat(held), wire_bytes, metered.sent_bytes, selected)

    return virtual.run(size, body)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_workers_agree_bit_for_bit(name: str, size: int, scope: str) -> None:
    lived = live(build(name, 0.05, scope), size)
    for step in range(5):
        assert all(torch.equal(one.updates[step], lived[0].updates[step]) for one in lived)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_at_density_1_the_first_step_is_dense_sgd(name: str, size: int) -> None:
    lived = live(build(name, 1.0, "global"), size, steps=1)
    mean = torch.stack([one.gradients[0] for one in lived]).mean(dim=0)
    torch.testing.assert_close(lived[0].updates[0], mean, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*METHODS, "randomk with feedback"])
def test_nothing_is_lost(name: str, size: int, scope: str) -> None:
    """Updates applied + residuals held = gradients seen; methods without feedback lose what they do not
    send.
    """
    with_feedback = name.endswith("with feedback")
    method = sparsify.build("randomk", density=0.05, scope=scope, feedback=True) if with_feedback else None
    method = method or build(name, 0.05, scope)
    lived = live(method, size, steps=20)
    seen = sum(torch.stack(one.gradients).sum(dim=0) for one in lived)
    applied = size * torch.stack(lived[0].updates).sum(dim=0)
    held = sum(one.residual for one in lived)
    forgets = name in ("control", "randomk")
    close = torch.allclose(applied + held, seen, rtol=1e-10, atol=1e-10)
    assert close != forgets
    assert forgets or name == "dense" or held.abs().sum() > 0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_bytes_promised_are_bytes_counted(name: str, density: float, size: int, scope: str) -> None:
    for one in live(build(name, density, scope), size, steps=2):
        assert one.wire_bytes == one.counted_bytes
        assert (one.counted_bytes > 0) == (size > 1)


@pytest.mark.parametrize("name", METHODS)
def test_each_rank_sends_k_elements(name: str) -> None:
    total = sum(torch.Size(shape).numel() for shape in SHAPES)
    lived = live(build(name, 0.05, "global"), 3)
    expected = total if name == "dense" else num_selected(total, 0.05)
    for one in lived:
        assert one.selected == [expected] * 5
    assert torch.count_nonzero(lived[0].updates[0]) <= 3 * expected


@pytest.mark.parametrize(
    "value",
    [lambda *_: 0.0, lambda *_: 1.0, lambda rank, step, shape: -1.0 if rank else 1e-8],
    ids=["all zero", "constant: all tied", "ranks cancel"],
)
@pytest.mark.parametrize("name", METHODS)
def test_degenerate_gradients_work(name: str, value: Callable[..., float]) -> None:
    lived = live(
        build(name, 0.1, "layer"), 3, make=lambda r, s, shape: torch.full(shape, value(r, s, shape)).double()
    )
    assert all(torch.isfinite(update).all() for one in lived for update in one.updates)
    assert all(torch.equal(one.updates[-1], lived[0].updates[-1]) for one in lived)


@pytest.mark.parametrize("name", METHODS)
def test_one_element_and_empty_tensors_work(name: str) -> None:
    lived = live(build(name, 1.0, "layer"), 2, shapes=[(1,), (0,), (3,)])
    assert lived[0].updates[0].shape == (4,)


@pytest.mark.parametrize("name", METHODS)
def test_the_global_random_generator_is_untouched(name: str) -> None:
    before = torch.get_rng_state()
    live(build(name, 0.05, "global"), 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", METHODS)
def test_two_runs_give_the_same_bits(name: str) -> None:
    first, second = (live(build(name, 0.05, "layer"), 4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0].updates, second[0].updates, strict=True))
