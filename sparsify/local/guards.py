"""Guards of local steps: parameters that somebody else changes, and steps that are not local."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Parameter

from sparsify.comm import Comm, CountingComm
from sparsify.comm.torch import TorchComm
from sparsify.core.bucket import local_part

Named = Sequence[tuple[str, Parameter]]
# Modules whose forward pass writes to their own weights, as a part of training.
WRITES_IN_FORWARD = (nn.Embedding, nn.EmbeddingBag)
OWN_HOOKS = 1  # of the library, on each step: see `OwnSteps`


class Snapshot(NamedTuple):
    """A parameter as its wrapper left it."""

    tensor: Tensor  # this worker's part of it, in its own memory
    versions: tuple[int, int]  # of the parameter and of that part: torch counts in-place changes


class ParameterGuard:
    """Guard of parameters that only the optimizer's own step, and its wrapper, may change.

    Between two exchanges a worker's parameters are the anchor and the steps since. What somebody else writes
    into them would pass for steps, and the next exchange would undo most of it. So loading is noticed by
    hooks of `load_state_dict`, and what is written in place by torch's version counters.

    Args:
        model: whose parameters these are.
        trained: with their names.
    """

    def __init__(self, model: nn.Module, trained: Named) -> None:
        writers = [module for module in model.modules() if isinstance(module, WRITES_IN_FORWARD)]
        written = {id(module.weight) for module in writers if module.max_norm is not None}
        self.trained = [(name, p) for name, p in trained if id(p) not in written]
        self._snapshots = dict[int, Snapshot]()
        self._values_before = dict[int, list[Tensor] | None]()  # while modules load, by module
        self._replaced = list[str]()  # names of modules that were given other parameters
        known = {id(p) for _, p in self.trained}
        for name, module in model.named_modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in known]
            if own and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks of ours
                begin = partial(ParameterGuard._begin_loading, own=own)
                end = partial(ParameterGuard._end_loading, name=name, own=own)
                module.register_load_state_dict_pre_hook(ModuleHook(self, begin))
                module.register_load_state_dict_post_hook(ModuleHook(self, end))
        self.remember()

    def remember(self) -> None:
        """Take the parameters as they are now for the wrapper's own."""
        self._replaced = []
        self._snapshots = {id(p): snapshot_of(p) for _, p in self.trained}

    def find_changed(self) -> list[str]:
        """Return the names of the parameters, or of the modules, that somebody else changed since `remember`."""
        return [name for name, p in self.trained if not self._is_as_left(p)] + self._replaced

    def check(self, anchors: Callable[[], Mapping[str, tuple[Tensor, Tensor]]]) -> None:
        """Refuse parameters that somebody else has changed since `remember`, unless to the anchor's values.

        Args:
            anchors: returns each parameter as it is now, and its anchor, by name; may refuse them itself.

        Raises:
            ValueError: names the first one.
        """
        changed = self.find_changed()
        if not changed:
            return
        pairs = anchors()
        if not all(name in pairs and torch.equal(*pairs[name]) for name in changed):
            raise ValueError(
                f"{changed[0]} was loaded or written to after the model was wrapped, and the anchor, to which "
                "the next exchange returns, is still the old one. Load weights before sparsify.distribute or "
                "sparsify.shard, or load this optimiser's saved state after them; a change that belongs to "
                "each step of a worker, such as clipping its weights, goes into a hook: "
                "optimiser.register_step_post_hook(...)"
            )
        self.remember()

    def _is_as_left(self, p: Parameter) -> bool:
        """Has nobody changed a parameter? One that was only moved to other memory is as it was."""
        before = self._snapshots[id(p)]
        now = snapshot_of(p)
        if now.versions != before.versions:
            return False
        is_same_memory = now.tensor.data_ptr() == before.tensor.data_ptr()
        is_same_kind = now.tensor.shape == before.tensor.shape and now.tensor.dtype == before.tensor.dtype
        return is_same_kind and (is_same_memory or torch.equal(now.tensor, before.tensor))

    def _begin_loading(self, module: nn.Module, *_: Any, own: Sequence[Parameter]) -> None:
        is_clean = all(self._is_as_left(p) for p in own)
        self._values_before[id(module)] = [local_part(p).clone() for p in own] if is_clean else None

    def _end_loading(self, module: nn.Module, *_: Any, name: str, own: Sequence[Parameter]) -> None:
        before = self._values_before.pop(id(module), None)
        now = {id(p) for p in module.parameters(recurse=False)}
        if not now.issuperset(map(id, own)):  # load_state_dict(..., assign=True)
            self._replaced.append(name or "the model")
        elif before is not None and all(map(torch.equal, map(local_part, own), before)):
            self._snapshots |= {id(p): snapshot_of(p) for p in own}


class ModuleHook:
    """A module's hook that keeps nobody alive. Copies of it, in a copied or saved model, do nothing."""

    def __init__(self, guard: ParameterGuard, act: Callable[..., None] | None) -> None:
        self.guard: weakref.ref[ParameterGuard] | None = weakref.ref(guard)
        self.act = act

    def __call__(self, module: nn.Module, *loading: Any) -> None:
        guard = self.guard() if self.guard else None
        if guard is not None and self.act is not None:
            self.act(guard, module, *loading)

    def __getstate__(self) -> dict[str, Any]:
        return {"guard": None, "act": None}


def snapshot_of(p: Parameter) -> Snapshot:
    """Return a parameter as it is now, without a copy."""
    part = local_part(p)
    return Snapshot(part, (p._version, part._version))


class LocalityGuard:
    """Guard of steps that must be local: refuses inner optimizers that communicate with other replicas.

    Process groups count their collectives, so it costs no message. Hooks and closures of the user's run
    within a step, too, and may communicate: with any of them nothing is refused.

    Args:
        comm: of the workers that must not meet within a step. None: a thread uses it meanwhile.
    """

    def __init__(self, optimiser: torch.optim.Optimizer, comm: Comm | None) -> None:
        self.optimiser = optimiser
        self.groups = list[Any]()  # process groups; torch does not declare what is asked of them
        inner = comm.comm if isinstance(comm, CountingComm) else comm
        if isinstance(inner, TorchComm):
            candidates = [inner.group, dist.group.WORLD]
            self.groups = [group for group in candidates if group is not None and counts_collectives(group)]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch a step of the inner optimizer.

        Raises:
            ValueError: it communicated.
        """
        hooks = [*self.optimiser._optimizer_step_pre_hooks, *self.optimiser._optimizer_step_post_hooks]
        before = self._num_collectives()
        yield
        if len(hooks) == OWN_HOOKS and self._num_collectives() != before:
            raise ValueError(
                f"{type(self.optimiser).__name__} communicates with other workers within its step, so steps "
                "are not local, and it would take their parameters or gradients for its own; take an "
                "optimiser without communication, such as the one that it wraps, or a method of every step"
            )

    def _num_collectives(self) -> list[int]:
        return [group._get_sequence_number_for_group() for group in self.groups]


def counts_collectives(group: Any) -> bool:
    """Does the backend of a group count its collectives? MPI's does not."""
    try:
        group._get_sequence_number_for_group()
    except RuntimeError:
        return False
    return True


def check_local(optimiser: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of which it is known that it communicates within its step.

    Raises:
        ValueError: it does.
    """
    if isinstance(optimiser, ZeroRedundancyOptimizer):
        raise ValueError(
            "ZeroRedundancyOptimizer shares the parameters out among the workers and sends them within its "
            "step, so steps would not be local; hand over the optimiser that it wraps, made of all "
            "parameters, or take a method of every step"
        )
