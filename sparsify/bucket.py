"""Parameters <-> flat buckets: what is exchanged together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

SCOPES = ("global", "layer")


class Gradients:
    """The gradients of a model as one flat tensor, and its buckets, which are views of it.

    Each parameter's `.grad` becomes a view too, so that backpropagation fills the buckets and the optimiser
    reads the average from them without a copy. The order is that in which backpropagation finishes: the
    output layer first, as the code of Shi et al. merges them. Clear with `zero_`, not with
    `zero_grad(set_to_none=True)`, which would cut the views off.

    Args:
        scope: what one bucket spans: `global`, the whole model, or `layer`, one tensor.
    """

    def __init__(self, parameters: Iterable[tuple[str, Parameter]], scope: str) -> None:
        if scope not in SCOPES:
            raise ValueError(f"no scope {scope!r}; there are: {', '.join(SCOPES)}")
        self.parameters = [(name, p) for name, p in parameters if p.requires_grad][::-1]
        kinds = {(p.dtype, p.device) for _, p in self.parameters}
        if len(kinds) != 1:
            raise ValueError(
                f"gradients of one model must share dtype and device, these have {sorted(map(str, kinds))}"
            )
        dtype, device = kinds.pop()
        self.flat = torch.zeros(sum(p.numel() for _, p in self.parameters), dtype=dtype, device=device)
        self.views: list[Tensor] = []
        start = 0
        for _, p in self.parameters:
            view = self.flat[start : start + p.numel()]
            p.grad = view.as_strided(p.shape, p.stride())  # keeps channels-last parameters' own layout
            self.views.append(view)
            start += p.numel()
        self.buckets = [self.flat] if scope == "global" else self.views

    def zero_(self) -> None:
        self.flat.zero_()

    def nonfinite(self) -> str | None:
        """The name of the first parameter with a NaN or Inf in its gradient; one pass and one host
        synchronisation.
        """
        if torch.isfinite(self.flat.sum()):
            return None
        # The sum may overflow while every element is finite: look at the elements before accusing one.
        for (name, _), view in zip(self.parameters, self.views, strict=True):
            if not torch.isfinite(view).all():
                return name
        return None
