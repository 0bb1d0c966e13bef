"""The tensors of a fragment in few messages: over a link with distance each one costs a way, or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.kernels.group_kernel import split_like
from sparsify.method import Dense
from sparsify.types import StepSettings
from sparsify.wrappers.engine import Engine, StepReport

MOST_BYTES = 2**24  # of tensors that travel together: what a message takes of memory besides


@runtime_checkable
class Packs(Protocol):
    """A method that can put what it sends of several buckets into one message."""

    def aggregate_packed(
        self,
        grads: Sequence[Tensor],
        step: StepSettings,
        states: Sequence[Any],
        comm: Comm,
        timer: PhaseTimer,
    ) -> int:
        """`Method.aggregate` of each bucket, with the same outcome. Collective."""


def whole(engine: Engine, pieces: Sequence[Tensor], step: StepSettings) -> StepReport:
    """Average all that an engine has, in place. Collective."""
    method, count = engine.method, len(engine.buckets)
    alike = len(set(engine.kinds)) == 1 and len(pieces) == count
    if not alike or count == 1 or not isinstance(method, Dense | Packs):
        return engine.average(engine.divide_gradients(pieces, [step] * count))
    reports = list[StepReport]()
    for ats in groups([piece.nbytes for piece in pieces]):
        own = [pieces[at] for at in ats]
        gradients = engine.divide_gradients(own, [step] * len(ats), ats)
        states = [gradient.state for gradient in gradients]
        if isinstance(method, Packs):
            act = partial(method.aggregate_packed, own, step, states, engine.comm, engine.timer)
        else:
            act = partial(_averaged, method, own, step, engine)
        reports.append(engine.report(gradients, act))
    return StepReport.total(reports)


def _averaged(method: Dense, pieces: Sequence[Tensor], step: StepSettings, engine: Engine) -> int:
    if len(pieces) == 1:
        return method.aggregate(pieces[0], step, None, engine.comm, engine.timer)
    together = torch.cat([*pieces])
    sent = method.aggregate(together, step, None, engine.comm, engine.timer)
    with engine.timer.phase("scatter"):
        torch._foreach_copy_([*pieces], split_like(together, pieces))
    return sent


def groups(nbytes: Sequence[int]) -> Iterator[list[int]]:
    """Places of tensors of so many bytes that travel together: up to `MOST_BYTES`, or one that is larger."""
    group, held = list[int](), 0
    for at, size in enumerate(nbytes):
        if group and held + size > MOST_BYTES:
            yield group
            group, held = [], 0
        group.append(at)
        held += size
    if group:
        yield group
