"""The engine under all wrappers: a method's state for each bucket, and the averaging of their gradients.

Under DDP, plain averaging needs no engine: DDP does it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, SupportsIndex
from weakref import WeakMethod

import torch
from torch import Tensor

from sparsify.bucket_group import BucketGradients, BucketGroup
from sparsify.comm import Comm, CountingComm
from sparsify.core import host_sync
from sparsify.core.bucket import Bucket, TensorSpec
from sparsify.core.gradients import are_elements_finite
from sparsify.core.grouping import group_consecutive_indices
from sparsify.core.modes import without_torch_modes
from sparsify.core.timer import PhaseTimer
from sparsify.kernels import (
    GroupKernel,
    SelectionKernel,
    find_kernels,
    make_group_kernel,
    make_kernel,
    stretch_norms,
)
from sparsify.kernels.group_kernel import divide_into_stretches, split_like
from sparsify.method import Method, Sparsifier
from sparsify.ranges import repr_without_addresses
from sparsify.types import BucketContext, SearchStats, SelectionHook, StepSettings
from sparsify.wrappers.double_averaging import EqualGradientsMonitor
from sparsify.wrappers.saved_states import (
    FORMAT,
    check_all_can_load,
    check_saved_layout,
    check_saved_matches,
    dump,
    restore,
)

MAX_GROUP_ELEMENTS = 2**31 - 1  # elements that travel together
MAX_GROUP_KERNELS = 64  # that are kept
INFINITY = 0x7F800000  # bits of the exponent of a float32 that is no number or infinite
NORM_PIECE = 2**15  # elements, which in double precision stay in a core's cache


class NonFiniteGradientError(ArithmeticError):
    """The error that a gradient is NaN or infinite.

    Args:
        noticed_after: the step after which it was noticed, where that was too late to keep it out.
    """

    sentence: ClassVar[str] = "rank {rank}, step {step}: the gradient of {layer} has a NaN or Inf"
    consequence: ClassVar[str] = ""  # the end of the message

    def __init__(self, rank: int, step: int, layer: str, noticed_after: int | None = None) -> None:
        self.rank = rank
        self.step = step
        self.noticed_after = noticed_after
        consequence = self.consequence
        if noticed_after is not None:
            consequence = (
                f"; noticed after step {noticed_after}, so weights and residuals may hold it: go back to the "
                "last checkpoint"
            )
        self.where = self.sentence.format(rank=rank, step=step, layer=layer)
        super().__init__(self.where + consequence)


class PartlyDeliveredError(NonFiniteGradientError):
    """The error that a gradient is NaN or infinite, after others of its step were delivered."""

    consequence = (
        "; it reached no residual, but with overlap=True gradients that came before it were delivered "
        "already, and are missing from their residuals: go on from a checkpoint"
    )


class StepReport(NamedTuple):
    """A report of what a worker sent in one step, in numbers."""

    selected: int  # elements sent
    num_elements: int  # of which they were selected
    wire_bytes: int  # bytes sent, as the communicator counted them
    host_syncs: int  # how often the host waited for the device
    messages: int  # latency terms of what was sent, as the communicator counted them
    predicted_s: float = 0.0  # seconds that this should take, where the communicator knows its links

    @property
    def sent_density(self) -> float:
        """The share of the elements that was sent; a method's density is the share that was asked for."""
        return self.selected / self.num_elements

    @property
    def density(self) -> float:
        """Another name for `sent_density`."""
        return self.sent_density

    @classmethod
    def total(cls, reports: Sequence[StepReport]) -> StepReport:
        """Return the sum of the reports of several buckets."""
        return cls(*(sum(numbers) for numbers in zip(*reports, strict=True)))


class Engine:
    """A method applied to the buckets of one worker's model: it keeps their states and averages gradients.

    Args:
        buckets: numbered as what is drawn for them.
        comm: is wrapped in a `CountingComm`, unless it counts already.
        select: which kernel searches the buckets, see `sparsify.kernels.make_kernel`.
        group_buckets: False: each bucket is searched and sent by itself, as papers describe it.

    Raises:
        ValueError: the density selects nothing of this model, or `select` can't be had here.
    """

    @without_torch_modes
    def __init__(
        self,
        method: Method,
        buckets: list[Bucket],
        comm: Comm,
        timer: PhaseTimer | None,
        seed: int,
        select: str,
        group_buckets: bool = True,
    ) -> None:
        if not isinstance(seed, SupportsIndex):
            raise ValueError(f"{seed=} must be a whole number")
        self.method = method
        self.buckets = buckets
        self.step = 0
        self._equal_gradients = EqualGradientsMonitor(comm.rank == 0)
        self.comm = comm if isinstance(comm, CountingComm) else CountingComm(comm)
        self.timer = timer or PhaseTimer("production")
        self.sizes = [bucket.flat.numel() for bucket in buckets]
        self.num_elements = sum(self.sizes)  # without gaps between buckets
        if not self.num_elements:
            raise ValueError("there is nothing to aggregate: all parameters are empty")
        density = method.density_at(10**9)
        if int(density * self.num_elements) < 1:
            raise ValueError(
                f"density={density:g} of {self.num_elements} gradients selects none (k = 0); the smallest "
                f"density that selects one is {1 / self.num_elements:.3g}"
            )
        self.select = select
        self.groups_buckets = group_buckets
        self.group_kernels = dict[tuple[int, ...], GroupKernel]()  # by the numbers of their buckets
        self.states = [
            method.init(bucket.flat, BucketContext(operator.index(seed), comm.rank, i, bucket.shapes, select))
            for i, bucket in enumerate(buckets)
        ]
        self.kinds = [
            (bucket.flat.dtype, bucket.flat.device, type(state))
            for bucket, state in zip(buckets, self.states, strict=True)
        ]

    @property
    def sends_one_message(self) -> bool:
        """True if several buckets travel in one message."""
        return self.method.group_support.one_message and self.groups_buckets

    def make_step_settings(
        self, epoch: int, lr: float | Sequence[float], selection_hook: SelectionHook | None = None
    ) -> list[StepSettings]:
        """Return the settings of a step for each bucket.

        Args:
            epoch: counted from 0, for the density schedule.
            lr: the optimizer's, or one for each bucket.
        """
        step = StepSettings(self.method.density_at(epoch), selection_hook=selection_hook)
        if isinstance(lr, Sequence):
            return [step._replace(lr=rate) for rate in lr]
        return [step._replace(lr=lr)] * len(self.buckets)

    def bucket_gradients(
        self,
        consecutive_tensors: Sequence[Tensor],
        steps: Sequence[StepSettings],
        bucket_numbers: Sequence[int] | None = None,
    ) -> BucketGradients:
        """Return the gradients of buckets, given tensors (m,) that hold them one after the other.

        Args:
            consecutive_tensors: of any lengths; one may hold several buckets.
            steps: of each bucket in turn.
            bucket_numbers: of these buckets; None: all.
        """
        numbers = range(len(self.buckets)) if bucket_numbers is None else bucket_numbers
        sizes = [self.sizes[number] for number in numbers]
        states = [self.states[number] for number in numbers]
        return BucketGradients(consecutive_tensors, sizes, numbers, steps, states)

    @without_torch_modes
    def average(self, gradients: BucketGradients, shares_k: bool = False) -> StepReport:
        """Replace gradients by their average over the workers, in place.

        Buckets that can travel together do. Collective: all workers call it with the same buckets in the same
        order.

        Args:
            shares_k: k is that of all buckets together, see `GroupSupport.shared_k`.
        """
        tensors = [*gradients.tensors]
        if not self.method.group_support.accepts_pieces:
            if any(len(pieces) > 1 for pieces in gradients.pieces):
                return self._average_copies(gradients, shares_k)
            tensors = [piece for pieces in gradients.pieces for piece in pieces]
        self.method.prepare_gradients_in_place(tensors, self.comm)
        reports = list[StepReport]()
        for group in self._divide_into_groups(gradients):
            reports += self._average_group(group, shares_k)
        return StepReport.total(reports)

    def _average_group(self, gradients: BucketGradients, shares_k: bool) -> list[StepReport]:
        """Average buckets of one kind: together as far as the method can, else one after the other."""
        method = self.method
        kernel = self.kernel_for_group(gradients, shares_k)
        if kernel is None:
            return [self._average_alone(gradient, method.aggregate) for gradient in gradients.split()]
        assert isinstance(method, Sparsifier)
        group = BucketGroup(gradients, kernel)
        if method.group_support.one_message:
            return [
                self.run_and_report(gradients, partial(method.aggregate_group, group, self.comm, self.timer))
            ]
        syncs_before = host_sync.num_syncs()
        selections = kernel.split_by_bucket(*method.select_group(group, self.comm, self.timer))
        search_syncs = host_sync.num_syncs() - syncs_before
        first, *others = (
            self._average_alone(gradient, partial(method.exchange_and_average, selection))
            for gradient, selection in zip(gradients.split(), selections, strict=True)
        )
        return [first._replace(host_syncs=first.host_syncs + search_syncs), *others]

    def _average_alone(self, gradient: BucketGradients, aggregate: Callable[..., int]) -> StepReport:
        """Average one bucket by `aggregate`, a step of the method's or the rest of one."""
        (whole,) = gradient.tensors
        act = partial(aggregate, whole, gradient.steps[0], gradient.states[0], self.comm, self.timer)
        return self.run_and_report(gradient, act)

    def _divide_into_groups(self, gradients: BucketGradients) -> Iterator[BucketGradients]:
        """Yield buckets of one kind, no more elements than int32 can count."""
        positions_by_kind = dict[Any, list[int]]()
        for position, number in enumerate(gradients.numbers):
            positions_by_kind.setdefault(self.kinds[number], []).append(position)
        for positions in positions_by_kind.values():
            for indices in group_consecutive_indices(
                [gradients.sizes[i] for i in positions], MAX_GROUP_ELEMENTS
            ):
                yield gradients.subset([positions[index] for index in indices])

    def run_and_report(self, gradients: BucketGradients, act: Callable[[], int]) -> StepReport:
        """Carry out `act`, which averages these buckets and returns how many elements it sent, and report."""
        before = self.comm.counts
        syncs_before = host_sync.num_syncs()
        num_selected = act()
        syncs = host_sync.num_syncs() - syncs_before
        sent_bytes, messages, predicted_s = (
            after - earlier for after, earlier in zip(self.comm.counts, before, strict=True)
        )
        num_elements = sum(gradients.sizes)
        return StepReport(num_selected, num_elements, int(sent_bytes), syncs, int(messages), predicted_s)

    def _average_copies(self, gradients: BucketGradients, shares_k: bool) -> StepReport:
        """Average gradients in the buckets' own memory, for methods that can't read them in pieces."""
        flats = [self.buckets[number].flat for number in gradients.numbers]
        pieces = [piece for pieces in gradients.pieces for piece in pieces]
        views = list[Tensor]()
        for flat, flat_pieces in zip(flats, gradients.pieces, strict=True):
            views += split_like(flat, flat_pieces)
        torch._foreach_copy_(views, pieces)
        report = self.average(replace(gradients, tensors=flats), shares_k)
        torch._foreach_copy_(pieces, views)
        return report

    def kernel_for_group(self, gradients: BucketGradients, shares_k: bool = False) -> GroupKernel | None:
        """Return the kernel that searches these buckets at once, and writes to them.

        None where each bucket is averaged by itself.
        """
        support = self.method.group_support
        is_worthwhile = support.one_message or (support.one_search and len(gradients.sizes) > 1)
        if not (self.groups_buckets and is_worthwhile):
            return None
        numbers = gradients.numbers
        key = (shares_k, *numbers)
        kernel = self.group_kernels.get(key)
        if kernel is None:
            if len(self.group_kernels) >= MAX_GROUP_KERNELS:  # other parameters are used in each step
                self.group_kernels.clear()
            likes = [self.buckets[number].flat for number in numbers]
            kernels = [kernel for number in numbers for kernel in find_kernels(self.states[number])]
            if shares_k:
                likes = [likes[0].new_zeros(1).expand(sum(like.numel() for like in likes))]
                kernels = [make_kernel(likes[0], self.select)]
            kernel = self.group_kernels[key] = make_group_kernel(likes, kernels, self.select)
        is_one_tensor = len(numbers) == len(gradients.tensors) == 1
        return None if is_one_tensor and type(kernel) is GroupKernel else kernel

    def residuals(self) -> dict[str, Tensor]:
        """Return this worker's residual of each parameter, views (n,) by name; {} where none is kept."""
        residual_by_name = dict[str, Tensor]()
        for bucket, state in zip(self.buckets, self.states, strict=True):
            residual = self.method.residual(state)
            if residual is not None:
                sizes = [torch.Size(shape).numel() for shape in bucket.shapes]
                residual_by_name |= zip(bucket.names, residual.split(sizes), strict=True)
        return residual_by_name

    def residual_norm(self) -> Tensor:
        """Return the Euclidean norm of this worker's residuals, () float64 on their device."""
        kept = [self.method.residual(state) for state in self.states]
        residuals = [residual for residual in kept if residual is not None]
        if not residuals:
            return self.buckets[0].flat.new_zeros((), dtype=torch.float64)
        if residuals[0].is_cuda:
            norms = torch.stack(torch._foreach_norm(residuals, dtype=torch.float64))
            return norms.square().sum().sqrt()
        # Six times as fast as a norm in another precision, which copies the whole.
        pieces = (piece.double() for residual in residuals for piece in residual.split(NORM_PIECE))
        return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum().sqrt()

    def search_stats(self) -> dict[str, SearchStats]:
        """Return the statistics of the kernels that searched the buckets, by the kernel's name.

        On a GPU one host synchronization for each kernel.
        """
        kernels: list[SelectionKernel | GroupKernel] = [
            *self.group_kernels.values(),
            *find_kernels(self.states),
        ]
        named_stats = [(kernel.name, kernel.stats()) for kernel in kernels]
        # Where buckets are searched in a group, their own kernels have nothing to do.
        is_idle = not any(stats.steps for _, stats in named_stats)
        stats_by_name = dict[str, SearchStats]()
        for name, stats in named_stats:
            if stats.steps or (is_idle and name != GroupKernel.name):
                stats_by_name[name] = stats_by_name.get(name, SearchStats()) + stats
        return stats_by_name

    @without_torch_modes
    def check_finite_and_find_used(
        self,
        grads: Sequence[Tensor],
        names: Sequence[str],
        sizes: Sequence[int],
        used_here: Sequence[bool] | None,
        checks_finite: bool = True,
        error: type[NonFiniteGradientError] = NonFiniteGradientError,
        comm: Comm | None = None,
        unit: int | None = None,
    ) -> list[bool]:
        """Check all workers' gradients for NaN and Inf, and find the parameters that any worker used.

        Collective: one host synchronization and a small all-gather; another one where a norm is not finite.

        Args:
            grads: tensors (m,) that follow each other, each the gradients of whole parameters.
            names, sizes: of each parameter.
            used_here: whether this worker used each parameter; None: all workers use all.
            checks_finite: False: only find the used parameters.
            comm: of all workers who must know; by default those who average.
            unit: the number of what is averaged, where workers could come to something else.

        Returns:
            For each parameter whether any worker used it.

        Raises:
            ValueError: another worker averages another unit.
            NonFiniteGradientError: `error`, on all workers if any has a NaN or Inf; residuals are untouched.
        """
        comm = comm or self.comm
        if checks_finite:
            norms = stretch_norms(grads, sizes)
        else:
            norms = grads[0].new_ones(len(sizes), dtype=torch.float32)
        rows = [norms.view(torch.int32)]
        if used_here is not None:
            rows.append(host_sync.to_device(used_here, norms, torch.int32))
        if unit is not None:
            rows.append(torch.full_like(rows[0], unit))
        gathered = torch.stack(comm.all_gather(torch.stack(rows)))  # (workers, rows, parameters)
        bits = gathered[:, 0]
        facts = [(bits & INFINITY == INFINITY).any(), (bits == bits[0]).all(), bits.any()]
        if used_here is not None:
            facts.append(gathered[:, 1].any(dim=0))
        if unit is not None:
            facts.append((gathered[:, -1] == unit).all())
        is_infinite, is_alike, has_any, *used_anywhere = host_sync.to_host(
            torch.cat([fact.reshape(-1) for fact in facts])
        )
        if unit is not None and not used_anywhere.pop():
            raise ValueError(
                f"workers came to different units in this backward pass (this one to {names[0]}), whose "
                "gradients can't be averaged; let all use the same units in the same order, or make one unit "
                "of the parts that only some use and of one that all use, with "
                "model.set_reduce_scatter_unused_params(True)"
            )
        if is_infinite:
            nothing = grads[0][:0]
            stretches = [
                piece for pieces in divide_into_stretches(grads, sizes) for piece in pieces or [nothing]
            ]
            flags_by_rank = comm.all_gather(are_elements_finite(stretches).int())
            for rank, flags in enumerate(host_sync.to_host(torch.stack(flags_by_rank))):
                if not all(flags):  # else a norm has overflowed
                    raise error(rank, self.step, names[flags.index(0)])
        if checks_finite and has_any and comm.size > 1:
            self._equal_gradients.record(self.step, is_alike)
        return used_anywhere or [True] * len(sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state, of tensors and numbers only; save it per rank."""
        saved: dict[str, Any] = dump(self.uncopied_state_dict())
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Collective: either all workers load theirs or none does.

        Raises:
            StateMismatch: one is another method's, another model's, another worker's, of another step than
                the others', or broken.
        """
        check_all_can_load(
            self.comm, self.buckets[0].flat.device, partial(self.check_state_and_collect_facts, saved)
        )
        self.restore_checked_state(saved)

    def check_state_and_collect_facts(self, saved: Any) -> dict[str, Any]:
        """Refuse what is no state of this worker's, and return what must be the same on all workers."""
        check_saved_layout(saved)
        check_saved_matches(saved, self.uncopied_state_dict())
        return {"step": saved["step"]}

    def restore_checked_state(self, saved: Mapping[str, Any]) -> None:
        """Load a state that `check_state_and_collect_facts` let pass."""
        self.step = saved["step"]
        self.states = [
            restore(state, bucket["state"])
            for state, bucket in zip(self.states, saved["buckets"], strict=True)
        ]

    def uncopied_state_dict(self) -> dict[str, Any]:
        """Return the content of this worker's saved state, with the methods' states as they are."""
        buckets = [
            {"names": list(bucket.names), "shapes": [list(shape) for shape in bucket.shapes], "state": state}
            for bucket, state in zip(self.buckets, self.states, strict=True)
        ]
        return {
            "format": FORMAT,
            "method": repr_without_addresses(self.method),
            "step": self.step,
            "rank": self.comm.rank,
            "size": self.comm.size,
            "buckets": buckets,
        }


def weak_callback(method: Callable[..., None], *first: Any) -> Callable[..., None]:
    """Return a hook that calls a method as long as its object lives; what it is registered with lives longer.

    Args:
        first: arguments that the method gets before those of the hook.
    """
    reference = WeakMethod(method)

    def hook(*rest: Any) -> None:
        call = reference()
        if call is not None:
            call(*first, *rest)

    return hook


def check_bucket_spec_unchanged(bucket: Tensor, like: Tensor, name: str) -> None:
    """Refuse a bucket that is not the one whose state is kept."""
    before = TensorSpec.from_tensor(like)
    now = TensorSpec.from_tensor(bucket)
    if now != before:
        raise ValueError(
            f"bucket {name} was {before} and is now {now}; its residual can't follow: build the state anew"
        )
