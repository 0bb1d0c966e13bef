"""Fixtures that tests of the library share: a process group without other processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """Make a process group of this process only, for work that needs no other worker."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
