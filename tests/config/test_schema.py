"""Values that exclude each other."""

from __future__ import annotations

import pytest

from experiments.config import compose


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["comm=horovod"], "comm=horovod joins processes, and cluster=virtual runs all workers in one"),
        (["link=loopback"], "virtual ranks need a link with alpha and beta; choose link=nvlink"),
        (["cluster.link.alpha_s=null"], "virtual ranks need a link with alpha and beta"),
    ],
)
def test_what_virtual_ranks_can_not_have_processes_can(words: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        compose.resolve(["cluster=virtual", *words])
    compose.resolve(["cluster=local", *words])
