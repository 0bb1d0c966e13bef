"""Somebody else's entry: whether its file is as the rules ask, and whether a training comes out again."""

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

from analysis.benchmark.cells import BASELINE, LOSS_COLUMN, steps_between_validations, training_length
from analysis.benchmark.files import EntryFile, read_entry
from analysis.benchmark.statement import EntryStatement, enter_command
from analysis.records.configs import run_id, run_key
from analysis.records.files import DamagedFileError
from analysis.records.frame_cache import load_newest_attempts_cached
from analysis.records.frames import Frames
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.run import Run
from experiments.figures.benchmark import laws
from experiments.figures.benchmark.entering import (
    BestByTask,
    EntryInProgress,
    LaunchKeys,
    LaunchSchedule,
    UnfairEntryError,
    check_bytes,
    choose_lengths,
    describe_missing,
    make_statement,
    start_date_by_key,
    statement_run_keys,
    training_places,
)
from experiments.figures.benchmark.entries import (
    BestSettings,
    Entrant,
    find_or_make_entrant,
    launch_places,
    shipped_entrants_by_name,
    training_runs,
)
from experiments.figures.benchmark.rules import SMOKE_TIER, Tier, rules, rules_digest
from sparsify.core.spec import BrokenFile

CarryOut = Callable[[Sequence[Config]], None]
OTHER = "topk"  # an entry of the repository
# By which losses and bytes may differ on another machine, as shares: the same weights, other roundings, which
# grow. (QSGD on the GPT was up to 1.1 % apart from itself with `ATEN_CPU_CAPABILITY=default`.)
NEAR_LOSS = 0.02
NEAR_BYTES = 0.05
REPEATED_VALIDATIONS = 2  # of the drawn training


class CheckLine(NamedTuple):
    """Line on a check, with its outcome."""

    text: str
    is_fault: bool = False


def check_entry_file(
    path: Path, folders: ResultFolders, draw: int | None, carry_out: CarryOut
) -> Iterator[CheckLine]:
    """Yield every check, in the order of their cost; end with the first fault."""
    try:
        entered = read_entry(path)
        try:
            for text in _check_file(entered, folders):
                yield CheckLine(text)
        except (LookupError, TypeError, AttributeError) as error:  # of what a file may say
            raise UnfairEntryError(f"it is damaged: {type(error).__name__}: {error}") from error
        entering = EntryInProgress(_find_entrant(entered.statement), entered.statement.tier, folders)
        best_by_task = entering.choose_best_by_task(entered.frames)
        yield CheckLine(_check_laws(entered.statement, entering.entry))
        for text in _train_again_and_compare(entered, entering, best_by_task, draw, carry_out):
            yield CheckLine(text)
    except (DamagedFileError, UnfairEntryError, laws.BrokenLawError, BrokenFile) as fault:
        yield CheckLine(str(fault), True)


def _check_file(entered: EntryFile, folders: ResultFolders) -> Iterator[str]:
    """Check what the file alone can tell."""
    statement = entered.statement
    yield (
        f"{statement.name}, tier {statement.tier}, version {statement.version}: tables are what its digests "
        "say"
    )
    tier = _check_version(statement)
    entering = EntryInProgress(_find_entrant(statement), statement.tier, folders)
    best_by_task = entering.choose_best_by_task(entered.frames)
    yield _check_statement(entered, entering, best_by_task)
    yield _check_records(entered, entering, best_by_task)
    yield _check_dates(entered, tier)
    yield _check_sent_bytes(entered, tier)


def _check_version(statement: EntryStatement) -> Tier:
    """Return the tier of a statement by today's rules that has all of its runs."""
    try:
        tier = rules().parse_tier(statement.tier)
    except ValueError as error:
        raise UnfairEntryError(str(error)) from error
    if statement.version != rules().version or statement.rules != rules_digest(statement.tier):
        raise UnfairEntryError(
            f"it is by rules of version {statement.version}, which are not today's: "
            f"{enter_command(statement.name, statement.tier)} enters it anew"
        )
    if {*statement.tasks} != {*tier.tasks}:
        raise UnfairEntryError("it is of other tasks than the rules'")
    if missing := describe_missing(statement):
        raise UnfairEntryError(
            f"it is not whole, {missing}: {enter_command(statement.name, statement.tier)} goes on, with the "
            "other entries that took turns with it"
        )
    return tier


def _find_entrant(statement: EntryStatement) -> Entrant:
    """Return the entry of the statement's name here, of which the statement must be."""
    entrant = shipped_entrants_by_name().get(statement.name)
    if entrant is None:
        try:
            settings = {"method": statement.method, **statement.settings}
            entrant = find_or_make_entrant(statement.name, settings)
        except (ValueError, BrokenFile) as error:
            raise UnfairEntryError(str(error)) from error
    for part in ("about", "method", "settings", "search", "on", "timed", "claims"):
        if _plain(getattr(entrant, part)) != _plain(getattr(statement, part)):
            raise UnfairEntryError(f"its {part} are not those of {statement.name} here")
    return entrant


def _plain(value: Any) -> Any:
    """Return a value as it comes out of a file."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _check_statement(entered: EntryFile, entering: EntryInProgress, best_by_task: BestByTask) -> str:
    """Check that the statement is the one that `enter` would make of the file's records."""
    statement = entered.statement
    keys = _launch_keys(statement, entering.tier)
    expected = make_statement(entering, best_by_task, keys, entered.frames, [])
    for name, task in statement.tasks.items():
        for part in msgspec.structs.fields(task):
            if _plain(getattr(task, part.name)) != _plain(getattr(expected.tasks[name], part.name)):
                raise UnfairEntryError(
                    f"{name}: its {part.encode_name} are not what the rules ask for and its records say"
                )
    tables = entered.frames.runs["key"]
    if tables.duplicated().any() or {*tables} != {*statement_run_keys(statement)}:
        raise UnfairEntryError("its tables hold other runs than its statement")
    return (
        f"{len(tables)} runs, as the rules ask: {rules().trials.number} trials on each task, the best of "
        "which was trained and timed, with the lengths that its times ask for"
    )


def _launch_keys(statement: EntryStatement, tier: Tier) -> LaunchKeys:
    """Return the keys of a whole statement's launches."""
    keys: dict[Any, dict[str, dict[int, str]]] = {}
    for place in launch_places(tier):
        task = statement.tasks[place.task]
        numbers = tier.links[place.link].launch_numbers
        own_keys = task.launches[place.workers][place.link]
        baseline_keys = task.baseline[place.workers][place.link]
        if [key.partition("/")[0] for key in own_keys] != [key.partition("/")[0] for key in baseline_keys]:
            raise UnfairEntryError(f"{place.task}: over {place.link} the baseline is of other launches")
        if len({*own_keys}) != len(numbers):
            raise UnfairEntryError(f"{place.task}: over {place.link} it has not the rules' launches")
        keys[place] = {
            statement.name: dict(zip(numbers, own_keys, strict=True)),
            BASELINE: dict(zip(numbers, baseline_keys, strict=True)),
        }
    return keys


def _check_records(entered: EntryFile, entering: EntryInProgress, best_by_task: BestByTask) -> str:
    """Check that each run was made with the rules' settings, to its end, on the same data as the others."""
    frames = entered.frames
    rows = frames.runs.set_index("key")
    turns = _turns_by_launch_key(entered, entering, best_by_task)
    wrong = [key for key, row in rows.iterrows() if not _is_as_said(str(key), row, turns)]
    if wrong:
        raise UnfairEntryError(
            f"{len(wrong)} runs were made with other settings than the rules', such as {wrong[0]}"
        )
    epochs = frames.epochs.merge(frames.runs[["key", "train.epoch_steps"]], on="key")
    has_loss = epochs[LOSS_COLUMN].notna()
    if not (epochs["step"] == epochs["epoch"] * epochs["train.epoch_steps"])[has_loss].all():
        raise UnfairEntryError("its curves have other steps than the rules'")
    num_validations = frames.epochs.groupby("key")["epoch"].count()
    wanted_validations = training_length(rows) / steps_between_validations(rows)
    for key, row in rows[rows["train.validate"] != "never"].iterrows():
        wanted = int(wanted_validations[key])
        if num_validations.get(key, 0) != wanted and pd.isna(row.get("diverged")):
            raise UnfairEntryError(
                f"{key} was validated {num_validations.get(key, 0)} times, and the rules ask for {wanted}"
            )
    launched = rows[rows["train.validate"] == "never"]
    if not (launched["alternated.blocks"] == launched["alternate.blocks"]).all():
        raise UnfairEntryError("its launches have other numbers of steps than the rules'")
    for name, task_rows in rows.groupby("task.name"):
        if len({*task_rows["provenance.data.digest"].dropna()}) > 1:
            raise UnfairEntryError(f"{name} was trained on data of several digests")
    return "each was made with the rules' settings, and to its end"


def _check_dates(entered: EntryFile, tier: Tier) -> str:
    """Check that launches of two days were made on two dates."""
    if entered.statement.tier == SMOKE_TIER:
        return f"tier {SMOKE_TIER}: launches of two days need no two dates"
    date_by_key = start_date_by_key(entered.frames)
    for place, keys_by_entry in _launch_keys(entered.statement, tier).items():
        link = tier.links[place.link]
        dates: dict[int, set[str]] = {}
        for number, key in keys_by_entry[BASELINE].items():
            dates.setdefault(link.count_day(number), set()).add(date_by_key[key])
        shared_dates = sorted(dates[0] & dates.get(1, set()))
        if shared_dates:
            raise UnfairEntryError(
                f"{place.task}: over {place.link} launches of two days were made on {shared_dates[0]}"
            )
    return "launches of two days have two dates"


def _turns_by_launch_key(
    entered: EntryFile, own: EntryInProgress, best_by_task: BestByTask
) -> dict[str, Config]:
    """Return the config of each turn in a launch, the baseline's among them, by key.

    Who else took turns is open, and another stands for them; and the baseline's rate is what its records say.
    """
    keys = _launch_keys(entered.statement, own.tier)
    config_json_by_key = entered.frames.runs.set_index("key")["config_json"]
    baseline_best = dict[str, BestSettings]()
    for place, keys_by_entry in keys.items():
        recorded = json.loads(config_json_by_key[next(iter(keys_by_entry[BASELINE].values()))])
        baseline_best[place.task] = BestSettings(recorded["task"]["lr"], {})
    entrants = shipped_entrants_by_name()
    baseline, other = (
        EntryInProgress(entrants[name], own.tier_name, own.folders) for name in (BASELINE, OTHER)
    )
    entries = [baseline, other if own.entry.name == BASELINE else own]
    best = {OTHER: baseline_best, own.entry.name: best_by_task, BASELINE: baseline_best}
    schedule = LaunchSchedule(entries, best)
    return {
        key: variant.config
        for place, keys_by_entry in keys.items()
        for name, keys_by_number in keys_by_entry.items()
        for number, key in keys_by_number.items()
        for variant in schedule.config_by_place_and_number[place, number].variants
        if variant.name == name
    }


def _is_as_said(key: str, row: pd.Series[Any], turns: Mapping[str, Config]) -> bool:
    """Return whether this run is the one under this key by the rules, with the columns of its config."""
    recorded = json.loads(row["config_json"])
    of_config = {name: recorded[name] for name in ("seed", "workers", "device")}
    of_config |= {"task.name": recorded["task"]["name"], "train.validate": recorded["train"]["validate"]}
    if any(row[name] != value for name, value in of_config.items()):
        return False
    return run_key(recorded) == (run_key(turns[key]) if "/" in key else key)


def _check_sent_bytes(entered: EntryFile, tier: Tier) -> str:
    """Check that interfaces sent what the meter counted, and headers."""
    if not tier.is_emulated:
        return "links are no emulated ones: bytes rest on what the communicator counted"
    num_turns = check_bytes(entered.frames)
    return f"interfaces sent what was counted, and headers, in {num_turns} turns in launches"


def _check_laws(statement: EntryStatement, entrant: Entrant) -> str:
    """Check that the method is here, as it was entered, and its laws hold."""
    if not laws.is_todays_method_code(statement.method, statement.code):
        here = laws.read_method_code(statement.method)
        raise UnfairEntryError(
            f"the file of {statement.method} is {'another one' if here else 'not'} here: put what the entry "
            "carries (`code` in entry.json, with what it imports beside it) into "
            f"{laws.FOLDER}/{statement.method}.py, read it, and check again"
        )
    found = laws.check_laws(entrant, lambda _: None)
    stated_laws, found_laws = ({(law.name, law.holds) for law in which} for which in (statement.laws, found))
    if differing := sorted(name for name, _ in stated_laws ^ found_laws):
        raise UnfairEntryError(f"what it says of laws is not what was found: {', '.join(differing)}")
    return f"{len(found)} laws, {sum(not law.holds for law in found)} of them excused"


def _train_again_and_compare(
    entered: EntryFile,
    entering: EntryInProgress,
    best_by_task: BestByTask,
    draw: int | None,
    carry_out: CarryOut,
) -> Iterator[str]:
    """Repeat the beginning of a training that is drawn: the curve must be the same but for rounding.

    Repeat it by virtual workers, then by processes, which share no memory.
    """
    tier = entering.tier
    lengths = choose_lengths(entering, _launch_keys(entered.statement, tier), entered.frames)
    runs = [
        run
        for place in training_places(lengths)
        for run in training_runs(entering.entry, tier, place, best_by_task[place.task])
    ]
    number = draw if draw is not None else time.time_ns()
    run = random.Random(number).choice(runs)
    config = entering.resolve_run(run)
    steps = REPEATED_VALIDATIONS * config.train.validate_every * (config.train.epoch_steps or 1)
    what = f"drawn by {number}: {config.task.name}, {config.workers} workers, seed {config.seed}"
    there = _curve(entered.frames, run_key(config)).iloc[:REPEATED_VALIDATIONS]
    for cluster, how in (("virtual", "came out"), ("local", "by processes came out")):
        again = entering.resolve_run(Run({**run.settings, "cluster": cluster, "train.steps": steps}))
        carry_out([again])
        store = entering.folders.store
        frames, _ = load_newest_attempts_cached(
            store, [run_id(again)], entering.folders.records, verify_digests=True
        )
        here = _curve(frames, run_key(again))
        off = _share_apart(here, there)
        if off > 0:
            raise UnfairEntryError(f"{what}, {how} otherwise here, up to {100 * off:.2g} % apart")
        same = "to the bit" if here.equals(there) else "but for rounding"
        yield f"{what}, {how} again {same}, {len(here)} validations"


def _share_apart(here: pd.DataFrame, there: pd.DataFrame) -> float:
    """By which share two curves are further apart than they may be; 0 where they are not."""
    if len(here) != len(there) or not np.array_equal(here["step"], there["step"]):
        return np.inf
    if not np.allclose(here["wire_bytes"], there["wire_bytes"], rtol=NEAR_BYTES, equal_nan=True):
        return np.inf
    one, other = (curve[LOSS_COLUMN].to_numpy(float) for curve in (here, there))
    if np.allclose(one, other, rtol=NEAR_LOSS, equal_nan=True):
        return 0.0
    share = float(np.abs(one / other - 1).max())
    return np.inf if np.isnan(share) else share


def _curve(frames: Frames, key: str) -> pd.DataFrame:
    own = frames.epochs[frames.epochs["key"] == key].sort_values("epoch")
    found: pd.DataFrame = own[["step", LOSS_COLUMN, "wire_bytes"]].reset_index(drop=True)
    return found
