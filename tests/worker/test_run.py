"""One run in one process."""

from __future__ import annotations

import pytest
import torch

from experiments.worker.run import names_of_all, prepare_device
from slurm.environment import Place
from sparsify.comm import virtual


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["native avx2"] * 3, ["native avx2"]),
        (["native avx2", "numpy", "native avx2"], ["native avx2", "numpy"]),
        ([""] * 3, []),
    ],
)
def test_who_searched_on_any_rank_is_told(names: list[str], told: list[str]) -> None:
    """One node without a compiler makes the others wait."""
    found = virtual.run(3, lambda comm: names_of_all(names[comm.rank], comm, torch.device("cpu")))
    assert found == [told] * 3


@pytest.mark.parametrize(
    ("gpus", "why"), [(0, "torch finds no GPU here"), (1, "2 workers need 2 GPUs and this")]
)
def test_a_worker_without_a_gpu_of_its_own_is_told(
    monkeypatch: pytest.MonkeyPatch, gpus: int, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=why):
        prepare_device({"device": "cuda", "threads": torch.get_num_threads()}, Place(1, 2, 1))
