"""Which parameters a worker's backpropagation used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn


class Used:
    """Which parameters got a gradient since the last `clear`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters, self.those = parameters, set[Tensor]()
        for p in parameters:
            p.register_post_accumulate_grad_hook(
                partial(self.those.add)
            )  # one call, and none of Python's own

    @property
    def flags(self) -> list[bool]:
        """Of each parameter, did it get one?"""
        return [p in self.those for p in self.parameters]

    def take(self, at: int) -> bool:
        """Did a parameter get one? From now on it has not."""
        is_used = self.parameters[at] in self.those
        self.those.discard(self.parameters[at])
        return is_used

    def clear(self) -> None:
        """Forget what was used."""
        self.those.clear()
