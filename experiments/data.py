"""Data sets as tensors on one device: found, checked, and augmented there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional


class Split(NamedTuple):
    images: Tensor  # (N, H, W, C) uint8
    labels: Tensor  # (N,) int64


@dataclass(frozen=True)
class Dataset:
    """Images and labels, with the augmentation and normalisation that belong to them."""

    name: str  # as captions write it
    digest: str  # SHA-256 of all images and labels
    train: Split
    test: Split
    classes: int
    padding: int  # random crops after padding with so many black pixels; 0: none
    flip: bool  # mirror every other image
    mean: tuple[float, ...]  # per channel, in units of the full pixel value
    std: tuple[float, ...]

    @property
    def pixels(self) -> int:
        return self.test.images.shape[1]

    @property
    def channels(self) -> int:
        return self.test.images.shape[3]

    def augmented(self, chosen: Tensor, generator: Generator) -> Tensor:
        """(B,) indices -> (B, H, W, C) images, cropped and flipped in one gather. The crop of torchvision's
        RandomCrop(32, padding=4) followed by RandomHorizontalFlip, for a whole batch."""
        if not self.padding and not self.flip:
            return self.train.images[chosen]
        n, device, side = len(chosen), chosen.device, torch.arange(self.pixels, device=chosen.device)
        shifts = torch.randint(2 * self.padding + 1, (2, n, 1), generator=generator, device=device)
        mirrored = torch.rand(n, 1, generator=generator, device=device) < 0.5
        rows = shifts[0] + side
        columns = shifts[1] + torch.where(mirrored, side.flip(0), side)
        width = self.padded.shape[1]
        pixels = (chosen[:, None, None] * width + rows[:, :, None]) * width + columns[:, None, :]
        # One flat gather; indexing by three tensors takes twice as long.
        return (
            self.padded.view(-1, self.channels)
            .index_select(0, pixels.view(-1))
            .view(n, *self.test.images.shape[1:])
        )

    @cached_property
    def padded(self) -> Tensor:
        """The training images with their black border, made once."""
        p = self.padding
        return functional.pad(self.train.images, (0, 0, p, p, p, p))

    def normalised(self, images: Tensor) -> Tensor:
        """(B, H, W, C) pixel values 0 to 255 -> zero mean and unit deviation, in the floating-point type
        given.
        """
        scale, shift = (row.to(images.dtype) for row in self.scale_and_shift)
        return torch.addcmul(shift, images.flatten(2), scale).view(images.shape)

    @cached_property
    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """(W C,) each: a whole row of pixels, as broadcasting over three channels alone is ten times
        slower.
        """
        mean, std = torch.tensor((self.mean, self.std), dtype=torch.float64, device=self.test.images.device)
        return (1 / (255 * std)).repeat(self.pixels), (-mean / std).repeat(self.pixels)


def load(name: str, root: Path | None, device: torch.device) -> Dataset:
    """The data set `name` (cifar10, digits, digits32) on `device`.

    Raises:
        ValueError: the files are missing or corrupt.
    """
    if name == "cifar10":
        if root is None:
            raise ValueError("CIFAR-10 has no folder: set data.root=FOLDER or $DATA_ROOT")
        return _cifar10(root, device)
    return _digits(device, enlarged=name == "digits32")


def _cifar10(root: Path, device: torch.device) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009) from torchvision's files, whose MD5 sums torchvision checks."""
    from torchvision.datasets import CIFAR10

    splits = []
    for train in (True, False):
        try:
            files = CIFAR10(str(root), train=train, download=False)
        except RuntimeError as error:
            raise ValueError(
                f"CIFAR-10 in {root} is missing or corrupt (a checksum differs): remove "
                f"{root / CIFAR10.base_folder} and run again to download it, or set data.root to a sound copy"
            ) from error
        splits.append(Split(torch.from_numpy(files.data), torch.tensor(files.targets)))
    # Mean and deviation as published, to three digits.
    return _on(device, "CIFAR-10", *splits, 10, 4, True, (0.491, 0.482, 0.447), (0.247, 0.243, 0.262))


def _digits(device: torch.device, enlarged: bool) -> Dataset:
    """The 1,797 handwritten digits, 8 x 8, that scikit-learn carries (Alpaydin and Kaynak 1998); a fifth is
    for tests.

    Enlarged, each pixel becomes 4 x 4 and the one channel three, so that networks for CIFAR-10 take them.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).astype("uint8")[..., None]
    if enlarged:
        pixels = pixels.repeat(4, axis=1).repeat(4, axis=2).repeat(3, axis=3)
    parts = train_test_split(pixels, digits.target, test_size=0.2, random_state=0, stratify=digits.target)
    train_images, test_images, train_labels, test_labels = (torch.from_numpy(part.copy()) for part in parts)
    channels = train_images.shape[3]
    name = "digits 32 x 32" if enlarged else "digits"
    train, test = Split(train_images, train_labels.long()), Split(test_images, test_labels.long())
    return _on(device, name, train, test, 10, 0, False, (0.305,) * channels, (0.377,) * channels)


def _on(
    device: torch.device,
    name: str,
    train: Split,
    test: Split,
    classes: int,
    padding: int,
    flip: bool,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset:
    digest = hashlib.sha256()
    for tensor in (*train, *test):
        digest.update(tensor.numpy().tobytes())
    train, test = (Split(*(tensor.to(device) for tensor in split)) for split in (train, test))
    return Dataset(name, digest.hexdigest(), train, test, classes, padding, flip, mean, std)
