from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
import pandas as pd

from analysis.benchmark.cells import BASELINE, Cell, evaluate_entry
from analysis.benchmark.files import EntryFile, read_entry
from analysis.benchmark.statement import EntryStatement
from analysis.pictures.links import describe_link
from analysis.pictures.numbers import format_count, format_number
from analysis.records.configs import run_id, run_key
from analysis.records.frames import Frames, empty_frames
from experiments.commands._arguments import Entries
from experiments.commands._messages import exit_on_failed_run, say
from experiments.commands._run_table import load_all_runs
from experiments.config import code_version, compose
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import (
    PlannedRun,
    changed_code_files,
    find_unmeasured_runs,
    plan_distinct_runs_and_ensure_data,
)
from experiments.config.run import Run
from experiments.figures.benchmark import checking
from experiments.figures.benchmark.entering import (
    EntryInProgress,
    UnfairEntryError,
    entry_file_path,
    find_baseline_entry,
    make_statement,
    read_entries_by_todays_rules,
    timing_configs,
    write_entry_file,
)
from experiments.figures.benchmark.entries import (
    BestSettings,
    Entrant,
    find_or_make_entrant,
    shipped_entrants_by_name,
)
from experiments.figures.benchmark.held import load_held_records as held_runs
from experiments.figures.benchmark.laws import FOLDER, Law, check_laws, find_method_files
from experiments.figures.benchmark.rules import AT, floors_by_task, rules
from experiments.launch.backends import execute_runs
from experiments.launch.local import count_usable_cores, emulation_request
from experiments.prediction.run_durations import DurationModel, Machine
from experiments.worker.cores import cpu_model
from slurm.emulated import network

GROUP = "here"
TIER = "laptop"
MAX_SHOWN_CELLS = 12  # of an entry
EntriesByName = Mapping[str, EntryInProgress]
SettingsByTask = Mapping[str, BestSettings]


def enter(
    words: Entries,
    *,
    plan: bool = False,
    laws: bool = False,
    train: bool = False,
    since: str | None = None,
    check: str | None = None,
    draw: int | None = None,
) -> int:
    """Enter a method into the benchmark with rules: laws, tuning, trainings, times, and a file to send.

    The command goes on where it was stopped, and from the records in entries' files: trainings of all files,
    times of results/entries alone. docs/benchmark.md has the rules.

    Args:
        words: entries, or a method of yours, with the settings that stay fixed: mymethod method.density=0.01;
            method=NAME gives the entry a name of its own. profile=laptop is the tier. Without words, all
            entries of the repository.
        plan: show the work that is left and its hours, and do nothing.
        laws: check the laws alone.
        train: measure no times, for which this machine must do nothing else: tune, train, and write the file
            with the times that there are. A later call goes on.
        since: measure again times that were begun before this date (2026-11-28), as on another day. Trainings
            would come out the same to the bit.
        check: check an entry's file that somebody else made: digests, rules, laws, and one of its trainings
            again.
        draw: the number from which that training is drawn; otherwise one that nobody knows.
    """
    folders = ResultFolders()
    if check is not None:
        if words:
            raise ValueError(f"--check takes a file, and nothing beside it: leave {words[0]} out")
        return _check_file(Path(check), folders, draw)
    if draw is not None:
        raise ValueError("--draw is for --check FILE")
    tier, entrants = _parse_entries(words)
    if laws and not plan:
        for entrant in entrants:
            print(f"{entrant.name}: {format_count(len(load_or_check_laws(entrant, folders)), 'laws')}")
        return 0
    held = held_runs(folders, tier)
    entries = {entrant.name: EntryInProgress(entrant, tier, folders, held) for entrant in entrants}
    stages = EntryStageRunner(folders, _check_date(since), held)
    base_file = None if BASELINE in entries else find_baseline_entry(folders, tier)
    try:
        if plan:
            for line in _describe_plan(entries, base_file, stages):
                print(line)
            return 0
        if base_file is None and BASELINE not in entries:
            raise ValueError(
                f"the baseline has no entry of tier {tier} here, and levels are its: enter it first, "
                f"`enter {BASELINE} profile={tier}`"
            )
        carry_out_all_stages(entries, base_file, stages, without_times=train)
    except UnfairEntryError as unfair:
        raise ValueError(str(unfair)) from unfair
    return 0


def _parse_entries(words: Sequence[str]) -> tuple[str, list[Entrant]]:
    """Return the tier and the entries that words name."""
    names = [word for word in words if "=" not in word]
    settings = dict(Run.coerce([word for word in words if "=" in word]).settings)
    tier = str(settings.pop("profile", TIER))
    cluster = str(settings.pop("cluster", ""))
    if cluster:
        tier += AT + cluster
    if rules().parse_tier(tier).is_of_cluster and not isinstance(
        compose.resolve({"cluster": cluster}).cluster, SlurmCluster
    ):
        raise ValueError(f"cluster={cluster} has no SLURM, whose nodes a link would join; name one that has")
    if settings and len(names) != 1:
        raise ValueError(
            f"{next(iter(settings))} is of one entry, and {len(names) or 'no'} names stand before it: enter "
            "them one by one"
        )
    return tier, [
        find_or_make_entrant(name, settings) for name in dict.fromkeys(names or shipped_entrants_by_name())
    ]


def _check_date(since: str | None) -> str | None:
    """Return a date as it was given; refuse other texts, and a date that is yet to come."""
    if since is None:
        return None
    try:
        day = date.fromisoformat(since)
    except ValueError:
        raise ValueError(f"--since {since}: give a date, such as --since {date.today()}") from None
    if day > date.today():
        raise ValueError(f"--since {since} is yet to come: times would be measured again at every call")
    return day.isoformat()


def load_or_check_laws(entrant: Entrant, folders: ResultFolders) -> list[Law]:
    """Return the laws of an entry; they are checked only if this code has not checked them before."""
    path = folders.records / "laws" / f"{entrant.name}.json"
    digest = hashlib.sha256(
        msgspec.json.encode([code_version.digest_by_measuring_file(), entrant])
    ).hexdigest()
    try:
        stored = msgspec.json.decode(path.read_bytes())
        if stored["made_from"] == digest:
            return msgspec.convert(stored["laws"], list[Law])
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole: it can be made again
        pass
    laws = check_laws(entrant, say)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode({"made_from": digest, "laws": laws}))
    return laws


def carry_out_all_stages(
    entries: EntriesByName, base_file: EntryFile | None, stages: EntryStageRunner, *, without_times: bool
) -> None:
    """Carry out all stages of these entries, write their files, and print their cells.

    Args:
        base_file: the baseline's entry, unless the baseline is among these entries.
        without_times: measure no times, and take those that are recorded.
    """
    folders = stages.folders
    laws = {name: load_or_check_laws(entering.entry, folders) for name, entering in entries.items()}
    for entering in entries.values():
        if entering.name != "smoke":  # which is for trying, and is not shown
            entering.check_trials()
    any_entry = next(iter(entries.values()))
    if not without_times:
        _check_links(any_entry)
    stages.make_missing_runs(
        "trials", [config for entering in entries.values() for config in entering.tuning_configs()]
    )
    chosen = {name: entering.choose_best_by_task() for name, entering in entries.items()}
    for name, settings_by_task in chosen.items():
        texts = (f"{task} {_describe_settings(best)}" for task, best in settings_by_task.items())
        say(f"{name}: {'; '.join(texts)}")
    configs = _plan_after_trials(entries, chosen, base_file)
    stages.make_missing_runs("trainings", [*chain.from_iterable(configs.trainings_by_entry.values())])
    if not without_times:
        real_time_trainings = [*chain.from_iterable(configs.real_time_trainings_by_entry.values())]
        stages.make_missing_runs("launches", configs.timing_launches, in_real_time=True)
        stages.make_missing_runs("whole trainings in real time", real_time_trainings, in_real_time=True)
    launches = [config for config in configs.timing_launches if stages.is_recorded(config)]
    launch_frames = any_entry.frames([run_id(config) for config in launches])  # read once for all
    for name, entering in entries.items():
        ended = [
            config for config in configs.real_time_trainings_by_entry[name] if stages.is_recorded(config)
        ]
        new_statement = make_statement(entering, chosen[name], [*launches, *ended], laws[name])
        path = entry_file_path(folders, entering.name, name)
        num_launches = _count_more_launches(read_entry(path).statement, new_statement) if path.exists() else 0
        if num_launches:
            say(f"{name}: {path.name} stays as it is, for it has {format_count(num_launches, 'launches')}")
            continue
        print(
            write_entry_file(
                entering,
                new_statement,
                [*entering.tuning_configs(), *configs.trainings_by_entry[name], *ended],
                launch_frames,
            )
        )
    files = [read_entry(entry_file_path(folders, entering.name, name)) for name, entering in entries.items()]
    _print_cells(files, base_file or next(file for file in files if file.statement.name == BASELINE))


class ConfigsAfterTrials(NamedTuple):
    """The runs of the stages that follow the trials."""

    trainings_by_entry: dict[str, list[Config]]
    timing_launches: list[Config]  # in which all entries take turns with the baseline
    real_time_trainings_by_entry: dict[str, list[Config]]


def _plan_after_trials(
    entries: EntriesByName, chosen: Mapping[str, SettingsByTask], base_file: EntryFile | None
) -> ConfigsAfterTrials:
    """Return the runs that follow the trials; the baseline takes turns with all entries.

    Args:
        chosen: the best settings by the names of the entries.
        base_file: tells the baseline's settings, unless the baseline is among these entries.
    """
    any_entry = next(iter(entries.values()))
    base = entries.get(BASELINE) or EntryInProgress(
        shipped_entrants_by_name()[BASELINE], any_entry.name, any_entry.folders
    )
    plain = {task: BestSettings(1.0, {}) for task in base.tier.tasks}
    filed = base_file.statement.tasks.items() if base_file else ()
    base_settings = {task: BestSettings(best.lr, dict(best.searched)) for task, best in filed} or plain
    settings = {BASELINE: base_settings, **chosen}
    other_entries = [entering for name, entering in entries.items() if name != BASELINE]
    return ConfigsAfterTrials(
        {name: entering.training_configs(settings[name]) for name, entering in entries.items()},
        timing_configs([base, *other_entries], settings) if other_entries else [],
        {name: [*entering.wall_clock_configs(settings[name]).values()] for name, entering in entries.items()},
    )


def _count_more_launches(before: EntryStatement, now: EntryStatement) -> int:
    """Return the launches of a file by the same rules and code, if they are more than those of now; else 0.

    There are more where others took turns in them.
    """
    num_before, num_now = (
        sum(
            len(keys)
            for task in entry_statement.tasks.values()
            for keys_by_link in task.launches.values()
            for keys in keys_by_link.values()
        )
        for entry_statement in (before, now)
    )
    is_same_code = (before.rules, before.code) == (now.rules, now.code)
    return num_before if is_same_code and num_before > num_now else 0


def _check_links(entering: EntryInProgress) -> None:
    """Refuse links that this machine can't make: launches would be refused after hours of trainings."""
    plain = {name: BestSettings(1.0, {}) for name in entering.tier.tasks}
    base, other = (
        EntryInProgress(shipped_entrants_by_name()[name], entering.name, entering.folders)
        for name in (BASELINE, "topk")
    )
    launches = timing_configs([base, other], {BASELINE: plain, "topk": plain})
    for config in launches[: len(entering.tier.links)]:
        request = emulation_request(PlannedRun(config, None))
        if request:
            network.check_emulation_by_trial(*request)


def _describe_settings(best: BestSettings) -> str:
    values = "".join(f" {key.partition('.')[2]}={value}" for key, value in best.searched.items())
    return f"lr={best.lr:g}{values}"


@dataclass(frozen=True)
class EntryStageRunner:
    """The maker of the runs of entries' stages, unless they are recorded.

    Args:
        remeasure_begun_before: a date; runs in real time that were begun before are made again.
        held_records: of entries' files.
    """

    folders: ResultFolders
    remeasure_begun_before: str | None = None
    held_records: Frames = field(default_factory=empty_frames)

    def make_missing_runs(self, title: str, configs: Sequence[Config], *, in_real_time: bool = False) -> None:
        """Make the missing runs of a stage."""
        if configs:
            todo = self.find_runs_to_make(configs, in_real_time=in_real_time)
            say(f"{title}: {len(configs)}, {len(todo)} to make")
            _execute(todo, self.folders, f"enter-{title.partition(' ')[0]}", ["enter"])

    def find_runs_to_make(self, configs: Sequence[Config], *, in_real_time: bool = False) -> list[PlannedRun]:
        """Return the runs of a stage that are not recorded, then those that are to be made again."""
        planned = plan_distinct_runs_and_ensure_data(configs, say)
        since = self.remeasure_begun_before if in_real_time else None
        todo = [
            run
            for run in find_unmeasured_runs(planned, self.folders, say)
            if not self._is_held(run.config, since)
        ]
        return todo + [run for run in planned if run not in todo and self._is_stale(run.config, since)]

    def is_recorded(self, config: Config) -> bool:
        """Tell whether this checkout or an entry's file has a record of a run."""
        return self.folders.store.find_newest_valid_of_config(config) is not None or self._is_held(
            config, None
        )

    def _is_held(self, config: Config, since: str | None) -> bool:
        """Tell whether an entry's file has a run that was begun on this date or later."""
        key = run_key(config)
        keys = {f"{key}/{variant.name}" for variant in config.variants} or {key}
        rows = self.held_records.runs[self.held_records.runs["key"].isin(keys)]
        return len(rows) == len(keys) and (since is None or bool((rows["started"] >= since).all()))

    def _is_stale(self, config: Config, since: str | None) -> bool:
        """Tell whether a run was begun before a date, or with other files of its methods."""
        attempt = self.folders.store.find_newest_valid_of_config(config)
        if attempt is None:
            return False
        methods = {config.method.name, *(variant.config.method.name for variant in config.variants)}
        files = {f"{FOLDER}/{path.name}" for name in methods for path in find_method_files(name)}
        started = str(attempt.manifest.get("started", ""))
        return bool(since and started < since) or bool(files & {*changed_code_files(attempt)})


def _execute(runs: Sequence[PlannedRun], folders: ResultFolders, name: str, words: Sequence[str]) -> None:
    with exit_on_failed_run():
        execute_runs(runs, folders, name, words, force=True)


def _print_cells(entries: Sequence[EntryFile], base: EntryFile) -> None:
    """Print the first cells of each entry, with words that are tested alone."""
    floors = floors_by_task(base.statement.tier)
    for entry_file in entries:
        cells = evaluate_entry(entry_file, base, floors)
        for cell in cells[:MAX_SHOWN_CELLS]:
            print(f"  {describe_cell(cell)}")
        if len(cells) > MAX_SHOWN_CELLS:
            print(f"  ... and {len(cells) - MAX_SHOWN_CELLS} more: `make benchmark` shows all")


def describe_cell(cell: Cell) -> str:
    """Return a cell of the benchmark in a line: a word for each level."""
    levels = (
        f"{100 * level.share:.0f} % {level.word}"
        + (f" {format_number(level.speedup.value)}" if level.speedup and level.speedup.value else "")
        for level in cell.levels
    )
    where = f"{cell.task}, {cell.workers} workers, {describe_link(cell.link)}"
    return f"{cell.entry} on {where}: {', '.join(levels)}"


def _describe_plan(
    entries: EntriesByName, base_file: EntryFile | None, stages: EntryStageRunner
) -> Iterator[str]:
    """Yield the work that is left of each stage, and its hours.

    The durations do not depend on the settings that tuning chooses.
    """
    folders = stages.folders
    chosen = {
        name: {trial.task: BestSettings(1.0, trial.searched) for trial in reversed(entering.trials)}
        if stages.find_runs_to_make(entering.tuning_configs())
        else entering.choose_best_by_task()
        for name, entering in entries.items()
    }
    configs = _plan_after_trials(entries, chosen, base_file)
    configs_by_stage = {
        "trials": [config for entering in entries.values() for config in entering.tuning_configs()],
        "trainings": [*chain.from_iterable(configs.trainings_by_entry.values())],
        "launches": configs.timing_launches,
        "whole trainings": [*chain.from_iterable(configs.real_time_trainings_by_entry.values())],
    }
    filed, _ = read_entries_by_todays_rules(folders, next(iter(entries.values())).name)
    recorded = [load_all_runs(folders), *(file.frames.runs.assign(source="shipped") for file in filed)]
    all_runs = pd.concat(recorded, ignore_index=True).copy()
    model = DurationModel(all_runs, Machine(cpu_model(), count_usable_cores()))
    total_s = 0.0
    total_unknown = 0
    for stage, stage_configs in configs_by_stage.items():
        is_virtual = stage in ("trials", "trainings")
        todo = stages.find_runs_to_make(stage_configs, in_real_time=not is_virtual) if stage_configs else []
        estimates = [model.estimate(run.config) for run in todo]
        run_s = [estimate.seconds for estimate in estimates if estimate]
        stage_s = sum(run_s) / (count_usable_cores() if is_virtual else 1)
        num_unknown = len(todo) - len(run_s)
        total_s += stage_s
        total_unknown += num_unknown
        parts = [str(len(stage_configs))]
        parts += [f"{len(todo)} to make"] if len(todo) < len(stage_configs) else []
        parts += [f"{format_number(stage_s / 60)} min expected"] if run_s else []
        parts += [f"{num_unknown} of unknown length"] if num_unknown else []
        yield f"{stage}: {', '.join(parts)}"
    besides = ", besides the start of each run"
    if total_unknown:
        runs = format_count(total_unknown, "runs")
        besides += f", and {runs} of unknown length: nothing like them was made yet"
    cores = format_count(count_usable_cores(), "cores")
    yield f"{format_number(total_s / 3600)} h on {cores}, while nothing else computes here{besides}"


def _check_file(path: Path, folders: ResultFolders, draw: int | None) -> int:
    """Check an entry's file that somebody else made, and return the exit code."""
    if not path.is_file():
        raise ValueError(f"{path} is no file; --check takes what `enter` wrote, results/entries/NAME.entry")

    def carry_out(configs: Sequence[Config]) -> None:
        _execute(
            plan_distinct_runs_and_ensure_data(configs, say), folders, "enter-check", ["enter", "--check"]
        )

    has_faults = False
    for line in checking.check_entry_file(path, folders, draw, carry_out):
        has_faults |= line.is_fault
        print(f"{'✗' if line.is_fault else '✓'} {line.text}", flush=True)
    print(f"{path.name}: {'refused' if has_faults else 'as the rules ask'}")
    return 1 if has_faults else 0
