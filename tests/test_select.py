"""Selectors, feedback and composition, part by part."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import sparsify
from sparsify.aggregate import Sparsifier, num_selected
from sparsify.bucket import Gradients
from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback, Forget
from sparsify.select import FirstK, Place, RandomK, TopK

PLACE = Place(seed=0, rank=0, bucket=0)


@pytest.mark.parametrize("k", [1, 7, 100])
@pytest.mark.parametrize("selector", [TopK(), RandomK(), FirstK()])
def test_indices_are_distinct_and_in_range(selector: TopK | RandomK | FirstK, k: int) -> None:
    acc = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        chosen = selector.select(acc, k, selector.init(acc, PLACE))
        assert chosen.shape == (k,)
        assert len(chosen.unique()) == k
        assert chosen.min() >= 0
        assert chosen.max() < 100


def test_topk_takes_the_largest_magnitudes() -> None:
    acc = torch.tensor([0.1, -5.0, 3.0, -0.2, 4.0])
    assert set(TopK().select(acc, 3, None).tolist()) == {1, 2, 4}


def test_randomk_is_uniform_and_differs_between_ranks_and_buckets() -> None:
    acc, draws = torch.zeros(20), torch.zeros(20)
    state = RandomK().init(acc, PLACE)
    for _ in range(2000):
        draws[RandomK().select(acc, 5, state)] += 1
    # 2000 draws of 5 from 20: 500 each, standard deviation 19; six of them is one in 10^8
    assert (draws - 500).abs().max() < 6 * 19.4
    places = [Place(0, 0, 0), Place(0, 1, 0), Place(0, 0, 1), Place(1, 0, 0)]
    states = [RandomK().init(acc, place) for place in places]
    orders = {tuple(RandomK().select(acc, 20, state).tolist()) for state in states}
    assert len(orders) == 4


def test_error_feedback_owes_what_was_not_delivered() -> None:
    feedback, grad = ErrorFeedback(), torch.tensor([1.0, 2.0, 3.0])
    residual = feedback.init(grad)
    feedback.accumulate(grad, residual)
    feedback.retain(torch.tensor([2]), residual)
    assert feedback.accumulate(grad, residual).tolist() == [2.0, 4.0, 3.0]
    assert grad.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("n", "density", "k"),
    [
        (14_728_266, 0.001, 14_728),
        (14_728_266, 0.015625, 230_129),
        (14_728_266, 0.004, 58_913),
        (64, 0.001, 1),
    ],
)
def test_k_is_the_published_one(n: int, density: float, k: int) -> None:
    """Counts from the authors' logs: hclhkbu/GaussianK-SGD prints them."""
    assert num_selected(n, density) == k


def test_an_empty_bucket_selects_nothing() -> None:
    assert num_selected(0, 0.5) == 0


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_density_out_of_range_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        sparsify.build("topk", density=density)


def test_parts_that_do_not_fit_are_refused_at_construction() -> None:
    class NeedsShared(AllGather):
        needs_shared = True

    with pytest.raises(ValueError, match="TopK each picks its own"):
        Sparsifier(0.1, TopK(), Forget(), NeedsShared())
    Sparsifier(0.1, FirstK(), Forget(), NeedsShared())


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'topk'.*there are: .*dense"):
        sparsify.build("topq")
    with pytest.raises(ValueError, match=r"did you mean 'density'.*it has: density=0.001"):
        sparsify.build("topk", densty=0.1)


def test_warmup_is_a_lower_bound_of_the_density() -> None:
    method = sparsify.build("topk", density=0.01, density_warmup=[0.015625, 0.004])
    assert [method.density_at(epoch) for epoch in range(3)] == [0.015625, 0.01, 0.01]


def bucketed(*shapes: tuple[int, ...]) -> Gradients:
    return Gradients([(f"p{i}", Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)], "global")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_tensor_with_a_gradient_that_is_not_finite_is_named(bad: float) -> None:
    gradients = bucketed((3, 2), (4,), (0,), (5,))
    assert gradients.nonfinite(gradients.finite()) is None
    p1 = gradients.parameters[2][1]
    assert p1.grad is not None
    p1.grad[3] = bad
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


def test_mixed_kinds_of_parameters_are_refused() -> None:
    mixed = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1, dtype=torch.float64)))]
    with pytest.raises(ValueError, match=r"float32.*float64"):
        Gradients(mixed, "global")
