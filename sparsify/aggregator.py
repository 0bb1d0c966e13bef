"""A method at work on one worker's model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify import checkpoint
from sparsify.aggregate import Method, Report, Step, num_selected
from sparsify.bucket import Bucket, Gradients, describe
from sparsify.comm import Comm
from sparsify.kernels import Tally, kernels_in
from sparsify.parts import Place
from sparsify.timer import PhaseTimer

FORMAT = 1  # of a saved state; counts up when older ones can't be read any more


class NonFinite(ArithmeticError):
    """A gradient is NaN or infinite."""

    def __init__(self, rank: int, step: int, layer: str) -> None:
        super().__init__(f"rank {rank}, step {step}: the gradient of {layer} has a NaN or Inf")
        self.rank, self.step = rank, step


class Disagreement(RuntimeError):
    """The workers do not do the same step."""


class Aggregator:
    """A method at work on one worker's model: its buckets, and the method's state for each.

    Args:
        debug: before each step compare method, step and k over the workers, by one small allgather; without
            it, workers that disagree hang, or exchange nonsense.
        select: who searches the buckets: `torch`, plain operators; `fused`, one pass over memory; `auto`. See
            `sparsify.kernels.kernel`. It decides how fast a step is; of equal magnitudes at the border each
            may take others.

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
        self.method, self.comm, self.debug = method, comm, debug
        self.timer = timer or PhaseTimer("production")
        self.gradients = Gradients(parameters, method.scope)
        self.num_elements = self.gradients.flat.numel()
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
            method.init(bucket.flat, Place(seed, comm.rank, i, bucket.shapes, select))
            for i, bucket in enumerate(self.gradients.buckets)
        ]

    def aggregate(self, epoch: int = 0, lr: float = 1.0) -> Report:
        """Replace all gradients by their averages over the workers.

        Args:
            epoch: counted from 0, for the density schedule.
            lr: the optimiser's, for feedback in the learning-rate domain.
        """
        step = self.begin(epoch, lr)
        self.method.prepare(self.gradients.flat, self.comm)
        reports = [self.aggregate_bucket(at, step) for at in range(len(self.states))]
        return Report(*(sum(numbers) for numbers in zip(*reports, strict=True)))

    def begin(self, epoch: int, lr: float) -> Step:
        """The next step, which all workers agree upon."""
        step = Step(self.method.density_at(epoch), lr)
        if self.debug:
            self._shake_hands(step)
        self.step += 1
        return step

    def aggregate_bucket(self, at: int, step: Step) -> Report:
        """One bucket's share of a step; buckets in the same order on all workers."""
        bucket = self.gradients.buckets[at]
        return self.method.aggregate(bucket.flat, step, self.states[at], self.comm, self.timer)

    def check_finite(self) -> None:
        """Raise `NonFinite` on all workers if any worker's gradient has a NaN or Inf; residuals are
        untouched. One host synchronisation, and an allgather of 8 bytes.
        """
        gradients = self.gradients
        name = gradients.nonfinite(gradients.finite())
        names = [n for n, _ in gradients.parameters]
        accused = torch.tensor([names.index(name) if name else -1], device=gradients.flat.device)
        for rank, one in enumerate(self.comm.all_gather(accused)):
            if (at := int(one)) >= 0:
                raise NonFinite(rank, self.step, names[at])

    def residual_norm(self) -> float:
        """Euclidean norm of all that this worker still owes."""
        residuals = [r for state in self.states if (r := self.method.residual(state)) is not None]
        norms = [torch.linalg.vector_norm(r, dtype=torch.float64).item() for r in residuals]
        return math.hypot(*norms)

    def searching(self) -> dict[str, Tally]:
        """Who searched the buckets, by name, and what came of it. On a GPU one host synchronisation each."""
        found: dict[str, Tally] = {}
        for one in kernels_in(self.states):
            found[one.name] = found.get(one.name, Tally()) + one.tally()
        return found

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
            checkpoint.restore(state, one["state"])
            for state, one in zip(self.states, saved["buckets"], strict=True)
        ]

    def _shake_hands(self, step: Step) -> None:
        """Do all workers mean the same step?"""
        ks = [num_selected(bucket.flat.numel(), step.density) for bucket in self.gradients.buckets]
        facts = {"method": repr(self.method), "step": self.step, "k": sum(ks), "buckets": len(ks)}
        mine = torch.tensor([digest(value) for value in facts.values()], device=self.gradients.flat.device)
        everybody = [one.tolist() for one in self.comm.all_gather(mine)]
        for at, (fact, value) in enumerate(facts.items()):
            groups: dict[int, list[int]] = {}
            for rank, digests in enumerate(everybody):
                groups.setdefault(digests[at], []).append(rank)
            if len(groups) > 1:
                raise Disagreement(
                    f"the workers disagree on {fact}: ranks {' and ranks '.join(map(str, groups.values()))} "
                    f"differ; rank {self.comm.rank} has {fact}={value}; give every worker the same "
                    "method and call aggregate equally often"
                )


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
        raise ValueError(f"the saved state is of rank {saved['rank']}, and this is rank {comm.rank}")
    names = [list(bucket.names) for bucket in buckets]
    if [one["names"] for one in saved["buckets"]] != names:
        raise ValueError("the saved state is of a model with other parameters, or of other buckets")


def redistribute(saved: Sequence[Mapping[str, Any]], size: int) -> list[dict[str, Any]]:
    """All workers' saved states (`Aggregator.state_dict`, by rank) for another number of workers.

    What the old workers owe on average, every new one owes: the average of the residuals is all that future
    updates depend on. Defined for methods that remember residuals, momentum and how often they drew; not for
    thresholds, masks and regions, which belong to one worker or to a number of workers.

    Raises:
        ValueError: not all workers' states, or the method remembers more.
    """
    first = saved[0]
    if [one["rank"] for one in saved] != list(range(first["size"])):
        raise ValueError(f"give the states of all {first['size']} workers, in the order of their ranks")
    buckets = []
    for same in zip(*(one["buckets"] for one in saved), strict=True):
        states = [one["state"] for one in same]
        if not isinstance(states[0], Mapping) or "feedback" not in states[0]:
            raise ValueError(f"the state of {first['method']} can't be shared out anew; resume with as many")
        rest = [{name: part for name, part in state.items() if name != "feedback"} for state in states]
        if has_tensors(rest[0]) or any(one != rest[0] for one in rest):
            raise ValueError(
                f"{first['method']} remembers more than residuals, which can't be shared out anew; "
                f"resume with {first['size']} workers"
            )
        feedback = mean_of([state["feedback"] for state in states])
        buckets.append({"names": same[0]["names"], "state": {**rest[0], "feedback": feedback}})
    return [{**first, "rank": rank, "size": size, "buckets": buckets} for rank in range(size)]


def has_tensors(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(has_tensors(one) for one in tree.values())
    return any(has_tensors(one) for one in tree) if isinstance(tree, list) else isinstance(tree, Tensor)


def mean_of(trees: Sequence[Any]) -> Any:
    """Tensors are averaged; whatever else is alike on all workers."""
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
