"""Launches: fresh processes that take steps in turns and write down what each took, or count what they do.

The unit of evidence is a launch, for within one memory lies where it lies, and all its steps share that.
"""

from __future__ import annotations

import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.multiprocessing.spawn import spawn

import sparsify
from experiments.bench._runner import Record, rounded
from experiments.bench._side_by_side import flush_bytes
from experiments.bench._step_counts import Operators
from experiments.bench._step_ways import NETWORKS, WAYS, WaySetup
from experiments.bench._timing import no_collection
from sparsify.comm.torch import TorchComm
from sparsify.core import huge_pages

WARM_UP = 3  # steps before any is counted: DDP rebuilds its buckets, PowerSGD begins, memory is allocated
CLOCKS = ("cpu", "wall")
SETTLING = 2  # steps before one is counted: DDP rebuilds its buckets after the first
COPIES = 3  # of the gradient around the search, which take turns
AROUND = ("add", "aggregate", "around")


class OfWorkers(Protocol):
    """As much of what the processes of a launch are told as is needed to start them."""

    @property
    def workers(self) -> int: ...


class TurnsAsked(OfWorkers, Protocol):
    """The same of one whose processes take turns."""

    @property
    def turns(self) -> int: ...
    @property
    def launch(self) -> int: ...


class LaunchAsked(NamedTuple):
    """What the processes of a launch are told."""

    network: str
    layers: int
    workers: int
    ways: Sequence[str]
    turns: int
    density: float
    bucket_mb: float
    launch: int


Samples = dict[str, dict[str, list[float]]]  # way -> clock -> ms of each turn


def launched(work: Callable[..., None], asked: OfWorkers) -> Any:
    """What rank 0 of these processes wrote."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (asked, folder), nprocs=asked.workers)
        return json.loads((Path(folder) / "found.json").read_text())


def meet(rank: int, asked: OfWorkers, folder: str) -> TorchComm:
    torch.set_num_threads(1)
    return TorchComm.join(f"file://{folder}/rendezvous", rank, asked.workers, torch.device("cpu"))


def part(comm: TorchComm, found: Any, folder: str) -> None:
    """The end of a launch: rank 0 writes what was found."""
    if comm.rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    comm.barrier()
    comm.close()


def taken(do: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds: of all threads of this process together, and of the clock on the wall."""
    worked, began = time.process_time(), time.perf_counter()
    do()
    ended = time.perf_counter()
    return 1e3 * (time.process_time() - worked), 1e3 * (ended - began)


def time_ways(rank: int, asked: LaunchAsked, folder: str) -> None:
    """Whole steps of all ways, in each turn in another order, the same on all workers. CPU time is that of
    all workers together; wall time that of the slowest.
    """
    comm = meet(rank, asked, folder)
    setup = WaySetup(asked.network, asked.layers, asked.density, asked.bucket_mb, rank)
    take_turns(comm, asked, {name: WAYS[name](setup) for name in asked.ways}, folder)


def take_turns(
    comm: TorchComm, asked: TurnsAsked, steps: Mapping[str, Callable[[], object]], folder: str
) -> None:
    """Time these steps, in each turn in another order, the same on all workers; the end of a launch."""
    order, names = random.Random(asked.launch), [*steps]
    took = torch.zeros(asked.turns, len(steps), len(CLOCKS), dtype=torch.float64)
    with no_collection():
        for turn in range(-WARM_UP, asked.turns):
            gc.collect()  # what cycles hold of the turn before
            for at in order.sample(range(len(steps)), len(steps)):
                comm.barrier()
                spent = taken(steps[names[at]])
                if turn >= 0:
                    took[turn, at] = torch.tensor(spent)
    everyone = torch.stack(comm.all_gather(took))
    cpu, wall = everyone[..., 0].sum(0), everyone[..., 1].amax(0)
    part(comm, {
        name: {
            clock: [rounded(ms) for ms in times[:, at].tolist()]
            for clock, times in zip(CLOCKS, (cpu, wall), strict=True)
        }
        for at, name in enumerate(steps)
    }, folder)  # fmt: skip


def count_ways(rank: int, asked: LaunchAsked, folder: str) -> None:
    """What one step of each way does once it is settled: collectives of the whole step, and the operators
    that run where gradients are averaged.
    """
    comm, found = meet(rank, asked, folder), dict[str, Record]()
    for name in asked.ways:
        inside, whole, door = Within(), Operators(), Operators()
        step = WAYS[name](WaySetup(asked.network, asked.layers, asked.density, asked.bucket_mb, rank, inside))
        for _ in range(SETTLING):
            step()
        inside.count = door
        with whole:
            step()
        told = {
            "operations": door.operations, "around_search": door.around_search,
            "operators": dict(door.counted.most_common()),
        }  # fmt: skip
        found[name] = {"collectives": whole.collectives} | (told if door.counted else {})
        del step
        gc.collect()
    part(comm, found, folder)


class Within:
    """A context that enters a count, while it has one."""

    count: Operators | None = None

    def __call__(self) -> AbstractContextManager[object]:
        return nullcontext() if self.count is None else self.count


class HandOver(Function):
    """A loss whose backpropagation does nothing but hand over gradients, which `ready` has until then."""

    @staticmethod
    def forward(ctx: Any, ready: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.ready = ready
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        given = (None, *ctx.ready)
        ctx.ready.clear()  # so that autograd alone has them, and may keep them as they are
        return given


def time_around(rank: int, asked: LaunchAsked, folder: str) -> None:
    """A step of Top-k through `sparsify.distribute` without a network, beside the in-place add of as many
    elements: `aggregate` alone, that is the check and the averaging; and all that is around, with `zero_grad`
    and the accumulation of gradients. Each with cold caches.
    """
    comm, device = meet(rank, asked, folder), torch.device("cpu")
    shapes = [p.shape for p in NETWORKS[asked.network].make(asked.layers).parameters()]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    model = nn.ParameterList(parameters)
    n = sum(p.numel() for p in parameters)
    drawn = torch.Generator().manual_seed(asked.launch)
    sources = [[torch.randn(shape, generator=drawn) for shape in shapes] for _ in range(COPIES)]
    optimiser = sparsify.distribute(
        torch.optim.SGD(parameters, lr=1.0), model, sparsify.build("topk", density=asked.density)
    )
    acc, grad = (huge_pages.request(torch.empty(n)).normal_(generator=drawn) for _ in range(2))
    cold = torch.full((flush_bytes(device) // 4,), 1.0)

    def handed_over(turn: int) -> Callable[[], None]:
        """All of a step but the optimiser's own; gradients come from memory that nothing else has."""
        ready = [fresh(source) for source in sources[turn % COPIES]]

        def backward() -> None:
            optimiser.zero_grad()
            HandOver.apply(ready, *parameters).backward()

        return backward

    def once(name: str, turn: int) -> tuple[float, float]:
        backward = handed_over(turn)
        if name == "aggregate":
            backward()
        cold.sum()
        if name == "add":
            return taken(lambda: acc.add_(grad))
        if name == "aggregate":
            return taken(optimiser.aggregate)
        return taken(lambda: (backward(), optimiser.aggregate()))

    order, samples = (
        random.Random(asked.launch),
        {name: {clock: list[float]() for clock in CLOCKS} for name in AROUND},
    )
    with no_collection():
        for turn in range(-WARM_UP, asked.turns):
            if turn == 0:
                before = searched(optimiser)
            for name in order.sample(AROUND, len(AROUND)):
                for clock, ms in zip(CLOCKS, once(name, turn), strict=True):
                    if turn >= 0:
                        samples[name][clock].append(rounded(ms))
    candidates, selected = (
        after - earlier for after, earlier in zip(searched(optimiser), before, strict=True)
    )
    backward, count = handed_over(0), Operators()
    with count:
        backward()
        optimiser.aggregate()
    part(comm, {
        "n": n, "samples_ms": samples, "candidates_over_k": candidates / selected if selected else None,
        "operator_bytes": count.nbytes, "operators": dict(count.counted.most_common()),
    }, folder)  # fmt: skip


def fresh(source: Tensor) -> Tensor:
    return huge_pages.request(torch.empty_like(source)).copy_(source)


def searched(optimiser: Any) -> tuple[int, int]:
    """Candidates and selected elements, of all searches until now."""
    found = optimiser.engine.search_stats().values()
    return sum(one.candidates for one in found), sum(one.selected for one in found)
