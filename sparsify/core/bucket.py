"""Buckets: flat stretches of gradients that are exchanged together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from sparsify import ranges
from sparsify.core import huge_pages
from sparsify.core.grouping import group_consecutive_indices
from sparsify.ranges import ScopeOrBucket

BYTES_PER_MB = 2**20
# Integer types that hold the bits of an element, by its bytes.
INTEGER_BY_NBYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ALIGNMENT_BYTES = 128  # that a GPU reads at once: 32 float32. Loads of 16 bytes need a start that 16 divides


class Bucket(NamedTuple):
    """A flat stretch of gradients that are exchanged together."""

    flat: Tensor  # (n,), a view of all gradients
    names: tuple[str, ...]  # of its parameters, in order
    shapes: tuple[tuple[int, ...], ...]


class TensorSpec(NamedTuple):
    """Shape, dtype and device of a gradient, which must not change, since its residual can't follow."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorSpec:
        """Return the shape, dtype and device of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} on {self.device}"


def describe_tensors(*tensors: Tensor | None, separator: str = ", ") -> str:
    """Return the shapes, types and devices of tensors that are not None, for a message."""
    specs = [TensorSpec.from_tensor(tensor) for tensor in tensors if tensor is not None]
    return separator.join(map(str, specs))


class GradientBuckets:
    """The division of a model's gradients into buckets, which are views of one flat tensor.

    Each bucket begins at a multiple of 128 bytes. The gaps between buckets hold zeros and are in no bucket:
    they are neither selected nor sent nor counted. Inside a bucket tensors follow each other without gaps, in
    the order of `parameters_in_backward_order`.

    A complex number is two real ones here, as in PyTorch's optimizers.

    Args:
        scope: what one bucket spans: `global`, the whole model; `layer`, one tensor; or a number, a size in
            MB (of 2^20 bytes): consecutive tensors up to that size, a larger tensor alone.
        mixed_types_advice: what the user can do where the gradients are of several types.
        allocates: False: there is no memory behind them, only their type and sizes; gradients lie elsewhere.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        scope: str | float,
        mixed_types_advice: str = "give each kind an optimizer of its own, and wrap each of them",
        allocates: bool = True,
    ) -> None:
        ranges.check_value("scope", scope, ScopeOrBucket)
        if scope == "bucket":
            raise ValueError(
                "scope='bucket' is a bucket of DistributedDataParallel's, for sparsify.register; here take a "
                "size in MB, such as scope=25"
            )
        self.named_parameters = parameters_in_backward_order(named_parameters)
        self.parameters = [p for _, p in self.named_parameters]
        kinds = {(p.dtype.to_real(), p.device) for p in self.parameters}
        if len(kinds) != 1:
            raise ValueError(
                "gradients of one model must share dtype and device, these have "
                f"{sorted(map(str, kinds))}; {mixed_types_advice}"
            )
        dtype, device = kinds.pop()
        sizes = [num_reals(p) for p in self.parameters]
        ranges_of_buckets = list(bucket_ranges(sizes, dtype.itemsize, scope))
        first_tensors = {tensors[0] for tensors in ranges_of_buckets}
        starts = list[int]()
        end = 0
        for tensor, size in enumerate(sizes):
            if tensor in first_tensors:
                end += -end % (ALIGNMENT_BYTES // dtype.itemsize)
            starts.append(end)
            end += size
        if allocates:
            self.flat = huge_pages.request(torch.empty(end, dtype=dtype, device=device)).zero_()
        else:
            self.flat = torch.zeros(1, dtype=dtype, device=device).expand(end)
        # (n,) of each parameter
        self.views = [self.flat[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self.buckets = list[Bucket]()
        for tensors in ranges_of_buckets:
            names, parameters_of_bucket = zip(
                *self.named_parameters[tensors.start : tensors.stop], strict=True
            )
            last = tensors[-1]
            flat = self.flat[starts[tensors.start] : starts[last] + sizes[last]]
            self.buckets.append(Bucket(flat, names, tuple(map(real_shape, parameters_of_bucket))))


def parameters_in_backward_order(
    named_parameters: Iterable[tuple[str, Parameter]],
) -> list[tuple[str, Parameter]]:
    """Return the parameters that require a gradient, in the order in which backpropagation finishes.

    The output layer comes first, as the code of Shi et al. merges them; but complex parameters come before
    all others, for they lie at even places only.
    """
    named = [(name, p) for name, p in named_parameters if p.requires_grad][::-1]
    if not named:
        raise ValueError("there is nothing to aggregate: no parameter requires a gradient")
    for name, p in named:
        check_supported_tensor(name, p)
    return sorted(named, key=lambda named_parameter: not named_parameter[1].is_complex())


def bucket_ranges(sizes: Sequence[int], itemsize: int, scope: str | float) -> Iterator[range]:
    """Yield ranges of tensors that share a bucket; those that would make up an empty bucket are left out."""
    max_bytes_by_scope = {"global": math.inf, "layer": 0}
    max_bytes = max_bytes_by_scope[scope] if isinstance(scope, str) else scope * BYTES_PER_MB
    for tensors in group_consecutive_indices([size * itemsize for size in sizes], max_bytes):
        if any(sizes[tensor] for tensor in tensors):  # nothing of an empty tensor can be exchanged
            yield range(tensors[0], tensors[-1] + 1)


def num_reals(p: Tensor) -> int:
    """Return the number of real numbers in a tensor."""
    return p.numel() * (2 if p.is_complex() else 1)


def real_shape(p: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor in real numbers."""
    return (*p.shape, 2) if p.is_complex() else tuple(p.shape)


def view_as_complex_like(view: Tensor, p: Tensor) -> Tensor:
    """View real numbers (n,) as complex ones (n / 2,), if p has complex ones."""
    return torch.view_as_complex(view.view(view.numel() // 2, 2)) if p.is_complex() else view


def check_supported_tensor(name: str, tensor: Tensor) -> None:
    """Refuse a parameter or buffer that has no elements of its own on this worker, or can't be averaged."""
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


def ddp_ignored_names(model: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that each worker has for itself.

    The user told them to `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`.
    """
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def local_shard(tensor: Tensor) -> Tensor:
    """Return this worker's part of a DTensor, in its own memory; any other tensor itself, detached."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard.detach()
