"""Parameters <-> flat buckets: what is exchanged together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

SCOPES = ("global", "layer")
MEGABYTE = 2**20


class Bucket(NamedTuple):
    """A flat run of gradients exchanged together."""

    flat: Tensor  # (n,), a view of all gradients
    names: tuple[str, ...]  # of its parameters, in order
    shapes: tuple[tuple[int, ...], ...]


class Gradients:
    """The gradients of a model as one flat tensor, and its buckets, which are views of it.

    Each parameter's `.grad` becomes a view too, so that backpropagation fills the buckets and the optimiser
    reads the average from them without a copy. The order is that in which backpropagation finishes: the
    output layer first, as the code of Shi et al. merges them. Clear with `zero_`; where something else put
    another tensor (or none) into `.grad`, `collect` brings it back.

    Args:
        scope: what one bucket spans: `global`, the whole model; `layer`, one tensor; or a number, a size in
            MB (of 2^20 bytes): tensors in a row up to that size, a larger tensor alone.
    """

    def __init__(self, parameters: Iterable[tuple[str, Parameter]], scope: str | float) -> None:
        check_scope(scope)
        self.parameters = [(name, p) for name, p in parameters if p.requires_grad][::-1]
        if not self.parameters:
            raise ValueError("there is nothing to aggregate: no parameter requires a gradient")
        kinds = {(p.dtype, p.device) for _, p in self.parameters}
        if len(kinds) != 1:
            raise ValueError(
                f"gradients of one model must share dtype and device, these have {sorted(map(str, kinds))}"
            )
        dtype, device = kinds.pop()
        self.flat = torch.zeros(sum(p.numel() for _, p in self.parameters), dtype=dtype, device=device)
        self.views: list[Tensor] = []  # (n,) of each parameter
        self.grads: list[Tensor] = []  # the same in the parameter's shape
        start = 0
        for _, p in self.parameters:
            view = self.flat[start : start + p.numel()]
            # As strided, a channels-last parameter keeps its own layout.
            self.grads.append(view.as_strided(p.shape, p.stride()))
            self.views.append(view)
            p.grad = self.grads[-1]
            start += p.numel()
        self.buckets = list(self._buckets(scope))

    def _buckets(self, scope: str | float) -> Iterator[Bucket]:
        first = start = end = 0
        for at, view in enumerate(self.views):
            end += view.numel()
            following = self.views[at + 1].nbytes if at + 1 < len(self.views) else 0
            fits = not isinstance(scope, str) and (
                (end - start) * view.element_size() + following <= scope * MEGABYTE
            )
            if at + 1 == len(self.views) or not (scope == "global" or fits):
                if end > start:  # nothing of an empty tensor can be exchanged
                    inside = self.parameters[first : at + 1]
                    names, shapes = zip(*((name, tuple(p.shape)) for name, p in inside), strict=True)
                    yield Bucket(self.flat[start:end], names, shapes)
                first, start = at + 1, end

    def zero_(self) -> None:
        self.flat.zero_()

    def collect(self) -> None:
        """Make every `.grad` a view of the flat tensor again. A gradient that something else allocated is
        copied (sparse ones become dense); where there is none, as for a parameter that was not used, it is
        zero.
        """
        for (name, p), grad in zip(self.parameters, self.grads, strict=True):
            if p.grad is grad:
                continue
            if p.grad is None:
                grad.zero_()
            elif p.grad.dtype != grad.dtype or p.grad.device != grad.device or p.grad.shape != grad.shape:
                raise ValueError(
                    f"the gradient of {name} was {describe(grad)} and is now {describe(p.grad)}; build the "
                    "method's state anew after changing the model"
                )
            else:
                grad.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
            p.grad = grad

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


def check_scope(scope: str | float) -> None:
    if isinstance(scope, str) and scope not in SCOPES:
        raise ValueError(f"no scope {scope!r}; there are: {', '.join(SCOPES)}, or a bucket size in MB")
    if not isinstance(scope, str) and not scope > 0:
        raise ValueError(f"{scope=} is out of range: a bucket size in MB must be above 0")


def describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
