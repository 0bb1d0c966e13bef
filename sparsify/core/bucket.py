"""Parameters <-> flat buckets: what is exchanged together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from sparsify import ranges
from sparsify.core import huge_pages
from sparsify.ranges import ScopeOrBucket

MEGABYTE = 2**20
LINE = 128  # bytes that a GPU reads at once: 32 float32. Loads of 16 bytes need a start that 16 divides


class Bucket(NamedTuple):
    """A flat run of gradients exchanged together."""

    flat: Tensor  # (n,), a view of all gradients
    names: tuple[str, ...]  # of its parameters, in order
    shapes: tuple[tuple[int, ...], ...]


class TensorSpec(NamedTuple):
    """Properties of a gradient that must not change, since its residual can't follow."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Kind of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} on {self.device}"


class GradientBuckets:
    """The gradients of a model as one flat tensor, and its buckets, which are views of it.

    Each bucket begins at a multiple of 128 bytes. The gaps between them hold zeros and are in no bucket: they
    are neither selected nor sent nor counted. Inside a bucket tensors follow each other without gaps, in the
    order of `in_backward_order`.

    A complex number is two real ones here, as in PyTorch's optimizers.

    Args:
        scope: what one bucket spans: `global`, the whole model; `layer`, one tensor; or a number, a size in
            MB (of 2^20 bytes): consecutive tensors up to that size, a larger tensor alone.
        anew: what somebody can do where the gradients are of several types.
        holds: False: there is no memory behind them, only their type and sizes; gradients lie elsewhere.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Parameter]],
        scope: str | float,
        anew: str = "give each kind an optimizer of its own, and wrap each of them",
        holds: bool = True,
    ) -> None:
        ranges.check_value("scope", scope, ScopeOrBucket)
        if scope == "bucket":
            raise ValueError(
                "scope='bucket' is a bucket of DistributedDataParallel's, for sparsify.register; here take a "
                "size in MB, such as scope=25"
            )
        self.parameters = in_backward_order(parameters)
        kinds = {(p.dtype.to_real(), p.device) for _, p in self.parameters}
        if len(kinds) != 1:
            raise ValueError(
                "gradients of one model must share dtype and device, these have "
                f"{sorted(map(str, kinds))}; {anew}"
            )
        dtype, device = kinds.pop()
        sizes = [num_reals(p) for _, p in self.parameters]
        together = list(grouped(sizes, dtype.itemsize, scope))
        starts, end = laid_out(sizes, dtype.itemsize, together)
        if holds:
            self.flat = huge_pages.advise(torch.empty(end, dtype=dtype, device=device)).zero_()
        else:
            self.flat = torch.zeros(1, dtype=dtype, device=device).expand(end)
        # (n,) of each parameter
        self.views = [self.flat[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self.buckets = list[Bucket]()
        for inside in together:
            names, parts = zip(*self.parameters[inside.start : inside.stop], strict=True)
            flat = self.flat[starts[inside.start] : starts[inside[-1]] + sizes[inside[-1]]]
            self.buckets.append(Bucket(flat, names, tuple(map(shape_of, parts))))


def in_backward_order(parameters: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    """Those that require a gradient, in the order in which backpropagation finishes: the output layer first,
    as the code of Shi et al. merges them; but complex ones before all others, for they lie at even places
    only.
    """
    named = [(name, p) for name, p in parameters if p.requires_grad][::-1]
    if not named:
        raise ValueError("there is nothing to aggregate: no parameter requires a gradient")
    for name, p in named:
        check_tensor(name, p)
    return sorted(named, key=lambda one: not one[1].is_complex())


def grouped(sizes: Sequence[int], itemsize: int, scope: str | float) -> Iterator[range]:
    """Ranges of tensors that share a bucket. Those that would make up an empty one are left out."""
    first = elements = 0
    for at, size in enumerate(sizes):
        elements += size
        following = sizes[at + 1] if at + 1 < len(sizes) else 0
        fits = not isinstance(scope, str) and (elements + following) * itemsize <= scope * MEGABYTE
        if at + 1 == len(sizes) or not (scope == "global" or fits):
            if elements:  # nothing of an empty tensor can be exchanged
                yield range(first, at + 1)
            first, elements = at + 1, 0


def laid_out(sizes: Sequence[int], itemsize: int, together: Sequence[range]) -> tuple[list[int], int]:
    """Elements at which each tensor starts, and at which the last one ends."""
    firsts, line = {inside[0] for inside in together}, LINE // itemsize
    starts, end = list[int](), 0
    for at, size in enumerate(sizes):
        if at in firsts:
            end += -end % line
        starts.append(end)
        end += size
    return starts, end


def num_reals(p: Tensor) -> int:
    """Number of real numbers in a tensor."""
    return p.numel() * (2 if p.is_complex() else 1)


def shape_of(p: Tensor) -> tuple[int, ...]:
    """Shape in real numbers."""
    return (*p.shape, 2) if p.is_complex() else tuple(p.shape)


def as_pairs(view: Tensor, p: Tensor) -> Tensor:
    """(n,) real numbers as (n / 2,) complex ones, where p's are."""
    return torch.view_as_complex(view.view(view.numel() // 2, 2)) if p.is_complex() else view


def check_tensor(name: str, tensor: Tensor) -> None:
    """Refuse what has no elements of its own on this worker."""
    if is_lazy(tensor):
        raise ValueError(f"{name} has no shape yet; run one batch through the model first")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device, which stores nothing; load the weights first")
    if hasattr(tensor, "device_mesh"):
        raise ValueError(
            f"{name} is a DTensor, as FSDP2 and tensor parallelism make them: its worker has a part of the "
            "gradient only; sparsification needs the whole model on every worker"
        )
    if tensor.is_inference():
        raise ValueError(
            f"{name} was made in inference mode, so nothing may be written to it; make the model outside"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is a sparse tensor; make it dense")
    if tensor.is_quantized or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(
            f"{name} is of the type {type(tensor).__name__} and no plain tensor, so that its elements can't "
            "be exchanged; train plain ones, and let each worker keep a frozen one of that type: tell its "
            "name to DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)"
        )
    if not tensor.requires_grad:
        return
    if tensor.dtype.itemsize == 1:
        raise ValueError(
            f"{name} is trained in {tensor.dtype}, which has no sums to average; keep what is trained in "
            "bfloat16 or float32, and convert it where it is used"
        )
    if hasattr(tensor, "_in_backward_optimizers"):
        raise ValueError(
            f"{name} is stepped within the backward pass, by _apply_optimizer_in_backward, before anything "
            "is averaged; make a plain optimizer of it instead"
        )


def ignored_names(model: nn.Module) -> set[str]:
    """Return the names of what each worker has for itself: parameters and buffers that were told to
    `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`.
    """
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def local_part(tensor: Tensor) -> Tensor:
    """Return what this worker has of a DTensor, in its own memory; any other tensor itself, detached."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()
