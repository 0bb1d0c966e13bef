"""Files on disk: replaced as a whole, and logs that survive a killed writer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.records import locks
from analysis.records.files import (
    MAX_BYTES,
    PART_SUFFIX,
    DamagedFileError,
    read_bytes,
    read_struct_if_there,
    remove_abandoned_parts,
    try_read_json_object,
    write_atomic,
)
from analysis.records.log import (
    InterferenceError,
    LogInUseError,
    RankLog,
    decode_finished_log,
    read_json_lines,
)
from analysis.records.schema import LogLine, Manifest, StepLine
from tests.conftest import ROOT, there


def test_lines_wait_until_flushed_later_ones_are_forgotten_and_a_broken_last_one_is_dropped(
    tmp_path: Path,
) -> None:
    with RankLog(tmp_path / "rank0.jsonl") as log:
        log.truncate(0)  # nothing is there yet
        log.add_line("step", step=0)
        assert log.size_bytes() == 0
        log.flush()
        log.add_line("step", step=1)
        log.flush(durable=True)
        size = log.size_bytes()
        log.add_line("step", step=2)
        log.flush(durable=True)
        assert log.size_bytes() > size
        log.truncate(size)
        log.add_line("step", step=3)
        log.flush(durable=True)
    with log.path.open("a") as file:
        file.write('{"kind":"ste')
    records, dropped = read_json_lines(log.path)
    assert [record["step"] for record in records] == [0, 1, 3]
    assert dropped == 1


def test_an_atomic_write_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


WRITER = """
import sys, time
from pathlib import Path
from analysis.records.files import temporary_part_folder
from analysis.records.log import RankLog

folder = Path(sys.argv[1])
log = RankLog(folder / "rank0.jsonl")
with temporary_part_folder(folder) as part:
    (part / "steps.parquet").touch()
    print(part, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_has_not_finished_is_removed_and_its_log_is_free(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        folder = Path(there(writer.stdout).readline().strip())
        with pytest.raises(
            LogInUseError, match=rf"written by process {writer.pid} of this machine: wait for its end"
        ):
            RankLog(path)
        for name in (f".runs.parquet.n1.5{PART_SUFFIX}", "runs.parquet", "mine.part"):
            (tmp_path / name).touch()
        assert remove_abandoned_parts(tmp_path) == 0  # they are young
        for each in tmp_path.iterdir():
            os.utime(each, (0, 0))
        assert remove_abandoned_parts(tmp_path) == 1  # the other is still written
        writer.kill()
    assert remove_abandoned_parts(tmp_path) == 1
    assert not folder.exists()
    assert {each.name for each in tmp_path.iterdir()} == {"runs.parquet", "mine.part", path.name}
    assert locks.describe_lock_holder(path) is None
    with RankLog(path), pytest.raises(LogInUseError):
        RankLog(path)


def test_a_wait_for_a_lock_tells_once_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(locks, "POLL_S", 0.001)
    path = tmp_path / "run.lock"
    lines = list[str]()
    with locks.FileLock(path) as held:
        assert held.acquire(report_wait=lines.append)
        assert not lines
        assert not locks.FileLock(path).acquire(timeout_s=0.01, report_wait=lines.append)
    (line,) = lines
    assert re.fullmatch(f"waiting for process .* which holds {path}", line)


def test_what_happens_to_a_log_that_is_being_written_is_seen_at_once(tmp_path: Path) -> None:
    for how in ("removed", "replaced", "changed"):
        with RankLog(tmp_path / f"{how}.jsonl") as log:
            log.add_line("step", step=0)
            log.flush()
            if how != "changed":
                log.path.unlink()
            if how != "removed":
                with log.path.open("a") as other:
                    other.write('{"kind":"step","step":0}\n')
            log.add_line("step", step=1)
            with pytest.raises(InterferenceError, match=f"jsonl was {how}"):
                log.flush()


REFUSED = {
    b"": "is empty",
    b"\0": "is no JSON",
    b"\xff": "is no text in UTF-8",
    b'{"state": "o': "is no JSON",
    b"[" * 100_000: "is nested too deeply",
    b"[" * 100 + b"]" * 100: "nested too deeply",
    b'{"more": ' * 100 + b"5" + b"}" * 100: "nested too deeply",
    b'{"state": "ok", "more": ' + b"9" * 10_000 + b"}": "is no JSON",
    b'{"state": "ok", "more": 9223372036854775808}': "more than 64 bits",
    b'{"state": "ok", "more": "\\ud800"}': "half of a character",
    b"5": "is not as it was written: Expected `object`, got `int`",
    b'{"state": "fine"}': r"Invalid enum value 'fine' - at `\$.state`",
    b'{"state": "ok", "steps": -1}': r"Expected `int` >= 0 - at `\$.steps`",
    b'{"state": "ok", "files": [5]}': r"Expected `object`, got `array` - at `\$.files`",
    b'{"state": "ok", "started": "2026-99-01T00:00:00Z"}': r"Invalid RFC3339 .* at `\$.started`",
}


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert read_struct_if_there(path, Manifest) is None
    for raw, reason in REFUSED.items():
        path.write_bytes(raw)
        with pytest.raises(DamagedFileError, match=reason) as refused:
            read_struct_if_there(path, Manifest)
        assert str(path) in str(refused.value)
        assert len(refused.value.why) < 200


NO_FILES: dict[str, Callable[[Path], object]] = {
    "is a FIFO and no file": os.mkfifo,
    "is a folder and no file": Path.mkdir,
    "is a device and no file": lambda path: path.symlink_to("/dev/zero"),
    "can't be read: Too many levels of symbolic links": lambda path: path.symlink_to(path),
    "has 67,108,865 bytes, and no such file has more": lambda path: truncate(path, MAX_BYTES + 1),
}


@pytest.mark.timeout(20)
def test_what_is_no_such_file_is_neither_waited_for_nor_read(tmp_path: Path) -> None:
    for number, (reason, make) in enumerate(NO_FILES.items()):
        path = tmp_path / str(number)
        make(path)
        with pytest.raises(DamagedFileError, match=reason):
            read_bytes(path)
        assert try_read_json_object(path) is None


def truncate(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


def test_of_a_finished_log_only_the_last_line_may_be_broken(tmp_path: Path) -> None:
    step = b'{"kind":"step","step":0,"epoch":1,"start_s":1,"step_s":0.5,"loss":NaN}\n'
    lines, broken = decode_finished_log(step + step[:20], LogLine, tmp_path)
    assert broken == 1
    assert isinstance(lines[0], StepLine)
    for bad in (
        b"5\n",
        b"null\n",
        b"{}\n",
        b"\n",
        step[:20] + b"\n",
        step.replace(b'"step":0', b'"step":"0"'),
    ):
        with pytest.raises(DamagedFileError, match="in line 2"):
            decode_finished_log(step + bad + step, LogLine, tmp_path)
