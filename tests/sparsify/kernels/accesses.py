"""What programs of one launch did to memory, and where two of them met: see concurrent.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Access(NamedTuple):
    """What a program did to some memory."""

    program: int
    kind: str  # load, store, atomic
    site: str  # a kernel, and the line
    addresses: NDArray[np.uint64]  # of elements


class Memory(NamedTuple):
    """What kernels may use: first and last address of the tensors given to a launch, in order."""

    begins: NDArray[np.uint64]
    ends: NDArray[np.uint64]

    @classmethod
    def of(cls, given: Sequence[Any]) -> Memory:
        storages = [argument.untyped_storage() for argument in given if isinstance(argument, Tensor)]
        spans = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
        both = np.array(spans, np.uint64).reshape(-1, 2)
        return cls(both[:, 0], both[:, 1])

    def has(self, addresses: NDArray[np.uint64]) -> bool:
        """Return True if all of them are within a tensor."""
        before = self.begins.searchsorted(addresses, "right")
        return bool((before > 0).all() and (addresses < self.ends[before - 1]).all())


def meetings(accesses: Sequence[Access]) -> set[str]:
    """Return where several programs use the same memory, at least one to write and not all atomically; and
    stores of which two elements have the same address.
    """
    found = set[str]()
    for one in accesses:
        if one.kind == "store" and len(np.unique(one.addresses)) < len(one.addresses):
            found.add(f"elements of a store in {one.site} meet")
    numbers = np.repeat(np.arange(len(accesses)), [len(one.addresses) for one in accesses])
    addresses = np.concatenate([np.empty(0, np.uint64), *(one.addresses for one in accesses)])
    order = np.argsort(addresses, kind="stable")
    _, firsts = np.unique(addresses[order], return_index=True)
    by_address = np.split(numbers[order], firsts[1:])
    for users in set(map(tuple, by_address)):
        together = [accesses[number] for number in users]
        kinds = {one.kind for one in together}
        if len({one.program for one in together}) > 1 and kinds not in ({"load"}, {"atomic"}):
            found.add(" meets ".join(sorted({f"{one.kind} in {one.site}" for one in together})))
    return found
