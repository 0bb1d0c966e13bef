"""The step of several buckets at once: one selection, one message, one scatter.

`sparsify.method.Sparsifier.aggregate` is the step of one bucket. What a group selects, sends and keeps of
each bucket is the same, to the bit; it takes fewer passes, messages and launches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.exchange import Exchange
from sparsify.feedback import Feedback, as_sparse_vectors
from sparsify.kernels import GroupKernel
from sparsify.kernels.group_kernel import pair_up, split_like
from sparsify.select import Selector
from sparsify.types import SparseVector, StepSettings, num_selected


class GroupSupport(NamedTuple):
    """What a method can do with several buckets at once."""

    one_search: bool = False  # search them in one pass; each may then be exchanged by itself
    one_message: bool = False  # send them in one message: what is sent and kept of each stays the same
    pieces: bool = False  # read a bucket's gradient from several tensors
    shared_k: bool = False  # choose the largest of all of them, each with a state of its own


class BucketGradient(NamedTuple):
    """The gradient of one bucket in one step, with the bucket's state."""

    number: int  # of the bucket
    size: int  # its elements
    pieces: Sequence[Tensor]  # (m,) each: the gradient, one piece after the other
    step: StepSettings
    state: Any  # the method's, of this bucket


class BucketGroup(NamedTuple):
    """Buckets that share one selection, one message and one scatter in a step."""

    buckets: Sequence[BucketGradient]
    kernel: GroupKernel  # of these buckets; or of one bucket that all of them make up

    @property
    def pieces(self) -> list[Tensor]:
        """The pieces of all gradients, bucket after bucket."""
        return [piece for bucket in self.buckets for piece in bucket.pieces]

    @property
    def feedback_states(self) -> list[Any]:
        """The feedback's state of each bucket."""
        return [bucket.state.feedback for bucket in self.buckets]

    @property
    def ks(self) -> list[int]:
        """The number of elements to select of each bucket of the kernel."""
        return [num_selected(n, self.buckets[0].step.step_density) for n in self.kernel.sizes]


class GroupForm:
    """Base of sparsifiers: their step of several buckets."""

    select: Selector
    feedback: Feedback
    exchange: Exchange
    average: bool

    @property
    @abstractmethod
    def group_support(self) -> GroupSupport:
        """What this method can do with several buckets at once."""

    def aggregate_group(self, group: BucketGroup, comm: Comm, timer: PhaseTimer) -> int:
        """Replace the gradients by their average over the workers; return how many elements were sent."""
        selection, _ = self.select_group(group, comm, timer)
        return self.deliver_group(selection, group, comm, timer)

    def select_group(
        self, group: BucketGroup, comm: Comm, timer: PhaseTimer
    ) -> tuple[SparseVector, list[int]]:
        """Return what this worker sends of the group, and how many elements that is of each bucket."""
        with timer.phase("select"):
            accs: Sequence[Tensor] = group.feedback_states
            found = self.search_group(group)
            if found is None:
                accs, found = self._accumulate_and_select(group, comm)
            selection, ks = found
        if any(bucket.step.selection_hook for bucket in group.buckets):
            for bucket, acc, own in zip(group.buckets, accs, group.kernel.split(selection, ks), strict=True):
                if bucket.step.selection_hook:
                    bucket.step.selection_hook(acc, own)
        return selection, ks

    def search_group(
        self, group: BucketGroup, anchors: Sequence[Tensor] = ()
    ) -> tuple[SparseVector, list[int]] | None:
        """Accumulate and select in one pass over memory; None where this selector or feedback can't.

        Args:
            anchors: see `Selector.search_group`.
        """
        weight = self.feedback.residual_weight
        if weight is None:
            return None
        states = [bucket.state.select for bucket in group.buckets]
        return self.select.search_group(
            group.feedback_states, group.pieces, group.ks, states, weight, anchors
        )

    def exchange_group(
        self, selection: SparseVector, group: BucketGroup, comm: Comm, timer: PhaseTimer
    ) -> list[SparseVector]:
        """Exchange a selection and keep the rest; return the sum over the workers."""
        kernel = group.kernel
        states = [bucket.state.exchange for bucket in group.buckets]
        with timer.phase("exchange"):
            delivery = self.exchange.exchange_group(selection, kernel.num_elements, group.ks, comm, states)
        with timer.phase("select"):
            self.feedback.retain_group(delivery, group.feedback_states, kernel)
        return as_sparse_vectors(delivery.total)

    def deliver_group(
        self, selection: SparseVector, group: BucketGroup, comm: Comm, timer: PhaseTimer
    ) -> int:
        """Exchange a selection, keep the rest, and write the average; return how many elements were sent."""
        total = self.exchange_group(selection, group, comm, timer)
        with timer.phase("scatter"):
            # Half-precision gradients are summed in single precision.
            wide = [bucket.state.total.buffer("total") for bucket in group.buckets if bucket.state.total]
            scale = 1 / comm.size if self.average else 1.0
            group.kernel.add(wide or group.pieces, total, scale, clears=True)
            if wide:
                pairs = list(pair_up(wide, group.pieces))
                torch._foreach_copy_([piece for _, piece in pairs], [summed for summed, _ in pairs])
        return selection.indices.numel()

    def _accumulate_and_select(
        self, group: BucketGroup, comm: Comm
    ) -> tuple[Sequence[Tensor], tuple[SparseVector, list[int]]]:
        """Return what was selected from, (n,) of each bucket, and what `select_group` returns."""
        accs, addends = self.feedback.prepare_group_accumulation(
            [bucket.pieces for bucket in group.buckets],
            [bucket.step.lr for bucket in group.buckets],
            group.feedback_states,
        )
        if self.group_support.one_search:
            pieces = [piece for addend in addends for piece in addend]
            return accs, (group.kernel.topk(accs, pieces, group.ks), group.ks)
        selections = list[SparseVector]()
        for bucket, acc, addend, k in zip(group.buckets, accs, addends, group.ks, strict=True):
            if len(addend) > 1:
                torch._foreach_add_(split_like(acc, addend), list(addend))
            last = addend[0] if len(addend) == 1 else None
            choice = self.select.accumulate_and_select(acc, last, k, comm, bucket.state.select)
            selections.append(choice.gather_from(acc))
        ks = [selection.indices.numel() for selection in selections]
        return accs, (group.kernel.join(selections), ks)
