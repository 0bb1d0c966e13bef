"""Commands and damaged results: a sample of the kinds of damage, or so many as $DAMAGES says."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from experiments.config.folders import ResultFolders
from tests.commands import damage

KINDS = damage.kinds()
FELL = [  # what strangers met
    "run.json started: an offset", "run.json ended: a fraction", "a line of look, values: fewer",
    "config.json and its key, timing.warmup_steps: missing", "columns, records: three million rows",
    "a log: escapes", "a line: not UTF-8 in a look", "a line: a look with 5000 lists",
    "columns, cached: configs that are lists",
    "columns, records: ends without a zone", "columns, records: pandas' words",
]  # fmt: skip
SAMPLE = [*FELL, *random.Random(12).sample(sorted(KINDS), int(os.environ.get("DAMAGES", "6")))]
# Commands that draw take half a second: one kind for each file that they read.
DRAWN = {
    "run.json: not UTF-8": "figures",
    "index: 5": "figures",
    "columns, cached: others": "figures",
    "picture: folder": "figures",
    "a line: a look with 5000 lists": "figures",
    "a line: not UTF-8 in a look": "reproduce",
}
SLOW = {"compare", "figures", "report", "reproduce", "run again", "trace"}
WALKING = ("collect", "list", "status", "report", "why", "logs")  # commands that look into folders


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ResultFolders:
    return damage.make(tmp_path_factory.mktemp("whole") / "results")


def carry_out_all(whole: ResultFolders, kind: str, names: Collection[str], folder: Path) -> ResultFolders:
    """Carry out commands, one after the other, on a copy of the results that has this damage."""
    folders = damage.damage_copy(whole, folder / ascii(kind).replace("/", " "), KINDS[kind])
    for name in sorted(names):
        assert damage.find_fault(kind, folders, name) == "", (kind, name)
    return folders


def test_a_bad_attempt_is_named_and_left_out_and_the_others_are_used(
    whole: ResultFolders, tmp_path: Path
) -> None:
    for kind in SAMPLE:
        carry_out_all(whole, kind, damage.COMMANDS.keys() - SLOW, tmp_path)


@pytest.mark.extended
def test_commands_that_take_longer_end_well_as_well(whole: ResultFolders, tmp_path: Path) -> None:
    for kind in SAMPLE:
        carry_out_all(whole, kind, SLOW, tmp_path)


def test_what_lies_beside_records_stops_nobody(whole: ResultFolders, tmp_path: Path) -> None:
    for thing in damage.THINGS:
        folders = carry_out_all(whole, f"beside everything: {thing}", WALKING, tmp_path)
        subprocess.run(["rm", "-rf", str(folders.results)], check=True)  # pytest removes none that deep


def test_what_is_damaged_stops_no_figure(whole: ResultFolders, tmp_path: Path) -> None:
    for kind, name in DRAWN.items():
        folders = damage.damage_copy(whole, tmp_path / kind, KINDS[kind])
        ended = damage.carry_out(folders, damage.COMMANDS[name])
        assert ended.fault == "", ended
        drawn = folders.figures / f"{damage.ITEM}-{damage.PROFILE}.png"
        assert ended.code == (1 if drawn.is_dir() else 0), ended


def test_what_is_whole_is_used_and_nothing_is_said(whole: ResultFolders, tmp_path: Path) -> None:
    folders = damage.damage_copy(whole, tmp_path / "results", KINDS["none"])
    for name, words in damage.COMMANDS.items():
        ended = damage.carry_out(folders, words)
        assert not re.search("(?m)^left out", ended.said), name
        assert ended.code == 0, (name, ended)
        assert name != "collect" or ended.said.startswith("3 runs, ")


REMOVED_AT: dict[str, int] = {}  # a folder -> how many more of its files are opened before it is removed


def _remove_when_read(event: str, arguments: tuple[object, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    for folder in [folder for folder in REMOVED_AT if str(arguments[0]).startswith(folder)]:
        REMOVED_AT[folder] -= 1
        if REMOVED_AT[folder] == 0:
            del REMOVED_AT[folder]
            shutil.rmtree(folder)


sys.addaudithook(_remove_when_read)


@pytest.mark.parametrize("name", ["collect", "status", "run"])
def test_results_may_be_removed_while_a_command_reads_them(
    whole: ResultFolders, name: str, tmp_path: Path
) -> None:
    for opened in range(1, 1_000, 7):
        folders = damage.damage_copy(whole, tmp_path / f"{opened}", KINDS["none"])
        REMOVED_AT[str(folders.results)] = opened
        assert damage.find_fault("none", folders, name) == "", opened
        if REMOVED_AT.pop(str(folders.results), None) is not None:
            break
    assert opened > 3
