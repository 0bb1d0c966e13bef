"""Redistribution of saved states over another number of workers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsify.ranges import PositiveInt
from sparsify.wrappers.saved_states import (
    StateMismatch,
    check_keys,
    check_saved_layout,
    check_saved_matches,
    check_value,
)

RESIDUAL_PARTS = {"feedback", "residual"}  # hold what a worker has not delivered yet, or its momentum


def redistribute(saved: Sequence[Mapping[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return the saved states of all workers, by rank, for another number of workers.

    Every new worker gets the average of the old workers' residuals, for future updates depend on that alone,
    and the parts that are equal on all old workers: momentum, how often they drew, the inner optimizer's
    state. Not defined for what belongs to one worker (thresholds, generators) or to a number of workers
    (regions). For as many workers as there were, the states are what they were.

    Args:
        saved: each worker's `state_dict()`, of the object that `sparsify.distribute` or `sparsify.register`
            returned.
        size: the new number of workers.

    Raises:
        StateMismatch: these are not the states of all workers in one step, or a state is broken, or has parts
            that are neither residuals nor equal on all workers.
    """
    check_value("size", size, PositiveInt)
    states = list(saved) if isinstance(saved, Sequence) and not isinstance(saved, str) else []
    if not states:
        raise StateMismatch("give a list of all workers' saved states, in the order of their ranks")
    first = states[0] if isinstance(states[0], Mapping) else {}
    if "local" in first:
        if size == len(states):
            return [dict(state) for state in states]
        raise StateMismatch(
            f"these are states of local steps, of {len(states)} workers, each with parameters of its own: "
            f"for {size} begin anew from the anchor, saved within `with optimizer.at_anchor():`"
        )
    is_optimizer = "method" in first and "buckets" not in first
    if is_optimizer:
        for state in states:
            check_keys("an optimizer's saved state", state, ("method", "epoch"), None)
    methods = [state["method"] for state in states] if is_optimizer else states
    _check_one_state_per_rank(methods)
    if size == len(states):
        return [dict(state) for state in states]
    buckets = list[dict[str, Any]]()
    for alike in zip(*(state["buckets"] for state in methods), strict=True):
        merged = _merge_states([bucket["state"] for bucket in alike], methods[0])
        buckets.append({**alike[0], "state": merged})
    merged_methods = [{**methods[0], "rank": rank, "size": size, "buckets": buckets} for rank in range(size)]
    if not is_optimizer:
        return merged_methods
    inner_states = [{name: part for name, part in state.items() if name != "method"} for state in states]
    _check_equal_trees("the optimizers' saved states", inner_states)
    return [{**inner_states[0], "method": method} for method in merged_methods]


def _check_one_state_per_rank(states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states that are not those of all workers in one step, in the order of their ranks."""
    for rank, state in enumerate(states):
        check_saved_layout(state)
        if state["rank"] != rank or state["size"] != len(states):
            raise StateMismatch(
                f"give the states of all {state['size']} workers, in the order of their ranks; at place "
                f"{rank} of {len(states)} is that of rank {state['rank']}"
            )
        check_saved_matches(state, {**states[0], "rank": rank})
    _check_equal_trees("the saved states' step", [state["step"] for state in states])


def _merge_states(parts: Sequence[Any], saved: Mapping[str, Any], is_residual: bool = False) -> Any:
    """Return one state for all workers, of all workers' states of a bucket: residuals are averaged.

    Args:
        saved: the saved state that has these parts, for the error message.
        is_residual: the parts are residuals.

    Raises:
        StateMismatch: a part is no residual and differs between workers.
    """
    first = parts[0]
    if isinstance(first, Mapping):
        return {
            name: _merge_states([part[name] for part in parts], saved, is_residual or name in RESIDUAL_PARTS)
            for name in first
        }
    if is_residual and isinstance(first, Tensor):
        total = sum((part.to(first.device) for part in parts[1:]), start=first)
        return total / len(parts)
    # A list has one number of each worker.
    if (isinstance(first, list) and first) or not all(are_equal_trees(part, first) for part in parts):
        raise StateMismatch(
            f"{saved['method']} remembers more than residuals, which can't be shared out anew; resume with "
            f"{saved['size']} workers"
        )
    return copy.deepcopy(first)


def _check_equal_trees(where: str, trees: Sequence[Any]) -> None:
    """Refuse trees, by rank, that are not equal on all workers."""
    for rank, tree in enumerate(trees):
        if not are_equal_trees(tree, trees[0]):
            raise StateMismatch(
                f"{where} of ranks 0 and {rank} differ; give those of one checkpoint of all workers"
            )


def are_equal_trees(first: Any, second: Any) -> bool:
    """Return True if two trees have equal keys, numbers and bits."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            are_equal_trees(part, second[name]) for name, part in first.items()
        )
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(are_equal_trees, first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first.cpu(), second.cpu())
    return type(first) is type(second) and bool(first == second)
