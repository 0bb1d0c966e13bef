"""Whether others average the same gradients, which would travel twice, and once of it dense; or take the
parameters away, so that nothing would be trained.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

WRAPPERS: WeakSet[nn.Module] = WeakSet()  # of models, that average: all of this process, see `watch`
EQUAL_STEPS = 20
log = logging.getLogger(__name__)
SHARDING = "FullyShardedDataParallel"  # which need not be imported


def note(parent: nn.Module, *_: Any) -> None:
    """A module has got a part: every wrapper gets its model so, also that within torch's `replicate`."""
    if isinstance(parent, DistributedDataParallel) or type(parent).__name__ == SHARDING:
        WRAPPERS.add(parent)


@cache
def watch() -> None:
    """Know all that are there, and all that will be made. Nothing of torch lists them."""
    register_module_module_registration_hook(note)
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module):  # isinstance may run code of the thing's
            note(thing)


class EqualGradients:
    """Warns if all workers have the same gradients for long. Where they are averaged already, and by whom
    nobody knows here, they are the same to the bit.

    Args:
        warns: False: another worker does.
    """

    def __init__(self, warns: bool) -> None:
        self.warns = warns
        self.num_steps = 0  # in a row
        self.last_step = -1

    def look(self, step: int, is_equal: bool) -> None:
        """Note that all workers have the same gradients in a look at some of a step, or not."""
        if not is_equal:
            self.num_steps = 0
        elif step != self.last_step:
            self.num_steps += 1
            if self.num_steps == EQUAL_STEPS and self.warns:
                log.warning(
                    f"all workers had the same gradients, to the bit, in {EQUAL_STEPS} steps in a row; "
                    "either something averages them before this does (an all_reduce of your own, another "
                    "library), and they travel twice, or every worker trains on the same batches (give each "
                    "its own share, as DistributedSampler does)"
                )
        self.last_step = step


class OnlyAverage:
    """Refuses gradients that a DistributedDataParallel has averaged, by way of which the model was called.

    That costs no communication: its Reducer writes down when each gradient came to it, and does so in those
    backward passes only in which it averages (but for the first one of a static graph).

    Args:
        besides: one that may average these gradients.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], besides: DistributedDataParallel | None = None
    ) -> None:
        watch()
        self.mine = set(map(id, parameters))
        self.others: WeakSet[nn.Module] = WeakSet([besides] if besides is not None else [])  # no rivals
        # Of each rival, when gradients came to it last.
        self.came: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()
        for rival in self._rivals():
            if isinstance(rival, DistributedDataParallel):
                self.came[rival] = rival.reducer.get_backward_stats()

    def check(self) -> None:
        """To be called once in each step, when gradients have come.

        Raises:
            ValueError: another one averaged them since the last call.
        """
        for rival in self._rivals():
            if not isinstance(rival, DistributedDataParallel):
                raise ValueError(
                    f"{SHARDING} has sharded this model since, and sparsification needs the whole model on "
                    "every worker; train the model itself, without it"
                )
            before, self.came[rival] = self.came.get(rival), rival.reducer.get_backward_stats()
            if self.came[rival] != (before or [0] * len(self.came[rival])):
                raise ValueError(
                    "a DistributedDataParallel averages these gradients too, so they travel twice, once "
                    "without sparsification: train the model itself (`ddp.module`; with torch's "
                    "replicate, Accelerate or a Trainer the one that they were given, unprepared), or, but "
                    "for local steps, take "
                    "sparsify.register(ddp, method, optimizer) with a plain optimizer"
                )

    def check_there(self, model: nn.Module) -> None:
        """To be called where no gradient has come.

        Raises:
            ValueError: the model has others in the place of these parameters.
        """
        names = [name for name, p in model.named_parameters() if id(p) not in self.mine]
        if len(self.mine) > len(set(map(id, model.parameters())) & self.mine):
            what = f", such as {names[0]}" if names else ""
            raise ValueError(
                f"no gradient came, for the model has other parameters than when it was wrapped{what}; "
                "add adapters, or quantise, before you wrap it. A model that fully_shard has sharded takes "
                "sparsify.shard: here each worker needs the whole model"
            )

    def _rivals(self) -> list[nn.Module]:
        """Those that have any of these parameters."""
        for other in WRAPPERS - self.others:
            of_ddp = getattr(other, "_module_parameters", None)  # without those that it is told to ignore
            if self.mine.isdisjoint(map(id, other.parameters() if of_ddp is None else of_ddp)):
                self.others.add(other)
        return [
            other
            for other in WRAPPERS - self.others
            if hasattr(other, "reducer") or not isinstance(other, DistributedDataParallel)
        ]
