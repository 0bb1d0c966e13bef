"""Observers of a step: captured energy, and looks at what a worker selects from and what it selects.

Looks tell how values are distributed, what selections of any density would leave out, and whether the same
places are selected again later.

Each look is some lines of the log, by `what`:

histogram  of a tensor's values: x in RMS from 0, the value a density. Shi et al. 2019.
size       how many elements a tensor has, in the first step only.
left_out   ||u - TopK(u)||^2 / ||u||^2, over k/d. The same.
heat       the share of a tensor's slice that was selected, over the slice. Zhang's Stable Top-K slides.
kept       of the regions selected some steps earlier the share that is selected again, over these steps;
           regions are so many elements one after another, of which as large a share is selected as of
           elements.
shuffled   the same for as many regions drawn at random: what chance would keep.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from analysis.records.schema import ALL, REGIONS, SLICES
from experiments.training.step_log import MeasurementLog
from sparsify.core.bucket import Bucket
from sparsify.types import BucketContext, SelectionHook, SparseVector

HISTOGRAM_EDGE = 6.0  # standard deviations from 0 to the last bin's end
BINS = 60
DENSITIES = tuple(10 ** (at / 4) for at in range(-16, 0))  # 0.0001 to 0.56
LAGS = (1, 2, 5, 10, 20, 50)  # looks between two that are compared
MIN_ELEMENTS = 1000  # elements; smaller tensors are not looked at by themselves
BUCKET_NUMBER = -3  # in place of a bucket's, for the generator: no bucket has it


class CapturedEnergyMeter:
    """The share ||TopK(u)||^2 / ||u||^2 over all buckets of one step, for u = gradient plus residual.

    For selections other than Top-k, what these took. Shi et al. 2019, section 3, bound what is missing from
    1.

    Tell it of each bucket: `StepSettings.selection_hook`.
    """

    def __init__(self) -> None:
        self.norms: list[Tensor] = []  # (2,) each: what is sent, and what there was

    def __call__(self, acc: Tensor, sent: SparseVector) -> None:
        self.norms.append(
            torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in (sent.values, acc)])
        )

    def captured_share(self) -> float | None:
        """Return the share in [0, 1].

        None where nobody told, as of methods that select nothing, and of zeros. One host synchronisation.
        """
        if not self.norms:
            return None
        sent, total = torch.stack(self.norms).square().sum(dim=0).tolist()
        return sent / total if total else None


def combine_hooks(first: SelectionHook | None, second: SelectionHook | None) -> SelectionHook | None:
    """Return a hook that calls both hooks of each bucket; the other one where one is None."""
    if first is None or second is None:
        return first or second

    def tell(acc: Tensor, sent: SparseVector) -> None:
        first(acc, sent)
        second(acc, sent)

    return tell


class SelectionObserver:
    """The looks of one worker, over its training.

    Earlier looks are in no checkpoint: after a resumption nothing is compared with what was before.

    Args:
        every: steps between two looks.
    """

    def __init__(self, buckets: Sequence[Bucket], log: MeasurementLog, every: int, seed: int) -> None:
        self.log = log
        self.every = every
        self.buckets = buckets
        self.earlier: dict[str, deque[Tensor]] = {}  # of each tensor and size of regions, the newest last
        self.draws = BucketContext(seed, 0, BUCKET_NUMBER).make_generator_for_rank(torch.device("cpu"))

    def hook_for_step(self, step: int) -> SelectionHook | None:
        """Return the hook that watches this step; None for a step that is not looked at."""
        if step % self.every:
            return None
        buckets = iter(self.buckets)

        def watch(acc: Tensor, sent: SparseVector) -> None:
            self._look(step, next(buckets), acc.detach(), sent)

        return watch

    def _look(self, step: int, bucket: Bucket, acc: Tensor, sent: SparseVector) -> None:
        values = acc.float().cpu()
        selected = torch.zeros(len(values), dtype=torch.bool)
        selected[sent.indices.long().cpu()] = True
        is_whole = len(self.buckets) == 1
        sizes = [math.prod(shape) for shape in bucket.shapes]
        self._note(
            step,
            "left_out",
            ALL if is_whole else bucket.names[0],
            DENSITIES,
            energy_shares_left_out_by_topk(values),
        )
        tensors = zip(bucket.names, values.split(sizes), selected.split(sizes), strict=True)
        looked_at = [tensor for tensor in tensors if len(tensor[1]) >= MIN_ELEMENTS]
        for name, tensor_values, tensor_selected in (
            [*looked_at, (ALL, values, selected)] if is_whole else looked_at
        ):
            self._note(step, "histogram", name, *histogram_in_rms_units(tensor_values))
            if name != ALL:
                self._note(step, "heat", name, range(SLICES), selected_share_of_slices(tensor_selected))
            if step == 0:
                self._note(step, "size", name, [0], [float(len(tensor_values))])
            density = float(tensor_selected.double().mean())
            for size in REGIONS:
                self._compare(
                    step,
                    f"{name}/{size}",
                    selected_region_mask(tensor_values, tensor_selected, size, density),
                )

    def _compare(self, step: int, name: str, selected: Tensor) -> None:
        """Remember the selected regions, and note how many of those selected earlier are among them."""
        earlier = self.earlier.setdefault(name, deque(maxlen=max(LAGS)))
        count = int(selected.sum())
        lags = [lag for lag in LAGS if lag <= len(earlier)]
        if count and lags:
            drawn = torch.zeros_like(selected)
            drawn[torch.randperm(len(selected), generator=self.draws)[:count]] = True
            steps = [lag * self.every for lag in lags]
            for what, mask in (("kept", selected), ("shuffled", drawn)):
                shares = [
                    float((earlier[-lag] & mask).sum() / earlier[-lag].sum().clamp(min=1)) for lag in lags
                ]
                self._note(step, what, name, steps, shares)
        earlier.append(selected)

    def _note(self, step: int, what: str, name: str, xs: Sequence[float], values: Sequence[float]) -> None:
        if all(map(math.isfinite, values)):  # of what diverged there is nothing to see
            self.log.add_line("look", step=step, what=what, of=name, xs=[*map(float, xs)], values=[*values])


def histogram_in_rms_units(values: Tensor) -> tuple[list[float], list[float]]:
    """Middles of bins in standard deviations, and the density of the values there; nothing of zeros."""
    scale = float(values.square().mean().sqrt())
    if not scale:
        return [], []
    width = 2 * HISTOGRAM_EDGE / BINS
    counts = torch.histc(values / scale, BINS, -HISTOGRAM_EDGE, HISTOGRAM_EDGE)
    middles = [-HISTOGRAM_EDGE + width * (index + 0.5) for index in range(BINS)]
    densities: list[float] = (counts / len(values) / width).tolist()
    return middles, densities


def energy_shares_left_out_by_topk(values: Tensor) -> list[float]:
    """Return the share of the energy that Top-k leaves out, at each of `DENSITIES`."""
    energies = values.double().square().sort(descending=True).values.cumsum(0)
    total = float(energies[-1])
    ks = [max(1, int(density * len(values))) for density in DENSITIES]
    return [1 - float(energies[k - 1]) / total for k in ks] if total else [0.0] * len(ks)


def selected_share_of_slices(selected: Tensor) -> list[float]:
    """Return the share of each of `SLICES` slices that was selected."""
    return [float(piece.double().mean()) for piece in selected.tensor_split(SLICES)]


def selected_region_mask(values: Tensor, selected: Tensor, region_size: int, density: float) -> Tensor:
    """Return which regions of `region_size` elements are selected: those with the largest norms.

    Their share is `density`. Of single elements, those that were selected.
    """
    if region_size == 1:
        return selected
    norms = functional.pad(values, (0, -len(values) % region_size)).view(-1, region_size).norm(dim=1)
    count = max(1, round(density * len(norms)))
    is_selected = torch.zeros(len(norms), dtype=torch.bool)
    is_selected[norms.topk(count).indices] = True
    return is_selected
