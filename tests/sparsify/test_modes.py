"""Settings of a process or of a block of code, which change nothing of what methods compute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.core.modes import autocast_devices, without_torch_modes
from sparsify.wrappers.aggregator import Aggregator
from tests.sparsify.laws import METHODS, build
from tests.sparsify.worker_functions import on_processes
from tests.sparsify.wrappers.uses_modes import (
    MODES,
    OF_PROCESSES,
    OF_STEPS,
    PLAIN,
    STEPS,
    WAYS,
    Given,
    Mode,
    distributed,
    gradients,
    methods,
    of_processes,
    strategies,
)

SIZE = 2
SEARCHES = [
    ("layer", "fused", torch.float32),
    ("global", "torch", torch.float32),
    ("global", "fused", torch.bfloat16),
]


@pytest.fixture(autouse=True)
def nothing_stays_on() -> Iterator[None]:
    """No mode outlives its test."""
    yield
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert autocast_devices() == []
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def averages(method: Any, mode: Mode, select: str, dtype: torch.dtype) -> list[Tensor] | None:
    """Return each worker's averages in all steps, made within the mode; None where no kernel has them."""

    def body(comm: Comm) -> list[Tensor]:
        with torch.inference_mode(False):
            named = list(Given(dtype).named_parameters())
        aggregator = Aggregator(method, named, comm, seed=3, select=select)
        found = []
        for step in range(STEPS):
            for (_, p), grad in zip(named, gradients(comm.rank, step, dtype), strict=True):
                assert p.grad is not None
                p.grad.copy_(grad)
            aggregator.aggregate()
            found += [view.clone() for view in aggregator.gradients.views]
        return found

    try:
        with mode():
            return [average for rank in virtual.run(SIZE, body) for average in rank]
    except ValueError:
        return None


def assert_same_bits(found: list[Tensor] | None, expected: list[Tensor] | None, where: str) -> None:
    assert (found is None) is (expected is None), where
    for one, other in zip(found or [], expected or [], strict=True):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where


@pytest.mark.parametrize("name", METHODS)
def test_every_method_and_kernel_averages_alike_in_every_mode(name: str) -> None:
    for scope, select, dtype in SEARCHES:
        method = build(name, 0.05, scope, sign=False)  # signs hide much
        expected = averages(method, MODES[PLAIN], select, dtype)
        for mode, make in MODES.items():
            found = averages(method, make, select, dtype)
            assert_same_bits(found, expected, f"{mode}, {select}, {dtype}")


WRAPPED = {**methods(), **strategies()}


@pytest.mark.parametrize("name", WRAPPED)
def test_steps_of_a_wrapped_optimizer_are_alike_in_every_mode(name: str) -> None:
    def train(mode: str) -> list[Tensor]:
        with MODES[mode]():  # around all ranks, which take turns within steps
            return virtual.run(SIZE, lambda comm: distributed(WRAPPED[name], comm))

    expected = train(PLAIN)
    for mode in OF_STEPS:
        assert_same_bits(train(mode), expected, mode)


@pytest.mark.extended
def test_trainings_of_processes_are_alike_in_every_mode(tmp_path: Path) -> None:
    """By `register`, `shard` and `distribute`, of two gloo processes."""
    for found in on_processes(of_processes, 2, tmp_path):
        assert {case.partition("|")[0] for case in found} == set(WAYS)
        assert {case.rpartition("|")[2] for case in found} == set(OF_PROCESSES)
        for case, end in found.items():
            assert torch.equal(end, found[f"{case.rpartition('|')[0]}|{PLAIN}"]), case


@pytest.mark.usefixtures("group_of_one")
def test_the_anchor_is_evaluated_also_where_autocast_has_kept_copies_of_the_parameters() -> None:
    model, inputs = nn.Linear(4, 4), torch.ones(2, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = sparsify.distribute(inner, model, sparsify.localsgd(every=3))
    model(inputs).square().mean().backward()
    optimizer.step()

    with torch.autocast("cpu", torch.bfloat16):
        own = model(inputs)
        with optimizer.at_anchor():
            anchor = model(inputs)
        assert torch.equal(model(inputs), own)
    with torch.autocast("cpu", torch.bfloat16):
        with optimizer.at_anchor():
            assert torch.equal(model(inputs), anchor)
        assert torch.equal(model(inputs), own)
    assert not torch.equal(anchor, own)


def test_autocast_is_back_after_our_arithmetic_and_after_its_errors() -> None:
    seen = []

    @without_torch_modes
    def arithmetic(fails: bool) -> None:
        seen.append(autocast_devices())
        if fails:
            raise ValueError("on purpose")

    with torch.autocast("cpu", torch.bfloat16):
        arithmetic(fails=False)
        with pytest.raises(ValueError, match="on purpose"):
            arithmetic(fails=True)
        assert autocast_devices() == ["cpu"]
    assert seen == [[], []]
