"""Fragments of a model: which parameters are exchanged together, and the exchange of one fragment."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify.comm import Comm
from sparsify.core import host_sync, huge_pages
from sparsify.core.bucket import GradientBuckets, TensorSpec, local_shard
from sparsify.core.gradients import are_elements_finite, flatten_dense, gradient_strides
from sparsify.core.modes import without_torch_modes
from sparsify.core.timer import PhaseTimer
from sparsify.kernels.group_kernel import split_like
from sparsify.local.fused_exchange import moved
from sparsify.local.packed_messages import whole
from sparsify.local.strategy import LocalSteps
from sparsify.method import Dense
from sparsify.ranges import stable_repr
from sparsify.types import StepSettings
from sparsify.wrappers.engine import Engine, NonFiniteGradientError, StepReport
from sparsify.wrappers.handshake import check_workers_agree
from sparsify.wrappers.saved_states import (
    StateMismatch,
    check_finite,
    check_keys,
    check_saved_part,
    dump,
    restore,
)

BLOCK = re.compile(r"(?:^|.*?\.)\d+(?=\.)")  # `blocks.3` of `blocks.3.mlp.weight`
APART = 0x9E3779B9  # between the seeds of two fragments
Named = Sequence[tuple[str, Parameter]]


class NonFiniteDriftError(NonFiniteGradientError):
    """A worker's parameters are NaN or infinite after its local steps. Nothing of the round was exchanged."""

    def __init__(self, rank: int, step: int, layer: str) -> None:
        super().__init__(rank, step, layer)
        self.where = f"rank {rank}, round {step}: {layer} has a NaN or Inf after the local steps"
        self.args = (
            f"{self.where}; nothing of it was exchanged, and the anchor is as it was: go on from it "
            "(`with optimizer.at_anchor():`) or from a checkpoint, with a lower learning rate",
        )


class FragmentState(NamedTuple):
    """All that a worker remembers of a fragment, beside its engine's states."""

    anchor: list[Tensor]  # (n,) of each parameter; alike on all workers
    outer: Any
    own: list[Tensor]  # (n,) this worker's parameters
    drift: list[Tensor]  # (n,) the average that waits to be applied; none where nothing is on its way


class Fragment:
    """Some of a model's parameters, their anchor, and the method that averages their drift.

    Besides the optimizer's it takes the memory of the anchor, of the outer step's state and of the method's.
    The drift lies in the parameters' own memory, unless some of them outlives the exchange.

    Args:
        offset: steps by which it is due before the end of a round.
        everyone: all who must know of a NaN, where these are more than those who average.
    """

    def __init__(
        self,
        strategy: LocalSteps,
        named: Named,
        comm: Comm,
        timer: PhaseTimer | None,
        seed: int,
        select: str,
        offset: int,
        everyone: Comm | None,
    ) -> None:
        method = strategy.method
        pieces = (
            method.group_support.pieces or method.scope == "layer"
        )  # then the drift is averaged where it lies
        self.strategy, self.offset, self.everyone = strategy, offset, everyone
        whole = dict(named)
        self.all_names = [name for name, _ in named]
        gradients = GradientBuckets(
            [(name, part_of(p)) for name, p in named], method.scope, allocates=not pieces
        )
        parts = [(name, part) for name, part in gradients.parameters if part.numel()]
        self.parameters = [(name, whole[name]) for name, _ in parts]
        self.names = [name for name, _ in self.parameters]
        self.sizes = [view.numel() for view in gradients.views if view.numel()]
        self.kinds = [TensorSpec.from_tensor(part) for _, part in parts]
        self.strides = [part.stride() for _, part in parts]
        for name, part in parts:
            if gradient_strides(part) != part.stride():
                raise ValueError(
                    f"{name} has strides {part.stride()} for shape {tuple(part.shape)}: gaps, or elements "
                    "that share memory, so that its anchor can't lie alike; make it contiguous first "
                    "(`p.data = p.data.contiguous()`)"
                )
        common = gradients.buckets, comm, timer, seed, select
        self.engine = Engine(method, *common)
        # Where anchors differ too: it has the same seed, so that it meets the same workers.
        self.of_anchors = Engine(method, *common) if strategy.pulls else None
        self.of_states = [Engine(Dense("layer"), *common) for _ in strategy.states]
        self.anchor = copies_of(self.own())
        self.outer = strategy.outer.init(self.anchor)
        self.drift = list[Tensor]()  # averaged, to be applied
        self.watch: Callable[[list[Tensor]], None] | None = None  # told of each average

    def is_due(self, step: int) -> bool:
        """True if it is exchanged after this local step, counted from 1."""
        return (step + self.offset) % self.strategy.every == 0

    def is_awaited(self, step: int) -> bool:
        """True if what was sent `delay` steps before is to be applied after this local step."""
        return step > self.strategy.delay and self.is_due(step - self.strategy.delay)

    @torch.no_grad()
    def own(self) -> list[Tensor]:
        """This worker's parameters, or its shards of them, as (n,), in their own memory.

        Raises:
            ValueError: a parameter is of another shape, type, device or memory layout than at first, or
                frozen.
        """
        parts = [local_shard(p) for _, p in self.parameters]
        states = zip(self.parameters, parts, self.kinds, self.strides, strict=True)
        for (name, p), part, kind, stride in states:
            is_alike = (part.shape, part.dtype, part.device) == kind and part.stride() == stride
            if not (is_alike and p.requires_grad):
                laid_out = f", strides {part.stride()}" * (part.stride() != stride)
                now = f"{TensorSpec.from_tensor(part)}{laid_out}{'' if p.requires_grad else ', frozen'}"
                raise ValueError(
                    f"{name} was {kind} and is now {now}, in the middle of local steps; convert or freeze it "
                    "first, then wrap the optimizer anew: its anchor can't follow"
                )
        return [flatten_dense(part) for part in parts]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Of each parameter, as (n,), this worker's own and the anchor."""
        return [*zip(self.own(), self.anchor, strict=True)]

    def take(self) -> None:
        """Take what is to be sent: the parameters as they are now."""
        own = self.own()
        self.drift = own if self.strategy.is_replaced else [piece.clone() for piece in own]

    @torch.no_grad()
    @without_torch_modes
    def send(self, epoch: int, check: bool, debug: bool) -> StepReport:
        """Average the drift of what was taken, steps 2 and 3 of `sparsify.local.strategy`. Collective.

        Raises:
            NonFiniteDriftError: on all workers, where any has a NaN or Inf; nothing has changed.
        """
        strategy, engine, own, self.drift = self.strategy, self.engine, self.drift, []
        step = StepSettings(strategy.method.density_at(epoch), lr=strategy.outer.lr)
        if debug:
            facts = {"strategy": stable_repr(strategy), "round": engine.step, "density": step.step_density}
            check_workers_agree(engine.comm, facts, own[0])
        if check and self.everyone is not None:
            self._check_finite(own, self.everyone)
        elif check:
            engine.check_finite_and_find_used(own, self.names, self.sizes, None, error=NonFiniteDriftError)
        engine.step += 1
        at_once = strategy.is_plain and self.watch is None
        if at_once and (report := moved(engine, own, self.anchor, step)) is not None:
            return report
        if not strategy.averages_models:
            for piece, anchor in zip(own, self.anchor, strict=True):
                torch.sub(anchor, piece, out=piece)  # one pass over memory, where foreach would take two
        report = whole(engine, own, step)
        if self.of_anchors is not None:
            others = [piece.clone() for piece in self.anchor]
            report = StepReport.total([report, whole(self.of_anchors, others, step)])
            torch._foreach_add_(own, self.anchor)
            torch._foreach_sub_(own, others)
        self.drift = own
        if self.watch is not None:
            self.watch(own)
        return report

    def _check_finite(self, own: Sequence[Tensor], everyone: Comm) -> None:
        """Look for NaN and Inf, where workers have shards of other sizes, some of them empty.

        Raises:
            NonFiniteDriftError: on all workers, where any has one.
        """
        finite = host_sync.to_host(are_elements_finite(own))
        bad = [name for name, is_finite in zip(self.names, finite, strict=True) if not is_finite]
        first = self.all_names.index(bad[0]) if bad else -1
        everyones = everyone.all_gather(host_sync.to_device([first], own[0]))
        for rank, place in enumerate(host_sync.to_host(torch.cat(everyones))):
            if place >= 0:
                raise NonFiniteDriftError(rank, self.engine.step, self.all_names[place])

    @torch.no_grad()
    @without_torch_modes
    def apply(self) -> None:
        """Move the anchor by the average drift, and the parameters to it: step 4."""
        drift, self.drift, mix = self.drift, [], self.strategy.mix
        if not drift:  # it was moved at once; or sending has failed, and somebody goes on
            return
        if self.strategy.averages_models:
            torch._foreach_copy_(self.anchor, drift)
        else:
            self.strategy.outer.step(self.anchor, drift, self.outer)
        own = self.own()
        if mix:
            torch._foreach_mul_(own, mix)
            torch._foreach_add_(own, self.anchor, alpha=1 - mix)
        else:
            torch._foreach_copy_(own, self.anchor)

    @torch.no_grad()
    def average_states(self, step: int, inner: torch.optim.Optimizer) -> list[StepReport]:
        """Average what the inner optimizer remembers and is due after this local step. Collective.

        Raises:
            ValueError: on all workers, where any remembers nothing of that name.
        """
        reports = list[StepReport]()
        for state, engine in zip(self.strategy.states, self.of_states, strict=True):
            if step % state.every:
                continue
            is_kept = [state.key in inner.state.get(p, {}) for _, p in self.parameters]
            everyone = engine.comm.all_gather(host_sync.to_device(is_kept, self.anchor[0], torch.int32))
            for rank, theirs in enumerate(host_sync.to_host(torch.stack(everyone))):
                if not all(theirs):
                    raise ValueError(
                        f"{type(inner).__name__} keeps no {state.key!r} of {self.names[theirs.index(0)]} to "
                        f"be averaged (rank {rank}); take an inner optimizer like AdamW, and give all "
                        "parameters a gradient in the first step"
                    )
            pieces = [flatten_dense(local_shard(inner.state[p][state.key])) for _, p in self.parameters]
            reports.append(whole(engine, pieces, StepSettings(1.0)))
        return reports

    # --- saved

    def engines(self) -> list[Engine]:
        """All that averages something of this fragment."""
        return [self.engine, *self.of_states, *([] if self.of_anchors is None else [self.of_anchors])]

    def state(self) -> FragmentState:
        """All of it, as it is."""
        return FragmentState(self.anchor, self.outer, self.own(), self.drift)

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, of tensors and numbers only."""
        engines = [engine.state_dict() for engine in self.engines()]
        return {"engines": engines, "names": self.names, "state": dump(self.state())}

    def check_state(self, where: str, saved: Any) -> list[dict[str, Any]]:
        """Refuse what is no state of this fragment; returns what must be alike on all workers."""
        check_keys(where, saved, ("engines", "names", "state"))
        engines, given = self.engines(), saved["engines"]
        if not isinstance(given, list) or len(given) != len(engines):
            raise StateMismatch(f"{where}.engines must be a list of {len(engines)}")
        facts = [engine.check_state(one) for engine, one in zip(engines, given, strict=True)]
        if saved["names"] != self.names:
            raise StateMismatch(f"{where} is of other parameters; wrap the same model, in as many fragments")
        waiting = saved["state"]["drift"] if isinstance(saved["state"], dict) else []
        like = self.state()._replace(drift=self.anchor if waiting else [])
        check_saved_part(f"{where}.state", saved["state"], like)
        for name in ("anchor", "own", "drift"):
            given, expected = saved["state"][name], getattr(like, name)
            if len(given) != len(expected):
                raise StateMismatch(f"{where}.{name} has {len(given)} tensors, and must have {len(expected)}")
            for at, (tensor, own) in enumerate(zip(given, expected, strict=True)):
                if tensor.shape != own.shape:
                    raise StateMismatch(
                        f"{where}.{name}[{at}] has {tuple(tensor.shape)}, not {tuple(own.shape)}"
                    )
                check_finite(f"{where}.{name}[{at}]", tensor)
        return facts

    @torch.no_grad()
    def restore_state(self, saved: dict[str, Any]) -> None:
        """Load what was checked; the parameters become this worker's own again."""
        for engine, one in zip(self.engines(), saved["engines"], strict=True):
            engine.restore_state(one)
        found = restore(self.state(), saved["state"])
        self.outer, self.drift = found.outer, found.drift


def part_of(p: Parameter) -> Parameter:
    """Return this worker's shard of a parameter as one of its own, in the same memory; else the parameter."""
    return Parameter(local_shard(p), requires_grad=p.requires_grad) if hasattr(p, "to_local") else p


def copies_of(pieces: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each; on a CPU in one memory, in huge pages, unless they are of several types."""
    first = pieces[0]
    if not first.is_cpu or len({(piece.dtype, piece.device) for piece in pieces}) > 1:
        return [piece.clone() for piece in pieces]
    memory = huge_pages.request(first.new_empty(sum(piece.numel() for piece in pieces)))
    copies = split_like(memory, pieces)
    torch._foreach_copy_(copies, [*pieces])
    return copies


def divide_into_fragments(named: Named, count: int) -> list[list[tuple[str, Parameter]]]:
    """Divide a model's parameters among `count` fragments: blocks in turns, so that each fragment has early
    and late ones, as Streaming DiLoCo's strided pattern has them.

    A block is what a name tells up to its first number (`layers.3`), else the module that has the parameter.

    Raises:
        ValueError: fewer blocks than fragments.
    """
    blocks = [[*inside] for _, inside in groupby(named, lambda one: block_of(one[0]))]
    if len(blocks) < count:
        raise ValueError(
            f"fragments={count} of a model that has {len(blocks)} blocks of trained parameters; take at most "
            "as many fragments"
        )
    return [[one for block in blocks[at::count] for one in block] for at in range(count)]


def block_of(name: str) -> str:
    """The block that a parameter of this name is in."""
    found = BLOCK.match(name)
    return found.group() if found else name.rpartition(".")[0]
