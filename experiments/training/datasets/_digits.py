"""The 1,797 handwritten digits, 8 x 8, that scikit-learn carries (Alpaydin and Kaynak 1998)."""

from __future__ import annotations

import torch

from experiments.training.datasets._dataset import Dataset, Split, digest_of


def read(name: str, repeats: int, channels: int, device: torch.device) -> Dataset:
    """Each pixel becomes `repeats` x `repeats` and the one channel `channels`; a fifth is for tests."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).astype("uint8")[..., None]
    pixels = pixels.repeat(repeats, axis=1).repeat(repeats, axis=2).repeat(channels, axis=3)
    parts = train_test_split(pixels, digits.target, test_size=0.2, random_state=0, stratify=digits.target)
    train_images, test_images, train_labels, test_labels = (torch.from_numpy(part.copy()) for part in parts)
    train, test = Split(train_images, train_labels.long()), Split(test_images, test_labels.long())
    return Dataset(
        name=name,
        digest=digest_of(train, test),
        train=train,
        test=test,
        classes=10,
        padding=0,
        flip=False,
        mean=(0.305,) * channels,
        std=(0.377,) * channels,
    ).to(device)
