"""Guards of local steps: of parameters that somebody else changes, and of steps that are not local."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Parameter

from sparsify.comm import Comm, CountingComm
from sparsify.comm.torch import TorchComm
from sparsify.core import host_sync
from sparsify.core.bucket import INTEGER_BY_NBYTES, local_shard
from sparsify.core.gradients import view_flat_in_memory_order

NamedParameters = Sequence[tuple[str, Parameter]]
ArrayKind = tuple[torch.device, torch.dtype]
# Elements of all parameters as integers of the same bits, one tensor for each kind.
SamplesByKind = dict[ArrayKind, Tensor]
# Modules whose forward pass writes to their own weights, as a part of training.
WRITES_IN_FORWARD = (nn.Embedding, nn.EmbeddingBag)
NUM_LIBRARY_HOOKS = 1  # that the library has on each step: see `DirectStepGuard`
MAX_SAMPLES = 64  # elements of each parameter that are compared


class ParameterChangeGuard:
    """A guard of parameters that only the optimizer's own step, and its wrapper, may change.

    Between two exchanges a worker's parameters are the anchor and the steps since. What somebody else writes
    into them (`load_state_dict`, `torch.distributed.checkpoint.load`, `p.copy_`, `p.data = ...`) would pass
    for steps, and the next exchange would undo most of it. So some elements of each parameter are compared
    with what the last step left. Values that were changed and put back, as for an evaluation, are as they
    were.

    On a GPU that would make the host wait in each step. There the host waits only where torch has counted a
    change in place or the memory is another one; other changes are noticed at the next exchange.

    Args:
        model: the model that has the parameters.
        trained: its trained parameters, with their names.
    """

    def __init__(self, model: nn.Module, trained: NamedParameters) -> None:
        writers = [module for module in model.modules() if isinstance(module, WRITES_IN_FORWARD)]
        written_ids = {id(module.weight) for module in writers if module.max_norm is not None}
        self.trained = [(name, p) for name, p in trained if id(p) not in written_ids]
        self._addresses = list[int]()
        self._sampler = ParameterSampler([])
        self._gpu_flags = list[Tensor]()  # () bool, one a step, not looked at yet: were values changed?
        self.remember()

    def remember(self) -> None:
        """Take the parameters as they are now for the wrapper's own."""
        self._update_sampler()
        self._samples_by_kind = self._sampler.gather()
        self._versions = self._read_versions()

    def check_or_defer(
        self, parameters_and_anchors: Callable[[], Sequence[tuple[Tensor, Tensor]]], allows_anchor: bool
    ) -> None:
        """Refuse parameters that somebody else has changed since `remember`, now or in `check_deferred`.

        Args:
            parameters_and_anchors: returns each parameter as it is now, and its anchor, but for empty ones;
                may refuse parameters itself.
            allows_anchor: True: the parameters may have been given the anchor's values.

        Raises:
            ValueError: names the first parameter that was changed.
        """
        is_moved = self._update_sampler()
        samples_by_kind = self._sampler.gather()
        if self._sampler.is_on_gpu and not is_moved and self._versions == self._read_versions():
            self._gpu_flags += [
                (samples != self._samples_by_kind[kind]).any()
                for kind, samples in samples_by_kind.items()
                if not samples.is_cpu
            ]
            return
        if are_samples_equal(samples_by_kind, self._samples_by_kind):
            return
        pairs = parameters_and_anchors()
        if not allows_anchor or not all(torch.equal(*pair) for pair in pairs):
            raise_changed_parameter(self._find_changed(samples_by_kind))
        self.remember()

    def check_deferred(self) -> None:
        """Refuse parameters that changed on a GPU, where `check_or_defer` left the decision to this call.

        Raises:
            ValueError: a parameter was changed in one of the steps before.
        """
        flags = self._gpu_flags
        self._gpu_flags = []
        if flags and any(host_sync.to_host(torch.stack(flags))):
            raise_changed_parameter("the model")

    def _find_changed(self, samples_by_kind: SamplesByKind) -> str:
        """Return the name of the first parameter of which a sample differs."""
        for (name, _), (kind, place) in zip(self.trained, self._sampler.places, strict=True):
            before = self._samples_by_kind.get(kind)
            if before is None or bool((samples_by_kind[kind][place] != before[place]).any()):
                return name
        return "the model"

    def _read_versions(self) -> list[int]:
        """Return torch's counts of changes in place, where samples lie on a GPU."""
        return [p._version for _, p in self.trained] if self._sampler.is_on_gpu else []

    def _update_sampler(self) -> bool:
        """Follow parameters to other memory, and return True if any has moved."""
        addresses = [getattr(p, "_local_tensor", p).data_ptr() for _, p in self.trained]
        is_moved = addresses != self._addresses
        if is_moved:
            self._addresses = addresses
            self._sampler = ParameterSampler([sample_view(p) for _, p in self.trained])
        return is_moved


class ParameterSampler:
    """A reader of some elements of each parameter, by views of the parameters' memory.

    Args:
        views: (up to MAX_SAMPLES,) of each parameter.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        self.places = list[tuple[ArrayKind, slice]]()  # of each parameter's elements in the arrays
        self.is_on_gpu = not all(view.is_cpu for view in views)
        self._views_by_kind = dict[ArrayKind, list[Any]]()
        length_by_kind = dict[ArrayKind, int]()
        for view in views:
            kind = (view.device, view.dtype)
            begin = length_by_kind.get(kind, 0)
            end = length_by_kind[kind] = begin + len(view)
            self.places.append((kind, slice(begin, end)))
            bits = view.view(INTEGER_BY_NBYTES[view.dtype.itemsize])
            self._views_by_kind.setdefault(kind, []).append(bits.numpy() if bits.is_cpu else bits)

    def gather(self) -> SamplesByKind:
        """Return copies of the elements as they are now."""
        # numpy's takes a seventh of the time of torch.cat for many small tensors.
        return {
            kind: torch.from_numpy(np.concatenate(views)) if kind[0].type == "cpu" else torch.cat(views)
            for kind, views in self._views_by_kind.items()
        }


def are_samples_equal(first: SamplesByKind, second: SamplesByKind) -> bool:
    """Return True if all bits are equal. On a GPU one host synchronisation for each type."""
    return first.keys() == second.keys() and all(
        torch.equal(samples, second[kind]) for kind, samples in first.items()
    )


def raise_changed_parameter(name: str) -> NoReturn:
    """Raise the error that a parameter was changed, which says where such a change belongs."""
    raise ValueError(
        f"{name} was loaded or written to after the model was wrapped, and the anchor, to which the next "
        "exchange returns, is still the old one. Load weights before sparsify.distribute or sparsify.shard, "
        "or load this optimizer's saved state after them; a change that belongs to each step of a worker, "
        "such as clipping its weights, goes into a hook: optimizer.register_step_post_hook(...)"
    )


def sample_view(p: Parameter) -> Tensor:
    """Return up to `MAX_SAMPLES` elements of this worker's shard of a parameter, spread over the shard."""
    elements = view_flat_in_memory_order(local_shard(p))
    # Odd, so that it does not meet the same column in each row of a matrix.
    distance = max(1, elements.numel() // MAX_SAMPLES) | 1
    return elements[::distance]


class CommunicationGuard:
    """A guard that refuses inner optimizers whose step communicates with other replicas.

    Process groups count their collectives, so it costs no message. Hooks and closures of the user's run
    within a step, too, and may communicate: with any of them nothing is refused.

    Args:
        comm: of the workers that must not meet within a step. None: a thread uses it meanwhile.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Comm | None) -> None:
        self.optimizer = optimizer
        self.groups = list[Any]()  # process groups, of which torch declares no count of collectives
        inner = comm.comm if isinstance(comm, CountingComm) else comm
        if isinstance(inner, TorchComm):
            candidates = [inner.group, dist.group.WORLD]
            self.groups = [group for group in candidates if group is not None and has_collective_count(group)]

    @contextmanager
    def refuse_communication(self) -> Iterator[None]:
        """Run a step of the inner optimizer within, and refuse one that communicates.

        Raises:
            ValueError: the step communicated.
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
        """Return the number of collectives so far of each process group."""
        return [group._get_sequence_number_for_group() for group in self.groups]


def has_collective_count(group: Any) -> bool:
    """Return True if the backend of a process group counts its collectives; MPI's does not."""
    try:
        group._get_sequence_number_for_group()
    except RuntimeError:
        return False
    return True


def check_steps_locally(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is known not to step locally.

    Raises:
        ValueError: the optimizer communicates within its step, or keeps weights beside the parameters.
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
