"""What selectors share that compare magnitudes with a threshold.

Plain operators take the magnitudes once, and compare them with one threshold after the other, as published
code does. The other kernels compare while they read, so nothing is taken beforehand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify import host_sync
from sparsify.kernels import Eager
from sparsify.types import Selection
from sparsify.workspace import Workspace


def take_magnitudes(acc: Tensor, workspace: Workspace) -> Tensor:
    """(n,) -> (n,): |acc|, in a buffer."""
    return torch.abs(acc, out=workspace.buffer("magnitudes"))


def mask_of(workspace: Workspace) -> Tensor:
    """(n,) bool, a buffer."""
    return workspace.buffer("mask", torch.bool)


def prepare(acc: Tensor, workspace: Workspace) -> None:
    """Before one or several calls of `reaching` with this acc."""
    if isinstance(workspace.kernel, Eager):
        take_magnitudes(acc, workspace)


def reaching(acc: Tensor, threshold: Tensor | float, workspace: Workspace, strict: bool = False) -> Selection:
    """Where |acc| >= threshold (> if strict), ascending; after `prepare`. One host synchronisation."""
    if isinstance(workspace.kernel, Eager):
        compare = torch.gt if strict else torch.ge
        mask = compare(workspace.buffer("magnitudes"), threshold, out=mask_of(workspace))
        return Selection(host_sync.nonzero(mask))
    found = workspace.kernel.above(acc, None, threshold, strict)
    return Selection(*found)
