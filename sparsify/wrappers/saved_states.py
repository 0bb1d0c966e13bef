"""Saved states: their layout, and whether they fit. All workers load theirs, or none does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from sparsify import ranges
from sparsify.comm import Comm, gather_json
from sparsify.core.bucket import local_shard
from sparsify.ranges import NonNegativeInt, PositiveInt, format_value

FORMAT = 1  # of a saved state; counts up when older ones can't be read any more
GROUPS_AND_STATE = ("param_groups", "state")
# A key in the parameter groups of a saved state: optimizers keep there what they do not know.
MARK = "saved by sparsify"
NUM_STATES = "num_states"  # key of the number of parameters that the inner optimizer has a state of
TOP_LEVEL = {
    "format": NonNegativeInt,
    "method": str,
    "step": NonNegativeInt,
    "rank": NonNegativeInt,
    "size": PositiveInt,
    "buckets": Any,
}


class StateMismatch(ValueError):
    """A saved state that is of another training, or broken. Nothing of it was loaded."""


def dump(state: Any) -> Any:
    """Return a copy of a state as a plain tree of tensors and numbers, for `torch.load(weights_only=True)`.

    Dataclasses and named tuples become dicts, generators their state. Fields whose metadata say
    `saved: False` (work buffers) are left out. A dataclass without other fields becomes None, because
    torch.distributed.checkpoint drops empty dicts.
    """
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Generator):
        return state.get_state()
    parts = saved_parts_by_name(state)
    if parts is not None:
        return {name: dump(part) for name, part in parts.items()} or None
    if isinstance(state, list | tuple):
        return [dump(part) for part in state]
    assert state is None or isinstance(state, bool | int | float | str), f"{type(state)} can't be saved"
    return state


def restore(state: Any, saved: Any) -> Any:
    """Restore `saved`, from `dump`, in a state made by `init`. Tensors of equal size are written in place."""
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
    own_parts = saved_parts_by_name(state)
    if own_parts is not None:
        parts = {name: restore(part, saved[name]) for name, part in own_parts.items()}
        if hasattr(state, "_replace"):
            return state._replace(**parts)
        for name, part in parts.items():
            setattr(state, name, part)
        return state
    if isinstance(state, list | tuple) and len(state) == len(saved):
        return type(state)(restore(item, part) for item, part in zip(state, saved, strict=True))
    return copy.deepcopy(saved)


def saved_parts_by_name(state: Any) -> dict[str, Any] | None:
    """Return the saved parts of a dataclass, a named tuple or a mapping; None for anything else."""
    if is_dataclass(state):
        saved_fields = [field for field in fields(state) if field.metadata.get("saved", True)]
        return {field.name: getattr(state, field.name) for field in saved_fields}
    if hasattr(state, "_asdict"):
        return dict(state._asdict())
    return dict(state) if isinstance(state, Mapping) else None


def check_saved_layout(saved: Any) -> None:
    """Refuse a saved state with a wrong layout. States of older versions have no `shapes`."""
    if isinstance(saved, Mapping) and saved.get("format", FORMAT) != FORMAT:
        raise StateMismatch(
            f"a saved state of format {format_value(saved['format'])} can't be read; this version reads "
            f"{FORMAT}"
        )
    check_keys("a saved state", saved, TOP_LEVEL)
    for name, allowed in TOP_LEVEL.items():
        check_value(name, saved[name], allowed)
    if not isinstance(saved["buckets"], list | tuple):
        raise StateMismatch(f"buckets is {format_value(type(saved['buckets']).__name__)}, and must be a list")
    for number, bucket in enumerate(saved["buckets"]):
        where = f"buckets[{number}]"
        check_keys(where, bucket, ("names", "state"), ("shapes",))
        check_value(f"{where}.names", bucket["names"], list[str])
        check_value(f"{where}.shapes", bucket.get("shapes", []), list[list[NonNegativeInt]])


def check_saved_matches(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a saved state that is not of this worker's method and model.

    Args:
        saved: after `check_saved_layout`.
        expected: the saved state that this worker would have; its states may be as `dump` leaves them.
    """
    if saved["method"] != expected["method"]:
        raise StateMismatch(
            f"the saved state is of {saved['method']}, and this is {expected['method']}; build the method "
            "with the hyperparameters that it was saved with"
        )
    if saved["size"] != expected["size"]:
        raise StateMismatch(
            f"the saved state is of {saved['size']} workers, and there are {expected['size']}; resume with "
            "as many, or pass all workers' states through sparsify.redistribute first, which shares the "
            "residuals out"
        )
    if saved["rank"] != expected["rank"]:
        raise StateMismatch(
            f"the saved state is of rank {saved['rank']}, and this is rank {expected['rank']}; every "
            "worker saves and loads its own. Where there is only one, load the inner optimizer's alone "
            "(`optimizer.inner_optimizer`): training goes on without what the workers still owed"
        )
    saved_names = [bucket["names"] for bucket in saved["buckets"]]
    expected_names = [bucket["names"] for bucket in expected["buckets"]]
    if saved_names != expected_names:
        differences = (
            f"where this has {format_value(expected_bucket_names)}, it has {format_value(saved_bucket_names)}"
            for saved_bucket_names, expected_bucket_names in zip(saved_names, expected_names, strict=False)
            if saved_bucket_names != expected_bucket_names
        )
        why = next(differences, f"this has {len(expected_names)} buckets, and it has {len(saved_names)}")
        raise StateMismatch(
            f"the saved state is of a model with other parameters, or of other buckets: {why}"
        )
    for number, (bucket, like) in enumerate(zip(saved["buckets"], expected["buckets"], strict=True)):
        shapes = like.get("shapes")
        if bucket.get("shapes", shapes) != shapes:
            raise StateMismatch(
                f"the saved state is of a model with other shapes: of {format_value(like['names'])} this has "
                f"{format_value(shapes)}, and it has {format_value(bucket['shapes'])}"
            )
        check_saved_part(f"buckets[{number}].state", bucket["state"], like["state"])


def check_saved_part(
    where: str, saved: Any, expected: Any, allowed: Any = Any, any_length: bool = False
) -> None:
    """Refuse a part of a saved state that has another type or shape than this worker's.

    Args:
        where: the path to the part, for messages.
        allowed: the range of a value, by the annotation of its field.
        any_length: the number of elements changes while training, by the metadata of the field.
    """
    if isinstance(expected, Generator):
        _check_saved_finite_tensor(where, saved, expected.get_state(), any_length=False)
        try:
            Generator(expected.device).set_state(saved.cpu())
        except RuntimeError as error:
            raise StateMismatch(f"{where} is no state of a random generator: {error}") from error
    elif isinstance(expected, Tensor):
        _check_saved_finite_tensor(where, saved, expected, any_length)
    else:
        parts = saved_parts_by_name(expected)
        if parts is None:
            like = list[Any] if isinstance(expected, list) else type(expected)
            has_range = allowed is not Any and ranges.is_plain_data_type(allowed)
            check_value(where, saved, allowed if has_range else like)
        elif parts or saved is not None:
            check_keys(where, saved, parts)
            hints: dict[str, Any] = (
                {} if isinstance(expected, Mapping) else ranges.type_hints(expected.__class__)
            )
            resizable = resizable_fields(expected)
            for name, part in parts.items():
                check_saved_part(
                    f"{where}.{name}", saved[name], part, hints.get(name, Any), name in resizable
                )


def resizable_fields(state: Any) -> set[str]:
    """Return the names of a dataclass's fields whose number of elements changes while training."""
    state_fields = fields(state) if is_dataclass(state) else ()
    return {field.name for field in state_fields if field.metadata.get("any_size")}


def _check_saved_finite_tensor(where: str, saved: Any, expected: Tensor, any_length: bool) -> None:
    """Refuse a value that is no finite tensor of the shape and dtype of `expected`."""
    wanted = f"a tensor of {'any number' if any_length else tuple(expected.shape)} of {expected.dtype}"
    if not isinstance(saved, Tensor) or saved.layout is not torch.strided or saved.is_meta:
        raise StateMismatch(f"{where} is {format_value(type(saved).__name__)}, and must be {wanted}")
    is_shaped = saved.dim() == expected.dim() if any_length else saved.shape == expected.shape
    if not is_shaped or saved.dtype != expected.dtype:
        raise StateMismatch(f"{where} has {tuple(saved.shape)} of {saved.dtype}, and must be {wanted}")
    check_finite(where, saved)


def check_finite(where: str, saved: Tensor) -> None:
    """Refuse a tensor with NaN or Inf."""
    if not torch.isfinite(saved).all():
        raise StateMismatch(f"{where} has a NaN or Inf; go back to an earlier checkpoint")


def check_value(where: str, saved: Any, allowed: Any) -> None:
    """Refuse a value outside of its range, or of another type."""
    kind = format_value(type(saved).__name__) if isinstance(saved, Tensor | Mapping) else None
    if kind and allowed is not Any:
        raise StateMismatch(f"{where} is a {kind}, and must be {ranges.describe_type(allowed)}")
    try:
        ranges.check_value(where, saved, allowed)
    except ValueError as error:
        raise StateMismatch(str(error)) from error


def check_keys(
    where: str, saved: Any, needed: Collection[str], optional: Collection[str] | None = ()
) -> None:
    """Refuse a value that is no dict, lacks a needed key, or has an unknown one.

    Args:
        optional: keys that may be there, too; None: any.
    """
    if not isinstance(saved, Mapping):
        raise StateMismatch(f"{where} is a dict, and this is {format_value(type(saved).__name__)}")
    missing = [key for key in needed if key not in saved]
    if missing:
        raise StateMismatch(f"{where} lacks {missing[0]!r}; it has: {format_value([*saved])}")
    if optional is None:
        return
    unknown = [key for key in saved if key not in needed and key not in optional]
    if unknown:
        raise StateMismatch(f"{where} has {format_value(unknown[0])!r}, which no state like it has")


def check_all_can_load(
    comm: Comm, device: torch.device, check_and_collect_facts: Callable[[], Mapping[str, Any]]
) -> None:
    """Let every worker check its own saved state, before any worker loads its own.

    Args:
        check_and_collect_facts: raises `StateMismatch`, or returns by name what must be equal on all workers.

    Raises:
        StateMismatch: on all workers: a worker has refused its state, or the states differ.
    """
    refusal: Exception | None = None
    result: dict[str, Any] = {}
    try:
        result["facts"] = dict(check_and_collect_facts())
    except Exception as error:  # of any type: the other workers must know
        refusal = error
        result["why"] = str(error) if isinstance(error, StateMismatch) else repr(error)
    result_by_rank = gather_json(comm, result, device)
    if isinstance(refusal, StateMismatch):
        raise refusal
    if refusal is not None:
        raise StateMismatch(f"the saved state can't be read: {refusal!r}") from refusal
    for rank, rank_result in enumerate(result_by_rank):
        if "why" in rank_result:
            raise StateMismatch(f"rank {rank} can't load its state, so no worker does: {rank_result['why']}")
    for fact, own_value in result["facts"].items():
        values = [rank_result["facts"][fact] for rank_result in result_by_rank]
        if any(value != own_value for value in values):
            raise StateMismatch(
                f"the workers' saved states differ in their {fact}, which is, by rank, "
                f"{format_value(values)}; load those of one checkpoint"
            )


@contextmanager
def restore_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give the optimizer its old state again if loading a new one, within, raises an error."""
    attributes = vars(optimizer)
    before = {name: attributes[name] for name in GROUPS_AND_STATE if name in attributes}
    try:
        yield
    except BaseException:
        attributes.update(before)
        raise


def state_dict_with_mark(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state, marked as a part of a wrapper's."""
    inner = optimizer.state_dict()
    groups = [{**group, MARK: True} for group in inner["param_groups"]]
    return {**inner, "param_groups": groups, NUM_STATES: len(inner["state"])}


def state_dict_without_mark(_: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state without the mark: a hook for the inner optimizer's `load_state_dict`."""
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return dict(saved)
    plain = [{key: part for key, part in group.items() if key != MARK} for group in groups]
    return {**saved, "param_groups": plain}


def check_no_wrapper_state_loaded(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has itself loaded a state that a wrapper saved.

    Raises:
        ValueError: the optimizer's groups have the mark of such a state.
    """
    if any(MARK in group for group in optimizer.param_groups):
        raise ValueError(
            "this optimizer has loaded a state that was saved by what sparsify.distribute returned, without "
            "the rest of it, such as residuals; load it into what sparsify.distribute returns, each worker "
            "its own; or, to go on without the rest, into `optimizer.inner_optimizer` of that"
        )


def load_inner_optimizer_state(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Load the inner optimizer's state.

    Raises:
        StateMismatch: the state is of another type of optimizer, or of other parameters, or has a NaN or Inf.
    """
    name = type(optimizer).__name__
    needed = ("param_groups",) if NUM_STATES in saved else GROUPS_AND_STATE
    check_keys("the optimizer's saved state", saved, needed, None)
    # Torch adds to `defaults` when it loads, so the groups tell what is expected.
    expected_keys = [
        key for key in optimizer.defaults if all(key in group for group in optimizer.param_groups)
    ]
    try:
        states = _state_by_parameter_number(saved)
        optimizer.load_state_dict({**saved, "state": states})
    except Exception as error:  # of any type that an optimizer may raise
        raise StateMismatch(f"{name} can't load its part of the saved state: {error!r}") from error
    num_saved = saved.get(NUM_STATES, len(states))
    if len(states) != num_saved:
        raise StateMismatch(
            f"the saved state lacks what {name} remembers: it had that of {format_value(num_saved)} "
            f"parameters, and has that of {len(states)}"
        )
    for group in optimizer.param_groups:
        missing = [key for key in expected_keys if key not in group]
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
                check_finite(where, local_shard(part))


def _state_by_parameter_number(saved: Mapping[str, Any]) -> dict[int, Any]:
    """Return an optimizer's state of each parameter, by the parameter's number.

    torch.distributed.checkpoint turns the numbers into words, which torch would skip, and drops empty dicts.
    """
    number_by_word = {str(number): number for group in saved["param_groups"] for number in group["params"]}
    return {number_by_word[str(number)]: state for number, state in saved.get("state", {}).items()}
