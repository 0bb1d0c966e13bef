"""A model's gradients: where they lie between backpropagation, averaging and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify.core import host_sync
from sparsify.core.bucket import GradientBuckets, TensorSpec, as_pairs
from sparsify.core.claims import ParameterClaim


class InPlaceGradients(GradientBuckets):
    """Gradients that stay in the memory in which backpropagation computes them, which saves writing zeros and
    adding to them. The average is written there too.
    """

    holds: ClassVar[bool] = False

    def __init__(self, parameters: Iterable[tuple[str, Parameter]], scope: str | float) -> None:
        super().__init__(parameters, scope, holds=self.holds)
        self.kinds = [TensorSpec.from_tensor(p) for _, p in self.parameters]
        self.strides = [p.stride() for _, p in self.parameters]
        self.layouts = [layout_of(p) for _, p in self.parameters]  # strides of their gradients
        self.claim = ParameterClaim("gradients", (p for _, p in self.parameters))

    def clear(self, to_none: bool = True) -> None:
        """Clear all gradients.

        Args:
            to_none: take them away, rather than setting them to zero.

        Raises:
            ValueError: as `collect`.
        """
        self.claim.check()
        if not to_none:
            torch._foreach_zero_([p.grad.detach() for _, p in self.parameters if p.grad is not None])
            return
        for _, p in self.parameters:
            p.grad = None

    def collect(self) -> list[Tensor]:
        """The gradients as they are, (n,) of each parameter, without gaps, and where nothing else lies.
        SparseVector ones become dense; where there is none, as for a parameter that was not used, it is zero.

        Raises:
            ValueError: a gradient has another shape, dtype, device or memory format than at construction; or
                others were made of these parameters since, and own their gradients now.
        """
        self.claim.check()
        parameters = [p for _, p in self.parameters]
        grads = [p.grad for p in parameters]
        if not self._are_as_made(parameters, grads):
            for at in range(len(parameters)):
                self._make_dense(at)
            grads = [p.grad for p in parameters]
        with torch.no_grad():
            flat = [flattened(grad) for grad in grads if grad is not None]
        if overlap(flat):
            # Backpropagation has handed the same memory to several parameters, as it may to `a.view(-1)` and
            # `b.view(-1)` where these are added.
            for p in parameters:
                p.grad = None if p.grad is None else p.grad.detach().clone()
            flat = [flattened(p.grad) for p in parameters if p.grad is not None]
        return flat

    def in_space(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """What `collect` returned, as tensors (m,) that follow each other in the buckets."""
        return [grad for grad in grads if grad.numel()]

    def _are_as_made(self, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """True if there are all gradients, each laid out like its parameter, which are as they were."""
        dense = [grad for grad in grads if grad is not None and grad.layout is torch.strided]
        if len(dense) < len(grads):
            return False
        kind = self.kinds[0]
        return (
            all(grad.dtype == kind.dtype and grad.device == kind.device for grad in dense)
            and [grad.shape for grad in dense] == [kind.shape for kind in self.kinds]
            and [grad.stride() for grad in dense] == self.layouts
            and [p.stride() for p in parameters] == self.strides
        )

    @torch.no_grad()
    def _make_dense(self, at: int) -> None:
        """Lay a gradient out like its parameter."""
        (_, p), kind, layout = self.parameters[at], self.kinds[at], self.layouts[at]
        self.check_kind(at)
        if p.grad is None or p.grad.is_sparse or p.grad.stride() != layout:
            own = torch.empty_strided(kind.shape, layout, dtype=kind.dtype, device=kind.device)
            if p.grad is None:
                own.zero_()
            else:
                own.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
            p.grad = own
        self.strides[at] = p.stride()

    def check_kind(self, at: int) -> None:
        """Refuse a gradient that the residual can't follow."""
        (name, p), kind = self.parameters[at], self.kinds[at]
        for now in map(TensorSpec.from_tensor, (p if p.grad is None else p.grad, p)):
            if now != kind:
                raise ValueError(
                    f"the gradient of {name} was {kind} and is now {now}; convert the model first, then wrap "
                    "it, or build the method's state anew"
                )
        if order_of(p.shape, p.stride()) != order_of(p.shape, self.strides[at]):
            # Fused optimizers take it that both lie in memory alike, without looking.
            raise ValueError(
                f"the strides of {name} were {self.strides[at]} and are now {p.stride()}; convert the model "
                "to its memory format first, then wrap it, or build the method's state anew"
            )


class FlatGradients(InPlaceGradients):
    """Flat gradients that backpropagation fills itself: each parameter's `.grad` is a view of them too, and
    the optimizer reads the average from them without a copy.

    Clear with `zero_`; where something else put another tensor (or none) into `.grad`, or other memory into
    the tensor, `collect` brings it back.
    """

    holds: ClassVar[bool] = True

    def __init__(self, parameters: Iterable[tuple[str, Parameter]], scope: str | float) -> None:
        super().__init__(parameters, scope)
        # Of each parameter, in its shape
        self.grads = [shaped(view, p) for view, (_, p) in zip(self.views, self.parameters, strict=True)]
        for (_, p), grad in zip(self.parameters, self.grads, strict=True):
            p.grad = grad
        self.places = [Place.of(grad) for grad in self.grads]

    def zero_(self) -> None:
        """Clear all gradients in place."""
        self.flat.zero_()

    def clear(self, to_none: bool = True) -> None:
        self.collect()
        self.zero_()

    def collect(self) -> list[Tensor]:
        """Make every `.grad` a view of the flat tensor again. A gradient that lies elsewhere, because
        something else allocated it or moved it (`model.to`), is copied. Returns the views; the rest is as for
        `InPlaceGradients.collect`.
        """
        self.claim.check()
        for at in range(len(self.parameters)):
            self.restore(at)
        return self.views

    def in_space(self, grads: Sequence[Tensor]) -> list[Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def restore(self, at: int) -> None:
        """`collect` for one parameter."""
        grad, p = self.grads[at], self.parameters[at][1]
        if p.grad is not grad or Place.of(grad) != self.places[at] or p.stride() != self.strides[at]:
            self._bring_back(at)

    @torch.no_grad()
    def _bring_back(self, at: int) -> None:
        (_, p), view, kind, place = self.parameters[at], self.views[at], self.kinds[at], self.places[at]
        self.check_kind(at)
        grad = as_pairs(view, p).as_strided(kind.shape, place.stride)
        if p.grad is None:
            view.zero_()
        else:
            grad.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        p.grad = self.grads[at] = grad
        self.places[at], self.strides[at] = Place.of(grad), p.stride()

    def finite(self) -> Tensor:
        """(number of tensors,) bool on the device: is each gradient finite? See `finite_norms`."""
        return finite_norms(self.views)

    def nonfinite(self, finite: Tensor) -> str | None:
        """Name of the first parameter whose gradient is not finite; `finite` is of the gradients as they are
        now. One host synchronisation, and a second one where a norm is not finite.
        """
        if all(host_sync.to_host(finite)):
            return None
        flags = host_sync.to_host(finite_elements(self.views))
        return next((name for (name, _), fine in zip(self.parameters, flags, strict=True) if not fine), None)


def flattened(grad: Tensor) -> Tensor:
    """(n,) real numbers, as a dense tensor's lie in memory."""
    if grad.is_contiguous() and not grad.is_complex():
        return grad.view(-1)
    numbers = torch.view_as_real(grad) if grad.is_complex() else grad
    return numbers.as_strided((numbers.numel(),), (1,))


def overlap(tensors: Sequence[Tensor]) -> bool:
    """True if two of these (n,) share memory."""
    starts = np.array([tensor.data_ptr() for tensor in tensors])
    ends = starts + np.array([tensor.nbytes for tensor in tensors])
    return bool((np.sort(ends)[:-1] > np.sort(starts)[1:]).any())


def finite_norms(tensors: Sequence[Tensor]) -> Tensor:
    """(number of tensors,) bool on the device: is each free of NaN and Inf? One pass and no host
    synchronisation. A norm may overflow while every element is finite: see `finite_elements`.
    """
    return torch.isfinite(torch.stack(torch._foreach_norm(list(tensors))))


def finite_elements(tensors: Sequence[Tensor]) -> Tensor:
    """The same of every element: more passes and launches, for when a norm is not finite."""
    return torch.stack([torch.isfinite(tensor).all() for tensor in tensors])


class Place(NamedTuple):
    """A tensor's place in memory."""

    address: int
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Place of a tensor."""
        return cls(tensor.data_ptr(), tensor.stride(), tensor.dtype)


def order_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    """Order in which elements lie in memory; of sides of 1 the stride says nothing."""
    return [(size, step) for size, step in zip(shape, stride, strict=True) if size > 1]


def shaped(view: Tensor, p: Tensor) -> Tensor:
    """(n,) in the shape of p, see `layout_of`."""
    return as_pairs(view, p).as_strided(p.shape, layout_of(p))


def layout_of(p: Tensor) -> tuple[int, ...]:
    """Strides of its gradient: laid out like it, so that a channels-last parameter keeps its own layout; but
    row by row where p has gaps, or elements that share memory. Autograd makes its gradients alike.
    """
    is_dense = torch.empty_like(p, device="meta").stride() == p.stride()
    return p.stride() if is_dense else torch.empty(p.shape, dtype=p.dtype, device="meta").stride()
