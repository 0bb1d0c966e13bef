"""The recipe of docs/own-training.md for Muon beside AdamW, with each wrapper."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from sparsify.comm import Comm
from tests.conftest import ROOT
from tests.sparsify.wrappers.sharded.uses_sharded import blocks, loss_of, sharded, weights
from tests.sparsify.wrappers.user_acts import mesh_of

WRAPPERS = ("distribute", "register", "shard", "local_steps")


def recipe(density: float) -> dict[str, Any]:
    """Return what the page defines, for a smaller model and shorter rounds."""
    page = (ROOT / "docs/own-training.md").read_text()
    code = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Muon" in code)
    names = dict[str, Any]()
    exec(code.replace("density=0.01", f"density={density}").replace("every=30", "every=3"), names)
    return names


class Training:
    """A training by the recipe with one wrapper."""

    def __init__(self, names: dict[str, Any], wrapper: str) -> None:
        self.names = names
        self.model: Any = blocks()
        if wrapper == "register":
            self.model = DistributedDataParallel(self.model)
        if wrapper == "shard":
            sharded(self.model, mesh_of(2, 2))
        self.optimizers, self.hooks = names[f"wrap_{wrapper}"](self.model)

    def advance(self, steps: range) -> Tensor:
        """Train on, and return the weights."""
        for step in steps:
            loss_of(self.model, dist.get_rank(), step).backward()
            self.names["step"](self.optimizers)
        return weights(self.model)


def resumed_by_files(path: Path, names: dict[str, Any], training: Training, other: Training) -> None:
    names["save_worker"](path, training.model, training.optimizers, training.hooks)
    names["load_worker"](path, other.model, other.optimizers, other.hooks)


def resumed_by_names(training: Training, other: Training) -> None:
    """Resume from states by parameters' names, as torch.distributed.checkpoint keeps them."""
    state = copy.deepcopy(get_optimizer_state_dict(training.model, training.optimizers))
    other.model.load_state_dict(training.model.state_dict())
    set_optimizer_state_dict(other.model, other.optimizers, optim_state_dict=state)


def trained(comm: Comm, now: Callable[[], float]) -> dict[str, Any]:
    """Return weights at a checkpoint and after it, straight on and resumed, by wrapper."""
    torch.set_num_threads(1)
    names = recipe(0.2)
    found = dict[str, Any]()
    for wrapper in ("distribute", "register", "shard"):
        found[f"{wrapper}, of all"] = Training(recipe(1.0), wrapper).advance(range(3))
    with tempfile.TemporaryDirectory() as folder:
        resumes = {wrapper: partial(resumed_by_files, Path(folder) / wrapper, names) for wrapper in WRAPPERS}
        ways: dict[str, Any] = {**resumes, "shard, by names": resumed_by_names}
        for way, resume in ways.items():
            training, other = (Training(names, way.partition(",")[0]) for _ in range(2))
            start = weights(training.model)
            saved = training.advance(range(4))
            resume(training, other)
            ends = (training.advance(range(4, 8)), other.advance(range(4, 8)))
            found[way] = [start, saved, *ends]
    return found
