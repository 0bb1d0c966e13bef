"""A method applied to one worker's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify.comm import Comm
from sparsify.core.bucket import Gradients
from sparsify.core.timer import PhaseTimer
from sparsify.doors.engine import Engine, StepReport
from sparsify.doors.handshake import of_tensors, shake_hands
from sparsify.kernels import JointKernel, Kernel, kernels_in
from sparsify.method import Method, Sparsifier, Step, Watch, num_selected
from sparsify.types import SearchStats, Sparse

NORM_PIECE = 2**15  # elements, which in double precision stay in a core's cache


class Aggregator(Engine):
    """A method applied to one worker's model: its buckets, and the method's state for each.

    Args:
        comm: is wrapped in a `CountingComm`, unless it counts already.
        debug: before each step compare method, step, k and parameters over the workers, by one small
            allgather; without it, workers that disagree hang, or exchange nonsense.
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
        self.gradients, self.debug = Gradients(parameters, method.scope), debug
        self.more_facts: Callable[[], Mapping[str, Any]] = dict  # that `debug` compares
        super().__init__(method, self.gradients.buckets, comm, timer, seed, select)
        likes = [bucket.flat for bucket in self.gradients.buckets]
        self.joint = method.joint_search(likes, select) if isinstance(method, Sparsifier) else None

    def aggregate(
        self, epoch: int = 0, lr: float | Sequence[float] = 1.0, watch: Watch | None = None
    ) -> StepReport:
        """Replace all gradients by their averages over the workers.

        Args:
            epoch: counted from 0, for the density schedule.
            lr: the optimiser's, for feedback in the learning-rate domain; or one for each bucket.
            watch: see `Step`; each bucket is then searched by itself.
        """
        steps = self.begin(epoch, lr, watch)
        grads = [bucket.flat for bucket in self.gradients.buckets]
        self.method.prepare(grads, self.comm)
        found: dict[int, Sparse] = {}
        if self.joint is not None and watch is None:
            assert isinstance(self.method, Sparsifier)
            found = self.method.search_together(self.joint, grads, steps, self.states, self.timer)
        reports = [self.aggregate_bucket(at, own, found.get(at)) for at, own in enumerate(steps)]
        return StepReport.total(reports)

    def begin(self, epoch: int, lr: float | Sequence[float], watch: Watch | None = None) -> list[Step]:
        """The next step of each bucket, the same on all workers. Arguments as `aggregate`."""
        step = Step(self.method.density_at(epoch), watch=watch)
        if self.debug:
            ks = [num_selected(bucket.flat.numel(), step.step_density) for bucket in self.gradients.buckets]
            facts = {"method": repr(self.method), "step": self.step, "k": sum(ks), "buckets": len(ks)}
            facts |= of_tensors("parameter", self.gradients.parameters)
            shake_hands(self.comm, {**facts, **self.more_facts()}, self.gradients.flat)
        self.step += 1
        rates = lr if isinstance(lr, Sequence) else [lr] * len(self.states)
        return [step._replace(lr=rate) for rate in rates]

    def aggregate_bucket(self, at: int, step: Step, found: Sparse | None = None) -> StepReport:
        """One bucket in one step, see `Engine.average`."""
        return self.average(at, self.gradients.buckets[at].flat, step, found)

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
        kernels, alone = list[Kernel | JointKernel](), self.states
        if self.joint is not None and self.joint.kernel.stats().steps:  # not where buckets overlap
            kernels.append(self.joint.kernel)  # kernels of these buckets have nothing to do
            alone = [state for at, state in enumerate(self.states) if at not in self.joint.buckets]
        found: dict[str, SearchStats] = {}
        for kernel in (*kernels, *kernels_in(alone)):
            found[kernel.name] = found.get(kernel.name, SearchStats()) + kernel.stats()
        return found


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
    """True where a tensor lies anywhere in the tree."""
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
