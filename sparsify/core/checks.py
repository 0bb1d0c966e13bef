"""Checks of what is given and of what is there, with messages that say what to do instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

DISTRIBUTION = "gradient-sparsification"  # what package indices call this
THEIRS = "sparsify"  # and another project, whose modules are imported by the same name


def check_k(k: int, n: int) -> None:
    """Refuse to choose more elements than there are."""
    if not 0 <= k <= n:
        raise ValueError(f"{k=} elements can't be chosen of {n}; take k between 0 and n")


def check_unmixed(package: Path) -> None:
    """Refuse a folder of this package into which the other project's files were installed, too.

    Raises:
        ImportError: its metadata lie beside the folder.
    """
    if not any(package.parent.glob(f"{THEIRS}-*.dist-info")):
        return
    raise ImportError(
        f"two projects have installed their files into {package}: {DISTRIBUTION}, which this is, and "
        f"another one, {THEIRS}; `pip uninstall {THEIRS} {DISTRIBUTION}`, then install the one that you "
        "want, or each into an environment of its own",
        name=package.name,
    )


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Say that `what` needs torch where the block misses it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{what} needs PyTorch, which is not installed here: pip install torch", name="torch"
        ) from None
