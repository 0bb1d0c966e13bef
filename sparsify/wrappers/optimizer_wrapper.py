"""The base of optimizers that wrap a user's optimizer and differ from it in `step` alone."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, ClassVar, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from sparsify.comm import Comm, WorkerLost
from sparsify.comm.torch import TorchComm
from sparsify.core.bucket import local_shard
from sparsify.core.claims import SupersedableClaim, has_own_values
from sparsify.method import Method
from sparsify.ranges import NonNegativeInt
from sparsify.wrappers.checks import broadcast_model, parameters_of, resolve_comm
from sparsify.wrappers.double_averaging import AveragedGradientsGuard
from sparsify.wrappers.handshake import buffer_facts, check_arguments_agree, wrapping_facts
from sparsify.wrappers.saved_states import (
    StateMismatch,
    check_all_can_load,
    check_keys,
    check_value,
    load_inner_optimizer_state,
    restore_on_error,
    state_dict_with_mark,
    state_dict_without_mark,
)
from sparsify.wrappers.wrapper_base import WrapperBase

F = TypeVar("F", bound=Callable[..., Any])
MODE_METHODS = ("train", "eval")
STEP_GUARD_BY_OPTIMIZER: WeakKeyDictionary[torch.optim.Optimizer, DirectStepGuard] = WeakKeyDictionary()


def exclude_from_compile(function: F) -> F:
    """Let `torch.compile` leave a function to Python, also within a step that it compiles.

    Collectives, and gradients that change places, make no graph.
    """
    disabled = list[Callable[..., Any]]()  # the function, excluded once the compiler is loaded

    @wraps(function)
    def call_uncompiled(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # loading the compiler takes a second
            return function(*args, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **options)

    return cast(F, call_uncompiled)


def explain_lost_worker(function: F) -> F:
    """Let a collective part of a step say what a loop may do wrong where a worker is lost."""

    @wraps(function)
    def call_with_advice(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except WorkerLost as lost:
            raise WorkerLost(
                f"{lost}; one has ended, or makes fewer steps than this one: all make as many, and who "
                "leaves a batch out calls optimizer.skip()"
            ) from lost

    return cast(F, call_with_advice)


class DirectStepGuard:
    """A guard that refuses an optimizer's own steps, which would use one worker's gradients alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.is_stepping = False
        earlier = STEP_GUARD_BY_OPTIMIZER.get(optimizer)
        if earlier is not None:
            earlier.handle.remove()
        self.handle: RemovableHandle = optimizer.register_step_pre_hook(self.check)
        optimizer.register_load_state_dict_pre_hook(state_dict_without_mark)
        STEP_GUARD_BY_OPTIMIZER[optimizer] = self

    def check(self, *_: Any) -> None:
        """Refuse a step that the wrapper did not make."""
        if not self.is_stepping:
            raise ValueError(
                "this optimizer was wrapped, and its own step would not average; call that of what "
                "sparsify.distribute or sparsify.shard returned"
            )

    @contextmanager
    def allow_step(self) -> Iterator[None]:
        """Allow the wrapper's own step within."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False


@contextmanager
def keep_own_values(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Give parameters that an earlier wrapper steps locally their values again after a broadcast within.

    The others' broadcast is the same on all workers, whoever has lost a wrapper already.
    """
    kept = [(local_shard(p), local_shard(p).detach().clone()) for p in parameters if has_own_values(p)]
    yield
    with torch.no_grad():
        for shard, values in kept:
            shard.copy_(values)


class OptimizerWrapper(WrapperBase, torch.optim.Optimizer):
    """An optimizer with a user's optimizer inside, whose parameters, state and defaults it shows as its own.

    Args:
        check_arguments: refuses what can't be wrapped.
        options: as the user gave them, `overlap` and `steps_per_epoch` among them. All workers must have
            equal ones.
    """

    # A GradScaler then leaves it to `step` to divide by the scale, and to skip.
    _step_supports_amp_scaling: ClassVar[bool] = True
    grad_scale: Tensor | None  # set by a GradScaler while it steps; None: the gradients are unscaled
    found_inf: Tensor  # as grad_scale
    inner_optimizer: torch.optim.Optimizer
    rewrap_advice: ClassVar[str]  # how to wrap anew, and what is lost by it
    steps_locally: ClassVar[bool] = False  # True: between two exchanges workers' parameters differ
    worker_state_key: ClassVar[str]  # of the worker's part in a saved state
    missing_worker_state: ClassVar[str]  # what a saved state without that part lacks, and what to do

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        method: Method,
        comm: Comm | None,
        group: dist.ProcessGroup | DeviceMesh | None,
        scaler: GradScaler | None,
        check_arguments: Callable[[], None],
        options: Mapping[str, Any],
    ) -> None:
        def collect_facts() -> dict[str, Any]:
            check_arguments()
            return {**wrapping_facts(model, optimizer, method, **options), **buffer_facts(model)}

        used_comm = resolve_comm(comm, group)
        self._check_arguments_agree(used_comm, model, collect_facts)
        if options["overlap"] and comm is None and group is None:
            used_comm = TorchComm.with_new_group()
        # Optimizer.__init__ is not called: parameters, state and defaults are the inner optimizer's.
        super().__init__(method, used_comm, options["steps_per_epoch"], scaler)
        self.inner_optimizer = optimizer
        for event in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            setattr(self, f"_optimizer_{event}_hooks", OrderedDict())
        self._model = model
        self._wrapped_parameters = parameters_of(optimizer)
        wrapped_ids = set(map(id, self._wrapped_parameters))
        with keep_own_values(p for p in model.parameters() if id(p) not in wrapped_ids):
            self._broadcast_model(model)
        self._named_parameters = [(name, p) for name, p in model.named_parameters() if id(p) in wrapped_ids]
        self._frozen = [(name, p) for name, p in self._named_parameters if not p.requires_grad]

    def _check_arguments_agree(
        self, comm: Comm, model: nn.Module, collect_facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Compare what is wrapped over all workers."""
        parameters = model.parameters() if isinstance(model, nn.Module) else ()
        check_arguments_agree(comm, parameters, collect_facts)

    def _broadcast_model(self, model: nn.Module) -> None:
        """Give all workers the parameters and buffers of the first one."""
        broadcast_model(model, self.comm)

    def _guard_parameters(self) -> None:
        """Refuse, from now on, steps of the inner optimizer alone, and others that average its parameters."""
        self._step_guard = DirectStepGuard(self.inner_optimizer)
        self._averaged_gradients = AveragedGradientsGuard(self._wrapped_parameters)
        self._claim = SupersedableClaim("average", self._wrapped_parameters, self.steps_locally)

    def _check_same_parameters(self) -> None:
        """Refuse an inner optimizer with other parameters than it had when it was wrapped."""
        parameters = parameters_of(self.inner_optimizer)
        if [*map(id, parameters)] != [*map(id, self._wrapped_parameters)]:
            raise ValueError(
                f"the optimizer has other parameters than when it was wrapped; {self.rewrap_advice}"
            )

    def _check_frozen(self) -> None:
        """Refuse parameters that were frozen when the optimizer was wrapped, and are trained now."""
        for name, p in self._frozen:
            if p.requires_grad or p.grad is not None:
                raise ValueError(
                    f"{name} was frozen when its optimizer was wrapped, and is trained now; "
                    f"{self.rewrap_advice}"
                )

    def _unscale_gradients(self) -> None:
        """Divide the gradients by the scale of the GradScaler that makes this step, if nobody has yet."""
        if self.grad_scale is None:
            return
        for p in self._wrapped_parameters:
            if p.grad is not None:
                local_shard(p.grad).div_(self.grad_scale)

    @abstractmethod
    def _check_between_steps(self, call: str) -> None:
        """Refuse a call of state_dict or load_state_dict in the middle of a step."""

    @abstractmethod
    def worker_state_dict(self) -> dict[str, Any]:
        """Return this worker's part of a saved state: all but the inner optimizer's state and the epoch."""

    @abstractmethod
    def check_worker_state_and_collect_facts(self, saved: Any) -> dict[str, Any]:
        """Refuse a state that is not this worker's; return what must be equal on all workers, by name.

        Raises:
            StateMismatch: the state is not this worker's.
        """

    @abstractmethod
    def restore_worker_state(self, saved: Mapping[str, Any]) -> None:
        """Load a `worker_state_dict` that all workers have checked."""

    def _check_and_load_inner(self, saved: Any) -> dict[str, Any]:
        """Check a saved state, and load the inner optimizer's part.

        Returns:
            What must be equal on all workers, by name.
        """
        key = self.worker_state_key
        if isinstance(saved, Mapping) and key not in saved:
            raise StateMismatch(f"the saved state has no {self.missing_worker_state}")
        check_keys("an optimizer's saved state", saved, (key, "epoch"), None)
        check_value("epoch", saved["epoch"], NonNegativeInt | None)
        facts = self.check_worker_state_and_collect_facts(saved[key])
        # Older states have the inner optimizer's part under a name of its own.
        load_inner_optimizer_state(self.inner_optimizer, saved.get("optimiser", saved))
        return {**facts, "epoch": saved["epoch"]}

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state and, beside it, this worker's own: save it per rank."""
        self._check_between_steps("state_dict")
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        saved = {
            **state_dict_with_mark(self.inner_optimizer),
            self.worker_state_key: self.worker_state_dict(),
            "epoch": self.user_epoch,
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            saved = post_hook(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was called, all workers together. All load theirs, or none does.

        Raises:
            StateMismatch: the state is another method's, another model's, of another number of workers, of
                another step than the others', or broken.
        """
        self._check_between_steps("load_state_dict")
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        with restore_on_error(self.inner_optimizer):
            device = self.engine.buckets[0].flat.device
            check_all_can_load(self.comm, device, partial(self._check_and_load_inner, state_dict))
        self.restore_worker_state(state_dict[self.worker_state_key])
        self.user_epoch = state_dict["epoch"]
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getattr__(self, name: str) -> Any:
        """Return the inner optimizer's `train` or `eval`, which optimizers without schedules have.

        Its other methods are reached through `inner_optimizer`: they may step, and then nobody would average.
        """
        if name in MODE_METHODS:
            return getattr(self.inner_optimizer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Properties where Optimizer has attributes: `load_state_dict` gives the inner optimizer new ones, and
    # these must follow. They can't be set, hence the type checker's objection.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the inner optimizer."""
        return self.inner_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the inner optimizer."""
        return self.inner_optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults of the inner optimizer."""
        return self.inner_optimizer.defaults

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook that runs after averaging, before the inner step."""
        return self.inner_optimizer.register_step_pre_hook(lambda _, args, kwargs: hook(self, args, kwargs))

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook that runs after the inner step."""
        return self.inner_optimizer.register_step_post_hook(lambda _, args, kwargs: hook(self, args, kwargs))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters that join later."""
        raise ValueError("parameters can't join later: their residuals would be missing; wrap the model anew")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a wrapped optimizer can't be copied or pickled: its process group and its gradients' memory "
            "belong to this process; copy its state_dict(), or the inner optimizer "
            "(`optimizer.inner_optimizer`)"
        )
