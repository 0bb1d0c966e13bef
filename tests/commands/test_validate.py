"""`validate` reads all that is stored, and names what is not as it was written."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.records.attempts import load_valid_attempts
from analysis.records.files import DamagedFileError, write_json
from analysis.records.parquet import SCHEMA_KEY, read_parquet, write_parquet
from analysis.records.public import select_drawn_looks
from analysis.records.store import Attempt
from experiments import figures
from experiments.commands import validate as command
from experiments.commands.collect import read_figure_run_ids
from experiments.config.folders import ResultFolders
from experiments.figures.runs import required_configs
from tests.analysis import synthetic
from tests.conftest import Command, fine


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide records of one figure, as the repository would ship them."""
    folder = tmp_path / "shipped"
    monkeypatch.setattr(ResultFolders, "shipped", property(lambda self: folder))
    store = ResultFolders(tmp_path / "other").store
    attempts = [
        synthetic.in_turns(store, config) for config in required_configs(figures.load("fig4"), "laptop")
    ]
    write_parquet(load_valid_attempts(attempts)[0], folder)
    (folder / "figures").mkdir()
    write_json(folder / "figures" / "fig4-laptop.json", {"runs": [attempt.run_id for attempt in attempts]})
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Attempt:
    return synthetic.timed(ResultFolders(tmp_path / "results").store, synthetic.config())


def add_to_figure(shipped: Path, run: str) -> None:
    """Let the figure be drawn from one run more."""
    index = shipped / "figures" / "fig4-laptop.json"
    write_json(index, {"runs": [run, *read_figure_run_ids(index)]})


@pytest.mark.usefixtures("shipped")
def test_what_is_sound_is_counted_and_a_changed_log_of_the_same_length_is_found(
    here: Command, own: Attempt
) -> None:
    log = own.rank_log_path(0)
    said = fine(here("validate")).stdout  # which keeps a copy of what the log says
    assert "3 runs and 1 figures" in said
    assert said.splitlines()[-1] == "all records are as they were written"
    log.write_text(log.read_text().replace('"step":1,', '"step":9,', 1))
    done = here("validate")
    assert done.returncode == 1
    assert own.run_id in done.stdout
    assert done.stdout.splitlines()[-1] == "1 wrong"


@pytest.mark.usefixtures("shipped")
def test_a_row_that_no_record_has_is_named(here: Command, own: Attempt, tmp_path: Path) -> None:
    path, *_ = write_parquet(load_valid_attempts([own])[0], tmp_path / "results" / "records")
    fine(here("validate"))
    table = pq.read_table(path)
    column = table.column_names.index("config_json")
    pq.write_table(table.set_column(column, "config_json", pa.array(["[1]"])), path)
    done = here("validate")
    assert done.returncode == 1
    assert f"{path} is not as it was written in config_json of {own.run_id}" in done.stdout


def test_a_figure_without_one_of_its_runs_and_a_cut_table_are_named(here: Command, shipped: Path) -> None:
    add_to_figure(shipped, "lost-run")
    done = here("validate")
    assert done.returncode == 1
    assert "fig4-laptop is shipped without 1 of its runs: lost-run" in done.stdout
    steps = shipped / "steps.parquet"
    steps.write_bytes(steps.read_bytes()[:-9])
    done = here("validate")
    assert done.returncode == 1
    assert "steps.parquet is not a whole Parquet file" in done.stdout


# Shipped before what takes turns was launched several times: such times decide nothing. What is measured
# again goes from here.
OF_ONE_LAUNCH = {
    "eghlidi-table2-laptop", "slow-links-laptop", "speed-laptop", "speed-protocol-laptop",
    "stable-costs-laptop", "stable-throughput-laptop", "straggler-laptop",
}  # fmt: skip


def test_runs_that_are_not_planned_any_more_are_told(shipped: Path) -> None:
    assert list(command.describe_outdated_figures(ResultFolders())) == []
    add_to_figure(shipped, "old-run")
    (told,) = command.describe_outdated_figures(ResultFolders())
    assert told.startswith("fig4-laptop is drawn from 1 runs that fig4 does not ask for any more")


def test_every_other_shipped_figure_is_drawn_from_the_runs_that_its_item_asks_for() -> None:
    assert {line.split()[0] for line in command.describe_outdated_figures(ResultFolders())} == OF_ONE_LAUNCH


def test_a_table_of_another_schema_is_refused_and_an_older_file_is_read(shipped: Path) -> None:
    path = shipped / "runs.parquet"
    table = pq.read_table(path)
    assert table.schema.metadata[SCHEMA_KEY.encode()] == b"1"
    pq.write_table(table.replace_schema_metadata(None), path)  # before files said their schema
    assert len(read_parquet(shipped).runs)
    pq.write_table(table.replace_schema_metadata({SCHEMA_KEY: "2"}), path)
    with pytest.raises(DamagedFileError, match="has schema 2, and this code reads schema 1"):
        read_parquet(shipped)


def test_looks_are_shipped_as_far_as_they_are_drawn(tmp_path: Path) -> None:
    sizes = {"all": 50.0, "small": 10.0, "last": 20.0, "large": 20.0}
    looks = [
        {"step": 0, "what": "size", "of": name, "xs": [0.0], "values": [size]} for name, size in sizes.items()
    ]
    for step, name in product((0, 5), sizes):
        values = {"step": step, "xs": [1.0], "values": [0.5]}
        looks += [{"what": "histogram", "of": name, **values}, {"what": "kept", "of": f"{name}/10", **values}]
    attempt = synthetic.looked(ResultFolders(tmp_path).store, synthetic.config("topk"), looks)
    kept = (
        select_drawn_looks(load_valid_attempts([attempt])[0].looks)
        .groupby(["what", "step"])["of"]
        .agg(sorted)
    )
    assert kept.to_dict() == {
        ("size", 0): sorted(sizes),
        ("histogram", 0): ["all", "large"],
        ("histogram", 5): sorted(sizes),
        ("kept", 0): ["all/10", "large/10"],
        ("kept", 5): ["all/10", "large/10"],
    }
