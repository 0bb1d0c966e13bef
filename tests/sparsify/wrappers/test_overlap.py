"""Averaging while backpropagation goes on: what is delivered when, and what becomes of errors."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import sparsify
from sparsify.comm import Comm, WorkerLost
from sparsify.comm.torch import TorchComm
from sparsify.core.timer import PhaseTimer
from sparsify.wrappers.engine import Engine, NonFiniteGradientError, StepReport
from tests.sparsify import laws
from tests.sparsify.worker_functions import on_processes
from tests.sparsify.wrappers.user_acts import DISTRIBUTE, REGISTER, Act, Training, loss_of, net
from tests.training.digits import trainer, weights

OVERLAPPED = (DISTRIBUTE[1], REGISTER[1])


def use_overlap(comm: Comm, now: Callable[[], float]) -> dict[str, Any]:
    """Return what this worker lived through in all that takes two processes."""
    torch.set_num_threads(1)
    trained = {
        f"{method} {scope}": train_in_experiments(comm, now, method, scope)
        for method, scope in (("topk", "layer"), ("gaussiank", 0.05), ("dense", "layer"))
    }
    overflowed = {wrapper: overflow_in_the_last_bucket(comm.rank, wrapper) for wrapper in OVERLAPPED}
    return {"trained": trained, "overflowed": overflowed}


def train_in_experiments(
    comm: Comm, now: Callable[[], float], method: str, scope: str | float
) -> list[Tensor]:
    """Return the flat weights without overlap and with it."""
    ends = []
    for overlap in (False, True):
        built, timer = laws.build(method, 0.01, scope), PhaseTimer("production", now)
        training = trainer(comm, timer, built, steps=4, dtype=torch.float64, overlap=overlap)
        ends.append(weights(training))
    return ends


def overflow_in_the_last_bucket(rank: int, wrapper: str) -> tuple[str, list[str], bool]:
    """Return what this worker is told where worker 1 has a NaN in its second step.

    Also return which residuals have changed, and whether all are finite.
    """
    training = Training(Act(), wrapper, rank)
    training.advance(0)
    before = training.owed()
    if rank == 1:
        training.model.convolution.weight.register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(NonFiniteGradientError) as error:
        training.advance(1)
    after = training.owed()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return str(error.value), changed, all(bool(owed.isfinite().all()) for owed in after.values())


def lose_a_worker(comm: Comm, now: Callable[[], float]) -> None:
    """Let worker 1 die when half of its gradients are there, and write down what the other one is told.

    The wrapper is the one that the folder is called after.
    """
    folder = Path(sys.argv[4])
    training = Training(Act(), folder.name, comm.rank)
    training.advance(0)
    if comm.rank == 1:
        training.model.convolution.weight.register_hook(lambda grad: os._exit(0))
    with pytest.raises(WorkerLost) as error:
        training.advance(1)
    torch.save({"told": str(error.value)}, folder / f"{comm.rank}.pt")
    os._exit(0)  # a group without worker 1 can't be closed


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two gloo processes lived through, by rank."""
    return on_processes(use_overlap, 2, tmp_path_factory.mktemp("overlap"))


def test_the_trainer_of_experiments_ends_at_the_same_weights_with_overlap(used: list[dict[str, Any]]) -> None:
    for found in used:
        for name, (plain, overlapped) in found["trained"].items():
            assert torch.equal(plain, overlapped), name
            assert torch.equal(plain, used[0]["trained"][name][0]), name


def test_a_nan_on_one_worker_stops_all_before_it_reaches_a_residual(used: list[dict[str, Any]]) -> None:
    """The NaN is in the bucket that gets full last; what came before was delivered, and the error says so."""
    for found in used:
        for told, changed, is_finite in found["overflowed"].values():
            assert "rank 1, step" in told
            assert "were delivered already" in told
            assert told.endswith("go on from a checkpoint")
            assert "output.weight" in changed  # which came first
            assert "convolution.weight" not in changed
            assert is_finite


@pytest.mark.parametrize("wrapper", OVERLAPPED)
def test_the_loss_of_a_worker_reaches_the_others_as_such(wrapper: str, tmp_path: Path) -> None:
    folder = tmp_path / wrapper
    folder.mkdir()
    first, _ = on_processes(lose_a_worker, 2, folder)
    is_own_loop = wrapper == OVERLAPPED[0]  # DDP has no skip()
    assert ("calls optimizer.skip()" in first["told"]) is is_own_loop


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("wrapper", OVERLAPPED)
def test_a_bucket_is_delivered_while_backpropagation_goes_on(
    wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's gradient is not computed before the output layer's has been averaged.

    What the thread writes then does not count as changed by the user.
    """
    delivered = threading.Event()
    original = Engine.average

    def average(engine: Engine, *parts: Any) -> StepReport:
        report = original(engine, *parts)
        delivered.set()
        return report

    monkeypatch.setattr(Engine, "average", average)
    training = Training(Act(), wrapper, 0)
    training.advance(0)  # in one of DDP's buckets; from the next step on it makes more
    delivered.clear()
    in_time: list[bool] = []
    training.model.convolution.weight.register_hook(lambda grad: in_time.append(delivered.wait(20)))
    training.advance(1)
    assert in_time == [True]


class Broken(TorchComm):
    """A process group whose network breaks down."""

    gathered = 0
    is_down = False

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if self.is_down:
            self.gathered += 1
            raise OSError("the network is down")
        return super().all_gather(tensor)


@pytest.mark.usefixtures("group_of_one")
def test_an_error_in_the_thread_reaches_the_step_and_ends_what_was_to_follow() -> None:
    """Later buckets would exchange what nobody else does."""
    model, comm = net(), Broken()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = sparsify.distribute(inner, model, laws.build("topk", 0.1), comm, overlap=True)
    comm.is_down = True
    loss_of(model, 0, 0).backward()
    with pytest.raises(OSError, match="network is down"):
        optimizer.step()
    assert comm.gathered == 1


@pytest.mark.usefixtures("group_of_one")
def test_what_is_wrapped_around_a_model_goes_before_it() -> None:
    """Neither hooks nor threads, nor what watches for scalers, keep residuals alive."""
    for wrapper in (*OVERLAPPED, REGISTER[0]):
        training = Training(Act(), wrapper, 0)
        training.advance(0)
        (holder,) = training.holders
        alive: list[Callable[[], object]] = [ref(holder), ref(holder.engine)]
        model = training.model
        del holder, training
        gc.collect()
        assert [reference() for reference in alive] == [None, None]
        loss_of(model, 0, 1).backward()
