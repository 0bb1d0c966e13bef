"""The CUDA paths: same mathematics as on the CPU, and device clocks. Skipped where there is no GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import sparsify
from experiments.training.settings import TrainSettings
from sparsify.comm import virtual
from sparsify.core.timer import TIMING_MODES, PhaseTimer, record_cuda_event
from sparsify.wrappers.aggregator import Aggregator
from tests.sparsify.laws import METHODS, build, check_laws, gradient, live
from tests.training import digits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(device: torch.device, method: str, mode: str) -> list[torch.Tensor]:
    """Return the final weights of two virtual ranks after 10 steps in float64."""
    synchronise = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)

    def body(comm: virtual.VirtualComm) -> torch.Tensor:
        timer = PhaseTimer(mode, comm.now_s, synchronise)
        trainer = digits.trainer(
            comm,
            timer,
            method,
            task={"lr": 0.05},
            steps=10,
            train=TrainSettings(),
            device=device,
            dtype=torch.float64,
        )
        return digits.weights(trainer)

    return virtual.run(2, body, synchronise=synchronise)


@pytest.mark.parametrize("mode", TIMING_MODES)
def test_training_on_the_gpu_agrees_with_the_cpu(mode: str) -> None:
    """Digits are not augmented. What randomk draws it draws on the device, and ranks agree."""
    for method in ("dense", "topk", "control", "randomk"):
        on_gpu, on_cpu = (train(torch.device(kind, 0), method, mode) for kind in ("cuda", "cpu"))
        assert torch.equal(on_gpu[0], on_gpu[1]), method
        if method != "randomk":
            torch.testing.assert_close(on_gpu[0], on_cpu[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", METHODS)
def test_the_laws_hold_on_the_gpu_and_it_selects_what_the_cpu_selects(name: str) -> None:
    """But those that round at random do so with the device's own generator."""
    method = build(name, 0.05, "layer")
    on_gpu, on_cpu = (live(method, 3, device=device) for device in ("cuda", "cpu"))
    check_laws(method, on_gpu, 1e-10)
    if name not in ("qsgd", "terngrad"):
        last = on_gpu[0].updates[-1].cpu()
        torch.testing.assert_close(last, on_cpu[0].updates[-1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", METHODS)
def test_the_host_waits_for_the_gpu_exactly_as_often_as_is_said(name: str) -> None:
    """CUDA itself warns at every synchronisation; what is counted may not be fewer."""
    method, shape = build(name, 0.05, "layer"), (100, 200)

    def body(comm: virtual.VirtualComm) -> int:
        aggregator = Aggregator(method, [("p", Parameter(torch.zeros(shape, device="cuda")))], comm)
        for step in range(5):
            aggregator.gradients.flat.copy_(0.005 * gradient(comm.rank, step, shape).flatten())
            if step == 4:
                torch.cuda.set_sync_debug_mode("warn")
            report = aggregator.aggregate()
        torch.cuda.set_sync_debug_mode("default")
        return report.host_syncs

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counted = sum(virtual.run(2, body))
    warned = sum("synchronizing" in str(warning.message) for warning in caught)
    assert warned <= counted


def test_device_events_time_what_the_host_only_queued() -> None:
    timer = PhaseTimer("production", synchronise=torch.cuda.synchronize, record_event=record_cuda_event)
    cycles = 200_000_000  # about 0.1 s on any GPU of these years
    with timer.step(), timer.collective():
        torch.cuda._sleep(cycles)
    (sample,) = timer.finish_window_and_split_waits(lambda mine: [mine])
    assert sample.step_s > 0.02
    assert sample.phases["transfer"] == pytest.approx(sample.step_s, rel=0.2)


@pytest.fixture
def nccl_group_of_one() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl_group_of_one")
@pytest.mark.parametrize("entry", ["ddp", "distribute"])
def test_overlap_on_a_stream_of_its_own_changes_no_bit(entry: str) -> None:
    """Layers are so wide that the host is far ahead of the device.

    A stream that did not wait would read too early. A group of one has nobody to wait for, but keeps
    residuals like any other.
    """
    ends = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))).cuda().double()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = build("topk", 0.05, "layer")
        if entry == "ddp":
            model = DistributedDataParallel(model, bucket_cap_mb=1)
            sparsify.register(model, method, optimizer, overlap=overlap)
        else:
            optimizer = sparsify.distribute(optimizer, model, method, overlap=overlap)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4096, 1024, device="cuda", dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)
