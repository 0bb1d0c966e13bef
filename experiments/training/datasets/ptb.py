from pathlib import Path

import torch

from experiments.training.datasets import _text
from experiments.training.datasets._dataset import Dataset

FILES = {"title": "The Penn Treebank", "folder": "ptb"}


def ptb(root: Path | None, device: torch.device) -> Dataset:
    """The Penn Treebank's text as Mikolov et al. 2010 prepared it: 10,000 words, sequences of 35 of them.

    Files ptb.train.txt and ptb.test.txt; labels are the next words.
    """
    if root is None:
        raise ValueError("the Penn Treebank has no folder: set data.root=FOLDER or $DATA_ROOT")
    return _text.read(FILES["title"], root / FILES["folder"], ("ptb.train.txt", "ptb.test.txt"), 35, device)
