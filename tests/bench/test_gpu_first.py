"""A GPU's first minutes: the plan names what there is; parts that sleep, fail and will not end, as real
processes; what was promised, and when it counts as met.
"""

from __future__ import annotations

import inspect
import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from experiments import figures
from experiments.bench.gpu_first import __main__ as gpu_first
from experiments.bench.gpu_first import page, promises, state, wheels
from experiments.bench.gpu_first.call import REUSED
from experiments.bench.gpu_first.parts import PARTS, SIZES, Part
from experiments.bench.gpu_first.state import Result, State
from experiments.commands import run as run_command
from experiments.config import code_version, compose
from experiments.config.grid import expand
from slurm import gpus
from tests.bench.fake_parts import call, fake, ran
from tests.conftest import ROOT, environment_for
from tests.gpu_nodes import drive
from tests.runs import wait_for

IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
SHORT = 1 / 60  # minutes

OK = fake("ok", "print('{\"one\": 1}')")
FAILS = fake("fails", "print('so it was'); raise SystemExit(3)")
SLEEPS = fake("sleeps", "import time; time.sleep(60)", limit_min=SHORT)
GOES_ON = fake("goes_on", "import time; time.sleep(60)", limit_min=SHORT, resumable=True)
DEAF = fake("deaf", IGNORES + "time.sleep(60)", limit_min=SHORT)
ABSENT = fake("absent", "pass", needs=(lambda: "it is not installed",))
LONG = fake("long", "pass", expected_min=5)


def of(kept: State, name: str) -> tuple[str, str]:
    return kept.parts[name].state, kept.parts[name].why


# The plan.


def modules(part: Part) -> list[tuple[str, list[str]]]:
    """What `python -m` is to run, and its words."""
    commands = (part.real.command, part.toy.command)
    return [(words[i + 1], list(words[i + 2 :])) for words in commands for i in [words.index("-m")]]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_names_what_there_is(part: Part) -> None:
    for module, words in modules(part):
        assert find_spec(module), module
        if module == "experiments":
            command, *words = words
            items = [word for word in words if "=" not in word]
            assert bool(items) == (command == "reproduce")
            assert set(items) <= set(figures.items())
        if module in ("experiments", "experiments.bench.iterations"):
            for point in expand([word for word in words if "=" in word]):
                compose.resolve(point)


def test_the_plan_has_all_of_the_issue_in_its_order_and_a_rehearsal_needs_no_gpu() -> None:
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    order = ["roofs", "tests", "kernels", "select", "fallback", "memcheck", "paper-fp32", "fig4", "trainings"]
    assert [name for name in names if name in order] == order
    for part in PARTS:
        assert part.real.expected_min <= part.real.limit_min
        assert "profile=paper" not in part.toy.command
        assert not {"cuda", "device=cuda", "precision=tf32"} & set(part.toy.command)
    assert sum(part.toy.expected_min for part in PARTS) < 5


def test_the_plan_is_printed_with_its_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_first.main(["--plan"]) == 0
    said = capsys.readouterr().out
    for part in PARTS:
        assert f"| {part.name} |" in said
        assert page.said(part.real.command) in said
    assert f"| all | | {sum(part.real.expected_min for part in PARTS):.3g} |" in said


# Parts as processes.


def test_each_end_of_a_part_is_told_apart(tmp_path: Path) -> None:
    kept = call(tmp_path, OK, FAILS, SLEEPS, DEAF, ABSENT)
    assert of(kept, "ok") == ("ok", "")
    assert kept.parts["ok"].found == {"one": 1}
    assert of(kept, "fails") == ("failed", "exit code 3")
    assert kept.parts["fails"].tail == "so it was"
    assert (
        of(kept, "sleeps") == of(kept, "deaf") == ("too long", f"it was ended at its limit of {SHORT:g} min")
    )
    assert of(kept, "absent") == ("skipped", "it is not installed")
    assert ran(tmp_path) == ["ok", "fails", "sleeps", "deaf"]


def test_a_second_call_repeats_only_what_can_become_better(tmp_path: Path) -> None:
    parts = (OK, FAILS, GOES_ON, SLEEPS)
    call(tmp_path, *parts)
    kept = call(tmp_path, *parts)
    assert ran(tmp_path) == ["ok", "fails", "goes_on", "sleeps", "goes_on"]
    assert kept.parts["goes_on"].spent_s > kept.parts["goes_on"].seconds
    call(tmp_path, *parts, named=["fails", "ok"])
    assert ran(tmp_path)[5:] == ["fails", "goes_on"]
    call(tmp_path, OK, force=True)
    assert ran(tmp_path)[-1] == "ok"


def test_other_code_repeats_failures_and_says_what_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(tmp_path, OK, FAILS)
    monkeypatch.setattr(code_version, "digest", lambda: "another")
    kept = call(tmp_path, OK, FAILS)
    assert ran(tmp_path) == ["ok", "fails", "fails"]
    commit = (code_version.origin()["commit"] or "of no commit")[:7]
    assert f"- measured with other code ({commit}): ok\n" in page.summary(kept, [OK, FAILS])


def test_a_part_that_does_not_fit_waits_and_one_that_resumes_gets_what_is_left(tmp_path: Path) -> None:
    kept = call(tmp_path, LONG, OK, budget_s=30)
    assert ran(tmp_path) == ["ok"]
    assert "long" not in kept.parts
    resumes = fake("resumes", "import time; time.sleep(60)", expected_min=0.01, resumable=True)
    kept = call(tmp_path, resumes, budget_s=3)
    assert of(kept, "resumes") == ("interrupted", "this call's minutes were over")
    assert kept.parts["resumes"].seconds < 10


def test_nothing_that_a_part_has_started_is_left(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "open('child', 'w').write(str(child.pid))"
    )
    assert of(call(tmp_path, fake("leaves", script)), "leaves")[0] == "ok"
    assert is_gone(int((tmp_path / "child").read_text()))


def is_gone(pid: int) -> bool:
    """Within some seconds; a zombie, which waits for its parent, counts."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


WATCHED = """
import sys
from pathlib import Path
from tests.bench.fake_parts import call, fake
script = "import os, time; open('pid.part', 'w').write(str(os.getpid())); os.rename('pid.part', 'pid')"
call(Path(sys.argv[1]), fake("first", "pass"), fake("second", script + "; time.sleep(100)"))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_that_is_ended_leaves_its_state_whole_and_no_process(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "first"
    caller = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(folder)], cwd=ROOT, env=environment_for(tmp_path)
    )
    wait_for(folder, "pid")
    pid = int((folder / "pid").read_text())
    caller.send_signal(number)
    caller.wait(timeout=30)
    assert is_gone(pid)
    kept = state.read(folder / state.NAME, "CPU", True)
    assert kept.parts["first"].state == "ok"
    assert kept.parts["second"].state == ("running" if number == signal.SIGKILL else "interrupted")
    kept = call(folder, fake("first", "pass"), fake("second", "pass"))
    assert ran(folder) == ["first", "second", "second"]
    assert kept.parts["second"].state == "ok"


# The command.


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--parts", "roofs,kernel"], "no part 'kernel' (did you mean 'kernels'?); there are: roofs"),
        (["--minutes", "0"], "--minutes 0: must be more than 0"),
        (["--minutes", "nan"], "--minutes nan: must be more than 0"),
        (["device=cpu", "--ship"], "a rehearsal on a CPU is no GPU's result"),
    ],
)
def test_bad_words_end_with_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_first.main(words) == 2
    assert sentence in capsys.readouterr().err


def test_without_a_gpu_it_says_how_to_rehearse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(monkeypatch, None)
    gpus.survey.cache_clear()
    assert gpu_first.main([]) == 2
    gpus.survey.cache_clear()
    assert 'there is no CUDA device here; rehearse with ARGS="device=cpu"' in capsys.readouterr().err


def test_results_that_cannot_be_written_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path / "file"))
    assert gpu_first.main(["device=cpu"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_rehearsal_keeps_its_records_apart_and_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path))
    assert gpu_first.main(["device=cpu", "--parts", "auto"]) == 0
    said = capsys.readouterr().out
    assert "Rehearsal on a CPU: nothing here is a GPU result" in said
    assert "| auto | ok |" in said
    (written,) = tmp_path.iterdir()
    assert [path.name for path in written.iterdir()] == [state.REHEARSAL]
    kept = json.loads((written / state.REHEARSAL / state.NAME).read_text())
    assert kept["rehearsal"]
    assert kept["parts"]["auto"]["found"]["bench"] == "auto"
    (record,) = kept["parts"]["auto"]["records"]
    assert (written / state.REHEARSAL / "results" / record).exists()


# What was promised.


def of_a_gpu(ratio: float = 1.0, eager: float = 7.0, host_us: float = 3.0) -> State:
    """What a GPU might leave."""

    def value(median: float) -> dict[str, Any]:
        return {"median": median, "low": median, "high": median, "n": 50, "spread": "5 to 95 %"}

    cases = [{"n": n, "fused_over_add": value(ratio), "eager_over_fused": value(eager)} for n in SIZES]
    paper = {"compression_percent": value(2.0), "epochs_138_min": value(3.0)}
    found: dict[str, dict[str, Any]] = {
        "kernels": {"cases": cases},
        "launch": {"host_us": value(host_us)},
        "auto": {"least_torch_over_auto": 0.98},
        "paper-fp32": paper,
        "paper-tf32": paper,
    }
    parts = {name: Result("ok", found=what, tail="secret") for name, what in found.items()}
    parts |= {f"training-{precision}": Result("ok", spent_s=180.0) for precision in ("fp32", "tf32")}
    return State("NVIDIA H200", False, parts=parts)


def words(found: State) -> dict[str, str]:
    return {outcome.promise.text: outcome.word for outcome in promises.outcomes(found)}


def test_a_promise_is_met_or_not_by_its_median_and_decides_the_exit_code() -> None:
    assert set(words(of_a_gpu()).values()) == {"met"}
    assert gpu_first.verdict(of_a_gpu()) == 0
    for missed in (of_a_gpu(ratio=1.4), of_a_gpu(eager=5.0), of_a_gpu(host_us=31.0)):
        assert "not met" in words(missed).values()
        assert gpu_first.verdict(missed) == 1
    at_middle = words(of_a_gpu(ratio=1.4))
    assert at_middle["fused step / in-place add, 14.7M"] == "met"
    assert at_middle["fused step / in-place add, 25.6M"] == "not met"


def test_what_did_not_run_is_not_measured_and_what_was_not_said_has_failed() -> None:
    waiting = of_a_gpu()
    del waiting.parts["training-tf32"]
    text = "138 epochs of VGG-16, tf32, the whole command"
    assert words(waiting)[text] == "not measured"
    assert "| not measured: training-tf32 has not run yet |" in page.summary(waiting, PARTS)
    assert gpu_first.verdict(waiting) == 0
    silent = of_a_gpu()
    silent.parts["kernels"] = Result("ok")
    assert gpu_first.verdict(silent) == 1


def test_the_seconds_of_a_run_that_was_measured_before_are_no_measurement(tmp_path: Path) -> None:
    """`run` then ends in seconds, and says so in words that the code of `run` still has."""
    assert REUSED in inspect.getsource(run_command)
    kept = call(tmp_path, fake("training-fp32", f"print({REUSED!r} + ' measures again')"), OK)
    assert kept.parts["training-fp32"].reused
    assert not kept.parts["ok"].reused
    found = of_a_gpu()
    found.parts["training-fp32"] = kept.parts["training-fp32"]
    assert words(found)["138 epochs of VGG-16, fp32, the whole command"] == "not measured"
    assert gpu_first.verdict(found) == 0


def test_nothing_of_a_rehearsal_is_measured() -> None:
    rehearsed = of_a_gpu(ratio=9.0)
    rehearsed.rehearsal = True
    assert set(words(rehearsed).values()) == {"not measured"}
    assert gpu_first.verdict(rehearsed) == 0
    assert state.name_of("NVIDIA H200", True) == state.REHEARSAL
    assert state.name_of("NVIDIA H200", False) == "nvidia-h200"


def test_what_is_shipped_has_the_numbers_and_nothing_that_was_printed_beside_them() -> None:
    shipped = state.public(of_a_gpu())
    assert not any(part.tail for part in shipped.parts.values())
    assert shipped.parts["kernels"].found["cases"]


# What is carried to a machine without a network.


@pytest.mark.parametrize("words", [("--python", "2.7"), ("--python", "3"), ("--torch", "1.8")])
def test_wheels_for_what_this_does_not_run_on_are_refused(
    words: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["wheels", "--list", *words])
    with pytest.raises(SystemExit, match="2"):
        wheels.main()
    assert " ".join(words) in capsys.readouterr().err


@pytest.mark.parametrize(("torch", "torchvision"), [("2.11", "0.26"), ("2.14", "0.29")])
def test_the_wheels_are_all_that_runs_and_tests_need_beyond_what_is_there(
    torch: str, torchvision: str
) -> None:
    lines = wheels.carried("3.12", torch, wheels.THERE)
    names = {line.partition("=")[0] for line in lines}
    assert {"hydra-core", "submitit", "greenlet", "msgspec", "pytest", "antlr4-python3-runtime"} <= names
    assert not names & {"torch", "triton", "pandas", "numpy", "matplotlib", "mypy", wheels.PROJECT}
    assert {name for name in names if name.startswith("nvidia")} <= {"nvidia-ml-py"}  # not what torch brings
    assert f"torchvision=={torchvision}.*" in lines
    there = set(wheels.needed(wheels.THERE, "3.12")) | set(wheels.CHECKS)
    assert set(wheels.needed([f"{wheels.PROJECT}[train]"], "3.12")) <= names | there | {wheels.PROJECT}
