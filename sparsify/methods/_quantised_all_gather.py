"""What quantisers share as methods: everything is sent, in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from sparsify.bucket import check_scope
from sparsify.comm import Comm
from sparsify.feedback import Feedback, LearningRateFeedback
from sparsify.method import MethodDefaults, Step
from sparsify.timer import PhaseTimer
from sparsify.types import DENSE_AT_DENSITY_1, BucketContext, Delivery, Slice
from sparsify.workspace import Workspace


class Quantiser(Protocol):
    """A rule that writes a whole bucket in few bits."""

    def init(self, like: Tensor, context: BucketContext) -> Any:
        """The state for a bucket like this one."""

    def encode(self, acc: Tensor, state: Any) -> Tensor:
        """(n,) -> (bytes,) uint8, of a length that depends on n alone. `acc` is not to be written to."""

    def decode(self, message: Tensor, out: Tensor, state: Any) -> Tensor:
        """(bytes,) -> (n,), what `encode` wrote, into `out`."""

    def broken_laws(self) -> dict[str, str]: ...


class QuantisedState(NamedTuple):
    quantise: Any
    feedback: Any
    workspace: Workspace


@dataclass(frozen=True)
class QuantisedAllGather(MethodDefaults):
    """Send all of n in few bits each: an all-gather of messages, decoded and summed in rank order.

    Args:
        majority: the update is the sign of the sum, not the average.
    """

    quantise: Quantiser
    feedback: Feedback
    scope: str | float = "layer"
    majority: bool = False

    def __post_init__(self) -> None:
        check_scope(self.scope)

    def init(self, like: Tensor, context: BucketContext) -> QuantisedState:
        return QuantisedState(self.quantise.init(like, context), self.feedback.init(like), Workspace(like))

    def aggregate(
        self, grad: Tensor, step: Step, state: QuantisedState, comm: Comm, timer: PhaseTimer
    ) -> int:
        decoded = state.workspace.buffer("decoded")
        with timer.phase("select"):
            acc = self.feedback.accumulate(grad, step.lr, state.feedback)
            mine = self.quantise.encode(acc, state.quantise)
        with timer.phase("exchange"):
            total = state.workspace.buffer("total").zero_()
            for message in comm.all_gather(mine):
                total.add_(self.quantise.decode(message, decoded, state.quantise))
        with timer.phase("select"):
            if self.feedback.residual(state.feedback) is not None:
                delivered = Slice(0, self.quantise.decode(mine, decoded, state.quantise))
                self.feedback.retain(Delivery([], [delivered]), state.feedback)
        with timer.phase("scatter"):
            grad.copy_(total.sign_() if self.majority else total.div_(comm.size))
        return grad.numel()

    @property
    def needs_lr(self) -> bool:
        return isinstance(self.feedback, LearningRateFeedback)

    def residual(self, state: QuantisedState) -> Tensor | None:
        return self.feedback.residual(state.feedback)

    def broken_laws(self) -> dict[str, str]:
        rounded = {DENSE_AT_DENSITY_1: "every element is rounded to a few bits"}
        return rounded | self.quantise.broken_laws() | self.feedback.broken_laws()
