"""Images in files: read batch by batch, cropped as torchvision does it, by the run's generator alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from experiments.config import compose, dataset_files
from experiments.training import datasets
from experiments.training.datasets import Dataset
from experiments.training.datasets.imagenet import (
    MAX_TRIES,
    choose_crop_box,
    read_image,
    resize_and_crop_center,
)
from experiments.training.networks import small_cnn
from experiments.training.task import LargeImageTask
from tests.training.tasks import CPU, evaluate, model_of

CLASSES = ("n01", "n02", "n03")
SIZES = ((64, 48), (50, 90), (300, 260))  # width, height


def save(path: Path, size: tuple[int, int], seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(256, size=(*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write a tiny ImageNet into a folder: per class 4 images for training, one for validation."""
    for number, name in enumerate(CLASSES):
        for at in range(5):
            part = "val" if at == 4 else "train"
            path = tmp_path / "data" / "imagenet" / part / name / f"{at}.JPEG"
            save(path, SIZES[at % 3], seed=10 * number + at)
    return tmp_path / "data"


def imagenet(root: Path) -> Dataset:
    return datasets.load("imagenet", root, CPU)


def task(batch_size: int = 4) -> LargeImageTask:
    return LargeImageTask("imagenet", small_cnn, batch_size, 0.1, 0.9, 0.0, 0, (), False)


def test_images_are_read_by_number_and_labelled_by_their_folder(root: Path) -> None:
    data = imagenet(root)
    assert (data.classes, data.pixels, data.channels) == (3, 224, 3)
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.name == "12 images of 3 classes in place of ImageNet"
    opened = data.load_uint8_images(data.test.images)
    expected = read_image(root / "imagenet" / "val" / "n03" / "4.JPEG", resize_and_crop_center)
    assert torch.equal(opened[2], torch.from_numpy(expected.copy()))


def test_tested_images_are_what_torchvision_makes_of_them(root: Path) -> None:
    path = root / "imagenet" / "train" / "n01" / "1.JPEG"
    theirs = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])
    with Image.open(path) as image:
        assert np.array_equal(
            read_image(path, resize_and_crop_center), np.asarray(theirs(image.convert("RGB")))
        )
    Image.new("L", (300, 300), 77).save(path)
    assert (read_image(path, resize_and_crop_center) == 77).all()  # a grey image has three channels, too


def test_crops_lie_within_the_image_and_have_torchvision_s_areas_and_shapes() -> None:
    draws = torch.rand(500, MAX_TRIES * 4, generator=torch.Generator().manual_seed(0)).tolist()
    for width, height in SIZES:
        top, left, h, w = torch.tensor([choose_crop_box(width, height, row) for row in draws]).T
        assert min(top.min(), left.min()) >= 0
        assert (top + h).max() <= height
        assert (left + w).max() <= width
        for corner, room in ((top, height - h), (left, width - w)):  # anywhere within, as often
            assert (corner[room > 0] / room[room > 0]).mean().item() == pytest.approx(0.5, abs=0.05)
        shares, ratios = h * w / (width * height), w / h
        assert shares.min() >= 0.07  # 0.08 before sides are rounded
        assert 0.7 < ratios.min() < 0.8
        assert 1.25 < ratios.max() < 1.4
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            law = transforms.RandomResizedCrop.get_params
            theirs = [law(torch.empty(3, height, width), [0.08, 1.0], [3 / 4, 4 / 3]) for _ in draws]
        mean = np.mean([h * w for _, _, h, w in theirs]) / (width * height)
        assert shares.mean().item() == pytest.approx(mean, abs=0.05)


def test_an_image_that_no_crop_fits_is_cut_in_the_middle() -> None:
    impossible = [0.999, 0.5, 0.5, 0.5] * MAX_TRIES
    assert choose_crop_box(1000, 10, impossible) == (0, 493, 10, 13)
    assert choose_crop_box(10, 1000, impossible) == (493, 0, 13, 10)


def test_batches_depend_on_the_run_s_generator_alone_and_begin_anywhere(root: Path) -> None:
    data = imagenet(root)
    generator = torch.Generator().manual_seed(5)

    def batches(first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return those of the second of two workers, three a pass."""
        return task(batch_size=2).batches(data, 1, 2, 3, generator, torch.float32, first)

    drawn = batches(0)
    expected = []
    for _ in range(5):
        expected.append((generator.get_state(), *next(drawn)))
    assert len({inputs.sum().item() for _, inputs, _ in expected}) == 5
    for first, (state, *batch) in enumerate(expected):
        generator.set_state(state)
        assert all(map(torch.equal, next(batches(first)), batch))


def test_few_classes_have_an_accuracy(root: Path) -> None:
    data = imagenet(root)
    metrics = evaluate(task(), model_of(task(), data), data)
    assert metrics.top5_percent == 100
    assert math.isfinite(metrics.loss)


def test_the_digest_follows_names_and_sizes(root: Path) -> None:
    before, path = imagenet(root).digest, root / "imagenet" / "train" / "n02" / "0.JPEG"
    assert imagenet(root).digest == before
    path.write_bytes(path.read_bytes() + b"\0")
    longer = imagenet(root).digest
    path.rename(path.with_name("9.JPEG"))
    assert len({before, longer, imagenet(root).digest}) == 3


def test_a_folder_that_is_another_s_is_refused(root: Path) -> None:
    folder = root / "imagenet"
    (folder / "val" / "n03").rename(folder / "val" / "n04")
    with pytest.raises(ValueError, match=r"3 classes to train and 3 to validate, and n03 is in train/ alone"):
        imagenet(root)
    (folder / "val" / "n04" / "4.JPEG").unlink()
    with pytest.raises(ValueError, match=r"imagenet/val is not laid out as ImageNet \(Found no valid file"):
        imagenet(root)
    (folder / "val").rename(folder / "ILSVRC2012_img_val")
    with pytest.raises(ValueError, match=r"imagenet/val .*No such file.* it needs train/ and val/"):
        imagenet(root)


def test_a_file_that_is_no_image_is_named_when_it_is_opened(root: Path) -> None:
    path = root / "imagenet" / "train" / "n02" / "3.JPEG"
    for content in (path.read_bytes()[:300], b"no image", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} is no image that can be opened"):
            imagenet(root).augment(torch.arange(12), torch.Generator())


def test_without_the_folder_the_task_on_synthetic_images_is_named(tmp_path: Path) -> None:
    config = compose.resolve(["task=resnet50_imagenet", f"data.root={tmp_path}"])
    with pytest.raises(ValueError, match=r"has no imagenet; .* task=resnet50_images224, .* for timing only"):
        dataset_files.ensure_dataset(config, print)
    with pytest.raises(ValueError, match=r"ImageNet has no folder: .*_images224 time"):
        datasets.load("imagenet", None, CPU)


def test_synthetic_images_are_always_the_same_and_say_what_they_are_for() -> None:
    data = datasets.load("images224", None, CPU)
    assert data.name == "synthetic images, for timing only"
    assert data.digest == "02f21bd9e32106bd66ae99c4780708ed055f04c8f878b40ece48b57f86c3be2b"
