"""Workers that train by local steps, strategies of local steps, and rounds of each for any communicator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsify
from sparsify.comm import Comm, CountingComm, virtual
from sparsify.comm.torch import TorchComm
from sparsify.local.local_optimizer import LocalOptimizer
from sparsify.local.strategy import LocalSteps, Nesterov, OuterStep
from sparsify.method import Method
from sparsify.wrappers.engine import StepReport
from tests.conftest import there

MakeInner = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SIZE, EVERY, STEPS = 3, 4, 14
STRATEGIES: dict[str, LocalSteps] = {
    name: sparsify.build(name, every=EVERY)
    for name in ("localsgd", "diloco", "muloco", "desloc", "noloco", "sparseloco")
} | {
    "streaming": sparsify.streaming_diloco(every=EVERY, fragments=2, delay=2),
    "late Top-k": LocalSteps(EVERY, sparsify.topk(density=0.1), Nesterov(), delay=3),
}


def matrices(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.ndim == 2]


class Inner(NamedTuple):
    """Inner optimizers by name."""

    sgd: MakeInner = partial(torch.optim.SGD, lr=0.05)
    momentum: MakeInner = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    adamw: MakeInner = partial(torch.optim.AdamW, lr=0.01)
    muon: MakeInner = lambda ps: torch.optim.Muon(matrices(ps), lr=0.01)


INNER = Inner()


def model_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return two blocks with matrices and vectors."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)


def fill(model: nn.Module, rank: int, step: int, share: int = 0) -> Tensor:
    """Add the gradients of a batch that is this worker's own; return the loss."""
    draws = torch.Generator().manual_seed(1000 * step + 10 * rank + share)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(8, 6, generator=draws, dtype=dtype)
    labels = torch.randint(3, (8,), generator=draws)
    loss = functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss.detach()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def wrapped(
    inner: MakeInner, model: nn.Module, method: LocalSteps | Method, comm: Comm | None, **options: Any
) -> LocalOptimizer:
    found: Any = sparsify.distribute(inner([*model.parameters()]), model, method, comm, **options)
    assert isinstance(found, LocalOptimizer) == isinstance(method, LocalSteps)
    return cast(LocalOptimizer, found)


class Worker:
    """A worker's model and optimizer, and its batches, one a step."""

    def __init__(
        self,
        method: LocalSteps | Method,
        comm: Comm | None,
        inner: MakeInner = INNER.adamw,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.model = model or model_of()
        self.optimizer = wrapped(inner, self.model, method, comm, **options)
        self.rank = self.optimizer.comm.rank

    def backward(self) -> None:
        """Take the gradients of the next batch."""
        self.optimizer.zero_grad()
        fill(self.model, self.rank, self.optimizer.steps)

    def train(self, until: int) -> None:
        """Step until so many steps have been made in all."""
        while self.optimizer.steps < until:
            self.backward()
            self.optimizer.step()

    def own(self) -> Tensor:
        """(n,) a copy of the parameters."""
        return flat(self.model)

    def anchor(self) -> Tensor:
        """(n,) a copy of the anchor."""
        with self.optimizer.at_anchor():
            return flat(self.model)

    def report(self) -> StepReport:
        return there(self.optimizer.last_report)


class History(NamedTuple):
    """The steps of one worker: tensors (n,) and numbers after each of them."""

    own: list[Tensor]  # parameters
    anchors: list[Tensor]
    drifts: list[Tensor]  # by which the parameters differed from the anchor before what was due
    sent: list[int]  # bytes, as reported
    counted: list[int]  # bytes, as the communicator counted them
    worker: Worker


def live(
    strategy: LocalSteps,
    size: int = SIZE,
    steps: int = 3 * EVERY,
    inner: MakeInner = INNER.adamw,
    **options: Any,
) -> list[History]:
    """Train for some steps on virtual ranks."""

    def body(comm: Comm) -> History:
        counting = CountingComm(comm)
        # All begin from rank 0's parameters.
        worker = Worker(strategy, counting, inner, model_of(comm.rank), **options)
        history = History([], [], [], [], [], worker)
        for _ in range(steps):
            before = counting.sent_bytes
            worker.backward()
            worker.optimizer.step_locally()
            history.drifts.append(worker.anchor() - worker.own())
            worker.optimizer.exchange_if_due()
            history.own.append(worker.own())
            history.anchors.append(worker.anchor())
            history.sent.append(worker.report().wire_bytes)
            history.counted.append(counting.sent_bytes - before)
        return history

    return virtual.run(size, body)


def local(name: str, outer: OuterStep | None = None, every: int = EVERY, **others: Any) -> LocalSteps:
    """Return any method of every step, every few steps."""
    known = sparsify.defaults(name)
    wanted = {"density": 0.2, "scope": "layer", "momentum": 0.0}  # which the outer step has
    method = sparsify.build(name, **{key: wanted[key] for key in wanted if key in known})
    return LocalSteps(every, method, outer or Nesterov(), **others)


def anchors_of_all(comm: Comm, now: Callable[[], float]) -> dict[str, Tensor]:
    """Return parameters and anchor (2, n) in mid-round, by strategy.

    Late strategies also run from an overlapping thread, where there are processes.
    """
    found = {}
    for name, strategy in STRATEGIES.items():
        found[name] = lived(strategy, comm)
        if strategy.delay and isinstance(comm, TorchComm):
            found[f"{name} overlapped"] = lived(strategy, None, overlap=True)
    return found


def sent_by_all(comm: Comm, now: Callable[[], float]) -> dict[str, Tensor]:
    """Return `sent_in_two_rounds`, by strategy."""
    return {name: sent_in_two_rounds(strategy, comm) for name, strategy in STRATEGIES.items()}


def lived(strategy: LocalSteps, comm: Comm | None, **options: Any) -> Tensor:
    """(2, n): parameters and anchor at the end, in mid-round."""
    worker = Worker(strategy, comm, **options)
    worker.train(STEPS)
    return torch.stack([worker.own(), worker.anchor()])


def step_randomly(model: nn.Module, optimizer: LocalOptimizer, draws: torch.Generator | None = None) -> None:
    """Step by gradients that are drawn."""
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draws).to(p)
    optimizer.step()


def sent_in_two_rounds(strategy: LocalSteps, comm: Comm) -> Tensor:
    """(2 EVERY, 2): bytes that left this worker by its network interface in each step, and those counted."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    counting = CountingComm(comm)
    model = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512))
    optimizer = wrapped(INNER.adamw, model, strategy, counting)
    sent = [(left_by(interface), counting.sent_bytes)]
    for _ in range(2 * EVERY):
        step_randomly(model, optimizer)
        sent.append((left_by(interface), counting.sent_bytes))
    return torch.tensor(sent).diff(dim=0)


def left_by(interface: str) -> int:
    """Bytes that have left by this interface, once no more do."""
    before = -1
    now = 0
    while now != before:
        time.sleep(0.05)
        before = now
        now = psutil.net_io_counters(pernic=True)[interface].bytes_sent
    return now
