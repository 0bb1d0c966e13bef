from pathlib import Path

import torch

from experiments.training.datasets import _text
from experiments.training.datasets._dataset import Dataset

FILES = {"title": "The Penn Treebank", "folder": "ptb"}


def ptb64(root: Path | None, device: torch.device) -> Dataset:
    """The same text in sequences of 64 words, some of which are hidden and guessed."""
    if root is None:
        raise ValueError("the Penn Treebank has no folder: set data.root=FOLDER or $DATA_ROOT")
    files = ("ptb.train.txt", "ptb.test.txt")
    return _text.read(FILES["title"], root / FILES["folder"], files, 64, device, masked=True)
