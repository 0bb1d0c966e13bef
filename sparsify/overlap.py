"""Aggregation during backpropagation: bucket after bucket, in a thread and on a stream of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsify.aggregator import Aggregator, Report
from sparsify.method import Step


class Overlap:
    """Lets an aggregator start a bucket as soon as all of its gradients have been computed.

    Buckets are aggregated in their order, which is that in which backpropagation finishes, so that all
    workers do the same collectives in the same order. On a GPU their work goes to a stream of its own. One
    backward pass a step:

        overlap.begin(epoch, lr)
        loss.backward()
        report = overlap.finish()

    Args:
        aggregator: of several buckets; its communicator must work from another thread (processes do, virtual
            ranks don't).

    Raises:
        ValueError: the method needs the gradient of the whole model first, or there is only one bucket.
    """

    def __init__(self, aggregator: Aggregator) -> None:
        self.aggregator, buckets = aggregator, aggregator.gradients.buckets
        if aggregator.method.needs_whole_gradient:
            raise ValueError(
                "overlap=true begins before the norm of the whole gradient is known, which clip_norm needs; "
                "leave one of them out"
            )
        if len(buckets) < 2:
            raise ValueError(
                f"overlap=true with scope={aggregator.method.scope!r}: there is one bucket, and it is full "
                "when backpropagation is over; take scope=layer, or a bucket size in MB"
            )
        flat = aggregator.gradients.flat
        self.stream = torch.cuda.Stream(flat.device) if flat.is_cuda else None
        self.thread = ThreadPoolExecutor(1, "aggregation")
        self.waiting: list[set[int]] = []  # of each bucket, parameters whose gradients are yet to come
        self.futures: list[Future[Report]] = []  # of the buckets that were started
        self.step = Step(1.0)
        self.place = {name: at for at, bucket in enumerate(buckets) for name in bucket.names}
        self.hooks = [
            p.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, (name, p) in enumerate(aggregator.gradients.parameters)
            if name in self.place  # empty tensors lie in no bucket
        ]

    def begin(self, epoch: int = 0, lr: float = 1.0) -> None:
        """Before backward. Arguments as `Aggregator.aggregate`."""
        self.step = self.aggregator.begin(epoch, lr)
        self.waiting = [set() for _ in self.aggregator.gradients.buckets]
        for index, (name, _) in enumerate(self.aggregator.gradients.parameters):
            if name in self.place:
                self.waiting[self.place[name]].add(index)
        self.futures = []

    def finish(self) -> Report:
        """After backward: all gradients are averages as soon as the work queued on the device is done."""
        while len(self.futures) < len(self.waiting):  # parameters that were not used get no gradient
            for index in self.waiting[len(self.futures)]:
                self.aggregator.gradients.restore(index)
            self._start(len(self.futures))
        report = Report.total([future.result() for future in self.futures])
        self.waiting = []
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return report

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.thread.shutdown()

    def _arrived(self, index: int, parameter: Tensor) -> None:
        if not self.waiting:  # a backward pass that was not announced
            return
        gradients = self.aggregator.gradients
        gradients.restore(index)  # backpropagation may have put it elsewhere
        self.waiting[self.place[gradients.parameters[index][0]]].discard(index)
        while len(self.futures) < len(self.waiting) and not self.waiting[len(self.futures)]:
            self._start(len(self.futures))

    def _start(self, at: int) -> None:
        filled = None
        if self.stream is not None:
            filled = torch.cuda.current_stream(self.stream.device).record_event()
        self.futures.append(self.thread.submit(self._aggregate, at, self.step, filled))

    def _aggregate(self, at: int, step: Step, filled: Any) -> Report:
        if self.stream is None:
            return self.aggregator.aggregate_bucket(at, step)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(filled)
            return self.aggregator.aggregate_bucket(at, step)
