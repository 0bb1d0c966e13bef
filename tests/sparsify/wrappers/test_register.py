"""The hook that `register` puts into DistributedDataParallel, beside what wrappers have in common."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsify
from sparsify.wrappers.ddp import DDPHook
from sparsify.wrappers.engine import NonFiniteGradientError
from tests.conftest import there
from tests.sparsify import laws
from tests.sparsify.wrappers.test_refused import TOPK, ignore, sgd
from tests.sparsify.wrappers.user_acts import REGISTER, SCOPES, Act, Training, loss_of, net, weights

pytestmark = pytest.mark.usefixtures("group_of_one")


def registered(name: str = "topk", **choices: Any) -> tuple[DistributedDataParallel, DDPHook]:
    ddp = DistributedDataParallel(net())
    return ddp, sparsify.register(ddp, laws.build(name, 0.1, **choices), sgd(ddp))


def step(ddp: nn.Module, hook: DDPHook, number: int = 0) -> None:
    optimizer = there(hook.optimizer)
    optimizer.zero_grad()
    loss_of(ddp, 0, number).backward()
    optimizer.step()


def linears(bucket_mb: float = 0.0005) -> DistributedDataParallel:
    """Return a model of twenty small layers, in a few buckets."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb)


def test_what_ddp_ignores_is_left_alone() -> None:
    model = net()
    ignore(model, "output.bias")
    ddp = DistributedDataParallel(model)
    hook = sparsify.register(ddp, TOPK, sgd(model))
    model.output.bias.grad = torch.zeros(3).double()
    step(ddp, hook)
    others = [p for p in model.parameters() if p is not model.output.bias]
    assert there(hook.last_report).num_elements == sum(p.numel() for p in others)
    assert hook.steps == 1


@pytest.mark.parametrize(
    "scaler", [None, torch.amp.GradScaler("cpu", enabled=False)], ids=["none", "disabled"]
)
def test_a_nan_stops_before_anything_is_delivered(scaler: torch.amp.GradScaler | None) -> None:
    """In the last bucket that gets full, too."""
    training = Training(Act(options={"scaler": scaler}), REGISTER[0], 0)
    training.advance(0)
    before = training.owed()
    training.model.convolution.weight.register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(NonFiniteGradientError, match=r"rank 0, step 1: the gradient of convolution\.weight"):
        training.advance(1)
    torch.testing.assert_close(training.owed(), before, rtol=0, atol=0)


def test_an_optimizer_with_a_closure_works() -> None:
    ends = []
    for is_registered in (False, True):
        model = called = net()
        if is_registered:
            called = DistributedDataParallel(model)
            sparsify.register(called, sparsify.topk(density=1.0, scope="layer", feedback="none"))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure(optimizer: Any = optimizer, called: Any = called) -> float:
            optimizer.zero_grad()
            loss = loss_of(called, 0, 0)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_a_model_with_a_hook_is_copied_and_saved_like_another(tmp_path: Path) -> None:
    ddp, hook = registered()
    step(ddp, hook)
    torch.save(ddp, tmp_path / "model.pt")
    for other in (copy.deepcopy(ddp), torch.load(tmp_path / "model.pt", weights_only=False)):
        again = sparsify.register(other, hook.method, sgd(other))
        step(other, again)
        assert again.steps == 1
    assert hook.steps == 1


def test_collectives_are_as_many_as_buckets_of_ddp_and_one_for_the_check() -> None:
    for scope in SCOPES:
        for overlap in (False, True) if scope in ("layer", "bucket") else (False,):
            ddp = linears()
            hook = sparsify.register(ddp, laws.build("topk", 0.1, scope), overlap=overlap)
            for _ in range(3):
                before = hook.engine.comm.collectives
                ddp(torch.ones(2, 4)).sum().backward()
                collectives = hook.engine.comm.collectives - before
            buckets = len(hook._layout_by_index)
            assert 1 < buckets < 20
            assert collectives <= (2 * buckets if overlap else buckets + 1), (scope, overlap)


def test_k_is_that_of_each_bucket_of_ddp() -> None:
    """And not of each tensor: of 16 and 4 elements these are 4 and 1, of both together 6."""
    ddp = linears()
    hook = sparsify.register(ddp, sparsify.build("topk", density=0.3, scope="bucket"))
    for _ in range(3):
        ddp(torch.randn(2, 4)).sum().backward()
    sizes = [sum(known.sizes) for known in hook._layout_by_index.values()]
    assert there(hook.last_report).selected == sum(int(0.3 * n) for n in sizes) == 120


def test_only_tensors_of_one_type_share_a_bucket() -> None:
    model = net()
    model.output.float()
    hook = sparsify.register(DistributedDataParallel(model), TOPK)
    assert [cast(Any, bucket).flat.dtype for bucket in hook.engine.buckets].count(torch.float32) == 2
