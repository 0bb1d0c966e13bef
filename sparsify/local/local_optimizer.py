"""Local steps in a plain training loop: an optimizer that steps alone, and every so often with the others."""

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
from sparsify.local.fragments import APART, Fragment, divide_into_fragments
from sparsify.local.guards import LocalityGuard, ParameterGuard, check_local
from sparsify.local.master_weights import find_copies, update_copies
from sparsify.local.strategy import LocalSteps
from sparsify.ranges import NonNegativeInt, stable_repr
from sparsify.wrappers.checks import check_optimizer_and_model
from sparsify.wrappers.engine import StepReport
from sparsify.wrappers.optimizer_wrapper import OptimizerWrapper, exclude_from_compile, explain_lost_worker
from sparsify.wrappers.overlap import BackgroundStream
from sparsify.wrappers.saved_states import StateMismatch, check_keys, check_value, load_inner_optimizer

SAVED = ("local", "epoch")  # what a saved state has besides the inner optimizer's
TOP = ("strategy", "step", "rank", "size", "fragments")
LIVE: WeakSet[LocalOptimizer] = WeakSet()  # all of this process


class LocalOptimizer(OptimizerWrapper):
    """`optimizer`, which steps on this worker alone; every so many steps all workers average what they have
    moved. See `sparsify.local.strategy` for what a round is.

    Everything that an optimizer's step can be told stays local: closures, accumulated gradients, clipping,
    schedulers (of the inner optimizer or of this one), and a GradScaler, by its usual recipe; a step that it
    skips counts as one. All workers make as many steps: who must leave a batch out calls `skip()`.

    Parameters and buffers of rank 0 are broadcast at the beginning. Afterwards each worker's differ within a
    round; the *anchor* is what all have in common. Evaluate it, and save it as the model:

        with optimizer.at_anchor():
            loss = evaluate(model)
            torch.save(model.state_dict(), path)

    `state_dict()` has what resumes in mid-round, to the bit: the worker's own parameters, anchor, residual,
    the outer step's state and what is on its way. Save it per rank. Buffers, such as those of batch
    normalisation, are each worker's own and are never averaged, nor is the inner optimizer's state.

    The group is fixed: nobody joins or leaves while it trains, and as many workers resume as there were.

    Args:
        model: has all of the optimizer's parameters, and perhaps more.
        comm, group: who averages: a communicator, a process group, or a mesh of one dimension; by default
            torch.distributed's own group. With `overlap` the default is a new group, which all workers make
            here together; what is given is used by the thread, and by nothing else.
        check: look for NaN and Inf before every exchange; all workers then raise `NonFiniteDriftError`.
        debug: before every exchange compare strategy and round over the workers.
        select: see `Aggregator`.
        steps_per_epoch: for methods that raise the density in the first epochs; or set `epoch`.
        scaler: may be named, as `sparsify.distribute` needs it for other methods; nothing depends on it.
        overlap: average in a thread, on a GPU on a stream of its own, while the steps of the strategy's
            `delay` go on. The numbers are the same. No GPU has run this yet.

    Attributes:
        last_report: what this worker sent in the last step, a `sparsify.wrappers.engine.StepReport`: nothing
            in most steps. With `overlap` that of the step in which it is applied.

    Raises:
        ValueError: the parts don't fit together, or there is no process group.
        WorkerMismatch: on all workers, where their arguments differ.
    """

    rewrap_advice = (
        "wrap it anew (the inner one, `optimizer.inner_optimizer`): a new round begins then, and the "
        "residual and the outer step's momentum are zero"
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
            "strategy": stable_repr(strategy), "seed": seed, "check": check, "debug": debug,
            "overlap": overlap, "steps_per_epoch": steps_per_epoch,
        }  # fmt: skip
        super().__init__(optimizer, model, strategy.method, comm, group, None, check_arguments, options)
        self.strategy = strategy
        self.check = check
        self.debug = debug
        named = [(name, p) for name, p in self._named_parameters if p.requires_grad]
        self._locality = LocalityGuard(optimizer, None if overlap else self.comm)

        def build() -> list[Fragment]:
            return [
                Fragment(
                    strategy,
                    inside,
                    self.comm,
                    timer,
                    seed + APART * at,
                    select,
                    offset=at * strategy.every // strategy.fragments,
                    everyone=self._everyone(),
                )
                for at, inside in enumerate(divide_into_fragments(named, strategy.fragments))
            ]

        self.fragments = self._build_fragments(build)
        self.engine = self.fragments[0].engine
        self._guard_parameters()
        self.num_steps = 0  # local ones
        self._background = BackgroundStream(self.fragments[0].anchor[0].device) if overlap else None
        self._sent = list[Fragment]()  # on their way, in a thread
        self._parameters = ParameterGuard(model, named)
        self._num_at_anchor = 0  # of `with` statements that have the model at the anchor
        self._own = list[tuple[nn.Parameter, Tensor]]()  # this worker's values meanwhile
        self._copies: list[str] | None = None  # names of the inner optimizer's; None: not looked for yet
        self._has_failed = False  # an exchange, so that somebody may go on from the anchor
        LIVE.add(self)
        self.num_elements = sum(sum(fragment.sizes) for fragment in self.fragments)
        self.last_report = self._nothing = StepReport(0, self.num_elements, 0, 0, 0)

    @property
    def steps(self) -> int:
        """Number of local steps so far."""
        return self.num_steps

    @exclude_from_compile
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of this worker, and whatever exchange is due after it. What the inner optimizer returns.

        Raises:
            NonFiniteDriftError: on all workers, where an exchange is due and any worker's parameters have a NaN or
                Inf.
        """
        loss = self.step_locally(closure)
        self.exchange()
        return loss

    @exclude_from_compile
    def step_locally(self, closure: Callable[[], Any] | None = None) -> Any:
        """The first half of `step`: the inner optimizer's, for loops that time the two apart."""
        self._check_outside("step")
        self._reshard()
        self._claim.check()
        may_be_anchor = self._has_failed or self.num_steps % self.strategy.every == 0
        self._parameters.check(self._pairs_by_name, may_be_anchor)
        self._check_frozen()
        held = sum(len(group["params"]) for group in self.inner_optimizer.param_groups)
        if self.num_steps % self.strategy.every == 0 or held != len(self._wrapped_parameters):
            self._check_unchanged()
        if self._is_skipped_by_scaler():
            return None
        with self._step_guard.allow_step():
            if closure is not None:  # in which anything may be communicated
                return self.inner_optimizer.step(closure)
            with self._locality.watch():
                return self.inner_optimizer.step()

    @exclude_from_compile
    def skip(self) -> None:
        """Leave this worker's batch out, after an error in forward or backward: it has made its step, without
        moving, and takes part in whatever is due after it.
        """
        self.inner_optimizer.zero_grad()
        self.exchange()

    @exclude_from_compile
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the inner optimizer does."""
        self.inner_optimizer.zero_grad(set_to_none)

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Give the model the anchor's parameters within, which are alike on all workers, and afterwards this
        worker's own again. Of several optimizers of local steps that share the model, or a part of it, all
        go to their anchors.

        Raises:
            ValueError: within, from steps, exchanges and `state_dict`, which are of the worker's own.
        """
        with ExitStack() as anchors:
            for optimizer in self._find_sharing():
                anchors.enter_context(optimizer._at_own_anchor())
            yield

    def _find_sharing(self) -> list[LocalOptimizer]:
        """Return the optimizers of local steps whose models have a module in common with this one's."""
        mine = set(self._model.modules())
        return [
            other
            for other in [*LIVE]
            if not other._claim.is_superseded and not mine.isdisjoint(other._model.modules())
        ]

    @contextmanager
    def _at_own_anchor(self) -> Iterator[None]:
        """See `at_anchor`; of this optimizer's parameters alone. The first to enter takes the anchor, the
        last to leave gives the parameters back.
        """
        if not self._num_at_anchor:
            self._take_anchor()
        self._num_at_anchor += 1
        try:
            yield
        finally:
            self._num_at_anchor -= 1
            if not self._num_at_anchor:
                self._leave_anchor()

    @torch.no_grad()
    def _take_anchor(self) -> None:
        """Keep this worker's parameters, and write the anchor into them."""
        self._reshard()
        pairs = [pair for fragment in self.fragments for pair in fragment.pairs()]
        parameters = [p for fragment in self.fragments for _, p in fragment.parameters]
        self._own = [(p, local_shard(p).clone()) for p in parameters]
        torch._foreach_copy_([own for own, _ in pairs], [anchor for _, anchor in pairs])
        torch.clear_autocast_cache()  # which may hold the parameters in a narrow type

    @torch.no_grad()
    def _leave_anchor(self) -> None:
        """Write this worker's own values into the parameters, wherever these lie by now."""
        self._reshard()
        for p, own in self._own:
            local_shard(p).copy_(own)
        self._own = []
        torch.clear_autocast_cache()
        self._parameters.remember()

    @exclude_from_compile
    @explain_lost_worker
    def exchange(self) -> StepReport:
        """The second half of `step`: count it, apply what is awaited, send what is due. Returns what was
        sent.

        Raises:
            NonFiniteDriftError: as `step`.
        """
        self._check_outside("exchange")
        self._claim.check()
        self._reshard()
        if any(fragment.is_due(self.num_steps + 1) for fragment in self.fragments):
            self._parameters.check_late()
        self._has_failed = True
        try:
            report = self._exchange()
        finally:
            self._parameters.remember()
        self._has_failed = False
        return report

    def _exchange(self) -> StepReport:
        """See `exchange`."""
        epoch = self.epoch  # of the step that was made
        self.num_steps += 1
        reports = list[StepReport]()
        if self._copies is None and any(fragment.is_due(self.num_steps) for fragment in self.fragments):
            self._copies = find_copies(self.inner_optimizer, self._wrapped_parameters)
        for fragment in self.fragments:  # before others are sent: the thread works in order
            if self.strategy.delay and fragment.is_awaited(self.num_steps):
                reports += self._awaited(fragment)
                self._apply(fragment)
        for fragment in self.fragments:
            if fragment.is_due(self.num_steps):
                self.check_epoch()
                send = partial(fragment.send, epoch, self.check, self.debug)
                fragment.take()
                if self._background is not None:
                    self._background.submit(send)
                    self._sent.append(fragment)
                    continue
                reports.append(send())
                if not self.strategy.delay:
                    self._apply(fragment)
        for fragment in self.fragments if self.strategy.states else ():
            reports += fragment.average_states(self.num_steps, self.inner_optimizer)
        self.last_report = StepReport.total(reports) if reports else self._nothing
        if reports:
            self.last_report = self.last_report._replace(num_elements=self.num_elements)
        return self.last_report

    def _apply(self, fragment: Fragment) -> None:
        """Move the anchor, the parameters, and what the inner optimizer keeps of them."""
        fragment.apply()
        update_copies(self.inner_optimizer, [p for _, p in fragment.parameters], self._copies or ())

    def _awaited(self, fragment: Fragment) -> list[StepReport]:
        """Wait for what the thread averages, up to this fragment's."""
        if self._background is None or fragment not in self._sent:
            return []
        self._sent.clear()
        found: list[StepReport] = self._background.finish()
        return found

    def _is_skipped_by_scaler(self) -> bool:
        """Divide by the scale of a GradScaler that calls this, if nobody has; True where it found infinities.
        One host synchronisation, if one calls.
        """
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        if host_sync.to_host(found.reshape(1))[0]:
            return True
        self._unscale_gradients()
        return False

    def _check_outside(self, what: str) -> None:
        if self._num_at_anchor:
            raise ValueError(
                f"{what} within `with optimizer.at_anchor():` would take the anchor for this worker's own "
                "parameters; call it outside"
            )

    def _check_unchanged(self) -> None:
        self._check_same_parameters()
        self._double_averaging.check()
        self._double_averaging.check_model_has_parameters(self._model)

    def _pairs_by_name(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each parameter of this worker's and its anchor, as (n,), by name."""
        return {
            name: pair
            for fragment in self.fragments
            for name, pair in zip(fragment.names, fragment.pairs(), strict=True)
        }

    # --- what is otherwise where models are sharded

    def _check_wrapped(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Refuse an optimizer and a model that can't be wrapped."""
        check_optimizer_and_model(optimizer, model)
        check_local(optimizer)

    def _build_fragments(self, build: Callable[[], list[Fragment]]) -> list[Fragment]:
        """Call `build`, which succeeds or fails alike on all workers that have the whole model."""
        return build()

    def _global_rank(self, rank: int) -> int:
        """Return the number, among all workers, of one of those that average with this one."""
        return rank

    def _everyone(self) -> Comm | None:
        """Return a communicator of all who must know of a NaN; None: those who average."""
        return None

    def _reshard(self) -> None:
        """Free copies of parameters that are gathered for a forward or backward pass. What is written to a
        worker's own part would else not be seen by the next pass.
        """

    # --- saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was called, in mid-round too, see `OptimizerWrapper`."""
        self._check_outside("load_state_dict")
        self._reshard()
        super().load_state_dict(state_dict)

    def _check_between_steps(self, call: str) -> None:
        self._check_outside(call)
        self._settle()

    def _worker_state(self) -> dict[str, Any]:
        return {"epoch": self.user_epoch, "local": self.local_state_dict()}

    def _restore_worker_state(self, saved: Mapping[str, Any]) -> None:
        self.restore_local_state(saved["local"])

    def local_state_dict(self) -> dict[str, Any]:
        """The part under `local`: what this worker has besides the inner optimizer's state and the epoch."""
        self._check_outside("state_dict")
        self._settle()
        return {**self._described(), "fragments": [each.state_dict() for each in self.fragments]}

    def restore_local_state(self, local: Mapping[str, Any]) -> None:
        """Load what `check_local_state` let pass on all workers."""
        for fragment, saved in zip(self.fragments, local["fragments"], strict=True):
            fragment.restore_state(saved)
        self.num_steps = local["step"]
        self._parameters.remember()

    def _settle(self) -> None:
        """Wait for what is on its way; its averages wait to be applied, as ever."""
        if self._background is not None:
            self._background.finish()
            self._sent.clear()

    def _described(self) -> dict[str, Any]:
        who = {"rank": self.comm.rank, "size": self.comm.size, "worker": self._global_rank(self.comm.rank)}
        return {"strategy": stable_repr(self.strategy), "step": self.num_steps, **who}

    def _check_and_load_inner(self, saved: Any) -> dict[str, Any]:
        if isinstance(saved, dict) and "local" not in saved:
            raise StateMismatch(
                "the saved state has no anchor: it is another optimizer's, or made by "
                "get_optimizer_state_dict, which leaves it out. Save optimizer.state_dict() on every worker; "
                "or load this into the inner optimizer before it is wrapped"
            )
        check_keys("an optimizer's saved state", saved, SAVED, None)
        check_value("epoch", saved["epoch"], NonNegativeInt | None)
        facts = self.check_local_state(saved["local"])
        load_inner_optimizer(
            self.inner_optimizer, {key: part for key, part in saved.items() if key not in SAVED}
        )
        return {**facts, "epoch": saved["epoch"]}

    def check_local_state(self, local: Any) -> dict[str, Any]:
        """Refuse what is no `local_state_dict` of this worker's; returns what must be alike on all workers."""
        own = self._described()
        check_keys("local", local, TOP, ("worker",))  # older ones don't tell the worker
        check_value("local.step", local["step"], NonNegativeInt)
        if local["size"] != own["size"]:
            raise StateMismatch(
                f"the saved state is of {local['size']} workers, and there are {own['size']}; in the "
                "middle of a round each worker has parameters of its own, so resume with as many, or begin "
                "anew from the anchor, saved within `with optimizer.at_anchor():`"
            )
        theirs, mine = (state.get("worker", state["rank"]) for state in (local, own))
        if local["rank"] != own["rank"] or ("worker" in local and theirs != mine):
            raise StateMismatch(
                f"the saved state is of rank {theirs}, and this is rank {mine}; every worker "
                "saves and loads its own. Where there is only one, load the anchor, saved within `with "
                "optimizer.at_anchor():`, into the model before it is wrapped"
            )
        if local["strategy"] != own["strategy"]:
            raise StateMismatch(
                f"the saved state is of {local['strategy']}, and this is {own['strategy']}; build the "
                "strategy with the hyperparameters that it was saved with"
            )
        if not isinstance(local["fragments"], list) or len(local["fragments"]) != len(self.fragments):
            raise StateMismatch(f"local.fragments must be a list of {len(self.fragments)}")
        facts = [
            fragment.check_state(f"local.fragments[{at}]", one)
            for at, (fragment, one) in enumerate(zip(self.fragments, local["fragments"], strict=True))
        ]
        return {"step": local["step"], "rounds": facts}

    def __repr__(self) -> str:
        return f"LocalOptimizer({self.strategy!r}, {self.inner_optimizer!r})"
