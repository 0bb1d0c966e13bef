"""Data sets: examples and labels as tensors on one device, where images are augmented."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional


class Split(NamedTuple):
    # (N, H, W, C) uint8; of text (N, T) int64, numbers of words; of images in files (N,) int64, their numbers
    images: Tensor
    labels: Tensor  # (N,) int64; of text (N, T)

    def to(self, device: torch.device) -> Split:
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """Images and labels, with the augmentation and normalisation that belong to them."""

    name: str  # as captions write it
    digest: str  # SHA-256 of all images and labels
    train: Split
    test: Split  # what is validated on
    classes: int
    padding: int = 0  # random crops after padding with so many black pixels; 0: none
    flip: bool = False  # mirror every other image
    mean: tuple[float, ...] = (0.0,)  # per channel, in units of the full pixel value
    std: tuple[float, ...] = (1.0,)
    unseen: Split | None = None  # the test set, where part of the training images stands in for it
    noun: str = "images"  # what examples are called

    def to(self, device: torch.device) -> Dataset:
        unseen = self.unseen and self.unseen.to(device)
        return replace(self, train=self.train.to(device), test=self.test.to(device), unseen=unseen)

    def hold_out(self, count: int) -> Dataset:
        """Return the data set with `count` training images held out to validate on.

        The test set is not seen while settings are tuned. The images are the same whatever the seed of a run.

        Raises:
            ValueError: no image would be left.
        """
        images = len(self.train.labels)
        if count >= images:
            raise ValueError(
                f"train.held_out={count} leaves none of the {images} training {self.noun} of {self.name}; "
                "take fewer"
            )
        order = torch.randperm(images, generator=Generator().manual_seed(0)).to(self.train.labels.device)
        held_out, trained = (
            Split(*(part[indices] for part in self.train)) for indices in order.split([count, images - count])
        )
        name = f"{self.name} ({count:,} training {self.noun} held out)"
        return replace(self, name=name, train=trained, test=held_out, unseen=self.test)

    def limit_validation(self, count: int) -> Dataset:
        """Return the data set with at most `count` examples to validate and test on.

        They are the same whatever the seed of a run.
        """

        def some(split: Split) -> Split:
            if count >= len(split.labels):
                return split
            order = torch.randperm(len(split.labels), generator=Generator().manual_seed(0))
            indices = order[:count].to(split.labels.device)
            return Split(*(part[indices] for part in split))

        if all(count >= len(split.labels) for split in (self.test, self.unseen) if split):
            return self
        name = f"{self.name} (validated on {count:,} {self.noun})"
        return replace(self, name=name, test=some(self.test), unseen=self.unseen and some(self.unseen))

    @property
    def pixels(self) -> int:
        return self.test.images.shape[1]

    @property
    def channels(self) -> int:
        return self.test.images.shape[3]

    def load_uint8_images(self, images_or_numbers: Tensor) -> Tensor:
        """Return (B, H, W, C) uint8 images, not normalized, of what a split holds of them."""
        return images_or_numbers

    def augment(self, indices: Tensor, generator: Generator) -> Tensor:
        """(B,) indices -> (B, H, W, C) images, cropped and flipped in one gather.

        For a whole batch at once, what torchvision's RandomCrop(32, padding=4) and then RandomHorizontalFlip
        do to one image.
        """
        if not self.padding and not self.flip:
            return self.train.images[indices]
        n = len(indices)
        device = indices.device
        side = torch.arange(self.pixels, device=indices.device)
        shifts = torch.randint(2 * self.padding + 1, (2, n, 1), generator=generator, device=device)
        mirrored = torch.rand(n, 1, generator=generator, device=device) < 0.5
        rows = shifts[0] + side
        columns = shifts[1] + torch.where(mirrored, side.flip(0), side)
        width = self.padded_images.shape[1]
        pixels = (indices[:, None, None] * width + rows[:, :, None]) * width + columns[:, None, :]
        # One flat gather; indexing by three tensors takes twice as long.
        return (
            self.padded_images.view(-1, self.channels)
            .index_select(0, pixels.view(-1))
            .view(n, *self.test.images.shape[1:])
        )

    @cached_property
    def padded_images(self) -> Tensor:
        """The training images with their black border, made once."""
        p = self.padding
        return functional.pad(self.train.images, (0, 0, p, p, p, p))

    def normalize(self, images: Tensor) -> Tensor:
        """(B, H, W, C) pixel values 0 to 255 -> zero mean and unit deviation, in the type of `images`."""
        scale, shift = (row.to(images.dtype) for row in self.row_scale_and_shift)
        return torch.addcmul(shift, images.flatten(2), scale).view(images.shape)

    @cached_property
    def row_scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """(W C,) each: a whole row of pixels; broadcasting over three channels alone is ten times slower."""
        mean, std = torch.tensor((self.mean, self.std), dtype=torch.float64, device=self.test.images.device)
        return (1 / (255 * std)).repeat(self.pixels), (-mean / std).repeat(self.pixels)


def digest_splits(train: Split, test: Split) -> str:
    """SHA-256 of all images and labels, which must be on the CPU."""
    digest = hashlib.sha256()
    for tensor in (*train, *test):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
