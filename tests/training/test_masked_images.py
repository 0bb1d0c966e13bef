"""Masked autoencoders: what is hidden, what is learnt, and what a record says of it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.datasets import Dataset
from experiments.training.masked_images import HIDDEN, MAE, MaskedImages, Size, positions
from tests.conftest import Command, refused
from tests.worker.runs import recorded, stopped_and_straight

CPU = torch.device("cpu")
SMALL = Size(8, 16, 1, 2, 16, 1, 2)


@pytest.fixture(scope="module")
def data() -> Dataset:
    """In place of CIFAR-10, which it is as large as."""
    return datasets.load("digits32", None, CPU)


@pytest.fixture
def _as_cifar10(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(datasets, "load", lambda *_: data)


def task(size: Size = SMALL, lr: float = 0.2) -> MaskedImages:
    return MaskedImages("digits32", size.network, 20, lr, 0.9, 0.0, 0, (), False, size.patch)


def model_of(some: MaskedImages, data: Dataset, dtype: torch.dtype = torch.float32) -> MAE:
    pytest.importorskip("transformers")
    model = some.model(data, 0, CPU, dtype)
    assert isinstance(model, MAE)
    return model


def batches(some: MaskedImages, data: Dataset, seed: int = 0) -> Any:
    return some.batches(data, 0, 1, 0, torch.Generator().manual_seed(seed), torch.float32)


@pytest.mark.parametrize(
    ("name", "pixels", "parameters", "encoder"),
    [
        ("maetiny_cifar10", 32, 265_424, 203_264),
        ("maebase_imagenet", 224, 111_655_680, 85_647_360),  # ViT-B/16; positions are fixed, and not counted
        ("maebase_images224", 224, 111_655_680, 85_647_360),
        ("maelarge_imagenet", 224, 329_239_296, 303_099_904),
        ("maelarge_images224", 224, 329_239_296, 303_099_904),
    ],
)
def test_sizes_are_the_published_ones(name: str, pixels: int, parameters: int, encoder: int) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = TASKS.build(name, {}).network(3, pixels, 10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(p.numel() for p in model.model.vit.parameters()) == encoder
    assert all(p.requires_grad for p in model.parameters())
    assert f"{parameters:,}" in TASKS.docstring(name)


def test_three_quarters_of_the_patches_are_hidden_and_no_other_matters(data: Dataset) -> None:
    """What is hidden is guessed from the rest: with other pixels there, the encoder sees the same."""
    some = task()
    model = model_of(some, data)
    rows, _ = next(batches(some, data))
    pixels, numbers = rows.split([3 * 32 * 32, 16], dim=1)
    found = model.model(pixels.view(-1, 3, 32, 32), noise=numbers)
    assert (found.mask.sum(dim=1) == HIDDEN * 16).all()
    assert torch.equal(
        found.mask.argsort(stable=True), torch.sort(found.mask.argsort(stable=True)).indices.argsort()
    )
    hidden = numbers >= numbers.sort(dim=1).values[:, [4]]
    assert torch.equal(found.mask.bool(), hidden)
    is_hidden = hidden.view(-1, 1, 4, 1, 4, 1).expand(-1, 3, 4, 8, 4, 8).reshape(-1, 3, 32, 32)
    other = torch.where(is_hidden, torch.rand(20, 3, 32, 32), pixels.view(-1, 3, 32, 32))
    assert torch.equal(model.model(other, noise=numbers).logits, found.logits)


def test_hidden_patches_of_one_image_are_not_all_guessed_alike(data: Dataset) -> None:
    """The decoder knows where they are."""
    some = task()
    model = model_of(some, data)
    rows, _ = next(batches(some, data))
    pixels, numbers = rows.split([3 * 32 * 32, 16], dim=1)
    found = model.model(pixels.view(-1, 3, 32, 32), noise=numbers)
    guessed = found.logits[0][found.mask[0].bool()]
    assert (guessed - guessed[0]).abs().amax(dim=1)[1:].min() > 1e-3


def test_positions_are_the_paper_s() -> None:
    found = positions(3, 8)[0]
    assert found.shape == (10, 8)
    assert not found[0].any()
    for patch in range(9):
        row, column = divmod(patch, 3)
        expected = [
            wave(place / slower)
            for place in (column, row)
            for wave in (math.sin, math.cos)
            for slower in (1, 100)
        ]
        torch.testing.assert_close(found[1 + patch], torch.tensor(expected))


def test_positions_are_neither_trained_nor_exchanged(data: Dataset) -> None:
    model = model_of(task(), data)
    fixed = [name for name, _ in model.named_buffers()]
    assert [name.rpartition(".")[2] for name in fixed] == ["position_embeddings", "decoder_pos_embed"]
    assert not {*fixed} & {name for name, _ in model.named_parameters()}


def test_the_loss_is_of_normalised_hidden_pixels(data: Dataset) -> None:
    some = task()
    model = model_of(some, data, torch.float64)
    rows, labels = some.drawn(data, torch.arange(6), torch.Generator().manual_seed(1), torch.float64)
    pixels, numbers = rows.split([3 * 32 * 32, 16], dim=1)
    found = model.model(pixels.view(-1, 3, 32, 32), noise=numbers)
    patches = pixels.view(-1, 3, 4, 8, 4, 8).permute(0, 2, 4, 3, 5, 1).reshape(6, 16, 192)
    wanted = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
    hidden = found.mask.bool()
    expected = (found.logits - wanted)[hidden].square().mean()
    torch.testing.assert_close(some.loss(model(rows), labels), expected)


def test_it_learns(data: Dataset) -> None:
    some = task()
    model, drawn = model_of(some, data), batches(some, data)
    optimiser, before = some.optimiser(model), some.evaluate(model, data, torch.float32)
    for _ in range(60):
        inputs, labels = next(drawn)
        optimiser.zero_grad()
        some.loss(model(inputs), labels).backward()
        optimiser.step()
    after = some.evaluate(model, data, torch.float32)
    assert after.loss < 0.75 * before.loss


def test_evaluation_hides_the_same_patches_each_time_and_batches_others(data: Dataset) -> None:
    some = task()
    model = model_of(some, data)
    torch.manual_seed(1)
    first = some.evaluate(model, data, torch.float32)
    torch.manual_seed(2)
    assert some.evaluate(model, data, torch.float32) == first
    assert (first.top1, first.top5) == (None, None)
    numbers = [rows[:, -16:] for rows, _ in (next(drawn) for drawn in [batches(some, data)] * 2)]
    assert not torch.equal(*numbers)
    assert numbers[0].unique().numel() > 300  # of 320: each image has its own


def test_nothing_is_drawn_from_torch_s_own_generator(data: Dataset) -> None:
    some = task()
    model = model_of(some, data)
    rows, labels = next(batches(some, data))

    def gradient() -> Tensor:
        model.zero_grad()
        some.loss(model(rows), labels).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    state = torch.get_rng_state()
    first = gradient()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(gradient(), first)
    assert first.numel() == sum(p.numel() for p in model.parameters())


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


@pytest.mark.parametrize("name", ["berttiny_text64", "maetiny_cifar10"])
def test_who_lacks_transformers_is_told_what_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not there
    with pytest.raises(ValueError, match=r"transformers is not installed here .*`make transformers`"):
        TASKS.build(name, {}).network(3, 32, 100)


@pytest.mark.own_processes
def test_without_transformers_a_run_ends_with_a_sentence(here: Command, tmp_path: Path) -> None:
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding" / "transformers.py").write_text(
        "raise ImportError('No module named transformers')\n"
    )
    (tmp_path / "data" / "text").mkdir(parents=True)
    for name in ("train.txt", "test.txt"):
        (tmp_path / "data" / "text" / name).write_text("a few words that come again\n" * 500)
    done = here(
        "run", "task=berttiny_text64", "profile=smoke", "cluster=virtual", f"data.root={tmp_path / 'data'}",
        PYTHONPATH=str(tmp_path / "hiding"),
    )  # fmt: skip
    refused(done, "BERT is transformers' implementation", "`make transformers`")
