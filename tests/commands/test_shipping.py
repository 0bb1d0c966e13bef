"""Raw runs into tables: only what is sound is collected."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.attempts import load_valid_attempts
from analysis.records.configs import run_id
from analysis.records.parquet import read_parquet
from analysis.records.public import drop_undrawn_rows
from analysis.records.store import Store
from experiments import figures
from experiments.commands import collect
from experiments.commands.collect import find_complete_figure_runs
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.figures.runs import additional_configs, required_configs
from tests.analysis import synthetic
from tests.conftest import Command, fine


def test_steps_are_shipped_of_timed_runs_only(tmp_path: Path) -> None:
    frames, _ = load_valid_attempts(synthetic.item_store(tmp_path).list_newest_valid_attempts())
    kept = drop_undrawn_rows(frames)
    timed = frames.runs["key"][frames.runs["train.validate"] == "never"]
    assert set(kept.steps["key"]) == set(timed)
    assert len(kept.steps) == frames.steps["key"].isin(timed).sum() > 0
    assert kept.epochs.equals(frames.epochs)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide one figure, records that are shipped and a README, which are not those of this repository."""
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{collect.README_BEGIN}\n{collect.README_END}\nbelow\n")
    monkeypatch.setattr(collect, "README", readme)
    monkeypatch.setattr(ResultFolders, "shipped", property(lambda self: tmp_path / "shipped"))
    fig3 = {"fig3": figures.files_by_item()["fig3"]}
    monkeypatch.setattr(figures, "files_by_item", lambda: fig3)
    return tmp_path / "shipped"


def test_a_complete_figure_is_shipped_without_the_names_of_its_hosts(
    here: Command, elsewhere: Path, tmp_path: Path
) -> None:
    done = fine(here("collect", "--ship"))
    assert "nothing is added: no figure has all its runs here" in done.stdout
    hosts = ["secret-n1", "secret-n2"]
    machine = {"hosts": hosts, "mismatch": [f"the workers are on {' and '.join(hosts)}"]}
    for config in required_configs(figures.load("fig3"), "laptop"):
        synthetic.learned(
            ResultFolders(tmp_path / "results").store, config, host="secret-n1", machine=machine
        )
    done = fine(here("collect", "--ship"))
    assert "fig3-laptop: " in done.stdout
    assert len(read_parquet(elsewhere).runs) == len(required_configs(figures.load("fig3"), "laptop"))
    said = [(tmp_path / "README.md").read_text(), *(frame.to_csv() for frame in read_parquet(elsewhere))]
    said += [path.read_text() for path in elsewhere.rglob("*") if path.suffix in (".md", ".json")]
    assert "host1 and host2" in "".join(said)
    assert "secret" not in "".join(said)


def test_a_training_that_is_made_again_keeps_the_rules_of_the_first_time(tmp_path: Path) -> None:
    """A run with the same seed has a known end; runs that are timed anew are new."""
    old, new = Store(tmp_path / "old"), Store(tmp_path / "new")
    for store, rules in ((old, {"a": "1", "b": "1"}), (new, {"a": "1", "b": "2"})):
        synthetic.learned(store, synthetic.learning_config("topk", 0)).update_manifest(rules=rules)
        synthetic.alternated(store, ["dense", "topk"], blocks=4).update_manifest(rules=rules)
    before, again = (load_valid_attempts(store.list_newest_valid_attempts())[0] for store in (old, new))
    known = collect.keep_only_shipped_rules(before, again).runs
    trained = known["group"].isna()
    assert set(known.loc[trained, "rules_json"]) == {'{"a": "1"}'}
    assert set(known.loc[~trained, "rules_json"]) == set(again.runs["rules_json"])


@pytest.mark.usefixtures("elsewhere")
def test_a_figure_is_completed_batch_by_batch(tmp_path: Path) -> None:
    """Runs that another machine has made are shipped already, and need not be on this one."""
    needed = required_configs(figures.load("fig3"), "laptop")
    more = additional_configs(figures.load("fig3"), "laptop")[:2]
    ids = [run_id(config) for config in (*needed, *more)]

    def complete(name: str, made: list[Config], shipped: list[str]) -> list[str] | None:
        folders = ResultFolders(tmp_path / name)
        for config in made:
            synthetic.learned(folders.store, config)
        return dict(find_complete_figure_runs(folders, shipped)).get("fig3-laptop")

    assert complete("part", needed[:2], []) is None
    assert complete("first", needed, []) == ids[:3]
    assert complete("rest", needed[2:], ids[:2]) == ids[:3]
    assert complete("more", more, ids[:3]) == ids
