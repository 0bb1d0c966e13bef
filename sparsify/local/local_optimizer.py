"""The optimizer of local steps: it steps on one worker alone, and averages with the others every H steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from sparsify.comm import Comm
from sparsify.core import host_sync
from sparsify.core.bucket import local_shard
from sparsify.core.timer import PhaseTimer
from sparsify.local.fragments import SEED_DISTANCE, Fragment, divide_into_fragments
from sparsify.local.guards import (
    CommunicationGuard,
    NamedAnchors,
    ParameterChangeGuard,
    ReplacedParameterGuard,
    check_steps_locally,
)
from sparsify.local.master_weights import find_parameter_copy_keys, update_parameter_copies
from sparsify.local.strategy import LocalSteps
from sparsify.ranges import NonNegativeInt, repr_without_addresses
from sparsify.wrappers.checks import check_optimizer_and_model
from sparsify.wrappers.double_averaging import find_live_modules
from sparsify.wrappers.engine import StepReport
from sparsify.wrappers.optimizer_wrapper import OptimizerWrapper, exclude_from_compile, explain_lost_worker
from sparsify.wrappers.overlap import BackgroundExecutor
from sparsify.wrappers.saved_states import StateMismatch, check_keys, check_value

LOCAL_STATE_KEYS = ("strategy", "step", "rank", "size", "fragments")  # of the part under "local"
LIVE_OPTIMIZERS: WeakSet[LocalOptimizer] = WeakSet()  # of this process


class LocalOptimizer(OptimizerWrapper):
    """An optimizer that steps on its worker alone, and averages the workers' drift every H steps.

    `sparsify.local.strategy` says what a round is, and what the drift.

    Everything that an optimizer's step can be told stays local: closures, accumulated gradients, clipping,
    schedulers (of the inner optimizer or of this one), and a GradScaler, by its usual recipe; a step that it
    skips counts as one. All workers make as many steps: one that must leave a batch out calls `skip()`.

    Parameters and buffers of rank 0 are broadcast at the beginning. Afterwards each worker's differ within a
    round; the *anchor* is common to all. Evaluate it, and save it as the model:

        with optimizer.at_anchor():
            loss = evaluate(model)
            torch.save(model.state_dict(), path)

    `state_dict()` resumes in mid-round, to the bit: it has the worker's own parameters, anchor, residual, the
    outer step's state and averages that wait to be applied. Save it per rank. Buffers, such as those of batch
    normalisation, are each worker's own and are never averaged, nor is the inner optimizer's state.

    The group is fixed: nobody joins or leaves while it trains, and as many workers resume as there were.

    Args:
        model: has all of the optimizer's parameters, and perhaps more.
        comm: the communicator of the workers that average; by default over torch.distributed's own group.
            With `overlap` the default is a new group, which all workers make here together; a communicator
            that is given is used by the thread alone.
        group: a process group, or a mesh of one dimension, in the place of a communicator.
        check: look for NaN and Inf before every exchange; all workers then raise `NonFiniteDriftError`.
        debug: before every exchange compare strategy and round over the workers.
        select: see `Aggregator`.
        steps_per_epoch: for methods that raise the density in the first epochs; or set `epoch`.
        scaler: may be named, as `sparsify.distribute` needs it for other methods; nothing depends on it.
        overlap: average in a thread, on a GPU on a stream of its own, while the steps of the strategy's
            `delay` go on. The numbers are the same. No GPU has run this yet.

    Attributes:
        last_report: a `sparsify.wrappers.engine.StepReport` of the messages that this worker sent in the last
            step: nothing in most steps. With `overlap` they are reported in the step that applies them.

    Raises:
        ValueError: the parts don't fit together, or there is no process group.
        WorkerMismatch: on all workers, where their arguments differ.
    """

    rewrap_advice = (
        "wrap it anew (the inner one, `optimizer.inner_optimizer`): a new round begins then, and the "
        "residual and the outer step's momentum are zero"
    )
    steps_locally = True
    steps = 0  # local ones so far
    worker_state_key = "local"
    missing_worker_state = (
        "anchor: it is another optimizer's, or made by get_optimizer_state_dict, which leaves it out. Save "
        "optimizer.state_dict() on every worker; or load this into the inner optimizer before it is wrapped"
    )

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        strategy: LocalSteps,
        comm: Comm | None = None,
        seed: int = 0,
        check: bool = True,
        debug: bool = False,
        select: str = "auto",
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        steps_per_epoch: int | None = None,
        scaler: GradScaler | None = None,
        overlap: bool = False,
        timer: PhaseTimer | None = None,
    ) -> None:
        def check_arguments() -> None:
            self._check_wrapped(optimizer, model)
            if overlap and not strategy.delay:
                raise ValueError(
                    "overlap=True averages while the steps of a delay go on, and delay=0 has none; build the "
                    "strategy with delay=1 or more, or leave overlap out"
                )
            if overlap and strategy.states:
                raise ValueError(
                    "overlap=True averages in a thread, where the inner optimizer's state would change while "
                    "it is averaged; leave overlap out, or states"
                )

        options = {
            "strategy": repr_without_addresses(strategy),
            "seed": seed,
            "check": check,
            "debug": debug,
            "overlap": overlap,
            "steps_per_epoch": steps_per_epoch,
        }
        super().__init__(optimizer, model, strategy.method, comm, group, None, check_arguments, options)
        self.strategy = strategy
        self.check = check
        self.debug = debug
        trained = [(name, p) for name, p in self._named_parameters if p.requires_grad]
        self._communication_guard = CommunicationGuard(optimizer, None if overlap else self.comm)

        def build_fragments() -> list[Fragment]:
            return [
                Fragment(
                    strategy,
                    named,
                    self.comm,
                    timer,
                    seed + SEED_DISTANCE * index,
                    select,
                    steps_early=index * strategy.every // strategy.fragments,
                    nan_check_comm=self._make_nan_check_comm(),
                )
                for index, named in enumerate(divide_into_fragments(trained, strategy.fragments))
            ]

        self.fragments = self._build_fragments(build_fragments)
        self.engine = self.fragments[0].engine
        self._guard_parameters()
        self._background = BackgroundExecutor(self.fragments[0].anchor[0].device) if overlap else None
        self._background_fragments = list[Fragment]()  # that the thread averages
        self._parameter_guard = ParameterChangeGuard(model, trained)
        self._replaced_guard = ReplacedParameterGuard(model, [p for _, p in trained])
        self._is_between_halves = False  # True: the inner optimizer has stepped, and the exchange follows
        self._num_at_anchor = 0  # of `with` statements that have the model at the anchor
        # This worker's values of the parameters, while the model is at the anchor.
        self._own_values = list[tuple[nn.Parameter, Tensor]]()
        self._copy_keys: list[str] | None = None  # see `find_parameter_copy_keys`; None: not looked for yet
        self._has_failed = False  # True: an exchange has failed, so that somebody may go on from the anchor
        LIVE_OPTIMIZERS.add(self)
        self.num_elements = sum(fragment.engine.num_elements for fragment in self.fragments)
        self._empty_report = StepReport(0, self.num_elements, 0, 0, 0)
        self.last_report = self._empty_report

    @exclude_from_compile
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of this worker, and the exchange that is due after it, if any.

        Returns what the inner optimizer's step returns.

        Raises:
            NonFiniteDriftError: on all workers, where an exchange is due and any worker's parameters have a
                NaN or Inf.
        """
        loss = self.step_locally(closure)
        self.exchange_if_due()
        return loss

    @exclude_from_compile
    def step_locally(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the inner optimizer's step without an exchange: the first half of `step`."""
        self._check_outside("step")
        self._reshard()
        self._claim.check_not_superseded()
        self._check_changed_by_nobody()
        self._check_frozen()
        num_parameters = sum(len(group["params"]) for group in self.inner_optimizer.param_groups)
        if self._begins_round() or num_parameters != len(self._wrapped_parameters):
            self._check_unchanged()
        if self._is_skipped_by_scaler():
            return None
        self._is_between_halves = True
        with self._step_guard.allow_step():
            if closure is not None:  # which may communicate
                return self.inner_optimizer.step(closure)
            with self._communication_guard.refuse_communication():
                return self.inner_optimizer.step()

    @exclude_from_compile
    def skip(self) -> None:
        """Leave this worker's batch out, after an error in forward or backward.

        It counts as a step in which the worker does not move. The exchange that is due after it is made.
        """
        self.inner_optimizer.zero_grad()
        self.exchange_if_due()

    @exclude_from_compile
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the inner optimizer does."""
        self.inner_optimizer.zero_grad(set_to_none)

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Give the model the anchor's parameters within, and this worker's own again afterwards.

        The anchor is alike on all workers. Of several optimizers of local steps that have parts of one model
        all go to their anchors, see `find_optimizers_of_model`.

        Raises:
            ValueError: within, from steps, exchanges and `state_dict`, which need the worker's parameters; or
                somebody else has written to the parameters, before or within.
        """
        with ExitStack() as anchors:
            for optimizer in find_optimizers_of_model(self):
                anchors.enter_context(optimizer._at_own_anchor())
            yield

    @contextmanager
    def _at_own_anchor(self) -> Iterator[None]:
        """Bring this optimizer's parameters alone to the anchor, see `at_anchor`.

        Within another such statement nothing changes: the outermost one brings the parameters back.

        Raises:
            ValueError: at the end, after that: something was written to the parameters within.
        """
        if not self._num_at_anchor:
            self._load_anchor()
        self._num_at_anchor += 1
        written: str | None = None
        try:
            yield
            if self._num_at_anchor == 1:
                written = self._find_written_at_anchor()
        finally:
            self._num_at_anchor -= 1
            if not self._num_at_anchor:
                self._load_own_values()
        if written is not None:
            raise ValueError(
                f"{written} was loaded or written to within `with optimizer.at_anchor():`, at whose end this "
                "worker's own parameters have returned, so that what was written is lost; write to a copy of "
                "the model, or load weights before sparsify.distribute or sparsify.shard"
            )

    @torch.no_grad()
    def _load_anchor(self) -> None:
        """Keep this worker's parameters, and write the anchor into the model."""
        self._reshard()
        self._check_changed_by_nobody(at_once=True, allows_anchor=True)
        _, flat_parameters, anchors = zip(*self._named_anchors(), strict=True)
        parameters = [p for fragment in self.fragments for _, p in fragment.parameters]
        self._own_values = [(p, local_shard(p).clone()) for p in parameters]
        torch._foreach_copy_([*flat_parameters], [*anchors])
        torch.clear_autocast_cache()  # which may hold the parameters in a narrow type

    def _find_written_at_anchor(self) -> str | None:
        """Return the name of a parameter that has left the anchor, of those not wrapped anew since."""
        self._reshard()
        is_own = self._claim.is_newest_of
        named_anchors = [named for fragment in self.fragments for named in fragment.named_anchors(is_own)]
        return self._parameter_guard.find_different(named_anchors)

    @torch.no_grad()
    def _load_own_values(self) -> None:
        """Write this worker's own values into the parameters, wherever these lie by now.

        Those that were wrapped anew meanwhile begin from the anchor.
        """
        self._reshard()
        for p, values in self._own_values:
            if self._claim.is_newest_of(p):
                local_shard(p).copy_(values)
        self._own_values = []
        torch.clear_autocast_cache()

    @exclude_from_compile
    @explain_lost_worker
    def exchange_if_due(self) -> StepReport:
        """Make the exchange that is due, if any: the second half of `step`.

        It counts the local step, applies the averages that are awaited, and begins those that are due.
        Returns a report of the messages.

        Raises:
            NonFiniteDriftError: as `step`.
        """
        self._check_outside("exchange")
        self._claim.check_not_superseded()
        self._reshard()
        self._check_changed_by_nobody()  # where no step was made, as in `skip`
        if any(fragment.is_due(self.steps + 1) for fragment in self.fragments):
            self._parameter_guard.check_deferred()
        self._has_failed = True
        try:
            report = self._exchange_fragments()
        finally:
            self._parameter_guard.remember()
            self._is_between_halves = False
        self._has_failed = False
        return report

    def _exchange_fragments(self) -> StepReport:
        """Count a local step and exchange fragments, without guards, see `exchange_if_due`."""
        epoch = self.epoch  # of the step that was made
        self.steps += 1
        reports = list[StepReport]()
        due_fragments = [fragment for fragment in self.fragments if fragment.is_due(self.steps)]
        due_averages = [fragment for fragment in self.fragments if fragment.is_average_due(self.steps)]
        if self._copy_keys is None and (due_fragments or due_averages):  # an average may be a resumed one
            self._copy_keys = find_parameter_copy_keys(self.inner_optimizer, self._wrapped_parameters)
        # Before others are begun: the thread works in order.
        for fragment in due_averages:
            if fragment in self._background_fragments:
                reports += self._wait_for_background()
            self._apply_average(fragment)
        for fragment in due_fragments:
            self.check_epoch_known()
            average_drift = partial(fragment.average_drift, epoch, self.check, self.debug)
            fragment.capture_parameters()
            if self._background is not None:
                self._background.submit(average_drift)
                self._background_fragments.append(fragment)
                continue
            reports.append(average_drift())
            if not self.strategy.delay:
                self._apply_average(fragment)
        for fragment in self.fragments:
            reports += fragment.average_due_optimizer_states(self.steps, self.inner_optimizer)
        self.last_report = self._empty_report
        if reports:
            self.last_report = StepReport.total(reports)._replace(num_elements=self.num_elements)
        return self.last_report

    def _apply_average(self, fragment: Fragment) -> None:
        """Move the anchor, the parameters, and the inner optimizer's copies of them."""
        fragment.apply_average_if_any()
        parameters = [p for _, p in fragment.parameters]
        update_parameter_copies(self.inner_optimizer, parameters, self._copy_keys or ())

    def _is_skipped_by_scaler(self) -> bool:
        """Return True if a GradScaler makes this step and has found infinities; else divide by its scale.

        One host synchronisation, if a GradScaler makes this step.
        """
        has_infinities = getattr(self, "found_inf", None)
        if has_infinities is None:
            return False
        if host_sync.to_host(has_infinities.reshape(1))[0]:
            return True
        self._unscale_gradients()
        return False

    def _check_outside(self, call: str) -> None:
        """Refuse a call within `at_anchor`."""
        if self._num_at_anchor:
            raise ValueError(
                f"{call} within `with optimizer.at_anchor():` would take the anchor for this worker's own "
                "parameters; call it outside"
            )

    def _check_unchanged(self) -> None:
        """Refuse an optimizer with other parameters than it had, or gradients that others average too."""
        self._check_same_parameters()
        self._averaged_gradients.check_not_averaged_this_step()
        self._averaged_gradients.check_model_still_has_parameters(self._model)

    def _check_changed_by_nobody(self, at_once: bool = False, allows_anchor: bool = False) -> None:
        """Refuse parameters that somebody else has replaced or written to since the last step.

        Between the halves of a step nothing is refused.

        Args:
            at_once: a GPU's host waits for the answer.
            allows_anchor: the parameters may have the anchor's values. A round may begin with them, and
                training goes on from them where an exchange has failed.
        """
        if self._is_between_halves:
            return
        if self._replaced_guard.is_any_replaced():
            self._averaged_gradients.check_model_still_has_parameters(self._model)
            self._replaced_guard.remember()
        guard = self._parameter_guard
        check = guard.check_now if at_once else guard.check_or_defer
        check(self._named_anchors, allows_anchor or self._has_failed or self._begins_round())

    def _begins_round(self) -> bool:
        """Return True if the next step is the first one of a round."""
        return self.steps % self.strategy.every == 0

    def _named_anchors(self) -> NamedAnchors:
        """Return the name of each parameter of this worker's, the parameter (n,) and its anchor (n,)."""
        return [
            named
            for fragment in self.fragments
            for named in zip(fragment.names, fragment.flat_parameters(), fragment.anchor, strict=True)
        ]

    # --- methods that a sharded model overrides

    def _check_wrapped(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Refuse an optimizer and a model that can't be wrapped."""
        check_optimizer_and_model(optimizer, model)
        check_steps_locally(optimizer)

    def _build_fragments(self, build: Callable[[], list[Fragment]]) -> list[Fragment]:
        """Call `build`; where it fails on some workers alone, all raise."""
        fragments = list[Fragment]()

        def build_and_collect_facts() -> dict[str, Any]:
            # One worker's parameters may lie in memory with gaps; its shards may be smaller, or empty.
            fragments.extend(build())
            return {}

        self._check_arguments_agree(self.comm, self._model, build_and_collect_facts)
        return fragments

    def _global_rank(self, rank: int) -> int:
        """Return the number, among all workers, of a worker that averages with this one."""
        return rank

    def _make_nan_check_comm(self) -> Comm | None:
        """Return a communicator of all who must know of a NaN; None: they are those who average."""
        return None

    def _reshard(self) -> None:
        """Free copies of parameters that are gathered for a forward or backward pass.

        The next pass would else not see what is written to a worker's own shard.
        """

    # --- saved states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was called, also in mid-round, see `OptimizerWrapper`."""
        self._reshard()
        super().load_state_dict(state_dict)

    def _check_between_steps(self, call: str) -> None:
        self._check_outside(call)
        self._wait_for_background()

    def worker_state_dict(self) -> dict[str, Any]:
        self._check_between_steps("state_dict")
        self._reshard()
        self._check_changed_by_nobody(at_once=True)
        return {**self._describe(), "fragments": [fragment.state_dict() for fragment in self.fragments]}

    def restore_worker_state(self, local: Mapping[str, Any]) -> None:
        for fragment, saved in zip(self.fragments, local["fragments"], strict=True):
            fragment.restore_checked_state(saved)
        self.steps = local["step"]
        self._is_between_halves = False
        self._parameter_guard.remember()

    def _wait_for_background(self) -> list[StepReport]:
        """Wait for averages of the thread, which are applied when they are due, and return their reports."""
        self._background_fragments.clear()
        return [] if self._background is None else self._background.wait_for_results()

    def _describe(self) -> dict[str, Any]:
        """Return what a saved state must have in common with this optimizer, and the step."""
        return {
            "strategy": repr_without_addresses(self.strategy),
            "step": self.steps,
            "rank": self.comm.rank,
            "size": self.comm.size,
            "worker": self._global_rank(self.comm.rank),
        }

    def check_worker_state_and_collect_facts(self, local: Any) -> dict[str, Any]:
        expected = self._describe()
        check_keys("local", local, LOCAL_STATE_KEYS, ("worker",))  # older states don't have the worker
        check_value("local.step", local["step"], NonNegativeInt)
        if local["size"] != expected["size"]:
            raise StateMismatch(
                f"the saved state is of {local['size']} workers, and there are {expected['size']}; in the "
                "middle of a round each worker has parameters of its own, so resume with as many, or begin "
                "anew from the anchor, saved within `with optimizer.at_anchor():`"
            )
        saved_worker = local.get("worker", local["rank"])
        worker = expected["worker"]
        if local["rank"] != expected["rank"] or ("worker" in local and saved_worker != worker):
            raise StateMismatch(
                f"the saved state is of rank {saved_worker}, and this is rank {worker}; every worker "
                "saves and loads its own. Where there is only one, load the anchor, saved within `with "
                "optimizer.at_anchor():`, into the model before it is wrapped"
            )
        if local["strategy"] != expected["strategy"]:
            raise StateMismatch(
                f"the saved state is of {local['strategy']}, and this is {expected['strategy']}; build the "
                "strategy with the hyperparameters that it was saved with"
            )
        if not isinstance(local["fragments"], list) or len(local["fragments"]) != len(self.fragments):
            raise StateMismatch(f"local.fragments must be a list of {len(self.fragments)}")
        facts = [
            fragment.check_state_and_collect_facts(f"local.fragments[{index}]", saved)
            for index, (fragment, saved) in enumerate(zip(self.fragments, local["fragments"], strict=True))
        ]
        return {"step": local["step"], "rounds": facts}

    def __repr__(self) -> str:
        return f"LocalOptimizer({self.strategy!r}, {self.inner_optimizer!r})"


def find_optimizers_of_model(optimizer: LocalOptimizer) -> list[LocalOptimizer]:
    """Return the optimizers of local steps, the given one among them, that have parts of one model.

    Their models share a module or a parameter; or a module of this process has parts of both. What only a
    function calls one after the other is not seen.
    """
    live = [other for other in [*LIVE_OPTIMIZERS] if not other._claim.is_superseded]
    parts_of_live = [module_and_parameter_ids(other._model) for other in live]
    parts = grow_over(module_and_parameter_ids(optimizer._model), parts_of_live)
    # Virtual ranks share a process, and each has a model of its own.
    if any(
        other.comm.rank == optimizer.comm.rank and parts.isdisjoint(other_parts)
        for other, other_parts in zip(live, parts_of_live, strict=True)
    ):
        parts = grow_over(parts, [*parts_of_live, *map(module_and_parameter_ids, find_live_modules())])
    return [
        other
        for other, other_parts in zip(live, parts_of_live, strict=True)
        if not parts.isdisjoint(other_parts)
    ]


def module_and_parameter_ids(model: nn.Module) -> set[int]:
    """Return the ids of a model's modules and parameters."""
    return {id(part) for part in (*model.modules(), *model.parameters())}


def grow_over(parts: set[int], connecting: list[set[int]]) -> set[int]:
    """Return the union of `parts` and of all sets that are connected with it by common elements."""
    grown = parts.union(*(other for other in connecting if not other.isdisjoint(parts)))
    return grown if len(grown) == len(parts) else grow_over(grown, connecting)
