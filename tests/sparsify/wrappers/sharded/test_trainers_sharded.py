"""The recipes of docs/trainers.md for sharded models, in the trainers; skipped where a package is missing."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import fine, python
from tests.sparsify.wrappers.sharded.uses_trainers_sharded import REPLICAS, SHARDS, TRAINERS

NEEDED = {"transformers": ("transformers", "accelerate")}
SIZE = REPLICAS * SHARDS
SURROUNDINGS = {
    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(SIZE),
    "LOCAL_WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "tests",
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_of_sharded_models_trains_as_without_and_resumes_to_the_bit(
    trainer: str, tmp_path: Path
) -> None:
    for package in NEEDED.get(trainer, (trainer,)):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    program = ("tests.sparsify.wrappers.sharded.uses_trainers_sharded", trainer, str(tmp_path))
    fine(python("-m", *program, env={**os.environ, **SURROUNDINGS}))
    ranks: list[dict[str, Tensor]] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(SIZE)]
    for found in ranks:
        assert torch.equal(found["dense"], found["alone"])
        assert not torch.equal(found["sparse"], found["alone"])
        for name in ("sparse", "sparse, resumed"):
            assert torch.equal(found[name], ranks[0]["sparse"]), name
