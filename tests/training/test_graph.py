"""Forward and backward, recorded and repeated: the same numbers, whatever happens to what was recorded.

Here by a recorder that repeats Python; CUDA's own under -m gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from experiments.training.graph import NUM_WARMUP_STEPS, RECORDED, CudaGraphRecorder, GraphedStep
from experiments.training.settings import TrainSettings
from sparsify.comm import virtual
from sparsify.core.gradients import FlatGradients
from sparsify.core.timer import PhaseTimer
from tests.conftest import there
from tests.training.digits import CPU, trainer

RANKS = 2


class Repeater(CudaGraphRecorder):
    """Does anew what it was given."""

    def __init__(self, error: Exception | None = None, error_in_result: float = 0.0) -> None:
        self.error, self.error_in_result = error, error_in_result
        self.recordings = self.repeats = self.releases = 0

    def run_on_capture_stream(self, work: Callable[[], Tensor]) -> Tensor:
        return work()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self.recordings += 1
        if self.error:
            raise self.error
        place = torch.zeros((), dtype=torch.float64)

        def repeat() -> None:
            self.repeats += 1
            place.copy_(work() + self.error_in_result)

        return place, repeat

    def release_memory(self) -> None:
        self.releases += 1


def trained(
    recorder: CudaGraphRecorder | None, device: torch.device = CPU, steps: int = 9, mode: str = "production"
) -> tuple[list[Tensor], str | None]:
    """Parameters and buffers of rank 1, and what became of the recording."""
    how: dict[str, Any] = {
        "device": device,
        "steps": steps,
        "dtype": torch.float64,
        "graph_recorder": recorder,
    }

    def body(comm: virtual.VirtualComm) -> tuple[list[Tensor], str | None]:
        timer = PhaseTimer(mode, comm.now_s)
        found = trainer(comm, timer, "topk", train=TrainSettings(), task={"lr": 0.05}, **how).run()
        return [tensor.cpu() for tensor in found.model.state_dict().values()], found.graph_outcome

    return virtual.run(RANKS, body)[1]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def test_repeated_work_trains_to_the_same_bits() -> None:
    recorder = Repeater()
    weights, outcome = trained(recorder)
    assert same(weights, trained(None)[0])
    assert outcome == RECORDED
    assert (recorder.recordings, recorder.repeats) == (RANKS, RANKS * (9 - NUM_WARMUP_STEPS))


@pytest.mark.parametrize(
    ("recorder", "why"),
    [
        (Repeater(torch.OutOfMemoryError("CUDA out of memory. Tried\nto")), "CUDA out of memory. Tried"),
        (Repeater(RuntimeError("not permitted when stream is capturing")), "it can't be recorded: not perm"),
        (Repeater(error_in_result=1e-12), "repeated, it gave other numbers"),
    ],
)
def test_what_can_not_be_repeated_goes_on_plainly_and_says_so_once(
    recorder: Repeater, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, outcome = trained(recorder)
    assert same(weights, trained(None)[0])
    assert why in str(outcome)
    assert (recorder.recordings, recorder.releases) == (RANKS, RANKS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"forward and backward run without a CUDA graph: {outcome}"


def made(recorder: CudaGraphRecorder) -> tuple[nn.Module, FlatGradients, GraphedStep]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    gradients = FlatGradients(model.named_parameters(), "global")

    def work(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = (model(inputs).sum(dim=1) - labels).square().mean()
        gradients.collect_by_parameter()
        gradients.zero_()
        loss.backward()
        return cast(Tensor, loss.detach())

    return model, gradients, GraphedStep(work, model, gradients, recorder, pytest.fail)


def batch(step: int, size: int = 5) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(step)
    return torch.randn(size, 4, generator=own, dtype=torch.float64), torch.ones(size, dtype=torch.float64)


@pytest.mark.parametrize("change", ["gradient", "weights", "batch size"])
def test_what_lies_elsewhere_is_recorded_anew(change: str) -> None:
    """And what is repeated is each step's own batch."""
    recorder = Repeater()
    model, gradients, recorded = made(recorder)
    _, plain_gradients, plain = made(Repeater())
    first = next(model.parameters())
    losses = []
    for step in range(12):
        if step == 6 and change == "gradient":
            first.grad = there(first.grad).clone()
        if step == 6 and change == "weights":
            first.data = first.data.clone()
        inputs, labels = batch(step, 7 if step >= 6 and change == "batch size" else 5)
        losses.append((recorded(inputs, labels), plain.work(inputs, labels)))
        assert torch.equal(gradients.flat, plain_gradients.flat)
    assert all(torch.equal(*both) for both in losses)  # read when a window closes
    assert recorder.recordings == 2


def test_work_whose_phases_are_timed_one_by_one_is_not_recorded() -> None:
    for mode in ("serialised", "as_published"):
        recorder = Repeater()
        assert trained(recorder, mode=mode)[1] is None
        assert recorder.recordings == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_trains_to_the_same_bits() -> None:
    device = torch.device("cuda", 0)
    weights, outcome = trained(CudaGraphRecorder(device), device, steps=30)
    assert outcome == RECORDED
    assert same(weights, trained(None, device, steps=30)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_cuda_can_not_capture_leaves_the_stream_as_it_was() -> None:
    device = torch.device("cuda", 0)
    recorder, before = CudaGraphRecorder(device), torch.cuda.current_stream(device)

    def waits() -> Tensor:
        return torch.ones(3, device=device).sum() * torch.ones(1, device=device).item()

    with pytest.raises(RuntimeError):
        recorder.capture(waits)
    assert torch.cuda.current_stream(device) == before
    assert waits().item() == 3
