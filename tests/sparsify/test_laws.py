"""What holds for every method of the registry, without its being named."""

from __future__ import annotations

import importlib
import io
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

import sparsify
from sparsify.comm import virtual
from sparsify.doors.aggregator import Aggregator
from sparsify.method import Method
from sparsify.types import DENSE_AT_DENSITY_1, NOTHING_IS_LOST
from tests.conftest import there
from tests.sparsify.laws import METHODS, SHAPES, Lived, build, cases, gradient, live, mass, sizes_for

SCALES = [1e-8, 1e-4, 1.0, 1e4]  # of the toy model's tensors, where layers differ


@pytest.mark.parametrize(("name", "size", "scope"), cases())
def test_the_laws_of_every_step(name: str, size: int, scope: str | float) -> None:
    """Workers agree bit for bit; bytes reported are bytes sent, and those that the closed forms promise; as
    many elements as stated are sent; what was seen was applied, or is in a residual.
    """
    method = build(name, 0.05, scope)
    lived = live(method, size, steps=6)
    for rank in lived:
        assert all(torch.equal(a, b) for a, b in zip(rank.updates, lived[0].updates, strict=True))
        check_bytes(rank)
        least, most = rank.limits
        assert all(least <= selected <= most for selected in rank.selected), (rank.selected, rank.limits)
        if size == 1:
            assert sum(rank.counted_bytes) == 0
    if size > 1:
        assert sum(lived[0].counted_bytes) > 0
    if NOTHING_IS_LOST not in method.broken_laws():
        seen, accounted = mass(lived)
        torch.testing.assert_close(accounted, seen, rtol=1e-10, atol=1e-10)


def check_bytes(rank: Lived) -> None:
    assert rank.wire_bytes == rank.counted_bytes
    for counted, promise in zip(rank.counted_bytes, rank.promised_bytes, strict=True):
        is_kept = promise is None or promise.least <= counted <= promise.most
        assert is_kept, f"{counted} bytes were sent; it promised {promise}"


def test_most_methods_promise_their_bytes_exactly() -> None:
    """Of the others the closed forms give a range: what owners of regions send depends on where the large
    elements lie, or on whose region is the shorter one. Every method promises something.
    """
    inexact = set()
    for name in METHODS:
        promises = live(build(name, 0.05, "layer"), 3)[0].promised_bytes
        assert None not in promises, f"{name} promises no bytes"
        if any(promise.least != promise.most for promise in promises if promise):
            inexact.add(name)
    assert inexact <= {"oktopk", "qgz", "sparcml"}


def choices() -> list[tuple[str, dict[str, Any]]]:
    """Every method as it comes, and with every single choice of a word, of yes or no, and clipping."""
    found: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in METHODS]
    for name in METHODS:
        function = getattr(importlib.import_module(f"sparsify.methods.{name}"), name)
        for key, kind in typing.get_type_hints(function).items():
            words: tuple[Any, ...] = (True, False) if kind is bool else typing.get_args(kind)
            words = (0.1,) if key == "clip_norm" else words
            default = sparsify.defaults(name).get(key)
            others = [word for word in words if isinstance(word, str | bool | float) and word != default]
            found += [(name, {key: word}) for word in others if key not in ("scope", "index")]
    return found


@pytest.mark.parametrize(("name", "choice"), choices(), ids=str)
def test_excuses_from_laws_are_needed_and_complete(name: str, choice: dict[str, Any]) -> None:
    """Else an excuse would hide a method that could be tested, or a choice would break a law unsaid."""
    try:
        method, at_1 = (build(name, density, "layer", **choice) for density in (0.05, 1.0))
    except ValueError as error:
        pytest.skip(f"refused: {error}")
    seen, accounted = mass(live(method, 4, steps=6))
    balances = torch.allclose(accounted, seen, rtol=1e-6, atol=1e-6)
    assert balances is (NOTHING_IS_LOST not in method.broken_laws())
    rounding = 2**-6 if "value" in choice else 1e-6  # bf16 has 8 bits, and gradients reach 4
    assert (distance_from_dense(at_1, 4) < rounding) is (DENSE_AT_DENSITY_1 not in at_1.broken_laws())
    assert all(reason for reason in method.broken_laws().values())


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in METHODS for size in sizes_for(name)])
def test_at_density_1_the_first_step_is_dense_sgd(name: str, size: int) -> None:
    if DENSE_AT_DENSITY_1 in build(name, 1.0, "layer").broken_laws():
        pytest.skip(build(name, 1.0, "layer").broken_laws()[DENSE_AT_DENSITY_1])
    assert distance_from_dense(build(name, 1.0, "layer"), size) < 1e-12


def distance_from_dense(method: Method, size: int) -> float:
    """Largest difference between the method's first update and the mean of the gradients."""
    lived = live(method, size, steps=1)
    mean = torch.stack([rank.gradients[0] for rank in lived]).mean(dim=0)
    return float((lived[0].updates[0] - mean).abs().max())


@pytest.mark.parametrize(
    "value",
    [
        lambda rank, step, shape: torch.zeros(shape),
        lambda rank, step, shape: torch.ones(shape),
        lambda rank, step, shape: torch.full(shape, -1.0 if rank else 1e-8),
        lambda rank, step, shape: gradient(rank, step, shape).round(),  # a handful of values: huge ties
        lambda rank, step, shape: gradient(rank, step, shape) * SCALES[SHAPES.index(shape)],
        lambda rank, step, shape: gradient(rank, step, shape) * (rank == step % 3),  # one worker has any
    ],
    ids=["all zero", "constant", "ranks cancel", "huge ties", "layers from 1e-8 to 1e4", "one worker"],
)
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", METHODS)
def test_degenerate_gradients_work(name: str, scope: str, value: Callable[..., torch.Tensor]) -> None:
    method = build(name, 0.1, scope)
    lived = live(method, 3, make=lambda *where: value(*where).double())
    for rank in lived:
        assert all(torch.isfinite(update).all() for update in rank.updates)
        assert all(torch.equal(a, b) for a, b in zip(rank.updates, lived[0].updates, strict=True))
        check_bytes(rank)
    if NOTHING_IS_LOST not in method.broken_laws():
        seen, accounted = mass(lived)
        torch.testing.assert_close(accounted, seen, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize("shapes", [[(1,), (0,), (3,)], [(0, 4), (2, 2)], [(1,)]], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_one_element_and_empty_tensors_work(name: str, shapes: list[tuple[int, ...]], density: float) -> None:
    total = sum(torch.Size(shape).numel() for shape in shapes)
    lived = live(build(name, max(density, 1 / total), "layer"), 2, shapes=shapes)
    assert lived[0].updates[0].shape == (total,)
    assert torch.equal(lived[0].updates[-1], lived[1].updates[-1])


SHAPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "heavy tails": lambda x: x**5,
    "mostly zero": lambda x: x * (x.abs() > 1.5),
    "positive": lambda x: x.abs(),
    "few values": lambda x: (2 * x).round(),
}


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    size=st.sampled_from([2, 3, 5]),
    shaped=st.sampled_from(sorted(SHAPED)),
    shapes=st.lists(st.sampled_from([(1,), (2, 3), (17,), (4, 4, 3, 3), (300,)]), min_size=1, max_size=4),
    density=st.floats(0.01, 1),
    scale=st.sampled_from([1e-8, 1.0, 1e4]),
)
@pytest.mark.parametrize("name", METHODS)
def test_the_laws_on_random_models(
    name: str, size: int, shaped: str, shapes: list[tuple[int, ...]], density: float, scale: float
) -> None:
    total = sum(torch.Size(shape).numel() for shape in shapes)
    method = build(name, max(density, 1 / total), "layer")
    lived = live(method, size, 3, lambda *where: scale * SHAPED[shaped](gradient(*where)), shapes)
    assert all(torch.equal(rank.updates[-1], lived[0].updates[-1]) for rank in lived)
    for rank in lived:
        check_bytes(rank)
    if NOTHING_IS_LOST not in method.broken_laws():
        seen, accounted = mass(lived)
        torch.testing.assert_close(accounted, seen, rtol=1e-9, atol=1e-9 * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_narrow_gradients_keep_wide_residuals(name: str, dtype: torch.dtype) -> None:
    method = build(name, 0.05, "layer")
    lived = live(method, 3, dtype=dtype)
    assert all(torch.isfinite(update).all() for update in lived[0].updates)
    assert all(torch.equal(a, b) for a, b in zip(lived[0].updates, lived[2].updates, strict=True))
    if name != "dense":
        assert lived[0].residual.dtype in (torch.float32, dtype)
        assert not lived[0].residual.any() or lived[0].residual.dtype == torch.float32


@pytest.mark.parametrize("name", METHODS)
def test_the_global_random_generator_is_untouched(name: str) -> None:
    before = torch.get_rng_state()
    live(build(name), 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", METHODS)
def test_two_runs_give_the_same_bits(name: str) -> None:
    first, second = (live(build(name), 4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0].updates, second[0].updates, strict=True))


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", METHODS)
def test_saved_and_restored_state_continues_identically(name: str, scope: str) -> None:
    """Through a file that `torch.load(weights_only=True)` reads."""
    method = build(name, 0.05, scope)

    def body(comm: virtual.VirtualComm) -> None:
        def fresh() -> tuple[list[tuple[str, Parameter]], Aggregator]:
            parameters = [(f"p{i}", Parameter(torch.zeros(shape).double())) for i, shape in enumerate(SHAPES)]
            return parameters, Aggregator(method, parameters, comm, seed=3)

        def steps(
            which: range, parameters: list[tuple[str, Parameter]], aggregator: Aggregator
        ) -> torch.Tensor:
            for step in which:
                for _, p in parameters:
                    there(p.grad).copy_(gradient(comm.rank, step, tuple(p.shape)))
                aggregator.aggregate(epoch=step)
            return aggregator.gradients.flat.clone()

        straight = fresh()
        steps(range(7), *straight)
        buffer = io.BytesIO()
        torch.save(straight[1].state_dict(), buffer)
        expected = steps(range(7, 12), *straight)
        buffer.seek(0)
        resumed = fresh()
        resumed[1].load_state_dict(torch.load(buffer, weights_only=True))
        assert torch.equal(steps(range(7, 12), *resumed), expected)
        assert resumed[1].residual_norm() == straight[1].residual_norm()

    virtual.run(3, body)
