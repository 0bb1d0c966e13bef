"""EXAMPLE: images that are made up, so that they need no files and no download.

For files of your own, read them below `root` and describe them in FILES, as cifar10.py does beside this file;
then `data.root=FOLDER` or $DATA_ROOT says where they are.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Generator, Tensor

from experiments.training.datasets._dataset import Dataset, Split, digest_of

CLASSES, PIXELS, CHANNELS = 10, 8, 1
TRAIN, TEST = 2000, 500  # images
NOISE = 40.0  # standard deviation around the pattern of a class, in units of a pixel's 0 to 255


def example(root: Path | None, device: torch.device) -> Dataset:
    """Ten random patterns under noise, 8 x 8: the same images on every machine.

    Args:
        root: the folder of its files; None here, where there are none.
    """
    generator = Generator().manual_seed(0)  # of the data, whatever the seed of a run
    patterns = 255 * torch.rand(CLASSES, PIXELS, PIXELS, CHANNELS, generator=generator)
    train, test = (_drawn(patterns, count, generator) for count in (TRAIN, TEST))
    return Dataset(
        name="example",  # as captions write it
        digest=digest_of(train, test),  # recorded with every run: runs on other data do not compare
        train=train,
        test=test,
        classes=CLASSES,
        padding=0,  # random crops after padding with so many black pixels
        flip=False,  # mirror every other image
        mean=(0.5,) * CHANNELS,  # what a pixel is normalised by, in units of 255
        std=(0.3,) * CHANNELS,
    ).to(device)


def _drawn(patterns: Tensor, count: int, generator: Generator) -> Split:
    """(count, H, W, C) uint8 and (count,) int64."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = NOISE * torch.randn(count, *patterns.shape[1:], generator=generator)
    return Split((patterns[labels] + noise).clamp(0, 255).to(torch.uint8), labels)
