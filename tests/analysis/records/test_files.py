"""Files on disk: replaced as a whole, and logs that survive a killed writer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.records import locks
from analysis.records.files import (
    MOST_BYTES,
    PART,
    Damaged,
    read_as,
    read_bytes,
    read_json,
    remove_parts,
    write_atomic,
)
from analysis.records.log import Disturbed, Held, RankLog, read_lines, whole_lines
from analysis.records.schema import LogLine, Manifest, StepLine
from tests.conftest import ROOT, there


def test_lines_wait_in_memory_until_flushed(tmp_path: Path) -> None:
    with RankLog(tmp_path / "rank0.jsonl") as log:
        log.add("step", step=0)
        assert log.size() == 0
        log.flush()
        log.add("step", step=1)
        log.flush(durable=True)
    assert [record["step"] for record in read_lines(log.path)[0]] == [0, 1]


def test_a_broken_last_line_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"kind":"step","step":0}\n{"kind":"ste')
    records, dropped = read_lines(path)
    assert [record["step"] for record in records] == [0]
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


def test_a_log_has_one_writer_whose_death_gives_it_free(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from analysis.records.log import RankLog\n"
        "log = RankLog(Path(sys.argv[1]))\n"
        "time.sleep(60)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT)
    try:
        while locks.holder(path) is None:
            time.sleep(0.02)
        with pytest.raises(Held, match=rf"written by process {writer.pid} of this machine: wait for its end"):
            RankLog(path)
    finally:
        writer.kill()
        writer.wait()
    assert locks.holder(path) is None
    with RankLog(path) as mine, pytest.raises(Held):
        RankLog(mine.path)


@pytest.mark.parametrize("how", ["removed", "replaced", "changed"])
def test_what_happens_to_a_log_that_is_being_written_is_seen_at_once(how: str, tmp_path: Path) -> None:
    with RankLog(tmp_path / "rank0.jsonl") as log:
        log.add("step", step=0)
        log.flush()
        if how != "changed":
            log.path.unlink()
        if how != "removed":
            with log.path.open("a") as other:
                other.write('{"kind":"step","step":0}\n')
        log.add("step", step=1)
        with pytest.raises(Disturbed, match=f"rank0.jsonl was {how}"):
            log.flush()


def test_an_object_is_read_as_its_schema_says_and_keeps_what_that_does_not_name(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert read_as(path, Manifest) is None
    path.write_text('{"state": "ok", "steps": 8, "more": 1}')
    manifest = there(read_as(path, Manifest))
    assert (manifest.state, manifest.steps) == ("ok", 8)
    assert read_json(path) == {"state": "ok", "steps": 8, "more": 1}


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "is empty"),
        (b"\0", "is no JSON"),
        (b"\xff", "is no text in UTF-8"),
        (b'{"state": "o', "is no JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"[" * 100 + b"]" * 100, "nested too deeply"),
        (b'{"state": "ok", "more": ' + b"9" * 10_000 + b"}", "is no JSON"),
        (b'{"state": "ok", "more": 99999999999999999999}', "more than 64 bits"),
        (b'{"state": "ok", "more": "\\ud800"}', "half of a character"),
        (b"5", "is not as it was written: Expected `object`, got `int`"),
        (b'{"state": "fine"}', r"Invalid enum value 'fine' - at `\$.state`"),
        (b'{"state": "ok", "steps": -1}', r"Expected `int` >= 0 - at `\$.steps`"),
        (b'{"state": "ok", "files": [5]}', r"Expected `object`, got `array` - at `\$.files`"),
        (b'{"state": "ok", "started": "2026-99-01T00:00:00Z"}', r"Invalid RFC3339 .* at `\$.started`"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path, raw: bytes, told: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(raw)
    with pytest.raises(Damaged, match=told) as refused:
        read_as(path, Manifest)
    assert str(path) in str(refused.value)
    assert len(refused.value.why) < 200


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "is a FIFO and no file"),
        (Path.mkdir, "is a folder and no file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device and no file"),
        (lambda path: path.symlink_to(path), "can't be read: Too many levels of symbolic links"),
        (lambda path: truncate(path, MOST_BYTES + 1), "has 67,108,865 bytes, and no such file has more"),
    ],
    ids=["FIFO", "folder", "device", "loop", "large"],
)
def test_what_is_no_such_file_is_neither_waited_for_nor_read(
    tmp_path: Path, make: Callable[[Path], object], told: str
) -> None:
    path = tmp_path / "run.json"
    make(path)
    with pytest.raises(Damaged, match=told):
        read_bytes(path)
    assert read_json(path) is None


def truncate(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def test_of_a_finished_log_only_the_last_line_may_be_broken(tmp_path: Path) -> None:
    step = b'{"kind":"step","step":0,"epoch":1,"start_s":1,"step_s":0.5,"loss":NaN}\n'
    lines, broken = whole_lines(step + step[:20], LogLine, tmp_path)
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
        with pytest.raises(Damaged, match="in line 2"):
            whole_lines(step + bad + step, LogLine, tmp_path)


def test_what_a_killed_process_has_not_finished_is_removed_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from analysis.records.files import part_folder\n"
        "with part_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'steps.parquet').touch()\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        folder = Path(writer.stdout.readline().strip())
        unfinished = tmp_path / f".runs.parquet.n1.5{PART}"
        for path in (unfinished, tmp_path / "runs.parquet", tmp_path / "mine.part"):
            path.touch()
        assert remove_parts(tmp_path) == 0  # they are young
        for path in tmp_path.iterdir():
            os.utime(path, (0, 0))
        assert remove_parts(tmp_path) == 1  # it is still written
        writer.kill()
    assert remove_parts(tmp_path) == 1
    assert not folder.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"runs.parquet", "mine.part"}
