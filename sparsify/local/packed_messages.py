"""The averaging of many tensors in few messages, each of which costs a round trip or more on a long link."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core.grouping import group_consecutive_indices
from sparsify.core.timer import PhaseTimer
from sparsify.kernels.group_kernel import split_like
from sparsify.method import Dense
from sparsify.types import StepSettings
from sparsify.wrappers.engine import Engine, StepReport

MAX_MESSAGE_BYTES = 2**24  # of tensors that share a message, which takes as much memory


@runtime_checkable
class PackingMethod(Protocol):
    """A method that can put its messages of several buckets into one."""

    def aggregate_in_one_message(
        self,
        grads: Sequence[Tensor],
        step: StepSettings,
        states: Sequence[Any],
        comm: Comm,
        timer: PhaseTimer,
    ) -> int:
        """Apply `Method.aggregate` to each bucket, with one message for all. Collective."""


def average_in_few_messages(engine: Engine, pieces: Sequence[Tensor], step: StepSettings) -> StepReport:
    """Average all of an engine's buckets in place. Collective.

    Args:
        pieces: tensors (m,) that hold the buckets one after the other.
    """
    method = engine.method
    num_buckets = len(engine.buckets)
    is_piece_a_bucket = len(set(engine.kinds)) == 1 and len(pieces) == num_buckets
    if not is_piece_a_bucket or num_buckets == 1 or not isinstance(method, Dense | PackingMethod):
        return engine.average(engine.bucket_gradients(pieces, [step] * num_buckets))
    reports = list[StepReport]()
    for numbers in group_consecutive_indices([piece.nbytes for piece in pieces], MAX_MESSAGE_BYTES):
        group = [pieces[number] for number in numbers]
        gradients = engine.bucket_gradients(group, [step] * len(numbers), numbers)
        if isinstance(method, PackingMethod):
            aggregate = partial(
                method.aggregate_in_one_message, group, step, gradients.states, engine.comm, engine.timer
            )
        else:
            aggregate = partial(_average_concatenated, method, group, step, engine)
        reports.append(engine.run_and_report(gradients, aggregate))
    return StepReport.total(reports)


def _average_concatenated(method: Dense, pieces: Sequence[Tensor], step: StepSettings, engine: Engine) -> int:
    """Average tensors as one, in place, and return how many elements were sent."""
    if len(pieces) == 1:
        return method.aggregate(pieces[0], step, None, engine.comm, engine.timer)
    flat = torch.cat([*pieces])
    num_sent = method.aggregate(flat, step, None, engine.comm, engine.timer)
    with engine.timer.phase("scatter"):
        torch._foreach_copy_([*pieces], split_like(flat, pieces))
    return num_sent
