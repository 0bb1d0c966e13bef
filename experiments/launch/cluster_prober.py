"""Probes of the nodes of a cluster, or of this machine, for `doctor`.

A probe is started as a run is: with the sbatch options of a run, but for its node and its time, and with its
setup, Python and results folder. A shell starts it, so that a node without Python can say so. A node that
leaves no file at all does not see the results folder.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from analysis.records import locks
from analysis.records.files import try_read_json_object, write_atomic
from experiments.config import code_version
from experiments.config.config import Config
from experiments.config.folders import ROOT, ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun
from experiments.launch.arrays import JobArray, JobShape, job_shape
from experiments.launch.attempt import container_config, worker_command
from experiments.launch.bad_nodes import LEDGER_FILE
from experiments.launch.diagnosis import diagnose_failed_start
from experiments.launch.probe import LOCK_FILE, REQUEST_FILE, ProbeRequest, TaskFacts, collect_task_facts
from experiments.worker.orders import RunOrders
from slurm import commands, environment, jobs
from slurm.local import LocalWorkers
from slurm.reasons import explain_pending_reason
from slurm.worker_process import ORDERS_FILE, JobSpec, WorkerCommand, read_exit_code_by_rank

TIME_MIN = 10  # of a probe's job, which takes seconds
SIGNAL_S = 30
POLL_S = 0.5
ASK_S = 5.0
SETTLE_S = 15.0  # that a file may take from a node to here, once its job has ended
PROBE_SCRIPT = """# Written by `doctor`: one task of a probe.
out={folder}/${{SLURMD_NODENAME:-$(hostname)}}
mkdir -p "$out"
{python} -m experiments.launch.probe {folder} >"$out/said$SLURM_PROCID" 2>&1
echo $? >"$out/exit$SLURM_PROCID"
"""


@dataclass
class NodeProbe:
    """A probe of one node: its job, and the facts that its tasks found."""

    node: str
    num_tasks: int
    job_id: str = ""
    facts: tuple[TaskFacts, ...] = ()
    why_missing: str = ""  # a sentence, where facts are missing
    is_over: bool = False
    is_alone: bool | None = None  # has its job the node for itself? None: SLURM was not asked
    submitted_at: float = 0.0  # by this machine's clock
    seen_at: float = 0.0

    @property
    def has_all_facts(self) -> bool:
        """True if all tasks have left their facts."""
        return len(self.facts) == self.num_tasks


class GroupTestResult(NamedTuple):
    """The network interfaces by which workers of one or two nodes became a group, or why they did not."""

    nodes: tuple[str, ...]
    interfaces: tuple[str | None, ...]  # of each worker; None: by the host's name
    why: str = ""


class ClusterProber:
    """A prober of this machine and of a cluster's nodes, for the runs that a config stands for.

    Args:
        wait_s: how long to wait for probes; those that have not begun by then are cancelled.
    """

    def __init__(
        self, config: Config, folders: ResultFolders, wait_s: float, say: Callable[[str], None]
    ) -> None:
        self.config = config
        self.say = say
        self.wait_s = wait_s
        self.folder = folders.scratch / "doctor" / time.strftime(f"%Y%m%d-%H%M%S-{time.time_ns() % 1000:03d}")
        self.folder.mkdir(parents=True)
        cluster = config.cluster if isinstance(config.cluster, SlurmCluster) else None
        self.code = code_version.ensure_code_copy(folders.code) if cluster else ROOT
        self.command = worker_command(PlannedRun(config, None), folders, self.code)
        self.python = self.command.command[0]
        ports = cluster.port_range() if cluster else None
        self.request = ProbeRequest(container_config(config), (ports.start, ports.stop) if ports else None)
        write_atomic(self.folder / REQUEST_FILE, msgspec.json.encode(self.request))
        (self.folder / LOCK_FILE).touch()

    # On this machine.

    def probe_this_machine(self) -> NodeProbe:
        """Probe this machine, in this process."""
        begun_at = time.time()
        with self._hold_lock():
            facts = collect_task_facts(self.folder, self.request, environment.worker_place())
        return NodeProbe(
            facts.node, 1, facts=(facts,), is_over=True, submitted_at=begun_at, seen_at=time.time()
        )

    def try_group_on_this_machine(self) -> GroupTestResult:
        """Try whether two workers of this machine become a group."""
        orders = self._write_orders(same_host=True, size=2)
        workers = LocalWorkers(self._group_test_command(), orders, self.folder, 2)
        while True:
            code_by_rank = workers.poll_exit_codes()
            if code_by_rank is not None:
                return self._read_group_test((environment.node_name(),), code_by_rank, 2, self.folder)
            time.sleep(POLL_S)

    # By SLURM.

    def probe_nodes(self, names: Sequence[str]) -> list[NodeProbe]:
        """Probe nodes by a job for each, and return the probes once all have ended or the time is over."""
        shape = job_shape(self._cluster, self.config)._replace(nodes=1)
        probes = [NodeProbe(name, shape.tasks_per_node) for name in names]
        script = self.folder / "probe.sh"
        script.write_text(
            PROBE_SCRIPT.format(folder=shlex.quote(str(self.folder)), python=shlex.quote(self.python))
        )
        outside = msgspec.structs.replace(self.command, container=None)  # of any that SLURM would make
        with self._hold_lock():
            try:
                for probe in probes:
                    probe.submitted_at = time.time()
                    try:
                        probe.job_id = self._submit(shape, probe.node, ["bash", str(script)], outside)
                    except ValueError as error:
                        probe.is_over = True
                        probe.why_missing = str(error)
                self._await_probes(probes)
            finally:  # whatever ends the waiting early, no probe is left behind
                unfinished = [probe.job_id for probe in probes if probe.job_id and not probe.is_over]
                if unfinished:
                    commands.cancel_jobs(unfinished)
        return probes

    def try_group_on_nodes(self, names: Sequence[str]) -> GroupTestResult:
        """Try whether workers of these nodes become a group, as many on each as runs have."""
        nodes = tuple(names)
        shape = job_shape(self._cluster, self.config)._replace(nodes=len(nodes))
        size = shape.nodes * shape.tasks_per_node
        self._write_orders(same_host=False, size=size)
        spec = self.folder / "meet.json"
        JobSpec([str(self.folder)], self._group_test_command(), size, 0).write(spec)
        command = [self.command.task_python, "-u", "-m", "slurm.task", str(spec)]
        try:
            job = self._submit(shape, ",".join(nodes), command, self.command)
        except ValueError as error:
            return GroupTestResult(nodes, (), str(error))
        start = self.folder / f"start-{job}-0"
        try:
            report = self._await_job(
                job, lambda: len(read_exit_code_by_rank(start)) == size, time.monotonic() + self.wait_s
            )
        finally:
            self._try_cancel(job)
        if report is not None and report.state == "PENDING":
            why = f"not known: their job waits for more than {self.wait_s / 60:g} min"
            return GroupTestResult(nodes, (), f"{why} ({explain_pending_reason(report.reason)})")
        return self._read_group_test(nodes, read_exit_code_by_rank(start), size, start)

    @property
    def _cluster(self) -> SlurmCluster:
        assert isinstance(self.config.cluster, SlurmCluster)
        return self.config.cluster

    def _submit(self, shape: JobShape, nodes: str, command: Sequence[str], worker: WorkerCommand) -> str:
        """Submit one job to these nodes, whose tasks carry out a command, and return its id."""
        from slurm.submit import submit_script  # submitit comes with it

        cluster = replace(self._cluster, time_min=TIME_MIN, signal_delay_s=SIGNAL_S, exclude=None)
        array = JobArray(cluster, shape, [])
        script = replace(
            array.batch_script("doctor", self.folder, self.folder / LEDGER_FILE, worker),
            setup=[*cluster.setup, code_version.WITHOUT_BYTECODE],
            command=command,
            teardown=[],
        )
        options = {**script.options, "requeue": None, "no-requeue": True, "nodelist": nodes}
        return submit_script(replace(script, options=options), self.folder, self.say).id

    def _await_probes(self, probes: Sequence[NodeProbe]) -> None:
        deadline = time.monotonic() + self.wait_s
        for probe in probes:
            report = self._await_job(probe.job_id, partial(self._gather_until, probe, probes), deadline)
            if probe.is_over:
                continue
            if report is None:
                probe.why_missing = (
                    f"its job has ended{job_end_suffix(probe.job_id)} and left nothing in {self.folder}, "
                    "so the node does not see the results folder; let SPARSIFY_RESULTS be on a file system "
                    "that all nodes share with this machine"
                )
            else:
                is_waiting = report.state == "PENDING"
                reason = explain_pending_reason(report.reason) if is_waiting else "it runs, and says nothing"
                minutes = f"{self.wait_s / 60:g} min"
                probe.why_missing = f"not known: its probe has not answered within {minutes} ({reason})"
                self._try_cancel(probe.job_id)
            self._close(probe)

    def _await_job(self, job: str, is_over: Callable[[], bool], deadline: float) -> jobs.JobReport | None:
        """Wait until a job is over by its notes, or SLURM does not have it any more, or until the deadline.

        Returns:
            SLURM's report on the job at the deadline; else None.
        """
        asked_at = 0.0
        gone_at = math.inf
        while not is_over():
            now = time.monotonic()
            if now - asked_at > ASK_S:
                asked_at = now
                report = jobs.unfinished_jobs_by_id([job]).get(job)
                if report is None:
                    gone_at = min(gone_at, now)
                    if now - gone_at > SETTLE_S:
                        return None
                elif now > deadline:
                    return report
            time.sleep(POLL_S)
        return None

    def _try_cancel(self, job: str) -> None:
        with contextlib.suppress(commands.SlurmError):
            commands.cancel_jobs([job])

    def _close(self, probe: NodeProbe) -> None:
        probe.is_over = True
        self.say(f"{probe.node}: {'heard' if probe.has_all_facts else probe.why_missing}")

    # Notes of probes and workers.

    def _gather_until(self, awaited: NodeProbe, probes: Sequence[NodeProbe]) -> bool:
        """Gather the notes of all probes that have ended; return whether the awaited one is over."""
        for probe in probes:
            if not probe.is_over and self._gather(probe):
                self._close(probe)
        return awaited.is_over

    def _gather(self, probe: NodeProbe) -> bool:
        """Read the notes of a probe, and return True, if all its tasks have ended."""
        folder = self.folder / probe.node
        ends = list(folder.glob("exit*"))
        if len(ends) < probe.num_tasks or not all(path.read_text().strip() for path in ends):
            return False
        probe.seen_at = time.time()
        notes = sorted(folder.glob("facts*.json"))
        probe.facts = tuple(msgspec.json.decode(path.read_bytes(), type=TaskFacts) for path in notes)
        probe.is_alone = commands.has_exclusive_nodes(probe.job_id)
        if not probe.has_all_facts:
            outputs = (path.read_text().strip() for path in sorted(folder.glob("said*")))
            probe.why_missing = explain_python_failure(next(filter(None, outputs), ""), self.python)
        return True

    def _group_test_command(self) -> WorkerCommand:
        """Return the command of workers that only become a group."""
        words = [self.python, "-u", "-m", "experiments.worker.group_check"]
        return msgspec.structs.replace(self.command, command=words)

    def _write_orders(self, same_host: bool, size: int) -> str:
        """Write the orders of workers that become a group, and return their path."""
        config = replace(self.config, workers=size)
        interface = getattr(config.cluster, "interface", None)
        path = self.folder / ORDERS_FILE
        RunOrders(config.as_dict(), str(self.folder), same_host=same_host, interface=interface).write(path)
        return str(path)

    def _read_group_test(
        self, nodes: tuple[str, ...], code_by_rank: dict[int, int], size: int, start: Path
    ) -> GroupTestResult:
        notes = [try_read_json_object(path) or {} for path in sorted(start.glob("met*.json"))]
        if len(notes) == size and all(note.get("met") == size for note in notes):
            return GroupTestResult(nodes, tuple(note.get("interface") for note in notes))
        why = (
            diagnose_failed_start(start, code_by_rank, size).why if start.is_dir() else "its job left nothing"
        )
        return GroupTestResult(nodes, (), why)

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold a lock that nodes should see."""
        path = self.folder / LOCK_FILE
        with path.open("r+b") as file:  # to lock a file, NFS asks that it may be written
            locks.try_flock(path, file.fileno())  # where it has none, nodes find out as well
            yield


def explain_python_failure(output: str, python: str) -> str:
    """Return why a probe left no facts, from what its Python printed, or the shell about it."""
    last = (output.splitlines() or ["it printed nothing"])[-1].strip()
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


def job_end_suffix(job: str) -> str:
    """Return a job's end as SLURM knows it, as ' (FAILED, exit code 0:53)'; nothing if it has forgotten."""
    try:
        fields = commands.query_scontrol_fields("job", job)[0]
    except commands.SlurmError:
        return ""
    return f" ({fields.get('JobState', '')}, exit code {fields.get('ExitCode', '')})"
