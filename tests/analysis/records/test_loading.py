"""All records at once: own before shipped, newer before collected, nothing empty, nothing lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

import analysis
from analysis.records import loading
from analysis.records.collection import collect_runs_into_parquet
from analysis.records.files import size_and_digest, write_json
from analysis.records.frame_cache import DIGESTS, ROWS
from analysis.records.frames import query_runs
from analysis.records.parquet import read_parquet, write_parquet
from analysis.records.steps import replication_units
from analysis.records.store import Store
from tests.analysis import synthetic


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of a checkout that ships one training of its own."""
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    store = Store(tmp_path / "elsewhere")
    attempt = synthetic.learned(store, synthetic.learning_config("topk"))
    shipped = tmp_path / "results" / "shipped"
    write_parquet(synthetic.frames_of(store), shipped)
    (shipped / "figures").mkdir()
    write_json(shipped / "figures" / "fig3-laptop.json", {"runs": [attempt.run_id]})
    return tmp_path / "results"


def measure(results: Path, *methods: str, slow: float = 1.0) -> list[str]:
    """Add a timed run of each of these methods; return the names of the runs."""
    store = Store(results / "runs")
    return [synthetic.timed(store, synthetic.config(method), slow).run_id for method in methods]


def collect_into_tables(results: Path) -> None:
    collect_runs_into_parquet(Store(results / "runs"), results / "records")


def test_own_runs_and_shipped_ones_with_the_items_and_sweeps_that_they_belong_to(results: Path) -> None:
    (run,) = measure(results, "dense")
    for name in ("figures/fig4-laptop", "sweeps/thesis"):
        path = results / "records" / f"{name}.json"
        path.parent.mkdir(parents=True)
        write_json(path, {"runs": [run]})
    runs = analysis.load(results).runs.set_index("source")
    assert runs.loc["own", ["run_id", "items", "sweeps"]].tolist() == [run, "fig4", "thesis"]
    assert runs.loc["shipped", "items"] == "fig3"


def test_a_run_that_is_shipped_and_measured_here_is_the_own_one(results: Path) -> None:
    synthetic.learned(Store(results / "runs"), synthetic.learning_config("topk"), cpu="mine")
    assert analysis.load(results).runs[["source", "provenance.cpu"]].to_numpy().tolist() == [["own", "mine"]]


def test_collected_or_not_the_frames_are_the_same(results: Path) -> None:
    measure(results, "dense")
    before = analysis.load(results)
    collect_into_tables(results)
    measure(results, "topk")
    (run,) = measure(results, "dense", slow=2.0)
    after = analysis.load(results)
    assert len(after.runs) == len(before.runs) + 1
    dense = after.runs[after.runs["run_id"] == run].iloc[0]
    assert dense["attempt"] == 2
    assert dense["step_s"] > 1.5 * query_runs(before, "method.name == 'dense'").runs["step_s"].iloc[0]
    store = Store(results / "runs")
    shutil.rmtree(store.list_attempts(run)[-1].path)
    store.create_attempt(synthetic.config("dense")).mark_failed_unless_whole(
        "no memory"
    )  # which hides no whole attempt before it
    own = query_runs(analysis.load(results), "method.name == 'dense'").runs
    assert own["attempt"].tolist() == [1]


# Cells of a row of runs: a column, and what stands there.
FORGED: list[tuple[str, str | None]] = [
    ("config_json", "[" * 50_000),
    ("config_json", '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"),
    ("config_json", '{"a":' + "9" * 5_000 + "}"),
    ("config_json", None),
    ("key", None),
]
FORGED_TEXTS = """
config_json [1]
config_json 5
config_json {x
config_json {"a":1}
config_json {"method":null,"task":5}
provenance_json {x
provenance_json 5
rules_json {x
ended x
ended 2026-01-01
ended 0001-01-01
ended 292277026596-01-01T00:00:00Z
started x
run_id ../../../../../etc
run_id /etc
"""
FORGED += [(column, value) for column, value in map(str.split, FORGED_TEXTS.strip().splitlines())]


def forge(folder: Path, **cells: Any) -> None:
    """Change cells of the first row in a batch of the cache, and the digest with it."""
    path = folder / ROWS
    rows = msgspec.msgpack.decode(path.read_bytes())
    rows[0]["cells"] |= cells
    path.write_bytes(msgspec.msgpack.encode(rows))
    files = json.loads((folder / DIGESTS).read_text())["files"]
    write_json(folder / DIGESTS, {"files": {**files, ROWS: size_and_digest(path)}})


def test_a_forged_row_of_the_cache_is_read_again_and_adds_no_run_that_the_folder_lacks(results: Path) -> None:
    runs = {*measure(results, "dense", "topk")}
    for column, value in [*FORGED, ("attempt", None), ("seed", "x")]:
        shutil.rmtree(results / "records" / "cache", ignore_errors=True)
        loading.load_own_runs(results, ["runs"], pytest.fail)
        (folder,) = (results / "records" / "cache").glob("*/*")
        forge(folder, **{column: value})
        own = loading.load_own_runs(results, analysis.TABLES, pytest.fail).runs
        assert {*own["run_id"]} == runs, (column, value)


def test_many_processes_collect_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = synthetic.frames_with(tmp_path / "runs", synthetic.config("topk"), synthetic.config("dense"))
    monkeypatch.setattr("analysis.records.attempts.BATCH_RUNS", 1)
    counts, _ = collect_runs_into_parquet(Store(tmp_path / "runs"), tmp_path / "many", processes=2)
    assert counts == {"runs": 2, "steps": 80, "epochs": 0}
    collected = read_parquet(tmp_path / "many").steps.set_index(["key", "rank", "step"])["start_s"]
    expected = frames.steps.set_index(["key", "rank", "step"])["start_s"]
    assert collected.to_dict() == expected.to_dict()


def test_outcomes_are_what_the_statistics_say_and_no_column_is_empty(results: Path) -> None:
    store = Store(results / "runs")
    synthetic.timed(store, synthetic.config("topk", select="fused"))
    synthetic.alternated(store, ["dense", "randomk"], blocks=4)
    frames = analysis.load(results)
    assert not any(len(table) and table.isna().all().any() for table in frames)
    runs = frames.runs.set_index("key")
    for key in frames.steps["key"].unique():
        slowest = replication_units(frames, [key], by_block=False).means_by_unit["slowest"].iloc[0]
        expected = (slowest, 64 / slowest)
        assert tuple(runs.loc[key, ["step_s", "samples_per_s"]]) == pytest.approx(expected)
    assert runs.loc[runs["select"] == "fused", "wire_bytes"].tolist() == [117_824]
    assert set(runs["select"]) == {"torch", "fused"}  # as older records imply
    assert runs["val_top1"].dropna().tolist() == frames.epochs["val_top1"].tolist()[-1:]
    assert runs["test_top1"].notna().sum() == 1


def test_a_query_takes_dotted_names_keeps_the_steps_of_its_runs_and_is_refused_where_it_says_nothing(
    tmp_path: Path,
) -> None:
    frames = synthetic.frames_of(synthetic.item_store(tmp_path))
    found = query_runs(frames, "method.name == 'topk' and method.density <= 1e-2 and workers == 2")
    assert len(found.runs) == 2
    assert set(found.steps["key"]) == set(found.runs["key"])
    assert len(query_runs(frames, "method.name.str.startswith('to') and not seed > 0").runs) == 3
    assert len(query_runs(frames, 'method.name == "dense" or `timing.mode` == "production"').runs) == 5
    for words in ("method.name == topk", "seed >", "1", "seed == [", ""):
        with pytest.raises(ValueError, match=r"no column|evaluated|of no run"):
            query_runs(frames, words)
    with pytest.raises(ValueError, match=r"no column.*did you mean method\.name"):
        query_runs(frames, "method.nam == 'topk'")
