from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from time import monotonic

from analysis.occasions import ENOUGH_OCCASIONS, OCCASION_GAP_MIN, occasion_starts
from analysis.records.configs import run_id
from analysis.records.frames import empty_frames
from experiments import figures
from experiments.commands._arguments import ItemsAndSettings
from experiments.commands._drawing import TABLES, RenderedFigure, draw, draw_own_runs, show
from experiments.commands._messages import exit_on_failed_run, is_forced, say
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun, find_unmeasured_runs, plan_runs, requested_profile
from experiments.figures.figure import Figure
from experiments.figures.runs import additional_configs, register_claim_rules, required_configs
from experiments.launch.backends import execute_runs
from experiments.launch.diagnosis import POLICIES, Interrupted, RunFailed

GROUP = "here"
EARLY_S = 60.0  # between two pictures of runs that go on


def reproduce(
    words: ItemsAndSettings, *, all: bool = False, force: bool = False, report: bool = False
) -> int:
    """Figures of a paper: their missing runs, pictures and verdicts (make reproduce-fig4).

    Args:
        words: the figures, with settings for their runs: fig4 profile=laptop.
        all: also the runs that make a figure firmer, mostly with more seeds.
        force: measure again what is already measured (earlier attempts are kept).
        report: then write the report, of the pictures that are there.
    """
    items = [figures.find_item(word) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not items:
        raise ValueError(f"reproduce what? There are: {', '.join(figures.files_by_item())}")
    asked_figures = [figures.load(item) for item in items]
    for figure in asked_figures:
        figure.check_claims()  # before a run costs hours
        if overrides and not figure.has_runs:
            raise ValueError(
                f"{figure.name} is drawn from published tables and has no runs, so that {overrides[0]} would "
                "change nothing: leave it out"
            )
    how = {"force": is_forced(force), "more": all}
    with exit_on_failed_run():
        drawn = [reproduce_figure(figure, overrides, ResultFolders(), **how) for figure in asked_figures]
    for drawn_figure in drawn:
        show(drawn_figure)
    if report:
        from experiments.commands.report import write_report

        print(write_report(ResultFolders(), draws=False))
    return 0


def reproduce_figure(
    figure: Figure, overrides: Sequence[str], folders: ResultFolders, force: bool = False, more: bool = False
) -> RenderedFigure:
    """Make what is missing, then draw, with the runs that make the figure firmer where they are there."""
    item = figure.name
    if not figure.has_runs:
        return draw(figure, figures.PUBLISHED, empty_frames(), folders.figures, TABLES)
    profile = requested_profile(overrides)
    optional = additional_configs(figure, profile, overrides)
    wanted = required_configs(figure, profile, overrides) + (optional if more else [])
    planned = plan_runs(wanted, say)
    todo = planned if force else find_unmeasured_runs(planned, folders, say)
    if due := _due(planned, folders):
        later = {run_id(config) for config in optional if config.variants}
        if postponed := [run for run in todo if run_id(run.config) in later and not force]:
            todo = [run for run in todo if run not in postponed]
            say(
                f"{item} ({profile}): {len(postponed)} launches are for another occasion, for those of one "
                f"resemble each other: call this again from {due:%H:%M} on (--force: now, and all again)"
            )
    say(f"{item} ({profile}): {len(planned)} runs, {len(todo)} missing")
    if absent := [] if more else [config for config in optional if not folders.store.find_valid(config)]:
        say(f"{item} ({profile}): {len(absent)} runs more make it firmer; --all makes them, too")
    words = [item, *overrides]
    rounds, failures = in_rounds(register_claim_rules(todo, words)), list[RunFailed]()
    early = EarlyPictures(figure, profile, planned, optional, folders)
    for number, begun in enumerate(rounds, 1):
        try:
            after = early.draw if len(begun) > 1 else None
            execute_runs(begun, folders, figure.stem(profile), words, force, after)
        except Interrupted:
            early.draw(at_once=True)
            raise
        except RunFailed as failure:
            if POLICIES[failure.kind].stops:
                raise
            failures.append(failure)  # which stops no other
        if number < len(rounds) and not failures:
            drawn = draw_own_runs(figure, profile, _present(planned, optional, folders), folders)
            sure = f": {drawn.sure}" if drawn.sure else ""
            say(f"{drawn.picture}, from {number} of {len(rounds)} launches{sure}")
    if failures:
        raise failures[0]
    names = dict.fromkeys([*(run_id(run.config) for run in planned), *_present([], optional, folders)])
    return draw_own_runs(figure, profile, list(names), folders)


class EarlyPictures:
    """Pictures of an item while others of its runs go on: with the first that is done, then at most one in
    `EARLY_S`. Where times are measured on this machine, the next run begins after it is drawn.
    """

    def __init__(
        self,
        figure: Figure,
        profile: str,
        planned: Sequence[PlannedRun],
        optional: Sequence[Config],
        folders: ResultFolders,
    ) -> None:
        self.figure = figure
        self.profile = profile
        self.folders = folders
        self.planned, self.optional = planned, optional
        self.drawn, self.at = len(self._there()), -EARLY_S

    def _there(self) -> list[PlannedRun]:
        return [run for run in self.planned if self.folders.store.find_valid(run.config)]

    def draw(self, at_once: bool = False) -> None:
        """Draw, if there is more to draw than before and not yet all; or, at once, whatever there is more."""
        there, now = self._there(), monotonic()
        is_due = at_once or (len(there) < len(self.planned) and now >= self.at + EARLY_S)
        if len(there) <= self.drawn or not is_due:
            return
        self.drawn, self.at = len(there), now
        of_all = f"{len(there)} of {len(self.planned)} runs"
        names = _present(there, self.optional, self.folders)
        try:
            drawn = draw_own_runs(self.figure, self.profile, names, self.folders)
        except Exception as error:  # told now, and raised with the last picture: it ends no run
            say(f"no picture of {of_all}: {str(error) or type(error).__name__}")
        else:
            say(f"{drawn.picture}, from {of_all}; it is drawn again with more")


def in_rounds(todo: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """What is drawn after, in turn: what takes turns on this machine launch by launch, so that a picture is
    there early and becomes surer. All else is carried out together, seed by seed.
    """
    todo = sorted(todo, key=lambda run: run.config.seed)
    if any(isinstance(run.config.cluster, SlurmCluster) for run in todo):
        return [todo]
    numbers = dict.fromkeys(run.config.seed for run in todo if run.config.variants)
    first = next(iter(numbers), None)
    rounds = [[run for run in todo if not run.config.variants or run.config.seed == first]]
    later = (number for number in numbers if number != first)
    return rounds + [[run for run in todo if run.config.variants and run.config.seed == n] for n in later]


def _present(planned: Iterable[PlannedRun], optional: Iterable[Config], folders: ResultFolders) -> list[str]:
    """The names of those runs of an item that are there."""
    configs = [*(run.config for run in planned), *optional]
    return [*dict.fromkeys(run_id(config) for config in configs if folders.store.find_valid(config))]


def _due(planned: Iterable[PlannedRun], folders: ResultFolders) -> datetime | None:
    """The time from which on launches are of another occasion than those that there are; None where they need
    not be, or would be now.
    """
    there = (folders.store.find_valid(run.config) for run in planned if run.config.variants)
    began = occasion_starts(
        datetime.fromisoformat(started)
        for attempt in there
        if attempt is not None and (started := attempt.manifest.get("started"))
    )
    now = datetime.now().astimezone()
    due = (began[-1] if began else now) + timedelta(minutes=OCCASION_GAP_MIN)
    return due.astimezone() if len(began) < ENOUGH_OCCASIONS and due > now else None
