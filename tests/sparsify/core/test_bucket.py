"""Parameters <-> flat buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import sparsify
from sparsify.core.gradients import FlatGradients
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import check_bucket_spec_unchanged
from tests.conftest import there
from tests.sparsify.laws import ALONE


def gradients_of(*tensors: Tensor, scope: str | float = "global") -> FlatGradients:
    return FlatGradients([(f"p{i}", Parameter(tensor)) for i, tensor in enumerate(tensors)], scope)


def bucketed(*shapes: Any, scope: str | float = "global") -> FlatGradients:
    return gradients_of(*map(torch.zeros, shapes), scope=scope)


def test_a_bucket_that_is_not_the_one_whose_state_is_kept_is_refused() -> None:
    like = torch.zeros(4)
    check_bucket_spec_unchanged(torch.ones(4), like, "conv.weight")
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.float64), torch.zeros(4, device="meta")):
        with pytest.raises(ValueError, match=r"bucket conv.weight was \(4,\) .* build the state anew"):
            check_bucket_spec_unchanged(other, like, "conv.weight")


def test_the_tensor_with_a_gradient_that_is_not_finite_is_named() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        gradients = bucketed(6, 4, 0, 5)
        assert gradients.find_nonfinite_parameter(gradients.are_finite()) is None
        gradients.flat.fill_(3e38)  # finite, but its norm overflows
        assert not gradients.are_finite().all()
        assert gradients.find_nonfinite_parameter(gradients.are_finite()) is None
        there(gradients.named_parameters[2][1].grad)[3] = bad
        assert gradients.find_nonfinite_parameter(gradients.are_finite()) == "p1"


def test_gradients_are_views_of_one_flat_tensor_in_reversed_order() -> None:
    """Gradients are laid out as their parameters, channels last too.

    Gaps, as pruning leaves them, are not kept, for neighbours must not share memory.
    """
    named = {
        "dense": torch.zeros(2, 2),
        "channels last": torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "gaps": torch.zeros(4, 6)[:, ::2],
        "turned, with gaps": torch.zeros(3, 8).t()[:5],
        "last": torch.zeros(3),
    }
    gradients = FlatGradients([(name, Parameter(tensor)) for name, tensor in named.items()], "layer")
    assert [name for name, _ in gradients.named_parameters] == [*named][::-1]
    expected = [torch.arange(1.0, 1 + p.numel()).view(p.shape) for _, p in gradients.named_parameters]
    for (_, p), grad in zip(gradients.named_parameters, expected, strict=True):
        (p * grad).sum().backward()
    for (name, p), grad, view in zip(gradients.named_parameters, expected, gradients.views, strict=True):
        assert torch.equal(there(p.grad), grad)
        assert view.sum() == grad.sum()
        assert view.data_ptr() == there(p.grad).data_ptr()
        assert (there(p.grad).stride() == p.stride()) == ("gaps" not in name)


def test_buckets_of_a_size_hold_tensors_in_a_row() -> None:
    gradients = bucketed(100, 21, 500, 20, 30, scope=4 * 150 / 2**20)  # 150 elements of 4 bytes
    assert [bucket.names for bucket in gradients.buckets] == [("p4", "p3"), ("p2",), ("p1", "p0")]
    assert [bucket.flat.numel() for bucket in gradients.buckets] == [50, 500, 121]
    assert gradients.buckets[2].shapes == ((21,), (100,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_bucket_begins_at_a_whole_line_and_the_gaps_are_in_none(dtype: torch.dtype) -> None:
    sizes = [1, 31, 0, 33, 100, 7, 4096, 5]
    for scope in ("global", "layer", 200 / 2**20):
        gradients = gradients_of(*(torch.zeros(size, dtype=dtype) for size in sizes), scope=scope)
        for found in gradients.buckets:
            assert found.flat.storage_offset() * found.flat.element_size() % 128 == 0
            assert found.flat.data_ptr() % 64 == 0  # as CPU memory is given out; GPUs give 512
            found.flat.add_(1)
        for _, p in gradients.named_parameters:
            assert torch.equal(there(p.grad), torch.ones_like(p))
        num_elements = sum(found.flat.numel() for found in gradients.buckets)
        assert num_elements == sum(sizes)
        assert gradients.flat.sum() == num_elements  # in the gaps nothing was added


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_from_elsewhere_are_collected() -> None:
    """None, a sparse one, another tensor, one that can be differentiated, other memory in the same tensor."""
    gradients = bucketed(2, 3, 4, 1, (2, 3))
    (_, moved), (_, differentiable), (_, unused), (_, sparse), (_, replaced) = gradients.named_parameters
    moved_grad = there(moved.grad)
    gradients.flat.fill_(9.0)
    unused.grad = None
    sparse.grad = torch.tensor([0.0, 5.0, 0.0]).to_sparse()
    replaced.grad = torch.ones(2)
    differentiable.grad = None
    (differentiable**2 + differentiable).sum().backward(create_graph=True)
    moved_grad.data = torch.arange(6.0).view(3, 2).t()
    gradients.collect_by_parameter()
    assert gradients.flat.tolist() == [0, 2, 4, 1, 3, 5, 1, *[0] * 4, 0, 5, 0, 1, 1]
    assert not gradients.flat.requires_grad
    for (_, p), view in zip(gradients.named_parameters, gradients.views, strict=True):
        assert there(p.grad).data_ptr() == view.data_ptr()


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ([torch.zeros(3).to_sparse()], "p0 is a sparse tensor; make it dense"),
        ([torch.zeros(0)], "nothing to aggregate: .*empty"),
        ([torch.zeros(1), torch.zeros(1, dtype=torch.float64)], r"float32.*float64"),
        ([], "nothing to aggregate: no parameter requires"),
    ],
)
def test_what_has_no_place_in_a_bucket_is_refused(tensors: list[Tensor], sentence: str) -> None:
    frozen = ("frozen", Parameter(torch.zeros(3), requires_grad=False))
    named = [(f"p{i}", Parameter(tensor)) for i, tensor in enumerate(tensors)]
    with pytest.raises(ValueError, match=sentence):
        Aggregator(sparsify.build("dense"), [frozen, *named], ALONE)
