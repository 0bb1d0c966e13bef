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

from analysis.benchmark.files import read
from tests.figures.benchmark.conftest import Command
from tests.slurm.emulated.links import needs_namespaces

pytestmark = [needs_namespaces, pytest.mark.own_processes]
Members = dict[str, bytes]


@pytest.fixture(scope="module")
def entered(own_checkout: Path, command: Command) -> Path:
    """The files of the baseline and of a method that is new."""
    command("new", "method", "comb")
    path = own_checkout / "sparsify" / "methods" / "comb.py"
    path.write_text(path.read_text() + '\n\nSEARCH = {"scope": ["global", "layer"]}\n')
    planned = command("enter", "dense", "comb", "profile=smoke", "--plan").stdout
    assert planned.endswith(" runs of unknown length: nothing like them was made yet\n")
    said = command("enter", "dense", "comb", "profile=smoke")
    assert "comb on cnn-digits, 2 workers, ethernet_1g: " in said.stdout
    return own_checkout / "results" / "entries"


def test_a_second_call_makes_nothing_again(entered: Path, command: Command) -> None:
    again = command("enter", "dense", "comb", "profile=smoke").stderr
    assert again.count("0 to make") == 3
    assert "the laws of" not in again, "they are known with this code"
    planned = command("enter", "dense", "comb", "profile=smoke", "--plan").stdout
    assert planned.count(", 0 to make\n") == 3
    another = command("enter", "comb-2", "method=comb", "profile=smoke", "--plan").stdout
    assert another.count(" min expected\n") == 3
    assert "unknown length" not in another


def test_without_its_runs_it_goes_on_from_what_files_hold(
    entered: Path, own_checkout: Path, command: Command
) -> None:
    """Trainings of any machine, times of this checkout alone."""
    aside, shipped = own_checkout / "aside", own_checkout / "results" / "shipped" / "entries"
    names = ("dense-smoke-v1.entry", "comb-smoke-v1.entry")
    before = {name: read(entered / name).frames for name in names}
    aside.mkdir()
    for name in ("runs", "records"):
        (own_checkout / "results" / name).rename(aside / name)
    try:
        assert command("enter", "dense", "comb", "profile=smoke").stderr.count("0 to make") == 3
        for name in names:
            after = read(entered / name).frames
            for one, other in zip(before[name], after, strict=True):
                pd.testing.assert_frame_equal(rows_of(one), rows_of(other), check_dtype=False)
        alone = command("enter", "dense", "profile=smoke", "--train").stderr
        assert f"{names[0]} stays as it is, for it has 5 launches" in alone
        assert len(read(entered / names[0]).frames.runs) == len(before[names[0]].runs)
        entered.rename(shipped)
        again = command("enter", "dense", "comb", "profile=smoke", "--train").stderr
        assert again.count("0 to make") == 2
        refused = command("enter", "--check", str(entered / names[1]), code=1).stdout
        assert "it has 0 launches with the baseline" in refused
    finally:
        for name in names:
            if shipped.exists():
                entered.mkdir(exist_ok=True)
                (shipped / name).replace(entered / name)
        for path in aside.iterdir():
            shutil.rmtree(own_checkout / "results" / path.name, ignore_errors=True)
            path.rename(own_checkout / "results" / path.name)


def rows_of(frame: pd.DataFrame) -> pd.DataFrame:
    order = [name for name in ("key", "rank", "step", "epoch") if name in frame]
    sorted_: pd.DataFrame = frame.sort_values(order).sort_index(axis="columns").reset_index(drop=True)
    return sorted_


def test_the_entry_is_checked_by_others(entered: Path, command: Command) -> None:
    said = command("enter", "--check", str(entered / "comb-smoke-v1.entry"), "--draw", "3").stdout
    assert "came out again to the bit" in said
    assert "by processes came out again" in said
    assert said.count("✓") >= 7
    assert "as the rules ask" in said


def test_the_pages_have_its_row(entered: Path, own_checkout: Path, command: Command) -> None:
    command("benchmark", "--profile", "smoke")
    pages = own_checkout / "results" / "benchmark" / "smoke"
    assert "entry-comb.html" in (pages / "index.html").read_text()
    row = (pages / "link-ethernet_1g.html").read_text()
    assert "comb" in row
    card = (pages / "entry-comb.html").read_text()
    assert "all state is saved" in card
    assert "<code>method.scope=" in card
    rules = (pages / "rules.html").read_text()
    assert "<strong>Equal tuning.</strong>" in rules
    for page in pages.glob("*.html"):
        assert "<script>" not in page.read_text()


def rewritten(entry: Path, change: Callable[[Members], None], honest: bool = True) -> Path:
    """A copy of an entry in which something was changed by hand; `honest`: with digests that fit."""
    with zipfile.ZipFile(entry) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    if honest:
        said = json.loads(members["entry.json"])
        said["tables"] = {name: hashlib.sha256(members[name]).hexdigest() for name in said["tables"]}
        members["entry.json"] = json.dumps(said).encode()
    path = entry.with_name("changed.entry")
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return path


def table(members: Members, name: str, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Change a table, and keep what its file says of itself."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    before = pq.read_table(io.BytesIO(members[name]))
    after = pa.Table.from_pandas(change(before.to_pandas()), schema=before.schema, preserve_index=False)
    buffer = io.BytesIO()
    pq.write_table(after, buffer)
    members[name] = buffer.getvalue()


def statement(members: Members, change: Callable[[dict[str, Any]], None]) -> None:
    said = json.loads(members["entry.json"])
    change(said)
    members["entry.json"] = json.dumps(said).encode()


def lower_losses(members: Members) -> None:
    table(members, "epochs.parquet", lambda rows: rows.assign(val_loss=0.5 * rows["val_loss"]))


def fewer_bytes(members: Members) -> None:
    def halve(rows: pd.DataFrame) -> pd.DataFrame:
        name = "interface.counted_bytes"
        found: pd.DataFrame = rows.assign(**{name: 0.5 * rows[name]})
        return found

    table(members, "runs.parquet", halve)


def other_choice(members: Members) -> None:
    def change(said: dict[str, Any]) -> None:
        (task,) = said["tasks"].values()
        task["trials"] = task["trials"][:-1]

    statement(members, change)


def other_settings(members: Members) -> None:
    statement(members, lambda said: said.update(settings={"method": "comb", "method.density": 0.5}))


def other_code(members: Members) -> None:
    statement(members, lambda said: said.update(code=said["code"] + "\n"))


def unsaid_law(members: Members) -> None:
    def change(said: dict[str, Any]) -> None:
        said["laws"].append({"name": "nothing is lost", "holds": False, "why": "no reason"})

    statement(members, change)


def other_rates(members: Members) -> None:
    def change(said: dict[str, Any]) -> None:
        (task,) = said["tasks"].values()
        rates = [trial["rate"] for trial in task["trials"]]
        for trial, rate in zip(task["trials"], reversed(rates), strict=True):
            trial["rate"] = rate

    statement(members, change)


def fewer_launches(members: Members) -> None:
    def change(said: dict[str, Any]) -> None:
        (task,) = said["tasks"].values()
        for which in ("launches", "baseline"):
            for of_links in task[which].values():
                for keys in of_links.values():
                    keys.pop()

    statement(members, change)


def fewer_steps(members: Members) -> None:
    table(members, "epochs.parquet", lambda rows: rows.assign(step=rows["step"] // 2))


def other_seeds(members: Members) -> None:
    table(members, "runs.parquet", lambda rows: rows.assign(seed=rows["seed"] + 1))


def other_tier(members: Members) -> None:
    statement(members, lambda said: said.update(tier="labtop"))


def odd_name(members: Members) -> None:
    statement(members, lambda said: said.update(name="../../x"))


CHANGES = {
    "a record edited by hand": (lower_losses, False, "is not what its statement has the digest of"),
    "and its digest with it": (lower_losses, True, "came out otherwise here"),
    "bytes understated": (fewer_bytes, True, "something is sent that nobody counts"),
    "a trial left out": (other_choice, True, "its trials or trainings are not those"),
    "other settings than were run": (other_settings, True, "its trials or trainings are not those"),
    "rates exchanged": (other_rates, True, "its trials or trainings are not those"),
    "a launch left out": (fewer_launches, True, "it has 4 launches with the baseline"),
    "curves with fewer steps": (fewer_steps, True, "its curves have other steps than the rules'"),
    "seeds renamed": (other_seeds, True, "made with other settings than the rules'"),
    "another tier": (other_tier, True, "did you mean 'laptop'"),
    "a name that is a path": (odd_name, True, "can't be an entry's name"),
    "other code": (other_code, True, "the file of comb is another one here"),
    "an excuse that is not needed": (unsaid_law, True, "names other broken laws"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_entry_that_was_changed_is_refused(entered: Path, command: Command, name: str) -> None:
    change, honest, said = CHANGES[name]
    path = rewritten(entered / "comb-smoke-v1.entry", change, honest)
    found = command("enter", "--check", str(path), "--draw", "1", code=1).stdout
    path.unlink()
    assert said in found, found
    assert "refused" in found
