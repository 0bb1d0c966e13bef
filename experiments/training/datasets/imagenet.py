"""Images that stay in their files: each batch is read when it is needed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from experiments.training.datasets._dataset import Dataset, Split
from sparsify.core import host_sync

FILES = {"title": "ImageNet", "folder": "imagenet", "instead": "images224"}
IMAGENET_SIZE = (1000, 1_281_167, 50_000)  # of ImageNet-1k: classes, images for training, for validation
LAYOUT_ADVICE = (
    "it needs train/ and val/ with the same folders in both, one for each class, and its images in them, as "
    "torchvision's ImageFolder reads them; tasks named _images224 time the networks on synthetic images"
)
SIDE = 224  # pixels of what a network sees
RESIZED = 256  # of the shorter side, before the middle is cut out
AREA_RANGE = (0.08, 1.0)  # of a random crop, as a share of the image
ASPECT_RANGE = (3 / 4, 4 / 3)  # of a random crop, width to height
MAX_TRIES = 10  # to draw a crop that lies within the image
Box = tuple[int, int, int, int]  # top, left, height, width


def imagenet(root: Path | None, device: torch.device) -> Dataset:
    """ImageNet (Russakovsky et al. 2015) in data.root/imagenet: train/ and val/ with a folder for each class.

    It can't be downloaded without an account. Images are opened batch by batch. The digest is of the sorted
    names of all files and their sizes: reading 150 GB would take an hour.
    """
    if root is None:
        raise ValueError(f"ImageNet has no folder: set data.root=FOLDER or $DATA_ROOT; {LAYOUT_ADVICE}")
    folder = root / FILES["folder"]
    classes, train = _list_images(folder / "train")
    test_classes, test = _list_images(folder / "val")
    if classes != test_classes:
        folder_name, name = min(
            (("train" if name in classes else "val"), name) for name in {*classes} ^ {*test_classes}
        )
        raise ValueError(
            f"{folder} has {len(classes)} classes to train and {len(test_classes)} to validate, and {name} "
            f"is in {folder_name}/ alone; {LAYOUT_ADVICE}"
        )
    files = [str(Path(path).relative_to(folder)) for path, _ in (*train, *test)]
    numbers = torch.arange(len(files)).split([len(train), len(test)])
    train_split, test_split = (
        Split(images, torch.tensor([label for _, label in labelled_paths]))
        for images, labelled_paths in zip(numbers, (train, test), strict=True)
    )
    name = FILES["title"]
    digest = _digest(folder, files)
    if (len(classes), len(train), len(test)) != IMAGENET_SIZE:
        name = f"{len(train):,} images of {len(classes):,} classes in place of ImageNet"
    mean = (0.485, 0.456, 0.406)  # of torchvision's models
    std = (0.229, 0.224, 0.225)
    data = ImageFileDataset(
        name, digest, train_split, test_split, len(classes), flip=True, mean=mean, std=std
    )
    return replace(data, folder=folder, files=files).to(device)


def _list_images(folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the names of the classes, and the paths of the images with the number of their class.

    Raises:
        ValueError: it is not laid out as ImageNet.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    try:
        classes, numbers = find_classes(str(folder))
        return classes, make_dataset(str(folder), numbers, IMG_EXTENSIONS)
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"{folder} is not laid out as ImageNet ({why}); {LAYOUT_ADVICE}") from error


def _digest(folder: Path, files: list[str]) -> str:
    """SHA-256 of names and sizes."""
    lines = [f"{name} {(folder / name).stat().st_size}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class ImageFileDataset(Dataset):
    """A data set whose splits hold numbers of files.

    Training images are cropped and flipped as torchvision's RandomResizedCrop(224) and RandomHorizontalFlip
    do it; those for tests are Resize(256), CenterCrop(224).

    As many threads as torch computes with read a batch.
    """

    folder: Path = Path()
    files: Sequence[str] = ()  # in `folder`

    @property
    def pixels(self) -> int:
        return SIDE

    @property
    def channels(self) -> int:
        return 3

    def load_uint8_images(self, images_or_numbers: Tensor) -> Tensor:
        return self._read(images_or_numbers, [resize_and_crop_center] * len(images_or_numbers))

    def augment(self, indices: Tensor, generator: Generator) -> Tensor:
        """(B,) indices -> (B, 224, 224, 3). Whatever is in the files, as many numbers are drawn."""
        draws = torch.rand(len(indices), MAX_TRIES * 4 + 1, generator=generator, device=generator.device)
        crops = [make_random_crop_and_flip(row) for row in host_sync.to_host(draws)]
        return self._read(self.train.images[indices], crops)

    def _read(self, numbers: Tensor, transforms: Sequence[Callable[[Any], Any]]) -> Tensor:
        """Read image files, each made into an image of 224 x 224 by a function of its own."""
        paths = [self.folder / self.files[number] for number in host_sync.to_host(numbers)]
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            images = list(threads.map(read_image, paths, transforms))
        return torch.from_numpy(np.stack(images)).to(numbers.device)


def read_image(path: Path, transform: Callable[[Any], Any]) -> NDArray[np.uint8]:
    """(224, 224, 3), of a file.

    Raises:
        ValueError: it is no image, or a broken one.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(transform(image.convert("RGB")))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is no image that can be opened ({error}); remove or replace it") from error


def resize_and_crop_center(image: Any) -> Any:
    """Return the middle of a PIL image that was resized before, as it is evaluated."""
    from torchvision.transforms import functional

    return functional.center_crop(functional.resize(image, [RESIZED]), [SIDE, SIDE])


def make_random_crop_and_flip(draws: Sequence[float]) -> Callable[[Any], Any]:
    """Return a function that crops and flips a PIL image, by numbers from 0 to 1."""

    def crop(image: Any) -> Any:
        from torchvision.transforms import functional

        top, left, height, width = choose_crop_box(image.width, image.height, draws)
        cropped = functional.resized_crop(image, top, left, height, width, [SIDE, SIDE])
        return functional.hflip(cropped) if draws[-1] < 0.5 else cropped

    return crop


def choose_crop_box(width: int, height: int, draws: Sequence[float]) -> Box:
    """Return the first crop drawn that lies within an image of this size, else its middle.

    As torchvision's RandomResizedCrop.get_params.
    """
    low, high = (math.log(ratio) for ratio in ASPECT_RANGE)
    for start in range(0, MAX_TRIES * 4, 4):
        area, shape, down, right = draws[start : start + 4]
        pixels = width * height * (AREA_RANGE[0] + (AREA_RANGE[1] - AREA_RANGE[0]) * area)
        ratio = math.exp(low + (high - low) * shape)
        w = round(math.sqrt(pixels * ratio))
        h = round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    w = min(width, round(height * ASPECT_RANGE[1]))
    h = min(height, round(width / ASPECT_RANGE[0]))
    return (height - h) // 2, (width - w) // 2, h, w
