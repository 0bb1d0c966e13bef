from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec
import pandas as pd

from analysis.benchmark.cells import BASELINE, Cell, evaluate_entry
from analysis.benchmark.files import EntryFile, read_entry
from analysis.benchmark.statement import LawResult, enter_command
from analysis.pictures.links import describe_link
from analysis.pictures.numbers import format_count, format_number
from analysis.records.configs import run_id, run_key
from analysis.records.frames import Frames, empty_frames, merge_frames
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
    LaunchKeys,
    LaunchSchedule,
    UnfairEntryError,
    check_bytes,
    choose_lengths,
    describe_missing,
    entry_file_path,
    find_whole_baseline_entry,
    launch_keys_of_statement,
    make_statement,
    read_entries_by_todays_rules,
    training_places,
    write_entry_file,
)
from experiments.figures.benchmark.entries import (
    BestSettings,
    Entrant,
    find_or_make_entrant,
    launch_places,
    shipped_entrants_by_name,
)
from experiments.figures.benchmark.held import load_held_records, training_keys
from experiments.figures.benchmark.laws import (
    FOLDER,
    check_laws,
    digest_law_tests,
    find_method_files,
)
from experiments.figures.benchmark.rules import AT, SMOKE_TIER, floors_by_task, rules
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
    check: str | None = None,
    draw: int | None = None,
) -> int:
    """Enter a method into the benchmark with rules: laws, tuning, times, trainings, and a file to send.

    The command goes on where it was stopped, and from the records in entries' files: trainings of all files,
    times of results/entries alone. docs/benchmark.md has the rules.

    Args:
        words: entries, or a method of yours, with the settings that stay fixed: mymethod method.density=0.01;
            method=NAME gives the entry a name of its own. profile=laptop is the tier. Without words, all
            entries of the repository.
        plan: show the work that is left and its hours, and do nothing.
        laws: check the laws alone.
        train: measure no times, for which this machine must do nothing else: tune, and make the trainings
            whose lengths follow from the times that there are. A later call goes on.
        check: check an entry's file that somebody else made: digests, rules, laws, and the beginning of one
            of its trainings again.
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
    held = load_held_records(folders, tier)
    entries = {entrant.name: EntryInProgress(entrant, tier, folders, held) for entrant in entrants}
    stages = EntryStageRunner(folders, held)
    base_file = None if BASELINE in entries else find_whole_baseline_entry(folders, tier)
    if base_file is None and BASELINE not in entries:
        names = " ".join([BASELINE, *entries])
        raise ValueError(
            f"the baseline has no whole entry of tier {tier} here, and levels are its: enter it with yours, "
            f"{enter_command(names, tier)}"
        )
    try:
        if plan:
            for line in _describe_plan(entries, base_file, stages):
                print(line)
            return 0
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


def load_or_check_laws(entrant: Entrant, folders: ResultFolders) -> list[LawResult]:
    """Return the laws of an entry; they are checked only if this code has not checked them before."""
    path = folders.records / "laws" / f"{entrant.name}.json"
    made_from = [code_version.digest_by_measuring_file(), digest_law_tests(), entrant]
    digest = hashlib.sha256(msgspec.json.encode(made_from)).hexdigest()
    try:
        stored = msgspec.json.decode(path.read_bytes())
        if stored["made_from"] == digest:
            return msgspec.convert(stored["laws"], list[LawResult])
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole: it can be made again
        pass
    laws = check_laws(entrant, say)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode({"made_from": digest, "laws": laws}))
    return laws


def carry_out_all_stages(
    entries: EntriesByName, base_file: EntryFile | None, stages: EntryStageRunner, *, without_times: bool
) -> None:
    """Carry out all stages of these entries, write their files after each, and print their cells.

    Args:
        base_file: the baseline's entry, unless the baseline is among these entries.
        without_times: measure no times, and take those that are recorded.
    """
    laws_by_name = {
        name: load_or_check_laws(entering.entry, stages.folders) for name, entering in entries.items()
    }
    any_entry = next(iter(entries.values()))
    if any_entry.tier_name != SMOKE_TIER:  # which is for trying, and is not shown
        for entering in entries.values():
            entering.check_trials()
    if not without_times:
        _check_links(any_entry)
    best_by_entry = dict[str, SettingsByTask]()
    for name, entering in entries.items():
        stages.make_missing_runs(f"trials of {name}", entering.tuning_configs())
        best_by_entry[name] = entering.choose_best_by_task(entering.trial_frames())
        texts = (f"{task} {_describe_settings(best)}" for task, best in best_by_entry[name].items())
        say(f"{name}: {'; '.join(texts)}")
        if not entry_file_path(stages.folders, entering.tier_name, name).exists():
            _write_file(entering, best_by_entry[name], {}, empty_frames(), laws_by_name[name])
    schedule = _schedule_launches(entries, best_by_entry, base_file)
    if schedule and not without_times:
        _measure_launches(schedule, any_entry, stages)
    launch_frames = stages.load_launches(any_entry, schedule)
    if any_entry.tier.is_emulated and not launch_frames.runs.empty:
        try:
            check_bytes(launch_frames)
        except UnfairEntryError as unfair:
            raise UnfairEntryError(
                f"{unfair}; if the machine did something else then, remove the launch from "
                "results/runs: it is made again"
            ) from unfair
    keys = schedule.recorded_keys(launch_frames) if schedule else {}

    def write_file(name: str) -> Path:
        return _write_file(entries[name], best_by_entry[name], keys, launch_frames, laws_by_name[name])

    paths = [write_file(name) for name in entries]
    for name, entering in entries.items():
        lengths = choose_lengths(entering, keys, launch_frames)
        configs = entering.training_configs(best_by_entry[name], training_places(lengths))
        try:
            stages.make_missing_runs(f"trainings of {name}", configs)
        finally:  # so that an interruption loses nothing
            print(write_file(name), flush=True)
    files = [read_entry(path) for path in paths]
    for file in files:
        if missing := describe_missing(file.statement):
            print(f"{file.statement.name}: {missing}; call `enter` again")
    whole_files = [file for file in files if not describe_missing(file.statement)]
    baseline = base_file or next((file for file in whole_files if file.statement.name == BASELINE), None)
    if baseline:
        _print_cells(whole_files, baseline)


def _measure_launches(schedule: LaunchSchedule, any_entry: EntryInProgress, stages: EntryStageRunner) -> None:
    """Make the launches that are missing, day by day; what needs another day than today waits."""
    for configs in schedule.configs_by_day():
        postponed = schedule.postponed_run_ids(stages.load_launches(any_entry, schedule))
        due = [config for config in configs if run_id(config) not in postponed]
        stages.make_missing_runs("launches", due)
        num_waiting = len(stages.find_runs_to_make(configs)) if len(due) < len(configs) else 0
        if num_waiting:
            say(
                f"{format_count(num_waiting, 'launches')} must wait for another day (UTC) than today, on "
                "which others like them were made (rule 7): call `enter` again then"
            )


def _schedule_launches(
    entries: EntriesByName, best_by_entry: Mapping[str, SettingsByTask], base_file: EntryFile | None
) -> LaunchSchedule | None:
    """Return the launches in which all entries take turns with the baseline; None of the baseline alone.

    The order of the words changes nothing.
    """
    others = [entering for name, entering in sorted(entries.items()) if name != BASELINE]
    if not others:
        return None
    baseline = entries.get(BASELINE)
    if baseline is None:
        assert base_file is not None, "entering without a baseline was refused"
        baseline = EntryInProgress(
            shipped_entrants_by_name()[BASELINE], others[0].tier_name, others[0].folders
        )
        filed = {
            task: BestSettings(best.lr, dict(best.searched))
            for task, best in base_file.statement.tasks.items()
        }
        best_by_entry = {BASELINE: filed, **best_by_entry}
    return LaunchSchedule([baseline, *others], best_by_entry)


def _write_file(
    entering: EntryInProgress,
    best_by_task: SettingsByTask,
    keys: LaunchKeys,
    launch_frames: Frames,
    laws: Sequence[LawResult],
) -> Path:
    """Write an entry's file with all that is recorded, unless the file that is there has more."""
    lengths = choose_lengths(entering, keys, launch_frames)
    trainings = entering.training_configs(best_by_task, training_places(lengths))
    run_ids = [run_id(config) for config in (*entering.tuning_configs(), *trainings)]
    frames = merge_frames(entering.frames(run_ids), launch_frames)
    statement = make_statement(entering, best_by_task, keys, frames, laws)
    path = entry_file_path(entering.folders, entering.tier_name, entering.entry.name)
    if path.exists():
        filed = read_entry(path).statement
        (filed_runs, new_runs) = (
            (len(launch_keys_of_statement(each)), len(training_keys(each))) for each in (filed, statement)
        )
        is_same_code = (filed.rules, filed.code) == (statement.rules, statement.code)
        if is_same_code and filed_runs > new_runs:
            say(
                f"{entering.entry.name}: {path.name} stays as it is, for it has "
                f"{format_count(filed_runs[0], 'launches')} and {format_count(filed_runs[1], 'trainings')}, "
                f"where {new_runs[0]} and {new_runs[1]} would be written"
            )
            return path
    return write_entry_file(entering, statement, frames)


def _check_links(entering: EntryInProgress) -> None:
    """Refuse links that this machine can't make: launches would be refused after hours of trainings."""
    plain = {name: BestSettings(1.0, {}) for name in entering.tier.tasks}
    base, other = (
        EntryInProgress(shipped_entrants_by_name()[name], entering.tier_name, entering.folders)
        for name in (BASELINE, "topk")
    )
    schedule = LaunchSchedule([base, other], {BASELINE: plain, "topk": plain})
    first_by_link = {place.link: config for (place, _), config in schedule.config_by_place_and_number.items()}
    for config in first_by_link.values():
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
        held_records: of entries' files.
    """

    folders: ResultFolders
    held_records: Frames = field(default_factory=empty_frames)

    def make_missing_runs(self, title: str, configs: Sequence[Config]) -> None:
        """Make the missing runs of a stage."""
        if configs:
            todo = self.find_runs_to_make(configs)
            say(f"{title}: {len(configs)}, {len(todo)} to make")
            _execute(todo, self.folders, f"enter-{title.partition(' ')[0]}", ["enter"])

    def find_runs_to_make(self, configs: Sequence[Config]) -> list[PlannedRun]:
        """Return the runs of a stage that are not recorded, then those that are to be made again."""
        planned = plan_distinct_runs_and_ensure_data(configs, say)
        remedy = "what rests on a method's own file that changed is made again"
        unmeasured = find_unmeasured_runs(planned, self.folders, say, remedy)
        todo = [run for run in unmeasured if not self._is_held(run.config)]
        return todo + [run for run in planned if run not in todo and self._is_stale(run.config)]

    def load_launches(self, entering: EntryInProgress, schedule: LaunchSchedule | None) -> Frames:
        """Return the records of all launches that there are, made with the methods' files of today."""
        configs = schedule.config_by_place_and_number.values() if schedule else []
        return entering.frames([run_id(config) for config in configs if self._is_recorded(config)])

    def _is_recorded(self, config: Config) -> bool:
        """Tell whether this checkout or an entry's file has a record of a run, by code of today."""
        is_here = self.folders.store.find_newest_valid_of_config(config) is not None
        return (is_here and not self._is_stale(config)) or self._is_held(config)

    def _is_held(self, config: Config) -> bool:
        """Tell whether entries' files have a run."""
        key = run_key(config)
        keys = {f"{key}/{variant.name}" for variant in config.variants} or {key}
        return keys <= {*self.held_records.runs["key"]}

    def _is_stale(self, config: Config) -> bool:
        """Tell whether a run was made with other files of its methods."""
        attempt = self.folders.store.find_newest_valid_of_config(config)
        if attempt is None:
            return False
        methods = {config.method.name, *(variant.config.method.name for variant in config.variants)}
        files = {f"{FOLDER}/{path.name}" for name in methods for path in find_method_files(name)}
        return bool(files & {*changed_code_files(attempt)})


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
    any_entry = next(iter(entries.values()))
    trials = [config for entering in entries.values() for config in entering.tuning_configs()]
    best_by_entry = {
        name: {trial.task: BestSettings(1.0, trial.searched) for trial in reversed(entering.trials)}
        if stages.find_runs_to_make(entering.tuning_configs())
        else entering.choose_best_by_task(entering.trial_frames())
        for name, entering in entries.items()
    }
    schedule = _schedule_launches(entries, best_by_entry, base_file)
    launch_frames = stages.load_launches(any_entry, schedule)
    keys = schedule.recorded_keys(launch_frames) if schedule else {}
    trainings = list[Config]()
    num_unknown_places = 0
    for name, entering in entries.items():
        lengths = choose_lengths(entering, keys, launch_frames)
        num_unknown_places += len(launch_places(entering.tier)) - len(lengths)
        trainings += entering.training_configs(best_by_entry[name], training_places(lengths))
    launches = [*chain.from_iterable(schedule.configs_by_day())] if schedule else []
    configs_by_stage = {"trials": trials, "launches": launches, "trainings": trainings}
    filed, _ = read_entries_by_todays_rules(stages.folders, any_entry.tier_name)
    recorded = [load_all_runs(stages.folders), *(file.frames.runs.assign(source="shipped") for file in filed)]
    all_runs = pd.concat(recorded, ignore_index=True).copy()
    model = DurationModel(all_runs, Machine(cpu_model(), count_usable_cores()))
    total_s = 0.0
    total_unknown = 0
    for stage, stage_configs in configs_by_stage.items():
        todo = stages.find_runs_to_make(stage_configs) if stage_configs else []
        estimates = [model.estimate(run.config) for run in todo]
        run_s = [estimate.seconds for estimate in estimates if estimate]
        stage_s = sum(run_s) / (1 if stage == "launches" else count_usable_cores())
        num_unknown = len(todo) - len(run_s)
        total_s += stage_s
        total_unknown += num_unknown
        parts = [str(len(stage_configs))]
        parts += [f"{len(todo)} to make"] if len(todo) < len(stage_configs) else []
        parts += [f"{format_number(stage_s / 60)} min expected"] if run_s else []
        parts += [f"{num_unknown} of unknown duration"] if num_unknown else []
        if stage == "trainings" and num_unknown_places:
            parts.append(
                f"besides those at {num_unknown_places} combinations of task, workers and link, whose "
                "lengths follow from the first day's launches"
            )
        yield f"{stage}: {', '.join(parts)}"
    besides = ", besides the start of each run"
    if total_unknown:
        runs = format_count(total_unknown, "runs")
        besides += f", and {runs} of unknown duration: nothing like them was made yet"
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
