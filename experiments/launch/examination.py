"""Probes on the nodes of a cluster, or on this machine, for `doctor`: started, waited for, gathered.

A probe goes the way of a run: the same options of sbatch but for its node and its time, the same setup, the
same Python, the same folder of results. A shell starts it, so that a node without Python can say so; and one
that leaves nothing at all does not see the folder.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from analysis.records import locks
from analysis.records.files import read_json_or_none, write_atomic
from experiments.config import code_version
from experiments.config.config import Config
from experiments.config.folders import ROOT, Folders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun
from experiments.launch.arrays import JobArray, JobShape, job_shape
from experiments.launch.attempt import container_config, worker_command
from experiments.launch.bad_nodes import LEDGER_FILE
from experiments.launch.diagnosis import diagnose
from experiments.launch.probe import LOCK_FILE, REQUEST_FILE, NodeFacts, ProbeRequest
from experiments.worker.orders import Orders
from slurm import commands, environment, jobs
from slurm.local import LocalWorkers
from slurm.reasons import explain_waiting
from slurm.worker_process import ORDERS_FILE, JobSpec, WorkerCommand, read_exit_codes

TIME_MIN, SIGNAL_S = 10, 30  # of a probe's job, which takes seconds
POLL_S, ASK_S = 0.5, 5.0
SETTLE_S = 15.0  # that a file may take from a node to here, once its job has ended
PROBE_SCRIPT = """# Written by `doctor`: one task of a probe.
out={folder}/${{SLURMD_NODENAME:-$(hostname)}}
mkdir -p "$out"
{python} -m experiments.launch.probe {folder} >"$out/said$SLURM_PROCID" 2>&1
echo $? >"$out/exit$SLURM_PROCID"
"""


@dataclass
class NodeProbe:
    """What became of the probe of one node."""

    node: str
    tasks: int
    job: str = ""
    facts: tuple[NodeFacts, ...] = ()
    why: str = ""  # of what it did not tell
    is_over: bool = False
    is_alone: bool | None = None  # has its job the node for itself? None: SLURM was not asked
    submitted_at: float = 0.0  # by this machine's clock
    seen_at: float = 0.0

    @property
    def is_well(self) -> bool:
        """Tell whether all its tasks told all."""
        return len(self.facts) == self.tasks


class MeetingResult(NamedTuple):
    """How workers of two nodes, or of one, became a group."""

    nodes: tuple[str, ...]
    interfaces: tuple[str | None, ...]  # of each worker; None: by the host's name
    why: str = ""  # where they did not


class Examination:
    """Probes for the runs that this config stands for.

    Args:
        wait_s: for probes; those that have not begun by then are cancelled.
    """

    def __init__(self, config: Config, folders: Folders, wait_s: float, say: Callable[[str], None]) -> None:
        self.config, self.say, self.wait_s = config, say, wait_s
        self.folder = folders.scratch / "doctor" / time.strftime(f"%Y%m%d-%H%M%S-{time.time_ns() % 1000:03d}")
        self.folder.mkdir(parents=True)
        self.planned = PlannedRun(config, None)
        self.code = code_version.copy_into(folders.code) if self._slurms else ROOT
        self.command = worker_command(self.planned, folders, self.code)
        ports = config.cluster.open_ports() if isinstance(config.cluster, SlurmCluster) else None
        asked = ProbeRequest(container_config(config), (ports.start, ports.stop) if ports else None)
        write_atomic(self.folder / REQUEST_FILE, msgspec.json.encode(asked))
        (self.folder / LOCK_FILE).touch()

    @property
    def _slurms(self) -> bool:
        return isinstance(self.config.cluster, SlurmCluster)

    # Here.

    def here(self) -> NodeProbe:
        """The probe of this machine."""
        name = environment.node_name()
        (own := self.folder / name).mkdir()
        probed = NodeProbe(name, 1, submitted_at=time.time())
        with self._locked():
            words = [sys.executable, "-m", "experiments.launch.probe", str(self.folder)]
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        (own / "said0").write_text(done.stderr)
        (own / "exit0").write_text(str(done.returncode))
        self._gather(probed)
        return probed

    def meet_here(self) -> MeetingResult:
        """A group of two workers of this machine."""
        orders = self._meeting(True)
        workers = LocalWorkers(self._meeters(), orders, self.folder, 2)
        while (codes := workers.poll()) is None:
            time.sleep(POLL_S)
        return self._met((environment.node_name(),), codes, 2, self.folder)

    # By SLURM.

    def nodes(self, names: Sequence[str]) -> list[NodeProbe]:
        """The probes of these nodes, once all have ended or the time is over."""
        shape = job_shape(self._cluster, self.config)
        shape = shape._replace(nodes=1)
        probes = [NodeProbe(name, shape.tasks_per_node) for name in names]
        python = shlex.quote(JobArray(self._cluster, shape, []).python)
        script = self.folder / "probe.sh"
        script.write_text(PROBE_SCRIPT.format(folder=shlex.quote(str(self.folder)), python=python))
        outside = msgspec.structs.replace(self.command, container=None)  # of any that SLURM would make
        with self._locked(), self._cancelling(probes):
            for probe in probes:
                try:
                    probe.submitted_at = time.time()
                    probe.job = self._submit(shape, probe.node, ["bash", str(script)], outside)
                except ValueError as error:
                    probe.is_over, probe.why = True, str(error)
            self._await(probes)
        return probes

    @contextlib.contextmanager
    def _cancelling(self, probes: Sequence[NodeProbe]) -> Iterator[None]:
        """Whatever ends the waiting early, no probe is left behind."""
        try:
            yield
        finally:
            if left := [probe.job for probe in probes if probe.job and not probe.is_over]:
                commands.cancel_jobs(left)

    def meet(self, names: Sequence[str]) -> MeetingResult:
        """A group of workers of these nodes, as many on each as runs have."""
        shape = job_shape(self._cluster, self.config)._replace(nodes=len(names))
        size = shape.nodes * shape.tasks_per_node
        self._meeting(False, size)
        spec = self.folder / "meet.json"
        JobSpec([str(self.folder)], self._meeters(), size, 0).write(spec)
        call = [self.command.python, "-u", "-m", "slurm.task", str(spec)]
        try:
            job = self._submit(shape, ",".join(names), call, self.command)
        except ValueError as error:
            return MeetingResult(tuple(names), (), str(error))
        deadline, start, waiting = time.monotonic() + self.wait_s, self.folder / f"start-{job}-0", ""
        try:
            while len(read_exit_codes(start)) < size and time.monotonic() < deadline:
                queued = jobs.unfinished_jobs_by_id([job]).get(job)
                waiting = queued.reason if queued and queued.state == "PENDING" else ""
                if queued is None:
                    break
                time.sleep(ASK_S)
        finally:
            with contextlib.suppress(commands.SlurmError):
                commands.cancel_jobs([job])
        if waiting and not start.is_dir():
            why = f"not known: their job waits for more than {self.wait_s / 60:g} min"
            return MeetingResult(tuple(names), (), f"{why} ({explain_waiting(waiting)})")
        time.sleep(0 if len(read_exit_codes(start)) == size else ASK_S)  # for the last notes
        return self._met(tuple(names), read_exit_codes(start), size, start)

    @property
    def _cluster(self) -> SlurmCluster:
        assert isinstance(self.config.cluster, SlurmCluster)
        return self.config.cluster

    def _submit(self, shape: JobShape, nodes: str, command: Sequence[str], worker: WorkerCommand) -> str:
        """Submit one job to these nodes, whose tasks carry out a command, and return its id."""
        from slurm.submit import submit_script  # submitit comes with it

        cluster = replace(self._cluster, time_min=TIME_MIN, signal_delay_s=SIGNAL_S, exclude=None)
        script = JobArray(cluster, shape, []).script("doctor", self.folder, self.folder / LEDGER_FILE, worker)
        script = replace(
            script,
            options={**script.options, "requeue": None, "no-requeue": True, "nodelist": nodes},
            setup=[*cluster.setup, code_version.WITHOUT_BYTECODE],
            command=command,
            teardown=[],
        )
        return submit_script(script, self.folder, self.say).id

    def _await(self, probes: Sequence[NodeProbe]) -> None:
        deadline, asked, gone = time.monotonic() + self.wait_s, 0.0, dict[str, float]()
        while waited := [probe for probe in probes if not probe.is_over]:
            for probe in waited:
                self._gather(probe)
                if probe.is_over:
                    self.say(f"{probe.node}: {'heard' if probe.is_well else probe.why}")
            now = time.monotonic()
            if now - asked > ASK_S:
                asked, queued = now, jobs.unfinished_jobs_by_id(probe.job for probe in waited)
                for probe in waited:
                    if not probe.is_over and probe.job not in queued:
                        gone.setdefault(probe.job, now)
                    if not probe.is_over and now - gone.get(probe.job, now) > SETTLE_S:
                        self._close_silent(probe)
                    if not probe.is_over and now > deadline:
                        self._close_waiting(probe, queued)
            time.sleep(POLL_S)

    def _close_silent(self, probe: NodeProbe) -> None:
        probe.is_over = True
        said = describe_job_end(probe.job)
        probe.why = (
            f"its job has ended{said} and left nothing in {self.folder}, so the node does not see the "
            "results folder; let SPARSIFY_RESULTS be on a file system that all nodes share with this machine"
        )

    def _close_waiting(self, probe: NodeProbe, queued: dict[str, jobs.JobReport]) -> None:
        probe.is_over = True
        job = queued.get(probe.job)
        waits = job is not None and job.state == "PENDING"
        reason = explain_waiting(job.reason) if job and waits else "it runs, and says nothing"
        probe.why = f"not known: its probe has not answered within {self.wait_s / 60:g} min ({reason})"
        with contextlib.suppress(commands.SlurmError):
            commands.cancel_jobs([probe.job])

    # What probes left.

    def _gather(self, probe: NodeProbe) -> None:
        own = self.folder / probe.node
        ends = list(own.glob("exit*"))
        if len(ends) < probe.tasks or not all(path.read_text().strip() for path in ends):
            return
        probe.is_over, probe.seen_at = True, time.time()
        found = sorted(own.glob("facts*.json"))
        probe.facts = tuple(msgspec.json.decode(path.read_bytes(), type=NodeFacts) for path in found)
        if probe.job:
            probe.is_alone = commands.has_exclusive_nodes(probe.job)
        if not probe.is_well:
            said = [text for path in sorted(own.glob("said*")) if (text := path.read_text().strip())]
            probe.why = explain_python_failure("".join(said[:1]), self._python)

    @property
    def _python(self) -> str:
        return (self._slurms and self._cluster.python) or sys.executable

    def _meeters(self) -> WorkerCommand:
        """The command of workers that only meet."""
        words = self.command.command
        return msgspec.structs.replace(
            self.command, command=[words[0], "-u", "-m", "experiments.worker.meet"]
        )

    def _meeting(self, here: bool, size: int = 2) -> str:
        config = replace(self.config, workers=size)
        interface = getattr(config.cluster, "interface", None)
        orders = Orders(config.as_dict(), str(self.folder), same_host=here, interface=interface)
        orders.write(self.folder / ORDERS_FILE)
        return str(self.folder / ORDERS_FILE)

    def _met(self, nodes: tuple[str, ...], codes: dict[int, int], size: int, start: Path) -> MeetingResult:
        notes = [read_json_or_none(path) or {} for path in sorted(start.glob("met*.json"))]
        if len(notes) == size and all(note.get("met") == size for note in notes):
            return MeetingResult(nodes, tuple(note.get("interface") for note in notes))
        return MeetingResult(
            nodes, (), diagnose(start, codes, size)[1] if start.is_dir() else "its job left nothing"
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """A lock that nodes should see."""
        path = self.folder / LOCK_FILE
        with path.open("r+b") as file:  # to lock a file, NFS asks that it may be written
            locks.try_flock(path, file.fileno())  # where it has none, nodes find the same
            yield


def explain_python_failure(said: str, python: str) -> str:
    """Why a probe did not tell its facts, from what its Python printed, or the shell about it."""
    last = (said.splitlines() or ["it printed nothing"])[-1].strip()
    if any(words in last for words in ("No such file", "not found", "Permission denied")):
        return (
            f"there is no Python {python} that starts ({last.rpartition(': ')[2]}); keep the environment on "
            "a file system that all nodes share, or name theirs with cluster.python"
        )
    if "ModuleNotFoundError" in last or "ImportError" in last:
        return (
            f"{python} lacks a package ({last}); `make .venv/.train` installs all, or cluster.python names "
            "another"
        )
    return f"{python} fails there: {last}"


def describe_job_end(job: str) -> str:
    """What SLURM still knows of a job's end, as ' (FAILED, exit code 0:53)'; empty where it has forgotten."""
    try:
        said = commands.run_command("scontrol", "--oneliner", "show", "job", job).split()
    except commands.SlurmError:
        return ""
    facts = dict(word.partition("=")[::2] for word in said if "=" in word)
    return f" ({facts.get('JobState', '')}, exit code {facts.get('ExitCode', '')})"
