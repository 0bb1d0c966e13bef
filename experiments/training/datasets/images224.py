from pathlib import Path

import torch
from torch import Generator

from experiments.training.datasets._dataset import Dataset, Split, digest_of

COUNTS = (1024, 128)  # images for training, for tests: 170 MB in each process
CLASSES = 1000


def images224(root: Path | None, device: torch.device) -> Dataset:
    """Random pixels, 3 x 224 x 224, in as many classes as ImageNet: to time networks without its files.

    Nothing can be learnt from them. They are cropped and flipped no more.
    """
    draws = Generator().manual_seed(0)

    def split(count: int) -> Split:
        images = torch.randint(256, (count, 224, 224, 3), generator=draws, dtype=torch.uint8)
        return Split(images, torch.randint(CLASSES, (count,), generator=draws))

    train, test = map(split, COUNTS)
    return Dataset(
        name="synthetic images, for timing only",
        digest=digest_of(train, test),
        train=train,
        test=test,
        classes=CLASSES,
        padding=0,
        flip=False,
        mean=(0.5,) * 3,  # of even draws from 0 to 1
        std=(0.289,) * 3,
    ).to(device)
