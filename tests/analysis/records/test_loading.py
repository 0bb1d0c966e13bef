"""All records at once: own before shipped, newer before collected, nothing empty, nothing lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import analysis
from analysis.records import loading
from analysis.records.attempts import from_attempts
from analysis.records.files import write_json
from analysis.records.frames import Frames, label, query
from analysis.records.parquet import collect, read_parquet, write_parquet
from analysis.records.steps import units
from analysis.records.store import Store
from tests.analysis import synthetic


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a checkout that ships one training of its own."""
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    attempt = synthetic.learned(Store(tmp_path / "elsewhere"), synthetic.learning_config("topk"))
    write_parquet(from_attempts([attempt])[0], tmp_path / "results" / "shipped")
    (tmp_path / "results" / "shipped" / "figures").mkdir()
    write_json(tmp_path / "results" / "shipped" / "figures" / "fig3-laptop.json", {"runs": [attempt.run_id]})
    return tmp_path / "results"


def test_own_runs_and_shipped_ones_with_the_items_and_sweeps_that_they_belong_to(results: Path) -> None:
    own = synthetic.timed(Store(results / "runs"), synthetic.config("dense"))
    for folder, name in (("figures", "fig4-laptop"), ("sweeps", "thesis")):
        (results / "records" / folder).mkdir(parents=True)
        write_json(results / "records" / folder / f"{name}.json", {"runs": [own.run_id]})
    runs = analysis.load(results).runs.set_index("source")
    assert runs.loc["own", "run_id"] == own.run_id
    assert (runs.loc["own", "items"], runs.loc["own", "sweeps"]) == ("fig4", "thesis")
    assert runs.loc["shipped", "items"] == "fig3"


def test_a_run_that_is_shipped_and_measured_here_is_the_own_one(results: Path) -> None:
    synthetic.learned(Store(results / "runs"), synthetic.learning_config("topk"), cpu="mine")
    runs = analysis.load(results).runs
    assert list(runs["source"]) == ["own"]
    assert list(runs["provenance.cpu"]) == ["mine"]


def test_collected_or_not_the_frames_are_the_same(results: Path) -> None:
    store = Store(results / "runs")
    synthetic.timed(store, synthetic.config("dense"))
    before = analysis.load(results)
    collect(store, results / "records")
    synthetic.timed(store, synthetic.config("topk"))
    again = synthetic.timed(store, synthetic.config("dense"), slow=2.0)
    after = analysis.load(results)
    assert len(after.runs) == len(before.runs) + 1
    dense = after.runs[after.runs["run_id"] == again.run_id].iloc[0]
    assert dense["attempt"] == 2
    assert dense["step_s"] > 1.5 * query(before, "method.name == 'dense'").runs["step_s"].iloc[0]
    shutil.rmtree(again.path)
    assert analysis.load(results).runs["attempt"].tolist().count(2) == 0


def test_an_attempt_that_fails_does_not_hide_the_whole_one_before_it(results: Path) -> None:
    store = Store(results / "runs")
    synthetic.timed(store, synthetic.config("dense"))
    collect(store, results / "records")
    store.begin(synthetic.config("dense")).fail("no memory")
    assert query(analysis.load(results), "source == 'own'").runs["attempt"].tolist() == [1]


FORGED: dict[str, tuple[str, Any]] = {  # a cell of a row of runs: its column, and what stands there
    "a config that is a list": ("config_json", "[1]"),
    "a config that is a number": ("config_json", "5"),
    "a config that is no JSON": ("config_json", "{x"),
    "a config of nested lists": ("config_json", "[" * 50_000),
    "nested lists in a config": ("config_json", '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"),
    "a config with a huge number": ("config_json", '{"a":' + "9" * 5_000 + "}"),
    "a config without a method": ("config_json", '{"a":1}'),
    "a config with another method": ("config_json", '{"method":null,"task":5}'),
    "no config": ("config_json", None),
    "a provenance that is no JSON": ("provenance_json", "{x"),
    "a provenance that is a number": ("provenance_json", "5"),
    "rules that are no JSON": ("rules_json", "{x"),
    "an end that is a word": ("ended", "x"),
    "an end without a zone": ("ended", "2026-01-01"),
    "an end in the year 1": ("ended", "0001-01-01"),
    "an end in a far year": ("ended", "292277026596-01-01T00:00:00Z"),
    "a beginning that is a word": ("started", "x"),
    "no key": ("key", None),
    "a run outside of the folder": ("run_id", "../../../../../etc"),
    "a run that is a path": ("run_id", "/etc"),
}


def forge(path: Path, column: str, value: Any) -> str:
    """Change a cell in the first row of a table; returns the name of the row's run."""
    table = pq.read_table(path)
    cells = table[column].to_pylist() if column in table.column_names else [None] * len(table)
    forged = pa.array([value, *cells[1:]], pa.string())
    kept = table.drop_columns([column]) if column in table.column_names else table
    pq.write_table(kept.append_column(column, forged), path)
    return str(table["run_id"][0])


def own_runs(results: Path, tables: tuple[str, ...] = ("runs",)) -> tuple[set[str], list[str]]:
    """The runs of a folder, and what is said of those that are left out."""
    notes = list[str]()
    runs = loading.own(results, tables, notes.append).runs
    return set(runs["run_id"]), notes


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_row_is_named_and_its_run_read_from_its_log(results: Path, name: str) -> None:
    store = Store(results / "runs")
    runs = {synthetic.timed(store, synthetic.config(method)).run_id for method in ("dense", "topk")}
    collect(store, results / "records")
    column, value = FORGED[name]
    run = forge(results / "records" / "runs.parquet", column, value)
    for tables in (("runs",), analysis.TABLES):
        found, notes = own_runs(results, tables)
        assert found == runs
        (note,) = notes
        assert "left out a row" in note
        assert f"{results / 'records' / 'runs.parquet'} is " in note
        assert (value if column == "run_id" else run) in note


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_row_of_a_listing_is_made_again(results: Path, name: str) -> None:
    store = Store(results / "runs")
    runs = {synthetic.timed(store, synthetic.config(method)).run_id for method in ("dense", "topk")}
    first, _ = own_runs(results)
    forge(results / "records" / "listed" / "runs.parquet", *FORGED[name])
    assert own_runs(results) == (runs, []) == (first, [])


@pytest.mark.parametrize("ghost", ["etc", "/etc", "../../../../../etc", ""])
def test_a_listing_adds_no_run_that_the_folder_lacks(results: Path, ghost: str) -> None:
    runs = {synthetic.timed(Store(results / "runs"), synthetic.config("dense")).run_id}
    own_runs(results)
    path = results / "records" / "listed" / "runs.parquet"
    pq.write_table(pa.concat_tables([pq.read_table(path)] * 2), path)
    forge(path, "origin", "")
    forge(path, "run_id", ghost)
    assert own_runs(results) == (runs, [])


def test_of_many_forged_rows_some_are_named(results: Path) -> None:
    store = Store(results / "runs")
    runs = {synthetic.timed(store, synthetic.config("dense")).run_id}
    collect(store, results / "records")
    path = results / "records" / "runs.parquet"
    forge(path, "config_json", "5")
    pq.write_table(pa.concat_tables([pq.read_table(path)] * 50), path)
    found, notes = own_runs(results)
    assert found == runs
    assert len(notes) == loading.MOST_FAULTS + 1
    assert "left out 30 more rows" in notes[-1]


def test_many_processes_collect_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "runs")
    for seed in range(3):
        synthetic.timed(store, synthetic.config("topk", seed=seed))
    collect(store, tmp_path / "one")
    monkeypatch.setattr("analysis.records.parquet.RUNS_OF_A_PART", 1)
    assert collect(store, tmp_path / "many", processes=2)[0] == {"runs": 3, "steps": 120, "epochs": 0}
    for one, many in zip(read_parquet(tmp_path / "one"), read_parquet(tmp_path / "many"), strict=True):
        assert one.equals(many)


def test_outcomes_are_what_the_statistics_say(results: Path) -> None:
    store = Store(results / "runs")
    timed = synthetic.timed(store, synthetic.config("topk"))
    synthetic.alternated(store, ["dense", "randomk"], blocks=4)
    frames = analysis.load(results)
    for key in frames.steps["key"].unique():
        run = frames.runs.set_index("key").loc[key]
        slowest = units(frames, [key], by_block=False).means["slowest"].iloc[0]
        assert run["step_s"] == pytest.approx(slowest)
        assert run["samples_per_s"] == pytest.approx(64 / slowest)
    assert frames.runs.set_index("run_id").loc[timed.run_id, "wire_bytes"] == 117_824
    learned = frames.runs[frames.runs["source"] == "shipped"].iloc[0]
    assert learned["val_top1"] == frames.epochs["val_top1"].iloc[-1]
    assert frames.runs["test_top1"].notna().sum() == 1


def test_nothing_is_empty_by_convention(results: Path) -> None:
    synthetic.timed(Store(results / "runs"), synthetic.config("dense"))
    synthetic.timed(Store(results / "runs"), synthetic.config("topk", select="fused"))
    for name, table in zip(Frames._fields, analysis.load(results), strict=True):
        assert not table.isna().all().any() or name == "looks"  # they were not looked at
    assert set(analysis.load(results).runs["select"]) == {"torch", "fused"}


@pytest.fixture
def frames(tmp_path: Path) -> Frames:
    store = Store(tmp_path)
    for density in (0.001, 0.1):
        config = synthetic.config("topk")
        synthetic.timed(store, config | {"method": config["method"] | {"density": density}})
    synthetic.timed(store, synthetic.config("dense"))
    return from_attempts(store.all_valid())[0]


def test_a_query_takes_dotted_names_and_keeps_the_steps_of_its_runs(frames: Frames) -> None:
    found = query(frames, "method.name == 'topk' and method.density <= 1e-2")
    assert len(found.runs) == 1
    assert set(found.steps["key"]) == set(found.runs["key"])
    assert len(query(frames, "method.name.str.startswith('to') and not seed > 0").runs) == 2
    assert len(query(frames, 'method.name == "dense" or `method.density` == 0.1').runs) == 2


@pytest.mark.parametrize(
    "words", ["method.nam == 'topk'", "method.name == topk", "seed >", "1", "seed == [", ""]
)
def test_a_query_that_says_nothing_is_refused(frames: Frames, words: str) -> None:
    with pytest.raises(ValueError, match=r"no column|evaluated|of no run"):
        query(frames, words)
    with pytest.raises(ValueError, match=r"did you mean method\.name"):
        query(frames, "method.nam == 'topk'")


def test_labels_of_runs_are_found_by_key(frames: Frames) -> None:
    assert set(label(frames.runs)) == {"dense", "topk density=0.001", "topk density=0.1"}
    topk = query(frames, "method.name == 'topk'")
    assert set(label(topk.runs)) == {"topk density=0.001", "topk density=0.1"}
    assert list(label(topk.runs).index) == list(topk.runs["key"])
