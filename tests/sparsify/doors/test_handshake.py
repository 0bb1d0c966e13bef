"""Workers that are not alike: all of them say so, in the same words, before anything is exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import virtual
from sparsify.doors.handshake import Disagreement
from tests.sparsify import worker_functions
from tests.sparsify.doors import uses, uses_odd
from tests.sparsify.worker_functions import on_processes


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What three gloo processes are told in each case, by rank."""
    return on_processes(worker_functions.odd_workers, 3, tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("case", uses_odd.CASES)
def test_all_processes_raise_the_same_words(case: str, told: list[dict[str, Tensor]]) -> None:
    first, *others = (bytes(found[case].tolist()).decode() for found in told)
    assert uses_odd.CASES[case][1] in first
    assert first.startswith("the workers disagree on ")
    assert first.endswith("Give every worker the same model, optimiser, method and options, "
                          "and call the same, equally often")  # fmt: skip
    assert others == [first, first]


def test_with_debug_each_step_under_ddp_compares_anew(told: list[dict[str, Tensor]]) -> None:
    first, *others = (bytes(found["a step"].tolist()).decode() for found in told)
    assert (
        "step 1: the workers disagree on lr of group 0: ranks [0, 2] have 0.05; ranks [1] have 0.01" in first
    )
    assert others == [first, first]


@pytest.mark.parametrize("case", [case for case in uses_odd.CASES if not case.startswith("register")])
def test_so_do_virtual_ranks(case: str) -> None:
    first, *others = virtual.run(3, lambda comm: uses_odd.told(case, comm.rank, comm))
    if case == "distribute overlap":  # which they can't, and refuse by themselves
        return
    assert uses_odd.CASES[case][1] in first
    assert others == [first, first]


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        ("freezes", r"convolution.bias: ranks \[0\] have .*, trained; ranks \[1\] have .* on cpu\. "),
        ("slower", r"on lr of group 0: ranks \[0\] have 0.05; ranks \[1\] have 0.01"),
    ],
)  # fmt: skip
def test_with_debug_each_step_compares_anew(odd: str, sentence: str) -> None:
    def body(comm: virtual.VirtualComm) -> None:
        parts = uses_odd.Parts(options={"debug": True})
        optimiser = parts.wrap("distribute", comm)
        assert isinstance(optimiser, torch.optim.Optimizer)
        for at in range(2):
            optimiser.zero_grad()
            uses.loss_of(parts.model, comm.rank, at).backward()
            optimiser.step()
            if comm.rank == 1 and odd == "freezes":
                uses_odd.frozen(parts)
            if comm.rank == 1 and odd == "slower":
                optimiser.param_groups[0]["lr"] = 0.01

    with pytest.raises(Disagreement, match=sentence):
        virtual.run(2, body)


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return a tensor whose elements count up in the order of its indices, wherever they lie."""
    tensor = torch.empty_strided(shape, strides, dtype=torch.float64)
    return tensor.copy_(torch.arange(tensor.numel()).view(shape))


# Of shapes, the strides that two workers have: the same order in memory, up to what says nothing of it.
EQUIVALENT = {
    "one channel": ((4, 1, 3, 3), (9, 9, 3, 1), (9, 1, 3, 1)),
    "one pixel": ((4, 3, 1, 1), (3, 1, 1, 1), (3, 1, 3, 3)),
    "channels last, one image": ((1, 3, 2, 2), (12, 1, 6, 3), (1, 1, 6, 3)),
    "one row": ((1, 5), (5, 1), (1, 1)),
    "one element": ((1, 1), (1, 1), (7, 3)),
    "empty": ((0, 3), (3, 1), (1, 9)),
    "empty, of many": ((2, 0, 3), (0, 3, 1), (3, 3, 2)),
}
GAPS = {"gaps": ((3, 2), (2, 1), (8, 4)), "gaps, transposed": ((3, 2), (2, 1), (1, 5))}
DIFFERENT = {
    "channels last": ((4, 3, 2, 2), (12, 4, 2, 1), (12, 1, 6, 3)),
    "transposed": ((3, 5), (5, 1), (1, 3)),
    "permuted": ((2, 3, 4), (12, 4, 1), (12, 1, 3)),
    "two orders, none by rows": ((2, 3, 4), (1, 2, 6), (12, 1, 3)),
    "channels last in 3D": ((2, 2, 2, 2, 2), (16, 8, 4, 2, 1), (16, 1, 8, 4, 2)),
}
Strides = tuple[int, ...]


def averaged(shapes: tuple[Strides, Strides, Strides], method: Any) -> list[Tensor]:
    """Return each worker's weights after a step, for which all have the same gradient."""
    shape, *both = shapes

    def body(comm: virtual.VirtualComm) -> Tensor:
        model = nn.ParameterList([strided(shape, both[comm.rank]), torch.ones(2, dtype=torch.float64)])
        optimiser = sparsify.distribute(torch.optim.SGD(model.parameters(), lr=1.0), model, method, comm)
        for p in model:
            p.grad = torch.full_like(p, 3.0)
            p.grad += p.detach()
        optimiser.step()
        weights: Tensor = model[0].detach().clone(memory_format=torch.contiguous_format)
        return weights

    return virtual.run(2, body)


METHODS: dict[str, Any] = {
    "dense": sparsify.dense(),
    "topk": sparsify.topk(density=1.0),
    "localsgd": sparsify.localsgd(every=1),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", [*EQUIVALENT, *GAPS, *DIFFERENT])
def test_strides_differ_only_where_they_tell_another_order(case: str, method: str) -> None:
    shapes = {**EQUIVALENT, **GAPS, **DIFFERENT}[case]
    if case in DIFFERENT:
        with pytest.raises(Disagreement, match=r"parameter 0: .* with strides \("):
            averaged(shapes, METHODS[method])
    elif case in GAPS and method == "localsgd":
        with pytest.raises(ValueError, match="gaps, or elements that share memory"):
            averaged(shapes, METHODS[method])
    else:
        expected = torch.full(shapes[0], -3.0, dtype=torch.float64)
        for weights in averaged(shapes, METHODS[method]):
            assert torch.equal(weights, expected)


def test_what_all_refuse_is_refused_as_ever() -> None:
    def body(comm: virtual.VirtualComm) -> None:
        parts = uses_odd.Parts()
        uses_odd.momentum_twice(parts)
        parts.wrap("distribute", comm)

    with pytest.raises(ValueError, match=r"^the method applies momentum itself"):
        virtual.run(2, body)
