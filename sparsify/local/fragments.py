"""Fragments of a model: parameters that are exchanged together in local steps, and their exchange."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify.comm import Comm
from sparsify.core import host_sync, huge_pages
from sparsify.core.bucket import GradientBuckets, TensorSpec, local_shard
from sparsify.core.gradients import are_elements_finite, gradient_strides, view_flat_in_memory_order
from sparsify.core.modes import without_torch_modes
from sparsify.core.timer import PhaseTimer
from sparsify.kernels.group_kernel import split_like
from sparsify.local.fused_exchange import try_fused_exchange
from sparsify.local.packed_messages import average_in_few_messages
from sparsify.local.strategy import LocalSteps
from sparsify.method import Dense
from sparsify.ranges import repr_without_addresses
from sparsify.types import StepSettings
from sparsify.wrappers.engine import Engine, NonFiniteGradientError, StepReport
from sparsify.wrappers.handshake import check_workers_agree
from sparsify.wrappers.saved_states import (
    StateMismatch,
    check_keys,
    check_saved_part,
    dump,
    restore,
)

BLOCK_PATTERN = re.compile(r"(?:^|.*?\.)\d+(?=\.)")  # `blocks.3` of `blocks.3.mlp.weight`
SEED_DISTANCE = 0x9E3779B9  # between the seeds of two fragments
NamedParameters = Sequence[tuple[str, Parameter]]


class NonFiniteDriftError(NonFiniteGradientError):
    """The error that parameters are NaN or infinite after local steps; nothing of the round was exchanged."""

    sentence = "rank {rank}, round {step}: {layer} has a NaN or Inf after the local steps"
    consequence = (
        "; nothing of it was exchanged, and the anchor is as it was: go on from it "
        "(`with optimizer.at_anchor():`) or from a checkpoint, with a lower learning rate"
    )


class FragmentState(NamedTuple):
    """The state of a fragment on one worker, beside its engines' states."""

    anchor: list[Tensor]  # (n,) of each parameter; alike on all workers
    outer: Any
    own: list[Tensor]  # (n,) this worker's parameters
    drift: list[Tensor]  # (n,) the average that waits to be applied; empty where none waits


class Fragment:
    """A part of a model's parameters, with their anchor and the method that averages their drift.

    Besides the optimizer's memory it takes that of the anchor, of the outer step's state and of the method's.
    The drift lies in the parameters' own memory, unless some of them outlives the exchange.

    Args:
        steps_early: it is due so many steps before the end of a round.
        nan_check_comm: of all workers who must know of a NaN, where these are more than those who average.

    Attributes:
        on_average: called with each average of the drift, tensors (n,).
    """

    def __init__(
        self,
        strategy: LocalSteps,
        named_parameters: NamedParameters,
        comm: Comm,
        timer: PhaseTimer | None,
        seed: int,
        select: str,
        steps_early: int,
        nan_check_comm: Comm | None,
    ) -> None:
        method = strategy.method
        # Then the drift is averaged where it lies.
        is_averaged_in_pieces = method.group_support.accepts_pieces or method.scope == "layer"
        self.strategy = strategy
        self.steps_early = steps_early
        self.nan_check_comm = nan_check_comm
        self.all_names = [name for name, _ in named_parameters]
        gradients = GradientBuckets(
            [(name, shard_as_parameter(p)) for name, p in named_parameters],
            method.scope,
            allocates=not is_averaged_in_pieces,
        )
        parameter_by_name = dict(named_parameters)
        shards = [(name, shard) for name, shard in gradients.named_parameters if shard.numel()]
        self.names = [name for name, _ in shards]
        self.parameters = [(name, parameter_by_name[name]) for name in self.names]
        self.sizes = [view.numel() for view in gradients.views if view.numel()]
        self.specs = [TensorSpec.from_tensor(shard) for _, shard in shards]
        self.strides = [shard.stride() for _, shard in shards]
        for name, shard in shards:
            if gradient_strides(shard) != shard.stride():
                raise ValueError(
                    f"{name} has strides {shard.stride()} for shape {tuple(shard.shape)}: gaps, or elements "
                    "that share memory, so that its anchor can't lie alike; make it contiguous first "
                    "(`p.data = p.data.contiguous()`)"
                )
        common = (gradients.buckets, comm, timer, seed, select)
        self.engine = Engine(method, *common)
        # It has the same seed, so that a worker meets the same others.
        self.anchor_engine = Engine(method, *common) if strategy.has_different_anchors else None
        self.state_engines = [Engine(Dense("layer"), *common) for _ in strategy.states]
        self.anchor = clone_tensors(self.flat_parameters())
        self.outer_state = strategy.outer.init(self.anchor)
        self.drift = list[Tensor]()  # captured parameters that are to be averaged, then their average drift
        self.on_average: Callable[[list[Tensor]], None] | None = None

    def is_due(self, step: int) -> bool:
        """Return True if this fragment is exchanged after a local step, counted from 1."""
        return (step + self.steps_early) % self.strategy.every == 0

    def is_average_due(self, step: int) -> bool:
        """Return True if the average that was begun `delay` steps before is applied after a local step."""
        return 0 < self.strategy.delay < step and self.is_due(step - self.strategy.delay)

    @torch.no_grad()
    def flat_parameters(self) -> list[Tensor]:
        """Return this worker's parameters, or its shards of them, as views (n,) of their own memory.

        Raises:
            ValueError: a parameter is of another shape, type, device or memory layout than at first, or
                frozen.
        """
        flat = list[Tensor]()
        for (name, p), spec, stride in zip(self.parameters, self.specs, self.strides, strict=True):
            shard = local_shard(p)
            if not (is_laid_out_as(shard, spec, stride) and p.requires_grad):
                layout = f", strides {shard.stride()}" * (shard.stride() != stride)
                actual = f"{TensorSpec.from_tensor(shard)}{layout}{'' if p.requires_grad else ', frozen'}"
                raise ValueError(
                    f"{name} was {spec} and is now {actual}, in the middle of local steps; convert or freeze "
                    "it first, then wrap the optimizer anew: its anchor can't follow"
                )
            flat.append(view_flat_in_memory_order(shard))
        return flat

    def named_anchors(self, is_asked: Callable[[Parameter], bool]) -> list[tuple[str, Tensor, Tensor]]:
        """Return name, parameter (n,) and anchor (n,) of those asked for that lie in memory as at first."""
        return [
            (name, view_flat_in_memory_order(local_shard(p)), anchor)
            for (name, p), spec, stride, anchor in zip(
                self.parameters, self.specs, self.strides, self.anchor, strict=True
            )
            if is_asked(p) and is_laid_out_as(local_shard(p), spec, stride)
        ]

    def capture_parameters(self) -> None:
        """Take the parameters as they are now for the next `average_drift`.

        If the strategy replaces the parameters anyway, that overwrites them; else it works on a copy.
        """
        flat = self.flat_parameters()
        self.drift = flat if self.strategy.replaces_parameters else [piece.clone() for piece in flat]

    @torch.no_grad()
    @without_torch_modes
    def average_drift(self, epoch: int, check_finite: bool, check_agreement: bool) -> StepReport:
        """Average the drift of the captured parameters: steps 2 and 3 of `sparsify.local.strategy`.

        Collective. The average waits for `apply_average_if_any`.

        Args:
            check_finite: look for NaN and Inf first.
            check_agreement: compare strategy, round and density over the workers first.

        Raises:
            NonFiniteDriftError: on all workers, where any has a NaN or Inf; nothing has changed.
        """
        strategy = self.strategy
        engine = self.engine
        drift = self.drift
        self.drift = []
        step = StepSettings(strategy.method.density_at(epoch), lr=strategy.outer.lr)
        if check_agreement:
            facts = {
                "strategy": repr_without_addresses(strategy),
                "round": engine.step,
                "density": step.step_density,
            }
            check_workers_agree(engine.comm, facts, drift[0])
        if check_finite and self.nan_check_comm is not None:
            self._check_finite(drift, self.nan_check_comm)
        elif check_finite:
            engine.check_finite_and_find_used(drift, self.names, self.sizes, None, error=NonFiniteDriftError)
        engine.step += 1
        if strategy.can_fuse_exchange and self.on_average is None:
            fused_report = try_fused_exchange(engine, drift, self.anchor, step)
            if fused_report is not None:
                return fused_report
        if not strategy.averages_models:
            for piece, anchor in zip(drift, self.anchor, strict=True):
                torch.sub(anchor, piece, out=piece)  # one pass over memory, where foreach would take two
        report = average_in_few_messages(engine, drift, step)
        if self.anchor_engine is not None:
            mean_anchor = [piece.clone() for piece in self.anchor]
            anchor_report = average_in_few_messages(self.anchor_engine, mean_anchor, step)
            report = StepReport.total([report, anchor_report])
            torch._foreach_add_(drift, self.anchor)
            torch._foreach_sub_(drift, mean_anchor)
        self.drift = drift
        if self.on_average is not None:
            self.on_average(drift)
        return report

    def _check_finite(self, pieces: Sequence[Tensor], comm: Comm) -> None:
        """Refuse NaN and Inf, where workers have shards of other sizes, some of them empty.

        Raises:
            NonFiniteDriftError: on all workers, where any has one.
        """
        is_finite = host_sync.to_host(are_elements_finite(pieces))
        first_bad = -1
        if not all(is_finite):
            first_bad = self.all_names.index(self.names[is_finite.index(False)])
        first_bad_by_rank = comm.all_gather(host_sync.to_device([first_bad], pieces[0]))
        for rank, index in enumerate(host_sync.to_host(torch.cat(first_bad_by_rank))):
            if index >= 0:
                raise NonFiniteDriftError(rank, self.engine.step, self.all_names[index])

    @torch.no_grad()
    @without_torch_modes
    def apply_average_if_any(self) -> None:
        """Move the anchor by the average drift, and the parameters to the anchor: step 4.

        Nothing moves where no average waits.
        """
        drift = self.drift
        self.drift = []
        if not drift:  # the fused exchange has moved both; or averaging has failed, and somebody goes on
            return
        if self.strategy.averages_models:
            torch._foreach_copy_(self.anchor, drift)
        else:
            self.strategy.outer.step(self.anchor, drift, self.outer_state)
        parameters = self.flat_parameters()
        mix = self.strategy.mix
        if mix:
            torch._foreach_mul_(parameters, mix)
            torch._foreach_add_(parameters, self.anchor, alpha=1 - mix)
        else:
            torch._foreach_copy_(parameters, self.anchor)

    @torch.no_grad()
    def average_due_optimizer_states(
        self, step: int, inner_optimizer: torch.optim.Optimizer
    ) -> list[StepReport]:
        """Average the entries of the inner optimizer's state that are due after a local step. Collective.

        Raises:
            ValueError: on all workers, where any has no entry of that name.
        """
        reports = list[StepReport]()
        for state, engine in zip(self.strategy.states, self.state_engines, strict=True):
            if step % state.every:
                continue
            has_entry = [state.key in inner_optimizer.state.get(p, {}) for _, p in self.parameters]
            flags_by_rank = engine.comm.all_gather(
                host_sync.to_device(has_entry, self.anchor[0], torch.int32)
            )
            for rank, flags in enumerate(host_sync.to_host(torch.stack(flags_by_rank))):
                if not all(flags):
                    raise ValueError(
                        f"{type(inner_optimizer).__name__} keeps no {state.key!r} of "
                        f"{self.names[flags.index(0)]} to be averaged (rank {rank}); take an "
                        "inner optimizer like AdamW, and give all parameters a gradient in the first step"
                    )
            pieces = [
                view_flat_in_memory_order(local_shard(inner_optimizer.state[p][state.key]))
                for _, p in self.parameters
            ]
            reports.append(average_in_few_messages(engine, pieces, StepSettings(1.0)))
        return reports

    # --- saved states

    def engines(self) -> list[Engine]:
        """Return all engines that average something of this fragment."""
        anchor_engines = [] if self.anchor_engine is None else [self.anchor_engine]
        return [self.engine, *self.state_engines, *anchor_engines]

    def current_state(self) -> FragmentState:
        """Return the state without copying its tensors."""
        return FragmentState(self.anchor, self.outer_state, self.flat_parameters(), self.drift)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state, of tensors and numbers only."""
        engines = [engine.state_dict() for engine in self.engines()]
        return {"engines": engines, "names": self.names, "state": dump(self.current_state())}

    def check_state_and_collect_facts(self, where: str, saved: Any) -> list[dict[str, Any]]:
        """Refuse what is no state of this fragment; return what must be alike on all workers, by engine.

        Args:
            where: the path of `saved` in the whole saved state, for error messages.
        """
        check_keys(where, saved, ("engines", "names", "state"))
        engines = self.engines()
        saved_engines = saved["engines"]
        if not isinstance(saved_engines, list) or len(saved_engines) != len(engines):
            raise StateMismatch(f"{where}.engines must be a list of {len(engines)}")
        facts = [
            engine.check_state_and_collect_facts(part)
            for engine, part in zip(engines, saved_engines, strict=True)
        ]
        if saved["names"] != self.names:
            raise StateMismatch(f"{where} is of other parameters; wrap the same model, in as many fragments")
        saved_drift = saved["state"]["drift"] if isinstance(saved["state"], dict) else []
        expected = self.current_state()._replace(drift=self.anchor if saved_drift else [])
        check_saved_part(f"{where}.state", saved["state"], expected)
        for field in ("anchor", "own", "drift"):
            tensors = saved["state"][field]
            expected_tensors = getattr(expected, field)
            if len(tensors) != len(expected_tensors):
                raise StateMismatch(
                    f"{where}.{field} has {len(tensors)} tensors, and must have {len(expected_tensors)}"
                )
            for index, (tensor, like) in enumerate(zip(tensors, expected_tensors, strict=True)):
                check_saved_part(f"{where}.{field}[{index}]", tensor, like)
        return facts

    @torch.no_grad()
    def restore_checked_state(self, saved: dict[str, Any]) -> None:
        """Load a state, this worker's parameters among it, that `check_state_and_collect_facts` accepted."""
        for engine, saved_engine in zip(self.engines(), saved["engines"], strict=True):
            engine.restore_checked_state(saved_engine)
        restored = restore(self.current_state(), saved["state"])
        self.outer_state = restored.outer
        self.drift = restored.drift


def is_laid_out_as(shard: Tensor, spec: TensorSpec, stride: tuple[int, ...]) -> bool:
    """Return True if a shard has this shape, dtype, device and stride."""
    return (shard.shape, shard.dtype, shard.device) == spec and shard.stride() == stride


def shard_as_parameter(p: Parameter) -> Parameter:
    """Return this worker's shard of a parameter as a parameter in the same memory, or `p` if not sharded."""
    return Parameter(local_shard(p), requires_grad=p.requires_grad) if hasattr(p, "to_local") else p


def clone_tensors(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors; on a CPU in one memory, in huge pages, unless their types differ."""
    first = pieces[0]
    if not first.is_cpu or len({(piece.dtype, piece.device) for piece in pieces}) > 1:
        return [piece.clone() for piece in pieces]
    memory = huge_pages.request(first.new_empty(sum(piece.numel() for piece in pieces)))
    copies = split_like(memory, pieces)
    torch._foreach_copy_(copies, [*pieces])
    return copies


def divide_into_fragments(named_parameters: NamedParameters, count: int) -> list[list[tuple[str, Parameter]]]:
    """Divide a model's parameters among `count` fragments, which take its blocks in turns.

    So each fragment has early and late blocks, as in Streaming DiLoCo's strided pattern. A block is a layer
    of a list (`layers.3`), else the module that has the parameter.

    Raises:
        ValueError: the model has fewer blocks than fragments.
    """
    blocks = [[*block] for _, block in groupby(named_parameters, lambda named: block_name(named[0]))]
    if len(blocks) < count:
        raise ValueError(
            f"fragments={count} of a model that has {len(blocks)} blocks of trained parameters; take at most "
            "as many fragments"
        )
    return [[*chain.from_iterable(blocks[first::count])] for first in range(count)]


def block_name(parameter_name: str) -> str:
    """Return the name of a parameter's block: the name up to its first number, else its module's name."""
    match = BLOCK_PATTERN.match(parameter_name)
    return match.group() if match else parameter_name.rpartition(".")[0]
