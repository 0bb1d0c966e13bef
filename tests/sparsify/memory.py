"""Memory that methods and local steps take, by every malloc of a worker's process.

For a method besides gradient and residual, for local steps besides the inner optimizer's.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import Parameter

import sparsify
from sparsify.comm import Comm
from sparsify.wrappers.aggregator import Aggregator
from tests.conftest import ROOT
from tests.sparsify.laws import METHODS, build

SIDE = 2**10  # of the only tensor, so that n = 2^20
N = SIDE**2
NBYTES = 4 * N  # of n floats
DENSITY = 0.01
SCALE = 0.001  # of the gradients: fixed thresholds then select about as few as the others
STEPS, SETTLED = 7, 6  # what is held is looked at from so many steps on
EVERY, ROUNDS = 8, 2  # local steps, and how often they are averaged
LOCAL = ("localsgd", "diloco", "streaming_diloco", "sparseloco", "muloco", "desloc", "noloco")
SEARCHES = ("fused", "torch")  # in the order of the columns
HEADING = "memory"  # of the first of them
QUIET, WAIT_S = 3, 0.001  # looks that find the same: gloo's threads let go of a message somewhat later


class Counter:
    """Bytes that this process has from malloc, where malloc_counted.cpp is preloaded."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        for function in (self.library.counted_live, self.library.counted_most):
            function.restype = ctypes.c_long

    def live(self) -> int:
        """Allocated now, once no other thread frees anything."""
        seen: list[int] = []
        while len(seen) < QUIET or len(set(seen[-QUIET:])) > 1:
            time.sleep(WAIT_S)
            seen.append(self.library.counted_live())
        return seen[-1]

    def most_in(self, work: Callable[[], object]) -> int:
        """Return the most that is allocated at any time during `work`."""
        self.library.counted_restart()
        work()
        return int(self.library.counted_most())


def memory_of_methods(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """(held, taken) of each method and search, and of local steps, on one of several processes."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not looked through again for each method
    found = {
        f"{name} {select}": torch.tensor(memory_of(name, select, comm))
        for name in METHODS
        for select in SEARCHES
    }
    return found | {name: torch.tensor(memory_of_local(name, comm)) for name in LOCAL}


def memory_of(name: str, select: str, comm: Comm) -> tuple[float, float]:
    """Return the memory that a method holds, and that it takes in some steps, in n floats.

    Gradients are normal; what is left when all is deleted does not count.
    """
    counter, own = Counter(), torch.Generator().manual_seed(comm.rank)
    method, parameter = build(name, DENSITY, "global"), Parameter(torch.zeros(SIDE, SIDE))
    aggregator = Aggregator(method, [("p", parameter)], comm, select=select)
    between, taken = [counter.live()], list[int]()
    for _ in range(STEPS):
        aggregator.gradients.flat.normal_(0, SCALE, generator=own)
        comm.barrier()
        most = counter.most_in(aggregator.aggregate)
        comm.barrier()
        between.append(counter.live())
        taken.append(most - max(between[-2:]))  # what the step made to hold it is not taken by it
    bare = NBYTES * (2 if method.residual(aggregator.states[0]) is None else 3)  # with the parameter
    parameter.grad = None
    del aggregator, parameter
    gc.collect()
    bare += counter.live()
    return (max(between[SETTLED:]) - bare) / NBYTES, max(taken) / NBYTES


def memory_of_local(name: str, comm: Comm) -> tuple[float, float]:
    """Return the memory that local steps hold, and that an exchange takes, in n floats.

    Parameters, gradients and AdamW's state do not count.
    """
    counter, own = Counter(), torch.Generator().manual_seed(comm.rank)
    side = SIDE // 2
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(4)))  # n, which fragments divide
    strategy = sparsify.build(name, every=EVERY)
    optimizer = sparsify.distribute(torch.optim.AdamW(model.parameters(), lr=SCALE), model, strategy, comm)
    between, taken = list[int](), list[int]()
    for _ in range(ROUNDS * EVERY):
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter).normal_(0, SCALE, generator=own)
        optimizer.step_locally()
        before = counter.live()
        taken.append(counter.most_in(optimizer.exchange_if_due) - before)
        between.append(counter.live())
    last = slice(-EVERY, None)
    del optimizer, model, parameter
    gc.collect()
    bare = 4 * NBYTES + counter.live()
    return (max(between[last]) - bare) / NBYTES, max(taken[last]) / NBYTES


def table() -> dict[str, list[float]]:
    """Return the memory that docs/methods.md states.

    Of each method and search, and of local steps: what is held between steps and what a step takes beyond
    that, at most. In n floats, besides gradient and residual.
    """
    lines = (ROOT / "docs/methods.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    at, at_locally = (row.index(HEADING) for row in rows if row[1:2] == ["name"] and HEADING in row)
    cells = dict[str, str]()
    for row in rows:
        name = row[1].strip("`") if len(row) > at_locally else ""
        if name in METHODS:
            cells |= {f"{name} {select}": row[at + i] for i, select in enumerate(SEARCHES)}
        elif name in LOCAL:
            cells[name] = row[at_locally]
    return {key: list(map(float, cell.split(" + "))) for key, cell in cells.items()}
