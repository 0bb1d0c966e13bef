"""Memory: a check that virtual ranks fit, before any is made, and the peak that a worker has used."""

from __future__ import annotations

import copy
import math
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Generator, Tensor

from experiments.training.loop import LoopSettings
from experiments.training.replicas.local import LocalReplica
from experiments.training.task import Task
from experiments.worker.build import RunComponents
from sparsify.comm import virtual
from sparsify.core.timer import PhaseTimer
from sparsify.local.strategy import LocalSteps
from sparsify.method import Method
from sparsify.wrappers.aggregator import Aggregator

USABLE_SHARE = 0.9  # of the free memory; the rest is for what one rank computes with at a time
TENSORS_PER_RANK = (
    5  # as large as the gradient, that a rank may need: itself, residual, momentum, and work buffers
)
SAFETY_FACTOR = 4  # times: where even that fits so often, nobody needs to look closer


def check_memory_for_virtual_ranks(variants: Sequence[RunComponents], num_ranks: int) -> None:
    """Refuse more virtual ranks than there is memory for.

    Args:
        variants: what a rank trains; several where variants take turns.

    Raises:
        ValueError: with the largest number that fits.
    """
    free_bytes = USABLE_SHARE * free_memory_bytes(variants[0].settings.device)
    models = [
        run.task.make_model(run.data, run.settings.seed, run.settings.device, run.settings.dtype)
        for run in variants
    ]
    parameter_bytes = sum(p.nbytes for model in models for p in model.parameters())
    optimizer_bytes = sum(
        predict_optimizer_state_bytes(run.task.make_optimizer(model))
        for run, model in zip(variants, models, strict=True)
    )
    shared_bytes = parameter_bytes + optimizer_bytes
    if SAFETY_FACTOR * (shared_bytes + num_ranks * TENSORS_PER_RANK * parameter_bytes) <= free_bytes:
        return
    if shared_bytes + parameter_bytes > free_bytes:  # no trial, which might end the process
        raise ValueError(
            "the model does not fit into memory: with what its optimiser remembers and one worker's gradient "
            f"it is {(shared_bytes + parameter_bytes) / 2**30:.2f} GiB, and {free_bytes / 2**30:.2f} are "
            "free; take a smaller one"
        )
    bytes_per_rank = sum(
        measure_bytes_per_rank(run.task, model, run.method, run.settings)
        for model, run in zip(models, variants, strict=True)
    )
    needed_bytes = shared_bytes + num_ranks * bytes_per_rank
    if needed_bytes <= free_bytes:
        return
    fitting = max(0, math.floor((free_bytes - shared_bytes) / bytes_per_rank))
    raise ValueError(
        f"workers={num_ranks} virtual ranks need {needed_bytes / 2**30:.1f} GiB: "
        f"{bytes_per_rank / 2**30:.2f} each (gradients, residuals, work buffers), and "
        f"{shared_bytes / 2**30:.2f} that they share; {free_bytes / 2**30:.1f} are free for them, which is "
        f"enough for workers={fitting}"
    )


def predict_optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that an optimizer will hold: momentum, and with betas (Adam) a second moment."""
    groups = optimizer.param_groups
    return sum((2 if "betas" in group else 1) * p.nbytes for group in groups for p in group["params"])


def measure_bytes_per_rank(
    task: Task, model: torch.nn.Module, method: Method | LocalSteps, settings: LoopSettings
) -> int:
    """Return the bytes that one rank holds for itself, by a trial step.

    These are buffers of the model, gradients, and the method's state after a step of made-up gradients, in
    which it allocates what it needs.
    """

    def body(comm: virtual.VirtualComm) -> int:
        seed = settings.seed
        select = settings.select
        tensors = [*model.buffers()]
        aggregator: Aggregator | LocalReplica
        if isinstance(method, LocalSteps):  # parameters and an inner optimiser of its own, besides the anchor
            replica_model = copy.deepcopy(model)
            every_step = replace(method, every=1, fragments=1, delay=0)
            aggregator = LocalReplica(
                every_step, replica_model, task.make_optimizer, comm, PhaseTimer("production"), seed, select
            )
            tensors += replica_model.parameters()
        else:
            aggregator = Aggregator(method, model.named_parameters(), comm, seed=seed, select=select)
        flat = aggregator.gradients.flat
        flat.normal_(generator=Generator(settings.device).manual_seed(seed))
        if isinstance(aggregator, LocalReplica):
            aggregator.step(0.0)
            aggregator.exchange_if_due(0)
            parts = [aggregator.inner.state, *map(vars, aggregator.optimiser.fragments)]
        else:
            aggregator.aggregate()
            parts = [*aggregator.states, aggregator.group_kernels]
        storages = [tensor.untyped_storage() for tensor in iterate_held_tensors([flat, *tensors, *parts])]
        bytes_by_address = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(bytes_by_address.values())

    return virtual.run(1, body)[0]


def iterate_held_tensors(tree: Any, visited: set[int] | None = None) -> Iterator[Tensor]:
    """Yield all tensors that an object holds, at any depth."""
    visited = set() if visited is None else visited
    if isinstance(tree, Tensor):
        yield tree
        return
    if id(tree) in visited or isinstance(tree, str | int | float | type | None):
        return
    visited.add(id(tree))
    if isinstance(tree, Mapping):
        branches: Any = tree.values()
    elif isinstance(tree, list | tuple | set):
        branches = tree
    else:
        branches = vars(tree).values() if hasattr(tree, "__dict__") else ()
    for branch in branches:
        yield from iterate_held_tensors(branch, visited)


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """Return the most memory that this process had, in GiB; all virtual ranks are one process."""
    peak_gib = {"host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # Linux counts in KiB
    if device.type == "cuda":
        peak_gib["gpu_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
    return {name: round(gib, 3) for name, gib in peak_gib.items()}


def free_memory_bytes(device: torch.device) -> float:
    """Return the free bytes of memory, of a container's limit where there is one."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free_bytes = float(psutil.virtual_memory().available)
    limit_file, usage_file = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    limit_bytes = limit_file.read_text().strip() if limit_file.exists() else "max"
    if limit_bytes.isdigit():
        free_bytes = min(free_bytes, float(limit_bytes) - float(usage_file.read_text()))
    return free_bytes
