"""Images that stay in their files: each batch is read when it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from experiments.training.datasets._dataset import Dataset
from sparsify import host_sync

SIDE = 224  # pixels of what a network sees
RESIZED = 256  # of the shorter side, before the middle is cut out
AREAS, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop: share of the image, width to height
TRIES = 10  # to draw a crop that lies within the image
Box = tuple[int, int, int, int]  # top, left, height, width


@dataclass(frozen=True)
class ImageFiles(Dataset):
    """Splits hold numbers of files. Training images are cropped and flipped as torchvision's
    RandomResizedCrop(224) and RandomHorizontalFlip do it; those for tests are Resize(256), CenterCrop(224).

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

    def opened(self, images: Tensor) -> Tensor:
        return self._read(images, [middle] * len(images))

    def augmented(self, chosen: Tensor, generator: Generator) -> Tensor:
        """(B,) indices -> (B, 224, 224, 3). Whatever is in the files, as many numbers are drawn."""
        draws = torch.rand(len(chosen), TRIES * 4 + 1, generator=generator, device=generator.device)
        ways = [drawn_crop(row) for row in host_sync.to_host(draws)]
        return self._read(self.train.images[chosen], ways)

    def _read(self, numbers: Tensor, ways: Sequence[Callable[[Any], Any]]) -> Tensor:
        """These files, each made into an image of 224 x 224 in its way."""
        paths = [self.folder / self.files[number] for number in host_sync.to_host(numbers)]
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            images = list(threads.map(read, paths, ways))
        return torch.from_numpy(np.stack(images)).to(numbers.device)


def read(path: Path, way: Callable[[Any], Any]) -> NDArray[np.uint8]:
    """(224, 224, 3), of a file.

    Raises:
        ValueError: it is no image, or a broken one.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(way(image.convert("RGB")))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is no image that can be opened ({error}); remove or replace it") from error


def middle(image: Any) -> Any:
    """Of a PIL image, as it is evaluated."""
    from torchvision.transforms import functional

    return functional.center_crop(functional.resize(image, [RESIZED]), [SIDE, SIDE])


def drawn_crop(draws: Sequence[float]) -> Callable[[Any], Any]:
    """How a PIL image is cropped and flipped, by so many numbers from 0 to 1."""

    def way(image: Any) -> Any:
        from torchvision.transforms import functional

        top, left, height, width = box(image.width, image.height, draws)
        cropped = functional.resized_crop(image, top, left, height, width, [SIDE, SIDE])
        return functional.hflip(cropped) if draws[-1] < 0.5 else cropped

    return way


def box(width: int, height: int, draws: Sequence[float]) -> Box:
    """The first crop drawn that lies within an image of this size, else its middle: torchvision's
    RandomResizedCrop.get_params.
    """
    low, high = (math.log(ratio) for ratio in RATIOS)
    for at in range(0, TRIES * 4, 4):
        area, shape, down, right = draws[at : at + 4]
        pixels = width * height * (AREAS[0] + (AREAS[1] - AREAS[0]) * area)
        ratio = math.exp(low + (high - low) * shape)
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    w, h = min(width, round(height * RATIOS[1])), min(height, round(width / RATIOS[0]))
    return (height - h) // 2, (width - w) // 2, h, w
