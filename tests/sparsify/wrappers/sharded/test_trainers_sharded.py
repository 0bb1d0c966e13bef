"""The recipes of docs/trainers.md for sharded models, in the trainers; skipped where a package is missing."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import fine, python
from tests.sparsify.wrappers.sharded.uses_trainers_sharded import REPLICAS, SHARDS, TRAINERS

NEEDED = {"transformers": ("transformers", "accelerate")}
CALM = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
SIZE = REPLICAS * SHARDS


@pytest.mark.extended
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_of_sharded_models_trains_as_without_and_resumes_to_the_bit(
    trainer: str, tmp_path: Path
) -> None:
    for package in NEEDED.get(trainer, (trainer,)):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    program = ("tests.sparsify.wrappers.sharded.uses_trainers_sharded", trainer, str(tmp_path))
    fine(python("-m", *program, env={**os.environ, **CALM}))
    ranks: list[dict[str, dict[str, Any]]] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(SIZE)]
    for found in ranks:
        assert torch.equal(found["dense"]["weights"], found["alone"]["weights"])
        assert not torch.equal(found["sparse"]["weights"], found["alone"]["weights"])
        for name in ("sparse", "sparse, resumed"):
            assert torch.equal(found[name]["weights"], ranks[0]["sparse"]["weights"]), name
            assert found[name]["steps"] == ranks[0]["sparse"]["steps"] > 1
