"""Several buckets as one space: what searches all of them, and writes to all of them, at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sparsify.types import SearchStats, SelectionKernel, SparseVector, index_dtype


class GroupKernel:
    """Buckets as one space, in which they follow each other without gaps: done bucket by bucket, with torch's
    operators, which is what faster ones must equal.

    What lies in the space is given as tensors (m,) that follow each other, of whatever lengths.

    Args:
        kernels: searches of each bucket; none where nothing is searched.
    """

    name = "one by one"

    def __init__(self, sizes: Sequence[int], kernels: Sequence[SelectionKernel] = ()) -> None:
        self.sizes, self.kernels = list(sizes), list(kernels)
        *self.bases, self.num_elements = accumulate(self.sizes, initial=0)

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> SparseVector:
        """acc += grad, and of each bucket the k elements of largest magnitude: (sum of ks,), bucket after
        bucket, with their places in the space. No host synchronisation.

        Args:
            accs: what lies in the space, each within a bucket.
            grads: what is added to it; none where there is nothing to add.
        """
        added: list[Tensor | None] = [None for _ in self.sizes]
        if [*map(Tensor.numel, grads)] == self.sizes == [*map(Tensor.numel, accs)]:
            added = [*grads]  # a tensor of each bucket, which its kernel adds
        elif grads:
            pairs = list(matched(accs, grads))
            torch._foreach_add_([acc for acc, _ in pairs], [grad for _, grad in pairs])
        buckets = zip(self.kernels, divide(accs, self.sizes), added, ks, strict=True)
        return self.joined(
            kernel.topk(own[0] if len(own) == 1 else torch.cat(own), grad, k)
            for kernel, own, grad, k in buckets
        )

    def add(
        self, into: Sequence[Tensor], parts: Sequence[SparseVector], alpha: float = 1, clears: bool = False
    ) -> None:
        """The space += alpha x one part after the other; with `clears` it is set to zero before."""
        if clears:
            torch._foreach_zero_(list(into))
        space = torch.cat([*into]) if (whole := merged(into)) is None else whole
        for part in parts:
            part.add_to(space, alpha)
        if whole is None:
            torch._foreach_copy_(list(into), split_like(space, into))

    def clear_at(self, into: Sequence[Tensor], part: SparseVector) -> None:
        """Set the space to zero where the part has elements."""
        space = into[0].new_zeros(self.num_elements, dtype=torch.bool)
        space[part.indices.long()] = True
        for memory, places in zip(into, split_like(space, into), strict=True):
            memory.masked_fill_(places, 0)

    def move(
        self,
        anchors: Sequence[Tensor],
        owns: Sequence[Tensor],
        parts: Sequence[SparseVector],
        alpha: float,
        rate: float,
    ) -> None:
        """Two spaces that are alike, of float32: each += rate x the sum of (alpha x each part), the latter
        with one rounding, as torch's add has it. Parts are those of several buckets, in the order of these.
        """
        total = anchors[0].new_zeros(self.num_elements)
        for part in parts:
            part.add_to(total, alpha)
        torch._foreach_add_(
            [*anchors, *owns], [*split_like(total, anchors), *split_like(total, owns)], alpha=rate
        )

    def joined(self, parts: Iterable[SparseVector]) -> SparseVector:
        """Parts of each bucket as one of the space."""
        dtype = index_dtype(self.num_elements)
        indices, values = zip(*parts, strict=True)
        moved = [at.to(dtype) + base for at, base in zip(indices, self.bases, strict=True)]
        return SparseVector(torch.cat(moved), torch.cat(values))

    def split(self, part: SparseVector, ks: Sequence[int]) -> list[SparseVector]:
        """The inverse of `joined`, for a part that has ks of each bucket."""
        pieces = zip(part.indices.split(list(ks)), part.values.split(list(ks)), self.bases, strict=True)
        return [SparseVector(indices - base, values) for indices, values, base in pieces]

    def stats(self) -> SearchStats:
        """Counts of what it searched itself, every bucket a step; see `SelectionKernel.stats`."""
        return SearchStats()


def split_like(whole: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """(n,) as views of the lengths of these pieces, that together have n elements."""
    return [*whole.split([piece.numel() for piece in pieces])]


def divide(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Divide tensors (m,) that follow each other into consecutive stretches.

    Args:
        sizes: elements of each stretch, which together are all.

    Returns:
        The pieces of each stretch: whole tensors, and views of those that lie in several stretches.
    """
    if [tensor.numel() for tensor in tensors] == [*sizes]:
        return [[tensor] for tensor in tensors]
    if len(tensors) == 1:
        return [[piece] for piece in tensors[0].split([*sizes])]
    stretches = list[list[Tensor]]()
    rest = list(reversed(tensors))
    for size in sizes:
        pieces = list[Tensor]()
        while size:
            tensor = rest.pop()
            if tensor.numel() > size:
                rest.append(tensor[size:])
                tensor = tensor[:size]
            pieces.append(tensor)
            size -= tensor.numel()
        stretches.append(pieces)
    return stretches


def matched(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Two rows of tensors (m,) of as many elements, divided where any of them ends: pairs of one length."""
    of_tensors = divide(others, [tensor.numel() for tensor in tensors])
    for tensor, pieces in zip(tensors, of_tensors, strict=True):
        yield from zip(split_like(tensor, pieces), pieces, strict=True)


def merged(memories: Sequence[Tensor]) -> Tensor | None:
    """Contiguous memories (m,) that follow each other, as one tensor; None where they lie elsewhere."""
    first = memories[0]
    if len(memories) == 1:
        return first
    storage = first.untyped_storage().data_ptr()
    for one, other in pairwise(memories):
        follows = other.data_ptr() == one.data_ptr() + one.nbytes
        if not follows or other.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((sum(memory.numel() for memory in memories),), (1,))
