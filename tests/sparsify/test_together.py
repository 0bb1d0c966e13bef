"""Buckets that are searched together, by whatever kernel does that: the result is that of one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify.core.bucket import Gradients
from sparsify.doors.aggregator import Aggregator
from sparsify.kernels import kernel_for
from sparsify.types import SearchStats, Sparse
from tests.sparsify.laws import ALONE, METHODS, build, live, searching


class OneByOne:
    """What a joint kernel promises, done by the kernel of each bucket."""

    name = "one by one"

    def __init__(self, likes: Sequence[Tensor]) -> None:
        self.kernels = [kernel_for(like, searching(like.dtype)) for like in likes]

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor | None], ks: Sequence[int]) -> list[Sparse]:
        buckets = zip(self.kernels, accs, grads, ks, strict=True)
        return [kernel.topk(acc, grad, k) for kernel, acc, grad, k in buckets]

    def stats(self) -> SearchStats:
        return sum((kernel.stats() for kernel in self.kernels), SearchStats())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[OneByOne]:
    """Joint kernels, of which there is one for any two buckets from now on."""
    found: list[OneByOne] = []

    def joint_kernel_for(likes: Sequence[Tensor], choice: str) -> OneByOne | None:
        found.append(OneByOne(likes))
        return found[-1]

    monkeypatch.setattr("sparsify.method.joint_kernel_for", joint_kernel_for)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_searching_together_changes_no_result(name: str, made: list[OneByOne]) -> None:
    """Residuals, waits and bytes included; with warm-up, momentum or clipping, where a method has it."""
    together = live(build(name, clip_norm=1.0), 3, steps=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsify.method.joint_kernel_for", lambda likes, select: None)
        alone = live(build(name, clip_norm=1.0), 3, steps=4)
    for ours, theirs in zip(together, alone, strict=True):
        assert all(map(torch.equal, ours.updates, theirs.updates))
        assert torch.equal(ours.residual, theirs.residual)
        assert (ours.selected, ours.wire_bytes, ours.host_syncs) == (
            theirs.selected, theirs.wire_bytes, theirs.host_syncs,
        )  # fmt: skip
    assert all(kernel.stats().steps == 4 * 4 for kernel in made)  # steps, buckets
    assert len(made) == (3 if name in ("topk", "gtopk", "sparcml") else 0)


@pytest.mark.parametrize("feedback", ["gradient", "learning_rate", "none"])
def test_every_bucket_has_its_own_rate_and_large_ones_are_left_out(
    feedback: str, made: list[OneByOne], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsify.method.TOGETHER_UP_TO", 50)
    updates = []
    for is_together in (True, False):
        named = [(f"p{n}", Parameter(torch.zeros(n))) for n in (40, 60, 50, 8)]
        aggregator = Aggregator(build("topk", 0.1, "layer", feedback=feedback), named, ALONE, select="torch")
        if not is_together:
            aggregator.joint = None
        for step in range(3):
            own = torch.Generator().manual_seed(step)
            aggregator.gradients.flat.copy_(torch.randn(aggregator.gradients.flat.shape, generator=own))
            aggregator.aggregate(lr=[0.1, 0.0, 0.2 * step, 0.3])
        updates.append(contents(aggregator.gradients))
        names = {name: stats.steps for name, stats in aggregator.searching().items()}
        assert names == ({"one by one": 9, "torch": 3} if is_together else {"torch": 12})
    assert torch.equal(*updates)


def contents(gradients: Gradients) -> Tensor:
    return torch.cat(gradients.views)
