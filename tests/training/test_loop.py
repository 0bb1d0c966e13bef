"""The training loop: its clock, when it validates, and what it records of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import sparsify
from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.datasets import Dataset
from experiments.training.looks import CapturedEnergy
from experiments.training.settings import Train
from sparsify.comm import virtual
from sparsify.core import host_sync
from sparsify.core.timer import MODES, PhaseTimer
from sparsify.doors.aggregator import Aggregator
from tests.training.digits import CPU, Lines, trainer


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return datasets.load("digits", None, CPU)


def trained(data: Dataset, method: str = "topk", choices: Any = None, every: int = 1) -> list[Lines]:
    """The logs of two virtual ranks, with epochs of three steps."""
    train = Train(epoch_steps=3, validate_every=every)

    def body(comm: virtual.VirtualComm) -> Lines:
        torch.set_num_threads(1)
        log, timer = Lines(), PhaseTimer("production", comm.now)
        chosen = sparsify.build(method, **(choices or {}))
        trainer(comm, timer, chosen, log, data=data, steps=8, train=train).run()
        return log

    return virtual.run(2, body)


@pytest.mark.parametrize(
    ("every", "validated"), [(1, [(1, 3), (2, 6), (3, 8)]), (2, [(2, 6), (3, 8)]), (9, [(3, 8)])]
)
def test_validates_every_so_many_epochs_of_the_clock_and_at_the_end(
    digits: Dataset, every: int, validated: list[tuple[int, int]]
) -> None:
    log, other = trained(digits, every=every)
    epochs = log.of("epoch")
    assert [(line["epoch"], line["step"]) for line in epochs] == validated
    assert other.of("epoch") == []
    losses = [step["loss"] for step in log.of("step")]
    first = validated[0][1]  # a row's means are of all steps since the row before
    assert epochs[0]["train_loss"] == pytest.approx(sum(losses[:first]) / first)


def test_density_and_learning_rate_follow_the_clock(digits: Dataset) -> None:
    steps = trained(digits, choices={"density": 0.01, "density_warmup": [0.5]})[0].of("step")
    densities = [step["sent_density"] for step in steps]
    assert all(density > 0.49 for density in densities[:3])
    assert all(density < 0.011 for density in densities[3:])
    assert [step["epoch"] for step in steps] == [1, 1, 1, 2, 2, 2, 3, 3]
    task = TASKS.build("cnn_digits", {})
    assert [step["lr"] for step in steps] == [task.learning_rate(at, 3) for at in range(8)]


def test_an_epoch_records_the_energy_that_was_captured(digits: Dataset) -> None:
    def captured(method: str, **choices: Any) -> list[Any]:
        return [line["captured_energy"] for line in trained(digits, method, choices)[0].of("epoch")]

    assert captured("topk", density=1.0) == pytest.approx([1, 1, 1])
    few, more = (captured("topk", density=density) for density in (0.01, 0.1))
    assert all(0.01 < less < greater < 1 for less, greater in zip(few, more, strict=True))
    assert captured("dense") == [None, None, None]


@pytest.mark.parametrize("mode", MODES)
def test_norms_for_the_log_are_computed_between_steps_and_nobody_waits_for_them(
    digits: Dataset, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm reads all residuals: within a step it would be a part of the step's time."""
    norm, is_timed, seen = Aggregator.residual_norm, False, list[tuple[bool, int, type]]()

    class Timer(PhaseTimer):
        @contextmanager
        def step(self) -> Iterator[None]:
            nonlocal is_timed
            with super().step():
                is_timed = True
                yield
                is_timed = False

    def watched(self: Aggregator) -> Tensor:
        waits = host_sync.num_syncs()
        found = norm(self)
        seen.append((is_timed, host_sync.num_syncs() - waits, type(found)))
        return found

    def body(comm: virtual.VirtualComm) -> None:
        trainer(comm, Timer(mode, comm.now), "topk", data=digits, steps=3).run()

    monkeypatch.setattr(Aggregator, "residual_norm", watched)
    virtual.run(1, body)
    assert seen == 3 * [(False, 0, Tensor)]


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_what_is_not_captured_is_the_residual(scope: str) -> None:
    """||u||^2 = ||TopK(u)||^2 + ||residual||^2, over all buckets."""
    torch.manual_seed(0)
    parameters = [(name, Parameter(torch.zeros(n))) for name, n in (("a", 300), ("b", 500))]

    def body(comm: virtual.VirtualComm) -> tuple[float | None, Tensor, float]:
        aggregator = Aggregator(sparsify.build("topk", density=0.05, scope=scope), parameters, comm)
        owed = 0.0
        for _ in range(3):
            residuals = [aggregator.method.residual(state) for state in aggregator.states]
            aggregator.gradients.flat.normal_()
            buckets = zip(residuals, aggregator.gradients.buckets, strict=True)
            owed = sum(float((r + b.flat).double().square().sum()) for r, b in buckets if r is not None)
            aggregator.aggregate(watch=(watch := CapturedEnergy()))
        return watch.share(), aggregator.residual_norm(), owed

    [(share, left, owed)] = virtual.run(1, body)
    assert share == pytest.approx(1 - float(left) ** 2 / owed)


def test_images_that_are_held_out_are_not_trained_on(digits: Dataset) -> None:
    data = digits.holding_out(100)
    assert (len(data.train.labels), len(data.test.labels)) == (1337, 100)
    assert "100 training images held out" in data.name

    def rows(*splits: datasets.Split) -> list[bytes]:
        return sorted(image.numpy().tobytes() for split in splits for image in split.images)

    assert rows(data.train, data.test) == rows(digits.train)
    assert data.unseen is digits.test
    again = digits.holding_out(100)
    assert torch.equal(again.test.images, data.test.images)
    fewer = data.validated_on(100)
    assert fewer.unseen is not None
    assert (len(fewer.test.labels), len(fewer.unseen.labels)) == (100, 100), "tested on no more either"


def test_the_test_set_is_seen_once_at_the_end_where_images_were_held_out(digits: Dataset) -> None:
    first, _, last = trained(digits.holding_out(100))[0].of("epoch")
    assert "test_top1" not in first
    assert 0 <= last["test_top1"] <= 100
    assert last["test_top1"] != last["val_top1"]
    assert not any("test_top1" in line for line in trained(digits)[0].of("epoch"))


def test_holding_out_all_images_is_refused(digits: Dataset) -> None:
    with pytest.raises(ValueError, match=r"train.held_out=1437 leaves none of the 1437 training images"):
        digits.holding_out(1437)


def test_in_bf16_products_alone_are_short_and_a_training_goes_nearly_the_same_way(digits: Dataset) -> None:
    def body(comm: virtual.VirtualComm, mixed: bool) -> tuple[set[Any], set[Any], list[float]]:
        torch.set_num_threads(1)
        log, products = Lines(), set()
        one = trainer(
            comm, PhaseTimer("production", comm.now), "topk", log, data=digits, steps=6, mixed=mixed,
            train=Train(epoch_steps=6),
        )  # fmt: skip
        for layer in one.model.modules():
            if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
                layer.register_forward_hook(lambda layer, _, outs: products.add((layer.training, outs.dtype)))
        kept = {p.dtype for p in one.run().model.parameters()} | {one.aggregator.gradients.flat.dtype}
        return products, kept, [step["loss"] for step in log.of("step")]

    (whole, kept, losses), (short, kept_too, near) = (
        virtual.run(2, partial(body, mixed=mixed))[0] for mixed in (False, True)
    )
    both = (True, False)  # in training, and in rank 0's validation
    assert whole == {(trains, torch.float32) for trains in both}
    assert short == {(trains, torch.bfloat16) for trains in both}
    assert kept == kept_too == {torch.float32}
    assert near != losses
    assert near == pytest.approx(losses, rel=0.05)
