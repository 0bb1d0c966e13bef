from pathlib import Path

import torch

from experiments.training.datasets import _digits
from experiments.training.datasets._dataset import Dataset


def digits(root: Path | None, device: torch.device) -> Dataset:
    """The handwritten digits of scikit-learn, 8 x 8, one channel; they need no files."""
    return _digits.read("digits", repeats=1, channels=1, device=device)
