"""Parameters loaded into a model after its anchor was taken, which the next exchange would undo."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class LoadedAnew:
    """Tells whether `load_state_dict`, of the model or of a part of it, changed these parameters.

    Attributes:
        changed: it did, since this was made or set to False.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.changed = False
        self._before = dict[int, list[Tensor]]()
        known = set(map(id, parameters))
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in known]
            if own:
                module.register_load_state_dict_pre_hook(_Told(self, partial(LoadedAnew._begin, own=own)))
                module.register_load_state_dict_post_hook(_Told(self, partial(LoadedAnew._end, own=own)))

    def check(self) -> None:
        """Refuse to go on with a model whose parameters are others than its anchor knows.

        Raises:
            ValueError: they were changed.
        """
        if self.changed:
            raise ValueError(
                "other parameters were loaded into the model after it was wrapped, and the anchor, to which "
                "the next exchange returns, is still the old one; load them before sparsify.distribute, or "
                "this optimiser's saved state after them"
            )

    def _begin(self, own: Sequence[nn.Parameter]) -> None:
        self._before[id(own[0])] = [p.detach().clone() for p in own]

    def _end(self, own: Sequence[nn.Parameter]) -> None:
        before = self._before.pop(id(own[0]), [])
        self.changed |= any(not torch.equal(p, was) for p, was in zip(own, before, strict=False))


class _Told:
    """A module's hook. It keeps nobody alive; copies of it, in a copied or saved model, do nothing."""

    def __init__(self, watch: LoadedAnew, tell: Any) -> None:
        self.watch: weakref.ref[LoadedAnew] | None = weakref.ref(watch)
        self.tell = tell

    def __call__(self, *loading: Any) -> None:
        watch = self.watch() if self.watch else None
        if watch is not None:
            self.tell(watch)

    def __getstate__(self) -> dict[str, Any]:
        return {"watch": None, "tell": None}
