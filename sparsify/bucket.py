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

    def finite(self) -> Tensor:
        """(number of tensors,) bool on the device: is each tensor's gradient free of NaN and Inf? One pass
        and no host synchronisation. A norm may overflow while every element is finite: see `nonfinite`.
        """
        return torch.isfinite(torch.stack(torch._foreach_norm(self.views)))

    def nonfinite(self, finite: Tensor, intact: bool = True) -> str | None:
        """The name of the first parameter that `finite` accuses; synchronises the host.

        Args:
            intact: do the buckets still hold what `finite` saw? Then the accused are looked at once more.
        """
        if finite.all():
            return None
        for (name, _), view, fine in zip(self.parameters, self.views, finite.tolist(), strict=True):
            if not fine and not (intact and torch.isfinite(view).all()):
                return name
        return None
