"""The step of several buckets at once: one selection, one message, one scatter.

`sparsify.method.Sparsifier.aggregate` is the step of one bucket. What a group selects, sends and keeps of
each bucket is the same, to the bit; it takes fewer passes, messages and launches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.exchange import Exchange
from sparsify.feedback import Feedback, require_all_sparse
from sparsify.kernels import GroupKernel
from sparsify.kernels.group_kernel import (
    ConsecutiveTensors,
    cut_at_common_borders,
    divide_into_stretches,
    return_single_or_add,
)
from sparsify.select import Selector
from sparsify.types import GroupSelection, SparseVector, StepSettings, num_selected


class GroupSupport(NamedTuple):
    """The operations that a method can do on several buckets at once."""

    one_search: bool = False  # search them in one pass; each may then be exchanged by itself
    one_message: bool = False  # send them in one message: what is sent and kept of each stays the same
    accepts_pieces: bool = False  # read a bucket's gradient from several tensors
    shared_k: bool = False  # choose the largest of all of them, each with a state of its own


@dataclass
class BucketGradients(ConsecutiveTensors):
    """The gradients of some buckets in one step, one after the other, with the buckets' states."""

    numbers: Sequence[int]  # of the buckets
    steps: Sequence[StepSettings]  # of each bucket
    states: Sequence[Any]  # the method's, of each bucket

    def subset(self, positions: Sequence[int]) -> BucketGradients:
        """Return the gradients of the buckets at these positions, ascending."""
        if len(positions) == len(self.sizes):
            return self
        return BucketGradients(
            [piece for position in positions for piece in self.pieces[position]],
            [self.sizes[position] for position in positions],
            [self.numbers[position] for position in positions],
            [self.steps[position] for position in positions],
            [self.states[position] for position in positions],
        )

    def split(self) -> list[BucketGradients]:
        """Return the gradient of each bucket by itself."""
        return [self.subset([position]) for position in range(len(self.sizes))]


class BucketGroup(NamedTuple):
    """Buckets that share one selection, one message and one scatter in a step."""

    gradients: BucketGradients
    kernel: GroupKernel  # of these buckets; or of one bucket that all of them make up

    @property
    def feedback_states(self) -> list[Any]:
        """The feedback's state of each bucket."""
        return [state.feedback for state in self.gradients.states]

    @property
    def kernel_ks(self) -> list[int]:
        """The number of elements to select of each bucket of the kernel."""
        return [num_selected(n, self.gradients.steps[0].step_density) for n in self.kernel.sizes]


class BucketGroupMixin:
    """Base of sparsifiers: their step of several buckets."""

    select: Selector
    feedback: Feedback
    exchange: Exchange
    average: bool

    @property
    @abstractmethod
    def group_support(self) -> GroupSupport:
        """The operations that this method can do on several buckets at once."""

    def aggregate_group(self, group: BucketGroup, comm: Comm, timer: PhaseTimer) -> int:
        """Replace the gradients by their average over the workers; return how many elements were sent."""
        selection = self.select_group(group, comm, timer).selection
        return self.exchange_and_average_group(selection, group, comm, timer)

    def select_group(self, group: BucketGroup, comm: Comm, timer: PhaseTimer) -> GroupSelection:
        """Accumulate, and return the elements that this worker sends of the group."""
        with timer.phase("select"):
            accs: Sequence[Tensor] = group.feedback_states
            selected = self.try_accumulate_and_select_group(group)
            if selected is None:
                accs, selected = self._accumulate_and_select(group, comm)
        steps = group.gradients.steps
        if any(step.selection_hook for step in steps):
            for step, acc, selection in zip(
                steps, accs, group.kernel.split_by_bucket(*selected), strict=True
            ):
                if step.selection_hook:
                    step.selection_hook(acc, selection)
        return selected

    def try_accumulate_and_select_group(
        self, group: BucketGroup, reset_grads_to: Sequence[Tensor] = ()
    ) -> GroupSelection | None:
        """Accumulate and select in one pass over memory; None where this selector or feedback can't.

        Args:
            reset_grads_to: see `Selector.try_accumulate_and_select_group`.
        """
        weight = self.feedback.residual_weight
        if weight is None:
            return None
        states = [state.select for state in group.gradients.states]
        return self.select.try_accumulate_and_select_group(
            group.feedback_states, group.gradients.tensors, group.kernel_ks, states, weight, reset_grads_to
        )

    def exchange_and_retain_group(
        self, selection: SparseVector, group: BucketGroup, comm: Comm, timer: PhaseTimer
    ) -> list[SparseVector]:
        """Exchange a selection and keep the rest; return the parts of the sum over the workers."""
        kernel = group.kernel
        states = [state.exchange for state in group.gradients.states]
        with timer.phase("exchange"):
            delivery = self.exchange.exchange_group(
                selection, kernel.num_elements, group.kernel_ks, comm, states
            )
        with timer.phase("select"):
            self.feedback.retain_undelivered_of_group(delivery, group.feedback_states, kernel)
        return require_all_sparse(delivery.sum_parts)

    def exchange_and_average_group(
        self, selection: SparseVector, group: BucketGroup, comm: Comm, timer: PhaseTimer
    ) -> int:
        """Exchange a selection, keep the rest, and write the average; return how many elements were sent."""
        sum_parts = self.exchange_and_retain_group(selection, group, comm, timer)
        with timer.phase("scatter"):
            # Half-precision gradients are summed in single precision.
            wide = [state.total.buffer("total") for state in group.gradients.states if state.total]
            scale = 1 / comm.size if self.average else 1.0
            group.kernel.add(wide or group.gradients.tensors, sum_parts, scale, clears=True)
            if wide:
                pairs = list(cut_at_common_borders(wide, group.gradients.tensors))
                torch._foreach_copy_([piece for _, piece in pairs], [summed for summed, _ in pairs])
        return selection.indices.numel()

    def _accumulate_and_select(
        self, group: BucketGroup, comm: Comm
    ) -> tuple[Sequence[Tensor], GroupSelection]:
        """Return the sums of residual and gradient, (n,) of each bucket, and the selection from them."""
        accs, addends = self.feedback.prepare_group_accumulation_terms(
            group.gradients, [step.lr for step in group.gradients.steps], group.feedback_states
        )
        if self.group_support.one_search:
            ks = group.kernel_ks
            return accs, GroupSelection(group.kernel.topk(accs, addends, ks), ks)
        selections = list[SparseVector]()
        addend_pieces = divide_into_stretches(addends, group.gradients.sizes)
        for state, acc, pieces, k in zip(
            group.gradients.states, accs, addend_pieces, group.kernel_ks, strict=True
        ):
            addend = return_single_or_add(acc, pieces)
            choice = self.select.accumulate_and_select(acc, addend, k, comm, state.select)
            selections.append(choice.gather_from(acc))
        counts = [selection.indices.numel() for selection in selections]
        return accs, GroupSelection(group.kernel.join_buckets(selections), counts)
