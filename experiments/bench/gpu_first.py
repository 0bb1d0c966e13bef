"""A GPU's first minutes: a list of benchmarks, figures and trainings, with targets of their results."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec import Struct, convert
from msgspec.structs import replace
from omegaconf import OmegaConf

from analysis.pictures.numbers import format_with_interval
from analysis.records.files import try_read_json_object, write_atomic, write_json
from analysis.records.store import utc_timestamp
from analysis.stats import Estimate
from experiments.bench._pages import render_template
from experiments.bench._runner import Record, check_known_names
from experiments.bench._targets import BenchmarkTarget
from experiments.config import code_version, dataset_files
from experiments.config.folders import ROOT, ResultFolders
from experiments.launch.local import EndSignalHandler
from slurm import environment, gpus
from slurm.worker_process import die_with_parent_and_block_signals, open_lifeline_pipe

REHEARSAL = "rehearsal-cpu"
REHEARSAL_LIMIT_MIN = 5.0  # of a part, on two idle cores
FAILURES = ("failed", "too long")  # states of a part that has not shown its result
GRACE_S = 20.0  # that a part gets to save, once it is told to end
MIN_S_OF_RESUMABLE_PART = 60.0  # for less it is not worth starting
TAIL_LINES = 12
POLL_S = 0.1
TOLD_TO_END = "told to end"
REUSED = "already measured; --force"  # says `python -m experiments run` of a run that it did not make
DEVICE = "device=cpu"


class GpuTarget(BenchmarkTarget, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A bound on a number that a part prints last, or on `minutes`, of the whole part over all its calls."""

    text: str
    unit: str
    predicted: str  # before the first GPU, from counts of bytes, launches and instructions


class GpuPart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A command that runs as a process of its own, and a small one for rehearsals."""

    name: str
    shows: str
    command: str  # words of `python -m experiments`; or of Python, where they begin with -
    rehearsal: str
    expected_min: float  # estimated
    limit_min: float  # after which it is told to end
    rehearsal_min: float = 0.2
    is_resumable: bool = False  # told to end, it saves, and goes on from there when it is run again
    wrapper: str = ""  # a program that runs it, with its words
    packages: tuple[str, ...] = ()  # of Python, that it needs
    programs: tuple[str, ...] = ()  # that it needs
    needs_cifar10: bool = False  # offline, nothing can be downloaded in a GPU's minutes
    targets: tuple[GpuTarget, ...] = ()

    def as_rehearsal(self) -> GpuPart:
        """Return the part at toy size."""
        return replace(
            self, command=self.rehearsal, expected_min=self.rehearsal_min, limit_min=REHEARSAL_LIMIT_MIN,
            wrapper="", needs_cifar10=False,
        )  # fmt: skip

    @property
    def process_command(self) -> list[str]:
        """The command of the process."""
        words = shlex.split(self.command)
        module = words if words[0].startswith("-") else ["-m", "experiments", *words]
        return [*shlex.split(self.wrapper), sys.executable, *module]

    @property
    def command_text(self) -> str:
        """The command, with a short name for this Python."""
        return shlex.join("python" if word == sys.executable else word for word in self.process_command)

    def explain_missing_requirement(self) -> str:
        """Return why the part can't be run here; empty where it can."""
        for name in self.packages:
            if not find_spec(name):
                return f"the Python package {name} is not installed"
        for name in self.programs:
            if not shutil.which(name):
                return f"{name} is not installed, or not on PATH"
        if self.needs_cifar10 and not dataset_files.has_files(
            dataset_files.resolve_data_root(None), "cifar10"
        ):
            return "CIFAR-10 was not found: set DATA_ROOT to the folder that holds it"
        return ""


_file: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("gpu_first.yaml")), resolve=True)
PARTS = convert(_file["parts"], tuple[GpuPart, ...])


def gpu_first(
    settings: Sequence[str] = (),
    *,
    plan: bool = False,
    parts: str = "",
    device: Literal["cuda", "cpu"] = "cuda",
) -> GpuSession | int:
    """Run a GPU's first minutes; with device=cpu a rehearsal of them on a CPU, at toy size.

    Parts that ended well are not run again, so several short calls go on where the last one stopped:
    `make gpu-first ARGS="--minutes 9"`. The results lie in results/gpu-first/<device>: a record of each
    part, its log, and the summary.

    Args:
        settings: device=cpu, as other commands take it.
        plan: print the parts with their minutes, and end.
        parts: names of parts to run, with commas; by default all.
        device: cuda, or cpu for a rehearsal at toy size.
    """
    unknown = [word for word in settings if word != DEVICE]
    if unknown:
        raise ValueError(f"gpu-first takes {DEVICE}, and no {unknown[0]}")
    is_rehearsal = device == "cpu" or bool(settings)
    chosen_parts = parts.split(",") if parts else []
    check_known_names("part", chosen_parts, [part.name for part in PARTS])
    all_parts = [part.as_rehearsal() if is_rehearsal else part for part in PARTS]
    if plan:
        planned_parts = [part for part in all_parts if not chosen_parts or part.name in chosen_parts]
        total_min = sum(part.expected_min for part in planned_parts)
        print(render_template("gpu_plan.md.jinja", {}, parts=planned_parts, total_min=total_min).rstrip("\n"))
        return 0
    # Not by torch, which takes seconds.
    devices = ["CPU"] if is_rehearsal else [gpu.name for gpu in gpus.gpus_by_bus_id().values()]
    if not devices:
        raise ValueError('there is no CUDA device here; rehearse with ARGS="device=cpu"')
    slug = REHEARSAL if is_rehearsal else "-".join(re.findall(r"[a-z0-9]+", devices[0].lower()))
    folder = ResultFolders().results / "gpu-first" / slug
    variables = environment.all_variables()
    if is_rehearsal:  # its records are toys and stay with it; a GPU that is here is not for it
        variables |= {"CUDA_VISIBLE_DEVICES": "", "SPARSIFY_RESULTS": str(folder / "results")}
    return GpuSession(all_parts, devices[0], folder, variables, chosen_parts, is_rehearsal)


class ProcessEnd(NamedTuple):
    """The end of a part's process."""

    exit_code: int | None  # negative for a signal; None if it was told to end
    was_interrupted: bool  # by a signal to this process


@dataclass
class GpuSession:
    """A call of `gpu-first`: it runs the parts that are due and fit into its minutes."""

    all_parts: Sequence[GpuPart]
    device_name: str
    folder: Path  # of this device's results
    variables: Mapping[str, str]  # of the parts' processes
    chosen_parts: Collection[str] = ()  # these parts only; they are tried again where they failed
    is_rehearsal: bool = False
    grace_s: float = GRACE_S

    def run(self, name: str, *, force: bool = False, ship: bool = False, minutes: float | None = None) -> int:
        """Run the parts, write their records and the summary, print all of it, and return the exit code.

        Args:
            name: of the benchmark.
            force: run parts again that ended well.
            ship: copy records and summary into results/shipped, without what commands printed.
            minutes: of this call; parts that do not fit wait for the next one.
        """
        if ship and self.is_rehearsal:
            raise ValueError("--ship: a rehearsal on a CPU is no GPU's result")
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
        was_interrupted = False
        for part in self.all_parts:
            if was_interrupted or (self.chosen_parts and part.name not in self.chosen_parts):
                continue
            record = try_read_json_object(self.record_path(part.name))
            if record is None or force or not self.is_settled(part, record):
                limit_s = min(60 * part.limit_min, deadline_s - time.monotonic() - self.grace_s)
                needed_s = 60 * part.expected_min
                if part.is_resumable:
                    needed_s = min(needed_s, MIN_S_OF_RESUMABLE_PART)
                if limit_s < needed_s and not part.explain_missing_requirement():
                    print(
                        f"{part.name}: waits for the next call, for it takes about {part.expected_min:g} min"
                    )
                    continue
                record = self.run_part(part, limit_s, record)
                write_json(self.record_path(part.name), record)
                was_interrupted = record["why"] == TOLD_TO_END
            print(describe_outcome(record), flush=True)
        records = self.read_record_by_part()
        summary = render_summary(records, self.all_parts, self.device_name, self.is_rehearsal)
        write_atomic(self.folder / "summary.md", summary)
        print(f"\n{self.folder}\n\n{summary}")
        if ship:
            self.ship_records(records, summary)
        if was_interrupted:
            raise KeyboardInterrupt
        return 1 if has_any_failed(records, self.all_parts) else 0

    def record_path(self, part: str) -> Path:
        return self.folder / f"{part}.json"

    def read_record_by_part(self) -> dict[str, Record]:
        """Return the newest record of each part that has one, by its name."""
        records = {part.name: try_read_json_object(self.record_path(part.name)) for part in self.all_parts}
        return {name: record for name, record in records.items() if record is not None}

    def is_settled(self, part: GpuPart, record: Record) -> bool:
        """Tell whether an earlier result stands: a success, or a failure of this very code."""
        if record["state"] == "ok":
            return True
        is_final = record["state"] == "failed" or (record["state"] == "too long" and not part.is_resumable)
        return (
            is_final and record["code"] == code_version.code_digest() and part.name not in self.chosen_parts
        )

    def run_part(self, part: GpuPart, limit_s: float, earlier: Record | None) -> Record:
        """Run a part, and return its record.

        Args:
            limit_s: seconds after which it is told to end.
            earlier: its last record.
        """
        record: Record = {
            "part": part.name, "at": utc_timestamp(), "name": self.device_name,
            "device": "cpu" if self.is_rehearsal else "cuda", "code": code_version.code_digest(),
            **code_version.git_state(), "state": "skipped",
            "why": part.explain_missing_requirement(), "seconds": 0.0, "spent_s": 0.0,
            "reused": False, "found": {},
        }  # fmt: skip
        if record["why"]:
            return record
        log = self.folder / f"{part.name}.log"
        start_s = time.monotonic()
        print(f"{part.name}: {part.shows}\n  {part.command_text}", file=sys.stderr, flush=True)
        end = self.run_process(part.process_command, log, limit_s)
        seconds = time.monotonic() - start_s
        state, why = end_state_and_reason(part, end, limit_s)
        earlier_s = earlier["spent_s"] if earlier and earlier["state"] != "ok" else 0.0
        lines = log.read_text(errors="replace").splitlines()
        return (
            record
            | {
                "state": state,
                "why": why,
                "seconds": round(seconds, 2),
                "spent_s": round(earlier_s + seconds, 2),  # over all calls, where it was resumed
                "exit": end.exit_code,
                # Its run was measured before it began, so its seconds say nothing.
                "reused": any(REUSED in line for line in lines),
                "found": find_last_json_object_or_empty(lines),
                "tail": "" if state == "ok" else "\n".join(lines[-TAIL_LINES:]),
                "log": log.name,
            }
        )

    def run_process(self, command: Sequence[str], log: Path, limit_s: float) -> ProcessEnd:
        """Run a command with its output in `log`, until it ends, its limit is reached or a signal comes.

        It leads a process group of its own, so that nothing of it is left behind; and on Linux it ends with
        this process, whatever ends that.
        """
        deadline_s = time.monotonic() + limit_s
        with EndSignalHandler() as signals, log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.variables,
                stdin=open_lifeline_pipe(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent_and_block_signals, os.getpid(), ()),
            )
            try:
                is_over = False
                while (exit_code := process.poll()) is None and not is_over:
                    is_over = signals.was_received or time.monotonic() > deadline_s
                    if is_over:
                        process.terminate()  # it may save; the leader alone is told, which tells its workers
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(self.grace_s if is_over else POLL_S)
                if is_over:
                    exit_code = None
            finally:  # what is left of it and of its group
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return ProcessEnd(exit_code, signals.was_received)

    def ship_records(self, records: Mapping[str, Record], summary: str) -> None:
        """Copy records and summary into results/shipped; the output of commands may name this machine."""
        folder = ResultFolders().shipped / "gpu-first" / self.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, record in records.items():
            write_json(folder / f"{name}.json", record | {"tail": "", "log": ""})
        write_atomic(folder / "summary.md", summary)
        print(f"shipped {folder}")


def end_state_and_reason(part: GpuPart, end: ProcessEnd, limit_s: float) -> tuple[str, str]:
    """Return the state of a part whose process has ended, and the reason."""
    if end.exit_code == 0:
        return "ok", ""
    if end.exit_code is not None:
        is_signal = end.exit_code < 0
        return "failed", f"killed by signal {-end.exit_code}" if is_signal else f"exit code {end.exit_code}"
    if end.was_interrupted:
        return "interrupted", TOLD_TO_END
    if limit_s < 60 * part.limit_min:
        return "interrupted", "this call's minutes were over"
    return "too long", f"it was ended at its limit of {part.limit_min:g} min"


def describe_outcome(record: Record) -> str:
    """Return the outcome of a part, as it is printed."""
    why = f": {record['why']}" if record["why"] else ""
    hint = f"; --parts {record['part']} tries again" if record["state"] in FAILURES else ""
    seconds = f" ({record['seconds']:.0f} s)" if record["seconds"] else ""
    return f"{record['part']}: {record['state']}{why}{hint}{seconds}\n{record.get('tail', '')}".strip()


def find_last_json_object_or_empty(lines: Sequence[str]) -> Record:
    """Return the JSON object that was printed last, as every benchmark does; empty where there is none."""
    for line in reversed(lines):
        with contextlib.suppress(json.JSONDecodeError):
            content = json.loads(line)
            if isinstance(content, dict):
                return content
    return {}


class TargetOutcome(NamedTuple):
    """A target of a part, and what became of it."""

    target: GpuTarget
    value: Estimate | None
    is_met: bool | None  # None if it was not measured
    why_not_measured: str = ""


def judge_targets(part: GpuPart, record: Record | None) -> list[TargetOutcome]:
    """Judge the targets of a part. In a rehearsal nothing is measured, though numbers can be read."""
    return [judge_target(target, part.name, record) for target in part.targets]


def judge_target(target: GpuTarget, part: str, record: Record | None) -> TargetOutcome:
    if record is None:
        return TargetOutcome(target, None, None, f"{part} has not run yet")
    if record["state"] != "ok":
        return TargetOutcome(target, None, None, f"{part}: {record['state']}: {record['why']}")
    minutes = {} if record["reused"] else {"minutes": record["spent_s"] / 60}
    value = target.find_number(minutes | record["found"])
    if value is None:
        reason = "had measured its run before" if record["reused"] else "did not say it"
        return TargetOutcome(target, None, None, f"{part} {reason}")
    if record["device"] == "cpu":
        return TargetOutcome(target, value, None, "a rehearsal")
    return TargetOutcome(target, value, target.is_met_by_median(value))


def render_summary(
    records: Mapping[str, Record], parts: Sequence[GpuPart], device_name: str, is_rehearsal: bool
) -> str:
    """Return the results of the parts and their targets, as Markdown."""
    parts_by_commit = dict[str, list[str]]()  # parts that other code has measured
    for name, record in records.items():
        if record["code"] != code_version.code_digest():
            parts_by_commit.setdefault((record["commit"] or "of no commit")[:7], []).append(name)
    outcomes = [outcome for part in parts for outcome in judge_targets(part, records.get(part.name))]
    return render_template(
        "gpu_first.md.jinja", {"estimate": format_with_interval}, records=records, device=device_name,
        is_rehearsal=is_rehearsal, parts=parts, others=parts_by_commit, outcomes=outcomes,
    )  # fmt: skip


def has_any_failed(records: Mapping[str, Record], parts: Sequence[GpuPart]) -> bool:
    """Tell whether a part failed, missed a target, or ended well without the number of a target."""
    for part in parts:
        record = records.get(part.name)
        if record is None:
            continue
        must_have_numbers = record["state"] == "ok" and not record["reused"]
        for outcome in judge_targets(part, record):
            if outcome.is_met is False or (must_have_numbers and outcome.value is None):
                return True
        if record["state"] in FAILURES:
            return True
    return False
