"""What programs of one launch did to memory, and where two of them met: see concurrent.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Site(NamedTuple):
    """Where a kernel accesses memory."""

    file: str
    line: int
    function: str
    kernel: str  # that calls the function, or is it

    def __str__(self) -> str:
        name = self.kernel if self.function == self.kernel else f"{self.kernel}, {self.function}"
        return f"{name} ({self.file}:{self.line})"


class Access(NamedTuple):
    """What a program did to some memory."""

    program: int
    kind: str  # load, store, atomic
    site: Site
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
        """Are all of them within a tensor?"""
        before = self.begins.searchsorted(addresses, "right")
        return bool((before > 0).all() and (addresses < self.ends[before - 1]).all())


def meetings(accesses: Sequence[Access]) -> Iterator[str]:
    """Pairs of accesses by different programs to the same memory, at least one a write, not both atomic; and
    stores of which two elements have the same address.
    """
    stores, atomics = Used.of(accesses, "store"), Used.of(accesses, "atomic")
    seen = set[frozenset[Site]]()
    for one in accesses:
        if one.kind == "store" and len(np.unique(one.addresses)) < len(one.addresses):
            yield f"elements of a store in {one.site} meet"
        for used in (stores,) if one.kind == "atomic" else (stores, atomics):
            if (other := used.by_another(one)) and {one.site, other.site} not in seen:
                seen.add(frozenset((one.site, other.site)))
                yield f"{one.kind} in {one.site} meets {other.kind} in {other.site}"


class Used(NamedTuple):
    """Memory that accesses of one kind used: sorted by address, then by program."""

    accesses: Sequence[Access]
    addresses: NDArray[np.uint64]
    programs: NDArray[np.int64]
    numbers: NDArray[np.int64]  # of the accesses

    @classmethod
    def of(cls, accesses: Sequence[Access], kind: str) -> Used:
        found = [access for access in accesses if access.kind == kind]
        lengths = [len(access.addresses) for access in found]
        addresses = np.concatenate([np.empty(0, np.uint64), *(access.addresses for access in found)])
        programs = np.repeat(np.array([access.program for access in found], np.int64), lengths)
        order = np.lexsort((programs, addresses))
        numbers = np.repeat(np.arange(len(found)), lengths)
        return cls(found, addresses[order], programs[order], numbers[order])

    def by_another(self, one: Access) -> Access | None:
        """An access of another program to memory that `one` uses."""
        begin = self.addresses.searchsorted(one.addresses, "left")
        end = self.addresses.searchsorted(one.addresses, "right")
        begin, end = begin[begin < end], end[begin < end]
        for places in (begin, end - 1):  # of each address the first program and the last
            if len(others := places[self.programs[places] != one.program]):
                return self.accesses[int(self.numbers[others[0]])]
        return None
