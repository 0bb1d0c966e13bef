"""A GPU's first minutes: the plan, its parts and its targets.

The plan names what there is; parts that sleep, fail and will not end run as real processes; targets are met
only when they count as met.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from experiments import commands, figures
from experiments.bench import gpu_first
from experiments.bench._runner import Record
from experiments.bench.gpu_first import PARTS, GpuPart, GpuSession, has_any_failed, judge_targets
from experiments.commands import run as run_command
from experiments.config import code_version, compose
from experiments.config.folders import ResultFolders
from experiments.config.grid import expand_grid
from slurm import gpus
from tests.conftest import ROOT, Command, environment_for, fine, refused
from tests.launch.troubled import await_
from tests.slurm.gpu_nodes import drive
from tests.worker.runs import wait_for

SHORT = 1 / 60  # minutes
Started = Callable[[], list[str]]


def fake(name: str, script: str, expected_min: float = 0.01, limit_min: float = 1.0, **how: Any) -> GpuPart:
    """Return a part whose command is a script that runs in the results folder."""
    folder = "import os; os.chdir(os.environ['SPARSIFY_RESULTS'])\n"
    return GpuPart(
        name=name, shows="fake", command=f"-c {shlex.quote(folder + script)}", rehearsal="",
        expected_min=expected_min, limit_min=limit_min, **how,
    )  # fmt: skip


def call(folder: Path, *parts: GpuPart, named: Sequence[str] = (), **how: Any) -> dict[str, Record]:
    """Call it once in this folder, and return what became of each part."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "SPARSIFY_RESULTS": str(folder)}
    session = GpuSession(parts, "A GPU", folder, variables, named, grace_s=0.2)
    with contextlib.suppress(KeyboardInterrupt):
        session.run("gpu_first", **how)
    return records_of(folder)


def records_of(folder: Path) -> dict[str, Record]:
    """Return the newest record of each part."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture
def started(capsys: pytest.CaptureFixture[str]) -> Started:
    """Return a function that tells the parts that were started since it was last called, in their order."""

    def told() -> list[str]:
        lines = capsys.readouterr().err.splitlines()
        return [line.partition(":")[0] for line in lines if line.endswith(": fake")]

    return told


SLEEP = "import time; time.sleep(60)"
IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
OK = fake("ok", "print('{\"one\": 1}')")
FAILS = fake("fails", "print('so it was'); raise SystemExit(3)")
SLEEPS = fake("sleeps", SLEEP, limit_min=SHORT)
GOES_ON = fake("goes_on", SLEEP, limit_min=SHORT, is_resumable=True)
DEAF = fake("deaf", IGNORES + SLEEP, limit_min=SHORT)
ABSENT = fake("absent", "pass", programs=("no-such-program",))
LONG = fake("long", "pass", expected_min=5)
REUSES = fake("training-fp32", f"print({gpu_first.REUSED!r} + ' measures again')")


def outcome(found: dict[str, Record], name: str) -> tuple[str, str]:
    """Return the state of a part, and why."""
    return found[name]["state"], found[name]["why"]


# The plan.


def test_every_part_is_planned_and_names_what_there_is_and_a_rehearsal_needs_no_gpu(here: Command) -> None:
    planned = here("bench", "gpu_first", "--plan").stdout
    assert f"| all | | {sum(part.expected_min for part in PARTS):.3g} |" in planned
    for part in PARTS:
        for variant in (part, part.as_rehearsal()):
            process = variant.process_command
            module, *words = process[process.index("-m") + 1 :]
            assert find_spec(module), module
            if module == "experiments":
                command = words.pop(0)
                given = commands.make_parser(command, words).parse_words(words)
                assert {word for word in given.get("words", ()) if "=" not in word} <= {
                    *figures.files_by_item()
                }
                for point in expand_grid([word for word in words if "=" in word]):
                    compose.resolve(point)
        assert f"| {part.name} |" in planned
        assert not {"profile=paper", "cuda", "device=cuda", "precision=tf32"} & set(part.rehearsal.split())
    assert sum(part.rehearsal_min for part in PARTS) < 5


# Parts as processes.


def test_each_end_of_a_part_is_told_apart_and_shipped_without_what_was_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    """A run that was measured before ends in seconds, and says so in words that the code of `run` has."""
    monkeypatch.setattr(ResultFolders, "shipped", tmp_path / "shipped")
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path / "results"))
    folder = tmp_path / "results" / "a-gpu"
    found = call(folder, OK, FAILS, SLEEPS, DEAF, ABSENT, REUSES, ship=True)
    assert started() == ["ok", "fails", "sleeps", "deaf", "training-fp32"]
    too_long = ("too long", f"it was ended at its limit of {SHORT:g} min")
    assert {name: outcome(found, name) for name in found} == {
        "ok": ("ok", ""),
        "fails": ("failed", "exit code 3"),
        "sleeps": too_long,
        "deaf": too_long,
        "absent": ("skipped", "no-such-program is not installed, or not on PATH"),
        "training-fp32": ("ok", ""),
    }
    assert found["fails"]["tail"] == "so it was"
    assert gpu_first.REUSED in inspect.getsource(run_command)
    assert [name for name, row in found.items() if row["reused"]] == ["training-fp32"]
    reused = records_of_gpu() | {"training-fp32": found["training-fp32"]}
    assert words(reused)["138 epochs of VGG-16, fp32, the whole command"] == "not measured"
    shipped = records_of(tmp_path / "shipped" / "gpu-first" / "a-gpu")
    assert shipped["ok"]["found"] == {"one": 1}
    assert not any(row["tail"] or row["log"] for row in shipped.values())
    assert "| fails | failed |" in (tmp_path / "shipped" / "gpu-first" / "a-gpu" / "summary.md").read_text()


def test_a_second_call_repeats_only_what_can_become_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    parts = (OK, FAILS, GOES_ON, SLEEPS)
    call(tmp_path, *parts)
    assert started() == ["ok", "fails", "goes_on", "sleeps"]
    found = call(tmp_path, *parts)
    assert started() == ["goes_on"]
    assert found["goes_on"]["spent_s"] > found["goes_on"]["seconds"]
    call(tmp_path, *parts, named=["fails", "ok"])
    assert started() == ["fails"]
    call(tmp_path, OK, force=True)
    assert started() == ["ok"]
    monkeypatch.setattr(code_version, "code_digest", lambda: "another")
    call(tmp_path, OK, FAILS)
    assert started() == ["fails"]
    assert "- measured with other code (" in (tmp_path / "summary.md").read_text()


def test_a_part_that_does_not_fit_waits_and_one_that_resumes_gets_what_is_left(
    tmp_path: Path, started: Started
) -> None:
    assert "long" not in call(tmp_path, LONG, OK, minutes=0.5)
    assert started() == ["ok"]
    found = call(tmp_path, fake("resumes", SLEEP, is_resumable=True), minutes=0.05)
    assert outcome(found, "resumes") == ("interrupted", "this call's minutes were over")
    assert found["resumes"]["seconds"] < 10


def test_nothing_that_a_part_has_started_is_left(tmp_path: Path) -> None:
    script = "import subprocess\nopen('child', 'w').write(str(subprocess.Popen(['sleep', '100']).pid))"
    assert outcome(call(tmp_path, fake("leaves", script)), "leaves")[0] == "ok"
    assert is_gone(int((tmp_path / "child").read_text()))


def is_gone(pid: int) -> bool:
    """Tell whether a process ends within some seconds; a zombie, which waits for its parent, has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        await_(lambda: process.status() == psutil.STATUS_ZOMBIE, f"the end of {pid}", 10)
    return True


WATCHED = """
import sys
from pathlib import Path
from tests.bench.test_gpu_first import call, fake
script = "import os, time; open('pid.part', 'w').write(str(os.getpid())); os.rename('pid.part', 'pid')"
call(Path(sys.argv[1]), fake("first", "pass"), fake("second", script + "; time.sleep(100)"))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_that_is_ended_leaves_its_records_whole_and_no_process(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "first"
    caller = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(folder)], cwd=ROOT, env=environment_for(tmp_path)
    )
    wait_for(folder, "pid")
    pid = int((folder / "pid").read_text())
    caller.send_signal(number)
    caller.wait(timeout=30)
    assert is_gone(pid)
    found = records_of(folder)
    assert found["first"]["state"] == "ok"
    if number == signal.SIGTERM:
        assert outcome(found, "second") == ("interrupted", "told to end")
    else:
        assert "second" not in found
    again = call(folder, fake("first", "raise SystemExit(1)"), fake("second", "pass"))
    assert again["first"]["state"] == again["second"]["state"] == "ok"


# The command.


def test_without_a_gpu_it_says_what_to_do(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, None)
    gpus.gpus_by_bus_id.cache_clear()
    refused(here("bench", "gpu_first"), 'there is no CUDA device here; rehearse with ARGS="device=cpu"')
    gpus.gpus_by_bus_id.cache_clear()


@pytest.mark.extended
def test_a_rehearsal_keeps_its_records_apart_and_says_what_it_is(here: Command, tmp_path: Path) -> None:
    done = fine(here("bench", "gpu_first", "device=cpu", "--parts", "auto"))
    assert "Rehearsal on a CPU: nothing here is a GPU result" in done.stdout
    assert "| auto | ok |" in done.stdout
    (written,) = (tmp_path / "results").glob(f"*/{gpu_first.REHEARSAL}")
    assert records_of(written)["auto"]["found"]["bench"] == "auto"
    assert [*(written / "results" / "bench").glob("auto-*.jsonl")]


# Targets.


def record(found: Record, **how: Any) -> Record:
    """Return the record of a part that ended well."""
    return {
        "device": "cuda", "state": "ok", "why": "", "spent_s": 180.0, "reused": False, "found": found,
        "code": code_version.code_digest(), **how,
    }  # fmt: skip


def records_of_gpu(ratio: float = 1.0, eager: float = 7.0, host_us: float = 3.0) -> dict[str, Record]:
    """Return what a GPU might leave."""

    def value(median: float) -> dict[str, Any]:
        return {"median": median, "low": median, "high": median, "n": 50, "spread": "5 to 95 %"}

    case = {"fused_over_add": value(ratio), "eager_over_fused": value(eager)}
    paper = {"compression_percent": value(2.0), "epochs_138_min": value(3.0)}
    found: dict[str, dict[str, Any]] = {
        "kernels": {"cases": [case] * 3}, "launch": {"host_us": value(host_us)},
        "auto": {"least_torch_over_auto": 0.98}, "paper-fp32": paper, "paper-tf32": paper,
        "training-fp32": {}, "training-tf32": {},
    }  # fmt: skip
    return {name: record(what, part=name) for name, what in found.items()}


def words(found: dict[str, Record]) -> dict[str, str]:
    """Return what became of each target, by its text."""
    word_by_verdict = {True: "met", False: "not met", None: "not measured"}
    outcomes = [outcome for part in PARTS for outcome in judge_targets(part, found.get(part.name))]
    return {outcome.target.text: word_by_verdict[outcome.is_met] for outcome in outcomes}


def test_a_target_is_met_or_not_by_its_median_and_decides_the_exit_code() -> None:
    assert set(words(records_of_gpu()).values()) == {"met"}
    assert not has_any_failed(records_of_gpu(), PARTS)
    for missed in (records_of_gpu(ratio=1.4), records_of_gpu(eager=5.0), records_of_gpu(host_us=31.0)):
        assert has_any_failed(missed, PARTS)
    assert has_any_failed({"kernels": record({}, part="kernels")}, PARTS)
    at_middle = words(records_of_gpu(ratio=1.4))  # what is enough at 14.7 M elements is not at 25.6
    assert [at_middle[f"fused step / in-place add, {n}M"] for n in (14.7, 25.6)] == ["met", "not met"]
