"""Masked autoencoders: what is hidden, what is learnt, and what a record says of it."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.datasets import Dataset
from experiments.training.masked_images import (
    HIDDEN_SHARE,
    AutoencoderSize,
    MaskedAutoencoderWithLoss,
    MaskedImageTask,
    sine_position_embeddings,
)
from tests.training.tasks import CPU, batches_of, evaluate, learn, model_of
from tests.worker.runs import recorded, stopped_and_straight

SMALL = AutoencoderSize(8, 16, 1, 2, 16, 1, 2)


@pytest.fixture(scope="module")
def data() -> Dataset:
    """In place of CIFAR-10, which it is as large as."""
    return datasets.load("digits32", None, CPU)


@pytest.fixture
def _as_cifar10(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(datasets, "load", lambda *_: data)


def task() -> MaskedImageTask:
    return MaskedImageTask("digits32", SMALL.make_network, 20, 0.2, 0.9, 0.0, 0, (), False, SMALL.patch)


def mae(data: Dataset) -> MaskedAutoencoderWithLoss:
    pytest.importorskip("transformers")
    model = model_of(task(), data)
    assert isinstance(model, MaskedAutoencoderWithLoss)
    return model


def test_three_quarters_of_the_patches_are_hidden_and_no_other_matters(data: Dataset) -> None:
    """Hidden patches are guessed from the rest: with other pixels there, the encoder sees the same."""
    model = mae(data)
    rows, _ = next(batches_of(task(), data))
    flat, numbers = rows.split([3 * 32 * 32, 16], dim=1)
    pixels = flat.view(-1, 3, 32, 32)
    seen = model.model(pixels, noise=numbers)
    hidden = numbers >= numbers.sort(dim=1).values[:, [4]]
    assert (hidden.sum(dim=1) == HIDDEN_SHARE * 16).all()
    assert torch.equal(seen.mask.bool(), hidden)
    is_hidden = functional.interpolate(hidden.view(-1, 1, 4, 4).float(), scale_factor=8).bool()
    other = torch.where(is_hidden, torch.rand_like(pixels), pixels)
    assert torch.equal(model.model(other, noise=numbers).logits, seen.logits)


def test_positions_are_the_paper_s_and_neither_trained_nor_exchanged(data: Dataset) -> None:
    table = sine_position_embeddings(3, 8)[0]
    assert table.shape == (10, 8)
    assert not table[0].any()
    for patch in range(9):
        row, column = divmod(patch, 3)
        waves = itertools.product((column, row), (math.sin, math.cos), (1, 100))
        expected = torch.tensor([wave(place / length) for place, wave, length in waves])
        torch.testing.assert_close(table[1 + patch], expected)
    fixed = {name.rpartition(".")[2] for name, _ in mae(data).named_buffers()}
    assert fixed == {"position_embeddings", "decoder_pos_embed"}


def test_the_loss_is_of_normalised_hidden_pixels(data: Dataset) -> None:
    model = mae(data).double()
    rows, labels = task().draw_batch(data, torch.arange(6), torch.Generator().manual_seed(1), torch.float64)
    pixels, numbers = rows.split([3 * 32 * 32, 16], dim=1)
    seen = model.model(pixels.view(-1, 3, 32, 32), noise=numbers)
    patches = pixels.view(-1, 3, 4, 8, 4, 8).permute(0, 2, 4, 3, 5, 1).reshape(6, 16, 192)
    wanted = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
    expected = (seen.logits - wanted)[seen.mask.bool()].square().mean()
    torch.testing.assert_close(task().loss(model(rows), labels), expected)


def test_it_learns(data: Dataset) -> None:
    pytest.importorskip("transformers")
    before, after = learn(task(), data, steps=60)
    assert after.loss < 0.75 * before.loss


def test_evaluation_hides_the_same_patches_each_time_and_batches_others(data: Dataset) -> None:
    model = mae(data)
    metrics = evaluate(task(), model, data)
    torch.rand(1)
    assert evaluate(task(), model, data) == metrics
    batches = batches_of(task(), data)
    first, second = (next(batches)[0][:, -16:] for _ in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])  # each image has its own


@pytest.mark.usefixtures("every_step", "_as_cifar10")
def test_training_goes_on_to_the_same_bits_and_records_a_loss_alone(tmp_path: Path) -> None:
    words = (
        "task=maetiny_cifar10", "task.batch_size=4", "method=topk", "method.density=0.02", "cluster=virtual",
        "workers=2", "train.steps=6", "train.look_every=2",
    )  # fmt: skip
    attempt, straight = stopped_and_straight(tmp_path, 6, *words)
    (epoch,) = recorded(attempt, 0, "epoch")
    assert epoch["val_loss"] > 0
    assert epoch["val_top1"] is epoch["val_top5"] is None
    looks = {line["what"] for line in recorded(straight, 0, "look")}
    assert looks >= {"histogram", "heat", "left_out", "kept"}


def test_who_lacks_transformers_is_told_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not there
    for name in ("berttiny_text64", "maetiny_cifar10"):
        with pytest.raises(ValueError, match=r"transformers is not installed here .*`make transformers`"):
            TASKS.build(name, {}).network(3, 32, 100)
