"""What stands before an optimizer, and looks like it: all but `step` is the inner one's."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch.utils.hooks import RemovableHandle

from sparsify.comm import WorkerLost

F = TypeVar("F", bound=Callable[..., Any])
MODES = ("train", "eval")


def exclude_from_compile(function: F) -> F:
    """A function that `torch.compile` leaves to Python, also within a step that it compiles: collectives and
    gradients that change places are no graph.
    """

    disabled = list[Callable[..., Any]]()  # the same, made once the compiler is there

    @wraps(function)
    def left(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # nobody compiles, and to load the compiler takes a second
            return function(*args, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **options)

    return cast(F, left)


def explain_lost_worker(function: F) -> F:
    """A collective part of a step; where a worker is lost, it also tells what a loop may do wrong."""

    @wraps(function)
    def told(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except WorkerLost as lost:
            raise WorkerLost(
                f"{lost}; one has ended, or makes fewer steps than this one: all make as many, and who "
                "leaves a batch out calls optimizer.skip()"
            ) from lost

    return cast(F, told)


class OptimizerWrapper(torch.optim.Optimizer):
    """Call `mirror_optimizer` in the place of Optimizer's own __init__."""

    inner_optimizer: torch.optim.Optimizer

    def mirror_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Show this optimizer's parameters, state and defaults."""
        self.inner_optimizer = optimizer
        for hooks in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            setattr(self, f"_optimizer_{hooks}_hooks", OrderedDict())

    def __getattr__(self, name: str) -> Any:
        """Optimizers without schedules (schedulefree) have modes, like a model. Other methods of its own are
        reached through `inner_optimizer`: they may step, and then nobody would average.
        """
        if name in MODES:
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
