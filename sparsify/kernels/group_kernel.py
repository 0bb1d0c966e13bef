"""Kernels of bucket groups: they search several buckets at once, and write to all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sparsify.types import SearchStats, SelectionKernel, SparseVector, index_dtype


class GroupKernel:
    """A kernel of several buckets, which goes bucket by bucket with torch's operators.

    It is the oracle of faster ones. The buckets form one space, in which they follow each other without gaps.
    What lies in the space is given as tensors (m,) that follow each other, of any lengths.

    Args:
        sizes: elements of each bucket.
        kernels: the search of each bucket; none where nothing is searched.
    """

    name = "one by one"

    def __init__(self, sizes: Sequence[int], kernels: Sequence[SelectionKernel] = ()) -> None:
        self.sizes = list(sizes)
        self.kernels = list(kernels)
        *self.bases, self.num_elements = accumulate(self.sizes, initial=0)
        self.search_stats = SearchStats()  # of searches of several buckets at once

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> SparseVector:
        """Add grad to acc, then select the k elements of largest magnitude of each bucket.

        No host synchronization.

        Args:
            accs: tensors in the space, each within a bucket.
            grads: tensors to be added; none where there is nothing to add.
            ks: elements to select of each bucket.

        Returns:
            (sum of ks,), bucket after bucket, with indices in the space.
        """
        accs_by_bucket = divide_into_stretches(accs, self.sizes)
        grads_by_bucket = divide_into_stretches(grads, self.sizes)
        is_whole = all(len(pieces) == 1 for pieces in accs_by_bucket + grads_by_bucket)
        if not is_whole:
            add_end_to_end(accs, grads)
        selections = list[SparseVector]()
        for kernel, pieces, addends, k in zip(self.kernels, accs_by_bucket, grads_by_bucket, ks, strict=True):
            acc = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            selections.append(kernel.topk(acc, addends[0] if is_whole else None, k))
        return self.join_buckets(selections)

    def add(
        self, into: Sequence[Tensor], parts: Sequence[SparseVector], alpha: float = 1, clears: bool = False
    ) -> None:
        """Add alpha times each part to the space.

        Args:
            into: the tensors of the space.
            parts: sparse vectors of the space, added one after the other.
            clears: set the space to zero before.
        """
        if clears:
            torch._foreach_zero_(list(into))
        contiguous = view_as_one_if_adjacent(into)
        space = torch.cat([*into]) if contiguous is None else contiguous
        for part in parts:
            part.add_to(space, alpha)
        if contiguous is None:
            torch._foreach_copy_(list(into), split_like(space, into))

    def clear_at(self, into: Sequence[Tensor], part: SparseVector) -> None:
        """Set the space to zero where the part has elements."""
        space = into[0].new_zeros(self.num_elements, dtype=torch.bool)
        space[part.indices.long()] = True
        for memory, places in zip(into, split_like(space, into), strict=True):
            memory.masked_fill_(places, 0)

    def add_sum_to_anchors_and_copies(
        self,
        anchors: Sequence[Tensor],
        copies: Sequence[Tensor],
        parts: Sequence[SparseVector],
        alpha: float,
        rate: float,
    ) -> None:
        """Add rate times the sum of alpha times each part to two equal spaces of float32.

        The product with `rate` is added with one rounding, as torch's add does.

        Args:
            anchors, copies: the tensors of each space.
            parts: sparse vectors of the space, bucket after bucket.
        """
        total = anchors[0].new_zeros(self.num_elements)
        for part in parts:
            part.add_to(total, alpha)
        torch._foreach_add_(
            [*anchors, *copies], [*split_like(total, anchors), *split_like(total, copies)], alpha=rate
        )

    def join_buckets(self, parts: Sequence[SparseVector]) -> SparseVector:
        """Return sparse vectors of each bucket as one of the space."""
        dtype = index_dtype(self.num_elements)
        moved = [part.indices.to(dtype) + base for part, base in zip(parts, self.bases, strict=True)]
        return SparseVector(torch.cat(moved), torch.cat([part.values for part in parts]))

    def split_by_bucket(self, part: SparseVector, ks: Sequence[int]) -> list[SparseVector]:
        """Return the inverse of `join_buckets`: one sparse vector for each bucket, which has k elements."""
        pieces = zip(part.indices.split(list(ks)), part.values.split(list(ks)), self.bases, strict=True)
        return [SparseVector(indices - base, values) for indices, values, base in pieces]

    def stats(self) -> SearchStats:
        """Return the counts of searches of several buckets at once, every bucket a step. No host sync."""
        return self.search_stats


def split_like(whole: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return views of (n,) that are as long as these pieces, which together have n elements."""
    return [*whole.split([piece.numel() for piece in pieces])]


@dataclass
class ConsecutiveTensors:
    """Tensors (m,) that follow each other, with the sizes of the stretches that they consist of."""

    tensors: Sequence[Tensor]  # of any lengths
    sizes: Sequence[int]  # elements of each stretch, which together are all

    @cached_property
    def pieces(self) -> list[list[Tensor]]:
        """The pieces of each stretch, see `divide_into_stretches`; they are made when first asked for."""
        return divide_into_stretches(self.tensors, self.sizes)


def divide_into_stretches(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Divide tensors (m,) that follow each other into consecutive stretches.

    Args:
        sizes: elements of each stretch, which together are all.

    Returns:
        The pieces of each stretch: whole tensors, and views of those that lie in several stretches. None
        where there are no tensors.
    """
    if not tensors:
        return [[] for _ in sizes]
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


def return_single_or_add(acc: Tensor, pieces: Sequence[Tensor]) -> Tensor | None:
    """Return the only piece (n,) of a gradient; or add several pieces to acc (n,), and return None."""
    if len(pieces) == 1:
        return pieces[0]
    add_end_to_end([acc], pieces)
    return None


def add_end_to_end(tensors: Sequence[Tensor], addends: Sequence[Tensor]) -> None:
    """Add tensors (m,) that follow each other to others of as many elements in all; or none at all."""
    if addends:
        pairs = list(cut_at_common_borders(tensors, addends))
        torch._foreach_add_([tensor for tensor, _ in pairs], [addend for _, addend in pairs])


def cut_at_common_borders(
    tensors: Sequence[Tensor], others: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of views of equal length, given two rows of tensors (m,) with as many elements in all."""
    pieces_by_tensor = divide_into_stretches(others, [tensor.numel() for tensor in tensors])
    for tensor, pieces in zip(tensors, pieces_by_tensor, strict=True):
        yield from zip(split_like(tensor, pieces), pieces, strict=True)


def view_as_one_if_adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return contiguous tensors (m,) that follow each other in memory as one; None where they do not."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    storage = first.untyped_storage().data_ptr()
    for tensor, following in pairwise(tensors):
        is_adjacent = following.data_ptr() == tensor.data_ptr() + tensor.nbytes
        if not is_adjacent or following.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
