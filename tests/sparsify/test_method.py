"""Composition: k, density, parts that fit and parts that do not."""

from __future__ import annotations

import pytest

import sparsify
from sparsify.exchange import AllGather, AllReduce
from sparsify.feedback import NoFeedback
from sparsify.method import Method, Sparsifier
from sparsify.methods import per_step_names
from sparsify.methods.hardthreshold import HardThreshold
from sparsify.select import FirstK, TopK
from sparsify.types import num_selected


@pytest.mark.parametrize(
    ("n", "density", "k"),
    [
        (14_728_266, 0.001, 14_728),
        (14_728_266, 0.015625, 230_129),
        (14_728_266, 0.004, 58_913),
        (64, 0.001, 1),
        (0, 0.5, 0),
    ],
)
def test_k_is_the_published_one(n: int, density: float, k: int) -> None:
    """Counts from the authors' logs: hclhkbu/GaussianK-SGD prints them."""
    assert num_selected(n, density) == k


def test_parts_that_do_not_fit_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="TopK each picks its own"):
        Sparsifier(0.1, TopK(), NoFeedback(), AllReduce())
    with pytest.raises(ValueError, match="RandomK each picks its own"):
        sparsify.build("randomk", exchange="allreduce")
    with pytest.raises(ValueError, match=r"AllGather expects the same number .* with HardThreshold"):
        Sparsifier(0.1, HardThreshold(1.0), NoFeedback(), AllGather())
    with pytest.raises(ValueError, match=r"unbiased=True .* with error feedback"):
        sparsify.build("randomk", unbiased=True, feedback="gradient")
    with pytest.raises(ValueError, match="packed=False is the published form"):
        sparsify.build("topk", packed=False, index="int64")
    Sparsifier(0.1, FirstK(), NoFeedback(), AllReduce())


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'topk'.*there are: .*dense"):
        sparsify.build("topq")
    with pytest.raises(ValueError, match=r"did you mean 'density'.*it has: density=0.001"):
        sparsify.build("topk", densty=0.1)


def test_warmup_is_a_lower_bound_of_the_density() -> None:
    method = sparsify.build("topk", density=0.01, density_warmup=[0.015625, 0.004])
    assert [method.density_at(epoch) for epoch in range(3)] == [0.015625, 0.01, 0.01]


def test_a_wrapped_method_is_asked_like_the_one_inside() -> None:
    """A loop learns the same of DGC whether or not its vectors are dense."""
    choice = {"clip_norm": 1.0, "density_warmup": [0.25, 0.1]}
    wrapped, plain = (sparsify.build("dgc", dense_vectors=dense, **choice) for dense in (True, False))
    for asked in (
        "scope",
        "applies_momentum",
        "needs_lr",
        "needs_pass_over_all_gradients",
        "num_density_warmup_epochs",
    ):
        assert getattr(wrapped, asked) == getattr(plain, asked), asked
    assert wrapped.needs_pass_over_all_gradients
    assert wrapped.applies_momentum
    assert not sparsify.build("dgc", momentum=0.0).applies_momentum
    assert wrapped.num_density_warmup_epochs == 2


def test_methods_of_every_step_are_all_but_the_strategies_of_local_steps() -> None:
    """Stable Top-K among them, whose `every` is of another kind: no law leaves it out."""
    assert per_step_names() == [name for name in sparsify.names() if isinstance(sparsify.build(name), Method)]


def test_feedback_in_the_domain_of_the_rate_needs_the_rate() -> None:
    for name in ("topk", "qsgd", "powersgd", "efsignsgd"):
        assert sparsify.build(name, feedback="learning_rate").needs_lr
        assert not sparsify.build(name, feedback="gradient").needs_lr
