"""Guards of local steps: of parameters that somebody else changes, and of steps that are not local."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
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
from sparsify.core.bucket import INTEGER_BY_NBYTES, TensorSpec, local_shard
from sparsify.core.gradients import view_flat_in_memory_order

NamedParameters = Sequence[tuple[str, Parameter]]
NamedAnchors = Sequence[tuple[str, Tensor, Tensor]]  # name, parameter (n,) and anchor (n,)
ArrayKind = tuple[torch.device, torch.dtype]
# Elements of all parameters as integers of the same bits, one tensor for each kind.
SamplesByKind = dict[ArrayKind, Tensor]
# Modules whose forward pass writes to their own weights, as a part of training.
WRITES_IN_FORWARD = (nn.Embedding, nn.EmbeddingBag)
NUM_LIBRARY_HOOKS = 1  # that the library has on each step: see `DirectStepGuard`
MAX_SAMPLES = 64  # elements of each parameter that are compared
NORM_ERROR = 1e-3  # of a row that the forward pass scaled down, relative; more in narrow types


class ParameterChangeGuard:
    """A guard of parameters that only the optimizer's own step, and its wrapper, may change.

    Between two exchanges a worker's parameters are the anchor and the steps since. What somebody else writes
    into them (`load_state_dict`, `torch.distributed.checkpoint.load`, `p.copy_`, `p.data = ...`) would pass
    for steps, and the next exchange would undo most of it. So some elements of each parameter are compared
    with what the last step left. Values that were changed and put back, as for an evaluation, are as they
    were. An embedding with a `max_norm` scales rows of its weight down in the forward pass; that alone is
    no change.

    On a GPU that would make the host wait in each step. There the host waits only where torch has counted a
    change in place or the memory is another one; other changes are noticed at the next exchange.

    Args:
        model: the model that has the parameters.
        trained: its trained parameters, with their names.
    """

    def __init__(self, model: nn.Module, trained: NamedParameters) -> None:
        writers = [module for module in model.modules() if isinstance(module, WRITES_IN_FORWARD)]
        writer_by_id = {id(module.weight): module for module in writers if module.max_norm is not None}
        self.trained = [(name, p) for name, p in trained if id(p) not in writer_by_id]
        self._limited_by_name = {
            name: NormLimitedWeight(p, writer_by_id[id(p)]) for name, p in trained if id(p) in writer_by_id
        }
        self._addresses = list[int]()
        self._sampler = ParameterSampler([])
        self._gpu_flags = list[Tensor]()  # () bool, one a step, not looked at yet: were values changed?
        self.remember()

    def remember(self) -> None:
        """Take the parameters as they are now for the wrapper's own."""
        self._update_sampler()
        self._samples_by_kind = self._sampler.gather()
        self._versions = self._read_versions()
        for weight in self._limited_by_name.values():
            weight.remember()

    def check_or_defer(self, named_anchors: Callable[[], NamedAnchors], allows_anchor: bool) -> None:
        """Refuse parameters that somebody else has changed since `remember`, now or in `check_deferred`.

        Args:
            named_anchors: returns each parameter as it is now, and its anchor, but for empty ones; may refuse
                parameters itself.
            allows_anchor: True: the parameters may have been given the anchor's values, and are the wrapper's
                own then.

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
            weights = self._limited_by_name.values()
            self._gpu_flags += [weight.is_written() for weight in weights if not weight.elements.is_cpu]
        elif self._check_samples(samples_by_kind, named_anchors, allows_anchor):
            self.remember()

    def check_now(self, named_anchors: Callable[[], NamedAnchors], allows_anchor: bool) -> None:
        """Refuse parameters that somebody else has changed since `remember`, and remember none.

        On a GPU the host waits. Arguments and errors are those of `check_or_defer`.
        """
        self._update_sampler()
        self.check_deferred()
        self._check_samples(self._sampler.gather(), named_anchors, allows_anchor)

    def _check_samples(
        self,
        samples_by_kind: SamplesByKind,
        named_anchors: Callable[[], NamedAnchors],
        allows_anchor: bool,
    ) -> bool:
        """Return False if nothing has changed, True if the parameters were given the anchor's values.

        Raises:
            ValueError: they were given others, or must not have the anchor's.
        """
        written = self._find_written(samples_by_kind)
        if written is None:
            return False
        now = named_anchors()
        if not allows_anchor or self.find_different(now) is not None:
            raise_changed_parameter(written)
        return True

    def find_different(self, named_anchors: NamedAnchors) -> str | None:
        """Return the name of the first parameter of which any element differs from the anchor."""
        for name, parameter, anchor in named_anchors:
            limited = self._limited_by_name.get(name)
            if not torch.equal(bits_of(parameter), bits_of(anchor)) and (
                limited is None or limited.differs_from(anchor)
            ):
                return name
        return None

    def check_deferred(self) -> None:
        """Refuse parameters that changed on a GPU, where `check_or_defer` left the decision to this call.

        Raises:
            ValueError: a parameter was changed in one of the steps before.
        """
        flags = self._gpu_flags
        self._gpu_flags = []
        if flags and any(host_sync.to_host(torch.stack(flags))):
            raise_changed_parameter("the model")

    def _find_written(self, samples_by_kind: SamplesByKind) -> str | None:
        """Return the name of the first parameter of which a sample differs; None: none does."""
        if are_samples_equal(samples_by_kind, self._samples_by_kind):
            return next((name for name, weight in self._limited_by_name.items() if weight.is_written()), None)
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


class NormLimitedWeight:
    """Some elements of an embedding's weight, whose forward pass scales rows down to a largest norm."""

    def __init__(self, p: Parameter, module: nn.Embedding | nn.EmbeddingBag) -> None:
        self.p = p
        self.module = module
        shard = local_shard(p)
        self.spec = TensorSpec.from_tensor(shard)
        distance = sample_distance(shard.numel())
        places = torch.arange(0, shard.numel(), distance, device=shard.device)
        dim = max(1, shard.shape[1])
        self.rows = places // dim
        self.columns = places % dim
        self.remember()

    def remember(self) -> None:
        """Take the elements as they are now for the wrapper's own."""
        if TensorSpec.from_tensor(local_shard(self.p)) == self.spec:  # else `is_written` anyway
            self.elements = local_shard(self.p).detach()[self.rows, self.columns]

    @torch.no_grad()
    def is_written(self) -> Tensor:
        """Return () bool, True if elements have changed since `remember` but for the forward pass."""
        shard = local_shard(self.p)
        if TensorSpec.from_tensor(shard) != self.spec:
            return torch.ones((), dtype=torch.bool, device=self.elements.device)
        return self._are_written(shard[self.rows, self.columns], self.elements, shard[self.rows])

    @torch.no_grad()
    def differs_from(self, anchor: Tensor) -> bool:
        """Return True if the weight is not the anchor (n,), with some rows scaled down."""
        shard = local_shard(self.p)
        before = anchor.as_strided(shard.shape, shard.stride(), anchor.storage_offset())
        return bool(self._are_written(shard.T, before.T, shard))

    def _are_written(self, now: Tensor, before: Tensor, rows: Tensor) -> Tensor:
        """Return () bool, True if any element has changed that is not of a row that was scaled down.

        Args:
            now, before: (..., n) elements.
            rows: (n, dim) the rows in which they lie, as they are now.
        """
        limit = self.module.max_norm
        assert limit is not None
        norms = torch.linalg.vector_norm(rows.double(), self.module.norm_type, dim=1)
        error = max(NORM_ERROR, 2 * torch.finfo(now.dtype).eps)
        is_at_limit = (norms - limit).abs() <= error * limit
        is_scaled_down = is_at_limit & (now.abs() <= before.abs()) & (now.sign() * before.sign() >= 0)
        is_changed = bits_of(now) != bits_of(before)
        # Training that has diverged is refused by the exchange, in a sentence of its own.
        return torch.any(is_changed & ~is_scaled_down & norms.isfinite())


class ReplacedParameterGuard:
    """A guard that sees, in some microseconds, where a model's modules or parameters were replaced.

    Args:
        parameters: of the model, that must stay where they are.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Parameter]) -> None:
        self.model = model
        self.parameter_ids = set(map(id, parameters))
        self.remember()

    def remember(self) -> None:
        """Take the places of modules and parameters as they are now."""
        # Scripted modules have no dicts.
        modules = [module for module in self.model.modules() if isinstance(module._modules, dict)]
        places = list[tuple[dict[str, Any], str, object]]()
        for module in modules:
            places += [(module._modules, name, child) for name, child in module._modules.items()]
            places += [
                (module._parameters, name, p)
                for name, p in module._parameters.items()
                if id(p) in self.parameter_ids
            ]
        self._owners = [owner for owner, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._parts = [part for _, _, part in places]

    def is_any_replaced(self) -> bool:
        """Return True if something else, or nothing, is where a module or parameter was."""
        return not all(map(is_, map(dict.get, self._owners, self._names), self._parts))


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
            bits = bits_of(view)
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
    return elements[:: sample_distance(elements.numel())]


def sample_distance(n: int) -> int:
    """Return the distance of up to `MAX_SAMPLES` elements, spread over n."""
    # Odd, so that it does not meet the same column in each row of a matrix.
    return max(1, n // MAX_SAMPLES) | 1


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as integers of the same bits."""
    return tensor.view(INTEGER_BY_NBYTES[tensor.dtype.itemsize])


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
