"""Guards against gradients that something else averages too, which would then travel twice and once dense.

The guard also refuses wrappers that take the parameters away, so that nothing would be trained.
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

# Modules of this process that average gradients, see `_track_averaging_modules`.
AVERAGING_MODULES: WeakSet[nn.Module] = WeakSet()
EQUAL_STEPS = 20  # steps with equal gradients before the warning
FSDP1_NAME = "FullyShardedDataParallel"  # the class need not be imported
log = logging.getLogger(__name__)


def _record_if_averaging(parent: nn.Module, *_: Any) -> None:
    """Add a module to `AVERAGING_MODULES` if it averages gradients.

    As a hook on the registration of submodules this sees every wrapper when it gets its model, also the
    wrapper within torch's `replicate`.
    """
    if isinstance(parent, DistributedDataParallel) or type(parent).__name__ == FSDP1_NAME:
        AVERAGING_MODULES.add(parent)


@cache
def _track_averaging_modules() -> None:
    """Fill `AVERAGING_MODULES` with the wrappers that exist, and from now on with each that is made.

    Torch lists no existing modules, so the objects of the garbage collector are searched, once a process.
    """
    register_module_module_registration_hook(_record_if_averaging)
    for module in find_live_modules():
        _record_if_averaging(module)


def find_live_modules() -> list[nn.Module]:
    """Return all modules of this process, by a search of some 0.1 s."""
    candidates = gc.get_objects()
    # isinstance may run an object's own code. Some were made without `Module.__init__`.
    return [found for found in candidates if issubclass(type(found), nn.Module) and "_modules" in vars(found)]


class EqualGradientsMonitor:
    """A monitor that warns if all workers have equal gradients for many steps in a row.

    Gradients that something unknown to this library has averaged are equal to the bit.

    Args:
        warns: False: another worker does.
    """

    def __init__(self, warns: bool) -> None:
        self.warns = warns
        self.num_equal_steps = 0  # in a row
        self.last_step = -1

    def record(self, step: int, is_equal: bool) -> None:
        """Record whether all workers had equal gradients in a part of a step."""
        if not is_equal:
            self.num_equal_steps = 0
        elif step != self.last_step:
            self.num_equal_steps += 1
            if self.num_equal_steps == EQUAL_STEPS and self.warns:
                log.warning(
                    f"all workers had the same gradients, to the bit, in {EQUAL_STEPS} steps in a row; "
                    "either something averages them before this does (an all_reduce of your own, another "
                    "library), and they travel twice, or every worker trains on the same batches (give each "
                    "its own share, as DistributedSampler does)"
                )
        self.last_step = step


class AveragedGradientsGuard:
    """A guard that refuses gradients which a DistributedDataParallel has averaged already.

    The check costs no communication: DDP's Reducer records when each gradient arrived, and does so only in
    backward passes in which it averages (but for the first one of a static graph).

    Args:
        parameters: whose gradients the owner of this guard averages.
        allowed_ddp: a DistributedDataParallel that may average these gradients.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], allowed_ddp: DistributedDataParallel | None = None
    ) -> None:
        _track_averaging_modules()
        self.parameter_ids = set(map(id, parameters))
        # Modules that share no parameter, or may average.
        self.harmless: WeakSet[nn.Module] = WeakSet([] if allowed_ddp is None else [allowed_ddp])
        # When the Reducer of each rival last received each gradient.
        self.backward_stats: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()
        for rival in self._find_rivals():
            if isinstance(rival, DistributedDataParallel):
                self.backward_stats[rival] = rival.reducer.get_backward_stats()

    def check_not_averaged_this_step(self) -> None:
        """Refuse gradients that a rival has averaged since the last call.

        Call it once a step, after backward.

        Raises:
            ValueError: a rival averaged them.
        """
        for rival in self._find_rivals():
            if not isinstance(rival, DistributedDataParallel):
                raise ValueError(
                    f"{FSDP1_NAME} has sharded this model since, and sparsification needs the whole model on "
                    "every worker; train the model itself, without it"
                )
            stats = rival.reducer.get_backward_stats()
            if stats != (self.backward_stats.get(rival) or [0] * len(stats)):
                self.backward_stats[rival] = stats
                raise ValueError(
                    "a DistributedDataParallel averages these gradients too, so they travel twice, once "
                    "without sparsification: train the model itself (`ddp.module`; with torch's "
                    "replicate, Accelerate or a Trainer the one that they were given, unprepared), or, but "
                    "for local steps, take "
                    "sparsify.register(ddp, method, optimizer) with a plain optimizer"
                )

    def check_model_still_has_parameters(self, model: nn.Module) -> None:
        """Refuse a model that lacks a guarded parameter. Call it where no gradient has arrived.

        Raises:
            ValueError: a guarded parameter is no longer in the model.
        """
        if self.parameter_ids <= set(map(id, model.parameters())):
            return
        new_names = [name for name, p in model.named_parameters() if id(p) not in self.parameter_ids]
        example = f", such as {new_names[0]}" if new_names else ""
        raise ValueError(
            f"the model has other parameters than when it was wrapped{example}, and no gradient came for the "
            "old ones; load weights without assign=True, and add adapters, replace layers or quantise before "
            "you wrap it. One that fully_shard has sharded takes sparsify.shard"
        )

    def _find_rivals(self) -> list[nn.Module]:
        """Return the averaging modules that have any of the guarded parameters."""
        rivals = list[nn.Module]()
        for module in AVERAGING_MODULES - self.harmless:
            averaged = getattr(module, "_module_parameters", None)  # DDP's, without the ignored ones
            parameters = module.parameters() if averaged is None else averaged
            if self.parameter_ids.isdisjoint(map(id, parameters)):
                self.harmless.add(module)
            elif hasattr(module, "reducer") or not isinstance(module, DistributedDataParallel):
                rivals.append(module)
        return rivals
