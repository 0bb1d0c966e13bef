"""Records as frames: nothing broken gets in, and nothing whole gets lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.records.attempts import from_attempts, of_attempt
from analysis.records.files import Damaged
from analysis.records.frames import Frames, combine, empty, keys_of, typed
from analysis.records.store import Store
from tests.analysis import synthetic


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


@pytest.fixture
def frames(store: Store) -> Frames:
    for method in ("dense", "topk"):
        synthetic.timed(store, synthetic.config(method))
    synthetic.learned(store, synthetic.learning_config("topk", epochs=3))
    return from_attempts(store.all_valid())[0]


def test_every_rank_step_epoch_and_span_has_its_row(frames: Frames) -> None:
    assert len(frames.runs) == 3
    assert len(frames.steps) == 2 * 2 * 20  # runs, ranks, steps
    assert len(frames.epochs) == 3
    assert set(frames.spans["step"]) == {18, 19}
    assert frames.steps["select_s"].isna().sum() == 2 * 20  # dense selects nothing


def test_configs_and_provenance_are_flat_columns(frames: Frames) -> None:
    run = frames.runs.set_index("method.name").loc["dense"]
    assert run["cluster.link.name"] == "loopback"
    assert run["provenance.data.name"] == "synthetic"
    assert json.loads(run["task.lr_milestones"]) == [81, 122]
    assert json.loads(run["config_json"])["train"]["steps"] == 20
    assert run["steps_total"] == 20


def test_a_broken_last_line_is_dropped_and_reported(store: Store) -> None:
    attempt = synthetic.timed(store, synthetic.config())
    with attempt.rank_path(1).open("a") as file:
        file.write('{"kind":"step","step":20,"epo')
    attempt.update(files=attempt.fingerprints())
    frames, notes = from_attempts([attempt])
    assert len(frames.steps) == 2 * 20
    assert len(notes) == 1
    assert "1 broken line" in notes[0]
    assert "rank1.jsonl" in notes[0]


def test_a_record_with_a_missing_or_short_file_is_left_out_and_reported(store: Store) -> None:
    missing = synthetic.timed(store, synthetic.config("dense"))
    short = synthetic.timed(store, synthetic.config("topk"))
    missing.rank_path(1).unlink()
    short.rank_path(0).write_bytes(short.rank_path(0).read_bytes()[:-30])
    assert not missing.is_valid()
    assert not short.is_valid()
    frames, notes = from_attempts([missing, short])
    assert not len(frames.runs)
    assert len(notes) == 2


def test_combine_takes_a_run_whole_from_the_newer_frames(store: Store, frames: Frames) -> None:
    config = synthetic.config("topk") | {"train": {"epochs": 1, "steps": 12, "validate": "never"}}
    new, _ = from_attempts([synthetic.timed(store, config)])
    key = frames.runs["key"][(frames.runs["method.name"] == "topk") & (frames.runs["workers"] == 2)].iloc[0]
    renamed = Frames(*(frame.assign(key=key) for frame in new))  # as if measured again under the same key
    both = combine(frames, renamed)
    assert len(both.runs) == 3
    assert (both.steps["key"] == key).sum() == 2 * 12
    assert len(both.steps) == 2 * 20 + 2 * 12


def test_variants_of_one_run_have_a_key_each_and_share_a_group(tmp_path: Path) -> None:
    attempt = synthetic.alternated(Store(tmp_path), ["dense", "topk"], blocks=4, block_steps=3)
    frames, notes = of_attempt(attempt)
    assert not notes
    assert frames.runs["key"].to_list() == [f"{attempt.key}/dense", f"{attempt.key}/topk"]
    assert frames.runs["method.name"].to_list() == frames.runs["variant"].to_list() == ["dense", "topk"]
    assert set(frames.runs["group"]) == {attempt.key}
    for key in frames.runs["key"]:
        steps = frames.steps[(frames.steps["key"] == key) & (frames.steps["rank"] == 0)]
        assert steps["step"].to_list() == list(range(2 + 4 * 3))
        assert steps["block"].to_list() == [0, 0, *(block for block in (1, 2, 3, 4) for _ in range(3))]


def test_a_line_of_no_variant_is_damage(tmp_path: Path) -> None:
    attempt = synthetic.alternated(Store(tmp_path), ["dense", "topk"], blocks=1, block_steps=1)
    path = attempt.rank_path(0)
    path.write_text(path.read_text().replace('"variant":"topk"', '"variant":"topq"'))
    attempt.update(files=attempt.fingerprints())
    with pytest.raises(Damaged, match="variant topq"):
        of_attempt(attempt)


def test_ordinary_runs_and_older_tables_are_in_no_group(tmp_path: Path) -> None:
    frames = of_attempt(synthetic.timed(Store(tmp_path), synthetic.config()))[0]
    older = typed("steps", frames.steps.drop(columns="block"))
    for steps in (frames.steps, older):
        assert steps["block"].isna().all()
    for runs in (frames.runs, typed("runs", frames.runs.drop(columns="group"))):
        assert runs["group"].to_list() == [None]


def test_runs_are_found_by_what_they_have_in_their_columns(frames: Frames) -> None:
    (found,) = keys_of(frames, {"method.name": "dense"})
    assert frames.runs.set_index("key").loc[found, "method.name"] == "dense"
    assert keys_of(frames, {"method.name": "dense", "method.nothing": 1}) == []
    assert keys_of(empty(), {"method.name": "dense"}) == []
