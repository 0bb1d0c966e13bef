from pathlib import Path

import torch

from experiments.training.datasets._dataset import Dataset, Split, digest_splits

FILES = {"title": "MNIST", "folder": "MNIST", "host": "ossci-datasets.s3.amazonaws.com", "size": "11 MiB"}
EXAMPLES = {True: 60_000, False: 10_000}  # for training, for tests


def mnist(root: Path | None, device: torch.device) -> Dataset:
    """MNIST (LeCun, Cortes and Burges 1998), 28 x 28, from the files that torchvision reads."""
    from torchvision.datasets import MNIST

    if root is None:
        raise ValueError("MNIST has no folder: set data.root=FOLDER or $DATA_ROOT")

    def split(train: bool) -> Split:
        try:
            files = MNIST(str(root), train=train, download=False)
        except (RuntimeError, ValueError, AssertionError, OSError) as error:  # cut short, or of others
            raise ValueError(_explain_unusable(root)) from error
        if files.data.shape != (EXAMPLES[train], 28, 28) or len(files.targets) != EXAMPLES[train]:
            raise ValueError(_explain_unusable(root))
        return Split(files.data[..., None].contiguous(), files.targets)

    train = split(train=True)
    test = split(train=False)
    mean = (0.1307,)
    std = (0.3081,)
    return Dataset(FILES["title"], digest_splits(train, test), train, test, 10, mean=mean, std=std).to(device)


def _explain_unusable(root: Path) -> str:
    return (
        f"MNIST in {root} is missing or corrupt: remove {root / 'MNIST'} and run again to download it, or "
        "set data.root to a sound copy"
    )


def download(root: Path) -> None:
    """torchvision knows address, checksum and layout."""
    from torchvision.datasets import MNIST

    MNIST(str(root), download=True)
