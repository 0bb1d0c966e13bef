"""From an entry to its file: tuned, trained, timed, in stages that go on where they were stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.benchmark.cells import BASELINE, LOSS_COLUMN
from analysis.benchmark.files import ENTRY_SUFFIX, EntryFile, read_newest_entries, write_public_entry
from analysis.benchmark.statement import (
    EntryStatement,
    EntryTaskStatement,
    LawResult,
    TuningTrial,
    WallClockTraining,
)
from analysis.records.configs import run_id, run_key
from analysis.records.frame_cache import load_newest_attempts_cached
from analysis.records.frames import Frames, empty_frames, is_missing, merge_frames, select_runs
from analysis.records.store import Attempt
from experiments.config import compose
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.run import Run
from experiments.figures.benchmark.entries import (
    BestSettings,
    Entrant,
    base_lr,
    launch_runs,
    plan_trials,
    training_runs,
    trial_lr,
    wall_clock_run,
    wall_clock_trainings,
)
from experiments.figures.benchmark.held import ENTRIES, shipped_and_own_entry_folders
from experiments.figures.benchmark.laws import Law, read_method_code
from experiments.figures.benchmark.rules import AT, OWN, Tier, rules, rules_digest
from slurm.emulated.counters import explain_uncounted_bytes

COUNTED = ("sent_bytes", "counted_bytes", "resent", "calls")  # of an interface, in records


class UnfairEntryError(ValueError):
    """An entry that breaks a rule."""


def resolve_tier_run(run: Run, tier: str) -> Config:
    """Return a run of a tier as a config."""
    profile = rules().parse_tier(tier).profile or tier.partition(AT)[0]
    return compose.resolve(Run({"profile": profile, **run.settings}, run.variants))


class EntryInProgress:
    """An entry on its way, in a checkout.

    Args:
        held: records that are there besides the checkout's runs.
    """

    def __init__(self, entry: Entrant, tier: str, folders: ResultFolders, held: Frames | None = None) -> None:
        self.entry, self.name, self.tier, self.folders = entry, tier, rules().parse_tier(tier), folders
        self.held = empty_frames() if held is None else held
        self.trials = plan_trials(entry, self.tier)

    def resolve_run(self, run: Run) -> Config:
        """Return a run of the entry as a config."""
        return resolve_tier_run(run, self.name)

    def tuning_configs(self) -> list[Config]:
        """Return the trainings of the entry's trials."""
        return [self.resolve_run(trial.run) for trial in self.trials]

    def check_trials(self) -> None:
        """Refuse trainings by the rules' tuning seed that are none of the entry's trials.

        Raises:
            UnfairEntryError: there are some; with what to do.
        """
        own = {run_id(config) for config in self.tuning_configs()}
        tasks = {str(task.settings["task"]) for task in self.tier.tasks.values()}
        more = [
            attempt.run_id for attempt in self.folders.store.list_newest_valid_attempts()
            if attempt.run_id not in own and self._is_trial(attempt, tasks)
        ]  # fmt: skip
        if more:
            raise UnfairEntryError(
                f"{self.entry.name} has {len(more)} trainings on the benchmark's tuning data beyond its "
                f"{rules().trials.number} trials, such as {more[0]}: an entry is tuned by its trials alone "
                "(rule 5, docs/benchmark.md#equal-tuning). If its search space was another one then, give "
                "it the first one again"
            )

    def _is_trial(self, attempt: Attempt, tasks: set[str]) -> bool:
        config, first = attempt.config, self.trials[0]
        fixed = self.resolve_run(first.run).method.as_dict()
        searched = {key.removeprefix("method.") for key in first.searched}
        return (
            all(config["method"].get(key) == value for key, value in fixed.items() if key not in searched)
            and config["task"]["name"] in tasks
            and config["seed"] == rules().trials.seed
            and bool(config["train"].get("held_out"))
        )

    def choose_best_by_task(self) -> dict[str, BestSettings]:
        """Return the best settings by task: those of the trial with the lowest loss on held-out examples.

        Raises:
            UnfairEntryError: none of a task's trials ended with a number.
        """
        found = dict[str, BestSettings]()
        losses = self._losses([self.resolve_run(trial.run) for trial in self.trials])
        for name, task in self.tier.tasks.items():
            own = [
                (losses[run_id(self.resolve_run(trial.run))], trial)
                for trial in self.trials
                if trial.task == name
            ]
            ended = [(loss, trial) for loss, trial in own if loss is not None]
            if not ended:
                raise UnfairEntryError(
                    f"{self.entry.name}: none of the {len(own)} trials on {name} ended with a loss that is a "
                    f"number, at rates up to {max(trial.lr_factor for _, trial in own):g} times "
                    f"{base_lr(self.entry, name, task):g}"
                )
            _, best = min(ended, key=lambda pair: pair[0])
            found[name] = BestSettings(trial_lr(self.entry, name, task, best.lr_factor), best.searched)
        return found

    def _losses(self, configs: Sequence[Config]) -> dict[str, float | None]:
        """Return the last loss of each training, by its run; None of one that diverged."""
        names = [run_id(config) for config in configs]
        frames = self.frames(names)
        last = last_validation_loss_by_key(frames)
        by_run = dict(zip(frames.runs["run_id"], frames.runs["key"], strict=True))
        found = {name: last.get(by_run[name]) if name in by_run else None for name in names}
        return {
            name: None if loss is None or is_missing(loss) else float(loss) for name, loss in found.items()
        }

    def frames(self, names: Sequence[str]) -> Frames:
        """Return the records of these runs, each as its digests say."""
        found, notes = load_newest_attempts_cached(
            self.folders.store, names, self.folders.records, verify_digests=True
        )
        if notes:
            raise UnfairEntryError(f"{self.entry.name}: {notes[0]}; run `enter` again, which makes it anew")
        held = self.held.runs
        others = held["run_id"].isin({*names} - {*found.runs["run_id"]})
        return merge_frames(select_runs(self.held, held.loc[others, "key"]), found)

    def training_configs(self, best_by_task: Mapping[str, BestSettings]) -> list[Config]:
        """Return the trainings that count."""
        return [self.resolve_run(run) for run in training_runs(self.entry, self.tier, best_by_task)]

    def wall_clock_configs(
        self, best_by_task: Mapping[str, BestSettings]
    ) -> dict[tuple[str, int, str], Config]:
        """Return the entry's trainings in real time, by task, workers and link."""
        return {
            (one.task, one.workers, one.link): self.resolve_run(
                wall_clock_run(self.entry, self.tier, one, best_by_task[one.task])
            )
            for one in wall_clock_trainings(self.entry, self.tier)
        }


def last_validation_loss_by_key(frames: Frames) -> pd.Series[float]:
    """Return the last validation loss of each run, by key; NaN of one that diverged."""
    ends = frames.epochs.sort_values("epoch").groupby("key").tail(1)
    losses: pd.Series[float] = ends.set_index("key")[LOSS_COLUMN].astype(float)
    return losses


def timing_configs(
    entering: Sequence[EntryInProgress], best_by_entry_and_task: Mapping[str, Mapping[str, BestSettings]]
) -> list[Config]:
    """Return the launches in which these entries take turns; the first is the baseline."""
    first = entering[0]
    return [
        first.resolve_run(run)
        for run in launch_runs([each.entry for each in entering], first.tier, best_by_entry_and_task)
    ]


def make_statement(
    own: EntryInProgress,
    best_by_task: Mapping[str, BestSettings],
    in_real_time: Sequence[Config],
    laws: Sequence[Law],
) -> EntryStatement:
    """Return the statement that the entry's file holds.

    Args:
        in_real_time: the launches and whole trainings that there are.
    """
    entry, trained = own.entry, own.training_configs(best_by_task)
    launched, there = [config for config in in_real_time if config.variants], [*map(run_key, in_real_time)]
    tasks = dict[str, EntryTaskStatement]()
    for name, task in own.tier.tasks.items():
        tried = [
            TuningTrial(trial.lr_factor, trial.searched, run_key(own.resolve_run(trial.run)))
            for trial in own.trials if trial.task == name
        ]  # fmt: skip
        of_task = [config for config in trained if _is_of(config, own.tier, name)]
        turns = [config for config in launched if _is_of(config, own.tier, name)]
        tasks[name] = EntryTaskStatement(
            task.about, tried, best_by_task[name].lr, best_by_task[name].searched,
            {n: [run_key(config) for config in of_task if config.workers == n] for n in own.tier.workers},
            _by_link(turns, own.tier, entry.name), _by_link(turns, own.tier, BASELINE),
            [
                WallClockTraining(workers, link, run_key(config))
                for (task_name, workers, link), config in own.wall_clock_configs(best_by_task).items()
                if task_name == name and run_key(config) in there
            ],
        )  # fmt: skip
    return EntryStatement(
        rules().version, rules_digest(own.name), own.name, entry.name, entry.about, entry.method,
        entry.settings, entry.search, entry.on, entry.timed, entry.claims,
        [LawResult(law.name, law.holds, law.why) for law in laws],
        read_method_code(entry.method), tasks,
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )  # fmt: skip


def _is_of(config: Config, tier: Tier, name: str) -> bool:
    return bool(config.task.name == tier.tasks[name].settings["task"])


def _by_link(turns: Sequence[Config], tier: Tier, variant: str) -> dict[int, dict[str, list[str]]]:
    return {
        workers: {
            link: [
                f"{run_key(config)}/{variant}" for config in turns
                if config.workers == workers and link in (OWN, config.get_setting("cluster.link.name"))
            ]
            for link in tier.links
        }
        for workers in tier.workers
    }  # fmt: skip


def statement_run_keys(statement: EntryStatement) -> Iterator[str]:
    """Yield the key of every run that a statement rests on."""
    for task in statement.tasks.values():
        yield from (trial.key for trial in task.trials)
        yield from (training.key for training in task.whole)
        for keys in task.trainings.values():
            yield from keys
        for keys_by_link in (*task.launches.values(), *task.baseline.values()):
            for keys in keys_by_link.values():
                yield from keys


def read_entries_by_todays_rules(folders: ResultFolders, tier: str) -> tuple[list[EntryFile], list[str]]:
    """Return the entries of a tier, the newest of each name, and a line on each file that can't be shown."""
    return read_newest_entries(shipped_and_own_entry_folders(folders), tier, rules_digest(tier))


def entry_file_path(folders: ResultFolders, tier: str, name: str) -> Path:
    """Return the path of an entry's file."""
    return folders.results / ENTRIES / f"{name}-{tier}-v{rules().version}{ENTRY_SUFFIX}"


def write_entry_file(
    own: EntryInProgress, statement: EntryStatement, configs: Sequence[Config], launched: Frames
) -> Path:
    """Write an entry's file, of the records of these runs.

    Args:
        launched: the records of all launches, in which other entries have a part, too.
    """
    wanted = [*statement_run_keys(statement)]
    trained = own.frames([run_id(config) for config in configs])
    frames = merge_frames(select_runs(trained, wanted), select_runs(launched, wanted))
    if own.tier.is_emulated:
        check_bytes(frames, dict(_workers_of_launches(statement)))
    return write_public_entry(entry_file_path(own.folders, own.name, own.entry.name), statement, frames)


def _workers_of_launches(statement: EntryStatement) -> Iterator[tuple[str, int]]:
    """Yield the key of each launch, and by how many workers it is."""
    for task in statement.tasks.values():
        for workers, keys_by_link in task.launches.items():
            for keys in keys_by_link.values():
                yield from ((key, workers) for key in keys)


def find_baseline_entry(folders: ResultFolders, tier: str) -> EntryFile | None:
    """Return the baseline's file by the rules of today; None where there is none."""
    entered, _ = read_entries_by_todays_rules(folders, tier)
    return next((each for each in entered if each.statement.name == BASELINE), None)


def check_bytes(frames: Frames, num_workers_by_key: Mapping[str, int]) -> None:
    """Refuse launches whose interfaces sent other than was counted, by more than headers.

    Args:
        num_workers_by_key: of each launch's runs.

    Raises:
        UnfairEntryError: there is one, or one that counted nothing.
    """
    for key, size in num_workers_by_key.items():
        row = frames.runs[frames.runs["key"] == key].iloc[0]
        found = {name: float(row.get(f"interface.{name}", np.nan)) for name in COUNTED}
        if any(np.isnan(value) for value in found.values()):
            raise UnfairEntryError(f"launch {key} has not counted the bytes of its interfaces")
        if why := explain_uncounted_bytes(found, size):
            raise UnfairEntryError(f"in launch {key} {why}")
