from pathlib import Path

import torch

from experiments.training.datasets._dataset import Dataset, Split, digest_splits

FILES = {
    "title": "CIFAR-10",
    "folder": "cifar-10-batches-py",
    "host": "www.cs.toronto.edu",
    "size": "163 MiB",
}


def cifar10(root: Path | None, device: torch.device) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009) from torchvision's files, whose MD5 sums torchvision checks."""
    from torchvision.datasets import CIFAR10

    if root is None:
        raise ValueError("CIFAR-10 has no folder: set data.root=FOLDER or $DATA_ROOT")

    def split(train: bool) -> Split:
        try:
            files = CIFAR10(str(root), train=train, download=False)
        except RuntimeError as error:
            raise ValueError(
                f"CIFAR-10 in {root} is missing or corrupt (a checksum differs): remove "
                f"{root / CIFAR10.base_folder} and run again to download it, or set data.root to a sound copy"
            ) from error
        return Split(torch.from_numpy(files.data), torch.tensor(files.targets))

    train = split(train=True)
    test = split(train=False)
    # As published, to three digits.
    mean = (0.491, 0.482, 0.447)
    std = (0.247, 0.243, 0.262)
    name = FILES["title"]
    digest = digest_splits(train, test)
    return Dataset(name, digest, train, test, 10, padding=4, flip=True, mean=mean, std=std).to(device)


def download(root: Path) -> None:
    """torchvision knows address, checksum and layout."""
    from torchvision.datasets import CIFAR10

    CIFAR10(str(root), download=True)
