from pathlib import Path

import torch

from experiments.training.datasets import _text
from experiments.training.datasets._dataset import Dataset

FILES = {"title": "Text of your own", "folder": "text"}


def text64(root: Path | None, device: torch.device) -> Dataset:
    """Any text: train.txt and test.txt, in sequences of 64 words, some of which are hidden and guessed."""
    if root is None:
        raise ValueError("there is no folder with text: set data.root=FOLDER or $DATA_ROOT")
    files = ("train.txt", "test.txt")
    return _text.read(FILES["title"], root / FILES["folder"], files, 64, device, masked=True)
