"""The shipped tables are what was written, and say what is known of the published jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import published
from analysis.published import __main__ as command
from analysis.published import log_files, tables
from analysis.published.log_files import JobFacts
from analysis.records.files import DamagedFileError
from tests.analysis.published.test_log_files import WHOLE, comm, comp


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    tables.write_tables(tables.read_verified_tables(tables.FOLDER), tmp_path)
    return tmp_path


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a clone of the authors' repository that holds one job of two iterations."""
    monkeypatch.setattr(tables, "JOBS", {7: JobFacts("A100", "NVLink", 2, "topk")})
    (tmp_path / "job").mkdir()
    iterations = [comp(0.2), comp(0.2), comm(0.1), comm(0.3)] * 2
    for name, lines in (("topk.e7", WHOLE), ("topk.o7", iterations)):
        (tmp_path / "job" / name).write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


EIGHT_WORKERS = [130673, 130672, 130675]  # dense, Top-k, Rand-k on the A100


def test_every_job_has_the_paper_s_speed_and_all_its_epochs() -> None:
    speeds = published.job_table().set_index("job")["samples_per_s"]
    assert speeds[EIGHT_WORKERS].to_list() == [17387.49, 3723.61, 15648.40]
    curves = published.epoch_table()
    for job, facts in log_files.JOBS.items():
        assert (curves["job"] == job).sum() == (138 if facts.workers == 8 else 139)
    final = curves[curves["epoch"] == 138].set_index("job")["top1"]
    assert final[EIGHT_WORKERS].round(2).to_list() == [92.99, 91.52, 70.98]  # Fig. 3
    assert published.learning_rate_decay_epochs() == [82, 123]
    table = published.iteration_table()
    assert set(table.groupby("job")["long_waits"].sum()) == {7 * 138}
    assert (table.loc[table["long_waits"] > 0, "iteration"] % 49 == 0).all()


@pytest.mark.parametrize("name", ["jobs.csv", "iterations.parquet", "digests.json"])
def test_a_table_that_does_not_match_its_digest_or_is_missing_is_refused(copied: Path, name: str) -> None:
    path = copied / name
    if name != "digests.json":
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        with pytest.raises(
            DamagedFileError, match=f"{name} is not .*: it has another digest; `git checkout`"
        ):
            tables.read_verified_tables(copied)
    path.unlink()
    with pytest.raises(DamagedFileError, match=f"{name} is missing.*git checkout"):
        tables.read_verified_tables(copied)


def test_tables_from_logs_are_written_and_compared(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, log = tmp_path / "tables", clone / "job" / "topk.o7"
    assert command.main([str(clone), str(folder)]) == command.DIFFERENT
    printed = capsys.readouterr().out
    assert "windows: 1 rows against 705" in printed
    assert "iterations: 2 rows against 33813" in printed
    monkeypatch.setattr(tables, "FOLDER", folder)
    assert command.main([str(clone)]) == command.OK
    log.write_text(log.read_text().replace("COMP=0.200000", "COMP=0.300000"))
    assert command.main([str(clone)]) == command.DIFFERENT
    assert "2 of 2 rows differ in comp_mean_us" in capsys.readouterr().out
    log.write_text("COMP=?\n")
    assert command.main([str(clone)]) == command.BAD_INPUT
    assert "topk.o7 can't be read: its line 1" in capsys.readouterr().err
    assert command.main([]) == command.BAD_INPUT


def test_a_band_reaches_from_one_machine_to_the_other() -> None:
    band = published.mean_and_range_over_machines("topk").set_index("epoch")
    assert band.loc[138, ["low", "mean", "high"]].to_list() == pytest.approx(
        [90.872, 91.1935, 91.515], abs=0.001
    )
    assert published.mean_and_range_over_machines("randomk")["low"].isna().all()  # one machine is no band
