"""Memory of a model's gradients between backpropagation, averaging and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify.core import host_sync
from sparsify.core.bucket import GradientBuckets, TensorSpec, view_as_complex_like
from sparsify.core.claims import SupersedableClaim


class InPlaceGradients(GradientBuckets):
    """Gradients that stay in the memory in which backpropagation computes them.

    That saves writing zeros and adding to them. The average is written there too.
    """

    allocates: ClassVar[bool] = False

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]], scope: str | float) -> None:
        super().__init__(named_parameters, scope, allocates=self.allocates)
        self.specs = [TensorSpec.from_tensor(p) for p in self.parameters]
        self.strides = [p.stride() for p in self.parameters]
        self.grad_strides = [gradient_strides(p) for p in self.parameters]  # strides of their gradients
        self.claim = SupersedableClaim("gradients", self.parameters)

    def clear(self, set_to_none: bool = True) -> None:
        """Clear all gradients.

        Args:
            set_to_none: take them away, rather than setting them to zero.

        Raises:
            ValueError: as `collect`.
        """
        self.claim.check_not_superseded()
        if not set_to_none:
            torch._foreach_zero_([p.grad.detach() for p in self.parameters if p.grad is not None])
            return
        for p in self.parameters:
            p.grad = None

    def collect_by_parameter(self) -> list[Tensor]:
        """Return the gradients as they are, (n,) of each parameter, without gaps or shared memory.

        Sparse gradients become dense; where there is none, as for a parameter that was not used, it is zero.

        Raises:
            ValueError: a gradient has another shape, dtype, device or memory format than at construction; or
                others were made of these parameters since, and own their gradients now.
        """
        self.claim.check_not_superseded()
        grads = [p.grad for p in self.parameters]
        if not self._are_as_expected(grads):
            for index in range(len(grads)):
                self._make_dense(index)
            grads = [p.grad for p in self.parameters]
        with torch.no_grad():
            flat = [view_flat_in_memory_order(grad) for grad in grads if grad is not None]
        if _have_overlap(flat):
            # Backpropagation has handed the same memory to several parameters, as it may to `a.view(-1)` and
            # `b.view(-1)` where these are added.
            for p in self.parameters:
                p.grad = None if p.grad is None else p.grad.detach().clone()
            flat = [view_flat_in_memory_order(p.grad) for p in self.parameters if p.grad is not None]
        return flat

    def tensors_in_bucket_order(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return what `collect` returned as tensors (m,) that follow each other in the buckets."""
        return [grad for grad in grads if grad.numel()]

    def _are_as_expected(self, grads: Sequence[Tensor | None]) -> bool:
        """Tell whether all gradients are there, each laid out like its parameter, which are as they were."""
        dense = [grad for grad in grads if grad is not None and grad.layout is torch.strided]
        if len(dense) < len(grads):
            return False
        first = self.specs[0]
        return (
            all(grad.dtype == first.dtype and grad.device == first.device for grad in dense)
            and [grad.shape for grad in dense] == [spec.shape for spec in self.specs]
            and [grad.stride() for grad in dense] == self.grad_strides
            and [p.stride() for p in self.parameters] == self.strides
        )

    @torch.no_grad()
    def _make_dense(self, index: int) -> None:
        """Lay a gradient out like its parameter."""
        p = self.parameters[index]
        spec = self.specs[index]
        stride = self.grad_strides[index]
        self.check_spec_unchanged(index)
        if p.grad is None or p.grad.is_sparse or p.grad.stride() != stride:
            dense = torch.empty_strided(spec.shape, stride, dtype=spec.dtype, device=spec.device)
            _copy_gradient(p, dense)
            p.grad = dense
        self.strides[index] = p.stride()

    def check_spec_unchanged(self, index: int) -> None:
        """Refuse a gradient that the residual can't follow."""
        name, p = self.named_parameters[index]
        spec = self.specs[index]
        for tensor in (p if p.grad is None else p.grad, p):
            current = TensorSpec.from_tensor(tensor)
            if current != spec:
                raise ValueError(
                    f"the gradient of {name} was {spec} and is now {current}; convert the model first, then "
                    "wrap it, or build the method's state anew"
                )
        if _memory_order(p.shape, p.stride()) != _memory_order(p.shape, self.strides[index]):
            # Fused optimizers take it that both lie in memory alike, without looking.
            raise ValueError(
                f"the strides of {name} were {self.strides[index]} and are now {p.stride()}; convert the "
                "model to its memory format first, then wrap it, or build the method's state anew"
            )


class FlatGradients(InPlaceGradients):
    """Gradients in one flat tensor, which backpropagation fills itself.

    Each parameter's `.grad` is a view of it, and the optimizer reads the average from there without a copy.
    Clear with `zero_`; where something else put another tensor (or none) into `.grad`, or other memory into
    the tensor, `collect` brings it back.
    """

    allocates: ClassVar[bool] = True

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]], scope: str | float) -> None:
        super().__init__(named_parameters, scope)
        # Of each parameter, in its shape.
        self.grads = list[Tensor]()
        for view, p, stride in zip(self.views, self.parameters, self.grad_strides, strict=True):
            grad = view_as_complex_like(view, p).as_strided(p.shape, stride)
            p.grad = grad
            self.grads.append(grad)
        self.locations = [MemoryLocation.from_tensor(grad) for grad in self.grads]

    def zero_(self) -> None:
        """Clear all gradients in place."""
        self.flat.zero_()

    def clear(self, set_to_none: bool = True) -> None:
        self.collect_by_parameter()
        self.zero_()

    def collect_by_parameter(self) -> list[Tensor]:
        """Make every `.grad` a view of the flat tensor again, and return the views.

        A gradient that lies elsewhere, because something else allocated it or moved it (`model.to`), is
        copied. The rest is as for `InPlaceGradients.collect`.
        """
        self.claim.check_not_superseded()
        for index in range(len(self.parameters)):
            self.restore_view(index)
        return self.views

    def tensors_in_bucket_order(self, grads: Sequence[Tensor]) -> list[Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def restore_view(self, index: int) -> None:
        """Make the `.grad` of one parameter a view of the flat tensor again."""
        grad = self.grads[index]
        p = self.parameters[index]
        is_moved = MemoryLocation.from_tensor(grad) != self.locations[index]
        if p.grad is not grad or is_moved or p.stride() != self.strides[index]:
            self._move_back(index)

    @torch.no_grad()
    def _move_back(self, index: int) -> None:
        p = self.parameters[index]
        self.check_spec_unchanged(index)
        view = view_as_complex_like(self.views[index], p)
        grad = view.as_strided(self.specs[index].shape, self.locations[index].stride)
        _copy_gradient(p, grad)
        p.grad = grad
        self.grads[index] = grad
        self.locations[index] = MemoryLocation.from_tensor(grad)
        self.strides[index] = p.stride()

    def are_finite(self) -> Tensor:
        """Return (number of tensors,) bool on the device: is each gradient finite? See `are_norms_finite`."""
        return are_norms_finite(self.views)

    def find_nonfinite_parameter(self, finite_flags: Tensor) -> str | None:
        """Find the name of the first parameter whose gradient is not finite.

        One host synchronisation, and a second one where a norm is not finite.

        Args:
            finite_flags: as `are_finite` returned of the gradients as they are now.
        """
        if all(host_sync.to_host(finite_flags)):
            return None
        flags = host_sync.to_host(are_elements_finite(self.views))
        names = (name for name, _ in self.named_parameters)
        return next((name for name, is_finite in zip(names, flags, strict=True) if not is_finite), None)


def _copy_gradient(p: Parameter, out: Tensor) -> None:
    """Copy a parameter's gradient, sparse or not; zeros where it has none."""
    if p.grad is None:
        out.zero_()
    else:
        out.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)


def view_flat_in_memory_order(grad: Tensor) -> Tensor:
    """View a dense tensor as real numbers (n,), in the order in which they lie in memory."""
    if grad.is_contiguous() and not grad.is_complex():
        return grad.view(-1)
    numbers = torch.view_as_real(grad) if grad.is_complex() else grad
    return numbers.as_strided((numbers.numel(),), (1,))


def _have_overlap(tensors: Sequence[Tensor]) -> bool:
    """Tell whether two of these tensors (n,) share memory."""
    starts = np.array([tensor.data_ptr() for tensor in tensors])
    ends = starts + np.array([tensor.nbytes for tensor in tensors])
    return bool((np.sort(ends)[:-1] > np.sort(starts)[1:]).any())


def are_norms_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return (number of tensors,) bool on the device, True where a tensor's norm is finite.

    One pass and no host synchronisation. A norm may overflow while every element is finite: see
    `are_elements_finite`.
    """
    return torch.isfinite(torch.stack(torch._foreach_norm(list(tensors))))


def are_elements_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return (number of tensors,) bool on the device, True where all of a tensor's elements are finite.

    It takes more passes and launches than `are_norms_finite`, so it is for when a norm is not finite.
    """
    return torch.stack([torch.isfinite(tensor).all() for tensor in tensors])


class MemoryLocation(NamedTuple):
    """Address, strides and dtype of a tensor's memory."""

    address: int
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> MemoryLocation:
        """Return where a tensor lies."""
        return cls(tensor.data_ptr(), tensor.stride(), tensor.dtype)


def _memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the order in which elements lie in memory; of sides of 1 the stride says nothing."""
    return [(size, step) for size, step in zip(shape, stride, strict=True) if size > 1]


def gradient_strides(p: Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient, as autograd makes them.

    A gradient is laid out like its parameter, so that a channels-last parameter keeps its layout; but row by
    row where the parameter has gaps, or elements that share memory.
    """
    is_dense = torch.empty_like(p, device="meta").stride() == p.stride()
    return p.stride() if is_dense else torch.empty(p.shape, dtype=p.dtype, device="meta").stride()
