"""Several buckets as one space: what searches all of them, and writes to all of them, at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sparsify.types import Kernel, SearchStats, Sparse, index_dtype


class JointKernel:
    """Buckets as one space, in which they follow each other without gaps: done bucket by bucket, with torch's
    operators, which is what faster ones must equal.

    Args:
        kernels: searches of each bucket; none where nothing is searched.
    """

    name = "one by one"

    def __init__(self, sizes: Sequence[int], kernels: Sequence[Kernel] = ()) -> None:
        self.sizes, self.kernels = list(sizes), list(kernels)
        *self.bases, self.num_elements = accumulate(self.sizes, initial=0)

    def topk(
        self, accs: Sequence[Sequence[Tensor]], grads: Sequence[Sequence[Tensor]], ks: Sequence[int]
    ) -> Sparse:
        """Of each bucket acc (n,) += its gradient, and the k elements of largest magnitude; together (sum of
        ks,), bucket after bucket, with their places in the space. No host synchronisation.

        Args:
            accs: of each bucket one tensor (n,); or several that follow each other, as the gradient does.
            grads: of each bucket tensors (m,) that follow each other, as many elements as the bucket has; or
                no tensor, where there is nothing to add.
        """
        found = []
        for kernel, parts, own, k in zip(self.kernels, accs, grads, ks, strict=True):
            if len(parts) == 1:
                found.append(kernel.topk(parts[0], single(parts[0], own), k))
            else:
                if own:
                    torch._foreach_add_(list(parts), list(own))
                found.append(kernel.topk(torch.cat([*parts]), None, k))
        return self.joined(found)

    def add(
        self, into: Sequence[Tensor], parts: Sequence[Sparse], alpha: float = 1, clears: bool = False
    ) -> None:
        """The space += alpha x one part after the other.

        Args:
            into: memories of the space, that follow each other in it: (m,) of each, the buckets or others.
            clears: sets it to zero before.
        """
        if (whole := merged(into)) is None:
            space = into[0].new_zeros(self.num_elements)
        else:
            space = whole.zero_() if clears else whole
        for part in parts:
            part.add_to(space, alpha)
        if whole is None:
            (torch._foreach_copy_ if clears else torch._foreach_add_)(list(into), split_like(space, into))

    def clear_at(self, into: Sequence[Tensor], part: Sparse) -> None:
        """Set the space to zero where the part has elements; `into` as for `add`."""
        space = into[0].new_zeros(self.num_elements, dtype=torch.bool)
        space[part.indices.long()] = True
        for memory, places in zip(into, split_like(space, into), strict=True):
            memory.masked_fill_(places, 0)

    def joined(self, parts: Iterable[Sparse]) -> Sparse:
        """Parts of each bucket as one of the space."""
        dtype = index_dtype(self.num_elements)
        indices, values = zip(*parts, strict=True)
        moved = [at.to(dtype) + base for at, base in zip(indices, self.bases, strict=True)]
        return Sparse(torch.cat(moved), torch.cat(values))

    def split(self, part: Sparse, ks: Sequence[int]) -> list[Sparse]:
        """The inverse of `joined`, for a part that has ks of each bucket."""
        pieces = zip(part.indices.split(list(ks)), part.values.split(list(ks)), self.bases, strict=True)
        return [Sparse(indices - base, values) for indices, values, base in pieces]

    def stats(self) -> SearchStats:
        """Counts of what it searched itself, every bucket a step; see `Kernel.stats`."""
        return SearchStats()


def single(acc: Tensor, pieces: Sequence[Tensor]) -> Tensor | None:
    """A gradient that is one piece; one of several is added to acc (n,) here, and nothing is left to add."""
    if len(pieces) == 1:
        return pieces[0]
    if pieces:
        torch._foreach_add_(split_like(acc, pieces), list(pieces))
    return None


def split_like(whole: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """(n,) as views of the lengths of these pieces, that together have n elements."""
    return [*whole.split([piece.numel() for piece in pieces])]


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
