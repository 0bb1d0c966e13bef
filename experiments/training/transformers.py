"""The package transformers, which only some tasks need."""

from __future__ import annotations

import importlib
from typing import Any


def needed_for(model: str) -> Any:
    """The package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"{model} is transformers' implementation, and transformers is not installed here ({error}): "
            "`make transformers` installs it"
        ) from error
