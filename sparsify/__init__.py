"""Gradient sparsification: which gradients are sent, what becomes of the rest, how the sent ones meet.

>>> import sparsify
>>> "topk" in sparsify.names()
True
>>> method = sparsify.build("topk", density=0.01)

Importing this package does not import torch; building a method does.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsify.checks import check_unmixed, needs_torch
from sparsify.methods import build, defaults, names

if TYPE_CHECKING:
    from sparsify.aggregator import redistribute
    from sparsify.ddp import register
    from sparsify.optimiser import DistributedOptimiser as distribute

__all__ = ["build", "defaults", "distribute", "names", "redistribute", "register"]
__version__ = "0.1.0"

check_unmixed(Path(__file__).parent)

# What needs torch is imported when it is asked for.
WITH_TORCH = {
    "distribute": ("sparsify.optimiser", "DistributedOptimiser"),
    "redistribute": ("sparsify.aggregator", "redistribute"),
    "register": ("sparsify.ddp", "register"),
}


if not TYPE_CHECKING:  # type checkers know these from above, and that there are no others

    def __getattr__(name: str) -> Any:
        if name not in WITH_TORCH:
            raise AttributeError(f"module 'sparsify' has no attribute {name!r}")
        module, attribute = WITH_TORCH[name]
        with needs_torch(f"sparsify.{name}"):
            return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
