"""A figure or table of a paper as an object, made from its file once and handed on."""

from __future__ import annotations

import inspect
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from experiments.config.folders import ResultFolders
from experiments.config.run import Run, RunOrWords
from experiments.figures import papers
from sparsify.core.spec import BrokenFile
from sparsify.ranges import describe_unknown

if TYPE_CHECKING:  # listing the figures must not wait for pandas
    from analysis import plots
    from analysis.claims import Claim, Verdict
    from analysis.pictures.summary import PublishedResult
    from analysis.records.frames import Frames
    from analysis.tables import Table

PROFILES = ("smoke", "laptop", "paper")
PUBLISHED = "published"  # stands in place of a profile where a figure has no runs of ours


class FigureModule(Protocol):
    """Module of a figure's file, by the parts that every such file has; TITLE is the heading."""

    TITLE: str

    def runs(self, profile: str) -> Sequence[RunOrWords]:
        """Return every run that the figure needs.

        A Run each, or a list of the words that one would type behind `run`; none where the figure is drawn
        from published tables.
        """

    def draw(self, frames: Frames, profile: str) -> plots.Figure:
        """Draw the picture.

        Raises:
            ValueError: there is nothing to draw.
        """


class OptionalFigureFunctions(Protocol):
    """Functions that a figure's file may have besides.

    It may also have SCALE, what the paper ran (`analysis.evidence.describe_scale_differences`), without which
    no number of its runs is held to be comparable; and BIBTEX, how a paper is cited that papers/ lacks.
    """

    def more_runs(self, profile: str) -> Sequence[RunOrWords]:
        """Return runs that make the figure firmer, mostly with more seeds: made with --all."""

    def table(self, frames: Frames) -> Table | list[Table]:
        """Return the numbers behind the picture."""

    def claims(self) -> list[Claim]:
        """Return statements of the paper, each with how our value for it is computed."""

    def caption(self, frames: Frames, profile: str) -> str:
        """Return words on what is drawn, where it was measured, and how.

        Without this function they are those of the paper's file, or the place of the measurement.
        """

    def facts(self, frames: Frames) -> Mapping[str, object]:
        """Return the values of the names in braces that the caption in the paper's file leaves open."""

    def published_results(self) -> Mapping[str, PublishedResult]:
        """Return, by `method_id`, what the paper says of the quantities in a summary."""


ACCURACY_UNITS = ("%", "points")  # units that an accuracy, or a difference of two, may have
REQUIRED_FUNCTIONS, OPTIONAL_FUNCTIONS = (
    ("runs", "draw"),
    ("more_runs", "table", "claims", "caption", "facts", "published_results"),
)
FIGURE_FUNCTIONS = (*REQUIRED_FUNCTIONS, *OPTIONAL_FUNCTIONS)
FIGURE_CONSTANTS = ("TITLE", "SCALE", "BIBTEX")


class Figure:
    """A figure or table: its runs, picture, tables of numbers, claims and words."""

    def __init__(self, name: str, module: ModuleType) -> None:
        """Take a figure from the module of its file, which has the parts that are described above.

        Args:
            name: of the item, `fig4` or `lin2018/fig4`.

        Raises:
            BrokenFile: the file lacks a part, or has one with other parameters, with wrong runs or with a
                misspelt name; with the file, and the line where there is one.
        """
        _check_parts(module)
        self.name = name
        self.module = module
        self.paper = module.__name__.rpartition(".")[2].partition("_")[0]
        self.title: str = module.TITLE
        self.declared_scale: Mapping[str, Any] = getattr(
            module, "SCALE", {}
        )  # what the paper ran, by columns

    def __reduce__(self) -> tuple[Any, ...]:  # a module travels to no other process
        from experiments.figures import load

        return load, (self.name,)

    def file_stem(self, profile: str) -> str:
        """Return the name of a picture's files, without their endings."""
        return file_stem(self.name, profile)

    def runs(self, profile: str) -> list[Run]:
        """Return the runs that the picture needs in this profile."""
        return [Run.coerce(run) for run in self.module.runs(profile)]

    def more_runs(self, profile: str) -> list[Run]:
        """Return the runs that make the picture firmer."""
        part = getattr(self.module, "more_runs", None)
        return [Run.coerce(run) for run in part(profile)] if part else []

    @cached_property
    def needs_runs(self) -> bool:
        """True where it is drawn from runs, and not from published tables that the repository carries."""
        return any(self.runs(profile) for profile in PROFILES)

    @property
    def profiles(self) -> tuple[str, ...]:
        """Profiles in which the figure can be drawn."""
        return PROFILES if self.needs_runs else (PUBLISHED,)

    @property
    def bibtex(self) -> str:
        """Citation of the figure's paper as BibTeX; empty where it is of none."""
        return str(getattr(self.module, "BIBTEX", papers.bibtex_or_empty(self.paper)))

    def draw(self, frames: Frames, profile: str) -> plots.Figure:
        """Draw the picture.

        Raises:
            ValueError: there is nothing to draw.
        """
        picture: plots.Figure = self.module.draw(frames, profile)
        return picture

    def tables(self, frames: Frames) -> list[Table]:
        """Return the numbers behind the picture; none where the file has no `table`."""
        part = getattr(self.module, "table", None)
        tables: Table | list[Table] = part(frames) if part else []
        return tables if isinstance(tables, list) else [tables]

    def claims(self) -> list[Claim]:
        """Return the figure's claims with their whole ids.

        The id is the figure's and the claim's own, or one that is derived from the claim's text: letters and
        digits, in words ('top-k-ends-above'); dots stay.
        """
        claims: list[Claim] = self.module.claims() if hasattr(self.module, "claims") else []
        words = [re.findall(r"[a-z0-9._]+", (claim.id or claim.text).lower()) for claim in claims]
        slugs = ["-".join(parts).replace("-.", ".") for parts in words]
        return [replace(claim, id=f"{self.name}.{slug}") for claim, slug in zip(claims, slugs, strict=True)]

    def claim_rule_digests(self) -> dict[str, str]:
        """Return the digest of each claim's rule by the claim's id."""
        return {claim.id: claim.rule_digest(self.declared_scale) for claim in self.claims()}

    def check_claims(self) -> None:
        """Refuse claims that can't be made, that share an id, or that answer statements that no paper makes.

        Without this check, an error in a claim would be seen after the last run.

        Raises:
            BrokenFile: with the file and the line.
        """
        if hasattr(self.module, "claims"):
            problem = self._find_claim_problem(_call_part(self.module, "claims"))
            if problem:
                raise BrokenFile(f"{_locate(self.module, 'claims')}: {problem}")

    def _find_claim_problem(self, claims: Sequence[Any]) -> str:
        """Return why some of these can't be the figure's claims; empty where all can."""
        from analysis.claims import Claim

        wrong_types = [claim for claim in claims if not isinstance(claim, Claim)]
        if wrong_types:
            return f"claims() lists {wrong_types[0]!r}, which is no Claim"
        ids = Counter(claim.id for claim in self.claims())
        repeated = [name for name, count in ids.items() if count > 1]
        if repeated:
            return f"two claims have the id {repeated[0]}"
        unstated = [
            name for claim in claims for name in claim.answers if name not in papers.statements_by_id()
        ]
        if unstated:
            return f"a claim answers {unstated[0]!r}, but no paper states that; see {papers.FOLDER}"
        return _find_ambiguity(self.module, claims)

    def judge(self, frames: Frames) -> list[Verdict]:
        """Return a verdict on every claim.

        Args:
            frames: of the figure's own runs and no others.
        """
        from analysis.claims import judge_claims
        from analysis.significance import read_significance_level_or_default, word_together
        from experiments.tasks import chance_top1_percent

        significance = read_significance_level_or_default(ResultFolders().shipped)
        verdicts = judge_claims(self.claims(), frames, self.declared_scale, chance_top1_percent)
        return [word_together(verdict, significance) for verdict in verdicts]

    def caption(self, frames: Frames, profile: str) -> str:
        """Return the words of the file or of the paper on the picture, else the place of the runs."""
        from analysis.pictures import captions

        if hasattr(self.module, "caption"):
            return str(self.module.caption(frames, profile))
        text = papers.text_template_or_empty(f"{self.paper}.{self.name}")
        if text:
            facts = self.module.facts(frames) if hasattr(self.module, "facts") else {}
            return captions.fill_caption(text, frames, facts)
        return captions.describe_setting_with_remarks(frames) if len(frames.runs) else ""

    def summary_sentences(self, frames: Frames) -> list[str]:
        """Return what the figure's runs show, in plain sentences, beside what its paper says of the same."""
        from analysis.pictures import summary

        return summary.summarize_runs_in_sentences(
            frames, self.module.published_results() if hasattr(self.module, "published_results") else {}
        )

    def markdown_page(
        self, frames: Frames, profile: str, verdicts: list[Verdict], numbers: Sequence[Table]
    ) -> str:
        """Return the figure's page in Markdown.

        Picture, caption, verdicts, tables of numbers, and the reasons of the tolerances.
        """
        from analysis import tables as written
        from analysis import verdicts as judged
        from analysis.evidence import deviating_links_text

        links = deviating_links_text(frames)
        parts = [f"# {self.name}: {self.title}{f' (found: {links})' if links else ''}\n"]
        if len(frames.runs) > 0 or profile == PUBLISHED:
            parts.append(f"![{self.name}]({self.file_stem(profile)}.png)\n")
            parts.append(f"{self.caption(frames, profile)}\n")
        rows = [(self.name, verdict) for verdict in verdicts]
        parts += [
            "## Verdicts\n",
            judged.verdicts_table(rows).to_markdown() if rows else f"{judged.NO_VERDICTS_NOTE}\n",
        ]
        if numbers:
            parts += ["## Numbers\n", written.tables_markdown(numbers)]
        if verdicts:
            parts.append("## How each number was read, and when it counts as reproduced\n")
            parts.append(judged.claim_notes_markdown(verdicts))
        return "\n".join(parts)


def file_prefix(item: str) -> str:
    """Return the beginning of the names of an item's files."""
    return item.replace("/", "-")


def file_stem(item: str, profile: str) -> str:
    """Return the name of the files of an item's picture in one profile, without their endings."""
    return file_prefix(item) if profile == PUBLISHED else f"{file_prefix(item)}-{profile}"


def _check_parts(module: ModuleType) -> None:
    missing = [name for name in ("TITLE", *REQUIRED_FUNCTIONS) if not hasattr(module, name)]
    if missing:
        raise BrokenFile(f"{module.__file__} has no {', '.join(missing)}, which every figure's file has")
    for name in FIGURE_FUNCTIONS:
        if hasattr(module, name):
            _check_parameters(module, name)
    _check_spelling(module)
    for profile, name in product(PROFILES, ("runs", "more_runs")):
        if hasattr(module, name):
            _check_runs(module, name, profile)
    _check_scale(module)


def _find_ambiguity(module: ModuleType, claims: Sequence[Claim]) -> str:
    """Return the first rule that leaves open what it is about, and what to say instead; else nothing."""
    measured = [claim for claim in claims if not claim.rederived]
    runs = [Run.coerce(run) for profile in PROFILES for run in module.runs(profile)]
    if not runs or not measured:
        return ""
    published = [claim for claim in measured if claim.is_published]
    if published and not hasattr(module, "SCALE"):
        return (
            f"{published[0].id or published[0].text!r} has a published number, but the file does not say "
            "what was run there: give SCALE, the paper's values by column of the records"
        )
    is_emulated = any(run.settings.get("cluster") == "netns" for run in runs)
    linkless = [claim for claim in measured if is_emulated and claim.timed and not claim.link]
    if linkless:
        return (
            f"{linkless[0].id or linkless[0].text!r} is about times over emulated links, but not over which: "
            "give link, a choice of conf/link"
        )
    from experiments.config.choices import option_names
    from experiments.tasks import chance_top1_percent, has_accuracy

    for claim in measured:
        for link in claim.link.lower().split(" to ") if claim.link else ():
            if link not in option_names("link"):
                return f"{claim.id or claim.text!r}: {describe_unknown('link', link, option_names('link'))}"
    tasks = {str(run.settings["task"]) for run in runs if "task" in run.settings}
    levelless = sorted(task for task in tasks if has_accuracy(task) and chance_top1_percent(task) is None)
    for claim in measured:
        is_of_accuracy = claim.unit in ACCURACY_UNITS and not claim.timed
        if levelless and is_of_accuracy and claim.chance is None:
            return (
                f"{claim.id or claim.text!r} may be about accuracies of {levelless[0]}, but nobody knows "
                "what guessing gives there, by which trainings are told that learned nothing: give chance, "
                "percent of top-1"
            )
    return ""


def _check_parameters(module: ModuleType, name: str) -> None:
    protocol = FigureModule if name in REQUIRED_FUNCTIONS else OptionalFigureFunctions
    expected = list(inspect.signature(getattr(protocol, name)).parameters)[1:]
    function = getattr(module, name)
    if not callable(function):
        raise BrokenFile(f"{module.__file__}: {name} is no function; write def {name}({', '.join(expected)})")
    parameters = inspect.signature(function).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
    if required != expected:
        raise BrokenFile(
            f"{_locate(module, name)}: {name}({', '.join(required)}) is called as "
            f"{name}({', '.join(expected)}): name its parameters so"
        )


def _check_spelling(module: ModuleType) -> None:
    """Refuse a name that is nearly a part's: nothing would ask for it."""
    public_names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    ]
    for part in (*OPTIONAL_FUNCTIONS, *FIGURE_CONSTANTS):
        candidates = [
            name for name in public_names if name.isupper() == part.isupper() and name not in FIGURE_FUNCTIONS
        ]
        close = get_close_matches(part, candidates, n=1, cutoff=0.8)
        if close and not hasattr(module, part):
            raise BrokenFile(
                f"{_locate(module, close[0])}: nothing asks a figure for {close[0]}; did you mean {part}? "
                f"If not, call it _{close[0]}"
            )


def _check_runs(module: ModuleType, name: str, profile: str) -> None:
    runs = _call_part(module, name, profile)
    if not isinstance(runs, Sequence) or not all(isinstance(run, Run) or _are_words(run) for run in runs):
        raise BrokenFile(
            f"{_locate(module, name)}: {name}({profile!r}) is to list the settings of each run, as in "
            f"[['method=topk', 'seed=0']], and returned {runs!r:.80}"
        )


def _are_words(run: Any) -> bool:
    is_list = isinstance(run, Sequence) and not isinstance(run, str)
    return is_list and all(isinstance(word, str) for word in run)


def _check_scale(module: ModuleType) -> None:
    scale = getattr(module, "SCALE", None)
    if not scale:
        return
    from analysis.evidence import SCALE_NAMES

    unknown_columns = [column for column in scale if column not in SCALE_NAMES]
    if unknown_columns:
        raise BrokenFile(
            f"{module.__file__}: SCALE has {unknown_columns[0]!r}, which no scale knows; there are: "
            + ", ".join(SCALE_NAMES)
        )


def _call_part(module: ModuleType, name: str, *arguments: str) -> Any:
    """Return the result of one of the file's functions.

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


def _locate(module: ModuleType, name: str) -> str:
    """Return the file and line that define a name."""
    code = getattr(getattr(module, name), "__code__", None)
    if code is not None:
        return f"{code.co_filename}, line {code.co_firstlineno}"
    return str(module.__file__)
