"""Checks of what is given and of what is there, with messages that say what to do instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def check_k(k: int, n: int) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"{k=} elements can't be chosen of {n}; take k between 0 and n")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"no {name} {value!r}; there are: {', '.join(choices)}")


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} is out of range: it must be above 0")


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Where torch is missing within the block, say that `what` needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{what} needs PyTorch, which is not installed here: pip install torch", name="torch"
        ) from None
