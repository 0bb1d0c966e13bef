"""Gradient sparsification: which gradients are sent, what becomes of the rest, how the sent ones meet.

>>> import sparsify
>>> "topk" in sparsify.names()
True
>>> method = sparsify.build("topk", density=0.01)

Importing this package does not import torch; building a method does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsify.methods import build, defaults, names

if TYPE_CHECKING:
    from sparsify.aggregator import redistribute
    from sparsify.ddp import register
    from sparsify.optimiser import DistributedOptimiser as distribute

__all__ = ["build", "defaults", "distribute", "names", "redistribute", "register"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for."""
    if name == "distribute":
        from sparsify.optimiser import DistributedOptimiser

        return DistributedOptimiser
    if name == "register":
        from sparsify.ddp import register

        return register
    if name == "redistribute":
        from sparsify.aggregator import redistribute

        return redistribute
    raise AttributeError(f"module 'sparsify' has no attribute {name!r}")
