"""What the file of a figure has, and whether one has it: asked before anything is measured."""

from __future__ import annotations

import inspect
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from experiments.config.run import Run, RunOrWords
from experiments.figures import papers
from sparsify.core.spec import BrokenFile
from sparsify.ranges import describe_unknown

if TYPE_CHECKING:  # listing the items must not wait for pandas
    from analysis import plots
    from analysis.claims import Claim
    from analysis.pictures.summary import Theirs
    from analysis.records.frames import Frames
    from analysis.tables import Table

PROFILES = ("smoke", "laptop", "paper")


class Figure(Protocol):
    """Parts that every figure's file has. TITLE is its heading."""

    TITLE: str

    def runs(self, profile: str) -> Sequence[RunOrWords]:
        """Every run that it needs: a Run each, or a list of the words that one would type behind `run`; none
        where it is drawn from published tables.
        """

    def draw(self, frames: Frames, profile: str) -> plots.Figure:
        """The picture.

        Raises:
            ValueError: there is nothing to draw.
        """


class OptionalParts(Protocol):
    """Functions that it may have besides; and SCALE, what the paper ran (`claims.reduced`), without which no
    number of its runs is held to be comparable; and BIBTEX, how a paper is cited that papers/ lacks.
    """

    def more_runs(self, profile: str) -> Sequence[RunOrWords]:
        """Runs that make the figure firmer, mostly with more seeds: made with --all."""

    def table(self, frames: Frames) -> Table | list[Table]:
        """The numbers behind the picture."""

    def claims(self) -> list[Claim]:
        """Statements of the paper, each with how our value for it is computed."""

    def caption(self, frames: Frames, profile: str) -> str:
        """Words on what is drawn, where it was measured, and how; without it, those of the paper's file, or
        where it was measured.
        """

    def facts(self, frames: Frames) -> Mapping[str, object]:
        """What the caption in the paper's file leaves open, by its names in braces."""

    def theirs(self) -> Mapping[str, Theirs]:
        """By `method_id`, what the paper says of the quantities of which a summary tells."""


ACCURACY = ("%", "points")  # units that an accuracy, or a difference of two, may have
REQUIRED, OPTIONAL = ("runs", "draw"), ("more_runs", "table", "claims", "caption", "facts", "theirs")
PARTS = (*REQUIRED, *OPTIONAL)
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
    for name in PARTS:
        if hasattr(module, name):
            _check_parameters(module, name)
    _check_spelling(module)
    for profile, name in product(PROFILES, ("runs", "more_runs")):
        if hasattr(module, name):
            _check_runs(module, name, profile)
    _check_scale(module)


def identified(item: str, claims: Sequence[Claim]) -> list[Claim]:
    """The claims with their whole ids: the item's, and their own or one that is derived from their text:
    letters and digits, in words ('top-k-ends-above'); dots stay.
    """
    words = [re.findall(r"[a-z0-9._]+", (claim.id or claim.text).lower()) for claim in claims]
    slugs = ["-".join(each).replace("-.", ".") for each in words]
    return [replace(claim, id=f"{item}.{slug}") for claim, slug in zip(claims, slugs, strict=True)]


def check_claims(item: str, module: ModuleType) -> None:
    """Refuse claims that can't be made, two of one id, and answers to statements that no paper makes: an
    error in them would else be seen after the last run.

    Raises:
        BrokenFile: with the file and the line.
    """
    from analysis.claims import Claim

    if not hasattr(module, "claims"):
        return
    found = _called(module, "claims")
    if strangers := [claim for claim in found if not isinstance(claim, Claim)]:
        raise BrokenFile(f"{_line(module, 'claims')}: claims() lists {strangers[0]!r}, which is no Claim")
    ids = Counter(claim.id for claim in identified(item, found))
    if twice := [name for name, count in ids.items() if count > 1]:
        raise BrokenFile(f"{_line(module, 'claims')}: two claims have the id {twice[0]}")
    known = papers.statements()
    if unsaid := [name for claim in found for name in claim.answers if name not in known]:
        raise BrokenFile(
            f"{_line(module, 'claims')}: a claim answers {unsaid[0]!r}, but no paper states that; see "
            f"{papers.FOLDER}"
        )
    if why := _ambiguous(module, found):
        raise BrokenFile(f"{_line(module, 'claims')}: {why}")


def _ambiguous(module: ModuleType, claims: Sequence[Claim]) -> str:
    """The first rule that leaves open what it is about, and what to say instead; empty where none does."""
    measured = [claim for claim in claims if not claim.rederived]
    runs = [Run.of(run) for profile in PROFILES for run in module.runs(profile)]
    if not runs or not measured:
        return ""
    if (published := [claim for claim in measured if claim.is_published]) and not hasattr(module, "SCALE"):
        return (
            f"{published[0].id or published[0].text!r} has a published number, but the file does not say "
            "what was run there: give SCALE, the paper's values by column of the records"
        )
    is_emulated = any(run.settings.get("cluster") == "netns" for run in runs)
    if linkless := [claim for claim in measured if is_emulated and claim.timed and not claim.link]:
        return (
            f"{linkless[0].id or linkless[0].text!r} is about times over emulated links, but not over which: "
            "give link, a choice of conf/link"
        )
    from experiments.config.choices import options
    from experiments.tasks import chance, has_accuracy

    named = {link: claim for claim in measured if claim.link for link in claim.link.lower().split(" to ")}
    if strange := [link for link in named if link not in options("link")]:
        where = named[strange[0]]
        return f"{where.id or where.text!r}: {describe_unknown('link', strange[0], options('link'))}"
    tasks = {str(run.settings["task"]) for run in runs if "task" in run.settings}
    levelless = sorted(task for task in tasks if has_accuracy(task) and chance(task) is None)
    trained = [claim for claim in measured if claim.unit in ACCURACY and not claim.timed]
    if levelless and (open_ := [claim for claim in trained if claim.chance is None]):
        return (
            f"{open_[0].id or open_[0].text!r} may be about accuracies of {levelless[0]}, but nobody knows "
            "what guessing gives there, by which trainings are told that learned nothing: give chance, "
            "percent of top-1"
        )
    return ""


def _check_parameters(module: ModuleType, name: str) -> None:
    asked = inspect.signature(getattr(Figure if name in REQUIRED else OptionalParts, name))
    wanted = list(asked.parameters)[1:]
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
        if not name.startswith("_") and not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    ]  # fmt: skip
    for part in (*OPTIONAL, *VALUES):
        kind = [name for name in own if name.isupper() == part.isupper() and name not in PARTS]
        close = get_close_matches(part, kind, n=1, cutoff=0.8)
        if close and not hasattr(module, part):
            raise BrokenFile(
                f"{_line(module, close[0])}: nothing asks a figure for {close[0]}; did you mean {part}? "
                f"If not, call it _{close[0]}"
            )


def _check_runs(module: ModuleType, name: str, profile: str) -> None:
    runs = _called(module, name, profile)
    if not isinstance(runs, Sequence) or not all(isinstance(run, Run) or _are_words(run) for run in runs):
        raise BrokenFile(
            f"{_line(module, name)}: {name}({profile!r}) is to list the settings of each run, as in "
            f"[['method=topk', 'seed=0']], and returned {runs!r:.80}"
        )


def _are_words(run: Any) -> bool:
    is_list = isinstance(run, Sequence) and not isinstance(run, str)
    return is_list and all(isinstance(word, str) for word in run)


def _check_scale(module: ModuleType) -> None:
    if scale := getattr(module, "SCALE", None):
        from analysis.evidence import SCALE_NAMES

        if strangers := [column for column in scale if column not in SCALE_NAMES]:
            raise BrokenFile(
                f"{module.__file__}: SCALE has {strangers[0]!r}, which no scale knows; there are: "
                + ", ".join(SCALE_NAMES)
            )


def _called(module: ModuleType, name: str, *arguments: str) -> Any:
    """Result of one of its functions.

    Raises:
        BrokenFile: it raised something.
    """
    function: Callable[..., Any] = getattr(module, name)
    try:
        return function(*arguments)
    except Exception as error:  # the file's own code may raise anything
        steps = traceback.extract_tb(error.__traceback__)
        line = next((step.lineno for step in reversed(steps) if step.filename == module.__file__), 1)
        call = f"{name}({', '.join(map(repr, arguments))})"
        raise BrokenFile(
            f"{module.__file__}, line {line}: {call} raised {type(error).__name__}: {error}"
        ) from error


def _line(module: ModuleType, name: str) -> str:
    """File and line that define a name."""
    code = getattr(getattr(module, name), "__code__", None)
    if code is not None:
        return f"{code.co_filename}, line {code.co_firstlineno}"
    return str(module.__file__)
