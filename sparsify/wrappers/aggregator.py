"""The engine together with the gradients of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from sparsify.comm import Comm
from sparsify.core.gradients import FlatGradients, InPlaceGradients
from sparsify.core.timer import PhaseTimer
from sparsify.method import Method
from sparsify.ranges import repr_without_addresses
from sparsify.types import SelectionHook, StepSettings, num_selected
from sparsify.wrappers.engine import Engine, StepReport
from sparsify.wrappers.handshake import check_workers_agree, tensor_facts


class Aggregator(Engine):
    """A method applied to one worker's model, whose gradients it collects in buckets and averages.

    Args:
        comm: is wrapped in a `CountingComm`, unless it counts already.
        debug: before each step compare method, step, k and parameters over the workers, by one small
            allgather; without it, workers that disagree hang, or exchange nonsense.
        select: which kernel searches the buckets: `torch`, plain operators; `fused`, one pass over memory;
            `auto`: see `sparsify.kernels.make_kernel`. Of equal magnitudes at the border these may differ.
        group_buckets: False: each bucket is searched and sent by itself, as papers describe it.
        flat_gradients: True: backpropagation adds to flat gradients, which it finds cleared. False: gradients
            stay where it computes them, for methods that can read them there.

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
        group_buckets: bool = True,
        flat_gradients: bool = True,
    ) -> None:
        make = (
            FlatGradients if flat_gradients or not method.group_support.accepts_pieces else InPlaceGradients
        )
        self.source = make(parameters, method.scope)
        self.debug = debug
        self.more_facts: Callable[[], Mapping[str, Any]] = dict  # that `debug` compares
        super().__init__(method, self.source.buckets, comm, timer, seed, select, group_buckets)

    @property
    def gradients(self) -> FlatGradients:
        """The flat gradients; not to be asked for with `flat_gradients=False`."""
        assert isinstance(self.source, FlatGradients)
        return self.source

    def aggregate(
        self,
        epoch: int = 0,
        lr: float | Sequence[float] = 1.0,
        selection_hook: SelectionHook | None = None,
        grads: Sequence[Tensor] | None = None,
    ) -> StepReport:
        """Replace all gradients by their averages over the workers.

        Args:
            epoch: counted from 0, for the density schedule.
            lr: the optimizer's, for feedback in the learning-rate domain; or one for each bucket.
            selection_hook: see `StepSettings`.
            grads: as `source.collect` returned them; None: the flat gradients, as they are.
        """
        steps = self.begin_step(epoch, lr, selection_hook)
        tensors = self.source.tensors_in_bucket_order(self.gradients.views if grads is None else grads)
        return self.average(self.bucket_gradients(tensors, steps))

    def begin_step(
        self, epoch: int, lr: float | Sequence[float], selection_hook: SelectionHook | None = None
    ) -> list[StepSettings]:
        """Count a step, and return its values for each bucket, the same on all workers.

        Arguments as of `aggregate`.
        """
        steps = self.make_step_settings(epoch, lr, selection_hook)
        if self.debug:
            ks = [num_selected(size, steps[0].step_density) for size in self.sizes]
            facts = {
                "method": repr_without_addresses(self.method),
                "step": self.step,
                "k": sum(ks),
                "buckets": len(ks),
            }
            facts |= tensor_facts("parameter", self.source.named_parameters)
            check_workers_agree(self.comm, {**facts, **self.more_facts()}, self.source.flat)
        self.step += 1
        return steps
