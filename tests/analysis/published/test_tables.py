"""The shipped tables are what was written, and say what is known of the published jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis import published
from analysis.published import __main__ as command
from analysis.published import log_files, tables
from analysis.published.log_files import Job
from analysis.records.files import Damaged
from tests.analysis.published.test_log_files import WHOLE, comm, comp
from tests.conftest import loaded_by

MIB = 2**20


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    tables.write(tables.read(tables.FOLDER), tmp_path)
    return tmp_path


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One job of two iterations in the folders of the authors' repository."""
    monkeypatch.setattr(tables, "JOBS", {7: Job("A100", "NVLink", 2, "topk")})
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "topk.e7").write_text("".join(f"{line}\n" for line in WHOLE))
    lines = [comp(0.2), comp(0.2), comm(0.1), comm(0.3)] * 2
    (tmp_path / "job" / "topk.o7").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def test_speeds_are_the_paper_s_to_every_digit() -> None:
    speeds = published.jobs().set_index("job")["samples_per_s"]
    assert speeds[[130673, 130672, 130675, 130263, 130264]].to_list() == [
        17387.49, 3723.61, 15648.40, 12651.83, 3743.28,
    ]  # fmt: skip


def test_every_job_has_all_its_epochs() -> None:
    curves = published.epochs()
    assert curves.groupby("job")["epoch"].apply(list).map(len).to_dict() == {
        job: 138 if facts.workers == 8 else 139 for job, facts in log_files.JOBS.items()
    }
    final = curves[curves["epoch"] == 138].set_index("job")["top1"]
    assert final[[130673, 130672, 130675]].round(2).to_list() == [92.99, 91.52, 70.98]  # Fig. 3


def test_every_job_of_8_workers_stalled_966_times_after_every_49_iterations() -> None:
    table = published.iterations()
    assert set(table.groupby("job")["long_waits"].sum()) == {7 * 138}
    stalls = table[table["long_waits"] > 0]
    assert (stalls["iteration"] % 49 == 0).all()


def test_iterations_are_numbered_once_and_few_are_missing() -> None:
    table = published.iterations()
    for _, numbers in table.groupby("job")["iteration"]:
        assert numbers.is_monotonic_increasing
        assert numbers.is_unique
        assert numbers.max() == 6767
    assert len(table) == 5 * 6768 - 27


def test_dense_jobs_printed_no_compression() -> None:
    table = published.iterations()
    assert table["comp_mean_ms"].isna().eq(table["method"] == "dense").all()
    assert (table["comm_min_ms"] <= table["comm_mean_ms"]).all()
    assert (table["comm_mean_ms"] <= table["comm_max_ms"]).all()


def test_a_caller_can_not_change_what_the_next_one_reads() -> None:
    for read in (published.jobs, published.epochs, published.windows, published.iterations):
        table = read()
        table["job"] = 0
        assert (read()["job"] != 0).all()


def test_they_are_small() -> None:
    assert sum(path.stat().st_size for path in tables.FOLDER.iterdir()) < 1.5 * MIB


def test_what_was_written_is_read_again(copied: Path) -> None:
    assert tables.differences(tables.read(copied), tables.read(tables.FOLDER)) == []


@pytest.mark.parametrize("name", ["jobs.csv", "epochs.csv", "windows.csv", "iterations.parquet"])
def test_a_table_that_does_not_match_its_digest_is_refused(copied: Path, name: str) -> None:
    raw = bytearray((copied / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (copied / name).write_bytes(raw)
    with pytest.raises(
        Damaged, match=f"{name} is not what was recorded: it has another digest; `git checkout`"
    ):
        tables.read(copied)


@pytest.mark.parametrize("name", ["jobs.csv", "digests.json"])
def test_a_table_that_is_missing_is_refused(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(Damaged, match=f"{name} is missing.*git checkout"):
        tables.read(copied)


def test_tables_from_logs_are_written_and_compared(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tables"
    assert command.main([str(clone), str(folder)]) == command.DIFFERENT
    told = capsys.readouterr().out
    assert "windows: 1 rows against 705" in told
    assert "iterations: 2 rows against 33813" in told
    monkeypatch.setattr(tables, "FOLDER", folder)
    assert command.main([str(clone)]) == command.OK
    changed = (clone / "job" / "topk.o7").read_text().replace("COMP=0.200000", "COMP=0.300000")
    (clone / "job" / "topk.o7").write_text(changed)
    assert command.main([str(clone)]) == command.DIFFERENT
    assert "2 of 2 rows differ in comp_mean_us" in capsys.readouterr().out


def test_a_log_that_is_not_understood_ends_with_a_sentence(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (clone / "job" / "topk.o7").write_text("COMP=?\n")
    assert command.main([str(clone)]) == command.BAD_INPUT
    assert "topk.o7 can't be read: its line 1" in capsys.readouterr().err
    assert command.main([]) == command.BAD_INPUT


def test_reading_needs_no_torch() -> None:
    assert "torch" not in loaded_by("from analysis import published; published.iterations()")


def test_a_band_reaches_from_one_machine_to_the_other() -> None:
    band = published.band("topk")
    machines = published.by_machine("topk")
    assert list(machines) == ["A100, NVLink", "V100, NVLink"]
    assert band["epoch"].to_list() == [*range(1, 139)]
    np.testing.assert_array_equal(band["low"], machines.min(axis=1))
    np.testing.assert_array_equal(band["high"], machines.max(axis=1))
    assert band["mean"].iloc[-1] == pytest.approx((91.515 + 90.872) / 2, abs=0.001)


def test_one_machine_is_no_band() -> None:
    band = published.band("randomk", "val_loss")
    assert band["low"].isna().all()
    assert band["mean"].iloc[-1] == pytest.approx(0.816, abs=0.001)


def test_4_workers_are_apart() -> None:
    assert len(published.band("dense", workers=4)) == 139
    assert len(published.band("randomk", workers=4)) == 0


def test_the_learning_rate_falls_twice() -> None:
    assert published.decays() == [82, 123]
