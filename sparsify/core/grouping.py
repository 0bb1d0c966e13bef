"""The grouping of consecutive items by their sizes, as for tensors that share a bucket or a message."""

from __future__ import annotations

from collections.abc import Sequence


def group_consecutive_indices(sizes: Sequence[int], max_size: float) -> list[list[int]]:
    """Group consecutive items whose sizes add up to at most `max_size`, and return their indices.

    An item that is larger has a group of its own.
    """
    groups = list[list[int]]()
    group_size = 0
    for index, size in enumerate(sizes):
        if not groups or group_size + size > max_size:
            groups.append([])
            group_size = 0
        groups[-1].append(index)
        group_size += size
    return groups
