from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import msgspec
import pandas as pd

from analysis.benchmark.cells import BASELINE, Cell, evaluate_entry
from analysis.benchmark.files import EntryFile, read_entry
from analysis.benchmark.statement import EntryStatement
from analysis.pictures.numbers import format_brief, format_count, format_with_interval
from analysis.records.configs import run_id, run_key
from analysis.records.frames import Frames, empty_frames
from experiments.commands._arguments import Entries
from experiments.commands._durations import DurationModel, Machine
from experiments.commands._messages import exit_on_failed_run, say
from experiments.commands._run_table import load_runs
from experiments.config import code_version, compose
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun, changed_code_files, find_unmeasured_runs, plan_runs
from experiments.config.run import Run
from experiments.figures.benchmark import checking
from experiments.figures.benchmark.entering import (
    Entering,
    Unfair,
    baseline,
    by_todays_rules,
    file_of,
    pack,
    statement,
    targets_of,
    timed,
)
from experiments.figures.benchmark.entries import BestSettings, Entrant, entry, shipped
from experiments.figures.benchmark.held import held as held_runs
from experiments.figures.benchmark.laws import FOLDER, Law, check_laws, files_of
from experiments.figures.benchmark.rules import AT, rules
from experiments.launch.backends import execute_runs
from experiments.launch.local import emulation_request, usable_cores
from experiments.worker.cores import cpu_model
from slurm.emulated import network

GROUP = "here"
TIER = "laptop"
LISTED = 12  # cells that are shown


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

    It goes on where it was stopped, and from what entries' files hold: trainings of all files, times of
    results/entries alone. docs/benchmark.md has the rules.

    Args:
        words: entries, or a method of yours, with what of it stays fixed: mymethod method.density=0.01; a
            name of its own with method=NAME. profile=laptop is the tier. None: all of the repository's.
        plan: say what it would take, and do nothing.
        laws: check the laws, and no more.
        train: measure no times, for which this machine must do nothing else: tune, train, and write the file
            with the times that there are. A later call goes on.
        since: measure again times that were begun before this date (2026-11-28), as on another day. Trainings
            would come out the same to the bit.
        check: an entry's file that somebody else made: digests, rules, laws, and one of its trainings again.
        draw: the number from which that training is drawn; otherwise one that nobody knows.
    """
    folders = ResultFolders()
    if check is not None:
        if words:
            raise ValueError(f"--check takes a file, and nothing beside it: leave {words[0]} out")
        return _check(Path(check), folders, draw)
    if draw is not None:
        raise ValueError("--draw is for --check FILE")
    tier, entered = _asked(words)
    laws = laws and not plan  # which does nothing, whatever else is asked
    held = empty_frames() if laws else held_runs(folders, tier)
    own = {each.name: Entering(each, tier, folders, held) for each in entered}
    if laws:
        for each in own.values():
            print(f"{each.entry.name}: {format_count(len(_laws(each.entry, folders)), 'laws')}")
        return 0
    stages = Stages(folders, _date(since), held)
    try:
        if plan:
            for line in _plan(own, stages):
                print(line)
            return 0
        first = _first(own, tier, folders)
        found = {each.entry.name: _laws(each.entry, folders) for each in own.values()}
        return _made(own, first, found, stages, train)
    except Unfair as unfair:
        raise ValueError(str(unfair)) from unfair


def _asked(words: Sequence[str]) -> tuple[str, list[Entrant]]:
    """The tier, and the entries that words name."""
    names = [word for word in words if "=" not in word]
    settings = dict(Run.coerce([word for word in words if "=" in word]).settings)
    tier = str(settings.pop("profile", TIER))
    if cluster := str(settings.pop("cluster", "")):
        tier += AT + cluster
    if rules().tier(tier).is_of_cluster and not isinstance(
        compose.resolve({"cluster": cluster}).cluster, SlurmCluster
    ):
        raise ValueError(f"cluster={cluster} has no SLURM, whose nodes a link would join; name one that has")
    if settings and len(names) != 1:
        raise ValueError(
            f"{next(iter(settings))} is of one entry, and {len(names) or 'no'} names stand before it: enter "
            "them one by one"
        )
    return tier, [entry(name, settings) for name in dict.fromkeys(names or shipped())]


def _date(since: str | None) -> str | None:
    """A date that is asked for, if it is one."""
    if since is None:
        return None
    try:
        day = date.fromisoformat(since)
    except ValueError:
        raise ValueError(f"--since {since}: give a date, such as --since {date.today()}") from None
    if day > date.today():
        raise ValueError(f"--since {since} is yet to come: times would be measured again at every call")
    return day.isoformat()


def _first(own: Mapping[str, Entering], tier: str, folders: ResultFolders) -> EntryFile | None:
    """The baseline's file, which all are compared with; None where the baseline is among what is entered."""
    if BASELINE in own:
        return None
    if (found := baseline(folders, tier)) is None:
        raise ValueError(
            f"the baseline has no entry of tier {tier} here, and targets are its: enter it first, "
            f"`enter {BASELINE} profile={tier}`"
        )
    return found


def _laws(each: Entrant, folders: ResultFolders) -> list[Law]:
    """The laws of an entry, as they were found with this code."""
    kept = folders.records / "laws" / f"{each.name}.json"
    made_from = hashlib.sha256(msgspec.json.encode([code_version.digest_by_source(), each])).hexdigest()
    try:
        known = msgspec.json.decode(kept.read_bytes())
        if known["made_from"] == made_from:
            return msgspec.convert(known["laws"], list[Law])
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole: it can be made again
        pass
    found = check_laws(each, say)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(msgspec.json.encode({"made_from": made_from, "laws": found}))
    return found


def _made(
    own: Mapping[str, Entering],
    first: EntryFile | None,
    found: Mapping[str, list[Law]],
    stages: Stages,
    train: bool,
) -> int:
    """All stages, and what they came to; `train`: without times, but those that there are."""
    for each in own.values():
        if each.name != "smoke":  # which is for trying, and is not shown
            each.check_trials()
    folders = stages.folders
    if not train:
        _check_links(own)
    stages.carry_out("trials", [config for each in own.values() for config in each.tuning()])
    chosen = {name: each.chosen() for name, each in own.items()}
    for name, of_tasks in chosen.items():
        say(f"{name}: " + "; ".join(f"{task} {_settings(best)}" for task, best in of_tasks.items()))
    trained = {name: each.training(chosen[name]) for name, each in own.items()}
    stages.carry_out("trainings", [config for configs in trained.values() for config in configs])
    turns, any_one = list[Entering](), next(iter(own.values()))
    if first is None:
        turns = [own[BASELINE], *(each for name, each in own.items() if name != BASELINE)]
    else:
        base = Entering(shipped()[BASELINE], any_one.name, folders)
        turns = [base, *own.values()]
        chosen[BASELINE] = _chosen_before(first)
    launched = timed(turns, chosen) if len(turns) > 1 else []
    whole = {name: [*each.whole(chosen[name]).values()] for name, each in own.items()}
    every_whole = [one for configs in whole.values() for one in configs]
    if not train:
        stages.carry_out("launches", launched, in_real_time=True)
        stages.carry_out("whole trainings in real time", every_whole, in_real_time=True)
    launched = [config for config in launched if stages.is_made(config)]
    frames = any_one.frames([run_id(config) for config in launched])  # read once for all
    for name, each in own.items():
        ended = [config for config in whole[name] if stages.is_made(config)]
        said = statement(each, chosen[name], [*launched, *ended], found[name])
        path = file_of(folders, each.name, name)
        if path.exists() and (kept := _more_launches(read_entry(path).statement, said)):
            say(f"{name}: {path.name} stays as it is, for it has {format_count(kept, 'launches')}")
            continue
        print(pack(each, said, [*each.tuning(), *trained[name], *ended], frames))
    _show([read_entry(file_of(folders, each.name, name)) for name, each in own.items()], first)
    return 0


def _chosen_before(first: EntryFile) -> dict[str, BestSettings]:
    """The best settings of an entry that is there, by task."""
    return {name: BestSettings(task.lr, dict(task.searched)) for name, task in first.statement.tasks.items()}


def _more_launches(before: EntryStatement, now: EntryStatement) -> int:
    """How many launches a file has, if by the same rules and code and more than would be there now, as where
    others took turns in them; else 0.
    """
    had, has = (
        sum(
            len(keys)
            for task in said.tasks.values()
            for own in task.launches.values()
            for keys in own.values()
        )
        for said in (before, now)
    )
    return had if had > has and (before.rules, before.code) == (now.rules, now.code) else 0


def _check_links(own: Mapping[str, Entering]) -> None:
    """Refuse what launches would be refused for, before hours of trainings: links that can't be made here."""
    first = next(iter(own.values()))
    plain = {name: BestSettings(1.0, {}) for name in first.tier.tasks}
    base, other = (Entering(shipped()[name], first.name, first.folders) for name in (BASELINE, "topk"))
    launches = timed([base, other], {BASELINE: plain, "topk": plain})
    for config in launches[: len(first.tier.links)]:
        if asked := emulation_request(PlannedRun(config, None)):
            network.check_emulation(*asked)


def _settings(best: BestSettings) -> str:
    values = "".join(f" {key.partition('.')[2]}={value}" for key, value in best.searched.items())
    return f"lr={format_brief(best.lr)}{values}"


@dataclass(frozen=True)
class Stages:
    """What is made, unless it was.

    Args:
        since: a date; what is in real time and was begun before is made again.
        held: records of entries' files.
    """

    folders: ResultFolders
    since: str | None = None
    held: Frames = field(default_factory=empty_frames)

    def carry_out(self, what: str, configs: Sequence[Config], in_real_time: bool = False) -> None:
        """Make what is missing of a stage."""
        if not configs:
            return
        todo = self.left(configs, in_real_time)
        say(f"{what}: {len(configs)}, {len(todo)} to make")
        with exit_on_failed_run():
            execute_runs(todo, self.folders, f"enter-{what.partition(' ')[0]}", ["enter"], force=True)

    def left(self, configs: Sequence[Config], in_real_time: bool = False) -> list[PlannedRun]:
        """What of a stage is not made, or is to be made again."""
        planned, since = plan_runs(configs, say), self.since if in_real_time else None
        todo = [
            run
            for run in find_unmeasured_runs(planned, self.folders, say)
            if not self._is_held(run.config, since)
        ]
        return todo + [run for run in planned if run not in todo and self._is_stale(run.config, since)]

    def is_made(self, config: Config) -> bool:
        """Tell whether there is a record of it."""
        return self.folders.store.find_valid(config) is not None or self._is_held(config, None)

    def _is_held(self, config: Config, since: str | None) -> bool:
        """Tell whether an entry's file has it, begun on this date or later."""
        key = run_key(config)
        wanted = {f"{key}/{each.name}" for each in config.variants} or {key}
        rows = self.held.runs[self.held.runs["key"].isin(wanted)]
        return len(rows) == len(wanted) and (since is None or bool((rows["started"] >= since).all()))

    def _is_stale(self, config: Config, since: str | None) -> bool:
        """Tell whether a run was begun before a date, or with other files of its methods."""
        attempt = self.folders.store.find_valid(config)
        if attempt is None:
            return False
        methods = {config.method.name, *(each.config.method.name for each in config.variants)}
        files = {f"{FOLDER}/{path.name}" for name in methods for path in files_of(name)}
        began = str(attempt.manifest.get("started", ""))
        return bool(since and began < since) or bool(files & {*changed_code_files(attempt)})


def _show(entered: Sequence[EntryFile], first: EntryFile | None) -> None:
    """The cells of what was entered."""
    base = first or next(each for each in entered if each.statement.name == BASELINE)
    aims = targets_of(base.statement.tier, base)
    for each in entered:
        found = evaluate_entry(each, base, aims)
        for cell in found[:LISTED]:
            print("  " + sentence(cell))
        if len(found) > LISTED:
            print(f"  ... and {len(found) - LISTED} more: `make benchmark` shows all")


def sentence(cell: Cell) -> str:
    """A cell in a line."""
    is_late = cell.word == "misses the target"
    gain = (
        f": {format_with_interval(cell.speedup)} times as soon as {BASELINE}"
        if cell.speedup and not is_late
        else ""
    )
    where = f"{cell.task}, {cell.workers} workers, {cell.link}"
    reached = (
        f" ({cell.seeds_at_target} of {cell.seeds} seeds at the target)"
        if cell.seeds_at_target < cell.seeds
        else ""
    )
    return f"{cell.entry} on {where}: {cell.word}{gain}{reached}"


def _plan(own: Mapping[str, Entering], stages: Stages) -> Iterator[str]:
    """What is left to do of each stage, and its hours. Settings that tuning chooses change no duration."""
    folders, tier = stages.folders, next(iter(own.values())).name
    chosen = {
        name: {trial.task: BestSettings(1.0, trial.searched) for trial in reversed(each.trials)}
        if stages.left(each.tuning())
        else each.chosen()
        for name, each in own.items()
    }
    base = own.get(BASELINE) or Entering(shipped()[BASELINE], tier, folders)
    if BASELINE not in own:
        first = baseline(folders, tier)
        chosen[BASELINE] = (
            _chosen_before(first) if first else {name: BestSettings(1.0, {}) for name in base.tier.tasks}
        )
    others = [each for name, each in own.items() if name != BASELINE]
    of_stages = {
        "trials": [config for each in own.values() for config in each.tuning()],
        "trainings": [config for name, each in own.items() for config in each.training(chosen[name])],
        "launches": timed([base, *others], chosen) if others else [],
        "whole trainings": [one for name, each in own.items() for one in each.whole(chosen[name]).values()],
    }
    entered, _ = by_todays_rules(folders, tier)
    known = [load_runs(folders), *(each.frames.runs.assign(source="shipped") for each in entered)]
    took = DurationModel(pd.concat(known, ignore_index=True).copy(), Machine(cpu_model(), usable_cores()))
    hours, unknown = 0.0, 0
    for what, configs in of_stages.items():
        virtual = what in ("trials", "trainings")
        todo = [run.config for run in stages.left(configs, in_real_time=not virtual)] if configs else []
        seconds = [each.seconds for config in todo if (each := took.estimate(config))]
        none, at_once = len(todo) - len(seconds), usable_cores() if virtual else 1
        hours, unknown = hours + sum(seconds) / at_once / 3600, unknown + none
        told = [f"{len(todo)} to make"] if len(todo) < len(configs) else []
        told += [f"{format_brief(sum(seconds) / at_once / 60)} min expected"] if seconds else []
        told += [f"{none} of unknown length"] if none else []
        yield f"{what}: {', '.join([str(len(configs)), *told])}"
    how = ", besides the start of each run"
    if unknown:
        how += f", and {format_count(unknown, 'runs')} of unknown length: nothing like them was made yet"
    yield (
        f"{format_brief(hours)} h on {format_count(usable_cores(), 'cores')}, while nothing "
        f"else computes here{how}"
    )


def _check(path: Path, folders: ResultFolders, draw: int | None) -> int:
    """Somebody else's file."""
    if not path.is_file():
        raise ValueError(f"{path} is no file; --check takes what `enter` wrote, results/entries/NAME.entry")
    faults, done = list[str](), list[str]()
    for line in checking.check(path, folders, draw, _carry_one(folders)):
        (faults if line.is_fault else done).append(line.text)
        print(("✗ " if line.is_fault else "✓ ") + line.text, flush=True)
    print(f"{path.name}: {'refused' if faults else 'as the rules ask'}")
    return 1 if faults else 0


def _carry_one(folders: ResultFolders) -> checking.CarryOut:
    def carry(configs: Sequence[Config]) -> None:
        planned = plan_runs(configs, say)
        with exit_on_failed_run():
            execute_runs(planned, folders, "enter-check", ["enter", "--check"], force=True)

    return carry
