"""A GPU's first minutes: a list of benchmarks, figures and trainings."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import ge, le
from pathlib import Path
from typing import Any, Literal

from analysis.pictures.numbers import format_with_interval
from analysis.records.files import write_atomic
from analysis.records.store import utc_now
from analysis.stats import Estimate
from experiments.bench._gpu_parts import PARTS, PROMISES, GpuPart, GpuPromise
from experiments.bench._runner import Bench, Record, Stopped, newest, rendered
from experiments.config import code_version
from experiments.config.folders import ROOT, Folders
from experiments.launch.local import EndSignals
from slurm import environment, gpus
from slurm.worker_process import open_lifeline, prepare_child_process
from sparsify.ranges import describe_unknown

REHEARSAL = "rehearsal-cpu"
BAD = ("failed", "too long")  # a part that ended so has not shown what it is there for
MET, NOT_MET, NOT_MEASURED = "met", "not met", "not measured"
GRACE_S = 20.0  # that a part gets to save, once it is told to end
LEAST_S = 60.0  # that a part which resumes is worth starting for
TAIL_LINES = 12
POLL_S = 0.1
REUSED = "already measured; --force"  # says `python -m experiments run` of a run that it did not make
DEVICE = "device=cpu"


def gpu_first(
    settings: Sequence[str] = (),
    *,
    plan: bool = False,
    parts: str = "",
    device: Literal["cuda", "cpu"] = "cuda",
) -> Bench | int:
    """A GPU's first minutes; with device=cpu a rehearsal of them on a CPU, at toy size.

    Parts that ended well are not run again, so several short calls go on where the last one stopped:
    `make gpu-first ARGS="--minutes 9"`. What was found lies in results/gpu-first/<device>: a record of each
    part, its log, and the summary.

    Args:
        settings: device=cpu, as it is said to the other commands.
        plan: print the parts with their minutes, and end.
        parts: these only, with commas.
        device: cpu for a rehearsal, at toy size.
    """
    if strangers := [word for word in settings if word != DEVICE]:
        raise ValueError(f"gpu-first takes {DEVICE}, and no {strangers[0]}")
    rehearsal, every = device == "cpu" or bool(settings), {part.name: part for part in PARTS}
    named = parts.split(",") if parts else []
    for name in named:
        if name not in every:
            raise ValueError(describe_unknown("part", name, list(every)))
    if plan:
        print(planned([part for part in PARTS if not named or part.name in named], rehearsal))
        return 0
    names = (
        ["CPU"] if rehearsal else [gpu.name for gpu in gpus.gpus_by_bus_id().values()]
    )  # torch takes seconds
    if not names:
        raise ValueError('there is no CUDA device here; rehearse with ARGS="device=cpu"')
    name = names[0]
    slug = REHEARSAL if rehearsal else "-".join(re.findall(r"[a-z0-9]+", name.lower()))
    folder = Folders().results / "gpu-first" / slug
    variables = environment.all_variables()
    if rehearsal:  # its records are toys and stay with it; a GPU that is here is not for it
        variables |= {"CUDA_VISIBLE_DEVICES": "", "SPARSIFY_RESULTS": str(folder / "results")}
    return GpuCall(every, name, rehearsal, folder, variables, named).bench()


@dataclass
class GpuCall:
    """One call: which parts are due, which fit into its minutes, and what became of each."""

    parts: Mapping[str, GpuPart]
    name: str
    rehearsal: bool
    folder: Path  # of this device's results
    variables: Mapping[str, str]  # of the parts' processes
    named: Collection[str] = ()  # parts that were asked for alone: they are tried again where they failed
    grace_s: float = GRACE_S
    limit_s: float = 0.0  # of the part that begins

    def bench(self) -> Bench:
        """The parts as cases of a benchmark."""
        return Bench(
            about={"at": utc_now(), "device": "cpu" if self.rehearsal else "cuda", "name": self.name}
            | code_version.origin(),
            cases=[{"part": name} for name in self.parts if not self.named or name in self.named],
            measure=self.measure,
            text=lambda rows: "\n".join(map(ended, rows)),
            settled=self.settled,
            waits=self.waits,
            draw=self.summarise,
            public=lambda row: row | {"tail": "", "log": ""},  # what commands print may name this machine
            not_shipped="a rehearsal on a CPU is no GPU's result" if self.rehearsal else "",
            fails=lambda rows: has_failed(self.found().values()),
            folder=os.path.relpath(self.folder, Folders().results),
        )

    def settled(self, rows: Sequence[Record]) -> bool:
        """Tell whether an earlier result stands: a success, or a failure of this very code."""
        earlier = rows[-1]
        is_final = earlier["state"] == "failed" or (
            earlier["state"] == "too long" and not self.parts[earlier["part"]].resumable
        )
        return bool(earlier["state"] == "ok") or (
            is_final and earlier["code"] == code_version.digest() and earlier["part"] not in self.named
        )

    def waits(self, case: Record, left_s: float) -> str:
        """The reason why a part does not begin: what is left of this call's minutes does not do."""
        part = self.parts[case["part"]]
        expected_min, limit_min = part.minutes(self.rehearsal)
        least_s = min(60 * expected_min, LEAST_S) if part.resumable else 60 * expected_min
        self.limit_s = min(60 * limit_min, left_s - self.grace_s)
        if left_s - self.grace_s >= least_s or part.missing(self.rehearsal):
            return ""
        return f"waits for the next call, for it takes about {expected_min:g} min"

    def measure(self, case: Record) -> list[Record]:
        """Carry a part out: what became of it.

        Raises:
            Stopped: a signal came.
        """
        part = self.parts[case["part"]]
        row: Record = {"state": "skipped", "seconds": 0.0, "spent_s": 0.0, "reused": False, "found": {}}
        if why := part.missing(self.rehearsal):
            return [row | {"why": why}]
        command, log, began = part.command(self.rehearsal), self.folder / f"{part.name}.log", time.monotonic()
        print(f"{part.name}: {part.shows}\n  {shlex.join(command)}", file=sys.stderr, flush=True)
        code, told = self.carry_out(command, log)
        seconds = time.monotonic() - began
        state, why = self.judged(part, code, told)
        earlier = self.found().get(part.name, row)
        before_s = 0.0 if earlier["state"] == "ok" else earlier["spent_s"]
        lines = log.read_text(errors="replace").splitlines()
        row |= {
            "state": state,
            "why": why,
            "seconds": round(seconds, 2),
            "spent_s": round(before_s + seconds, 2),  # over all calls, where it was resumed
            "exit": code,
            # Its run was measured before it began, so its seconds say nothing.
            "reused": any(REUSED in line for line in lines),
            "found": last_object(lines),
            "tail": "" if state == "ok" else "\n".join(lines[-TAIL_LINES:]),
            "log": log.name,
        }
        if told:
            raise Stopped([row])
        return [row]

    def carry_out(self, command: Sequence[str], log: Path) -> tuple[int | None, bool]:
        """Run a command, all that it prints in `log`, until it ends, its limit is reached or a signal comes:
        its exit code, negative for a signal, None where it was told to end; and did a signal come?

        It leads a process group of its own, so that nothing of it is left behind; and on Linux it ends with
        this process, whatever ends that.
        """
        ends_at = time.monotonic() + self.limit_s
        with EndSignals() as signals, log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.variables,
                stdin=open_lifeline(),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(prepare_child_process, os.getpid(), ()),
            )
            try:
                while (code := process.poll()) is None:
                    is_over = signals.was_received or time.monotonic() > ends_at
                    if is_over:
                        process.terminate()  # it may save; the leader alone is told, which tells its workers
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(self.grace_s if is_over else POLL_S)
                    if is_over:
                        break
            finally:  # what is left of it and of its group
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, signals.was_received

    def judged(self, part: GpuPart, code: int | None, told: bool) -> tuple[str, str]:
        """The state of a part whose process has ended, and why."""
        _, limit_min = part.minutes(self.rehearsal)
        if code == 0:
            return "ok", ""
        if code is not None:
            return "failed", f"exit code {code}" if code > 0 else f"killed by signal {-code}"
        if told:
            return "interrupted", "told to end"
        if self.limit_s < 60 * limit_min:
            return "interrupted", "this call's minutes were over"
        return "too long", f"it was ended at its limit of {limit_min:g} min"

    def found(self) -> dict[str, Record]:
        """The newest record of each part."""
        return {rows[-1]["part"]: rows[-1] for rows in newest(self.folder / "records.jsonl").values()}

    def summarise(self, store: Path, folder: Path) -> Path:
        """Print what became of all parts, and write it beside the records."""
        text = summary(self.found(), self.name, self.rehearsal, self.parts.values())
        write_atomic(folder / "summary.md", text)
        print(text)
        return folder / "summary.md"


def ended(row: Record) -> str:
    """The result of a part, as it is printed."""
    why = f": {row['why']}" if row["why"] else ""
    hint = f"; --parts {row['part']} tries again" if row["state"] in BAD else ""
    took = f" ({row['seconds']:.0f} s)" if row["seconds"] else ""
    return f"{row['part']}: {row['state']}{why}{hint}{took}\n{row.get('tail', '')}".strip()


def last_object(lines: Sequence[str]) -> dict[str, Any]:
    """The JSON object that was printed last, as every benchmark does; empty where there is none."""
    for line in reversed(lines):
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith("{") and isinstance(found := json.loads(line), dict):
                return found
    return {}


def planned(parts: Sequence[GpuPart], rehearsal: bool) -> str:
    """Parts with their minutes, and the total; their command lines."""
    total = sum(part.minutes(rehearsal)[0] for part in parts)
    template, filters = "gpu_plan.md.jinja", {"said": said}
    return rendered(template, filters, parts=parts, rehearsal=rehearsal, total=total).rstrip("\n")


def said(part: GpuPart, rehearsal: bool) -> str:
    """A part's command line, with a short name for this Python."""
    words = ("python" if word == sys.executable else word for word in part.command(rehearsal))
    return f"{part.name}: {shlex.join(words)}"


def summary(
    found: Mapping[str, Record], device: str, rehearsal: bool, parts: Iterable[GpuPart] = PARTS
) -> str:
    """Results of the parts and of the promises, as Markdown."""
    others: dict[str, list[str]] = {}  # the parts that this code has not measured, by commit
    for name, row in found.items():
        if row["code"] != code_version.digest():
            others.setdefault((row["commit"] or "of no commit")[:7], []).append(name)
    return rendered(
        "gpu_first.md.jinja", {"measured": measured}, found=found, device=device, rehearsal=rehearsal,
        parts=parts, others=others,
        outcomes=[(promise, *outcome(promise, found, rehearsal)) for promise in PROMISES],
    )  # fmt: skip


def measured(value: Record) -> str:
    """A number with its spread."""
    return format_with_interval(Estimate(value["median"], value.get("low"), value.get("high")))


def outcome(
    promise: GpuPromise, found: Mapping[str, Record], rehearsal: bool
) -> tuple[Record | None, str, str]:
    """The result of a promise: number, word, and why it was not measured. On a CPU nothing is measured,
    though all can be read.
    """
    row, value = found.get(promise.part), None
    if row is None:
        why = f"{promise.part} has not run yet"
    elif row["state"] != "ok":
        why = f"{promise.part}: {row['state']}: {row['why']}"
    elif (value := promise.read(row)) is None:
        why = f"{promise.part} {'had measured its run before' if row['reused'] else 'did not say it'}"
    elif rehearsal:
        why = "a rehearsal"
    else:
        is_met = (ge if promise.at_least else le)(value["median"], promise.bound)
        return value, MET if is_met else NOT_MET, ""
    return value, NOT_MEASURED, f": {why}"


def has_failed(rows: Collection[Record]) -> bool:
    """Tell whether a part failed, missed a promise, or ended well without saying what it is there for."""
    found = {row["part"]: row for row in rows}
    rehearsal = any(row["device"] == "cpu" for row in rows)
    outcomes = [(promise.part, *outcome(promise, found, rehearsal)) for promise in PROMISES]
    ended_well = {name for name, row in found.items() if row["state"] == "ok" and not row["reused"]}
    return any(row["state"] in BAD for row in rows) or any(
        word == NOT_MET or (value is None and part in ended_well) for part, value, word, _ in outcomes
    )
