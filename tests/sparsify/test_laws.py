"""Laws that hold for every method of the registry, without its being named."""

from __future__ import annotations

import importlib
import io
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

import sparsify
from sparsify.comm import virtual
from sparsify.types import DENSE_AT_DENSITY_1
from sparsify.wrappers.aggregator import Aggregator
from tests.conftest import there
from tests.sparsify.laws import (
    METHODS,
    SHAPES,
    Make,
    build,
    check_excuses,
    check_laws,
    distance_from_dense,
    gradient,
    live,
)

SIZES = [1, 2, 3, 4, 5, 7, 8]  # for exchanges that choose partners: powers of two, and others
BUCKET_SIZE = 0.0005  # MB: 65 float64 elements
SCOPES: list[str | float] = ["global", "layer", BUCKET_SIZE]
GRADIENTS: dict[str, Make] = {
    "normal": gradient,
    "heavy tails": lambda *where: gradient(*where) ** 5,
    "mostly zero": lambda *where: gradient(*where) * (gradient(*where).abs() > 1.5),
    "huge ties": lambda *where: (2 * gradient(*where)).round(),
    "all zero": lambda rank, step, shape: torch.zeros(shape).double(),
    "constant": lambda rank, step, shape: torch.ones(shape).double(),
    "ranks cancel": lambda rank, step, shape: torch.full(shape, -1.0 if rank else 1e-8).double(),
    "one worker": lambda rank, step, shape: gradient(rank, step, shape) * (rank == step % 3),
    "layers of all scales": lambda rank, step, shape: (
        gradient(rank, step, shape) * 10.0 ** (torch.Size(shape).numel() % 13 - 8)
    ),
}


class Setting(NamedTuple):
    """The circumstances of some steps."""

    size: int  # workers
    scope: str | float = "layer"
    gradients: str = "normal"
    density: float = 0.05
    shapes: list[tuple[int, ...]] = SHAPES


EDGES = [
    Setting(1),
    Setting(3, BUCKET_SIZE),
    Setting(7, "global", "heavy tails"),
    Setting(16),
    *(Setting(3, scope, kind, 0.1) for kind in GRADIENTS for scope in ("layer", "global")),
    *(Setting(2, density=density, shapes=[(1,), (0,), (3,)]) for density in (0.25, 1.0)),
    *(Setting(2, density=density, shapes=[(0, 4), (2, 2)]) for density in (0.25, 1.0)),
    Setting(2, density=1.0, shapes=[(1,)]),
]


def check(name: str, setting: Setting) -> None:
    method = build(name, setting.density, setting.scope)
    lived = live(method, setting.size, 4, GRADIENTS[setting.gradients], setting.shapes)
    check_laws(method, lived)


@pytest.mark.parametrize("name", METHODS)
def test_every_step_keeps_the_laws_in_edge_cases(name: str) -> None:
    for setting in EDGES:
        try:
            check(name, setting)
        except Exception as error:
            raise AssertionError(f"{name} in {setting}") from error


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    size=st.sampled_from(SIZES),
    scope=st.sampled_from(SCOPES),
    gradients=st.sampled_from(sorted(GRADIENTS)),
    density=st.floats(0.01, 1),
    shapes=st.lists(st.sampled_from([(1,), (0,), (17,), (4, 4, 3, 3), (300,)]), max_size=3),
)
@pytest.mark.parametrize("name", METHODS)
def test_every_step_keeps_the_laws_on_random_models(
    name: str, size: int, scope: str | float, gradients: str, density: float, shapes: list[tuple[int, ...]]
) -> None:
    check(name, Setting(size, scope, gradients, max(density, 1 / 6), [*shapes, (2, 3)]))


def test_most_methods_promise_their_bytes_exactly() -> None:
    """For the other methods the closed forms give a range.

    What owners of regions send depends on where the large elements lie, or on whose region is the shorter
    one.
    """
    inexact = set()
    for name in METHODS:
        promises = live(build(name, 0.05, "layer"), 3)[0].predicted_bytes
        if any(promise.least != promise.most for promise in map(there, promises)):
            inexact.add(name)
    assert inexact <= {"oktopk", "qgz", "sparcml"}


def choices(name: str) -> Iterator[dict[str, Any]]:
    """Yield the method's defaults, then every single choice of a word, of yes or no, and clipping."""
    yield {}
    function = getattr(importlib.import_module(f"sparsify.methods.{name}"), name)
    for key, kind in typing.get_type_hints(function).items():
        words: tuple[Any, ...] = (True, False) if kind is bool else typing.get_args(kind)
        if key == "clip_norm":
            words = (0.1,)
        for word in words:
            is_word = isinstance(word, str | bool | float) and word != sparsify.defaults(name).get(key)
            if is_word and key not in ("scope", "index"):
                yield {key: word}
                if word == "allreduce":  # randomk's needs both
                    yield {key: word, "shared": True}


@pytest.mark.parametrize("name", METHODS)
def test_choices_keep_the_laws_and_their_excuses_are_needed_and_complete(name: str) -> None:
    """Else an excuse would hide a method that could be tested, or a choice would break a law unsaid."""
    for choice in choices(name):
        try:
            method, at_1 = (build(name, density, "layer", **choice) for density in (0.05, 1.0))
        except ValueError:
            continue
        try:
            check_excuses(method, at_1, 2**-6 if "value" in choice else 1e-6)  # bf16 has 8 bits
        except Exception as error:
            raise AssertionError(f"{name} with {choice}") from error


@pytest.mark.parametrize(
    "name", [name for name in METHODS if DENSE_AT_DENSITY_1 not in build(name, 1.0).broken_laws()]
)
def test_at_density_1_the_first_step_is_dense_sgd(name: str) -> None:
    for size in SIZES:
        assert distance_from_dense(build(name, 1.0, "layer"), size) < 1e-12, size


@pytest.mark.parametrize("name", METHODS)
def test_narrow_gradients_keep_wide_residuals(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        method = build(name, 0.05, "layer")
        lived = live(method, 3, dtype=dtype)
        check_laws(method, lived)
        if name != "dense":
            residual = lived[0].residual
            assert residual.dtype == torch.float32 or (residual.dtype == dtype and not residual.any()), dtype


@pytest.mark.parametrize("name", METHODS)
def test_two_runs_give_the_same_bits_and_leave_the_global_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, second = (live(build(name), 4) for _ in range(2))
    assert all(map(torch.equal, first[0].updates, second[0].updates))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", METHODS)
def test_saved_and_restored_state_continues_identically(name: str) -> None:
    """Through a file that `torch.load(weights_only=True)` reads."""

    def make_aggregator(comm: virtual.VirtualComm, scope: str) -> Aggregator:
        parameters = [(f"p{i}", Parameter(torch.zeros(shape).double())) for i, shape in enumerate(SHAPES)]
        return Aggregator(build(name, 0.05, scope), parameters, comm, seed=3)

    def make_steps(aggregator: Aggregator, rank: int, steps: range) -> Tensor:
        for step in steps:
            for view in aggregator.gradients.views:
                view.copy_(gradient(rank, step, tuple(view.shape)))
            aggregator.aggregate(epoch=step)
        return aggregator.gradients.flat.clone()

    def body(comm: virtual.VirtualComm) -> None:
        for scope in ("layer", "global"):
            straight, resumed = (make_aggregator(comm, scope) for _ in range(2))
            make_steps(straight, comm.rank, range(7))
            buffer = io.BytesIO()
            torch.save(straight.state_dict(), buffer)
            buffer.seek(0)
            expected = make_steps(straight, comm.rank, range(7, 12))
            resumed.load_state_dict(torch.load(buffer, weights_only=True))
            assert torch.equal(make_steps(resumed, comm.rank, range(7, 12)), expected), scope
            assert resumed.residual_norm() == straight.residual_norm()

    virtual.run(3, body)
