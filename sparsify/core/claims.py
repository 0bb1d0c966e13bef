"""Claims on parameters: whose they are, when several wrappers were made of the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal
from weakref import WeakValueDictionary

from torch.nn import Parameter

Claimed = Literal["gradients", "average"]  # the memory of gradients; what is averaged, gradients or drift
# What is claimed and the id of a parameter -> the newest claim, which keeps the parameter, and so its id.
NEWEST: WeakValueDictionary[tuple[Claimed, int], ParameterClaim] = WeakValueDictionary()


class ParameterClaim:
    """The claim of one wrapper on its parameters. It ends when another one claims the same of any of them.

    Attributes:
        is_superseded: another wrapper has claimed one of these parameters since.
    """

    def __init__(self, claimed: Claimed, parameters: Iterable[Parameter]) -> None:
        self.parameters = [*parameters]
        self.is_superseded = False
        for p in self.parameters:
            earlier = NEWEST.get((claimed, id(p)))
            if earlier is not None and earlier is not self:
                earlier.is_superseded = True
            NEWEST[claimed, id(p)] = self

    def check(self) -> None:
        """Refuse to go on after another wrapper has claimed one of these parameters.

        Raises:
            ValueError: one has.
        """
        if self.is_superseded:
            raise ValueError(
                "these parameters were wrapped anew since; go on with what that returned, and give each "
                "optimizer parameters of its own"
            )
