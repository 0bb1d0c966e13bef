"""Gradients are averaged once: by whom else they could be, and when nobody would train anything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import sparsify
from sparsify.comm import virtual
from sparsify.doors import toll
from sparsify.doors.aggregator import Aggregator
from sparsify.doors.averages import EQUAL_STEPS
from tests.sparsify.doors import uses
from tests.sparsify.doors.uses_ddp import Heads, loss_of_heads

Called = tuple[nn.Module, torch.optim.Optimizer]  # what is trained through, and the optimiser


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def distribute(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    method = sparsify.topk(density=0.1, scope="layer")
    return sparsify.distribute(sgd(model), model, method, **options)


def registered(model: nn.Module) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model)
    sparsify.register(ddp, sparsify.build("topk", density=0.1, scope="layer"))
    return ddp


def wrapped_later(**options: Any) -> Called:
    model = uses.net()
    optimiser = distribute(model)
    return DistributedDataParallel(model, **options), optimiser


def overlapped() -> Called:
    model = uses.net()
    optimiser = distribute(model, overlap=True)
    return DistributedDataParallel(model), optimiser


def wrapped_before() -> Called:
    ddp = DistributedDataParallel(uses.net())
    return ddp, distribute(ddp.module)


def a_part_of_it() -> Called:
    model = uses.net()
    optimiser = distribute(model)
    model.add_module("output", DistributedDataParallel(model.output))
    return model, optimiser


def replicated_later() -> Called:
    model = uses.net()
    optimiser = distribute(model)
    replicate(model)
    return model, optimiser


def replicated_before() -> Called:
    model = replicate(uses.net())
    return model, distribute(model)


def at_both_doors() -> Called:
    ddp = registered(uses.net())
    return ddp, distribute(ddp.module)


def a_ddp_around_a_registered_one() -> Called:
    ddp = registered(uses.net())
    return DistributedDataParallel(ddp), sgd(ddp)


def a_registered_model_replicated() -> Called:
    ddp = registered(uses.net())
    replicate(ddp.module)
    return ddp, sgd(ddp)


def sharded_later() -> Called:
    model = uses.net()
    optimiser = distribute(model)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    return model, optimiser


def flattened_later(**options: Any) -> Called:
    model = uses.net()
    optimiser = distribute(model)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options), optimiser


def a_layer_replaced() -> Called:
    """As adapters do, or quantisation."""
    model = uses.net()
    optimiser = distribute(model)
    model.convolution.requires_grad_(False)
    model.output = nn.Linear(16, 3).double()
    return model, optimiser


TWICE = "averages these gradients too, so they travel twice.*train the model itself .`ddp.module`"
TAKEN = "no gradient came, for the model has other parameters than when it was wrapped, such as"
SHARDED = "has sharded this model since.*train the model itself"
REFUSED: dict[str, tuple[Callable[[], Called], str]] = {
    "a ddp, later": (wrapped_later, TWICE),
    "its buckets are the gradients": (lambda: wrapped_later(gradient_as_bucket_view=True), TWICE),
    "parts may be unused": (lambda: wrapped_later(find_unused_parameters=True), TWICE),
    "a ddp, before": (wrapped_before, TWICE),
    "a ddp, overlapped": (overlapped, TWICE),
    "a ddp of a part": (a_part_of_it, TWICE),
    "replicated, later": (replicated_later, TWICE),
    "replicated, before": (replicated_before, TWICE),
    "both doors": (at_both_doors, TWICE),
    "registered, and a ddp around it": (a_ddp_around_a_registered_one, TWICE),
    "registered, and replicated": (a_registered_model_replicated, TWICE),
    "sharded": (sharded_later, TAKEN),
    "flattened": (flattened_later, TAKEN),
    "sharded in place": (
        lambda: flattened_later(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD), SHARDED
    ),
    "a layer replaced": (a_layer_replaced, TAKEN),
}  # fmt: skip


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("use", REFUSED)
@pytest.mark.filterwarnings("ignore")  # of what torch deprecates
def test_what_averages_or_shards_besides_is_refused_in_the_first_step(use: str) -> None:
    does, sentence = REFUSED[use]
    called, optimiser = does()
    before = uses.weights(called)
    with pytest.raises(ValueError, match=sentence) as caught:
        step(called, optimiser)
    assert len(str(caught.value)) < 350
    assert all(torch.equal(before[name], p) for name, p in uses.weights(called).items())


def step(called: nn.Module, optimiser: torch.optim.Optimizer, at: int = 0) -> None:
    uses.loss_of(called, 0, at).backward()
    optimiser.step()


@pytest.mark.usefixtures("group_of_one")
def test_a_static_graph_is_refused_in_the_second_step() -> None:
    """In the first one its DistributedDataParallel writes nothing down."""
    called, optimiser = wrapped_later(static_graph=True)
    step(called, optimiser)
    with pytest.raises(ValueError, match=TWICE):
        step(called, optimiser, 1)


@pytest.mark.usefixtures("group_of_one")
def test_a_ddp_that_does_not_average_these_gradients_is_no_matter() -> None:
    """Nobody trains through it, or it does not synchronise, or only evaluates, or is another model's."""
    ddp = DistributedDataParallel(uses.net())
    uses.loss_of(ddp, 0, 0).backward()  # before it matters
    optimiser, model = distribute(ddp.module), ddp.module
    other = DistributedDataParallel(uses.net(1))
    for at in range(2):
        step(model, optimiser, at)
        with ddp.no_sync():
            step(ddp, optimiser, at)
        with torch.no_grad():
            uses.loss_of(ddp, 0, at)
        uses.loss_of(other, 0, at).backward()
        step(model, optimiser, at)
    with pytest.raises(ValueError, match=TWICE):
        step(ddp, optimiser)
    optimiser.zero_grad()
    step(model, optimiser)


@pytest.mark.usefixtures("group_of_one")
def test_a_ddp_that_is_told_to_ignore_these_parameters_is_no_matter() -> None:
    model = Heads().double()
    mine = [name for name, _ in model.named_parameters() if name.startswith("output")]
    inner = torch.optim.SGD([dict(model.named_parameters())[name] for name in mine], lr=0.1)
    method = sparsify.build("topk", density=0.1, scope="layer")
    optimiser = sparsify.distribute(inner, model, method)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, mine)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for at in range(2):
        loss_of_heads(ddp, 0, at + 1).backward()
        optimiser.step()


@pytest.mark.usefixtures("group_of_one")
def test_an_optimiser_that_hides_another_one_is_refused() -> None:
    model = uses.net()
    hiding = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=2))
    with pytest.raises(ValueError, match="PostLocalSGDOptimizer hides another optimiser"):
        sparsify.distribute(hiding, model, sparsify.build("topk"))


@pytest.mark.parametrize("averages", [True, False])
def test_gradients_that_are_the_same_everywhere_are_told_once_by_rank_0(
    averages: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody averaged them of whom nobody knows, such as the loop itself."""
    caplog.set_level(logging.ERROR, toll.__name__)  # of such a small model averaging takes most of a step

    def body(comm: virtual.VirtualComm) -> None:
        model = uses.net()
        optimiser = distribute(model, comm=comm)
        for at in range(2 * EQUAL_STEPS):
            assert len(caplog.messages) == (averages and at >= EQUAL_STEPS)
            optimiser.zero_grad()
            uses.loss_of(model, comm.rank, at).backward()
            for p in model.parameters():
                if averages and p.grad is not None:
                    comm.all_reduce(p.grad).div_(comm.size)
            optimiser.step()

    with caplog.at_level(logging.WARNING):
        virtual.run(2, body)
    told = "the same gradients, to the bit, in 20 steps in a row; either something averages them before"
    assert [told in message for message in caplog.messages] == [True] * averages


@pytest.mark.parametrize(("looks", "differs"), [(1, None), (4, None), (1, 0), (4, 0), (4, 3)])
def test_steps_are_counted_however_often_their_gradients_are_looked_at(
    looks: int, differs: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """With overlap, and under a sharded model, a step is looked at part by part, of which one may differ."""

    def body(comm: virtual.VirtualComm) -> None:
        method = sparsify.build("topk", density=0.5)
        aggregator = Aggregator(method, uses.net().named_parameters(), comm)
        for step in range(2 * EQUAL_STEPS):
            assert len(caplog.messages) == (differs is None and step >= EQUAL_STEPS)
            for look in range(looks):
                gradient = torch.ones(3) + comm.rank * (look == differs)
                aggregator.agree([gradient], ["a tensor"], [3], None)
            aggregator.step += 1

    with caplog.at_level(logging.WARNING):
        virtual.run(2, body)
    assert len(caplog.messages) == (differs is None)
