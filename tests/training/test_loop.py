"""The training loop: its clock, when it validates, and what it records of an epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sparsify
from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.datasets import Dataset
from experiments.training.settings import TrainSettings
from sparsify.comm import virtual
from sparsify.core.timer import PhaseTimer
from tests.training.digits import CPU, Lines, trainer


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return datasets.load("digits", None, CPU)


def trained(
    data: Dataset,
    method: str = "topk",
    every: int = 1,
    epochs: int = 10,
    lr_decay_epochs: float = 0.0,
    **choices: Any,
) -> list[Lines]:
    """Return the logs of two virtual ranks, with epochs of three steps, validated every so many."""
    train = TrainSettings(epochs=epochs, epoch_steps=3, validate_every=every, lr_decay_epochs=lr_decay_epochs)

    def body(comm: virtual.VirtualComm) -> Lines:
        log = Lines()
        timer = PhaseTimer("production", comm.now_s)
        chosen = sparsify.build(method, **choices)
        trainer(comm, timer, chosen, log, data=data, steps=8, train=train).run()
        return log

    return virtual.run(2, body)


def test_validates_every_so_many_epochs_of_the_clock_and_at_the_end(digits: Dataset) -> None:
    for every, validated in ((1, [(1, 3), (2, 6), (3, 8)]), (2, [(2, 6), (3, 8)]), (9, [(3, 8)])):
        log, other = trained(digits, every=every)
        epochs = log.of("epoch")
        assert [(line["epoch"], line["step"]) for line in epochs] == validated
        assert other.of("epoch") == []
        steps = log.of("step")
        assert [step["step"] for step in steps] == [*range(8)]
        since = 0
        for line in epochs:  # its means are of all steps since the line before
            averaged = steps[since : line["step"]]
            assert line["train_loss"] == pytest.approx(np.mean([step["loss"] for step in averaged]))
            assert line["wire_bytes"] == pytest.approx(np.mean([step["wire_bytes"] for step in averaged]))
            assert line["wall_s"] == pytest.approx(sum(step["step_s"] for step in steps[: line["step"]]))
            since = line["step"]


def test_density_and_learning_rate_follow_the_clock(digits: Dataset) -> None:
    steps = trained(digits, density=0.01, density_warmup=[0.5])[0].of("step")
    densities = [step["sent_density"] for step in steps]
    assert densities[:3] == pytest.approx([0.5] * 3, abs=0.01)
    assert densities[3:] == pytest.approx([0.01] * 5, abs=0.001)
    assert [step["epoch"] for step in steps] == [1, 1, 1, 2, 2, 2, 3, 3]
    task = TASKS.build("cnn_digits", {})
    assert [step["lr"] for step in steps] == [task.learning_rate(at, 3) for at in range(8)]


def test_the_learning_rate_falls_in_the_last_epochs(digits: Dataset) -> None:
    plain, decayed, longer = (
        [step["lr"] for step in trained(digits, epochs=epochs, lr_decay_epochs=decay)[0].of("step")]
        for epochs, decay in ((10, 0.0), (3, 2.0), (4, 2.0))
    )
    assert decayed == pytest.approx([rate * min(1, (9 - at) / 6) for at, rate in enumerate(plain)])
    assert longer[:6] == plain[:6], "trainings of any length are alike until the first of them decays"


def test_an_epoch_records_the_energy_that_was_captured(digits: Dataset) -> None:
    def captured(method: str, **choices: Any) -> list[Any]:
        return [line["captured_energy"] for line in trained(digits, method, **choices)[0].of("epoch")]

    assert captured("topk", density=1.0) == pytest.approx([1, 1, 1])
    assert all(0.1 < share < 1 for share in captured("topk", density=0.1))
    assert captured("dense") == [None, None, None]


def test_images_that_are_held_out_are_not_trained_on(digits: Dataset) -> None:
    data = digits.hold_out(100)
    assert "100 training images held out" in data.name

    def rows(*splits: datasets.Split) -> list[bytes]:
        return sorted(image.numpy().tobytes() for split in splits for image in split.images)

    assert rows(data.train, data.test) == rows(digits.train)
    assert data.unseen is digits.test
    assert torch.equal(digits.hold_out(100).test.images, data.test.images)
    fewer = data.limit_validation(50)
    assert fewer.unseen is not None
    assert len(data.test.labels) == 2 * len(fewer.test.labels) == 2 * len(fewer.unseen.labels) == 100
    with pytest.raises(ValueError, match=r"train.held_out=1437 leaves none of the 1437 training images"):
        digits.hold_out(1437)


def test_the_test_set_is_seen_once_at_the_end_where_images_were_held_out(digits: Dataset) -> None:
    first, _, last = trained(digits.hold_out(100))[0].of("epoch")
    assert "test_top1" not in first
    assert 0 <= last["test_top1"] <= 100
    assert last["test_top1"] != last["val_top1"]
    assert not any("test_top1" in line for line in trained(digits)[0].of("epoch"))


def test_in_bf16_products_alone_are_short_and_a_training_goes_nearly_the_same_way(digits: Dataset) -> None:
    def train(mixed: bool) -> tuple[set[Any], list[float]]:
        """Return in which types products are, in training and in validation, and the losses."""
        log = Lines()
        products = set()

        def body(comm: virtual.VirtualComm) -> None:
            timer = PhaseTimer("production", comm.now_s)
            train = TrainSettings(epoch_steps=6)
            worker = trainer(
                comm, timer, "topk", log, data=digits, steps=6, has_bf16_products=mixed, train=train
            )
            for layer in worker.model.modules():
                if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
                    layer.register_forward_hook(lambda of, _, outs: products.add((of.training, outs.dtype)))
            tensors = [*worker.run().model.parameters(), worker.aggregator.gradients.flat]
            assert {tensor.dtype for tensor in tensors} == {torch.float32}

        virtual.run(1, body)
        return products, [step["loss"] for step in log.of("step")]

    whole, losses = train(mixed=False)
    short, near = train(mixed=True)
    assert whole == {(True, torch.float32), (False, torch.float32)}
    assert short == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert near != losses
    assert near == pytest.approx(losses, rel=0.05)
