"""The engine under all doors: a method's states of the buckets, a step of one, the look before it, saving."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, SupportsIndex
from weakref import WeakMethod

import torch
from torch import Tensor

from sparsify.comm import Comm, CountingComm
from sparsify.core import host_sync
from sparsify.core.bucket import Bucket, TensorKind
from sparsify.core.gradients import finite_elements
from sparsify.core.modes import outside_of_modes
from sparsify.core.timer import PhaseTimer
from sparsify.kernels import JointKernel, Kernel, joint_kernel_for, kernel_for, kernels_in, norms_of
from sparsify.kernels.joint import cut, split_like
from sparsify.method import Method, Sparsifier, Step, Together
from sparsify.ranges import stable_repr
from sparsify.types import BucketContext, SearchStats
from sparsify.wrappers.double_averaging import EqualGradients
from sparsify.wrappers.saved_states import FORMAT, agree_to_load, check_fits, check_form, dump, restore

MOST_TOGETHER, MOST_JOINTS = 2**31 - 1, 64  # elements that travel together; kept kernels
INFINITY = 0x7F800000  # bits of the exponent of a float32 that is no number or infinite
NORM_PIECE = 2**15  # elements, which in double precision stay in a core's cache


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
        self.rank, self.step, self.noticed = rank, step, noticed
        self.where = f"rank {rank}, step {step}: the gradient of {layer} has a NaN or Inf"
        super().__init__(self.where + late * (noticed is not None))


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
        together: False: each bucket is searched and sent by itself, as papers describe it.

    Raises:
        ValueError: the density selects nothing of this model, or `select` can't be had here.
    """

    @outside_of_modes
    def __init__(
        self,
        method: Method,
        buckets: list[Bucket],
        comm: Comm,
        timer: PhaseTimer | None,
        seed: int,
        select: str,
        together: bool = True,
    ) -> None:
        if not isinstance(seed, SupportsIndex):
            raise ValueError(f"{seed=} must be a whole number")
        self.method, self.buckets, self.step = method, buckets, 0
        self._equal_gradients = EqualGradients(comm.rank == 0)
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
        self.select, self.together = select, together
        self.sizes = [bucket.flat.numel() for bucket in buckets]
        self.joints = dict[tuple[int, ...], JointKernel]()  # by the buckets that they are for
        self.states = [
            method.init(bucket.flat, BucketContext(operator.index(seed), comm.rank, i, bucket.shapes, select))
            for i, bucket in enumerate(buckets)
        ]
        self.kinds = [
            (bucket.flat.dtype, bucket.flat.device, type(state))
            for bucket, state in zip(buckets, self.states, strict=True)
        ]

    @property
    def joins(self) -> bool:
        """True if several buckets travel in one message."""
        return self.method.joins and self.together

    @outside_of_modes
    def average(
        self, ats: Sequence[int], grads: Sequence[Tensor], steps: Sequence[Step], is_one: bool = False
    ) -> StepReport:
        """Some buckets in one step, in place; those that can travel together do. To be called with the same
        buckets in the same order on all workers.

        Args:
            grads: their gradients, as tensors (m,) that follow each other.
            steps: of each of them.
            is_one: k is that of all of them together, see `Method.mixes_tensors`.
        """
        sizes = [self.sizes[at] for at in ats]
        if not self.method.takes_pieces:
            whole = cut(grads, sizes)
            if any(len(own) > 1 for own in whole):
                return self._average_whole(ats, whole, steps)
            grads = [own[0] for own in whole]
        self.method.prepare([*grads], self.comm)
        if len(set(self.kinds)) == 1 and sum(sizes) <= MOST_TOGETHER:
            return StepReport.total(self._average(ats, grads, steps, is_one))
        reports, pieces = list[StepReport](), cut(grads, sizes)
        for places in self._groups(ats):
            few = [piece for place in places for piece in pieces[place]]
            reports += self._average(
                [ats[place] for place in places], few, [steps[at] for at in places], is_one
            )
        return StepReport.total(reports)

    def _average(
        self, ats: Sequence[int], grads: Sequence[Tensor], steps: Sequence[Step], is_one: bool
    ) -> list[StepReport]:
        """The same of one group."""
        method, comm, timer, states = self.method, self.comm, self.timer, [self.states[at] for at in ats]
        joint, sizes = self.joint_for(ats, grads, is_one), [self.sizes[at] for at in ats]
        if joint is None:
            pieces = cut(grads, sizes)
            return [
                self.report([at], step, partial(method.aggregate, grad, step, state, comm, timer))
                for at, (grad,), step, state in zip(ats, pieces, steps, states, strict=True)
            ]
        assert isinstance(method, Sparsifier)
        those = Together(joint, grads, sizes, steps, states)
        if method.joins:
            return [self.report(ats, steps[0], partial(method.aggregate_together, those, comm, timer))]
        parts, pieces = joint.split(*method.select_together(those, comm, timer)), cut(grads, sizes)
        return [
            self.report([at], step, partial(method.deliver, own, grad, step, state, comm, timer))
            for at, own, (grad,), step, state in zip(ats, parts, pieces, steps, states, strict=True)
        ]

    def _groups(self, ats: Sequence[int]) -> Iterator[list[int]]:
        """Places of buckets that may travel together: of one kind, no more elements than int32 can count."""
        kinds = dict[Any, list[int]]()
        for place, at in enumerate(ats):
            kinds.setdefault(self.kinds[at], []).append(place)
        for places in kinds.values():
            group, elements = list[int](), 0
            for place in places:
                n = self.sizes[ats[place]]
                if group and elements + n > MOST_TOGETHER:
                    yield group
                    group, elements = [], 0
                group.append(place)
                elements += n
            yield group

    def report(self, ats: Sequence[int], step: Step, act: Callable[[], int]) -> StepReport:
        """What an act, which averages these buckets and returns how many elements it sent, does."""
        before, syncs_before = self.comm.counted, host_sync.num_syncs()
        selected, n = act(), sum([self.sizes[at] for at in ats])
        sent_bytes, messages, predicted_s = (a - b for a, b in zip(self.comm.counted, before, strict=True))
        syncs = host_sync.num_syncs() - syncs_before
        return StepReport(selected, n, int(sent_bytes), syncs, int(messages), predicted_s)

    def _average_whole(
        self, ats: Sequence[int], pieces: Sequence[Sequence[Tensor]], steps: Sequence[Step]
    ) -> StepReport:
        """The same, in the buckets' own memory."""
        flats, grads = [self.buckets[at].flat for at in ats], [piece for own in pieces for piece in own]
        views = [view for flat, own in zip(flats, pieces, strict=True) for view in split_like(flat, own)]
        torch._foreach_copy_(views, grads)
        report = self.average(ats, flats, steps)
        torch._foreach_copy_(grads, views)
        return report

    def joint_for(self, ats: Sequence[int], grads: Sequence[Tensor], is_one: bool) -> JointKernel | None:
        """What searches these buckets at once, and writes to them; None: each goes its own way."""
        method = self.method
        if not isinstance(method, Sparsifier) or not self.together:
            return None
        if not (method.joins or (method.searches_together and len(ats) > 1)):
            return None
        if (joint := self.joints.get(key := (is_one, *ats))) is None:
            if len(self.joints) >= MOST_JOINTS:  # other parameters are used in each step
                self.joints.clear()
            likes = [self.buckets[at].flat for at in ats]
            kernels = [kernel for at in ats for kernel in kernels_in(self.states[at])]
            if is_one:
                likes = [likes[0].new_zeros(1).expand(sum(like.numel() for like in likes))]
                kernels = [kernel_for(likes[0], self.select)]
            joint = self.joints[key] = joint_kernel_for(likes, kernels, self.select)
        is_plain = type(joint) is JointKernel
        return None if is_plain and len(ats) == 1 and len(grads) == 1 else joint

    def residuals(self) -> dict[str, Tensor]:
        """(n,) of each parameter by its name, views: this worker's residual, where the method keeps one."""
        found = dict[str, Tensor]()
        for bucket, state in zip(self.buckets, self.states, strict=True):
            if (residual := self.method.residual(state)) is not None:
                sizes = [torch.Size(shape).numel() for shape in bucket.shapes]
                found |= zip(bucket.names, residual.split(sizes), strict=True)
        return found

    def residual_norm(self) -> Tensor:
        """Euclidean norm of this worker's residuals: a number in double precision, on their device."""
        residuals = [r for state in self.states if (r := self.method.residual(state)) is not None]
        if not residuals:
            return self.buckets[0].flat.new_zeros((), dtype=torch.float64)
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
        searching: list[Kernel | JointKernel] = [*self.joints.values(), *kernels_in(self.states)]
        kernels = [(kernel.name, kernel.stats()) for kernel in searching]
        # Where buckets are searched together, their own kernels have nothing to do.
        is_idle = not any(stats.steps for _, stats in kernels)
        found: dict[str, SearchStats] = {}
        for name, stats in kernels:
            if stats.steps or (is_idle and name != JointKernel.name):
                found[name] = found.get(name, SearchStats()) + stats
        return found

    @outside_of_modes
    def agree(
        self,
        grads: Sequence[Tensor],
        names: Sequence[str],
        sizes: Sequence[int],
        used: Sequence[bool] | None,
        looks: bool = True,
        error: type[NonFinite] = NonFinite,
        among: Comm | None = None,
    ) -> list[bool]:
        """Of each parameter, has any worker used it? One host synchronisation and a small allgather; and
        again where a norm is not finite.

        Args:
            grads: tensors (m,) that follow each other, each the gradients of whole parameters.
            names, sizes: of each parameter.
            used: of each parameter, has this worker used it? None: all workers use all.
            looks: at the gradients, too.
            among: all who must know; by default those who average.

        Raises:
            NonFinite: `error`, on all workers if any has a NaN or Inf; residuals are untouched.
        """
        among = among or self.comm
        norms = norms_of(grads, sizes) if looks else grads[0].new_ones(len(sizes), dtype=torch.float32)
        told = [norms.view(torch.int32)]
        if used is not None:
            told.append(host_sync.to_device(used, norms, torch.int32))
        everyone = torch.stack(among.all_gather(torch.stack(told)))  # (workers, 1 or 2, parameters)
        bits = everyone[:, 0]
        facts = [(bits & INFINITY == INFINITY).any(), (bits == bits[0]).all(), bits.any()]
        if used is not None:
            facts.append(everyone[:, 1].any(dim=0))
        is_infinite, is_alike, is_any, *anywhere = host_sync.to_host(
            torch.cat([fact.reshape(-1) for fact in facts])
        )
        if is_infinite:
            stretches = [piece for own in cut(grads, sizes) for piece in own or [grads[0][:0]]]
            flags = among.all_gather(finite_elements(stretches).int())
            for rank, theirs in enumerate(host_sync.to_host(torch.stack(flags))):
                if not all(theirs):  # else a norm has overflowed
                    raise error(rank, self.step, names[theirs.index(0)])
        if looks and is_any and among.size > 1:
            self._equal_gradients.look(self.step, is_alike)
        return anywhere if used is not None else [True] * len(sizes)

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, of tensors and numbers only: save it per rank, beside model and optimizer."""
        own = self._described()
        return {**own, "buckets": [{**bucket, "state": dump(bucket["state"])} for bucket in own["buckets"]]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. All workers call it together, and either all load theirs or
        none does.

        Raises:
            StateMismatch: one is another method's, another model's, another worker's, of another step than
                the others', or broken.
        """
        agree_to_load(self.comm, self.buckets[0].flat.device, partial(self.check_state, saved))
        self.restore_state(saved)

    def check_state(self, saved: Any) -> dict[str, Any]:
        """Refuse what is no state of this worker's; returns what must be the same on all workers."""
        check_form(saved)
        check_fits(saved, self._described())
        return {"step": saved["step"]}

    def restore_state(self, saved: Mapping[str, Any]) -> None:
        """Load what was checked."""
        self.step = saved["step"]
        self.states = [
            restore(state, bucket["state"])
            for state, bucket in zip(self.states, saved["buckets"], strict=True)
        ]

    def _described(self) -> dict[str, Any]:
        """What a saved state of this worker's has, with the states as they are."""
        buckets = [
            {"names": list(bucket.names), "shapes": [list(shape) for shape in bucket.shapes], "state": state}
            for bucket, state in zip(self.buckets, self.states, strict=True)
        ]
        who = {"rank": self.comm.rank, "size": self.comm.size}
        return {
            "format": FORMAT,
            "method": stable_repr(self.method),
            "step": self.step,
            **who,
            "buckets": buckets,
        }


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
