"""Feedback: what becomes of the gradients that were not delivered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Feedback(Protocol):
    def init(self, like: Tensor) -> Any:
        """The state for a bucket like this one."""

    def accumulate(self, grad: Tensor, state: Any) -> Tensor:
        """(n,) -> (n,): the gradient with what is owed to it. The result may be the state's own buffer."""

    def retain(self, delivered: Tensor, state: Any) -> None:
        """Keep what `accumulate` returned, less the entries at the indices `delivered`."""

    def residual(self, state: Any) -> Tensor | None:
        """What is owed at this moment, (n,); None where nothing is kept."""


@dataclass(frozen=True)
class Forget:
    """Nothing is kept: what was not sent is lost."""

    def init(self, like: Tensor) -> None:
        return None

    def accumulate(self, grad: Tensor, state: None) -> Tensor:
        return grad

    def retain(self, delivered: Tensor, state: None) -> None:
        return None

    def residual(self, state: None) -> None:
        return None


@dataclass(frozen=True)
class ErrorFeedback:
    """The residual in the gradient domain, as Shi et al. 2019 run it: acc = e + g; e <- acc, 0 where
    delivered.

    The learning rate is not inside: residuals are replayed at the rate of the step that delivers them.
    """

    def init(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def accumulate(self, grad: Tensor, state: Tensor) -> Tensor:
        return state.add_(grad)  # the residual's own buffer serves as acc: nothing of size n is allocated

    def retain(self, delivered: Tensor, state: Tensor) -> None:
        state.index_fill_(0, delivered, 0)

    def residual(self, state: Tensor) -> Tensor:
        return state
