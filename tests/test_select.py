"""Selectors, feedback and composition, part by part."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import sparsify
from sparsify import feedback as feedbacks
from sparsify.aggregate import Sparsifier, num_selected
from sparsify.aggregator import Aggregator, check_unchanged
from sparsify.bucket import Gradients
from sparsify.exchange import AllGather, AllReduce
from sparsify.feedback import ErrorFeedback, Forget, LowPass, MomentumCorrection
from sparsify.parts import Delivery, Place, Sparse
from sparsify.select import BlockRandomK, FirstK, RandomK, Selector, TopK, Union
from tests.laws import live, mass

PLACE = Place(seed=0, rank=0, bucket=0)


SELECTORS = [
    TopK(), RandomK(), RandomK(shared=True), RandomK(sampling="permutation"), BlockRandomK(),
    BlockRandomK(aligned=True), FirstK(), Union(TopK()),
]  # fmt: skip


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


def choose(selector: Selector, acc: torch.Tensor, k: int, state: object) -> torch.Tensor:
    return selector.select(acc, k, Alone(), state).indices


@pytest.mark.parametrize("k", [1, 7, 100])
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_indices_are_distinct_and_in_range(selector: Selector, k: int) -> None:
    acc = torch.randn(100, generator=torch.Generator().manual_seed(0))
    state = selector.init(acc, PLACE)
    for _ in range(3):
        chosen = choose(selector, acc, k, state)
        assert chosen.shape == (k,)
        assert len(chosen.unique()) == k
        assert chosen.min() >= 0
        assert chosen.max() < 100


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_more_than_there_is_is_refused(selector: Selector) -> None:
    acc = torch.ones(10)
    with pytest.raises(ValueError, match="k=11 elements can't be chosen of 10"):
        choose(selector, acc, 11, selector.init(acc, PLACE))


def test_topk_takes_the_largest_magnitudes() -> None:
    acc = torch.tensor([0.1, -5.0, 3.0, -0.2, 4.0])
    assert set(choose(TopK(), acc, 3, TopK().init(acc, PLACE)).tolist()) == {1, 2, 4}


@pytest.mark.parametrize("sampling", ["hash", "permutation"])
def test_randomk_is_uniform_and_differs_between_ranks_and_buckets(sampling: str) -> None:
    acc, draws, selector = torch.zeros(20), torch.zeros(20), RandomK(sampling=sampling)
    state = selector.init(acc, PLACE)
    for _ in range(2000):
        draws[choose(selector, acc, 5, state)] += 1
    # 2000 draws of 5 from 20: 500 each, standard deviation 19; six of them is one in 10^8
    assert (draws - 500).abs().max() < 6 * 19.4
    places = [Place(0, 0, 0), Place(0, 1, 0), Place(0, 0, 1), Place(1, 0, 0)]
    states = [selector.init(acc, place) for place in places]
    orders = {tuple(choose(selector, acc, 20, state).tolist()) for state in states}
    assert len(orders) == 4


@pytest.mark.parametrize("selector", [RandomK(shared=True), BlockRandomK(shared=True)], ids=repr)
def test_a_shared_seed_draws_alike_on_all_ranks_and_anew_in_every_step(selector: Selector) -> None:
    acc = torch.zeros(1000)
    states = [selector.init(acc, Place(0, rank, 0)) for rank in range(2)]
    drawn = [[choose(selector, acc, 10, state).tolist() for _ in range(3)] for state in states]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1] != drawn[0][2]


def test_blocks_wrap_around_the_end_or_keep_to_their_grid() -> None:
    acc = torch.zeros(10)
    wrapping, aligned = BlockRandomK(), BlockRandomK(aligned=True)
    starts: dict[bool, set[int]] = {False: set(), True: set()}
    for selector in (wrapping, aligned):
        state = selector.init(acc, PLACE)
        for _ in range(200):
            chosen = choose(selector, acc, 4, state).tolist()
            assert chosen == [(chosen[0] + i) % 10 for i in range(4)]
            starts[selector.aligned].add(chosen[0])
    assert starts == {False: set(range(10)), True: {0, 4}}  # aligned: 8 and 9 are never chosen


def sparse(*pairs: tuple[int, float]) -> Sparse:
    indices, values = zip(*pairs, strict=True)
    return Sparse(torch.tensor(indices), torch.tensor(values))


def delivery(*pairs: tuple[int, float]) -> Delivery:
    return Delivery([], [sparse(*pairs)], 0)


def test_error_feedback_owes_what_was_not_delivered() -> None:
    feedback, grad = ErrorFeedback(), torch.tensor([1.0, 2.0, 3.0])
    residual = feedback.init(grad)
    feedback.accumulate(grad, 1.0, residual)
    feedback.retain(delivery((2, 3.0)), residual)
    assert feedback.accumulate(grad, 1.0, residual).tolist() == [2.0, 4.0, 3.0]
    assert grad.tolist() == [1.0, 2.0, 3.0]


def test_what_rounding_took_away_is_owed_too() -> None:
    feedback, grad = ErrorFeedback(), torch.tensor([1.0, 2.0])
    residual = feedback.init(grad)
    feedback.accumulate(grad, 1.0, residual)
    feedback.retain(delivery((1, 1.75)), residual)
    assert residual.tolist() == [1.0, 0.25]


def test_the_two_domains_differ_when_the_learning_rate_decays() -> None:
    """A residual left at rate 1 counts at 1 in the learning-rate domain, and at 0.1 in the gradient's."""
    grad, rates = torch.tensor([1.0]), (1.0, 0.1)
    steps: dict[str, float] = {}
    for name in ("gradient", "learning_rate"):
        feedback = feedbacks.named(name)
        state = feedback.init(grad)
        feedback.accumulate(grad, rates[0], state)  # nothing delivered
        feedback.retain(Delivery([], [], 0), state)
        steps[name] = rates[1] * feedback.accumulate(grad, rates[1], state).item()
    assert steps["gradient"] == pytest.approx(0.1 * 2)
    assert steps["learning_rate"] == pytest.approx(1.0 + 0.1)


def test_the_learning_rate_domain_needs_a_learning_rate() -> None:
    feedback = feedbacks.named("learning_rate")
    with pytest.raises(ValueError, match=r"lr=0.0; keep the rate above 0"):
        feedback.accumulate(torch.ones(1), 0.0, feedback.init(torch.ones(1)))


def test_the_low_pass_filter_keeps_a_share_of_what_is_new() -> None:
    feedback = LowPass(beta=0.25)
    state = feedback.init(torch.zeros(2))
    state.residual.copy_(torch.tensor([4.0, 4.0]))
    acc = feedback.accumulate(torch.tensor([8.0, 8.0]), 1.0, state)
    assert acc.tolist() == [12.0, 12.0]
    feedback.retain(delivery((1, 12.0)), state)
    assert state.residual.tolist() == [0.75 * 4 + 0.25 * 12, 0.75 * 4]


def test_momentum_correction_masks_both_memories() -> None:
    feedback = MomentumCorrection(0.5)
    state = feedback.init(torch.zeros(2))
    for _ in range(2):
        acc = feedback.accumulate(torch.tensor([1.0, 1.0]), 1.0, state)
    assert acc.tolist() == [2.5, 2.5]  # u: 1, 1.5
    feedback.retain(delivery((0, 2.5)), state)
    assert state.residual.tolist() == [0.0, 2.5]
    assert state.momentum.tolist() == [0.0, 1.5]


def test_unbiased_random_k_has_the_gradient_as_its_mean() -> None:
    method = sparsify.build("randomk", density=0.25, unbiased=True)
    lived = live(method, 2, steps=400, make=lambda *where: torch.arange(8.0).double(), shapes=[(8,)])
    mean = torch.stack(lived[0].updates).mean(dim=0)
    # Each of 800 draws gives 4 g with probability 1/4: standard error of the mean sqrt(3 / 800) g
    torch.testing.assert_close(mean, torch.arange(8.0).double(), rtol=6 * (3 / 800) ** 0.5, atol=0)


def test_algorithm_1_of_eghlidi_and_jaggi_read_literally_overshoots_and_takes_it_back() -> None:
    """Its line 9 does not average, so the first update is P times the one of the text's reading; its line 11
    leaves everybody else's selection, negative, in each residual. Altogether nothing is lost.
    """
    size = 4
    literal, text = (sparsify.build("topk", density=0.05, feedback=f) for f in ("literal", "learning_rate"))
    torch.testing.assert_close(*mass(live(literal, size, steps=10)), rtol=1e-9, atol=1e-9)
    ours, theirs = live(text, size, steps=1), live(literal, size, steps=1)
    torch.testing.assert_close(theirs[0].updates[0], size * ours[0].updates[0])
    sent_by_all = theirs[0].updates[0]
    for one in theirs:
        torch.testing.assert_close(one.residual, one.gradients[0] - sent_by_all)


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
    with pytest.raises(ValueError, match="must lie in"):
        sparsify.build("dgc", density_warmup=[0.25, density])


def test_a_bucket_that_is_not_the_one_whose_state_is_kept_is_refused() -> None:
    like = torch.zeros(4)
    check_unchanged(torch.ones(4), like, "conv.weight")
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.float64), torch.zeros(4, device="meta")):
        with pytest.raises(ValueError, match=r"bucket conv.weight was \(4,\) .* build the state anew"):
            check_unchanged(other, like, "conv.weight")


def test_parts_that_do_not_fit_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="TopK each picks its own"):
        Sparsifier(0.1, TopK(), Forget(), AllReduce())
    with pytest.raises(ValueError, match="RandomK each picks its own"):
        sparsify.build("randomk", exchange="allreduce")
    with pytest.raises(ValueError, match=r"AllGather expects the same number .* with Union"):
        Sparsifier(0.1, Union(TopK()), Forget(), AllGather())
    with pytest.raises(ValueError, match=r"unbiased=True .* with error feedback"):
        sparsify.build("randomk", unbiased=True, feedback="gradient")
    with pytest.raises(ValueError, match="packed=False is the published form"):
        sparsify.build("topk", packed=False, index="int64")
    Sparsifier(0.1, FirstK(), Forget(), AllReduce())
    Sparsifier(0.1, Union(TopK()), ErrorFeedback(), AllReduce())


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (
            {"feedback": "momentum"},
            "no feedback 'momentum'; there are: gradient, learning_rate, literal, none",
        ),
        ({"index": "int8"}, "no index encoding 'int8'; there are: int32, int64, delta16"),
        ({"value": "fp8"}, "no value type 'fp8'; there are: as_is, fp32, bf16, fp16"),
        ({"scope": "block"}, "no scope 'block'; there are: global, layer, or a bucket size in MB"),
        ({"scope": -1.0}, "scope=-1.0 is out of range"),
    ],
)
def test_a_choice_that_there_is_not_is_answered_with_those_there_are(choice: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sparsify.build("topk", **choice)


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


def test_buckets_of_a_size_hold_tensors_in_a_row() -> None:
    shapes = [(100,), (7, 3), (500,), (20,), (30,)]
    parameters = [(f"p{i}", Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    gradients = Gradients(parameters, 4 * 150 / 2**20)  # 150 elements of 4 bytes
    assert [bucket.names for bucket in gradients.buckets] == [("p4", "p3"), ("p2",), ("p1", "p0")]
    assert [bucket.flat.numel() for bucket in gradients.buckets] == [50, 500, 121]
    assert gradients.buckets[2].shapes == ((7, 3), (100,))


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


def test_a_model_without_gradients_is_refused() -> None:
    frozen = Parameter(torch.zeros(3), requires_grad=False)
    for parameters, sentence in (
        ([("p", frozen)], "no parameter requires"),
        ([("p", Parameter(torch.zeros(0)))], "empty"),
    ):
        with pytest.raises(ValueError, match=f"nothing to aggregate: .*{sentence}"):
            Aggregator(sparsify.build("dense"), parameters, Alone())


def test_mixed_kinds_of_parameters_are_refused() -> None:
    mixed = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1, dtype=torch.float64)))]
    with pytest.raises(ValueError, match=r"float32.*float64"):
        Gradients(mixed, "global")
