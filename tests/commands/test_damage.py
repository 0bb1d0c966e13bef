"""Commands and damaged results: a sample of what `python -m tests.commands.damage` tries in full."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import damage
from tests.commands.damage import Results

KINDS = damage.kinds()
FELL = [  # what strangers met
    "run.json started: an offset", "run.json ended: a fraction", "a line of look, values: fewer",
    "config.json and its key, timing.warmup_steps: missing", "columns, records: three million rows",
    "a log: escapes", "a line: not UTF-8 in a look", "a line: a look with 5000 lists",
    "beside a record: link to itself", "columns, cached: configs that are lists",
    "columns, records: ends without a zone", "columns, records: pandas' words",
]  # fmt: skip
SAMPLE = [*FELL, *sorted(random.Random(12).sample(sorted(KINDS.keys() - {*FELL}), 10))]
# Commands that draw take half a second: one kind for each file that they read.
DRAWN = [
    ("figures", "run.json: not UTF-8"),
    ("figures", "index: 5"),
    ("figures", "columns, cached: others"),
    ("figures", "picture: folder"),
    ("figures", "a line: a look with 5000 lists"),
    ("reproduce", "a line: not UTF-8 in a look"),
]
WALKING = ("collect", "list", "status", "report", "why", "logs")  # commands that look into folders


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return damage.make(tmp_path_factory.mktemp("whole") / "results")


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_bad_attempt_is_named_and_left_out_and_the_others_are_used(
    whole: Results, kind: str, tmp_path: Path
) -> None:
    results = damage.damaged(whole, tmp_path / "results", KINDS[kind])
    for name, words in damage.commands().items():
        if name not in ("figures", "reproduce"):
            ended = damage.carry_out(results, words)
            assert ended.fault == "", (name, ended)
            assert damage.stopped(kind, name, ended) == "", (name, ended)
            if name == "collect":
                assert damage.unjust(results, ended) == "", ended


@pytest.mark.parametrize("name", damage.ODD)
def test_what_lies_beside_records_stops_nobody(whole: Results, name: str, tmp_path: Path) -> None:
    kind = f"beside everything: {name}"
    results = damage.damaged(whole, tmp_path / "results", KINDS[kind])
    try:
        for command in WALKING:
            ended = damage.carry_out(results, damage.commands()[command])
            assert ended.fault == "", (command, ended)
            assert ended.code == 0 or command == "logs", (command, ended)  # there may be no log
    finally:
        subprocess.run(["rm", "-rf", str(results.root)], check=True)  # pytest removes none that deep


@pytest.mark.parametrize(("name", "kind"), DRAWN)
def test_what_is_damaged_stops_no_figure(whole: Results, name: str, kind: str, tmp_path: Path) -> None:
    results = damage.damaged(whole, tmp_path / "results", KINDS[kind])
    ended = damage.carry_out(results, damage.commands()[name])
    assert ended.fault == "", ended
    drawn = results.folders.figures / f"{damage.ITEM}-{damage.PROFILE}.png"
    assert ended.code == (1 if drawn.is_dir() else 0), ended


def test_what_is_whole_is_used_and_nothing_is_said(whole: Results, tmp_path: Path) -> None:
    results = damage.damaged(whole, tmp_path / "results", KINDS["none"])
    collected = damage.carry_out(results, ["collect"])
    assert collected.out.startswith("3 runs, ")
    for name, words in damage.commands().items():
        ended = damage.carry_out(results, words)
        told = (ended.out + ended.err).splitlines()
        assert not [line for line in told if line.startswith("left out")], name
        assert ended.code == 0 or name == "cancel", (name, ended)  # there is no SLURM to ask


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
def test_results_may_be_removed_while_a_command_reads_them(whole: Results, name: str, tmp_path: Path) -> None:
    opened = 1
    while True:
        results = damage.damaged(whole, tmp_path / f"{opened}", KINDS["none"])
        REMOVED_AT[str(results.root)] = opened
        ended = damage.carry_out(results, damage.commands()[name])
        assert ended.fault == "", (opened, ended)
        if REMOVED_AT.pop(str(results.root), None) is not None:
            break
        opened += 2
    assert opened > 3
