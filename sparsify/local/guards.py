"""Guards of local steps: parameters that somebody else changes, and steps that are not local."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Parameter

from sparsify.comm import Comm, CountingComm
from sparsify.comm.torch import TorchComm
from sparsify.core import host_sync
from sparsify.core.bucket import local_shard
from sparsify.core.gradients import flatten_dense

Named = Sequence[tuple[str, Parameter]]
# Modules whose forward pass writes to their own weights, as a part of training.
WRITES_IN_FORWARD = (nn.Embedding, nn.EmbeddingBag)
NUM_LIBRARY_HOOKS = 1  # of the library, on each step: see `ForeignStepGuard`
MOST_SAMPLES = 64  # elements of each parameter that are compared
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class ParameterGuard:
    """Guard of parameters that only the optimizer's own step, and its wrapper, may change.

    Between two exchanges a worker's parameters are the anchor and the steps since. What somebody else writes
    into them (`load_state_dict`, `torch.distributed.checkpoint.load`, `p.copy_`, `p.data = ...`) would pass
    for steps, and the next exchange would undo most of it. So some elements of each parameter are compared
    with what the last step left. Values that were changed and put back, as for an evaluation, are as they
    were.

    On a GPU that would make the host wait in each step. There it waits only where torch has counted a change
    in place or the memory is another one; other changes are told at the next exchange.

    Args:
        model: whose parameters these are.
        trained: with their names.
    """

    def __init__(self, model: nn.Module, trained: Named) -> None:
        writers = [module for module in model.modules() if isinstance(module, WRITES_IN_FORWARD)]
        written = {id(module.weight) for module in writers if module.max_norm is not None}
        self.trained = [(name, p) for name, p in trained if id(p) not in written]
        self._addresses = list[int]()
        self._views = SampleViews([])
        self._flags = list[Tensor]()  # on a GPU, one a step, not looked at yet: did other values begin it?
        self.remember()

    def remember(self) -> None:
        """Take the parameters as they are now for the wrapper's own."""
        self._take_views()
        self._samples = self._views.gather()
        self._versions = [p._version for _, p in self.trained] if self._views.on_gpu else []

    def check(
        self, anchors: Callable[[], Mapping[str, tuple[Tensor, Tensor]]], may_be_anchor: bool = True
    ) -> None:
        """Refuse parameters that somebody else has changed since `remember`.

        Args:
            anchors: returns each parameter as it is now, and its anchor, by name, but for empty ones; may
                refuse parameters itself.
            may_be_anchor: they may have been given the anchor's values.

        Raises:
            ValueError: names the first one.
        """
        is_moved = self._take_views()
        now = self._views.gather()
        if self._views.on_gpu and not is_moved and self._versions == [p._version for _, p in self.trained]:
            self._flags += now.differs_on_gpu(self._samples)
            return
        if not now.differs(self._samples):
            return
        pairs = anchors()
        if not may_be_anchor or not all(torch.equal(*pair) for pair in pairs.values()):
            refuse(self._find_changed(now, self._samples))
        self.remember()

    def _find_changed(self, now: Samples, before: Samples) -> str:
        """Return the name of the first parameter of which a sample differs."""
        for index, (name, _) in enumerate(self.trained):
            kind, place = self._views.places[index]
            if bool((now.of(kind)[place] != before.of(kind)[place]).any()):
                return name
        return "the model"

    def check_late(self) -> None:
        """Look at what `check` has left for the next exchange.

        Raises:
            ValueError: a parameter was changed in one of the steps before.
        """
        flags, self._flags = self._flags, []
        if flags and any(host_sync.to_host(torch.stack(flags))):
            refuse("the model")

    def _take_views(self) -> bool:
        """Look where the parameters lie; True if they have moved."""
        addresses = [getattr(p, "_local_tensor", p).data_ptr() for _, p in self.trained]
        is_moved = addresses != self._addresses
        if is_moved:
            self._addresses = addresses
            self._views = SampleViews([sample_view(p) for _, p in self.trained])
        return is_moved


class Samples(NamedTuple):
    """Elements of all parameters, as integers of the same bits, one array for each type and device."""

    on_host: list[np.ndarray[Any, Any]]
    on_gpu: list[Tensor]

    def of(self, kind: int) -> Any:
        """Return one array, by its number."""
        return [*self.on_host, *self.on_gpu][kind]

    def differs(self, before: Samples) -> bool:
        """Is any bit another one? On a GPU one host synchronisation for each type."""
        if len(self.on_host) != len(before.on_host) or len(self.on_gpu) != len(before.on_gpu):
            return True
        on_host = zip(self.on_host, before.on_host, strict=True)
        on_gpu = zip(self.on_gpu, before.on_gpu, strict=True)
        return not all(starmap(np.array_equal, on_host)) or not all(starmap(torch.equal, on_gpu))

    def differs_on_gpu(self, before: Samples) -> list[Tensor]:
        """Return flags on their devices, without a synchronisation."""
        return [(now != then).any() for now, then in zip(self.on_gpu, before.on_gpu, strict=True)]


class SampleViews:
    """Views of the sampled elements, in the parameters' memory.

    Args:
        views: (up to MOST_SAMPLES,) of each parameter.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        kinds = dict[tuple[bool, torch.dtype, torch.device], list[Tensor]]()
        for view in views:
            kinds.setdefault((not view.is_cpu, view.dtype, view.device), [])
        # The host's come first, as in `Samples.of`.
        numbers = {kind: number for number, kind in enumerate(sorted(kinds, key=lambda kind: kind[0]))}
        self.places = list[tuple[int, slice]]()  # of each parameter: its kind, and where it lies in that
        for view in views:
            kind = (not view.is_cpu, view.dtype, view.device)
            begin = sum(len(other) for other in kinds[kind])
            self.places.append((numbers[kind], slice(begin, begin + len(view))))
            kinds[kind].append(view.view(INTEGERS[view.dtype.itemsize]))
        ordered = [kinds[kind] for kind in numbers]
        self.on_host = [[bits.numpy() for bits in kind] for kind in ordered if kind[0].is_cpu]
        self.on_gpu = [kind for kind in ordered if not kind[0].is_cpu]

    def gather(self) -> Samples:
        """Return copies of the elements as they are now."""
        # numpy's takes a seventh of the time of torch.cat for many small tensors.
        on_host = [np.concatenate(kind) for kind in self.on_host]
        on_gpu = [torch.cat(kind) for kind in self.on_gpu]
        return Samples(on_host, on_gpu)


def refuse(name: str) -> NoReturn:
    """Say that a parameter was changed, and where such a change belongs."""
    raise ValueError(
        f"{name} was loaded or written to after the model was wrapped, and the anchor, to which the next "
        "exchange returns, is still the old one. Load weights before sparsify.distribute or sparsify.shard, "
        "or load this optimizer's saved state after them; a change that belongs to each step of a worker, "
        "such as clipping its weights, goes into a hook: optimizer.register_step_post_hook(...)"
    )


def sample_view(p: Parameter) -> Tensor:
    """Return up to `MOST_SAMPLES` elements of this worker's part of a parameter, spread over it."""
    elements = flatten_dense(local_shard(p))
    # Odd, so that it does not meet the same column in each row of a matrix.
    distance = max(1, elements.numel() // MOST_SAMPLES) | 1
    return elements[::distance]


class LocalityGuard:
    """Guard of steps that must be local: refuses inner optimizers that communicate with other replicas.

    Process groups count their collectives, so it costs no message. Hooks and closures of the user's run
    within a step, too, and may communicate: with any of them nothing is refused.

    Args:
        comm: of the workers that must not meet within a step. None: a thread uses it meanwhile.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Comm | None) -> None:
        self.optimizer = optimizer
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
        hooks = [*self.optimizer._optimizer_step_pre_hooks, *self.optimizer._optimizer_step_post_hooks]
        before = self._num_collectives()
        yield
        if len(hooks) == NUM_LIBRARY_HOOKS and self._num_collectives() != before:
            raise ValueError(
                f"{type(self.optimizer).__name__} communicates with other workers within its step, so steps "
                "are not local, and it would take their parameters or gradients for its own; take an "
                "optimizer without communication, such as the one that it wraps, or a method of every step"
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


def check_local(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of which it is known that it communicates within its step, or that it keeps weights
    beside the parameters.

    Raises:
        ValueError: it does.
    """
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        raise ValueError(
            f"{type(optimizer).__name__} has the modes train and eval, so it keeps weights beside the "
            "parameters (as optimizers without schedules do), which an exchange would not reach; take a "
            "method of every step, or an optimizer with a schedule"
        )
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ValueError(
            "ZeroRedundancyOptimizer shares the parameters out among the workers and sends them within its "
            "step, so steps would not be local; hand over the optimizer that it wraps, made of all "
            "parameters, or take a method of every step"
        )
