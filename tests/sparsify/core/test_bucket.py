"""Parameters <-> flat buckets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import sparsify
from sparsify.core import bucket
from sparsify.core.bucket import shape_of
from sparsify.core.gradients import Gradients
from sparsify.doors.aggregator import Aggregator
from sparsify.doors.engine import check_unchanged
from tests.conftest import there
from tests.sparsify.laws import ALONE, METHODS, build, live


def test_a_bucket_that_is_not_the_one_whose_state_is_kept_is_refused() -> None:
    like = torch.zeros(4)
    check_unchanged(torch.ones(4), like, "conv.weight")
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.float64), torch.zeros(4, device="meta")):
        with pytest.raises(ValueError, match=r"bucket conv.weight was \(4,\) .* build the state anew"):
            check_unchanged(other, like, "conv.weight")


def bucketed(*shapes: tuple[int, ...]) -> Gradients:
    return Gradients([(f"p{i}", Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)], "global")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_tensor_with_a_gradient_that_is_not_finite_is_named(bad: float) -> None:
    gradients = bucketed((3, 2), (4,), (0,), (5,))
    assert gradients.nonfinite(gradients.finite()) is None
    p1 = gradients.parameters[2][1]
    there(p1.grad)[3] = bad
    assert gradients.nonfinite(gradients.finite()) == "p1"


def test_large_finite_gradients_are_not_accused() -> None:
    gradients = bucketed((3,))
    gradients.flat.fill_(3e38)  # its norm overflows
    assert not gradients.finite().all()
    assert gradients.nonfinite(gradients.finite()) is None


def test_gradients_are_views_of_one_flat_tensor_in_reversed_order() -> None:
    gradients = bucketed((2, 2), (3,))
    (last, p1), (first, p0) = gradients.parameters
    assert (last, first) == ("p1", "p0")
    (p0.sum() * 2 + p1.sum() * 3).backward()
    assert gradients.flat.tolist() == [3.0] * 3 + [2.0] * 4


def test_channels_last_gradients_keep_their_layout() -> None:
    weight = Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    gradients = Gradients([("weight", weight)], "layer")
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    (weight * torch.arange(48.0).view(4, 3, 2, 2)).sum().backward()
    assert torch.equal(weight.grad, torch.arange(48.0).view(4, 3, 2, 2))
    assert gradients.flat.sum() == torch.arange(48.0).sum()


def test_buckets_of_a_size_hold_tensors_in_a_row() -> None:
    shapes = [(100,), (7, 3), (500,), (20,), (30,)]
    parameters = [(f"p{i}", Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    gradients = Gradients(parameters, 4 * 150 / 2**20)  # 150 elements of 4 bytes
    assert [bucket.names for bucket in gradients.buckets] == [("p4", "p3"), ("p2",), ("p1", "p0")]
    assert [bucket.flat.numel() for bucket in gradients.buckets] == [50, 500, 121]
    assert gradients.buckets[2].shapes == ((7, 3), (100,))


SIZES = [1, 31, 0, 33, 100, 7, 4096, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("scope", ["global", "layer", 200 / 2**20])
def test_every_bucket_begins_at_a_whole_line_and_the_gaps_are_in_none(
    scope: str | float, dtype: torch.dtype
) -> None:
    named = [(f"p{i}", Parameter(torch.zeros(size, dtype=dtype))) for i, size in enumerate(SIZES)]
    gradients = Gradients(named, scope)
    for found in gradients.buckets:
        assert found.flat.storage_offset() * found.flat.element_size() % 128 == 0
        assert found.flat.data_ptr() % 64 == 0  # as CPU memory is given out; GPUs give 512
        found.flat.add_(1)
    for _, p in named:
        assert p.grad is not None
        assert torch.equal(torch.view_as_real(p.grad) if p.is_complex() else p.grad, ones_like(p))
    num_elements = sum(found.flat.numel() for found in gradients.buckets)
    assert num_elements == sum(ones_like(p).numel() for _, p in named)
    assert gradients.flat.sum() == num_elements  # in the gaps nothing was added


def ones_like(p: Tensor) -> Tensor:
    """As real numbers."""
    return torch.ones(shape_of(p), dtype=p.dtype.to_real())


@pytest.mark.parametrize("name", METHODS)
def test_gaps_between_buckets_change_no_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gaps = live(build(name, clip_norm=1.0), 2, steps=3)
    monkeypatch.setattr(bucket, "LINE", 8)  # one float64
    for ours, theirs in zip(with_gaps, live(build(name, clip_norm=1.0), 2, steps=3), strict=True):
        assert all(map(torch.equal, ours.updates, theirs.updates))
        assert torch.equal(ours.residual, theirs.residual)
        assert ours.selected == theirs.selected
        assert ours.wire_bytes == theirs.wire_bytes


def test_gradients_from_elsewhere_are_collected() -> None:
    gradients = bucketed((2,), (3,), (4,))
    (_, unused), (_, sparse_one), (_, replaced) = gradients.parameters
    unused.grad = None
    sparse_one.grad = torch.tensor([0.0, 5.0, 0.0]).to_sparse()
    replaced.grad = torch.ones(2)
    gradients.flat[:4] = 9.0
    gradients.collect()
    assert gradients.flat.tolist() == [0.0] * 4 + [0.0, 5.0, 0.0] + [1.0, 1.0]
    assert replaced.grad.data_ptr() == gradients.views[2].data_ptr()


def test_a_gradient_that_changed_its_kind_is_refused() -> None:
    gradients = bucketed((2,))
    gradients.parameters[0][1].data = torch.zeros(3)
    gradients.parameters[0][1].grad = torch.zeros(3)
    with pytest.raises(ValueError, match=r"gradient of p0 was \(2,\) .* is now \(3,\)"):
        gradients.collect()


def test_parameters_with_gaps_have_gradients_without() -> None:
    """As pruning leaves them: neighbours' gradients must not share memory."""
    with_gaps = [
        Parameter(torch.zeros(4, 6)[:, ::2]),
        Parameter(torch.zeros(3, 8).t()[:5]),
        Parameter(torch.zeros(7)),
    ]
    gradients = Gradients([(f"p{i}", p) for i, p in enumerate(with_gaps)], "layer")
    for i, p in enumerate(with_gaps, start=1):
        (i * p.sum()).backward()
    for (name, p), view in zip(gradients.parameters, gradients.views, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, torch.full(p.shape, 1.0 + int(name[1])))
        assert torch.equal(view, p.grad.flatten())


def test_complex_gradients_are_pairs_of_reals() -> None:
    named = [("odd", Parameter(torch.zeros(3))), ("c", Parameter(torch.zeros(2, 2, dtype=torch.complex64)))]
    gradients = Gradients(named, "layer")
    (named[0][1].sum() + (named[1][1] * (3 + 5j)).abs().pow(2).sum() + named[1][1].real.sum()).backward()
    assert named[1][1].grad is not None
    assert torch.equal(named[1][1].grad, torch.ones(2, 2, dtype=torch.complex64))
    assert torch.cat(gradients.views).tolist() == [1, 0] * 4 + [1, 1, 1]
    assert {bucket.names: bucket.shapes for bucket in gradients.buckets}["c",] == ((2, 2, 2),)
    named[1][1].grad = torch.full((2, 2), 7j, dtype=torch.complex64)
    gradients.collect()
    assert gradients.flat.sum() == 3 + 28


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_that_can_be_differentiated_is_collected() -> None:
    gradients = bucketed((2,))
    ((_, p),) = gradients.parameters
    (p**2 + p).sum().backward(create_graph=True)
    gradients.collect()
    assert gradients.flat.tolist() == [1.0, 1.0]
    assert not gradients.flat.requires_grad


def test_gradients_that_moved_are_brought_back() -> None:
    """The tensor is the same, and its memory another's."""
    gradients = bucketed((2, 3))
    ((_, p),) = gradients.parameters
    assert p.grad is not None
    for moved in (torch.ones(2, 3), torch.ones(3, 2).t()):
        p.grad.data = moved
        values = p.grad.clone()
        gradients.collect()
        assert torch.equal(gradients.flat.view(2, 3), values)
        assert p.grad.data_ptr() == gradients.flat.data_ptr()
        gradients.flat.copy_(torch.arange(6.0))


def test_the_last_to_wrap_parameters_owns_their_gradients() -> None:
    parameters = [("a", Parameter(torch.zeros(2))), ("b", Parameter(torch.zeros(3)))]
    first, other = Gradients(parameters, "global"), Gradients(parameters[:1], "global")
    other.collect()
    with pytest.raises(ValueError, match="were wrapped anew since; go on with what that returned"):
        first.collect()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: torch.nn.LazyLinear(3).weight, "p has no shape yet; run one batch"),
        (lambda: Parameter(torch.zeros(3, device="meta")), "p is on the meta device"),
        (lambda: made_in_inference_mode(), "p was made in inference mode"),
        (lambda: Parameter(torch.zeros(3).to_sparse()), "p is a sparse tensor; make it dense"),
    ],
)
def test_what_has_no_elements_to_write_to_is_refused(make: Callable[[], Parameter], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Gradients([("p", make())], "global")


def made_in_inference_mode() -> Parameter:
    with torch.inference_mode():
        return Parameter(torch.zeros(3))


def test_a_model_without_gradients_is_refused() -> None:
    frozen = Parameter(torch.zeros(3), requires_grad=False)
    for parameters, sentence in (
        ([("p", frozen)], "no parameter requires"),
        ([("p", Parameter(torch.zeros(0)))], "empty"),
    ):
        with pytest.raises(ValueError, match=f"nothing to aggregate: .*{sentence}"):
            Aggregator(sparsify.build("dense"), parameters, ALONE)


def test_mixed_kinds_of_parameters_are_refused() -> None:
    mixed = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1, dtype=torch.float64)))]
    with pytest.raises(ValueError, match=r"float32.*float64"):
        Gradients(mixed, "global")
