"""The CUDA paths: same mathematics as on the CPU, and device clocks. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

import sparsify
from experiments import data as datasets
from experiments.tasks import REGISTRY as TASKS
from experiments.train import Setting, train
from sparsify.comm import virtual
from sparsify.timer import MODES, PhaseTimer
from tests.bodies import NoLog

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def weights(device: torch.device, method: str, mode: str) -> list[torch.Tensor]:
    """Final weights of two virtual ranks after 10 steps in float64."""
    data, task = datasets.load("digits", None, device), TASKS.build("cnn_digits", {"lr": 0.05})
    setting = Setting(seed=0, num_steps=10, validate=True, device=device, dtype=torch.float64)
    synchronise = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)

    def body(comm: virtual.VirtualComm) -> torch.Tensor:
        timer = PhaseTimer(mode, comm.now, synchronise)
        density = {} if method == "dense" else {"density": 0.01}
        model = train(task, data, sparsify.build(method, **density), comm, timer, NoLog(), setting)
        return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])

    return virtual.run(2, body, synchronise=synchronise)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["dense", "topk", "control"])
def test_training_on_the_gpu_agrees_with_the_cpu(method: str, mode: str) -> None:
    """Digits are not augmented and these methods draw nothing: the devices' generators do not matter."""
    on_gpu, on_cpu = (
        weights(torch.device("cuda", 0), method, mode),
        weights(torch.device("cpu"), method, mode),
    )
    assert torch.equal(on_gpu[0], on_gpu[1])
    torch.testing.assert_close(on_gpu[0], on_cpu[0], rtol=1e-9, atol=1e-11)


def test_randomk_draws_on_the_device_and_ranks_agree() -> None:
    on_gpu = weights(torch.device("cuda", 0), "randomk", "serialised")
    assert torch.equal(on_gpu[0], on_gpu[1])


def test_device_events_time_what_the_host_only_queued() -> None:
    timer = PhaseTimer("production", synchronise=torch.cuda.synchronize, device_events=True)
    cycles = 200_000_000  # about 0.1 s on any GPU of these years
    with timer.step(), timer.collective():
        torch.cuda._sleep(cycles)
    (sample,) = timer.resolve(lambda mine: [mine])
    assert sample.step_s > 0.02
    assert sample.phases["transfer"] == pytest.approx(sample.step_s, rel=0.2)


def test_augmentation_runs_on_the_device() -> None:
    data = datasets.load("digits32", None, torch.device("cuda", 0))
    own = torch.Generator(device="cuda").manual_seed(0)
    assert data.normalised(data.augmented(torch.arange(8, device="cuda"), own).float()).is_cuda
