"""Settings of a process or of a block of code, which change nothing of what methods compute."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.core.modes import autocast_devices, without_torch_modes
from sparsify.wrappers.aggregator import Aggregator
from tests.conftest import ROOT
from tests.sparsify import worker_functions
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
    strategies,
)

SIZE = 2
SEARCHES = [
    ("layer", "fused", torch.float32),
    ("global", "torch", torch.float32),
    ("global", "fused", torch.bfloat16),
]
# Of torch's constructors; all take the process's default device.
TYPED_BY_DEFAULT = {"empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"}
# Methods of which the benchmark has shipped entries: results are of this text. The engine keeps modes away.
AS_ENTERED = {"demo.py", "powersgd.py"}
CONSTRUCTORS = TYPED_BY_DEFAULT | {"arange", "as_tensor", "asarray", "randint", "randperm", "tensor"}


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
    for found in on_processes(worker_functions.trainings_in_modes, 2, tmp_path):
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

    def evaluate(at_anchor: bool) -> Any:
        with optimizer.at_anchor() if at_anchor else nullcontext():
            return model(inputs).detach().clone()

    with torch.autocast("cpu", torch.bfloat16):
        own, anchor, own_again = map(evaluate, (False, True, False))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(evaluate(True), anchor)
        assert torch.equal(evaluate(False), own)
    assert torch.equal(own_again, own)
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


def unstated(tree: ast.AST) -> list[str]:
    """Return each call of a constructor that leaves its device or its type to the process."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        package, _, name = ast.unparse(node.func).rpartition(".")
        if package != "torch" or name not in CONSTRUCTORS:
            continue
        needed = {"device", "dtype"} if name in TYPED_BY_DEFAULT else {"device"}
        if not needed <= {keyword.arg for keyword in node.keywords}:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_every_new_tensor_states_its_device_and_its_type() -> None:
    found = {}
    for path in sorted((ROOT / "sparsify").rglob("*.py")):
        if path.name in AS_ENTERED:
            continue
        if lines := unstated(ast.parse(path.read_text())):
            found[str(path.relative_to(ROOT))] = lines
    assert not found
