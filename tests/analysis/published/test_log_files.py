"""The authors' logs, as small ones in the same form: what is read, and that nothing else is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from analysis.published.log_files import JobFacts, read_iteration_log, read_training_log
from analysis.records.files import DamagedFileError

WORKERS = 2
SPARSE = JobFacts("A100", "NVLink", WORKERS, "topk")
DENSE = JobFacts("A100", "NVLink", WORKERS, "dense")
CONFIGURED = (
    "2022-08-15 17:12:04,289 [dist_trainer.py:135] INFO Configurations: Namespace(batch_size=128, "
    f"compressor='topk', dnn='vgg16', max_epochs=141, nworkers={WORKERS}, nwpernode={WORKERS}, threshold=5)"
)
# A warning quotes the format of a line; it must not be taken for one.
NOISE = (
    "/bin/bash: warning: setlocale: LC_ALL: cannot change locale (en_US.UTF-8)",
    "dist_trainer.py:90: DeprecationWarning: The 'warn' method is deprecated, use 'warning' instead",
    "  logger.warn('Time per iteration including communication: %f, Speed: %f images/s', time_per_iter)",
)


window = (
    "2022-08-15 17:12:32,327 [dist_trainer.py:90] WARNING Time per iteration including communication: "
    "{:.6f}, Speed: {:.6f} images/s"
).format
phases = (
    "2022-08-15 17:12:32,036 [dl_trainer.py:731] WARNING [  0][   40/   49][rank:{}] loss: 1.902, "
    "average forward ({:.6f}) and backward ({:.6f}) time: 0.259765, iotime: {:.6f} "
).format
validated = (
    "2022-08-15 17:12:35,583 [dl_trainer.py:822] INFO Epoch {}, lr: 0.020327, val loss: 9.422477, "
    "val top-1 acc: {:.6f}, top-5 acc: 67.266614"
).format
comp = "COMP={:.6f}".format
comm = "COMM_TOTAL={0:.6f}, COMM_VAL={0:.6f}, COMM_ID=0.000004".format
WHOLE = (
    CONFIGURED, CONFIGURED, *NOISE,
    phases(0, 0.004, 0.200, 0.003), phases(1, 0.006, 0.220, 0.005), window(0.25, 512.0), window(0.26, 492.0),
    validated(1, 21.271756), validated(2, 39.7),
)  # fmt: skip


def log(folder: Path, lines: Sequence[str]) -> Path:
    path = folder / "topk.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_speeds_phases_and_validations_are_read(tmp_path: Path) -> None:
    training = read_training_log(log(tmp_path, WHOLE), SPARSE)
    expected = {"samples_per_s": 1004.0, "fp_ms": 5.0, "bp_ms": 210.0, "io_ms": 4.0}
    assert training.mean_speed_and_times(SPARSE) == pytest.approx(expected)
    assert training.window_table().to_dict("records") == [{"window": 0, "until": 41, "ms": 250.0}]
    assert training.epochs == [
        (epoch, 0.020327, 9.422477, top1, 67.266614) for epoch, top1 in ((1, 21.271756), (2, 39.7))
    ]


def test_what_is_not_understood_is_refused(tmp_path: Path) -> None:
    unknown, mixed = "is not of a known form", "not as many lines of each"
    for read, lines, why in (
        (read_training_log, [*WHOLE, window(0.2, 1.0).replace("images/s", "img/s")], f"line 12 {unknown}"),
        (read_training_log, [*WHOLE[:-1], WHOLE[-1][:-20]], f"line 11 {unknown}"),
        (read_training_log, WHOLE[2:], "another job"),
        (read_training_log, [line.replace("size=128", "size=32") for line in WHOLE], "another job"),
        (read_training_log, [*WHOLE, window(0.2, 1.0)], mixed),
        (read_training_log, [*WHOLE, phases(0, 1, 1, 1), phases(0, 1, 1, 1)], mixed),
        (read_training_log, [*WHOLE, validated(4, 1.0)], "an epoch twice, or lacks one"),
        (read_iteration_log, [*ITERATION[:3], "COMM_TOTAL=0.1, COMM_"], f"line 4 {unknown}"),
        (read_iteration_log, ["COMP=nan", *ITERATION[1:]], f"line 1 {unknown}"),
        (read_iteration_log, ITERATION[:3], "2 lines of compression and 1 of communication"),
        (read_iteration_log, ITERATION[2:], "0 lines of compression and 2 of communication"),
    ):
        with pytest.raises(DamagedFileError, match=why):
            read(log(tmp_path, lines), SPARSE)
    with pytest.raises(DamagedFileError, match=r"github\.com/kljp/topk_results"):
        read_training_log(tmp_path / "topk.e1", SPARSE)


def test_an_iteration_is_least_mean_and_greatest_over_ranks(tmp_path: Path) -> None:
    lines = ["gpu32:14157 NCCL INFO Launch mode Parallel", comp(0.2), comp(0.23), comm(0.001), comm(1.2345)]
    table = read_iteration_log(log(tmp_path, lines), SPARSE)
    assert table.to_csv(index=False) == (
        "iteration,comp_min_us,comp_mean_us,comp_max_us,comm_min_us,comm_mean_us,comm_max_us,long_waits\n"
        "0,200000,215000,230000,1000,617750,1234500,1\n"
    )
    dense = read_iteration_log(log(tmp_path, [f"COMM={seconds:.6f}" for seconds in (0.001, 0.003)]), DENSE)
    assert dense["comm_mean_us"].to_list() == [2_000]
    assert dense["comp_mean_us"].isna().all()  # which dense training does not print


ITERATION = [comp(0.1), comp(0.1), comm(0.1), comm(0.1)]
