"""Saved states for another number of workers."""

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

OWED = {"feedback", "residual"}  # parts that hold what a worker has not delivered yet, or its momentum


def redistribute(saved: Sequence[Mapping[str, Any]], size: int) -> list[dict[str, Any]]:
    """All workers' saved states, by rank, for another number of workers.

    Every new worker gets the average of the old workers' residuals, for that is all that future updates
    depend on, and what all of them remember alike: momentum, how often they drew, the inner optimizer's
    state. Not defined for what belongs to one worker (thresholds, generators) or to a number of workers
    (regions). For as many workers as there were, the states are what they were.

    Args:
        saved: of each worker what `state_dict` returned, of `sparsify.distribute`'s optimizer or of what
            `sparsify.register` returns.

    Raises:
        StateMismatch: these are not all workers' states of one step, or one is broken, or the method
            remembers more.
    """
    check_value("size", size, PositiveInt)
    states = list(saved) if isinstance(saved, Sequence) and not isinstance(saved, str) else []
    if not states:
        raise StateMismatch("give a list of all workers' saved states, in the order of their ranks")
    if isinstance(states[0], Mapping) and "local" in states[0]:
        if size == len(states):
            return [dict(state) for state in states]
        raise StateMismatch(
            f"these are states of local steps, of {len(states)} workers, each with parameters of its own: "
            f"for {size} begin anew from the anchor, saved within `with optimizer.at_anchor():`"
        )
    if isinstance(states[0], Mapping) and "method" in states[0] and "buckets" not in states[0]:
        for state in states:
            check_keys("an optimizer's saved state", state, ("method", "epoch"), None)
        methods = redistribute([state["method"] for state in states], size)
        if size == len(states):
            return [dict(state) for state in states]
        rest = [{name: part for name, part in state.items() if name != "method"} for state in states]
        check_equal_trees("the optimizers' saved states", rest)
        return [{**rest[0], "method": method} for method in methods]
    for rank, state in enumerate(states):
        check_saved_layout(state)
        if state["rank"] != rank or state["size"] != len(states):
            raise StateMismatch(
                f"give the states of all {state['size']} workers, in the order of their ranks; at place "
                f"{rank} of {len(states)} is that of rank {state['rank']}"
            )
        check_saved_matches(state, {**states[0], "rank": rank})
    check_equal_trees("the saved states' step", [state["step"] for state in states])
    if size == len(states):
        return [dict(state) for state in states]
    buckets = [
        {**same[0], "state": merge_states([bucket["state"] for bucket in same], states[0])}
        for same in zip(*(state["buckets"] for state in states), strict=True)
    ]
    return [{**states[0], "rank": rank, "size": size, "buckets": buckets} for rank in range(size)]


def merge_states(parts: Sequence[Any], of: Mapping[str, Any], is_owed: bool = False) -> Any:
    """One state for all, of all workers' states of a bucket; tensors that workers owe are averaged.

    Raises:
        StateMismatch: one holds what can't be for all.
    """
    first = parts[0]
    if isinstance(first, Mapping):
        return {
            name: merge_states([part[name] for part in parts], of, is_owed or name in OWED) for name in first
        }
    if is_owed and isinstance(first, Tensor):
        total = sum((part.to(first.device) for part in parts[1:]), start=first)
        return total / len(parts)
    # A list has one number a worker.
    if (isinstance(first, list) and first) or not all(are_equal_trees(part, first) for part in parts):
        raise StateMismatch(
            f"{of['method']} remembers more than residuals, which can't be shared out anew; resume with "
            f"{of['size']} workers"
        )
    return copy.deepcopy(first)


def check_equal_trees(where: str, trees: Sequence[Any]) -> None:
    """Refuse what is not the same on all workers."""
    for rank, tree in enumerate(trees):
        if not are_equal_trees(tree, trees[0]):
            raise StateMismatch(
                f"{where} of ranks 0 and {rank} differ; give those of one checkpoint of all workers"
            )


def are_equal_trees(one: Any, other: Any) -> bool:
    """True where two trees have the same keys, numbers and bits."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            are_equal_trees(part, other[name]) for name, part in one.items()
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_equal_trees, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)
