"""Every data set by its name; augmented and normalised as published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.training import datasets
from tests.training.test_recipe import images

CPU = torch.device("cpu")


def test_an_unknown_data_set_is_refused_with_the_list() -> None:
    with pytest.raises(
        ValueError,
        match=r"no data set 'cifar' \(did you mean 'cifar10'\?\); there are: cifar10, digits, digits32",
    ):
        datasets.load("cifar", None, CPU)


def test_the_digits_need_no_files_are_always_the_same_and_are_only_enlarged() -> None:
    small, large = (datasets.load(name, None, CPU) for name in ("digits", "digits32"))
    for data, pixels, channels in ((small, 8, 1), (large, 32, 3)):
        assert (data.pixels, data.channels, data.classes) == (pixels, channels, 10)
        assert len(data.mean) == len(data.std) == channels
    assert small.digest == "1f457bc006f4c831879b92e9f05f25ee4b0eb45193f8fec82d37cac951415071"
    assert torch.equal(large.train.labels, small.train.labels)
    assert torch.equal(large.train.images[:, ::4, ::4], small.train.images.expand(-1, -1, -1, 3))


def test_cifar10_without_a_folder_or_with_other_files_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"CIFAR-10 has no folder: set data.root=FOLDER or \$DATA_ROOT"):
        datasets.load("cifar10", None, CPU)
    with pytest.raises(ValueError, match=r"missing or corrupt .* set data.root to a sound copy"):
        datasets.load("cifar10", tmp_path, CPU)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=f"missing or corrupt .*remove {folder}"):
        datasets.load("cifar10", tmp_path, CPU)


def test_a_folder_that_is_not_mnist_s_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):  # of two images, 2 x 2
        (folder / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + b"\0\0\0\x02" * 3 + bytes(8))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + b"\0\0\0\x02" + bytes(2))
    for root in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ValueError, match=r"MNIST in .* is missing or corrupt: .* a sound copy"):
            datasets.load("mnist", root, CPU)


def test_augmentation_is_a_padded_crop_and_a_flip() -> None:
    data = images(1)
    data.train.images[0] = (torch.arange(32 * 32 * 3).view(32, 32, 3) % 251 + 1).to(torch.uint8)
    padded = torch.zeros(40, 40, 3, dtype=torch.uint8)
    padded[4:36, 4:36] = data.train.images[0]
    crops = padded.unfold(0, 32, 1).unfold(1, 32, 1).movedim(2, 4).reshape(81, 32, 32, 3)
    found = data.augment(torch.zeros(200, dtype=torch.int64), torch.Generator().manual_seed(0))
    plain, mirrored = ((found[:, None] == those).flatten(2).all(2).any(1) for those in (crops, crops.flip(2)))
    assert (plain | mirrored).all()
    assert 60 < mirrored.sum() < 140  # fair coin: 100 +- 7


def test_normalisation_is_the_published_one() -> None:
    data = images(1)
    values = torch.full((1, 32, 32, 3), 255.0, dtype=torch.float64)
    expected = (1 - torch.tensor([0.491, 0.482, 0.447])) / torch.tensor([0.247, 0.243, 0.262])
    torch.testing.assert_close(data.normalize(values)[0, 5, 7], expected.double(), rtol=1e-6, atol=1e-6)


def test_real_cifar10_is_read_as_it_is(cifar10_root: Path) -> None:
    data = datasets.load("cifar10", cifar10_root, CPU)
    assert data.test.images.shape == (10_000, 32, 32, 3)
    assert torch.bincount(data.train.labels).tolist() == [5000] * 10
    means = data.train.images.double().mean(dim=(0, 1, 2)) / 255
    assert means.tolist() == pytest.approx([0.491, 0.482, 0.447], abs=1e-3)
