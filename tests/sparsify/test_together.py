"""Buckets that are searched, sent and written at once: the result is that of one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.core.gradients import InPlaceGradients
from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback
from sparsify.kernels import GroupKernel, make_kernel, native_unavailable_reason, stretch_norms
from sparsify.kernels.native import NativeGroupKernel
from sparsify.method import Sparsifier
from sparsify.select import TopK
from sparsify.types import Delivery, SparseVector
from sparsify.wrappers import engine
from sparsify.wrappers.aggregator import Aggregator
from tests.conftest import there
from tests.sparsify.laws import ALONE, METHODS, build, live

SIZES = [40, 60, 1, 5000, 8, 2049]
N = sum(SIZES)
KINDS = [torch.float32, torch.bfloat16, torch.float16]
needs_native = pytest.mark.skipif(bool(native_unavailable_reason()), reason="no compiler")


@pytest.mark.parametrize("name", METHODS)
def test_what_travels_together_is_the_same(name: str) -> None:
    """Averages, residuals and numbers of elements agree to the bit.

    Also with warm-up, momentum or clipping, where a method has it, and with every feedback.
    """
    for feedback in ("gradient", "learning_rate", "none"):
        try:
            method = build(name, clip_norm=1.0, density_warmup=(0.3,), feedback=feedback)
        except ValueError:  # a feedback that it does not have
            continue
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            together, alone = (live(method, 3, 4, dtype=dtype, together=joined) for joined in (True, False))
            for ours, theirs in zip(together, alone, strict=True):
                assert all(map(torch.equal, ours.updates, theirs.updates)), (feedback, dtype)
                assert torch.equal(ours.residual, theirs.residual), (feedback, dtype)
                assert ours.selected == theirs.selected, (feedback, dtype)
                assert max(ours.wire_bytes) <= max(theirs.wire_bytes)
        if "feedback" not in sparsify.defaults(name):
            break


def make_parameters() -> list[tuple[str, Parameter]]:
    return [(f"p{at}", Parameter(torch.zeros(n, 1))) for at, n in enumerate(SIZES)]


def average(method: Any, comm: Comm, together: bool = True) -> tuple[Tensor, int]:
    """Make three steps; return their last averages, and in how many messages these were made."""
    aggregator = Aggregator(method, make_parameters(), comm, group_buckets=together)
    for step in range(3):
        aggregator.gradients.flat.normal_(generator=torch.Generator().manual_seed(step))
        report = aggregator.aggregate()
    return torch.cat(aggregator.gradients.views), report.messages


@pytest.mark.parametrize("name", ["topk", "randomk", "dgc", "gaussiank", "sidco", "hardthreshold"])
def test_all_buckets_of_a_model_travel_in_one_message(name: str) -> None:
    def body(comm: Comm) -> list[int]:
        return [average(build(name), comm, together)[1] for together in (True, False)]

    together, alone = virtual.run(2, body)[0]
    assert together <= 2  # lengths, where these depend on the data, and elements
    assert alone >= len(SIZES)


def test_more_elements_than_int32_counts_travel_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 100: 2049; 8; 5000; 1 and 60; 40."""

    def run() -> tuple[Tensor, int]:
        return virtual.run(2, lambda comm: average(build("topk", 0.1), comm))[0]

    averages, messages = run()
    monkeypatch.setattr(engine, "MAX_GROUP_ELEMENTS", 100)
    in_several, more_messages = run()
    assert (messages, more_messages) == (1, 5)
    assert torch.equal(in_several, averages)


def test_what_is_watched_is_what_is_sent() -> None:
    seen: list[tuple[int, int]] = []

    def watch(acc: Tensor, part: SparseVector) -> None:
        assert torch.equal(acc[part.indices.long()], part.values)
        seen.append((acc.numel(), part.indices.numel()))

    aggregator = Aggregator(build("topk", 0.1), make_parameters(), ALONE)
    aggregator.gradients.flat.normal_()
    aggregator.aggregate(selection_hook=watch)
    assert seen == [(n, max(1, n // 10)) for n in SIZES[::-1]]


def test_parts_of_ones_own_go_bucket_by_bucket_unless_they_say_otherwise() -> None:
    class OwnStep(Sparsifier):
        def aggregate(self, *args: Any) -> int:
            return super().aggregate(*args)

    class HalvingFeedback(ErrorFeedback):
        def retain_undelivered(self, delivery: Delivery, state: Tensor) -> None:
            super().retain_undelivered(delivery, state)
            state.mul_(0.5)

    class OwnExchange(AllGather):
        def exchange(self, *args: Any) -> Delivery:
            return super().exchange(*args)

    class OwnSelector(TopK):
        pass

    topk = build("topk")
    assert isinstance(topk, Sparsifier)
    own_step = OwnStep(topk.density, topk.select, topk.feedback, topk.exchange, "layer")
    halving = replace(topk, feedback=HalvingFeedback())
    assert topk.group_support.one_message
    assert not own_step.group_support.one_message
    assert not own_step.group_support.accepts_pieces
    assert not halving.group_support.one_message
    assert not replace(topk, exchange=OwnExchange()).group_support.one_message
    assert not replace(topk, select=OwnSelector()).group_support.one_search
    together, alone = (live(halving, 2, together=joined) for joined in (True, False))
    assert torch.equal(together[0].residual, alone[0].residual)


# Kernels


def draw(sizes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n in sizes]


def one_by_one(sizes: Sequence[int]) -> GroupKernel:
    return GroupKernel(sizes, [make_kernel(torch.empty(n), "torch") for n in sizes])


KERNELS = [one_by_one, pytest.param(NativeGroupKernel, marks=needs_native)]
CUTS = [SIZES, [N], [30, 10, 60, 1, 0, 17, 4983, 8, 2000, 49], [99, 2, 3000, 3000, 1057]]


@needs_native
@pytest.mark.parametrize("dtype", KINDS)
def test_gradients_and_residuals_may_be_divided_anywhere(dtype: torch.dtype) -> None:
    accs = draw(SIZES)
    settings = [(SIZES, lengths) for lengths in CUTS]
    for buckets, lengths in [*settings, ([N], SIZES)]:
        ks = [max(1, n // 20) for n in buckets]
        grads = torch.cat(draw(SIZES, dtype, seed=1)).split(lengths)
        ours, theirs = ([acc.clone() for acc in accs] for _ in range(2))
        found = NativeGroupKernel(buckets).topk(ours, grads, ks)
        expected = one_by_one(buckets).topk(theirs, grads, ks)
        order = expected.indices.argsort()
        assert all(map(torch.equal, ours, theirs)), lengths
        assert torch.equal(found.indices, expected.indices[order].int()), lengths
        assert torch.equal(found.values, expected.values[order]), lengths


@needs_native
@pytest.mark.parametrize(
    "change",
    [
        torch.round,  # ties
        torch.zeros_like,
        lambda grad: grad.index_fill(0, torch.arange(0, 5000, 7), torch.nan),
        lambda grad: grad.index_fill(0, torch.arange(0, 5000, 7), torch.inf),
        lambda grad: grad * (torch.arange(5000) % 97 == 0),  # few are not zero
    ],
)
def test_the_native_search_of_small_buckets_is_exact(change: Any) -> None:
    grad = change(draw([5000])[0])
    keys = grad.view(torch.int32) & 0x7FFFFFFF
    ranked = keys.sort(descending=True, stable=True).indices
    for k in (1, 500, 5000, 4999):
        found = NativeGroupKernel([5000]).topk([torch.zeros(5000)], [grad], [k])
        assert torch.equal(found.indices.long(), ranked[:k].sort().values), k


@pytest.mark.parametrize("make", KERNELS)
def test_parts_are_added_in_their_order_wherever_memories_begin(make: Any) -> None:
    """As torch adds them to one tensor: each product rounded, then the sum."""
    parts = [
        SparseVector(torch.randperm(N, generator=torch.Generator().manual_seed(at))[:300].int(), values)
        for at, values in enumerate(draw([300] * 3))
    ]
    before = torch.cat(draw(SIZES, seed=2))
    for lengths in CUTS:
        for clears in (False, True):
            expected = torch.zeros(N) if clears else before.clone()
            for part in parts:
                expected += torch.zeros(N).index_put((part.indices.long(),), part.values * (1 / 3))
            apart = [piece.clone() for piece in before.split(lengths)]
            for memories in (apart, before.clone().split(lengths)):
                make(SIZES).add(memories, parts, 1 / 3, clears)
                assert torch.equal(torch.cat(list(memories)), expected), (lengths, clears)
            make(SIZES).clear_at(apart, parts[0])
            assert torch.equal(torch.cat(apart), expected.index_fill(0, parts[0].indices.long(), 0)), lengths
    ordered = [SparseVector(part.indices.sort().values, part.values) for part in parts]
    for some in (ordered[:1], ordered, parts):  # two spaces that are alike move alike
        total = torch.zeros(N)
        for part in some:
            total.index_add_(0, part.indices, part.values * 0.25)
        anchors, owns = ([piece.clone() for piece in before.split(SIZES)] for _ in range(2))
        make(SIZES).add_sum_to_anchors_and_copies(anchors, owns, some, 0.25, -1.0)
        assert torch.equal(torch.cat(anchors), before - total)
        assert all(map(torch.equal, anchors, owns))


@needs_native
def test_more_than_caches_hold_is_cleared_whole() -> None:
    sizes = [3, 2**22, 1, 5]
    whole = torch.ones(sum(sizes) + 1)
    memories = whole[1:].split(sizes)  # at any address that a number can have
    part = SparseVector(torch.tensor([0, 4, 2**22 + 8], dtype=torch.int32), torch.ones(3))
    NativeGroupKernel(sizes).add(memories, [part], 2.0, clears=True)
    assert whole[0] == 1
    assert whole[1:].nonzero().flatten().tolist() == part.indices.tolist()
    assert whole[1:].sum() == 6


@needs_native
def test_what_the_joint_kernel_would_misread_is_refused() -> None:
    kernel = NativeGroupKernel(SIZES)
    accs = draw(SIZES)
    ks = [1] * len(SIZES)
    for wrong, grads in (
        (accs[1:], accs),
        (accs, accs[1:]),
        (accs, draw(SIZES, torch.float64)),
        (accs, [*accs[:-1], accs[-1].bfloat16()]),
        (draw(SIZES, torch.bfloat16), accs),
        ([*accs[:-1], torch.zeros(2 * SIZES[-1])[::2]], accs),
    ):
        with pytest.raises(ValueError, match="this kernel was made for buckets of"):
            kernel.topk(wrong, grads, ks)
    with pytest.raises(ValueError, match="k="):
        kernel.topk(accs, accs, [2 * n for n in SIZES])
    assert all(map(torch.equal, accs, draw(SIZES)))


@needs_native
@pytest.mark.parametrize("dtype", KINDS)
def test_norms_are_of_each_stretch_and_not_finite_where_an_element_is_not(dtype: torch.dtype) -> None:
    grad = torch.cat(draw(SIZES, dtype))
    sizes = [*SIZES[:2], 0, *SIZES[2:]]
    expected = torch.stack([piece.double().norm() for piece in grad.split(sizes)])
    assert torch.allclose(stretch_norms([grad], sizes).double(), expected, rtol=1e-5)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for at, end in enumerate(accumulate(sizes)):
            if sizes[at]:
                broken = grad.index_fill(0, torch.tensor([end - 1]), bad)
                assert (~stretch_norms([broken], sizes).isfinite()).nonzero().tolist() == [[at]]


# Gradients that stay where backpropagation computes them


def make_gradients(*shapes: tuple[int, ...]) -> tuple[list[Parameter], InPlaceGradients]:
    parameters = [Parameter(torch.randn(shape)) for shape in shapes]
    return parameters, InPlaceGradients([(f"p{at}", p) for at, p in enumerate(parameters)], "global")


def test_gradients_that_share_memory_are_parted() -> None:
    """Backpropagation may hand the same tensor to two parameters."""
    (a, b), gradients = make_gradients((2, 3), (6,))
    shared = torch.arange(6.0)
    a.grad = shared.view(2, 3)
    b.grad = shared
    of_b, of_a = gradients.collect_by_parameter()
    of_a.zero_()
    assert of_b.tolist() == there(b.grad).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not there(a.grad).any()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_are_written_to() -> None:
    """After backward(create_graph=True)."""
    (a,), gradients = make_gradients((3,))
    a.pow(3).sum().backward(create_graph=True)
    with torch.no_grad():
        gradients.collect_by_parameter()[0].fill_(1.0)
    assert there(a.grad).tolist() == [1.0] * 3
