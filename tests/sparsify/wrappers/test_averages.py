"""Gradients are averaged once: by whom else they could be, and when nobody would train anything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.wrappers import overhead
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.double_averaging import EQUAL_STEPS
from tests.sparsify.wrappers.test_refused import SHORT, TOPK, ignore, sgd
from tests.sparsify.wrappers.user_acts import Heads, loss_of, loss_of_heads, net, seeded, weights

Called = tuple[nn.Module, torch.optim.Optimizer]  # what is trained through, and the optimizer
Wrap = Callable[[Any], Any]


def averaging(model: nn.Module, **options: Any) -> Any:
    return sparsify.distribute(sgd(model), model, TOPK, **options)


def wrap_later(wrap: Wrap, **options: Any) -> Called:
    model = net()
    optimizer = averaging(model, **options)
    return wrap(model), optimizer


def wrap_before(wrap: Wrap) -> Called:
    called = wrap(net())
    return called, averaging(called.module if isinstance(called, DistributedDataParallel) else called)


def wrap_registered(wrap: Wrap) -> Called:
    ddp = register(net())
    return wrap(ddp), sgd(ddp)


def register(model: nn.Module) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model)
    sparsify.register(ddp, TOPK)
    return ddp


def wrap_a_part(model: Any) -> nn.Module:
    model.output = DistributedDataParallel(model.output)
    whole: nn.Module = model
    return whole


def replicate_inside(ddp: Any) -> nn.Module:
    replicate(ddp.module)
    whole: nn.Module = ddp
    return whole


def replace_a_layer(model: Any) -> nn.Module:
    """As adapters do, or quantisation."""
    model.convolution.requires_grad_(False)
    model.output = nn.Linear(16, 3).double()
    whole: nn.Module = model
    return whole


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    return model


FLATTENED = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
IN_PLACE = partial(FLATTENED, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
TWICE = "averages these gradients too, so they travel twice.*train the model itself .`ddp.module`"
TAKEN = "the model has other parameters than when it was wrapped, such as .*no gradient came for the old"
SHARDED = "has sharded this model since.*train the model itself"
VIEWS = partial(DistributedDataParallel, gradient_as_bucket_view=True)
UNUSED = partial(DistributedDataParallel, find_unused_parameters=True)
REFUSED: dict[str, tuple[Callable[[Wrap], Called], Wrap, str]] = {
    "a ddp, later": (wrap_later, DistributedDataParallel, TWICE),
    "its buckets are the gradients": (wrap_later, VIEWS, TWICE),
    "parts may be unused": (wrap_later, UNUSED, TWICE),
    "a ddp, overlapped": (partial(wrap_later, overlap=True), DistributedDataParallel, TWICE),
    "a ddp of a part": (wrap_later, wrap_a_part, TWICE),
    "replicated, later": (wrap_later, replicate, TWICE),
    "a ddp, before": (wrap_before, DistributedDataParallel, TWICE),
    "replicated, before": (wrap_before, replicate, TWICE),
    "both wrappers": (wrap_before, register, TWICE),
    "registered, and a ddp around it": (wrap_registered, DistributedDataParallel, TWICE),
    "registered, and replicated": (wrap_registered, replicate_inside, TWICE),
    "sharded": (wrap_later, shard, TAKEN),
    "flattened": (wrap_later, FLATTENED, TAKEN),
    "sharded in place": (wrap_later, IN_PLACE, SHARDED),
    "a layer replaced": (wrap_later, replace_a_layer, TAKEN),
}


def step(called: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    loss_of(called, 0, number).backward()
    optimizer.step()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore")  # of what torch deprecates
def test_what_averages_or_shards_besides_is_refused_in_the_first_step(case: str) -> None:
    make, wrap, sentence = REFUSED[case]
    called, optimizer = make(wrap)
    before = weights(called)
    with pytest.raises(ValueError, match=sentence) as caught:
        step(called, optimizer)
    assert len(str(caught.value)) < SHORT
    torch.testing.assert_close(weights(called), before, rtol=0, atol=0)


@pytest.mark.usefixtures("group_of_one")
def test_a_static_graph_is_refused_in_the_second_step() -> None:
    """In the first one its DistributedDataParallel writes nothing down."""
    called, optimizer = wrap_later(partial(DistributedDataParallel, static_graph=True))
    step(called, optimizer)
    with pytest.raises(ValueError, match=TWICE):
        step(called, optimizer, 1)


@pytest.mark.usefixtures("group_of_one")
def test_a_ddp_that_does_not_average_these_gradients_is_no_matter() -> None:
    """Nobody trains through it, or it does not synchronise, or only evaluates, or is another model's."""
    ddp = DistributedDataParallel(net())
    loss_of(ddp, 0, 0).backward()  # before it matters
    model, optimizer = ddp.module, averaging(ddp.module)
    other = DistributedDataParallel(net(1))
    for number in range(2):
        step(model, optimizer, number)
        with ddp.no_sync():
            step(ddp, optimizer, number)
        with torch.no_grad():
            loss_of(ddp, 0, number)
        loss_of(other, 0, number).backward()
        step(model, optimizer, number)
    with pytest.raises(ValueError, match=TWICE):
        step(ddp, optimizer)
    optimizer.zero_grad()
    step(model, optimizer)


@pytest.mark.usefixtures("group_of_one")
def test_a_ddp_that_is_told_to_ignore_these_parameters_is_no_matter() -> None:
    model = seeded(Heads)
    optimizer = sparsify.distribute(sgd(model.output), model, TOPK)
    ignore(model, "output.weight", "output.bias")
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for number in range(2):
        loss_of_heads(ddp, 0, number + 1).backward()
        optimizer.step()


EQUAL = "the same gradients, to the bit, in 20 steps in a row; either something averages them before"


@pytest.mark.parametrize("averages", [True, False])
def test_gradients_that_are_the_same_everywhere_are_told_once_by_rank_0(
    averages: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody averaged them of whom nobody knows, such as the loop itself."""
    caplog.set_level(logging.ERROR, overhead.__name__)  # of such a small model averaging takes most of a step

    def body(comm: Comm) -> None:
        model = net()
        optimizer = averaging(model, comm=comm)
        for number in range(2 * EQUAL_STEPS):
            assert len(caplog.messages) == (averages and number >= EQUAL_STEPS)
            optimizer.zero_grad()
            loss_of(model, comm.rank, number).backward()
            for p in model.parameters() if averages else ():
                comm.all_reduce(p.grad).div_(comm.size)
            optimizer.step()

    with caplog.at_level(logging.WARNING):
        virtual.run(2, body)
    assert [EQUAL in message for message in caplog.messages] == [True] * averages


@pytest.mark.parametrize(("looks", "differs"), [(1, None), (4, None), (1, 0), (4, 0), (4, 3)])
def test_steps_are_counted_however_often_their_gradients_are_looked_at(
    looks: int, differs: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """With overlap, and under a sharded model, a step is looked at part by part, of which one may differ."""

    def body(comm: Comm) -> None:
        aggregator = Aggregator(TOPK, net().named_parameters(), comm)
        for number in range(2 * EQUAL_STEPS):
            assert len(caplog.messages) == (differs is None and number >= EQUAL_STEPS)
            for look in range(looks):
                gradient = torch.ones(3) + comm.rank * (look == differs)
                aggregator.check_finite_and_find_used([gradient], ["a tensor"], [3], None)
            aggregator.step += 1

    with caplog.at_level(logging.WARNING):
        virtual.run(2, body)
    assert len(caplog.messages) == (differs is None)
