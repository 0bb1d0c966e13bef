"""Claims on parameters: who averages them, when several wrappers were made of the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

from torch.nn import Parameter

# id of a parameter -> its newest claim, which keeps the parameter alive, so that the id stays its own.
NEWEST: WeakValueDictionary[int, ParameterClaim] = WeakValueDictionary()


class ParameterClaim:
    """The claim of one wrapper on its parameters. It ends when another wrapper claims any of them.

    Attributes:
        is_superseded: another wrapper has claimed one of these parameters since.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = [*parameters]
        self.is_superseded = False
        for p in self.parameters:
            earlier = NEWEST.get(id(p))
            if earlier is not None and earlier is not self:
                earlier.is_superseded = True
            NEWEST[id(p)] = self

    def check(self) -> None:
        """Refuse to go on after another wrapper has claimed one of these parameters.

        Raises:
            ValueError: one has.
        """
        if self.is_superseded:
            raise ValueError(
                "these parameters were wrapped anew since; go on with what that returned, and give each "
                "optimiser parameters of its own"
            )
