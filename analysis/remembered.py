"""What is computed of the same frames again and again, by picture, tables, claims and caption, is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from analysis.frames import Frames

P = ParamSpec("P")
R = TypeVar("R")
_FOUND: dict[tuple[int, int], dict[Any, Any]] = {}  # by the identity of runs and of steps


def remembered(function: Callable[Concatenate[Frames, P], R]) -> Callable[Concatenate[Frames, P], R]:
    """Calls a function of runs and steps once for the same frames and arguments, for as long as the frames
    live. Neither they nor what it returns may be changed in place.
    """

    @wraps(function)
    def found(frames: Frames, /, *args: P.args, **kwargs: P.kwargs) -> R:
        call = (
            function,
            *map(_hashable, args),
            *((name, _hashable(kwargs[name])) for name in sorted(kwargs)),
        )
        kept = _of(frames)
        if call not in kept:
            kept[call] = function(frames, *args, **kwargs)
        result: R = kept[call]
        return result

    return found


def _of(frames: Frames) -> dict[Any, Any]:
    key = (id(frames.runs), id(frames.steps))
    if key not in _FOUND:
        _FOUND[key] = {}
        for table in (frames.runs, frames.steps):  # another table may get its identity afterwards
            weakref.finalize(table, _FOUND.pop, key, None)
    return _FOUND[key]


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument
