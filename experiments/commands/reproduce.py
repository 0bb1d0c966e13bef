from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from time import monotonic

from analysis.occasions import ENOUGH_OCCASIONS, OCCASION_GAP_MIN, occasion_starts
from analysis.records.configs import run_id
from analysis.records.frames import empty_frames
from experiments import figures
from experiments.commands._arguments import ItemsAndSettings
from experiments.commands._drawing import (
    PUBLISHED_TABLES,
    FigureRecords,
    RenderedFigure,
    draw_and_index_own_runs,
    print_figure_results,
    write_figure_files,
)
from experiments.commands._messages import exit_on_failed_run, is_forced, say
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import (
    PlannedRun,
    find_unmeasured_runs,
    plan_distinct_runs_and_ensure_data,
    requested_or_default_profile,
)
from experiments.figures.figure import Figure
from experiments.figures.runs import additional_configs, attach_claim_rules, required_configs
from experiments.launch.attempt import describe_missing_requirements
from experiments.launch.backends import execute_runs
from experiments.launch.diagnosis import POLICIES, CommandInterrupted, RunFailed
from experiments.launch.submission import describe_missing_slurm

GROUP = "here"
EARLY_PICTURE_INTERVAL_S = 60.0


def reproduce(
    words: ItemsAndSettings, *, all: bool = False, force: bool = False, report: bool = False
) -> int:
    """Make the missing runs of figures, then draw pictures and verdicts: `make reproduce-fig4`.

    Args:
        words: the figures, with settings for their runs: fig4 profile=laptop.
        all: also make the runs that make a figure firmer, mostly with more seeds.
        force: measure again what is already measured (earlier attempts are kept).
        report: then write the report, of the pictures that are there.
    """
    items = [figures.find_item(word) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not items:
        raise ValueError(f"reproduce what? There are: {', '.join(figures.files_by_item())}")
    requested_figures = [figures.load(item) for item in items]
    for figure in requested_figures:
        figure.check_claims()  # before a run costs hours
        if overrides and not figure.needs_runs:
            raise ValueError(
                f"{figure.name} is drawn from published tables and has no runs, so that {overrides[0]} would "
                "change nothing: leave it out"
            )
    force = is_forced(force)
    with exit_on_failed_run():
        rendered = [
            reproduce_figure(figure, overrides, ResultFolders(), force=force, with_optional=all)
            for figure in requested_figures
        ]
    for figure_on_disk in rendered:
        print_figure_results(figure_on_disk)
    if report:
        from experiments.commands.report import write_report

        print(write_report(ResultFolders(), draws=False))
    for figure_on_disk in rendered:
        if figure_on_disk.summary:
            print(figure_on_disk.summary[0])
    return 0


def reproduce_figure(
    figure: Figure,
    overrides: Sequence[str],
    folders: ResultFolders,
    *,
    force: bool = False,
    with_optional: bool = False,
) -> RenderedFigure:
    """Make a figure's missing runs, and draw it from all that exist.

    Args:
        force: measure again what is already measured.
        with_optional: make the optional runs, too.
    """
    if not figure.needs_runs:
        records = FigureRecords(empty_frames(), PUBLISHED_TABLES)
        return write_figure_files(figure, figures.PUBLISHED, records, folders.figures)
    profile = requested_or_default_profile(overrides)
    title = f"{figure.name} ({profile})"
    optional = additional_configs(figure, profile, overrides)
    planned = plan_distinct_runs_and_ensure_data(
        required_configs(figure, profile, overrides) + (optional if with_optional else []), say
    )
    todo = planned if force else find_unmeasured_runs(planned, folders, say)
    next_occasion = None if force else find_next_occasion(planned, folders)
    if next_occasion:
        launch_ids = {run_id(config) for config in optional if config.variants}
        postponed = [run for run in todo if run_id(run.config) in launch_ids]
        if postponed:
            todo = [run for run in todo if run not in postponed]
            say(
                f"{title}: {len(postponed)} launches are for another occasion, for those of one resemble "
                f"each other: call this again from {next_occasion:%H:%M} on (--force: now, and all again)"
            )
    say(f"{title}: {len(planned)} runs, {len(todo)} missing")
    num_absent = len(optional) - len(_existing_run_ids(optional, folders))
    if num_absent and not with_optional:
        say(f"{title}: {num_absent} runs more make it firmer; --all makes them, too")
    words = [figure.name, *overrides]
    todo = attach_claim_rules(todo, words)
    if has_runs_here_and_on_slurm(planned):
        check_slurm_is_usable(todo)
        rounds = split_into_single_runs(todo)
    else:
        rounds = split_into_rounds(todo)
    failures = list[RunFailed]()
    early_pictures = EarlyPictureDrawer(figure, profile, planned, optional, folders)
    for number, round_runs in enumerate(rounds, 1):
        try:
            after = early_pictures.draw_if_more_runs if len(round_runs) > 1 else None
            execute_runs(round_runs, folders, figure.file_stem(profile), words, force, after)
        except CommandInterrupted:
            early_pictures.draw_if_more_runs(at_once=True)
            raise
        except RunFailed as failure:
            if POLICIES[failure.kind].stops_waiting_runs:
                raise
            failures.append(failure)  # which stops no other
        if number < len(rounds) and not failures:
            rendered = draw_and_index_own_runs(figure, profile, early_pictures.existing_run_ids(), folders)
            finding = f": {rendered.summary[0]}" if rendered.summary else ""
            say(f"{rendered.picture}, from {number} of {len(rounds)} launches{finding}")
    if failures:
        raise failures[0]
    required_ids = [run_id(run.config) for run in planned]
    ids = dict.fromkeys([*required_ids, *_existing_run_ids(optional, folders)])
    return draw_and_index_own_runs(figure, profile, list(ids), folders)


class EarlyPictureDrawer:
    """Draws pictures of a figure while others of its runs go on: from the first on, at most one a minute.

    Where times are measured on this machine, the next run begins after the picture is drawn.
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
        self.required = [run.config for run in planned]
        self.optional = optional
        self.num_drawn = len(_existing_run_ids(self.required, folders))
        self.drawn_at_s = -EARLY_PICTURE_INTERVAL_S

    def existing_run_ids(self) -> list[str]:
        """Return the ids of the figure's runs that have a valid record, optional ones among them."""
        return _existing_run_ids([*self.required, *self.optional], self.folders)

    def draw_if_more_runs(self, *, at_once: bool = False) -> None:
        """Draw a picture if more runs are there than in the last one.

        Args:
            at_once: draw also within a minute of the last picture, and when all runs are there.
        """
        count = len(_existing_run_ids(self.required, self.folders))
        now_s = monotonic()
        is_due = count < len(self.required) and now_s >= self.drawn_at_s + EARLY_PICTURE_INTERVAL_S
        if count <= self.num_drawn or not (at_once or is_due):
            return
        self.num_drawn = count
        self.drawn_at_s = now_s
        fraction = f"{count} of {len(self.required)} runs"
        try:
            rendered = draw_and_index_own_runs(
                self.figure, self.profile, self.existing_run_ids(), self.folders
            )
        except Exception as error:  # told now, and raised with the last picture: it ends no run
            say(f"no picture of {fraction}: {str(error) or type(error).__name__}")
        else:
            say(f"{rendered.picture}, from {fraction}; it is drawn again with more")


def split_into_rounds(todo: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Return runs in rounds, after each of which a picture is drawn.

    On this machine, each launch in which variants take turns is a round, so that a picture is there early and
    becomes more certain. All other runs are in the first round, seed by seed.
    """
    todo = sorted(todo, key=lambda run: run.config.seed)
    if any(isinstance(run.config.cluster, SlurmCluster) for run in todo):
        return [todo]
    seeds = [*dict.fromkeys(run.config.seed for run in todo if run.config.variants)]
    first_round = [run for run in todo if not run.config.variants or run.config.seed in seeds[:1]]
    later_launches = (
        [run for run in todo if run.config.variants and run.config.seed == seed] for seed in seeds[1:]
    )
    return [first_round, *later_launches]


def has_runs_here_and_on_slurm(planned: Iterable[PlannedRun]) -> bool:
    """Tell whether an item compares this machine with a SLURM cluster, which may be the same machine."""
    return len({isinstance(run.config.cluster, SlurmCluster) for run in planned}) > 1


def split_into_single_runs(todo: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Return rounds of one run each: all runs of a seed, in an order drawn by the seed, before the next seed.

    So no two of them run at the same time, and what changes on the machine meanwhile falls on each place
    alike in the mean.
    """
    order = {
        run_id(run.config): random.Random(f"{run.config.seed} {run_id(run.config)}").random() for run in todo
    }
    return [[run] for run in sorted(todo, key=lambda run: (run.config.seed, order[run_id(run.config)]))]


def check_slurm_is_usable(todo: Iterable[PlannedRun]) -> None:
    """Refuse runs of SLURM, before others are made, where SLURM, an image or its program is missing.

    Raises:
        ValueError: with what is missing, and what to do.
    """
    on_slurm = [run for run in todo if isinstance(run.config.cluster, SlurmCluster)]
    missing = describe_missing_slurm(on_slurm) or describe_missing_requirements(on_slurm)
    if missing:
        raise ValueError(
            f"{len(on_slurm)} of the runs can't be made here: {'; '.join(missing)}. `figures` draws the "
            "shipped records"
        )


def _existing_run_ids(configs: Iterable[Config], folders: ResultFolders) -> list[str]:
    """Return the ids of those of these runs that have a valid record, each once."""
    return [
        *dict.fromkeys(
            run_id(config) for config in configs if folders.store.find_newest_valid_of_config(config)
        )
    ]


def find_next_occasion(planned: Iterable[PlannedRun], folders: ResultFolders) -> datetime | None:
    """Return the time from which on launches are of another occasion than the recorded ones.

    None where there are enough occasions, or where launches of now would be of another one.
    """
    attempts = (
        folders.store.find_newest_valid_of_config(run.config) for run in planned if run.config.variants
    )
    starts = occasion_starts(
        datetime.fromisoformat(attempt.manifest["started"])
        for attempt in attempts
        if attempt is not None and attempt.manifest.get("started")
    )
    now = datetime.now().astimezone()
    next_start = (starts[-1] if starts else now) + timedelta(minutes=OCCASION_GAP_MIN)
    return next_start.astimezone() if len(starts) < ENOUGH_OCCASIONS and next_start > now else None
