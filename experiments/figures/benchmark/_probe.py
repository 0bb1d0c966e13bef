"""A small training by which laws of an entry are checked that no test in one process can see.

    python -m experiments.figures.benchmark._probe ENTRY.json FOLDER

Each training is a process that is forked from this one, which has loaded torch but none of the entry's
files. What is printed, in JSON, is the exit code of each, what it said, and a digest of the weights after
each step, rank by rank. One ends with a sentence and exit code 3 where a file of the entry reaches past what
it is given: files, sockets, programs, or torch.distributed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sparsify
from experiments.figures.benchmark.laws import HALF, LIMIT_S, PAST, SIZE, STEPS, find_method_files
from experiments.training.task import patch_optimizers_to_skip_compiler
from sparsify.comm import Comm, virtual
from sparsify.methods import REGISTRY as METHODS

READ_AS_CODE = (".py", ".pyc", ".so", ".pyi")
# Audited events that no method has a use for.
REACHING = (
    "socket.", "subprocess.", "os.system", "os.fork", "os.posix_spawn", "os.exec", "mmap.", "ctypes.",
    "shutil.", "urllib.", "open", "os.open", "shm", "gc.get_objects", "gc.get_referrers",
)  # fmt: skip
OF_GROUPS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "all_to_all",
    "broadcast_object_list", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor", "send", "recv",
    "isend", "irecv", "gather", "scatter", "reduce", "batch_isend_irecv", "new_group", "barrier",
)  # fmt: skip


def exit_if_called_from(paths: Collection[str], offence: str) -> None:
    """End this process if a file of `paths` is among its callers, but for calls through the library."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name in paths:
            print(f"{Path(name).name}, line {frame.f_lineno}: {offence}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(PAST)  # which no `except` of the file swallows
        if "importlib" in name or "/sparsify/kernels/" in name or "/sparsify/comm/" in name:
            return
        frame = frame.f_back


def forbid_reaching_out(paths: Collection[str]) -> None:
    """From now on, end this process where one of these files reaches past what it is given."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REACHING):
            subject = str(arguments[0]) if arguments else ""
            if not subject.endswith(READ_AS_CODE):
                exit_if_called_from(
                    paths, f"{event} {subject:.80}: a method has nothing but what it is handed"
                )

    sys.addaudithook(hook)
    for name in OF_GROUPS:
        if hasattr(dist, name):
            setattr(dist, name, _guarded(getattr(dist, name), paths))


def _guarded(function: Callable[..., Any], paths: Collection[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        exit_if_called_from(
            paths, f"torch.distributed.{function.__name__}: a method communicates by Comm alone"
        )
        return function(*values, **named)

    return call


def make_network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # 139,528 parameters: what is done with large buckets alone is seen as well.
        return nn.Sequential(nn.Linear(32, 320), nn.Tanh(), nn.Linear(320, 400), nn.Tanh(), nn.Linear(400, 8))


def batch_loss(network: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a batch that is this worker's own."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 32, generator=draws)
    labels = torch.randint(8, (16,), generator=draws)
    return nn.functional.cross_entropy(network(inputs), labels)


class Training:
    """The training of one worker."""

    def __init__(self, method: Any, comm: Comm) -> None:
        self.network = make_network()
        self.comm = comm
        inner = torch.optim.SGD(self.network.parameters(), lr=0.05)
        self.optimiser = sparsify.distribute(inner, self.network, method, comm, steps_per_epoch=STEPS)

    def take_steps(self, step_numbers: range) -> list[str]:
        """Take these steps; return a digest of the weights after each."""
        digests = []
        for step in step_numbers:
            self.optimiser.zero_grad()
            batch_loss(self.network, self.comm.rank, step).backward()
            self.optimiser.step()
            weights = torch.cat([p.detach().flatten() for p in self.network.parameters()])
            digests.append(hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
        return digests

    def state_dict(self) -> dict[str, Any]:
        """Return the state of network and optimizer."""
        return {"model": self.network.state_dict(), "optimiser": self.optimiser.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned."""
        self.network.load_state_dict(saved["model"])
        self.optimiser.load_state_dict(saved["optimiser"])


def train_and_save_half(method: Any, folder: str) -> list[str]:
    """Take all steps of virtual ranks; save the state after HALF of them into a file of each rank."""

    def body(comm: Comm) -> list[str]:
        training = Training(method, comm)
        first_digests = training.take_steps(range(HALF))
        torch.save(training.state_dict(), f"{folder}/{comm.rank}.pt")
        return first_digests + training.take_steps(range(HALF, STEPS))

    return [digest for rank in virtual.run(SIZE, body) for digest in rank]


def train_second_half(method: Any, folder: str) -> list[str]:
    """Take the steps after HALF of them, from the state that `train_and_save_half` has saved."""

    def body(comm: Comm) -> list[str]:
        training = Training(method, comm)
        training.load_state_dict(torch.load(f"{folder}/{comm.rank}.pt", weights_only=True))
        return training.take_steps(range(HALF, STEPS))

    return [digest for rank in virtual.run(SIZE, body) for digest in rank]


def train_as_process(method: Any, folder: str, rank: str) -> list[str]:
    """Take all steps as one of SIZE processes."""
    store = dist.FileStore(f"{folder}/store", SIZE)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=SIZE)
    from sparsify.comm.torch import TorchComm

    digests = Training(method, TorchComm()).take_steps(range(STEPS))
    dist.destroy_process_group()
    return digests


def train_and_write_digests(
    settings: dict[str, Any], train: Callable[..., list[str]], name: str, folder: str, *more: str
) -> None:
    """Train in this process; write what it says into FOLDER/NAME.said, and its digests into FOLDER/NAME."""
    with open(f"{folder}/{name}.said", "w", buffering=1) as said:
        os.dup2(said.fileno(), 2)
    forbid_reaching_out({*map(str, find_method_files(settings["method"]))})
    method = METHODS.build(settings["method"], settings["values"])
    Path(folder, name).write_text(json.dumps(train(method, folder, *more)))


def main(declared: str, folder: str) -> None:
    torch.set_num_threads(1)
    patch_optimizers_to_skip_compiler()
    settings = json.loads(Path(declared).read_text())
    fork = multiprocessing.get_context("fork")

    def start(train: Callable[..., list[str]], name: str, *more: str) -> Any:
        process = fork.Process(
            target=train_and_write_digests, args=(settings, train, name, folder, *more), name=name
        )
        process.start()
        return process

    def end(process: Any) -> dict[str, Any]:
        process.join(LIMIT_S)
        process.kill()  # if it has not ended
        process.join()
        said = Path(folder, f"{process.name}.said")
        digests = Path(folder, process.name)
        return {
            "code": process.exitcode,
            "said": said.read_text() if said.exists() else "",
            "digests": json.loads(digests.read_text()) if process.exitcode == 0 else [],
        }

    rank_processes = [start(train_as_process, f"rank{rank}", str(rank)) for rank in range(SIZE)]
    whole = end(start(train_and_save_half, "whole"))
    report_by_name = {
        "whole": whole,
        "second": whole if whole["code"] else end(start(train_second_half, "second")),
    }
    print(json.dumps(report_by_name | {process.name: end(process) for process in rank_processes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
