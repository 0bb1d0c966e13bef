"""What the file of a figure has, and whether one has it: asked before anything is measured."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from sparsify.registry import BrokenFile

if TYPE_CHECKING:  # listing the items must not wait for pandas
    from analysis import plots
    from analysis.claims import Claim
    from analysis.frames import Frames
    from analysis.tables import Table

PROFILES = ("smoke", "laptop", "paper")


class Figure(Protocol):
    """What every figure's file has. TITLE is its heading."""

    TITLE: str

    def runs(self, profile: str) -> list[list[str]]:
        """The settings of every run that it needs, as one would type them behind `run`; none where it is
        drawn from published tables.
        """

    def draw(self, frames: Frames, profile: str) -> plots.Figure:
        """The picture.

        Raises:
            ValueError: there is nothing to draw.
        """


class Parts(Protocol):
    """What it may have besides, as functions; and SCALE, what the paper ran (`claims.reduced`), without which
    no number of its runs is held to be comparable; and BIBTEX, how a paper is cited that _papers.py lacks.
    """

    def more_runs(self, profile: str) -> list[list[str]]:
        """Runs that make the figure firmer, mostly with more seeds: made with --all."""

    def table(self, frames: Frames) -> Table | list[Table]:
        """The numbers behind the picture."""

    def claims(self) -> list[Claim]:
        """What the paper states, and how our value for it is computed."""

    def caption(self, frames: Frames, profile: str) -> str:
        """What is drawn, where it was measured, and how; without it, where it was measured."""


REQUIRED, OPTIONAL = ("runs", "draw"), ("more_runs", "table", "claims", "caption")
VALUES = ("TITLE", "SCALE", "BIBTEX")


@cache
def check(module: ModuleType) -> None:
    """Refuse a file that lacks a part, has one with other parameters, or has one whose name is misspelt.

    Raises:
        BrokenFile: with the file, and the line where there is one.
    """
    missing = [name for name in ("TITLE", *REQUIRED) if not hasattr(module, name)]
    if missing:
        raise BrokenFile(f"{module.__file__} has no {', '.join(missing)}, which every figure's file has")
    for name in (*REQUIRED, *OPTIONAL):
        if hasattr(module, name):
            _check_parameters(module, name)
    _check_spelling(module)
    for profile in PROFILES:
        for name in ("runs", "more_runs"):
            if hasattr(module, name):
                _check_runs(module, name, profile)
    _check_scale(module)


def check_claims(module: ModuleType) -> None:
    """Refuse claims that can't be made: an error in them would else be seen after the last run.

    Raises:
        BrokenFile: with the file and the line.
    """
    from analysis.claims import Claim

    if not hasattr(module, "claims"):
        return
    found = _called(module, "claims")
    if strangers := [claim for claim in found if not isinstance(claim, Claim)]:
        raise BrokenFile(f"{_line(module, 'claims')}: claims() lists {strangers[0]!r}, which is no Claim")


def _check_parameters(module: ModuleType, name: str) -> None:
    wanted = list(inspect.signature(getattr(Figure, name, None) or getattr(Parts, name)).parameters)[1:]
    function = getattr(module, name)
    if not callable(function):
        raise BrokenFile(f"{module.__file__}: {name} is no function; write def {name}({', '.join(wanted)})")
    parameters = inspect.signature(function).parameters.values()
    needed = [each.name for each in parameters if each.default is inspect.Parameter.empty]
    if needed != wanted:
        raise BrokenFile(
            f"{_line(module, name)}: {name}({', '.join(needed)}) is called as {name}({', '.join(wanted)}): "
            "name its parameters so"
        )


def _check_spelling(module: ModuleType) -> None:
    """A part with another name would never be asked for."""
    own = [
        name for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", module.__name__) == module.__name__
    ]  # fmt: skip
    for part in (*OPTIONAL, *VALUES):
        if hasattr(module, part):
            continue
        kind = [
            name for name in own if name.isupper() == part.isupper() and name not in (*REQUIRED, *OPTIONAL)
        ]
        if close := get_close_matches(part, kind, n=1, cutoff=0.8):
            raise BrokenFile(
                f"{_line(module, close[0])}: nothing asks a figure for {close[0]}; did you mean {part}? "
                f"If not, call it _{close[0]}"
            )


def _check_runs(module: ModuleType, name: str, profile: str) -> None:
    runs = _called(module, name, profile)
    if not _are_words(runs):
        raise BrokenFile(
            f"{_line(module, name)}: {name}({profile!r}) is to list the settings of each run, as in "
            f"[['method=topk', 'seed=0']], and returned {runs!r:.80}"
        )


def _are_words(runs: Any) -> bool:
    return isinstance(runs, Sequence) and all(
        not isinstance(run, str) and isinstance(run, Sequence) and all(isinstance(word, str) for word in run)
        for run in runs
    )


def _check_scale(module: ModuleType) -> None:
    scale = getattr(module, "SCALE", None)
    if scale is None:
        return
    from analysis.claims import SCALE_NAMES

    if strangers := [column for column in scale if column not in SCALE_NAMES]:
        raise BrokenFile(
            f"{module.__file__}: SCALE has {strangers[0]!r}, which no scale knows; there are: "
            + ", ".join(SCALE_NAMES)
        )


def _called(module: ModuleType, name: str, *arguments: str) -> Any:
    """What one of its functions returns.

    Raises:
        BrokenFile: it raised something.
    """
    function: Callable[..., Any] = getattr(module, name)
    try:
        return function(*arguments)
    except Exception as error:  # the file's own code may raise anything
        steps = [
            step for step in traceback.extract_tb(error.__traceback__) if step.filename == module.__file__
        ]
        line = steps[-1].lineno if steps else 1
        call = f"{name}({', '.join(map(repr, arguments))})"
        raise BrokenFile(
            f"{module.__file__}, line {line}: {call} raised {type(error).__name__}: {error}"
        ) from error


def _line(module: ModuleType, name: str) -> str:
    """Where a name of a file is defined."""
    code = getattr(getattr(module, name), "__code__", None)
    if code is not None:
        return f"{code.co_filename}, line {code.co_firstlineno}"
    return str(module.__file__)
