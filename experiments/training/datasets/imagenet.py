import hashlib
from pathlib import Path

import torch

from experiments.training.datasets._dataset import Dataset, Split
from experiments.training.datasets._image_files import ImageFiles

FILES = {"title": "ImageNet", "folder": "imagenet", "instead": "images224"}
SIZE = (1000, 1_281_167, 50_000)  # of ImageNet-1k: classes, images for training, for validation
HOW = (
    "it needs train/ and val/ with the same folders in both, one for each class, and its images in them, as "
    "torchvision's ImageFolder reads them; tasks named _images224 time the networks on synthetic images"
)


def imagenet(root: Path | None, device: torch.device) -> Dataset:
    """ImageNet (Russakovsky et al. 2015) in data.root/imagenet: train/ and val/ with a folder for each class.

    It can't be downloaded without an account. Images are opened batch by batch. The digest is of the sorted
    names of all files and their sizes: reading 150 GB would take an hour.
    """
    if root is None:
        raise ValueError(f"ImageNet has no folder: set data.root=FOLDER or $DATA_ROOT; {HOW}")
    folder = root / FILES["folder"]
    classes, train = _listed(folder / "train")
    found, test = _listed(folder / "val")
    if classes != found:
        where, name = min((("train" if name in classes else "val"), name) for name in {*classes} ^ {*found})
        raise ValueError(
            f"{folder} has {len(classes)} classes to train and {len(found)} to validate, and {name} is in "
            f"{where}/ alone; {HOW}"
        )
    files = [str(Path(path).relative_to(folder)) for path, _ in (*train, *test)]
    numbers = torch.arange(len(files)).split([len(train), len(test)])
    splits = [
        Split(images, torch.tensor([label for _, label in those]))
        for images, those in zip(numbers, (train, test), strict=True)
    ]
    return ImageFiles(
        name=_name(len(classes), len(train), len(test)),
        digest=_digest(folder, files),
        train=splits[0],
        test=splits[1],
        classes=len(classes),
        padding=0,
        flip=True,
        mean=(0.485, 0.456, 0.406),  # of torchvision's models
        std=(0.229, 0.224, 0.225),
        folder=folder,
        files=files,
    ).to(device)


def _listed(folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """The names of its classes, and the paths of its images with the number of their class.

    Raises:
        ValueError: it is not laid out as ImageNet.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    try:
        classes, numbers = find_classes(str(folder))
        return classes, make_dataset(str(folder), numbers, IMG_EXTENSIONS)
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"{folder} is not laid out as ImageNet ({why}); {HOW}") from error


def _name(*size: int) -> str:
    classes, train, _ = size
    return FILES["title"] if size == SIZE else f"{train:,} images of {classes:,} classes in place of ImageNet"


def _digest(folder: Path, files: list[str]) -> str:
    """SHA-256 of names and sizes."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {(folder / name).stat().st_size}\n".encode())
    return digest.hexdigest()
