"""Forward and backward of a step as a CUDA graph: one launch instead of some three hundred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.core import host_sync
from sparsify.core.gradients import FlatGradients

ForwardBackward = Callable[[Tensor, Tensor], Tensor]  # inputs, labels -> loss
NUM_WARMUP_STEPS = (
    3  # plain steps before one is recorded: libraries set themselves up, as in torch's own examples
)
RECORDED = "recorded"


class CudaGraphRecorder:
    """A recorder of CUDA graphs, on a stream of its own, as capturing demands.

    It also runs plain steps there, for autograd goes on accumulating gradients on the stream where it began.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def run_on_capture_stream(self, work: Callable[[], Tensor]) -> Tensor:
        """Carry out the work as it will be recorded."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = work()
        current.wait_stream(self.stream)
        return result

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record the work without doing it; return where its result will be, and a function that replays it.

        Raises:
            RuntimeError: something in it can't be recorded, or the device's memory is full.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.stream.device)
        # The outer one returns to the current stream, which `graph` does not after a capture that failed.
        # Other threads may use the device meanwhile, as nccl's watchdog does.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"),
        ):
            result = work()
        return result, graph.replay

    def release_memory(self) -> None:
        """Give the device the memory back that a recording has left behind."""
        torch.cuda.empty_cache()


class GraphedStep:
    """A step's `work`, replayed as a CUDA graph as long as its tensors keep their addresses.

    The first repetition is compared with the plain way, bit for bit. Where it differs, or recording fails,
    the plain way is taken from then on.

    Args:
        work: fills the gradients, moves the model's buffers, and returns the loss.
        say: told why it is not recorded, once.

    Attributes:
        outcome: `RECORDED`, or why not; None before it was tried.
    """

    def __init__(
        self,
        work: ForwardBackward,
        model: nn.Module,
        gradients: FlatGradients,
        recorder: CudaGraphRecorder,
        say: Callable[[str], None],
    ) -> None:
        self.work = work
        self.gradients = gradients
        self.recorder = recorder
        self.say = say
        self.parameters = [*model.parameters()]
        self.buffers = [*model.buffers()]
        self.outcome: str | None = None
        self.is_off = False
        self.places: Any = None
        self.steps = 0  # with everything in these places
        self.static: tuple[Tensor, Tensor] | None = None  # inputs and labels of the recorded work
        self.loss = torch.empty(0)
        self.repeat: Callable[[], None] | None = None

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        if self.is_off:
            return self.work(inputs, labels)
        places = self._memory_layout(inputs, labels)
        if places != self.places:
            self.places = places
            self.steps = 0
            self.repeat = None
        self.steps += 1
        if self.repeat is None:
            if self.steps > NUM_WARMUP_STEPS:
                return self._capture_and_compare(inputs, labels)
            return self.recorder.run_on_capture_stream(lambda: self.work(inputs, labels))
        return self._replay(inputs, labels)

    def _memory_layout(self, inputs: Tensor, labels: Tensor) -> list[Any]:
        """All that a recording takes for granted: addresses, and the batch's kind."""
        addresses = [p.data_ptr() for p in self.parameters]
        addresses += [0 if p.grad is None else p.grad.data_ptr() for p in self.parameters]
        addresses += [buffer.data_ptr() for buffer in self.buffers]
        return [*addresses, *((t.shape, t.stride(), t.dtype) for t in (inputs, labels))]

    def _replay(self, inputs: Tensor, labels: Tensor) -> Tensor:
        assert self.static is not None
        assert self.repeat is not None
        for static, batch_tensor in zip(self.static, (inputs, labels), strict=True):
            static.copy_(batch_tensor)
        self.repeat()
        return self.loss.clone()  # the next step writes to the same place

    def _capture_and_compare(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Record the work, do this step plainly, and compare. The host waits, this once."""
        written = [self.gradients.flat, *self.buffers]
        before = [tensor.clone() for tensor in written]
        why = None
        try:
            self.static = static = inputs.clone(), labels.clone()
            self.loss, self.repeat = self.recorder.capture(lambda: self.work(*static))
        except RuntimeError as error:  # CUDA's and its allocator's; a mistake in the work itself is met again
            why = str(error).partition("\n")[0]
        if why is not None:  # here, where no traceback holds what was allocated
            self._turn_off(f"it can't be recorded: {why}")
            return self.work(inputs, labels)
        loss = self.recorder.run_on_capture_stream(lambda: self.work(inputs, labels))
        plain = [tensor.clone() for tensor in written]
        copy_into_tensors(before, written)
        repeated = self._replay(inputs, labels)
        host_sync.record_syncs(1 + len(written))
        if torch.equal(repeated, loss) and all(map(torch.equal, plain, written)):
            self.outcome = RECORDED
        else:
            copy_into_tensors(plain, written)
            self._turn_off("repeated, it gave other numbers")
        return loss

    def _turn_off(self, why: str) -> None:
        self.is_off = True
        self.outcome = why
        self.static = self.repeat = None
        self.loss = torch.empty(0)
        self.recorder.release_memory()
        self.say(f"forward and backward run without a CUDA graph: {why}")


def copy_into_tensors(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy the values into the tensors."""
    for value, tensor in zip(values, tensors, strict=True):
        tensor.copy_(value)
