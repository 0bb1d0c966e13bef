"""Saved states of the doors: what one holds, and whether it fits. All workers load theirs, or none does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from sparsify import ranges
from sparsify.comm import Comm, gather_json
from sparsify.core.bucket import local_part
from sparsify.ranges import NonNegativeInt, PositiveInt, format_value

FORMAT = 1  # of a saved state; counts up when older ones can't be read any more
GROUPS_AND_STATE = ("param_groups", "state")
# In the groups of a saved state, which are what an optimizer keeps of it though it does not know them.
MARK = "saved by sparsify"
NUM_STATES = "num_states"  # number of parameters of which the inner optimizer remembers something
TOP = {
    "format": NonNegativeInt,
    "method": str,
    "step": NonNegativeInt,
    "rank": NonNegativeInt,
    "size": PositiveInt,
    "buckets": Any,
}


class StateMismatch(ValueError):
    """A saved state is of something else, or broken. Nothing of it was loaded."""


def dump(state: Any) -> Any:
    """A copy of a state as a plain tree of tensors and numbers, for `torch.load(weights_only=True)`.
    Dataclasses and named tuples become dicts, generators their state. Fields whose metadata say
    `saved: False` (work buffers) are left out; a part of nothing else is None, for
    torch.distributed.checkpoint drops empty dicts.
    """
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Generator):
        return state.get_state()
    if (named := parts_by_name(state)) is not None:
        return {name: dump(part) for name, part in named.items()} or None
    if isinstance(state, list | tuple):
        return [dump(part) for part in state]
    assert state is None or isinstance(state, bool | int | float | str), f"{type(state)} can't be saved"
    return state


def restore(state: Any, saved: Any) -> Any:
    """`state`, as made by `init`, with what `dump` saved; tensors of the same size are written in place."""
    if isinstance(state, Generator):
        state.set_state(saved.cpu())
        return state
    if isinstance(saved, Tensor):
        if not isinstance(state, Tensor):
            return saved.clone()
        if state.shape == saved.shape and state.dtype == saved.dtype:
            return state.copy_(saved)
        return saved.to(state.device, copy=True)
    if isinstance(state, Mapping):
        return {name: restore(state.get(name), part) for name, part in saved.items()}
    if (named := parts_by_name(state)) is not None:
        parts = {name: restore(part, saved[name]) for name, part in named.items()}
        if hasattr(state, "_replace"):
            return state._replace(**parts)
        for name, part in parts.items():
            setattr(state, name, part)
        return state
    if isinstance(state, list | tuple) and len(state) == len(saved):
        return type(state)(restore(item, part) for item, part in zip(state, saved, strict=True))
    return copy.deepcopy(saved)


def parts_by_name(state: Any) -> dict[str, Any] | None:
    """What a checkpoint has of a dataclass, a named tuple or a mapping, by name; None of anything else."""
    if is_dataclass(state):
        saved = (field.name for field in fields(state) if field.metadata.get("saved", True))
        return {name: getattr(state, name) for name in saved}
    if hasattr(state, "_asdict"):
        return dict(state._asdict())
    return dict(state) if isinstance(state, Mapping) else None


def check_saved_layout(saved: Any) -> None:
    """Refuse what is not laid out as a saved state is. Those of older versions have no `shapes`."""
    if isinstance(saved, Mapping) and saved.get("format", FORMAT) != FORMAT:
        raise StateMismatch(
            f"a saved state of format {format_value(saved['format'])} can't be read; this version reads {FORMAT}"
        )
    check_keys("a saved state", saved, TOP)
    for name, allowed in TOP.items():
        check_value(name, saved[name], allowed)
    if not isinstance(saved["buckets"], list | tuple):
        raise StateMismatch(f"buckets is {format_value(type(saved['buckets']).__name__)}, and must be a list")
    for at, bucket in enumerate(saved["buckets"]):
        check_keys(f"buckets[{at}]", bucket, ("names", "state"), ("shapes",))
        check_value(f"buckets[{at}].names", bucket["names"], list[str])
        check_value(f"buckets[{at}].shapes", bucket.get("shapes", []), list[list[NonNegativeInt]])


def check_saved_matches(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a saved state that is not of this worker's method and model.

    Args:
        saved: after `check_saved_layout`.
        own: the same of this worker; states as they are, or as `dump` leaves them.
    """
    if saved["method"] != own["method"]:
        raise StateMismatch(
            f"the saved state is of {saved['method']}, and this is {own['method']}; build the method "
            "with the hyperparameters that it was saved with"
        )
    if saved["size"] != own["size"]:
        raise StateMismatch(
            f"the saved state is of {saved['size']} workers, and there are {own['size']}; resume with "
            "as many, or pass all workers' states through sparsify.redistribute first, which shares the "
            "residuals out"
        )
    if saved["rank"] != own["rank"]:
        raise StateMismatch(
            f"the saved state is of rank {saved['rank']}, and this is rank {own['rank']}; every "
            "worker saves and loads its own. Where there is only one, load the inner optimizer's alone "
            "(`optimizer.inner_optimizer`): training goes on without what the workers still owed"
        )
    theirs, mine = ([bucket["names"] for bucket in state["buckets"]] for state in (saved, own))
    if theirs != mine:
        differing = (
            f"where this has {format_value(b)}, it has {format_value(a)}"
            for a, b in zip(theirs, mine, strict=False)
            if a != b
        )
        why = next(differing, f"this has {len(mine)} buckets, and it has {len(theirs)}")
        raise StateMismatch(
            f"the saved state is of a model with other parameters, or of other buckets: {why}"
        )
    for at, (bucket, like) in enumerate(zip(saved["buckets"], own["buckets"], strict=True)):
        shapes = like.get("shapes")
        if bucket.get("shapes", shapes) != shapes:
            raise StateMismatch(
                f"the saved state is of a model with other shapes: of {format_value(like['names'])} this has "
                f"{format_value(shapes)}, and it has {format_value(bucket['shapes'])}"
            )
        check_saved_part(f"buckets[{at}].state", bucket["state"], like["state"])


def check_saved_part(where: str, saved: Any, own: Any, allowed: Any = Any, any_size: bool = False) -> None:
    """Refuse a part of a saved state that is not of the kind of this worker's.

    Args:
        allowed: what the annotation of its field says of a value.
        any_size: the field's metadata say so: the number of elements changes while training.
    """
    if isinstance(own, Generator):
        check_saved_part(where, saved, own.get_state())
        try:
            Generator(own.device).set_state(saved.cpu())
        except RuntimeError as error:
            raise StateMismatch(f"{where} is no state of a random generator: {error}") from error
    elif isinstance(own, Tensor):
        check_saved_tensor(where, saved, own, any_size)
    elif (named := parts_by_name(own)) == {} and saved is None:
        return
    elif named is not None:
        check_keys(where, saved, named)
        hints: dict[str, Any] = {} if isinstance(own, Mapping) else ranges.type_hints(own.__class__)
        told = fields(own) if is_dataclass(own) else ()
        grow = {field.name for field in told if field.metadata.get("any_size")}
        for name, part in named.items():
            check_saved_part(f"{where}.{name}", saved[name], part, hints.get(name, Any), name in grow)
    else:
        like = list[Any] if isinstance(own, list) else type(own)
        check_value(where, saved, allowed if allowed is not Any and ranges.is_plain_data(allowed) else like)


def check_saved_tensor(where: str, saved: Any, own: Tensor, any_size: bool) -> None:
    """Refuse what is no finite tensor like this one."""
    like = f"a tensor of {'any number' if any_size else tuple(own.shape)} of {own.dtype}"
    if not isinstance(saved, Tensor) or saved.layout is not torch.strided or saved.is_meta:
        raise StateMismatch(f"{where} is {format_value(type(saved).__name__)}, and must be {like}")
    is_shaped = saved.dim() == own.dim() if any_size else saved.shape == own.shape
    if not is_shaped or saved.dtype != own.dtype:
        raise StateMismatch(f"{where} has {tuple(saved.shape)} of {saved.dtype}, and must be {like}")
    check_finite(where, saved)


def check_finite(where: str, saved: Tensor) -> None:
    """Refuse a tensor with NaN or Inf."""
    if not torch.isfinite(saved).all():
        raise StateMismatch(f"{where} has a NaN or Inf; go back to an earlier checkpoint")


def check_value(where: str, saved: Any, allowed: Any) -> None:
    """Refuse a value outside of its range, or of another type."""
    plain = format_value(type(saved).__name__) if isinstance(saved, Tensor | Mapping) else None
    if plain and allowed is not Any:
        raise StateMismatch(f"{where} is a {plain}, and must be {ranges.describe_type(allowed)}")
    try:
        ranges.check_value(where, saved, allowed)
    except ValueError as error:
        raise StateMismatch(f"{error}") from error


def check_keys(where: str, saved: Any, needed: Any, more: Any = ()) -> None:
    """Refuse what is no dict, lacks a key, or has one that nobody knows."""
    if not isinstance(saved, Mapping):
        raise StateMismatch(f"{where} is a dict, and this is {format_value(type(saved).__name__)}")
    if missing := [key for key in needed if key not in saved]:
        raise StateMismatch(f"{where} lacks {missing[0]!r}; it has: {format_value([*saved])}")
    if more is not None and (unknown := [key for key in saved if key not in needed and key not in more]):
        raise StateMismatch(f"{where} has {format_value(unknown[0])!r}, which no state like it has")


def check_all_can_load(comm: Comm, device: torch.device, check: Callable[[], Mapping[str, Any]]) -> None:
    """Let every worker look at its own saved state, before any loads it.

    Args:
        check: raises `StateMismatch`, or returns what must be the same on all workers, by name.

    Raises:
        StateMismatch: on all workers: one has refused its state, or they differ.
    """
    refused: Exception | None = None
    told: dict[str, Any] = {}
    try:
        told["facts"] = dict(check())
    except Exception as error:  # whatever it is: the others must know
        refused = error
        told["why"] = str(error) if isinstance(error, StateMismatch) else repr(error)
    everyone = gather_json(comm, told, device)
    if isinstance(refused, StateMismatch):
        raise refused
    if refused is not None:
        raise StateMismatch(f"the saved state can't be read: {refused!r}") from refused
    for rank, theirs in enumerate(everyone):
        if "why" in theirs:
            raise StateMismatch(f"rank {rank} can't load its state, so no worker does: {theirs['why']}")
    for fact, mine in told["facts"].items():
        values = [theirs["facts"][fact] for theirs in everyone]
        if any(value != mine for value in values):
            raise StateMismatch(
                f"the workers' saved states differ in their {fact}, which is, by rank, {format_value(values)}; load "
                "those of one checkpoint"
            )


@contextmanager
def restore_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """An error within leaves the optimizer with the state that it had: loading gives it new tensors."""
    own = vars(optimizer)
    before: dict[str, Any] = {name: own[name] for name in ("state", "param_groups") if name in own}
    try:
        yield
    except BaseException:
        own.update(before)
        raise


def check_and_load_inner(
    saved: Any, optimizer: torch.optim.Optimizer, check_method: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """Check the state of an optimizer that averages, and load the inner one's part, within `restore_on_error`.
    Returns what must be the same on all workers.
    """
    if isinstance(saved, Mapping) and "method" not in saved:
        raise StateMismatch(
            "the saved state has no residuals: it is another optimizer's, or made by "
            "get_optimizer_state_dict, which leaves them out. Save optimizer.state_dict() on every "
            "worker; or load this into the inner optimizer (`optimizer.inner_optimizer`) and go on without "
            "what the workers still owed"
        )
    check_keys("an optimizer's saved state", saved, ("method", "epoch"), None)
    check_value("epoch", saved["epoch"], NonNegativeInt | None)
    facts = {**check_method(saved["method"]), "epoch": saved["epoch"]}
    # Older ones have the inner optimizer's under a name of its own.
    load_inner_optimizer(optimizer, saved.get("optimiser", saved))
    return facts


def marked_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The inner optimizer's part of a saved state, marked as a part of one."""
    inner = optimizer.state_dict()
    groups = [{**group, MARK: True} for group in inner["param_groups"]]
    return {**inner, "param_groups": groups, NUM_STATES: len(inner["state"])}


def strip_mark(_: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state as the inner optimizer knows it: a hook for its `load_state_dict`."""
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return dict(saved)
    plain = [{key: part for key, part in group.items() if key != MARK} for group in groups]
    return {**saved, "param_groups": plain}


def check_no_wrapped_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has loaded, by itself, a state that a wrapped one saved.

    Raises:
        ValueError: it has.
    """
    if any(MARK in group for group in optimizer.param_groups):
        raise ValueError(
            "this optimizer has loaded a state that was saved by what sparsify.distribute returned, without "
            "the rest of it, such as residuals; load it into what sparsify.distribute returns, each worker "
            "its own; or, to go on without the rest, into `optimizer.inner_optimizer` of that"
        )


def load_inner_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Load the inner optimizer's state.

    Raises:
        StateMismatch: it is another kind of optimizer's, or of other parameters, or has NaN or Inf.
    """
    name = type(optimizer).__name__
    needed = ("param_groups",) if NUM_STATES in saved else GROUPS_AND_STATE
    check_keys("the optimizer's saved state", saved, needed, None)
    # What its groups have now: torch adds to `defaults` when it loads.
    expected = [key for key in optimizer.defaults if all(key in group for group in optimizer.param_groups)]
    try:
        states = state_by_parameter_number(saved)
        optimizer.load_state_dict({**saved, "state": states})
    except Exception as error:  # what optimizers raise is theirs
        raise StateMismatch(f"{name} can't load its part of the saved state: {error!r}") from error
    if len(states) != (count := saved.get(NUM_STATES, len(states))):
        raise StateMismatch(
            f"the saved state lacks what {name} remembers: it had that of {format_value(count)} parameters, and has "
            f"that of {len(states)}"
        )
    for group in optimizer.param_groups:
        missing = [key for key in expected if key not in group]
        if missing:
            raise StateMismatch(
                f"the saved state is of another optimizer than {name}: it has no {missing[0]!r}"
            )
    for p, state in optimizer.state.items():
        for key, part in state.items() if isinstance(state, Mapping) else ():
            if isinstance(part, Tensor):
                where = f"{key} of a parameter of shape {tuple(p.shape)}"
                if part.dim() == p.dim() and part.numel() == p.numel() and part.shape != p.shape:
                    raise StateMismatch(f"{where} has {tuple(part.shape)} in the saved state")
                check_finite(where, local_part(part))


def state_by_parameter_number(saved: Mapping[str, Any]) -> dict[int, Any]:
    """An optimizer's state of each parameter, by its number. torch.distributed.checkpoint makes words of
    numbers, which torch would pass over, and drops a dict that is empty.
    """
    numbers = {str(number): number for group in saved["param_groups"] for number in group["params"]}
    return {numbers[str(number)]: state for number, state in saved.get("state", {}).items()}
