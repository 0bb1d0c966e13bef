"""A method applied to one worker's model."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify import checkpoint, host_sync
from sparsify.bucket import Bucket, Gradients, describe, finite_elements, finite_norms
from sparsify.comm import Comm, CountingComm
from sparsify.kernels import JointKernel, Kernel, SearchStats, kernels_in
from sparsify.method import Method, SearchesTogether, Step, Watch, num_selected
from sparsify.timer import PhaseTimer
from sparsify.types import BucketContext, Sparse

NORM_PIECE = 2**15  # elements, which in double precision stay in a core's cache
FORMAT = 1  # of a saved state; counts up when older ones can't be read any more


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


class Disagreement(RuntimeError):
    """The workers are not in the same step."""


class Report(NamedTuple):
    """What one worker did in one step."""

    selected: int  # elements sent
    num_elements: int  # of which they were selected
    wire_bytes: int  # bytes sent, as the communicator counted them
    host_syncs: int  # how often the host waited for the device
    messages: int  # latency terms of what was sent, as the communicator counted them
    predicted_s: float = 0.0  # seconds that this should take, where the communicator knows its links

    @property
    def density(self) -> float:
        """The share of elements that was sent: what the method did, where its hyperparameter is what it
        should do.
        """
        return self.selected / self.num_elements

    @classmethod
    def total(cls, reports: Sequence[Report]) -> Report:
        """Of all buckets together."""
        return cls(*(sum(numbers) for numbers in zip(*reports, strict=True)))


class Aggregator:
    """A method applied to one worker's model: its buckets, and the method's state for each.

    Args:
        comm: is wrapped in a `CountingComm`, unless it counts already.
        debug: before each step compare method, step and k over the workers, by one small allgather; without
            it, workers that disagree hang, or exchange nonsense.
        select: which kernel searches the buckets: `torch`, plain operators; `fused`, one pass over memory;
            `auto`. See `sparsify.kernels.kernel_for`. It decides how fast a step is; of equal magnitudes at
            the border each may take others.

    Raises:
        ValueError: the density selects nothing of this model, or `select` can't be had here.
    """

    def __init__(
        self,
        method: Method,
        parameters: Iterable[tuple[str, Parameter]],
        comm: Comm,
        timer: PhaseTimer | None = None,
        seed: int = 0,
        debug: bool = False,
        select: str = "auto",
    ) -> None:
        if not isinstance(seed, SupportsIndex):
            raise ValueError(f"{seed=} must be a whole number")
        self.method, self.debug = method, debug
        self.comm = comm if isinstance(comm, CountingComm) else CountingComm(comm)
        self.timer = timer or PhaseTimer("production")
        self.gradients = Gradients(parameters, method.scope)
        self.num_elements = self.gradients.num_elements
        self.step = 0
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
            for i, bucket in enumerate(self.gradients.buckets)
        ]
        likes = [bucket.flat for bucket in self.gradients.buckets]
        self.joint = method.joint_search(likes, select) if isinstance(method, SearchesTogether) else None

    def aggregate(
        self, epoch: int = 0, lr: float | Sequence[float] = 1.0, watch: Watch | None = None
    ) -> Report:
        """Replace all gradients by their averages over the workers.

        Args:
            epoch: counted from 0, for the density schedule.
            lr: the optimiser's, for feedback in the learning-rate domain; or one for each bucket.
            watch: see `Step`; each bucket is then searched by itself.
        """
        step = self.begin(epoch)._replace(watch=watch)
        grads = [bucket.flat for bucket in self.gradients.buckets]
        self.method.prepare(grads, self.comm)
        rates = lr if isinstance(lr, Sequence) else [lr] * len(self.states)
        steps = [step._replace(lr=rate) for rate in rates]
        found: dict[int, Sparse] = {}
        if self.joint is not None and watch is None:
            assert isinstance(self.method, SearchesTogether)
            found = self.method.search_together(self.joint, grads, steps, self.states, self.timer)
        return Report.total([self.aggregate_bucket(at, own, found.get(at)) for at, own in enumerate(steps)])

    def begin(self, epoch: int) -> Step:
        """The next step, the same on all workers."""
        step = Step(self.method.density_at(epoch))
        if self.debug:
            self._shake_hands(step)
        self.step += 1
        return step

    def aggregate_bucket(self, at: int, step: Step, found: Sparse | None = None) -> Report:
        """One bucket in one step; to be called in the same order of buckets on all workers.

        Args:
            found: what this worker is to send of it, where that is known.
        """
        grad, state = self.gradients.buckets[at].flat, self.states[at]
        before, syncs_before = self.comm.counted, host_sync.num_syncs()
        if found is None:
            selected = self.method.aggregate(grad, step, state, self.comm, self.timer)
        else:
            assert isinstance(self.method, SearchesTogether)
            selected = self.method.deliver(found, grad, step, state, self.comm, self.timer)
        sent_bytes, messages, predicted_s = (a - b for a, b in zip(self.comm.counted, before, strict=True))
        syncs = host_sync.num_syncs() - syncs_before
        return Report(selected, grad.numel(), int(sent_bytes), syncs, int(messages), predicted_s)

    def check_finite(self, used: Sequence[bool]) -> list[bool]:
        """Raise `NonFinite` on all workers if any worker's gradient has a NaN or Inf; residuals are
        untouched. One host synchronisation, and a small allgather.

        Args:
            used: of each parameter, a fact of this worker; returned is whether it is so on any worker.
        """
        agreed = agree(self.comm, self.gradients.views, used)
        if agreed.nonfinite is not None:
            rank, at = agreed.nonfinite
            raise NonFinite(rank, self.step, self.gradients.parameters[at][0])
        return agreed.used

    def residual_norm(self) -> Tensor:
        """Euclidean norm of this worker's residuals: a number in double precision, on their device."""
        residuals = [r for state in self.states if (r := self.method.residual(state)) is not None]
        if not residuals:
            return self.gradients.flat.new_zeros((), dtype=torch.float64)
        if residuals[0].is_cuda:
            norms = torch.stack(torch._foreach_norm(residuals, dtype=torch.float64))
            return norms.square().sum().sqrt()
        # Six times as fast as a norm in another precision, which copies the whole.
        pieces = (piece.double() for residual in residuals for piece in residual.split(NORM_PIECE))
        return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum().sqrt()

    def searching(self) -> dict[str, SearchStats]:
        """The kernels that searched the buckets, by name, and their statistics. On a GPU one host
        synchronisation each.
        """
        found: dict[str, SearchStats] = {}
        for kernel in self._kernels():
            found[kernel.name] = found.get(kernel.name, SearchStats()) + kernel.stats()
        return found

    def _kernels(self) -> Iterator[Kernel | JointKernel]:
        """Those that search: where one does it for several buckets, their own have nothing to do."""
        together: Sequence[int] = ()
        if self.joint is not None and self.joint.kernel.stats().steps:  # not where buckets overlap
            yield self.joint.kernel
            together = self.joint.buckets
        yield from kernels_in([state for at, state in enumerate(self.states) if at not in together])

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, of tensors and numbers only: save it per rank, beside model and optimiser."""
        buckets = [
            {"names": list(bucket.names), "state": checkpoint.dump(state)}
            for bucket, state in zip(self.gradients.buckets, self.states, strict=True)
        ]
        who = {"rank": self.comm.rank, "size": self.comm.size}
        return {"format": FORMAT, "method": repr(self.method), "step": self.step, **who, "buckets": buckets}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ValueError: it is another method's, another model's, another worker's, or of another format.
        """
        check_saved(saved, self.method, self.comm, self.gradients.buckets)
        self.step = saved["step"]
        self.states = [
            checkpoint.restore(state, bucket["state"])
            for state, bucket in zip(self.states, saved["buckets"], strict=True)
        ]

    def _shake_hands(self, step: Step) -> None:
        """Are all workers in the same step?"""
        ks = [num_selected(bucket.flat.numel(), step.density) for bucket in self.gradients.buckets]
        facts = {"method": repr(self.method), "step": self.step, "k": sum(ks), "buckets": len(ks)}
        mine = host_sync.to_device([digest(value) for value in facts.values()], self.gradients.flat)
        gathered = host_sync.to_host(torch.stack(self.comm.all_gather(mine)))
        for at, (fact, value) in enumerate(facts.items()):
            groups: dict[int, list[int]] = {}
            for rank, digests in enumerate(gathered):
                groups.setdefault(digests[at], []).append(rank)
            if len(groups) > 1:
                raise Disagreement(
                    f"the workers disagree on {fact}: ranks {' and ranks '.join(map(str, groups.values()))} "
                    f"differ; rank {self.comm.rank} has {fact}={value}; give every worker the same "
                    "method and call aggregate equally often"
                )


def gather_flags(comm: Comm, *flags: Tensor) -> list[list[list[int]]]:
    """(m,) bool each -> of every worker by rank, the flags of each as 0 and 1. One host synchronisation, and
    a small allgather.
    """
    return cast(
        list[list[list[int]]], host_sync.to_host(torch.stack(comm.all_gather(torch.stack(flags).int())))
    )


class Agreed(NamedTuple):
    """What all workers know of some gradients."""

    nonfinite: tuple[int, int] | None  # the first worker with a NaN or Inf, and which gradient has it
    used: list[bool]  # of each, has any worker used it?


def agree(comm: Comm, grads: Sequence[Tensor], used: Sequence[bool], looks: bool = True) -> Agreed:
    """One host synchronisation and a small allgather; and again where a norm is not finite.

    Args:
        used: of each gradient, has this worker used it?
        looks: at the gradients, too.
    """
    finite = finite_norms(grads) if looks else grads[0].new_ones(len(grads), dtype=torch.bool)
    everyone = gather_flags(comm, finite, host_sync.to_device(used, finite, torch.bool))
    found = None
    if not all(all(theirs) for theirs, _ in everyone):  # or is it a norm that has overflowed?
        for rank, (flags,) in enumerate(gather_flags(comm, finite_elements(grads))):
            if found is None and not all(flags):
                found = rank, flags.index(0)
    return Agreed(found, [any(flags) for flags in zip(*(theirs for _, theirs in everyone), strict=True)])


def digest(value: Any) -> int:
    """63 bits that differ when the values do."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1


def check_saved(saved: Mapping[str, Any], method: Method, comm: Comm, buckets: list[Bucket]) -> None:
    """Refuse a state that is not this worker's."""
    if saved.get("format") != FORMAT:
        raise ValueError(
            f"a saved state of format {saved.get('format')} can't be read; this version reads {FORMAT}"
        )
    if saved["method"] != repr(method):
        raise ValueError(
            f"the saved state is of {saved['method']}, and this is {method!r}; build the method with the "
            "hyperparameters that it was saved with"
        )
    if saved["size"] != comm.size:
        raise ValueError(
            f"the saved state is of {saved['size']} workers, and there are {comm.size}; resume with as many, "
            "or pass all workers' states through sparsify.redistribute first, which shares the residuals out"
        )
    if saved["rank"] != comm.rank:
        raise ValueError(
            f"the saved state is of rank {saved['rank']}, and this is rank {comm.rank}; every worker saves "
            "and loads its own. Where there is only one, load the inner optimiser's alone "
            "(`optimiser.optimiser`): training goes on without what the workers still owed"
        )
    names = [list(bucket.names) for bucket in buckets]
    if [bucket["names"] for bucket in saved["buckets"]] != names:
        raise ValueError("the saved state is of a model with other parameters, or of other buckets")


def redistribute(saved: Sequence[Mapping[str, Any]], size: int) -> list[dict[str, Any]]:
    """All workers' saved states (`Aggregator.state_dict`, by rank) for another number of workers.

    Every new worker gets the average of the old workers' residuals, for that is all that future updates
    depend on. Defined for methods that remember residuals, momentum and how often they drew; not for
    thresholds, masks and regions, which belong to one worker or to a number of workers.

    Raises:
        ValueError: not all workers' states, or the method remembers more.
    """
    first = saved[0]
    if [worker["rank"] for worker in saved] != list(range(first["size"])):
        raise ValueError(f"give the states of all {first['size']} workers, in the order of their ranks")
    buckets = []
    for same in zip(*(worker["buckets"] for worker in saved), strict=True):
        states = [bucket["state"] for bucket in same]
        if not isinstance(states[0], Mapping) or "feedback" not in states[0]:
            raise ValueError(f"the state of {first['method']} can't be shared out anew; resume with as many")
        rest = [{name: part for name, part in state.items() if name != "feedback"} for state in states]
        if has_tensors(rest[0]) or any(other != rest[0] for other in rest):
            raise ValueError(
                f"{first['method']} remembers more than residuals, which can't be shared out anew; "
                f"resume with {first['size']} workers"
            )
        feedback = mean_of([state["feedback"] for state in states])
        buckets.append({"names": same[0]["names"], "state": {**rest[0], "feedback": feedback}})
    return [{**first, "rank": rank, "size": size, "buckets": buckets} for rank in range(size)]


def has_tensors(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(has_tensors(branch) for branch in tree.values())
    return any(has_tensors(branch) for branch in tree) if isinstance(tree, list) else isinstance(tree, Tensor)


def mean_of(trees: Sequence[Any]) -> Any:
    """Averages tensors; everything else is the same on all workers."""
    if isinstance(trees[0], Mapping):
        return {name: mean_of([tree[name] for tree in trees]) for name in trees[0]}
    if isinstance(trees[0], Tensor):
        return torch.stack(list(trees)).mean(dim=0)
    return trees[0]


def check_unchanged(bucket: Tensor, like: Tensor, name: str) -> None:
    """Refuse a bucket that is not the one whose state is kept."""
    if (bucket.shape, bucket.dtype, bucket.device) != (like.shape, like.dtype, like.device):
        raise ValueError(
            f"bucket {name} was {describe(like)} and is now {describe(bucket)}; its residual can't follow: "
            "build the state anew"
        )
