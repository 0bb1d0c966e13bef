"""The parameters that a worker's backpropagation used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn


class UsedParameters:
    """The set of parameters that got a gradient since the last `clear`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.used = set[Tensor]()  # since the last `clear`
        for p in parameters:
            # A partial is one call, and none of Python's own.
            p.register_post_accumulate_grad_hook(partial(self.used.add))

    @property
    def flags(self) -> list[bool]:
        """Flags that say of each parameter whether it got a gradient."""
        return [p in self.used for p in self.parameters]

    def pop_flag(self, index: int) -> bool:
        """Return whether a parameter got a gradient, and forget that it did."""
        is_used = self.parameters[index] in self.used
        self.used.discard(self.parameters[index])
        return is_used

    def clear(self) -> None:
        """Forget all parameters that were used."""
        self.used.clear()
