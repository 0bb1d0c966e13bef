"""From an entry to its file: tuned, timed, trained, in stages that go on where they were stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.benchmark.cells import BASELINE, LOSS_COLUMN, mean_step_s_by_launch
from analysis.benchmark.files import ENTRY_SUFFIX, EntryFile, read_newest_entries, write_public_entry
from analysis.benchmark.statement import EntryStatement, EntryTaskStatement, LawResult, TuningTrial
from analysis.pictures.numbers import format_count
from analysis.records.configs import run_id, run_key
from analysis.records.frame_cache import load_newest_attempts_cached
from analysis.records.frames import Frames, empty_frames, merge_frames, select_runs
from analysis.records.store import Attempt
from experiments.config import compose
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.run import Run
from experiments.figures.benchmark.entries import (
    BestSettings,
    Entrant,
    LaunchPlace,
    TrainingPlace,
    base_lr,
    launch_places,
    launch_run,
    plan_trials,
    training_runs,
)
from experiments.figures.benchmark.held import ENTRIES, shipped_and_own_entry_folders, training_keys
from experiments.figures.benchmark.laws import read_method_code
from experiments.figures.benchmark.rules import AT, SMOKE_TIER, longest_affordable_length, rules, rules_digest
from slurm.emulated.counters import explain_uncounted_bytes

COUNTED = ("sent_bytes", "counted_bytes", "resent", "calls")  # of an interface, in records
BestByTask = Mapping[str, BestSettings]
LaunchKeys = Mapping[
    LaunchPlace, Mapping[str, Mapping[int, str]]
]  # by place, entry, and number of the launch


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
        self.entry = entry
        self.tier_name = tier
        self.tier = rules().parse_tier(tier)
        self.folders = folders
        self.held = empty_frames() if held is None else held
        self.trials = plan_trials(entry, self.tier)

    def resolve_run(self, run: Run) -> Config:
        """Return a run of the entry as a config."""
        return resolve_tier_run(run, self.tier_name)

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
            and bool(config["train"].get("lr_decay_epochs"))  # version 1's trials had another schedule
        )

    def choose_best_by_task(self, frames: Frames) -> dict[str, BestSettings]:
        """Return the best settings by task: those of the trial with the lowest loss on held-out examples.

        Args:
            frames: of the trials.

        Raises:
            UnfairEntryError: none of a task's trials ended with a number.
        """
        best_by_task = dict[str, BestSettings]()
        last_loss_by_key = last_validation_loss_by_key(frames).dropna()
        for name, task in self.tier.tasks.items():
            trials = [trial for trial in self.trials if trial.task == name]
            losses = [last_loss_by_key.get(run_key(self.resolve_run(trial.run)), np.inf) for trial in trials]
            if np.isinf(losses).all():
                raise UnfairEntryError(
                    f"{self.entry.name}: none of the {len(trials)} trials on {name} ended with a loss that "
                    f"is a number, at rates up to {max(trial.lr_factor for trial in trials):g} times "
                    f"{base_lr(self.entry, name, task):g}"
                )
            best = trials[int(np.argmin(losses))]
            best_by_task[name] = BestSettings(best.run.settings["task.lr"], best.searched)
        return best_by_task

    def trial_frames(self) -> Frames:
        """Return the records of the trials."""
        return self.frames([run_id(config) for config in self.tuning_configs()])

    def frames(self, run_ids: Sequence[str]) -> Frames:
        """Return the records of these runs, as far as there are any, each as its digests say."""
        recorded, notes = load_newest_attempts_cached(
            self.folders.store, run_ids, self.folders.records, verify_digests=True
        )
        if notes:
            raise UnfairEntryError(f"{self.entry.name}: {notes[0]}; run `enter` again, which makes it anew")
        held = self.held.runs
        others = held["run_id"].isin({*run_ids} - {*recorded.runs["run_id"]})
        return merge_frames(select_runs(self.held, held.loc[others, "key"]), recorded)

    def training_configs(self, best_by_task: BestByTask, places: Sequence[TrainingPlace]) -> list[Config]:
        """Return the trainings of these places."""
        return [
            self.resolve_run(run)
            for place in places
            for run in training_runs(self.entry, self.tier, place, best_by_task[place.task])
        ]


def last_validation_loss_by_key(frames: Frames) -> pd.Series[float]:
    """Return the last validation loss of each run, by key; NaN of one that diverged."""
    ends = frames.epochs.sort_values("epoch").groupby("key").tail(1)
    losses: pd.Series[float] = ends.set_index("key")[LOSS_COLUMN].astype(float)
    return losses


class LaunchSchedule:
    """The launches in which entries take turns with the baseline.

    Args:
        entries: the baseline first.
    """

    def __init__(
        self, entries: Sequence[EntryInProgress], best_by_entry_and_task: Mapping[str, BestByTask]
    ) -> None:
        first = entries[0]
        self.tier = first.tier
        self.tier_name = first.tier_name
        self.config_by_place_and_number = {
            (place, number): first.resolve_run(
                launch_run([each.entry for each in entries], self.tier, place, number, best_by_entry_and_task)
            )
            for place in launch_places(self.tier)
            for number in self.tier.links[place.link].launch_numbers
        }

    def configs_by_day(self) -> list[list[Config]]:
        """Return all launches, those of each day link by link and number by number."""
        configs: list[list[Config]] = []
        for day in range(max(len(link.launches) for link in self.tier.links.values())):
            configs.append([])
            for name, link in self.tier.links.items():
                for number in link.launches[day] if day < len(link.launches) else ():
                    configs[day] += [
                        config
                        for (place, of_number), config in self.config_by_place_and_number.items()
                        if (place.link, of_number) == (name, number)
                    ]
        return configs

    def recorded_keys(self, frames: Frames) -> LaunchKeys:
        """Return the keys of the launches that are recorded."""
        recorded = {*frames.runs["key"]}
        keys: dict[LaunchPlace, dict[str, dict[int, str]]] = {}
        for (place, number), config in self.config_by_place_and_number.items():
            for variant in config.variants:
                key = f"{run_key(config)}/{variant.name}"
                if key in recorded:
                    keys.setdefault(place, {}).setdefault(variant.name, {})[number] = key
        return keys

    def postponed_run_ids(self, frames: Frames) -> set[str]:
        """Return the launches that need another day than today: an earlier day's are of today."""
        if self.tier_name == SMOKE_TIER:
            return set()
        today = datetime.now(timezone.utc).date().isoformat()
        date_by_key = start_date_by_key(frames)
        keys = self.recorded_keys(frames)
        postponed = set[str]()
        for (place, number), config in self.config_by_place_and_number.items():
            link = self.tier.links[place.link]
            earlier_dates = {
                date_by_key[key]
                for other, key in keys.get(place, {}).get(BASELINE, {}).items()
                if link.count_day(other) < link.count_day(number)
            }
            if today in earlier_dates:
                postponed.add(run_id(config))
        return postponed


def start_date_by_key(frames: Frames) -> dict[str, str]:
    """Return the date (UTC) on which each run was begun."""
    started = frames.runs.reindex(columns=["key", "started"]).set_index("key")["started"]
    return {str(key): str(start)[:10] for key, start in started.items()}


def choose_lengths(entering: EntryInProgress, keys: LaunchKeys, frames: Frames) -> dict[LaunchPlace, int]:
    """Return the length of the trainings that count at each place that was timed on the first day.

    It is the longest that fits into the budget in time, by the launches of the first day alone, so that later
    launches change no length. The baseline's own is the rules'.
    """
    tier = entering.tier
    if entering.entry.name == BASELINE:
        return dict.fromkeys(launch_places(tier), tier.baseline_length)
    lengths = dict[LaunchPlace, int]()
    for place in launch_places(tier):
        first_numbers = tier.links[place.link].launches[0]
        keys_by_entry = keys.get(place, {})
        own_s, baseline_s = (
            mean_step_s_by_launch(
                frames,
                [key for number, key in keys_by_entry.get(name, {}).items() if number in first_numbers],
            )
            for name in (entering.entry.name, BASELINE)
        )
        if len(own_s) == len(first_numbers):
            speed = float(np.mean([*baseline_s.values()]) / np.mean([*own_s.values()]))
            lengths[place] = longest_affordable_length(tier, speed)
    return lengths


def training_places(lengths: Mapping[LaunchPlace, int]) -> list[TrainingPlace]:
    """Return where an entry is trained, each place once, short trainings first."""
    places = {TrainingPlace(place.task, place.workers, length) for place, length in lengths.items()}
    return sorted(places, key=lambda place: (place.length, place.task, place.workers))


def make_statement(
    entering: EntryInProgress,
    best_by_task: BestByTask,
    keys: LaunchKeys,
    frames: Frames,
    laws: Sequence[LawResult],
) -> EntryStatement:
    """Return the statement that the entry's file holds.

    Args:
        keys: of the launches that are recorded.
        frames: of all of its runs that are recorded; others are left out.
    """
    entry = entering.entry
    lengths = choose_lengths(entering, keys, frames)
    recorded = {*frames.runs["key"]}
    tasks = dict[str, EntryTaskStatement]()
    for name, task in entering.tier.tasks.items():
        trials = [
            TuningTrial(trial.lr_factor, trial.searched, run_key(entering.resolve_run(trial.run)))
            for trial in entering.trials
            if trial.task == name
        ]
        trainings: dict[int, list[str]] = {}
        for place in training_places({at: length for at, length in lengths.items() if at.task == name}):
            configs = entering.training_configs(best_by_task, [place])
            trainings.setdefault(place.workers, []).extend(
                key for key in map(run_key, configs) if key in recorded
            )
        own_lengths: dict[int, dict[str, int]] = {}
        launches: dict[int, dict[str, list[str]]] = {}
        baseline: dict[int, dict[str, list[str]]] = {}
        for at in (place for place in launch_places(entering.tier) if place.task == name):
            if at in lengths:
                own_lengths.setdefault(at.workers, {})[at.link] = lengths[at]
            for of_entry, keys_by_link in ((entry.name, launches), (BASELINE, baseline)):
                keys_by_number = keys.get(at, {}).get(of_entry, {})
                keys_by_link.setdefault(at.workers, {})[at.link] = [*keys_by_number.values()]
        tasks[name] = EntryTaskStatement(
            task.about,
            trials,
            best_by_task[name].lr,
            best_by_task[name].searched,
            trainings,
            launches,
            baseline,
            own_lengths,
        )
    return EntryStatement(
        version=rules().version,
        rules=rules_digest(entering.tier_name),
        tier=entering.tier_name,
        name=entry.name,
        about=entry.about,
        method=entry.method,
        settings=entry.settings,
        search=entry.search,
        on=entry.on,
        timed=entry.timed,
        claims=entry.claims,
        laws=laws,
        code=read_method_code(entry.method),
        tasks=tasks,
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def statement_run_keys(statement: EntryStatement) -> Iterator[str]:
    """Yield the key of every run that a statement rests on."""
    yield from training_keys(statement)
    yield from launch_keys_of_statement(statement)
    for task in statement.tasks.values():
        for keys_by_link in task.baseline.values():
            for keys in keys_by_link.values():
                yield from keys


def describe_missing(statement: EntryStatement) -> str:
    """Return what an entry's file still lacks, as in "3 launches are missing"; empty where it is whole."""
    tier = rules().parse_tier(statement.tier)
    num_launches = 0
    num_trainings = 0
    for place in launch_places(tier):
        there = statement.tasks[place.task].launches.get(place.workers, {}).get(place.link, ())
        num_launches += len(tier.links[place.link].launch_numbers) - len(there)
    for task in statement.tasks.values():
        for workers, length_by_link in task.lengths.items():
            num_lengths = len({*length_by_link.values()})
            num_trainings += len(rules().seeds) * num_lengths - len(task.trainings.get(workers, ()))
    missing = [(num_launches, "launches"), (num_trainings, "trainings")]
    parts = [format_count(count, plural) for count, plural in missing if count]
    return (
        f"{' and '.join(parts)} {'is' if num_launches + num_trainings == 1 else 'are'} missing"
        if parts
        else ""
    )


def read_entries_by_todays_rules(folders: ResultFolders, tier: str) -> tuple[list[EntryFile], list[str]]:
    """Return the entries of a tier, the newest of each name, and a line on each file that can't be shown."""
    return read_newest_entries(shipped_and_own_entry_folders(folders), tier, rules_digest(tier))


def entry_file_path(folders: ResultFolders, tier: str, name: str) -> Path:
    """Return the path of an entry's file."""
    return folders.results / ENTRIES / f"{name}-{tier}-v{rules().version}{ENTRY_SUFFIX}"


def write_entry_file(entering: EntryInProgress, statement: EntryStatement, frames: Frames) -> Path:
    """Write an entry's file, of the records of its runs."""
    return write_public_entry(
        entry_file_path(entering.folders, entering.tier_name, entering.entry.name),
        statement,
        select_runs(frames, [*statement_run_keys(statement)]),
    )


def launch_keys_of_statement(statement: EntryStatement) -> list[str]:
    """Return the key of each of an entry's turns in launches."""
    return [
        key
        for task in statement.tasks.values()
        for keys_by_link in task.launches.values()
        for keys in keys_by_link.values()
        for key in keys
    ]


def find_whole_baseline_entry(folders: ResultFolders, tier: str) -> EntryFile | None:
    """Return the baseline's file by the rules of today; None where there is none that lacks nothing."""
    entered, _ = read_entries_by_todays_rules(folders, tier)
    return next(
        (
            each for each in entered
            if each.statement.name == BASELINE and not describe_missing(each.statement)
        ),
        None,
    )  # fmt: skip


def check_bytes(frames: Frames) -> int:
    """Refuse launches whose interfaces sent other than was counted, by more than headers.

    Args:
        frames: of an entry, or of launches.

    Returns:
        The number of turns in launches, all of which sent what was counted.

    Raises:
        UnfairEntryError: there is one that did not, or one that counted nothing.
    """
    launches = frames.runs[frames.runs["train.validate"].eq("never")]
    for _, row in launches.iterrows():
        counts = {name: float(row.get(f"interface.{name}", np.nan)) for name in COUNTED}
        if any(np.isnan(value) for value in counts.values()):
            raise UnfairEntryError(f"launch {row['run_id']} has not counted the bytes of its interfaces")
        if why := explain_uncounted_bytes(counts, int(row["workers"])):
            raise UnfairEntryError(f"in launch {row['run_id']} {why}")
    return len(launches)
