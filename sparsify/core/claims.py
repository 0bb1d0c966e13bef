"""Claims on parameters, of which the newest counts where several wrappers were made of the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal
from weakref import WeakValueDictionary

from torch.nn import Parameter

ClaimKind = Literal["gradients", "average"]  # the memory of gradients; the averaging of gradients or drift
# By what is claimed and the id of a parameter; the claim keeps the parameter, and so its id.
NEWEST_CLAIMS: WeakValueDictionary[tuple[ClaimKind, int], SupersedableClaim] = WeakValueDictionary()


class SupersedableClaim:
    """The claim of one wrapper on its parameters.

    It ends when another wrapper makes a claim of the same kind on any of them.

    Attributes:
        is_superseded: another wrapper has claimed one of these parameters since.
    """

    def __init__(self, kind: ClaimKind, parameters: Iterable[Parameter]) -> None:
        self.parameters = [*parameters]
        self.is_superseded = False
        for p in self.parameters:
            earlier = NEWEST_CLAIMS.get((kind, id(p)))
            if earlier is not None and earlier is not self:
                earlier.is_superseded = True
            NEWEST_CLAIMS[kind, id(p)] = self

    def check_not_superseded(self) -> None:
        """Refuse to go on after another wrapper has claimed one of these parameters.

        Raises:
            ValueError: another wrapper has.
        """
        if self.is_superseded:
            raise ValueError(
                "these parameters were wrapped anew since; go on with what that returned, and give each "
                "optimizer parameters of its own"
            )
