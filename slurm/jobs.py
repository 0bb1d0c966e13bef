"""The state of jobs, asked by id and cluster, whoever submitted them, whatever a person has exported.

That a job is not shown does not mean that it is over: it may be another cluster's, or one that this person
may not see. Only where this controller would show it if it had it, it is taken to have ended.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from slurm import commands, environment, partition

# States of jobs that are over, among all that squeue and sacct have; a job in any other goes on.
ENDED_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "TIMEOUT",
}  # fmt: skip
REFUSED_STATE_AND_REASON = ["FAILED", "BadConstraints"]  # SLURM keeps some jobs that it has refused
SQUEUE_FORMAT = "--format=%i|%T|%r|%N|%e|%j|%o"
JobStatus = Literal["queued", "ended", "forgotten", "unknown"]
ARRAY_ELEMENTS = re.compile(r"(\d+)_\[([\d,:-]+)(?:%\d+)?\]")  # such as 12_[0-3,7%2]


class JobOrigin(NamedTuple):
    """The place of a job among those that were submitted."""

    script_folder: Path
    array_index: int  # 0 for a single job


class JobReport(NamedTuple):
    """SLURM's report on a job. `forgotten`: its cluster does not have it any more, so it has ended."""

    status: JobStatus
    id: str | None = None
    state: str = ""  # PENDING, RUNNING, ...; COMPLETED, CANCELLED, NODE_FAIL, ...
    reason: str = ""  # why it waits; why it is unknown
    nodes: str = ""
    ended_at: str = ""  # local time
    name: str = ""
    script: str = ""
    cluster: str | None = None  # None: the one that was asked

    def seconds_since_end(self) -> float | None:
        """Return the seconds since the job's end; None where SLURM does not know a time."""
        try:
            return time.time() - time.mktime(time.strptime(self.ended_at, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:  # "Unknown"
            return None

    @property
    def origin(self) -> JobOrigin:
        """The folder of the job's script, and the job's number in the array."""
        number = str(self.id).partition("_")[2]
        return JobOrigin(Path(self.script).parent, int(number) if number.isdigit() else 0)


class SubmittedJob(NamedTuple):
    """A job as it was noted when it was submitted."""

    id: str | None  # 12, or 12_3 for a job of an array; None: who submitted it ended before it was known
    name: str | None = None  # None: any
    origin: JobOrigin | None = None
    cluster: str | None = None  # None: the one that is asked
    user: int | None = None  # who submitted it

    def has_name_or_origin_of(self, report: JobReport) -> bool:
        """Tell whether a report of this id means this job: a controller without its state counts from 1."""
        return self.name in (None, report.name) or self.origin == report.origin


def query_jobs(submitted: Iterable[SubmittedJob]) -> dict[SubmittedJob, JobReport]:
    """Ask SLURM about jobs: once for those of a cluster, and once more its accounting.

    Raises:
        SlurmError: there is no SLURM here, or its controller does not answer.
    """
    queried = set(submitted)
    report_by_job: dict[SubmittedJob, JobReport] = {}
    if not queried:
        return report_by_job
    settings = _cluster_settings(environment.slurm_conf_file())
    for cluster in {job.cluster for job in queried}:
        its_jobs = [job for job in queried if job.cluster == cluster]
        if cluster in (None, settings.name):
            report_by_job |= _query_cluster(its_jobs, [], settings.hides_jobs)
            continue
        try:
            answers = _query_cluster(its_jobs, [f"--clusters={cluster}"], hides_jobs=True)
            report_by_job |= {job: report._replace(cluster=cluster) for job, report in answers.items()}
        except commands.SlurmError as error:
            why = (
                f"its job is on the cluster {cluster}, and SLURM here is {settings.name} ({error}); let "
                "SLURM_CONF, or cluster.slurm_conf in a file of conf/cluster, name that one's configuration"
            )
            report_by_job |= {job: JobReport("unknown", job.id, reason=why) for job in its_jobs}
    return report_by_job


def try_cancel_jobs(reports: Iterable[JobReport]) -> dict[JobReport, str]:
    """Stop jobs, waiting or running; return those that go on, each with SLURM's words on it."""
    reports = {report for report in reports if report.id}
    refusal_by_report: dict[JobReport, str] = {}
    for cluster in {report.cluster for report in reports}:
        report_by_id = {str(report.id): report for report in reports if report.cluster == cluster}
        try:
            commands.cancel_jobs(sorted(report_by_id), *([f"--clusters={cluster}"] if cluster else []))
        except commands.SlurmError as error:
            for job_id in unfinished_jobs_by_id(report_by_id, cluster):
                refusal_by_report[report_by_id[job_id]] = str(error)
    return refusal_by_report


def query_cluster_name() -> str:
    """Return the name of the cluster that SLURM's commands speak to.

    Raises:
        SlurmError: there is no SLURM here, or its controller does not answer.
    """
    return _cluster_settings(environment.slurm_conf_file()).name


def unfinished_jobs_by_id(ids: Iterable[str], cluster: str | None = None) -> dict[str, JobReport]:
    """Return the user's jobs among these that have not ended, by id."""
    submitted = (SubmittedJob(job_id, cluster=cluster, user=os.getuid()) for job_id in ids)
    reports = query_jobs(submitted).values()
    return {report.id: report for report in reports if report.status == "queued" and report.id}


def find_job_by_script(script: Path) -> str | None:
    """Return the id of the user's job, or array, that was made of a script, ended or not.

    Returns:
        None where there is none, or SLURM refused it.

    Raises:
        SlurmError: SLURM can't be asked.
    """
    output = commands.run_command(
        "squeue", f"--user={os.getuid()}", "--all", "--states=all", "--noheader", "--format=%F|%T|%r|%o"
    )
    for line in output.splitlines():
        job, *state_and_reason, path = line.split("|", 3) if line.count("|") >= 3 else (line, "")
        if Path(path) == script and state_and_reason != REFUSED_STATE_AND_REASON:
            return job
    return None


class _ClusterSettings(NamedTuple):
    name: str
    hides_jobs: bool  # does it show the jobs of others to nobody?


@cache
def _cluster_settings(conf: str | None) -> _ClusterSettings:
    """Return what SLURM says of the cluster that a configuration file names."""
    del conf  # by which the answer is kept
    private = (partition.query_slurm_setting("PrivateData") or "").lower().split(",")
    return _ClusterSettings(
        partition.query_slurm_setting("ClusterName") or "", bool({"jobs", "all"} & {*private})
    )


def _query_cluster(
    submitted: Sequence[SubmittedJob], cluster_options: Sequence[str], hides_jobs: bool
) -> dict[SubmittedJob, JobReport]:
    """Ask one cluster about jobs.

    Args:
        cluster_options: words for SLURM's commands.
        hides_jobs: may it have jobs of others that it does not show?
    """
    shown = _ask_controller({_array_id(job.id) for job in submitted if job.id}, cluster_options)
    for user in {job.user for job in submitted if job.id is None and job.origin}:
        shown |= _squeue(*([] if user is None else [f"--user={user}"]), *cluster_options)
    id_by_origin: dict[JobOrigin | None, str] = {report.origin: job_id for job_id, report in shown.items()}
    id_by_job = {job: job.id or id_by_origin.get(job.origin) for job in submitted}
    end_by_id = _ask_accounting(
        {job_id for job_id in id_by_job.values() if job_id} - shown.keys(), cluster_options
    )
    report_by_job: dict[SubmittedJob, JobReport] = {}
    for job, job_id in id_by_job.items():
        report = shown.get(job_id or "")
        end = end_by_id.get(job_id or "")
        if report is not None and not job.has_name_or_origin_of(report):
            why = f"SLURM's job {job_id} is another one, with the name {report.name!r}"
            report = JobReport("unknown", job_id, reason=why)
        elif report is None and end is not None and end.status == "ended" and job.has_name_or_origin_of(end):
            report = end
        elif report is None and hides_jobs and os.getuid() not in (0, job.user):
            why = "SLURM does not show it here, and hides the jobs of others (PrivateData)"
            report = JobReport("unknown", job_id, reason=why)
        report_by_job[job] = report or JobReport("forgotten", job_id)
    return report_by_job


def _ask_controller(arrays: Collection[str], cluster_options: Sequence[str]) -> dict[str, JobReport]:
    """Return the controller's reports on jobs, ended or not, by id."""
    report_by_id: dict[str, JobReport] = {}
    for ids in commands.split_job_ids_per_command(sorted(arrays)):
        try:
            report_by_id |= _squeue(f"--jobs={','.join(ids)}", *cluster_options)
        except commands.SlurmError as error:
            if "Invalid job id" not in str(error):  # as it is said where there is none of them
                raise
    return report_by_id


def _squeue(*words: str) -> dict[str, JobReport]:
    # Hidden partitions, one line for each job of an array, and what has ended lately.
    output = commands.run_command("squeue", *words, "--all", "--array", "--states=all", SQUEUE_FORMAT)
    report_by_id = {}
    for line in output.splitlines():
        if line.count("|") >= 6:
            ids, state, *fields = line.strip().split("|", 6)
            status: JobStatus = "ended" if state in ENDED_STATES else "queued"
            for job_id in expand_job_id(ids):
                report_by_id[job_id] = JobReport(status, job_id, state, *fields)
    if report_by_id.pop("JOBID", None) is None:  # the heading; a site's own squeue may ignore its options
        raise commands.SlurmError(
            f"the squeue of this machine does not answer as SLURM's does: {output[:200]!r}"
        )
    return report_by_id


def _ask_accounting(ids: Collection[str], cluster_options: Sequence[str]) -> dict[str, JobReport]:
    """Return the ends of jobs, by id; empty on a cluster without accounting, of which there are many."""
    report_by_id = {}
    try:
        for arrays in commands.split_job_ids_per_command(sorted({_array_id(job) for job in ids})):
            for entry in commands.query_accounting("--allusers", *cluster_options, "-j", ",".join(arrays)):
                status: JobStatus = "ended" if entry.state in ENDED_STATES else "queued"
                for job_id in expand_job_id(entry.job_id):
                    report_by_id[job_id] = JobReport(
                        status, job_id, entry.state, "", entry.nodes, entry.ended_at, entry.name
                    )
    except commands.SlurmError:
        return {}
    return report_by_id


def expand_job_id(job_id: str) -> list[str]:
    """Return the ids that an id stands for: 12_[0-2,5%1] is 12_0, 12_1, 12_2 and 12_5."""
    match = ARRAY_ELEMENTS.fullmatch(job_id)
    if match is None:
        return [job_id]
    ids = []
    for elements in match[2].split(","):
        ends, _, step = elements.partition(":")
        first, _, last = ends.partition("-")
        numbers = range(int(first), int(last or first) + 1, int(step or 1))
        ids += [f"{match[1]}_{number}" for number in numbers]
    return ids


def _array_id(job: str) -> str:
    return job.partition("_")[0]
