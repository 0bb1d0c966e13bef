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
from sparsify.core.gradients import OwnGradients
from sparsify.doors import engine
from sparsify.doors.aggregator import Aggregator
from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback
from sparsify.kernels import JointKernel, kernel_for, native, norms_of, trouble_with_native
from sparsify.kernels.joint import cut, matched, merged
from sparsify.kernels.native import NativeJoint
from sparsify.method import Method, Sparsifier
from sparsify.select import TopK
from sparsify.types import Delivery, Sparse
from tests.conftest import there
from tests.sparsify.laws import ALONE, METHODS, build, gradient, live

SIZES = [40, 60, 1, 5000, 8, 2049]
KINDS = [torch.float32, torch.bfloat16, torch.float16]
needs_native = pytest.mark.skipif(bool(trouble_with_native()), reason="no compiler")


def single(rank: int, step: int, shape: tuple[int, ...]) -> Tensor:
    return gradient(rank, step, shape).float()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_what_travels_together_is_the_same(name: str, dtype: torch.dtype) -> None:
    """Averages, residuals and numbers of elements, to the bit; with warm-up, momentum or clipping, where a
    method has it, and with every feedback.
    """
    feedbacks = ["gradient", "learning_rate", "none"] if "feedback" in sparsify.defaults(name) else [""]
    for feedback in feedbacks:
        own: dict[str, Any] = {"feedback": feedback} if feedback else {}
        try:
            method = build(name, clip_norm=1.0, density_warmup=(0.3,), **own)
        except ValueError:  # a feedback that it does not have
            continue
        together, alone = (live(method, 3, 4, dtype=dtype, together=those) for those in (True, False))
        for ours, theirs in zip(together, alone, strict=True):
            assert all(map(torch.equal, ours.updates, theirs.updates)), feedback
            assert torch.equal(ours.residual, theirs.residual), feedback
            assert ours.selected == theirs.selected, feedback
            assert max(ours.wire_bytes) <= max(theirs.wire_bytes)


@pytest.mark.parametrize("name", ["topk", "randomk", "dgc", "gaussiank", "sidco", "hardthreshold"])
def test_all_buckets_of_a_model_travel_in_one_message(name: str) -> None:
    method = build(name)
    assert method.joins
    counted: list[list[int]] = []
    for together in (True, False):
        aggregator = Aggregator(method, parameters_of(SIZES), ALONE, together=together)
        begun: list[int] = []
        original = aggregator.comm.all_gather

        def all_gather(tensor: Tensor, begun: list[int] = begun, original: Any = original) -> list[Tensor]:
            begun.append(tensor.numel())
            gathered: list[Tensor] = original(tensor)
            return gathered

        aggregator.comm.all_gather = all_gather  # type: ignore[method-assign]
        aggregator.gradients.flat.normal_()
        aggregator.aggregate()
        counted.append(begun)
    assert len(counted[0]) <= 2  # lengths, where these depend on the data, and elements
    assert len(counted[1]) >= len(SIZES)


def parameters_of(sizes: Sequence[int]) -> list[tuple[str, Parameter]]:
    return [(f"p{at}", Parameter(torch.zeros(n, 1))) for at, n in enumerate(sizes)]


@pytest.mark.parametrize("feedback", ["gradient", "learning_rate", "none"])
def test_every_bucket_has_its_own_rate(feedback: str) -> None:
    updates = []
    for together in (True, False):
        aggregator = Aggregator(
            build("topk", 0.1, "layer", feedback=feedback), parameters_of(SIZES), ALONE, together=together
        )
        for step in range(3):
            aggregator.gradients.flat.normal_(generator=torch.Generator().manual_seed(step))
            aggregator.aggregate(lr=[0.1, 0.0, 0.2 * step, 0.3, 0.1, 0.2])
        updates.append(torch.cat(aggregator.gradients.views))
    assert torch.equal(*updates)


def test_more_elements_than_int32_counts_travel_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_TOGETHER", 100)
    aggregator = Aggregator(build("topk", 0.1), parameters_of(SIZES), ALONE)
    groups = [[SIZES[::-1][place] for place in group] for group in aggregator._groups(range(len(SIZES)))]
    assert groups == [[2049], [8], [5000], [1, 60], [40]]


def test_what_is_watched_is_what_is_sent() -> None:
    seen: list[tuple[int, int]] = []

    def watch(acc: Tensor, part: Sparse) -> None:
        assert torch.equal(acc[part.indices.long()], part.values)
        seen.append((acc.numel(), part.indices.numel()))

    aggregator = Aggregator(build("topk", 0.1), parameters_of(SIZES), ALONE)
    aggregator.gradients.flat.normal_()
    aggregator.aggregate(watch=watch)
    assert seen == [(n, max(1, n // 10)) for n in SIZES[::-1]]


def test_a_method_with_a_step_of_its_own_goes_bucket_by_bucket() -> None:
    class Own(Sparsifier):
        def aggregate(self, *those: Any) -> int:
            return super().aggregate(*those)

    topk = build("topk")
    assert isinstance(topk, Sparsifier)
    own: Method = Own(topk.density, topk.select, topk.feedback, topk.exchange, "layer")
    assert topk.joins
    assert not own.joins
    assert not own.takes_pieces


def test_parts_of_ones_own_go_bucket_by_bucket_unless_they_say_otherwise() -> None:
    class Halving(ErrorFeedback):
        def retain(self, delivery: Delivery, state: Tensor) -> None:
            super().retain(delivery, state)
            state.mul_(0.5)

    class Doubled(AllGather):
        def exchange(self, *those: Any) -> Delivery:
            return super().exchange(*those)

    class Last(TopK):
        pass

    topk = build("topk")
    assert isinstance(topk, Sparsifier)
    assert topk.joins
    assert not replace(topk, feedback=Halving()).joins
    assert not replace(topk, exchange=Doubled()).joins
    assert not replace(topk, select=Last()).searches_together
    together, alone = (live(replace(topk, feedback=Halving()), 2, together=those) for those in (True, False))
    assert torch.equal(together[0].residual, alone[0].residual)


# Kernels


def space(sizes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    own = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=own).to(dtype) for n in sizes]


def plain(sizes: Sequence[int]) -> JointKernel:
    return JointKernel(sizes, [kernel_for(torch.empty(n), "torch") for n in sizes])


CUTS = {
    "each bucket": SIZES,
    "all as one": [sum(SIZES)],
    "within buckets": [30, 10, 60, 1, 0, 17, 4983, 8, 2000, 49],
    "across buckets": [99, 2, 3000, 3000, 1057],
}


@needs_native
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", CUTS)
def test_gradients_may_be_divided_anywhere(name: str, dtype: torch.dtype) -> None:
    ks = [max(1, n // 20) for n in SIZES]
    accs, grads = space(SIZES), [*torch.cat(space(SIZES, dtype, seed=1)).split(CUTS[name])]
    found = NativeJoint(SIZES).topk(ours := [acc.clone() for acc in accs], grads, ks)
    expected = plain(SIZES).topk(theirs := [acc.clone() for acc in accs], grads, ks)
    assert all(map(torch.equal, ours, theirs))
    order = expected.indices.argsort()
    assert torch.equal(found.indices, expected.indices[order].int())
    assert torch.equal(found.values, expected.values[order])


@needs_native
def test_a_bucket_may_have_its_residual_in_several_tensors() -> None:
    n, ks = sum(SIZES), [77]
    accs, grads = space(SIZES), space(SIZES, seed=1)
    found = NativeJoint([n]).topk(ours := [acc.clone() for acc in accs], grads, ks)
    expected = plain([n]).topk(theirs := [acc.clone() for acc in accs], grads, ks)
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(found.indices, expected.indices.sort().values.int())


@needs_native
@pytest.mark.parametrize("k", [1, 500, 5000, 4999])
@pytest.mark.parametrize("what", ["ties", "zeros", "not a number", "infinite", "few are not zero"])
def test_the_native_search_of_small_buckets_is_exact(what: str, k: int) -> None:
    grad = space([5000])[0]
    grad = {
        "ties": grad.round(),
        "zeros": torch.zeros(5000),
        "not a number": grad.index_fill(0, torch.arange(0, 5000, 7), torch.nan),
        "infinite": grad.index_fill(0, torch.arange(0, 5000, 7), torch.inf),
        "few are not zero": grad * (torch.arange(5000) % 97 == 0),
    }[what]
    found = NativeJoint([5000]).topk([torch.zeros(5000)], [grad], [k])
    keys = grad.view(torch.int32) & 0x7FFFFFFF
    border = keys.sort(descending=True).values[k - 1]
    ties = (keys == border).nonzero().flatten()
    chosen = torch.cat([(keys > border).nonzero().flatten(), ties])[:k].sort().values
    assert torch.equal(found.indices.long(), chosen)


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("make", [plain, pytest.param(NativeJoint, marks=needs_native)])
def test_parts_are_added_in_their_order_wherever_memories_begin(make: Any, name: str, clears: bool) -> None:
    """As torch adds them to one tensor: each product rounded, then the sum."""
    n = sum(SIZES)
    parts = [
        Sparse(torch.randperm(n, generator=torch.Generator().manual_seed(at))[:300].int(), values)
        for at, values in enumerate(space([300] * 3))
    ]
    before = torch.cat(space(SIZES, seed=2))
    expected = torch.zeros(n) if clears else before.clone()
    for part in parts:
        expected += torch.zeros(n).index_put((part.indices.long(),), part.values * (1 / 3))
    memories = [piece.clone() for piece in before.split(CUTS[name])]
    make(SIZES).add(memories, parts, 1 / 3, clears)
    assert torch.equal(torch.cat(memories), expected)
    make(SIZES).clear_at(memories, parts[0])
    assert torch.equal(torch.cat(memories), expected.index_fill(0, parts[0].indices.long(), 0))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", [plain, pytest.param(NativeJoint, marks=needs_native)])
def test_two_spaces_that_are_alike_move_alike_by_the_sum_of_parts(make: Any, count: int) -> None:
    n, before = sum(SIZES), torch.cat(space(SIZES, seed=2))
    parts = [
        Sparse(torch.arange(at % 2, n, 20, dtype=torch.int32), values)  # some places are of several
        for at, values in enumerate(space([len(range(at % 2, n, 20)) for at in range(count)]))
    ]
    total = torch.zeros(n)
    for part in parts:
        total.index_add_(0, part.indices, part.values * 0.25)
    anchors, owns = ([piece.clone() for piece in before.split(SIZES)] for _ in range(2))
    make(SIZES).move(anchors, owns, parts, 0.25, -1.0)
    assert torch.equal(torch.cat(anchors), before - total)
    assert all(map(torch.equal, anchors, owns))


@needs_native
def test_more_than_caches_hold_is_cleared_whole() -> None:
    sizes = [3, 2**22, 1, 5]
    whole = torch.ones(sum(sizes) + 1)
    memories = [*whole[1:].split(sizes)]  # at any address that a number can have
    part = Sparse(torch.tensor([0, 4, 2**22 + 8], dtype=torch.int32), torch.ones(3))
    NativeJoint(sizes).add(memories, [part], 2.0, clears=True)
    assert whole[0] == 1
    assert whole[1:].nonzero().flatten().tolist() == part.indices.tolist()
    assert whole[1:].sum() == 6


@needs_native
def test_what_the_joint_kernel_would_misread_is_refused() -> None:
    kernel, accs, ks = NativeJoint(SIZES), space(SIZES), [1] * len(SIZES)
    for wrong, grads in (
        (accs[1:], accs), (accs, accs[1:]), (accs, [acc.double() for acc in accs]),
        (accs, [*accs[:-1], accs[-1].bfloat16()]), ([acc.bfloat16() for acc in accs], accs),
        ([*accs[:-1], torch.zeros(2 * SIZES[-1])[::2]], accs),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="this kernel was made for buckets of"):
            kernel.topk(wrong, grads, ks)
    with pytest.raises(ValueError, match="k="):
        kernel.topk(accs, accs, [2 * n for n in SIZES])
    assert all(map(torch.equal, accs, space(SIZES)))


@needs_native
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("level", range(len(native.LEVELS)))
def test_norms(dtype: torch.dtype, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grads, sizes = [torch.cat(space(SIZES, dtype))], [*SIZES[:2], 0, *SIZES[2:]]
    found = norms_of(grads, sizes)
    expected = torch.stack([piece.double().norm() for piece in grads[0].split(sizes)])
    assert torch.allclose(found.double(), expected, rtol=1e-5)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for at, end in enumerate(accumulate(sizes)):
            if sizes[at]:
                broken = grads[0].index_fill(0, torch.tensor([end - 1]), bad)
                assert torch.isfinite(norms_of([broken], sizes)).logical_not().nonzero().tolist() == [[at]]


def test_rows_of_tensors_are_matched() -> None:
    for name in CUTS:
        row, other = space(SIZES), [*torch.cat(space(SIZES)).split(CUTS[name])]
        pairs = list(matched(row, other))
        assert all(torch.equal(*pair) for pair in pairs)
        assert torch.equal(torch.cat([one for one, _ in pairs]), torch.cat(row))
        assert [sum(map(Tensor.numel, own)) for own in cut(other, SIZES)] == SIZES


def test_memories_that_follow_each_other_are_one() -> None:
    flat = torch.arange(12.0)
    whole = there(merged([flat[2:5], flat[5:6], flat[6:9]]))
    assert whole.tolist() == flat[2:9].tolist()
    assert whole.data_ptr() == flat[2:].data_ptr()
    assert merged([flat[2:5], flat[6:9]]) is None
    assert merged([flat[2:5], torch.zeros(3)]) is None


# Gradients that stay where backpropagation computes them


def own_gradients(*shapes: tuple[int, ...]) -> tuple[list[Parameter], OwnGradients]:
    parameters = [Parameter(torch.randn(shape)) for shape in shapes]
    return parameters, OwnGradients([(f"p{at}", p) for at, p in enumerate(parameters)], "global")


def test_gradients_are_read_where_they_lie() -> None:
    (a, b), gradients = own_gradients((2, 3), (4,))
    (a.square().sum() + b.square().sum()).backward()
    before = there(a.grad)
    of_b, of_a = gradients.collect()
    assert of_a.data_ptr() == before.data_ptr()
    assert torch.equal(of_a.view(2, 3), 2 * a)
    assert torch.equal(of_b, 2 * b)
    gradients.clear()
    assert a.grad is None


def test_gradients_that_share_memory_are_parted() -> None:
    """Backpropagation may hand the same tensor to two parameters."""
    (a, b), gradients = own_gradients((2, 3), (6,))
    (a.view(-1) + b.view(-1)).mul(torch.arange(6.0)).sum().backward()
    shared = torch.arange(6.0)
    a.grad, b.grad = shared.view(2, 3), shared
    of_b, of_a = gradients.collect()
    of_a.zero_()
    assert of_b.tolist() == there(b.grad).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not there(a.grad).any()


def test_missing_sparse_and_strided_gradients_become_dense() -> None:
    (a, b, c), gradients = own_gradients((3, 2), (4, 2), (2, 2, 3, 3))
    a.grad = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]).to_sparse(1)
    c.grad = torch.randn(2, 2, 3, 3).to(memory_format=torch.channels_last)
    expected = c.grad.clone()
    of_c, of_b, of_a = gradients.collect()
    assert of_a.tolist() == [0, 0, 1, 1, 0, 0]
    assert not of_b.any()
    assert torch.equal(of_c, expected.contiguous().view(-1))
    of_b.fill_(3.0)
    assert (there(b.grad) == 3).all()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_are_written_to() -> None:
    """After backward(create_graph=True)."""
    (a,), gradients = own_gradients((3,))
    a.pow(3).sum().backward(create_graph=True)
    with torch.no_grad():
        gradients.collect()[0].fill_(1.0)
    assert there(a.grad).tolist() == [1.0] * 3
