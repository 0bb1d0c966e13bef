"""The recipes of docs/trainers.md, in the trainers; each is skipped where its package is missing."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import fine, python
from tests.sparsify.wrappers.uses_trainers import LOOP, OF_THREE, RESUMED, USES

NEEDED = {"transformers": ("transformers", "accelerate")}
CALM = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.extended
@pytest.mark.parametrize("trainer", USES)
def test_a_trainer_trains_as_a_plain_loop_does_and_resumes_to_the_bit(trainer: str, tmp_path: Path) -> None:
    """Includes clipping, accumulation, mixed precision, schedules, evaluation in between.

    Who averages by `distribute`, too, is told on every worker.
    """
    for package in NEEDED.get(trainer, (trainer,)):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    words = ("--standalone", "--nproc-per-node", "2", "-m", "tests.sparsify.wrappers.uses_trainers")
    fine(python("-m", "torch.distributed.run", *words, trainer, str(tmp_path), env={**os.environ, **CALM}))
    ranks: list[dict[str, dict[str, Any]]] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, use in USES[trainer].items():
        first = ranks[0][name]
        assert first["rates"][0] > first["rates"][-1] > 0  # it follows its schedule
        for kind in ("", LOOP, *([RESUMED] if use.is_resumed else [])):
            for rank in ranks:
                found = rank[name + kind]
                assert torch.equal(found["weights"], first["weights"]), (trainer, name, kind)
                assert (found["steps"], found["report"]) == (rank[name]["steps"], rank[name]["report"])
    for rank in ranks:
        assert ["averages" in words for words in rank["averaged twice"]["said"]] == [True, True]
    if trainer == "lightning":
        assert torch.equal(*(rank[OF_THREE]["weights"] for rank in ranks))
        assert ranks[0][OF_THREE]["steps"] == ranks[0]["all"]["steps"]
