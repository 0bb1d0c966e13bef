"""`validate` reads all that is stored, and names what is not as it was written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.records.attempts import from_attempts
from analysis.records.configs import run_id
from analysis.records.files import Damaged, write_json
from analysis.records.parquet import SCHEMA_KEY, read_parquet, write_parquet
from experiments.commands import validate as command
from experiments.commands.collect import drawn, index_of
from experiments.config.folders import Folders
from experiments.figures.runs import configs_of
from tests.analysis import synthetic
from tests.conftest import Command


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of one figure, as the repository would ship them."""
    folder = tmp_path / "shipped"
    monkeypatch.setattr(Folders, "shipped", property(lambda self: folder))
    configs = configs_of("fig4", "laptop")
    store = Folders(tmp_path / "other").store
    frames, _ = from_attempts([synthetic.in_turns(store, config) for config in configs])
    write_parquet(frames, folder)
    (folder / "figures").mkdir()
    write_json(folder / "figures" / "fig4-laptop.json", {"runs": [run_id(config) for config in configs]})
    return folder


def test_what_is_sound_is_counted(here: Command, shipped: Path, tmp_path: Path) -> None:
    synthetic.timed(Folders(tmp_path / "results").store, synthetic.config())
    done = here("validate")
    assert done.returncode == 0, done.stdout
    assert f"1 runs in {tmp_path / 'results' / 'runs'}" in done.stdout
    assert "3 runs and 1 figures" in done.stdout
    assert done.stdout.splitlines()[-1] == "all records are as they were written"


def test_a_changed_log_of_the_same_length_is_found(here: Command, shipped: Path, tmp_path: Path) -> None:
    log = synthetic.timed(Folders(tmp_path / "results").store, synthetic.config()).rank_path(0)
    assert here("validate").returncode == 0  # which keeps a copy of what the log says
    log.write_text(log.read_text().replace('"step":1,', '"step":9,', 1))
    done = here("validate")
    assert done.returncode == 1
    assert log.parent.parent.name in done.stdout
    assert done.stdout.splitlines()[-1] == "1 wrong"


def test_a_row_that_no_record_has_is_named(here: Command, shipped: Path, tmp_path: Path) -> None:
    attempt = synthetic.timed(Folders(tmp_path / "results").store, synthetic.config())
    path, *_ = write_parquet(from_attempts([attempt])[0], tmp_path / "results" / "records")
    assert here("validate").returncode == 0
    table = pq.read_table(path)
    at = table.column_names.index("config_json")
    pq.write_table(table.set_column(at, "config_json", pa.array(["[1]"])), path)
    done = here("validate")
    assert done.returncode == 1
    assert f"{path} is not as it was written in config_json of {attempt.run_id}" in done.stdout


def test_a_figure_without_one_of_its_runs_and_a_cut_table_are_named(here: Command, shipped: Path) -> None:
    index = shipped / "figures" / "fig4-laptop.json"
    write_json(index, {"runs": ["lost-run", *index_of(index)]})
    done = here("validate")
    assert done.returncode == 1
    assert "fig4-laptop is shipped without 1 of its runs: lost-run" in done.stdout
    (shipped / "steps.parquet").write_bytes((shipped / "steps.parquet").read_bytes()[:-9])
    done = here("validate")
    assert done.returncode == 1
    assert "steps.parquet is not a whole Parquet file" in done.stdout


def test_runs_that_are_not_planned_any_more_are_told(shipped: Path) -> None:
    folders = Folders()
    assert list(command.outdated(folders)) == []
    index = shipped / "figures" / "fig4-laptop.json"
    write_json(index, {"runs": ["old-run", *index_of(index)]})
    (told,) = command.outdated(folders)
    assert told.startswith("fig4-laptop is drawn from 1 runs that fig4 does not ask for any more")


# Shipped before what takes turns was launched several times: such times decide nothing. What is measured
# again goes from here.
OF_ONE_LAUNCH = {
    "crossover-laptop", "eghlidi-table2-laptop",
    "shi-scaling-laptop", "shi-selection-laptop", "slow-links-laptop", "speed-laptop",
    "speed-protocol-laptop", "stable-costs-laptop", "stable-dgc-laptop", "stable-throughput-laptop",
    "straggler-laptop",
}  # fmt: skip


def test_every_other_shipped_figure_is_drawn_from_the_runs_that_its_item_asks_for() -> None:
    assert {line.split()[0] for line in command.outdated(Folders())} == OF_ONE_LAUNCH


def test_a_table_of_another_schema_is_refused_and_an_older_file_is_read(shipped: Path) -> None:
    path = shipped / "runs.parquet"
    table = pq.read_table(path)
    assert table.schema.metadata[SCHEMA_KEY.encode()] == b"1"
    pq.write_table(table.replace_schema_metadata(None), path)  # before files said their schema
    assert len(read_parquet(shipped).runs)
    pq.write_table(table.replace_schema_metadata({SCHEMA_KEY: "2"}), path)
    with pytest.raises(Damaged, match="has schema 2, and this code reads schema 1"):
        read_parquet(shipped)
    assert isinstance(table, pa.Table)


def test_looks_are_shipped_as_far_as_they_are_drawn(tmp_path: Path) -> None:
    store = Folders(tmp_path).store
    looks = [
        {"step": 0, "what": "size", "of": of, "xs": [0.0], "values": [size]}
        for of, size in (("all", 50.0), ("small", 10.0), ("last", 20.0), ("large", 20.0))
    ]
    looks += [
        {"step": step, "what": what, "of": of + of_region, "xs": [1.0], "values": [0.5]}
        for step in (0, 5)
        for of in ("all", "small", "last", "large")
        for what, of_region in (("histogram", ""), ("kept", "/10"))
    ]
    frames, _ = from_attempts([synthetic.looked(store, synthetic.config("topk"), looks)])
    kept = drawn(frames.looks)
    told = set(zip(kept["step"], kept["what"], kept["of"], strict=True))
    assert len(told) == len(kept)
    assert {(step, of) for step, what, of in told if what == "histogram"} == {
        (0, "all"), (0, "large"), (5, "all"), (5, "small"), (5, "last"), (5, "large"),
    }  # fmt: skip
    assert {of for _, what, of in told if what == "kept"} == {"all/10", "large/10"}
    assert {of for _, what, of in told if what == "size"} == {"all", "small", "last", "large"}
