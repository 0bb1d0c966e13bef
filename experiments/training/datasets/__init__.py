"""Data sets: each file has a function of its name that reads one; small ones are rows of `_presets`.

A data set read from files describes them in a literal `FILES` (see experiments/config/dataset_files.py), and
has a function `download` where they can be downloaded. The names of its tasks then end in _<data set>.
"""

from __future__ import annotations

from pathlib import Path

import torch

from experiments.training.datasets._dataset import Dataset as Dataset
from experiments.training.datasets._dataset import Split as Split
from experiments.training.datasets._presets import PRESETS
from sparsify.core.spec import Registry

REGISTRY = Registry("data set", __name__, Path(__file__).parent, table=PRESETS)


def load(name: str, root: Path | None, device: torch.device) -> Dataset:
    """Load a data set onto a device; `root` is the folder of its files, where it has any.

    Raises:
        ValueError: an unknown name (lists what there is), or files that are missing or corrupt.
    """
    dataset: Dataset = REGISTRY.build(name, {"root": root, "device": device})
    return dataset
