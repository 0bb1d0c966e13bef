"""Somebody else's entry: whether its file is as the rules ask, and whether a cell comes out again."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from analysis.benchmark.cells import BASELINE, LOSS_COLUMN
from analysis.benchmark.files import EntryFile, read_entry
from analysis.benchmark.statement import EntryStatement, EntryTaskStatement
from analysis.records.configs import run_id, run_key
from analysis.records.files import DamagedFileError
from analysis.records.frame_cache import load_newest_attempts_cached
from analysis.records.frames import Frames
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.run import Run
from experiments.figures.benchmark import laws
from experiments.figures.benchmark.entering import (
    EntryInProgress,
    UnfairEntryError,
    check_bytes,
    last_validation_loss_by_key,
    make_statement,
    resolve_tier_run,
    statement_run_keys,
)
from experiments.figures.benchmark.entries import (
    BestSettings,
    Entrant,
    find_or_make_entrant,
    shipped_entrants_by_name,
    training_runs,
    trial_lr,
    turn_settings,
)
from experiments.figures.benchmark.rules import Tier, launch_settings, rules, rules_digest
from sparsify.core.spec import BrokenFile

CarryOut = Callable[[Sequence[Config]], None]
OTHER = "topk"  # an entry of the repository
# By which a loss may differ on another machine, as a share: the same weights, other roundings, which grow
# with each validation. (QSGD on the GPT was 0.01 % apart at the first, 0.57 % at the fifth, 0.86 % at most.)
NEAR_AT_FIRST, GROWTH, NEAR = 2e-3, 3, 0.05
TOGETHER = 2  # epochs that processes make as well


class CheckLine(NamedTuple):
    """Line on a check, with its outcome."""

    text: str
    is_fault: bool = False


def check_entry_file(
    path: Path, folders: ResultFolders, draw: int | None, carry_out: CarryOut
) -> Iterator[CheckLine]:
    """Yield every check, in the order of their cost; end with the first kind that finds faults."""
    try:
        entered = read_entry(path)
    except DamagedFileError as damage:
        yield CheckLine(str(damage), True)
        return
    statement = entered.statement
    yield CheckLine(
        f"{statement.name}, tier {statement.tier}, version {statement.version}: "
        "tables are what its digests say"
    )
    for part in (_check_rules, _check_tuning, _check_sent_bytes, _check_laws):
        try:
            lines = [*part(entered, folders)]
        except (LookupError, TypeError, AttributeError, ValueError) as error:  # of what a file may say
            lines = [CheckLine(f"it is damaged: {type(error).__name__}: {error}", True)]
        yield from lines
        if any(line.is_fault for line in lines):
            return
    yield from _train_again_and_compare(entered, folders, draw, carry_out)


def entrant_of_statement(statement: EntryStatement) -> Entrant:
    """Return the entry that a statement is of."""
    return Entrant(
        statement.name,
        statement.settings,
        statement.about,
        statement.search,
        statement.on,
        statement.timed,
        statement.claims,
    )


def _check_rules(entered: EntryFile, folders: ResultFolders) -> Iterator[CheckLine]:
    """Check that every run is one that the rules ask for, and none is missing or twice."""
    statement, frames = entered.statement, entered.frames
    try:
        tier = rules().parse_tier(statement.tier)
    except ValueError as error:
        yield CheckLine(str(error), True)
        return
    if statement.version != rules().version or statement.rules != rules_digest(statement.tier):
        yield CheckLine(
            f"it is of other rules than these (version {statement.version}): enter it again", True
        )
        return
    own = entrant_of_statement(statement)
    if statement.method != statement.settings.get("method") or {*statement.tasks} != {*tier.tasks}:
        yield CheckLine("it is of another method, or of other tasks, than it says", True)
        return
    if why := _find_difference_from_entry(statement, own):
        yield CheckLine(why, True)
        return
    best_by_task = {
        name: BestSettings(task.lr, dict(task.searched)) for name, task in statement.tasks.items()
    }
    entering = EntryInProgress(own, statement.tier, folders)
    expected = make_statement(
        entering, best_by_task, [*entering.wall_clock_configs(best_by_task).values()], []
    )
    for name, task in statement.tasks.items():
        wanted = expected.tasks[name]
        stated, asked = ([_plain(each) for each in (of.trials, of.trainings)] for of in (task, wanted))
        if stated != asked:
            yield CheckLine(f"{name}: its trials or trainings are not those that the rules ask for", True)
            return
        if why := _find_missing_of_launches(task, tier, own.name == BASELINE):
            yield CheckLine(f"{name}: {why}", True)
            return
        if _plain(task.whole) != _plain(wanted.whole):
            yield CheckLine(f"{name}: its trainings in real time are not those that the rules ask for", True)
            return
    rows, keys = frames.runs.set_index("key"), {*statement_run_keys(statement)}
    if rows.index.has_duplicates or {*rows.index} != keys:
        yield CheckLine("its tables hold other runs than its statement", True)
        return
    turns = dict(_turns_by_launch_key(own, tier, statement, best_by_task, rows))
    wrong = [key for key, row in rows.iterrows() if not _is_as_said(str(key), row, turns)]
    if wrong:
        yield CheckLine(
            f"{len(wrong)} runs were made with other settings than the rules', such as {wrong[0]}", True
        )
        return
    epochs = frames.epochs.merge(frames.runs[["key", "train.epoch_steps"]], on="key")
    whole = epochs[LOSS_COLUMN].notna()
    if not (epochs["step"] == epochs["epoch"] * epochs["train.epoch_steps"])[whole].all():
        yield CheckLine("its curves have other steps than the rules'", True)
        return
    digests = {name: _digest_of(own_rows) for name, own_rows in rows.groupby("task.name")}
    if many := [name for name, found in digests.items() if len(found) > 1]:
        yield CheckLine(f"{many[0]} was trained on data of {len(digests[many[0]])} digests", True)
        return
    yield CheckLine(f"{len(keys)} runs, each as the rules ask: tasks, workers, seeds, budget, links")


def _plain(value: Any) -> Any:
    """Return a value as it comes out of a file."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _find_difference_from_entry(statement: EntryStatement, own: Entrant) -> str:
    """Return how the statement differs from the entry of its name; empty where it does not."""
    if statement.name in shipped_entrants_by_name():
        expected = shipped_entrants_by_name()[statement.name]
    else:
        try:
            expected = find_or_make_entrant(
                statement.name, {"method": statement.method, **statement.settings}
            )
        except (ValueError, BrokenFile) as error:
            return str(error)
    for part in ("settings", "search", "on", "timed", "claims"):
        if _plain(getattr(expected, part)) != _plain(getattr(own, part)):
            return f"its {part} are not those of {statement.name} here"
    return ""


def _find_missing_of_launches(task: EntryTaskStatement, tier: Tier, is_baseline: bool) -> str:
    """Return what is missing of the task's launches; empty where nothing is."""
    wanted = len(rules().launches)
    if {*task.launches} != {*tier.workers} or {*task.baseline} != {*tier.workers}:
        return "it was not timed with the rules' workers"
    for workers, of_links in task.launches.items():
        beside = task.baseline[workers]
        if {*of_links} != {*tier.links} or {*beside} != {*tier.links}:
            return "it was not timed over the rules' links"
        for link, keys in of_links.items():
            if is_baseline and not keys:
                continue  # entered by itself, before others took turns with it
            groups, theirs = ([key.partition("/")[0] for key in each] for each in (keys, beside[link]))
            if len({*groups}) != wanted or groups != theirs:
                return (
                    f"over {link} it has {len({*groups})} launches with the baseline, and the rules ask for "
                    f"{wanted}: `enter` measures them"
                )
    return ""


def _digest_of(rows: pd.DataFrame) -> set[str]:
    return {*rows["provenance.data.digest"].dropna().astype(str)}


def _turns_by_launch_key(
    own: Entrant,
    tier: Tier,
    statement: EntryStatement,
    best_by_task: Mapping[str, BestSettings],
    rows: pd.DataFrame,
) -> Iterator[tuple[str, Config]]:
    """Yield the key of each turn in a launch, the baseline's among them, and its config.

    Who else took turns is open, and another stands for them; and the baseline's rate is what its records say.
    """
    base = shipped_entrants_by_name()[BASELINE]
    other = shipped_entrants_by_name()[OTHER] if own.name == BASELINE else own
    for name, task in statement.tasks.items():
        theirs = [key for of_links in task.baseline.values() for keys in of_links.values() for key in keys]
        if not theirs:
            continue
        rate = json.loads(str(rows.loc[theirs[0], "config_json"]))["task"]["lr"]
        best = {BASELINE: BestSettings(rate, {}), OTHER: BestSettings(rate, {}), own.name: best_by_task[name]}
        turns = {each.name: turn_settings(each, tier, name, best[each.name]) for each in (base, other, own)}
        for each_entry, by_workers in ((own, task.launches), (base, task.baseline)):
            for workers, of_links in by_workers.items():
                for link, keys in of_links.items():
                    shared = launch_settings(tier, tier.tasks[name], workers, link)
                    for number, key in zip(rules().launches, keys, strict=False):
                        config = resolve_tier_run(Run({**shared, "seed": number}, turns), statement.tier)
                        yield key, next(v.config for v in config.variants if v.name == each_entry.name)


def _is_as_said(key: str, row: pd.Series[Any], turns: Mapping[str, Config]) -> bool:
    """Return whether this run is the one under this key by the rules, with the columns of its config."""
    recorded = json.loads(row["config_json"])
    of_config = {name: recorded[name] for name in ("seed", "workers", "device")}
    of_config |= {"task.name": recorded["task"]["name"], "train.validate": recorded["train"]["validate"]}
    if any(row[name] != value for name, value in of_config.items()):
        return False
    return run_key(recorded) == (run_key(turns[key]) if "/" in key else key)


def _check_tuning(entered: EntryFile, _: ResultFolders) -> Iterator[CheckLine]:
    """Check that the best of the trials was chosen, and all seeds and launches are there."""
    statement, frames = entered.statement, entered.frames
    own, tier = entrant_of_statement(statement), rules().parse_tier(statement.tier)
    last = last_validation_loss_by_key(frames)
    for name, task in statement.tasks.items():
        losses = [float(last.get(tried.key, np.nan)) for tried in task.trials]
        if len(losses) != rules().trials.number or np.isnan(losses).all():
            yield CheckLine(
                f"{name}: {len(losses)} trials, of which the rules ask for {rules().trials.number}", True
            )
            return
        best = task.trials[int(np.nanargmin(losses))]
        rate = trial_lr(own, name, tier.tasks[name], best.lr_factor)
        if not np.isclose(rate, task.lr) or dict(best.searched) != dict(task.searched):
            yield CheckLine(f"{name}: what was trained is not the best of its trials (lr={rate:g})", True)
            return
        if short := _find_missing_of_curves(task, frames):
            yield CheckLine(f"{name}: {short}", True)
            return
    yield CheckLine(f"each task has {rules().trials.number} trials, and the best of them was trained")


def _find_missing_of_curves(task: EntryTaskStatement, frames: Frames) -> str:
    """Return what is missing of the curves; empty where nothing is."""
    validated = frames.epochs.groupby("key")["epoch"].count()
    wanted, ended = rules().steps // rules().epoch_steps, frames.runs.set_index("key").get("diverged")
    for keys in task.trainings.values():
        for key in keys:
            diverged = ended is not None and not pd.isna(ended.get(key))
            if validated.get(key, 0) != wanted and not diverged:
                return f"{key} was validated {validated.get(key, 0)} times, and the rules ask for {wanted}"
    return ""


def _check_sent_bytes(entered: EntryFile, _: ResultFolders) -> Iterator[CheckLine]:
    """Check that interfaces sent what the meter counted, and headers."""
    statement, workers = entered.statement, dict[str, int]()
    for task in statement.tasks.values():
        for size, of_links in task.launches.items():
            workers |= {key: size for keys in of_links.values() for key in keys}
    if not rules().parse_tier(statement.tier).is_emulated:
        yield CheckLine("links are no emulated ones: bytes rest on what the communicator counted")
        return
    try:
        check_bytes(entered.frames, workers)
    except UnfairEntryError as unfair:
        yield CheckLine(str(unfair), True)
        return
    yield CheckLine(f"interfaces sent what was counted, and headers, in {len(workers)} launches")


def _check_laws(entered: EntryFile, _: ResultFolders) -> Iterator[CheckLine]:
    """Check that the method is here, as it was entered, and its laws hold."""
    statement = entered.statement
    if not laws.is_todays_method_code(statement.method, statement.code):
        here = laws.read_method_code(statement.method)
        yield CheckLine(
            f"the file of {statement.method} is {'another one' if here else 'not'} here: put what the entry "
            "carries (`code` in entry.json, with what it imports beside it) into "
            f"{laws.FOLDER}/{statement.method}.py, read it, and check again", True,
        )  # fmt: skip
        return
    try:
        found = laws.check_laws(entrant_of_statement(statement), lambda _: None)
    except (laws.BrokenLawError, BrokenFile) as broken:
        yield CheckLine(str(broken), True)
        return
    stated, broken_now = ({law.name for law in which if not law.holds} for which in (statement.laws, found))
    if stated != broken_now:
        yield CheckLine(f"it names other broken laws ({', '.join(stated) or 'none'}) than were found", True)
        return
    yield CheckLine(f"{len(found)} laws, {len(broken_now)} of them excused")


def _train_again_and_compare(
    entered: EntryFile, folders: ResultFolders, draw: int | None, carry_out: CarryOut
) -> Iterator[CheckLine]:
    """Repeat a training that is drawn: the curve must be the same but for rounding.

    Then repeat its first epochs by processes, which share no memory.
    """
    statement = entered.statement
    number = draw if draw is not None else time.time_ns()
    best_by_task = {
        name: BestSettings(task.lr, dict(task.searched)) for name, task in statement.tasks.items()
    }
    runs = training_runs(entrant_of_statement(statement), rules().parse_tier(statement.tier), best_by_task)
    run = random.Random(number).choice(runs)
    config = resolve_tier_run(run, statement.tier)
    steps = TOGETHER * (config.train.epoch_steps or 1)
    apart = resolve_tier_run(Run({**run.settings, "cluster": "local", "train.steps": steps}), statement.tier)
    what = f"drawn by {number}: {config.task.name}, {config.workers} workers, seed {config.seed}"
    for again, how in ((config, "came out"), (apart, "by processes came out")):
        carry_out([again])
        frames, _ = load_newest_attempts_cached(
            folders.store, [run_id(again)], folders.records, verify_digests=True
        )
        here, there = _curve(frames, run_key(again)), _curve(entered.frames, run_key(config))
        there = there.iloc[: len(here)] if again is apart else there
        off = _share_apart(here, there)
        if off > 0:
            yield CheckLine(f"{what}, {how} otherwise here, up to {100 * off:.2g} % apart", True)
            return
        same = "to the bit" if here.equals(there) else "but for rounding"
        yield CheckLine(f"{what}, {how} again {same}, {len(here)} validations")


def _share_apart(here: pd.DataFrame, there: pd.DataFrame) -> float:
    """By which share two curves are further apart than they may be; 0 where they are not."""
    if len(here) != len(there) or not np.array_equal(here["step"], there["step"]):
        return np.inf
    if not np.allclose(here["wire_bytes"], there["wire_bytes"], rtol=NEAR, equal_nan=True):
        return np.inf
    one, other = here[LOSS_COLUMN].to_numpy(float), there[LOSS_COLUMN].to_numpy(float)
    near = np.minimum(NEAR_AT_FIRST * GROWTH ** np.arange(float(len(one))), NEAR)
    is_near = np.isclose(one, other, rtol=near, equal_nan=True)
    return 0.0 if is_near.all() else float(np.nanmax(np.abs(one / other - 1), initial=0.0)) or np.inf


def _curve(frames: Frames, key: str) -> pd.DataFrame:
    own = frames.epochs[frames.epochs["key"] == key].sort_values("epoch")
    found: pd.DataFrame = own[["step", LOSS_COLUMN, "wire_bytes"]].reset_index(drop=True)
    return found
