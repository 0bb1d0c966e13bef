"""From a new method to a row: all stages at the smallest scale, and what others can check of it."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.benchmark.files import read_entry
from tests.figures.benchmark.conftest import Command
from tests.slurm.emulated.links import needs_namespaces

pytestmark = [needs_namespaces, pytest.mark.own_processes, pytest.mark.extended]
Members = dict[str, bytes]
Change = Callable[[Members], None]
Said = dict[str, Any]


@pytest.fixture(scope="module")
def entered(own_checkout: Path, command: Command) -> Path:
    """Return the files of the baseline and of a method that is new."""
    command("new", "method", "comb")
    path = own_checkout / "sparsify" / "methods" / "comb.py"
    path.write_text(path.read_text() + '\n\nSEARCH = {"scope": ["global", "layer"]}\n')
    planned = command("enter", "dense", "comb", "profile=smoke", "--plan").stdout
    assert planned.endswith(" runs of unknown duration: nothing like them was made yet\n")
    assert "whose lengths follow from the first day's launches" in planned
    said = command("enter", "dense", "comb", "profile=smoke")
    assert "comb on cnn-digits, 2 workers, 1 Gbit/s Ethernet: " in said.stdout
    return own_checkout / "results" / "entries"


def test_without_its_runs_it_goes_on_from_what_files_hold(
    entered: Path, own_checkout: Path, command: Command
) -> None:
    """Trainings of any machine, times of this checkout alone."""
    results = own_checkout / "results"
    aside = own_checkout / "aside"
    shipped = results / "shipped" / "entries"
    dense, comb = (entered / f"{name}-smoke-v2.entry" for name in ("dense", "comb"))
    before = {path: read_entry(path).frames for path in (dense, comb)}
    again = command("enter", "dense", "comb", "profile=smoke").stderr
    assert "the laws of" not in again, "they are known with this code"
    aside.mkdir()
    for name in ("runs", "records"):
        (results / name).rename(aside / name)
    try:
        assert command("enter", "dense", "comb", "profile=smoke").stderr.count(", 0 to make") == 6
        for path, frames in before.items():
            for one, other in zip(frames, read_entry(path).frames, strict=True):
                pd.testing.assert_frame_equal(sorted_rows(one), sorted_rows(other), check_dtype=False)
        alone = command("enter", "dense", "profile=smoke", "--train").stderr
        assert f"{dense.name} stays as it is, for it has 3 launches" in alone
        entered.rename(shipped)
        again = command("enter", "dense", "comb", "profile=smoke", "--train").stderr
        assert again.count(", 0 to make") == 3, "trials, and dense's trainings: lengths follow from times"
        refused = command("enter", "--check", str(comb), code=1).stdout
        assert "it is not whole, 3 launches are missing" in refused
    finally:
        if shipped.exists():
            shutil.rmtree(entered, ignore_errors=True)
            shipped.rename(entered)
        for path in aside.iterdir():
            shutil.rmtree(results / path.name, ignore_errors=True)
            path.rename(results / path.name)


def sorted_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows and columns of a table in an order of their own."""
    order = [name for name in ("key", "rank", "step", "epoch") if name in frame]
    sorted_: pd.DataFrame = frame.sort_values(order).sort_index(axis="columns").reset_index(drop=True)
    return sorted_


def test_the_entry_is_checked_by_others_and_the_pages_have_its_row(
    entered: Path, own_checkout: Path, command: Command
) -> None:
    said = command("enter", "--check", str(entered / "comb-smoke-v2.entry"), "--draw", "3").stdout
    for words in ("came out again to the bit", "by processes came out again", "as the rules ask"):
        assert words in said
    assert said.count("✓") >= 7
    command("benchmark", "--profile", "smoke")
    folder = own_checkout / "results" / "benchmark" / "smoke"
    pages = {page.stem: page.read_text() for page in folder.glob("*.html")}
    for name, words in (
        ("index", "entry-comb.html"), ("link-ethernet_1g", "comb"), ("entry-comb", "all state is saved"),
        ("entry-comb", "<code>method.scope="), ("rules", "<strong>Equal tuning.</strong>"),
    ):  # fmt: skip
        assert words in pages[name]
    assert not any("<script>" in text for text in pages.values())


def change_entry(entry: Path, change: Change, is_honest: bool) -> Path:
    """Write a copy of an entry in which something was changed by hand; `is_honest`: with digests that fit."""
    with zipfile.ZipFile(entry) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    if is_honest:
        said = json.loads(members["entry.json"])
        said["tables"] = {name: hashlib.sha256(members[name]).hexdigest() for name in said["tables"]}
        members["entry.json"] = json.dumps(said).encode()
    path = entry.with_name("changed.entry")
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return path


def in_table(name: str, column: str, change: Callable[[pd.Series[Any]], pd.Series[Any]]) -> Change:
    """Return a change of a column, which keeps what the file of the table says of itself."""

    def apply(members: Members) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        before = pq.read_table(io.BytesIO(members[name]))
        rows = before.to_pandas()
        rows[column] = change(rows[column])
        after = pa.Table.from_pandas(rows, schema=before.schema, preserve_index=False)
        buffer = io.BytesIO()
        pq.write_table(after, buffer)
        members[name] = buffer.getvalue()

    return apply


def in_statement(change: Callable[[Said, Said], object]) -> Change:
    """Return a change of an entry's statement, and of the only task in it."""

    def apply(members: Members) -> None:
        said = json.loads(members["entry.json"])
        (task,) = said["tasks"].values()
        change(said, task)
        members["entry.json"] = json.dumps(said).encode()

    return apply


def drop_launches(said: Said, task: Said) -> None:
    """Leave the last launch of each cell out, the baseline's too."""
    for which in ("launches", "baseline"):
        for of_links in task[which].values():
            for keys in of_links.values():
                keys.pop()


NEEDLESS = {"name": "nothing is lost", "holds": False, "why": "no reason"}
lower_losses = in_table("epochs.parquet", "val_loss", lambda losses: 0.5 * losses)
# What was changed, and how; whether digests were made to fit; what is said.
CHANGES: dict[str, tuple[Change, bool, str]] = {
    "a record edited by hand": (lower_losses, False, "is not what its statement has the digest of"),
    "and its digest with it": (lower_losses, True, "came out otherwise here"),
    "bytes understated": (
        in_table("runs.parquet", "interface.counted_bytes", lambda counted: 0.5 * counted),
        True, "something is sent that nobody counts",
    ),
    "a trial left out": (
        in_statement(lambda said, task: task["trials"].pop()),
        True, "its trials are not what the rules ask for",
    ),
    "a launch left out": (in_statement(drop_launches), True, "1 launch is missing"),
    "a baseline of another launch": (
        in_statement(lambda said, task: task["baseline"]["2"]["ethernet_1g"].reverse()),
        True, "the baseline is of other launches",
    ),
    "shorter trainings than times ask for": (
        in_statement(lambda said, task: task["lengths"]["2"].update(ethernet_1g=30)),
        True, "its lengths are not what the rules ask for",
    ),
    "trainings left out": (
        in_statement(lambda said, task: task["trainings"]["2"].pop()), True, "1 training is missing",
    ),
    "curves with fewer steps": (
        in_table("epochs.parquet", "step", lambda steps: steps // 2),
        True, "its curves have other steps than the rules'",
    ),
    "seeds renamed": (
        in_table("runs.parquet", "seed", lambda seeds: seeds + 1),
        True, "made with other settings than the rules'",
    ),
    "another tier": (
        in_statement(lambda said, task: said.update(tier="labtop")), True, "did you mean 'laptop'",
    ),
    "a name that is a path": (
        in_statement(lambda said, task: said.update(name="../../x")), True, "can't be an entry's name",
    ),
    "other code": (
        in_statement(lambda said, task: said.update(code=said["code"] + "\n")),
        True, "the file of comb is another one here",
    ),
    "an excuse that is not needed": (
        in_statement(lambda said, task: said["laws"].append(NEEDLESS)),
        True, "what it says of laws is not what was found",
    ),
}  # fmt: skip


def test_an_entry_that_was_changed_is_refused(entered: Path, command: Command) -> None:
    for name, (change, is_honest, said) in CHANGES.items():
        path = change_entry(entered / "comb-smoke-v2.entry", change, is_honest)
        found = command("enter", "--check", str(path), "--draw", "1", code=1).stdout
        path.unlink()
        assert said in found, (name, found)
        assert "refused" in found
