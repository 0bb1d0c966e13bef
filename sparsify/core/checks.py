"""Checks of arguments and of the installation, with messages that say what to do instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

DISTRIBUTION = "gradient-sparsification"  # this project's name in package indices
OTHER_DISTRIBUTION = "sparsify"  # another project, whose modules are imported by the same name


def check_k(k: int, n: int) -> None:
    """Refuse to choose more elements than there are."""
    if not 0 <= k <= n:
        raise ValueError(f"{k=} elements can't be chosen of {n}; take k between 0 and n")


def check_no_name_clash(package: Path) -> None:
    """Refuse a folder of this package into which the other project's files were installed, too.

    Raises:
        ImportError: its metadata lie beside the folder.
    """
    if not any(package.parent.glob(f"{OTHER_DISTRIBUTION}-*.dist-info")):
        return
    raise ImportError(
        f"two projects have installed their files into {package}: {DISTRIBUTION}, which this is, and "
        f"another one, {OTHER_DISTRIBUTION}; `pip uninstall {OTHER_DISTRIBUTION} {DISTRIBUTION}`, then "
        "install the one that you want, or each into an environment of its own",
        name=package.name,
    )


@contextlib.contextmanager
def explain_missing_torch(feature: str) -> Iterator[None]:
    """Say that a feature needs torch where an import in the block fails for lack of it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{feature} needs PyTorch, which is not installed here: pip install torch", name="torch"
        ) from None
