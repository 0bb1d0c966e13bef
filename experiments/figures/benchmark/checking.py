"""Somebody else's entry: whether its file is as the rules ask, and whether a cell comes out again."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.benchmark.cells import BASELINE, COLUMN
from analysis.benchmark.files import Entered, read
from analysis.benchmark.statement import EntryStatement, OnTask
from analysis.records import parquet
from analysis.records.configs import run_id, run_key
from analysis.records.files import Damaged
from analysis.records.frames import Frames
from experiments.config.config import Config
from experiments.config.folders import Folders
from experiments.config.run import Run
from experiments.figures.benchmark import laws
from experiments.figures.benchmark.entering import baseline, keys_of, resolved
from experiments.figures.benchmark.entries import (
    BestSettings,
    Entrant,
    rate_of,
    shipped,
    trajectories,
    trials,
    turn,
    whole,
)
from experiments.figures.benchmark.rules import Tier, digest, launch, rules
from sparsify.core.spec import BrokenFile
from sparsify.methods import REGISTRY as METHODS

CarryOut = Callable[[Sequence[Config]], None]
OTHER = "topk"  # an entry of the repository
NEAR = 2e-3  # by which a loss may differ on another machine, as a share: the same weights, other roundings
HEADERS = (
    0.95,
    1.35,
)  # bytes of an interface, in times of those that were counted: acknowledgements, headers
SMALL_BYTES = 1e6  # of a launch: below that, what connections say to each other counts


class Line(NamedTuple):
    """What was checked."""

    text: str
    is_fault: bool = False


def check(path: Path, folders: Folders, draw: int | None, carry_out: CarryOut) -> Iterator[Line]:
    """Every check, in the order of their cost; it ends with the first kind that finds faults."""
    try:
        entered = read(path)
    except Damaged as damage:
        yield Line(str(damage), True)
        return
    said = entered.statement
    yield Line(f"{said.name}, tier {said.tier}, version {said.version}: tables are what its digests say")
    for part in (_of_rules, _of_tuning, _of_bytes, _of_laws):
        lines = [*part(entered)]
        yield from lines
        if any(line.is_fault for line in lines):
            return
    yield from _again(entered, folders, draw, carry_out)


def entry_of(said: EntryStatement) -> Entrant:
    """The entry that a statement is of."""
    return Entrant(said.name, said.settings, said.about, said.search, said.on, said.timed, said.claims)


def _of_rules(entered: Entered) -> Iterator[Line]:
    """Every run is one that the rules ask for, and none is missing or twice."""
    said, frames = entered.statement, entered.frames
    if said.version != rules().version or said.rules != digest(said.tier):
        yield Line(f"it is of other rules than these (version {said.version}): enter it again", True)
        return
    own, tier = entry_of(said), rules().tier(said.tier, said.cluster)
    if said.name in shipped() and _declared(shipped()[said.name]) != _declared(own):
        yield Line(f"{said.name} is an entry of the repository, and its settings are others", True)
        return
    if said.name not in shipped():
        if strangers := [key for key in said.settings if key != "method" and not key.startswith("method.")]:
            yield Line(f"it fixes {strangers[0]}, which is the rules' to choose", True)
            return
        if said.on or said.timed or len(said.search) > rules().most_numbers:
            yield Line("it has settings by task, or for its times, or searches more than three numbers", True)
            return
    expected = _expected(own, tier, said)
    stated = {*keys_of(said)}
    if stated != expected.keys():
        missing, more = expected.keys() - stated, stated - expected.keys()
        yield Line(
            f"{len(missing)} runs that the rules ask for are missing, {len(more)} are none of theirs", True
        )
        return
    rows = frames.runs.set_index("key")
    if rows.index.has_duplicates or {*rows.index} != stated:
        yield Line("its tables hold other runs than its statement", True)
        return
    wrong = [key for key, row in rows.iterrows() if not _is_as_said(str(key), row, expected)]
    if wrong:
        yield Line(
            f"{len(wrong)} runs were made with other settings than the rules', such as {wrong[0]}", True
        )
        return
    digests = {name: _digest_of(own_rows) for name, own_rows in rows.groupby("task.name")}
    if many := [name for name, found in digests.items() if len(found) > 1]:
        yield Line(f"{many[0]} was trained on data of {len(digests[many[0]])} digests", True)
        return
    yield Line(f"{len(stated)} runs, each as the rules ask: tasks, workers, seeds, budget, links")


def _declared(entry: Entrant) -> tuple[Any, ...]:
    return tuple(json.dumps(part, sort_keys=True, default=list) for part in (
        dict(entry.settings), dict(entry.search), dict(entry.on), dict(entry.timed)))  # fmt: skip


def _digest_of(rows: pd.DataFrame) -> set[str]:
    return {*rows["provenance.data.digest"].dropna().astype(str)}


def _expected(own: Entrant, tier: Tier, said: EntryStatement) -> dict[str, Config]:
    """By key the config of every run that an entry with these choices consists of."""
    chosen = {name: BestSettings(task.lr, dict(task.searched)) for name, task in said.tasks.items()}
    found = [trial.run for trial in trials(own, tier)] + trajectories(own, tier, chosen)
    expected = {run_key(config): config for config in (resolved(run, said.tier) for run in found)}
    for one in rules().whole:
        if (one.entry, one.link in tier.links) == (own.name, True) and one.task in tier.tasks:
            config = resolved(whole(own, tier, one, chosen[one.task]), said.tier)
            expected[run_key(config)] = config
    return expected | dict(_turns(own, tier, said, chosen))


def _turns(
    own: Entrant, tier: Tier, said: EntryStatement, chosen: Mapping[str, BestSettings]
) -> Iterator[tuple[str, Config]]:
    """The key of each turn in a launch, the baseline's among them, and its config: who else took turns is
    open, and another stands for them.
    """
    base, other = shipped()[BASELINE], shipped()[OTHER]
    for name, task in said.tasks.items():
        best = {BASELINE: BestSettings(0.0, {}), OTHER: BestSettings(0.0, {}), own.name: chosen[name]}
        turns = {each.name: turn(each, name, best[each.name]) for each in (other, base, own)}
        for entry, by_workers in ((own, task.launches), (base, task.baseline)):
            for workers, of_links in by_workers.items():
                for link, keys in of_links.items():
                    shared = launch(tier, tier.tasks[name], workers, link)
                    for number, key in zip(rules().launches, keys, strict=False):
                        config = resolved(Run({**shared, "seed": number}, turns), said.tier)
                        yield key, next(each.config for each in config.variants if each.name == entry.name)


def _is_as_said(key: str, row: pd.Series[Any], expected: Mapping[str, Config]) -> bool:
    """Is this run what the rules ask for under this key?"""
    recorded = json.loads(row["config_json"])
    return run_key(recorded) == (run_key(expected[key]) if "/" in key else key)


def _of_tuning(entered: Entered) -> Iterator[Line]:
    """What was chosen is the best of the trials, and all seeds and launches are there."""
    said, frames = entered.statement, entered.frames
    own, tier = entry_of(said), rules().tier(said.tier)
    epochs = frames.epochs.sort_values("epoch")
    last = epochs.groupby("key")[COLUMN].last()
    for name, task in said.tasks.items():
        losses = [float(last.get(tried.key, np.nan)) for tried in task.trials]
        if len(losses) != rules().trials.number or np.isnan(losses).all():
            yield Line(
                f"{name}: {len(losses)} trials, of which the rules ask for {rules().trials.number}", True
            )
            return
        best = task.trials[int(np.nanargmin(losses))]
        rate = rate_of(own, name, tier.tasks[name], best.rate)
        if not np.isclose(rate, task.lr) or dict(best.searched) != dict(task.searched):
            yield Line(f"{name}: what was trained is not the best of its trials (lr={rate:g})", True)
            return
        if short := _short(task, frames):
            yield Line(f"{name}: {short}", True)
            return
    yield Line(f"each task has {rules().trials.number} trials, and the best of them was trained")


def _short(task: OnTask, frames: Frames) -> str:
    """What is missing of the curves; empty where nothing is."""
    validated = frames.epochs.groupby("key")["epoch"].count()
    wanted, ended = rules().steps // rules().epoch_steps, frames.runs.set_index("key").get("diverged")
    for keys in task.trainings.values():
        for key in keys:
            diverged = ended is not None and not pd.isna(ended.get(key))
            if validated.get(key, 0) != wanted and not diverged:
                return f"{key} was validated {validated.get(key, 0)} times, and the rules ask for {wanted}"
    return ""


def _of_bytes(entered: Entered) -> Iterator[Line]:
    """Interfaces sent what the meter counted, and headers."""
    runs = entered.frames.runs
    if not {"interface.sent_bytes", "interface.counted_bytes"} <= {*runs}:
        yield Line("no launch counted its interfaces' bytes: bytes rest on the meter alone")
        return
    own = runs.dropna(subset=["interface.sent_bytes"])
    own = own[own["interface.counted_bytes"] > SMALL_BYTES]
    ratios = own["interface.sent_bytes"] / own["interface.counted_bytes"]
    resent = own.get("interface.resent", pd.Series(0, own.index)).fillna(0) > 0
    wrong = own[((ratios < HEADERS[0]) | (ratios > HEADERS[1])) & ~resent]
    if len(wrong):
        yield Line(
            f"{len(wrong)} launches sent other than they counted, such as {wrong['key'].iloc[0]}: "
            f"{ratios[wrong.index[0]]:.2f} times", True,
        )  # fmt: skip
        return
    yield Line(f"interfaces sent what was counted, and headers, in {len(own)} launches")


def _of_laws(entered: Entered) -> Iterator[Line]:
    """The method is here, as it was entered, and its laws hold."""
    said = entered.statement
    path = METHODS.folder / f"{said.method}.py"
    if not path.exists() or path.read_text() != said.code:
        where = "is not here" if not path.exists() else "is another one here"
        yield Line(
            f"the file of {said.method} {where}: put what the entry carries (`code` in entry.json) into "
            f"{METHODS.package.replace('.', '/')}/{said.method}.py, read it, and check again", True,
        )  # fmt: skip
        return
    try:
        found = laws.check_laws(entry_of(said), lambda _: None)
    except (laws.Broken, BrokenFile) as broken:
        yield Line(str(broken), True)
        return
    stated, broken_now = ({law.name for law in which if not law.holds} for which in (said.laws, found))
    if stated != broken_now:
        yield Line(f"it names other broken laws ({', '.join(stated) or 'none'}) than were found", True)
        return
    yield Line(f"{len(found)} laws, {len(broken_now)} of them excused")


def _again(entered: Entered, folders: Folders, draw: int | None, carry_out: CarryOut) -> Iterator[Line]:
    """A training, drawn, once more: the curve must be the same but for rounding."""
    said = entered.statement
    number = draw if draw is not None else time.time_ns()
    chosen = {name: BestSettings(task.lr, dict(task.searched)) for name, task in said.tasks.items()}
    every = [
        resolved(run, said.tier) for run in trajectories(entry_of(said), rules().tier(said.tier), chosen)
    ]
    config = random.Random(number).choice(every)
    what = f"{config.task.name}, {config.workers} workers, seed {config.seed}"
    carry_out([config])
    frames, _ = parquet.newest_frames(folders.store, [run_id(config)], folders.records, verify=True)
    here, there = (_curve(each, run_key(config)) for each in (frames, entered.frames))
    if len(here) != len(there) or not np.allclose(here, there, rtol=NEAR):
        apart = np.abs(here / there - 1).max() if len(here) == len(there) else np.inf
        yield Line(
            f"drawn by {number}: {what} came out otherwise here, up to {100 * apart:.2g} % apart", True
        )
        return
    same = "to the bit" if np.array_equal(here, there) else f"within {100 * NEAR:g} %"
    yield Line(f"drawn by {number}: {what} came out again {same}, {len(here)} validations")
    if (first := baseline(folders, said.tier)) is not None and said.name == BASELINE:
        own = {name: task.lr for name, task in first.statement.tasks.items()}
        if own != {name: task.lr for name, task in said.tasks.items()}:
            yield Line("it is another baseline than that of this checkout", True)


def _curve(frames: Frames, key: str) -> np.ndarray:
    own = frames.epochs[frames.epochs["key"] == key].sort_values("epoch")
    found: np.ndarray = own[COLUMN].to_numpy(float)
    return found
