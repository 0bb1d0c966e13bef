"""The engine under all doors: a method's states of the buckets, a step of one, the look before it, saving."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, SupportsIndex, cast
from weakref import WeakMethod

import torch
from torch import Generator, Tensor

from sparsify.comm import Comm, CountingComm
from sparsify.core import host_sync
from sparsify.core.bucket import Bucket, TensorKind, finite_elements
from sparsify.core.timer import PhaseTimer
from sparsify.method import Method, Sparsifier, Step
from sparsify.types import BucketContext, Sparse

FORMAT = 1  # of a saved state; counts up when older ones can't be read any more
INFINITY = 0x7F800000  # bits of the exponent of a float32 that is no number or infinite
ALIKE_LOOKS = 20
log = logging.getLogger(__name__)


class NonFinite(ArithmeticError):
    """A gradient is NaN or infinite.

    Args:
        noticed: the step after which it was noticed, where that was too late to keep it out.
    """

    def __init__(self, rank: int, step: int, layer: str, noticed: int | None = None) -> None:
        late = (
            f"; noticed after step {noticed}, so weights and residuals may hold it: go back to the last "
            "checkpoint"
        )
        words = f"rank {rank}, step {step}: the gradient of {layer} has a NaN or Inf"
        super().__init__(words if noticed is None else words + late)
        self.rank, self.step = rank, step


class PartlyDelivered(NonFinite):
    """A gradient is NaN or infinite, and others of its step were delivered before it was there."""

    def __init__(self, rank: int, step: int, layer: str) -> None:
        super().__init__(rank, step, layer)
        self.args = (
            f"{self}; it reached no residual, but with overlap=True gradients that came before it were "
            "delivered already, and are missing from their residuals: go on from a checkpoint",
        )


class StepReport(NamedTuple):
    """Numbers of one worker in one step."""

    selected: int  # elements sent
    num_elements: int  # of which they were selected
    wire_bytes: int  # bytes sent, as the communicator counted them
    host_syncs: int  # how often the host waited for the device
    messages: int  # latency terms of what was sent, as the communicator counted them
    predicted_s: float = 0.0  # seconds that this should take, where the communicator knows its links

    @property
    def sent_density(self) -> float:
        """Share of the elements that was sent: what the method did, where its density is what was asked."""
        return self.selected / self.num_elements

    @property
    def density(self) -> float:
        """Another name of `sent_density`."""
        return self.sent_density

    @classmethod
    def total(cls, reports: Sequence[StepReport]) -> StepReport:
        """The sum over all buckets."""
        return cls(*(sum(numbers) for numbers in zip(*reports, strict=True)))


class Engine:
    """A method at work on the buckets of one worker's model.

    Args:
        buckets: numbered as what is drawn for them.
        comm: is wrapped in a `CountingComm`, unless it counts already.
        select: which kernel searches the buckets, see `sparsify.kernels.kernel_for`.

    Raises:
        ValueError: the density selects nothing of this model, or `select` can't be had here.
    """

    def __init__(
        self,
        method: Method,
        buckets: list[Bucket],
        comm: Comm,
        timer: PhaseTimer | None,
        seed: int,
        select: str,
    ) -> None:
        if not isinstance(seed, SupportsIndex):
            raise ValueError(f"{seed=} must be a whole number")
        self.method, self.buckets, self.step = method, buckets, 0
        self._alike = 0  # how often in a row all workers had the same gradients
        self.comm = comm if isinstance(comm, CountingComm) else CountingComm(comm)
        self.timer = timer or PhaseTimer("production")
        self.num_elements = sum(bucket.flat.numel() for bucket in buckets)  # without gaps between them
        if not self.num_elements:
            raise ValueError("there is nothing to aggregate: all parameters are empty")
        density = method.density_at(10**9)
        if int(density * self.num_elements) < 1:
            raise ValueError(
                f"density={density:g} of {self.num_elements} gradients selects none (k = 0); the smallest "
                f"density that selects one is {1 / self.num_elements:.3g}"
            )
        self.states = [
            method.init(bucket.flat, BucketContext(operator.index(seed), comm.rank, i, bucket.shapes, select))
            for i, bucket in enumerate(buckets)
        ]

    def average(self, at: int, grad: Tensor, step: Step, found: Sparse | None = None) -> StepReport:
        """One bucket in one step, in place; to be called in the same order of buckets on all workers.

        Args:
            grad: (n,).
            found: what this worker is to send of it, where that is known.
        """
        state, before, syncs_before = self.states[at], self.comm.counted, host_sync.num_syncs()
        if found is None:
            selected = self.method.aggregate(grad, step, state, self.comm, self.timer)
        else:
            assert isinstance(self.method, Sparsifier)
            selected = self.method.deliver(found, grad, step, state, self.comm, self.timer)
        sent_bytes, messages, predicted_s = (a - b for a, b in zip(self.comm.counted, before, strict=True))
        syncs = host_sync.num_syncs() - syncs_before
        return StepReport(selected, grad.numel(), int(sent_bytes), syncs, int(messages), predicted_s)

    def residuals(self) -> dict[str, Tensor]:
        """(n,) of each parameter by its name, views: this worker's residual, where the method keeps one."""
        found = dict[str, Tensor]()
        for bucket, state in zip(self.buckets, self.states, strict=True):
            if (residual := self.method.residual(state)) is not None:
                sizes = [torch.Size(shape).numel() for shape in bucket.shapes]
                found |= zip(bucket.names, residual.split(sizes), strict=True)
        return found

    def agree(
        self,
        grads: Sequence[Tensor],
        names: Sequence[str],
        used: Sequence[bool],
        looks: bool = True,
        error: type[NonFinite] = NonFinite,
    ) -> list[bool]:
        """Of each gradient, has any worker used it? One host synchronisation and a small allgather; and again
        where a norm is not finite.

        Args:
            used: of each gradient, has this worker used it?
            looks: at the gradients, too.

        Raises:
            NonFinite: `error`, on all workers if any has a NaN or Inf; residuals are untouched.
        """
        norms = grads[0].new_ones(len(grads), dtype=torch.float32)
        if looks:
            norms = torch.stack(torch._foreach_norm(list(grads))).float()
        everyone = self._gather_numbers(
            norms.view(torch.int32), host_sync.to_device(used, norms, torch.int32)
        )
        if any(bits & INFINITY == INFINITY for theirs, _ in everyone for bits in theirs):
            for rank, (flags,) in enumerate(self._gather_numbers(finite_elements(grads).int())):
                if not all(flags):  # else a norm has overflowed
                    raise error(rank, self.step, names[flags.index(0)])
        if looks:
            self._tell_alike([theirs for theirs, _ in everyone])
        return [any(flags) for flags in zip(*(theirs for _, theirs in everyone), strict=True)]

    def _gather_numbers(self, *numbers: Tensor) -> list[list[list[int]]]:
        """(m,) int32 each -> of every worker by rank, the numbers of each."""
        gathered = self.comm.all_gather(torch.stack(numbers))
        return cast(list[list[list[int]]], host_sync.to_host(torch.stack(gathered)))

    def _tell_alike(self, norms: list[list[int]]) -> None:
        """Warn once if all workers have the same gradients for long. Where they are averaged already, and by
        whom nobody knows here, they are the same to the bit.
        """
        if not any(norms[0]) or len(norms) == 1:
            return
        self._alike = self._alike + 1 if all(theirs == norms[0] for theirs in norms) else 0
        if self._alike == ALIKE_LOOKS and self.comm.rank == 0:
            log.warning(
                f"all workers had the same gradients, to the bit, {ALIKE_LOOKS} times in a row; either "
                "something averages them before this does (an all_reduce of your own, another library), and "
                "they travel twice, or every worker trains on the same batches (give each its own share, as "
                "DistributedSampler does)"
            )

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, of tensors and numbers only: save it per rank, beside model and optimiser."""
        buckets = [
            {"names": list(bucket.names), "state": dump(state)}
            for bucket, state in zip(self.buckets, self.states, strict=True)
        ]
        who = {"rank": self.comm.rank, "size": self.comm.size}
        return {"format": FORMAT, "method": repr(self.method), "step": self.step, **who, "buckets": buckets}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ValueError: it is another method's, another model's, another worker's, or of another format.
        """
        if saved.get("format") != FORMAT:
            raise ValueError(
                f"a saved state of format {saved.get('format')} can't be read; this version reads {FORMAT}"
            )
        if saved["method"] != repr(self.method):
            raise ValueError(
                f"the saved state is of {saved['method']}, and this is {self.method!r}; build the method "
                "with the hyperparameters that it was saved with"
            )
        if saved["size"] != self.comm.size:
            raise ValueError(
                f"the saved state is of {saved['size']} workers, and there are {self.comm.size}; resume with "
                "as many, or pass all workers' states through sparsify.redistribute first, which shares the "
                "residuals out"
            )
        if saved["rank"] != self.comm.rank:
            raise ValueError(
                f"the saved state is of rank {saved['rank']}, and this is rank {self.comm.rank}; every "
                "worker saves and loads its own. Where there is only one, load the inner optimiser's alone "
                "(`optimiser.optimiser`): training goes on without what the workers still owed"
            )
        if [bucket["names"] for bucket in saved["buckets"]] != [list(own.names) for own in self.buckets]:
            raise ValueError("the saved state is of a model with other parameters, or of other buckets")
        self.step = saved["step"]
        self.states = [
            restore(state, bucket["state"])
            for state, bucket in zip(self.states, saved["buckets"], strict=True)
        ]


def while_alive(method: Callable[..., None], *first: Any) -> Callable[..., None]:
    """A hook that calls a method as long as its object lives: what hooks are registered with lives longer."""
    alive = WeakMethod(method)

    def hook(*rest: Any) -> None:
        if (call := alive()) is not None:
            call(*first, *rest)

    return hook


def check_unchanged(bucket: Tensor, like: Tensor, name: str) -> None:
    """Refuse a bucket that is not the one whose state is kept."""
    before, now = TensorKind.of(like), TensorKind.of(bucket)
    if now != before:
        raise ValueError(
            f"bucket {name} was {before} and is now {now}; its residual can't follow: build the state anew"
        )


def dump(state: Any) -> Any:
    """A copy of a state as a plain tree of tensors and numbers, for `torch.load(weights_only=True)`.
    Dataclasses and named tuples become dicts, generators their state. Fields whose metadata say
    `saved: False` (work buffers) are left out.
    """
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Generator):
        return state.get_state()
    if (named := named_parts(state)) is not None:
        return {name: dump(part) for name, part in named.items()}
    if isinstance(state, list | tuple):
        return [dump(part) for part in state]
    assert state is None or isinstance(state, bool | int | float | str), f"{type(state)} can't be saved"
    return state


def restore(state: Any, saved: Any) -> Any:
    """`state`, as made by `init`, with what `dump` saved; tensors of the same size are written in place."""
    if isinstance(state, Generator):
        state.set_state(saved.cpu())
        return state
    if isinstance(saved, Tensor):
        if not isinstance(state, Tensor):
            return saved.clone()
        if state.shape == saved.shape and state.dtype == saved.dtype:
            return state.copy_(saved)
        return saved.to(state.device, copy=True)
    if isinstance(state, Mapping):
        return {name: restore(state.get(name), part) for name, part in saved.items()}
    if (named := named_parts(state)) is not None:
        parts = {name: restore(part, saved[name]) for name, part in named.items()}
        if hasattr(state, "_replace"):
            return state._replace(**parts)
        for name, part in parts.items():
            setattr(state, name, part)
        return state
    if isinstance(state, list | tuple) and len(state) == len(saved):
        return type(state)(restore(item, part) for item, part in zip(state, saved, strict=True))
    return copy.deepcopy(saved)


def named_parts(state: Any) -> dict[str, Any] | None:
    """What a checkpoint has of a dataclass, a named tuple or a mapping, by name; None of anything else."""
    if is_dataclass(state):
        saved = (field.name for field in fields(state) if field.metadata.get("saved", True))
        return {name: getattr(state, name) for name in saved}
    if hasattr(state, "_asdict"):
        return dict(state._asdict())
    return dict(state) if isinstance(state, Mapping) else None
