"""Aggregation during backpropagation: bucket after bucket, in a thread and on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsify.method import StepSettings
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import StepReport, while_alive

MOST_BYTES, FEWEST = 25 * 2**20, 8  # of a message's gradients, as DDP's buckets; messages of a step, about


class BackgroundStream:
    """One thread and, on a GPU, one stream, which do their work in the order in which it is handed in.

    What fails ends all that was handed in behind it. A collective belongs to the thread's own process group:
    in a common one, those of two threads would meet.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, "aggregation")
        self.futures: list[Future[Any]] = []  # of what was handed in since `finish`

    def submit(self, work: Callable[[], Any]) -> None:
        """`work` follows all earlier work, and what the device was told so far."""
        told = None
        if self.stream is not None:
            told = torch.cuda.current_stream(self.stream.device).record_event()
        earlier = self.futures[-1] if self.futures else None
        self.futures.append(self.thread.submit(self._run, work, told, earlier))

    def finish(self) -> list[Any]:
        """Wait for all work and return what it returned; what the device is told next follows it.

        Raises:
            Exception: the first one that work raised, as it was.
        """
        futures, self.futures = self.futures, []
        found = [future.result() for future in futures]
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return found

    def _run(self, work: Callable[[], Any], told: Any, earlier: Future[Any] | None) -> Any:
        if earlier is not None:
            earlier.result()  # done, for there is one thread; or it failed
        with torch.no_grad():  # each thread has a mode of its own
            if self.stream is None:
                return work()
            with torch.cuda.stream(self.stream):
                self.stream.wait_event(told)
                return work()


CHANGED = (
    "between backward and step, when they were on their way already; change (or clip) their average, after "
    "optimizer.aggregate(), or leave overlap out"
)


class InFlightGradient(Tensor):
    """Stands in a gradient's place between backward and step, and refuses whatever it is asked: writing to
    `p.grad.data` goes past autograd's counting. Autograd itself does not ask.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError(f"gradients were looked at or changed {CHANGED}")


class BackwardOverlap:
    """Lets an aggregator start a bucket as soon as all of its gradients have been computed.

    Buckets are aggregated in their order, which is that in which backpropagation finishes, so that all
    workers do the same collectives in the same order. Every parameter gets one gradient a step:

        overlap.begin(epoch, lr)
        loss.backward()
        report = overlap.finish()

    Args:
        aggregator: of several buckets; its communicator must work from another thread (processes do, virtual
            ranks don't), and nothing else may use it between `begin` and `finish`.
        aggregate: does some buckets, given their numbers, in the thread; by default the aggregator does.
        unannounced: called when a gradient comes in a step that was not begun; it may begin it.

    Raises:
        ValueError: the method needs the gradient of the whole model first, or there is only one bucket.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        aggregate: Callable[[Sequence[int], Sequence[StepSettings]], StepReport] | None = None,
        unannounced: Callable[[], None] = lambda: None,
    ) -> None:
        self.aggregator, gradients = aggregator, aggregator.gradients
        if aggregator.method.needs_whole_gradient:
            raise ValueError(
                "overlap=true begins before the norm of the whole gradient is known, which clip_norm needs; "
                "leave one of them out"
            )
        if len(gradients.buckets) < 2:
            raise ValueError(
                f"overlap=true with scope={aggregator.method.scope!r}: there is one bucket, and it is full "
                "when backpropagation is over; take scope=layer, or a bucket size in MB"
            )
        self.aggregate, self.unannounced = aggregate or self.average, unannounced
        self.background = BackgroundStream(gradients.flat.device)
        # What is aggregated does not count as changed: autograd counts changes of an alias by themselves.
        gradients.buckets[:] = [bucket._replace(flat=bucket.flat.data) for bucket in gradients.buckets]
        index_of = {name: index for index, (name, _) in enumerate(gradients.parameters)}
        # Buckets that are sent as soon as all of them are full.
        self.groups = group_buckets_by_bytes(
            [bucket.flat.nbytes for bucket in gradients.buckets], aggregator.sends_one_message
        )
        # Of each group the indices of its parameters, and the inverse; empty tensors lie in no bucket.
        self.inside = [
            [index_of[name] for at in group for name in gradients.buckets[at].names] for group in self.groups
        ]
        self.places = {index: at for at, inside in enumerate(self.inside) for index in inside}
        self.waiting: list[set[int]] = []  # of each group, parameters whose gradients are yet to come
        self.steps: list[StepSettings] = []  # of each bucket
        self.held = dict[int, Tensor]()  # by the parameter's index, what stands in its gradient's place
        self.changes = 0  # of the gradients, as autograd counts them, when the last one came
        arriving = ((gradients.parameters[at][1], while_alive(self.arrived, at)) for at in self.places)
        self.hooks = [p.register_post_accumulate_grad_hook(hook) for p, hook in arriving]

    @property
    def is_begun(self) -> bool:
        """True between `begin` and `finish`."""
        return bool(self.waiting)

    def begin(self, epoch: int = 0, lr: float | Sequence[float] = 1.0) -> None:
        """Begin a step, before its first gradient. Arguments as `Aggregator.aggregate`."""
        self.steps = self.aggregator.begin(epoch, lr)
        self.waiting = [set(inside) for inside in self.inside]
        self.background.futures = []  # of a step that ended in an error
        self.changes = self.aggregator.gradients.flat._version

    def finish(self, drops: bool = False) -> StepReport:
        """End a step, after backward: all gradients are averages as soon as the work queued on the device is
        done.

        Args:
            drops: what is not on its way yet counts as zero, for backward has failed.

        Raises:
            ValueError: gradients were changed since backward; besides whatever aggregating them raised.
        """
        gradients = self.aggregator.gradients
        waiting, self.waiting = self.waiting, []
        is_changed = gradients.flat._version != self.changes
        for index, stand_in in self.held.items():
            p = gradients.parameters[index][1]
            is_changed |= p.grad is not stand_in
            if drops or p.grad is stand_in:
                p.grad = gradients.grads[index]
        self.held = {}
        if is_changed and not drops:
            raise ValueError(f"gradients were changed {CHANGED}")
        for at in range(len(self.background.futures), len(waiting)):
            for index in waiting[at]:  # parameters that were not used get no gradient
                gradients.restore(index)
            if drops:
                for bucket in self.groups[at]:
                    gradients.buckets[bucket].flat.zero_()
            self._start(at)
        return StepReport.total(self.background.finish())

    def close(self) -> None:
        """End the thread, and take the hooks away."""
        for hook in self.hooks:
            hook.remove()
        self.background.thread.shutdown()

    def arrived(self, index: int, _: Tensor) -> None:
        """A parameter has its gradient."""
        if not self.is_begun:
            self.unannounced()
        if not self.is_begun:
            return
        gradients, waiting = self.aggregator.gradients, self.waiting[self.places[index]]
        if index not in waiting:
            raise ValueError(
                f"a second gradient of {gradients.parameters[index][0]} came before the step, when the first "
                "was on its way already; run all backward passes of a step but the last within "
                "`with optimizer.no_sync():`, or leave overlap out"
            )
        gradients.restore(index)  # backpropagation may have put it elsewhere
        waiting.discard(index)
        self.changes = gradients.flat._version
        p = gradients.parameters[index][1]
        p.grad = self.held[index] = gradients.grads[index].as_subclass(InFlightGradient)
        while (at := len(self.background.futures)) < len(self.waiting) and not self.waiting[at]:
            self._start(at)

    def average(self, group: Sequence[int], steps: Sequence[StepSettings]) -> StepReport:
        """Aggregate buckets that are full."""
        buckets = self.aggregator.gradients.buckets
        flats = [buckets[at].flat for at in group]
        return self.aggregator.average(self.aggregator.gradients_of(flats, steps, group))

    def _start(self, at: int) -> None:
        group = self.groups[at]
        self.background.submit(partial(self.aggregate, group, [self.steps[bucket] for bucket in group]))


def group_buckets_by_bytes(nbytes: Sequence[int], joins: bool) -> list[list[int]]:
    """Numbers of the buckets, of so many bytes each, that travel together while backpropagation goes on: a
    few messages a step, so that there is something to overlap.
    """
    most = min(MOST_BYTES, sum(nbytes) / FEWEST) if joins else 0
    groups, size = list[list[int]](), 0
    for at, own in enumerate(nbytes):
        if not groups or size + own > most:
            groups.append([])
            size = 0
        groups[-1].append(at)
        size += own
    return groups
