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

    Args:
        steps_locally: each worker has values of its own.

    Attributes:
        is_superseded: another wrapper has claimed one of these parameters since.
    """

    def __init__(self, kind: ClaimKind, parameters: Iterable[Parameter], steps_locally: bool = False) -> None:
        self.kind = kind
        self.parameters = [*parameters]
        self.steps_locally = steps_locally
        self.is_superseded = False
        for p in self.parameters:
            earlier = NEWEST_CLAIMS.get((kind, id(p)))
            if earlier is not None and earlier is not self:
                earlier.is_superseded = True
            NEWEST_CLAIMS[kind, id(p)] = self

    def is_newest_of(self, p: Parameter) -> bool:
        """Return True unless another wrapper has claimed a parameter since."""
        return NEWEST_CLAIMS.get((self.kind, id(p))) is self

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


def has_own_values(p: Parameter) -> bool:
    """Return True if each worker has values of its own of a parameter, which a wrapper steps locally."""
    claim = NEWEST_CLAIMS.get(("average", id(p)))
    return claim is not None and claim.steps_locally
