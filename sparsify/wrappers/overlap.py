"""Aggregation of buckets while backpropagation goes on, in a thread and on a GPU stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsify.core.grouping import group_consecutive_indices
from sparsify.types import StepSettings
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.checks import check_needs_no_whole_gradient
from sparsify.wrappers.engine import StepReport, weak_callback

MAX_MESSAGE_BYTES = 25 * 2**20  # of the gradients that share a message, as DDP's buckets
MIN_MESSAGES = 8  # of a step, about


class BackgroundExecutor:
    """A thread and, on a GPU, a stream that work in the order in which work was submitted.

    Where work fails, all later work is dropped. A collective needs a process group that belongs to the
    thread: in a shared group, collectives of two threads would meet.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, "aggregation")
        self.futures: list[Future[Any]] = []  # of the work that was submitted since `wait_for_results`

    def submit(self, work: Callable[[], Any]) -> None:
        """Run `work` after all earlier work, and after what is queued on the device so far."""
        queued = None
        if self.stream is not None:
            queued = torch.cuda.current_stream(self.stream.device).record_event()
        previous = self.futures[-1] if self.futures else None
        self.futures.append(self.thread.submit(self._run, work, queued, previous))

    def wait_for_results(self) -> list[Any]:
        """Wait for all work and return its results; work queued on the device later follows it.

        Raises:
            Exception: the first one that work raised, as it was.
        """
        futures = self.futures
        self.futures = []
        results = [future.result() for future in futures]
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return results

    def _run(self, work: Callable[[], Any], queued: Any, previous: Future[Any] | None) -> Any:
        if previous is not None:
            previous.result()  # is done, for there is one thread; or it failed
        with torch.no_grad():  # each thread has a mode of its own
            if self.stream is None:
                return work()
            with torch.cuda.stream(self.stream):
                self.stream.wait_event(queued)
                return work()


TOO_LATE = (
    "between backward and step, when they were on their way already; change (or clip) their average, after "
    "optimizer.aggregate(), or leave overlap out"
)


class _InFlightGradient(Tensor):
    """A stand-in for a gradient between backward and step, which refuses every operation.

    It is needed because writing to `p.grad.data` goes past autograd's count of changes. Autograd itself calls
    no operation on it.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError(f"gradients were looked at or changed {TOO_LATE}")


class BackwardOverlap:
    """A driver that lets an aggregator start each bucket as soon as all of its gradients are computed.

    Buckets are aggregated in their order, which is that in which backpropagation finishes, so that all
    workers do the same collectives in the same order. Every parameter gets one gradient a step:

        overlap.begin_step(epoch, lr)
        loss.backward()
        report = overlap.finish_step()

    Args:
        aggregator: of several buckets; its communicator must work from another thread (processes do, virtual
            ranks don't), and nothing else may use it between `begin_step` and `finish_step`.
        aggregate_group: aggregates a group of buckets, given this object and the group's number, in the
            thread; by default `average_group`.
        on_unbegun_step: called with this object when a gradient arrives in a step that was not begun; it may
            begin it.

    Raises:
        ValueError: the method needs the gradient of the whole model first, or there is only one bucket.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        aggregate_group: Callable[[BackwardOverlap, int, Sequence[StepSettings]], StepReport] | None = None,
        on_unbegun_step: Callable[[BackwardOverlap], None] = lambda overlap: None,
    ) -> None:
        self.aggregator = aggregator
        gradients = aggregator.gradients
        check_needs_no_whole_gradient(aggregator.method)
        if len(gradients.buckets) < 2:
            raise ValueError(
                f"overlap=true with scope={aggregator.method.scope!r}: there is one bucket, and it is full "
                "when backpropagation is over; take scope=layer, or a bucket size in MB"
            )
        self.aggregate_group = aggregate_group or BackwardOverlap.average_group
        self.on_unbegun_step = on_unbegun_step
        self.background = BackgroundExecutor(gradients.flat.device)
        # What is aggregated does not count as changed: autograd counts changes of an alias by themselves.
        gradients.buckets[:] = [bucket._replace(flat=bucket.flat.data) for bucket in gradients.buckets]
        index_by_name = {name: index for index, (name, _) in enumerate(gradients.named_parameters)}
        # Groups of buckets that are sent as soon as all of them are full. A step has a few messages, so that
        # there is something to overlap.
        nbytes = [bucket.flat.nbytes for bucket in gradients.buckets]
        max_bytes = min(MAX_MESSAGE_BYTES, sum(nbytes) / MIN_MESSAGES) if aggregator.sends_one_message else 0
        self.groups = group_consecutive_indices(nbytes, max_bytes)
        # Parameters are counted as in `gradients.named_parameters`. Empty ones lie in no bucket.
        self.parameters_by_group = [
            [index_by_name[name] for bucket in group for name in gradients.buckets[bucket].names]
            for group in self.groups
        ]
        self.group_by_parameter = {
            index: group for group, indices in enumerate(self.parameters_by_group) for index in indices
        }
        self.pending: list[set[int]] = []  # of each group, parameters whose gradients are yet to come
        self.steps: list[StepSettings] = []  # of each bucket
        self.stand_in_by_parameter = dict[int, Tensor]()
        self.version = 0  # autograd's count of the gradients' changes, when the last gradient arrived
        for index in self.group_by_parameter:
            hook = weak_callback(self._on_gradient, index)
            gradients.parameters[index].register_post_accumulate_grad_hook(hook)

    @property
    def is_step_open(self) -> bool:
        """True between `begin_step` and `finish_step`."""
        return bool(self.pending)

    def begin_step(self, epoch: int, lr: float | Sequence[float]) -> None:
        """Begin a step, before its first gradient. Arguments as `Aggregator.aggregate`."""
        self.steps = self.aggregator.begin_step(epoch, lr)
        self.pending = [set(indices) for indices in self.parameters_by_group]
        self.background.futures = []  # of a step that ended in an error
        self.version = self.aggregator.gradients.flat._version

    def finish_step(self, drops_unsent: bool = False) -> StepReport:
        """End a step, after backward, and return its report.

        All gradients are averages as soon as the work queued on the device is done.

        Args:
            drops_unsent: True: backward has failed, so gradients that are not sent yet count as zero.

        Raises:
            ValueError: gradients were changed since backward; besides whatever aggregating them raised.
        """
        gradients = self.aggregator.gradients
        pending = self.pending
        self.pending = []
        is_changed = gradients.flat._version != self.version
        for index, stand_in in self.stand_in_by_parameter.items():
            p = gradients.parameters[index]
            is_changed |= p.grad is not stand_in
            if drops_unsent or p.grad is stand_in:
                p.grad = gradients.grads[index]
        self.stand_in_by_parameter = {}
        if is_changed and not drops_unsent:
            raise ValueError(f"gradients were changed {TOO_LATE}")
        for group in range(len(self.background.futures), len(pending)):
            for index in pending[group]:  # parameters that were not used get no gradient
                gradients.restore_view(index)
            if drops_unsent:
                for bucket in self.groups[group]:
                    gradients.buckets[bucket].flat.zero_()
            self._start(group)
        return StepReport.total(self.background.wait_for_results())

    def _on_gradient(self, index: int, _: Tensor) -> None:
        """Take the gradient of a parameter, and start all groups that are full, in their order."""
        if not self.is_step_open:
            self.on_unbegun_step(self)
        if not self.is_step_open:
            return
        gradients = self.aggregator.gradients
        pending = self.pending[self.group_by_parameter[index]]
        if index not in pending:
            raise ValueError(
                f"a second gradient of {gradients.named_parameters[index][0]} came before the step, when the "
                "first was on its way already; run all backward passes of a step but the last within "
                "`with optimizer.no_sync():`, or leave overlap out"
            )
        gradients.restore_view(index)  # backpropagation may have put it elsewhere
        pending.discard(index)
        self.version = gradients.flat._version
        # torch.compile may trace this. It looks at local variables that it finds at a call such as the one
        # above, so none may hold the stand-in, or `p`, which has it.
        p = gradients.parameters[index]
        p.grad = self.stand_in_by_parameter[index] = gradients.grads[index].as_subclass(_InFlightGradient)
        group = len(self.background.futures)
        while group < len(self.pending) and not self.pending[group]:
            self._start(group)
            group += 1

    def average_group(self, group: int, steps: Sequence[StepSettings]) -> StepReport:
        """Aggregate the buckets of a group, which are full."""
        buckets = self.groups[group]
        flats = [self.aggregator.buckets[bucket].flat for bucket in buckets]
        return self.aggregator.average(self.aggregator.bucket_gradients(flats, steps, buckets))

    def _start(self, group: int) -> None:
        """Submit a group of buckets to the thread."""
        steps = [self.steps[bucket] for bucket in self.groups[group]]
        self.background.submit(partial(self.aggregate_group, self, group, steps))
