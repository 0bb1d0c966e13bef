"""What SLURM knows of jobs: asked by id and cluster, whoever submitted them, whatever a person has exported.

That a job is not shown does not mean that it is over: it may be another cluster's, or one that this person
may not see. Only where this controller would show it if it had it, it is taken to have ended.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from slurm import commands, environment, partition

# States of jobs that are over, among all that squeue and sacct have; a job in any other goes on.
ENDED_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "TIMEOUT",
}  # fmt: skip
REFUSED_STATE_AND_REASON = [
    "FAILED",
    "BadConstraints",
]  # state and reason: SLURM keeps some jobs that it has refused
SQUEUE_FORMAT = "--format=%i|%T|%r|%N|%e|%j|%o"
JobStatus = Literal["queued", "ended", "forgotten", "unknown"]
ARRAY_ELEMENTS = re.compile(r"(\d+)_\[([\d,:-]+)(?:%\d+)?\]")  # of an array: 12_[0-3,7%2]


class JobReport(NamedTuple):
    """What SLURM says of a job. `forgotten`: its cluster does not have it any more, so it has ended."""

    known: JobStatus
    id: str | None = None
    state: str = ""  # PENDING, RUNNING, ...; COMPLETED, CANCELLED, NODE_FAIL, ...
    reason: str = ""  # why it waits; why it is unknown
    nodes: str = ""
    ended: str = ""  # local time
    cluster: str | None = None  # None: the one that was asked

    def ended_ago_s(self) -> float | None:
        """Seconds since its end; None where SLURM does not know a time."""
        try:
            return time.time() - time.mktime(time.strptime(self.ended, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:  # "Unknown"
            return None


class _JobRow(NamedTuple):
    """A job in what SLURM prints."""

    state: str
    reason: str
    nodes: str
    ended: str
    name: str
    script: str = ""

    def report(self, job: str | None, known: JobStatus) -> JobReport:
        return JobReport(known, job, self.state, self.reason, self.nodes, self.ended)

    def made_of(self, job: str) -> tuple[Path, int]:
        """The folder of its script, and its number in the array."""
        number = job.partition("_")[2]
        return Path(self.script).parent, int(number) if number.isdigit() else 0


class SubmittedJob(NamedTuple):
    """A job as it was noted when it was submitted."""

    id: str | None  # 12, or 12_3 for a job of an array; None: who submitted it ended before it was known
    name: str | None = None  # None: any
    script: Path | None = None  # the folder of its script
    number: int = 0  # in its array
    cluster: str | None = None  # None: the one that is asked
    user: int | None = None  # who submitted it

    def is_of(self, row: _JobRow) -> bool:
        """Tell whether that is this job: a controller that lost its state counts from 1 again."""
        return self.name in (None, row.name) or Path(row.script).parent == self.script


def query_jobs(noted: Iterable[SubmittedJob]) -> dict[SubmittedJob, JobReport]:
    """What SLURM says of each of these jobs; one question for those of a cluster, and one to its accounting.

    Raises:
        SlurmError: there is no SLURM here, or its controller does not answer.
    """
    wanted, found = set(noted), dict[SubmittedJob, JobReport]()
    if not wanted:
        return found
    here, hides = _cluster_settings(environment.slurm_conf())
    for cluster in {job.cluster for job in wanted}:
        of_it = [job for job in wanted if job.cluster == cluster]
        if cluster in (None, here):
            found |= _query_cluster(of_it, (), hides)
            continue
        try:
            answers = _query_cluster(of_it, (f"--clusters={cluster}",), hides=True)
            found |= {job: report._replace(cluster=cluster) for job, report in answers.items()}
        except commands.SlurmError as error:
            why = (
                f"its job is on the cluster {cluster}, and SLURM here is {here} ({error}); let SLURM_CONF, "
                "or cluster.slurm_conf in a file of conf/cluster, name that one's configuration"
            )
            found |= {job: JobReport("unknown", job.id, reason=why) for job in of_it}
    return found


def cancel_jobs(reports: Iterable[JobReport]) -> dict[JobReport, str]:
    """Stop these jobs, waiting or running; returns those that go on, and what SLURM says of it."""
    wanted, refused = {report for report in reports if report.id}, dict[JobReport, str]()
    for cluster in {report.cluster for report in wanted}:
        of_it = {str(report.id): report for report in wanted if report.cluster == cluster}
        try:
            commands.cancel_jobs(sorted(of_it), *([f"--clusters={cluster}"] if cluster else []))
        except commands.SlurmError as error:
            noted = [SubmittedJob(job, cluster=cluster, user=os.getuid()) for job in of_it]
            goes_on = {str(now.id) for now in query_jobs(noted).values() if now.known == "queued"}
            refused |= {of_it[job]: str(error) for job in goes_on}
    return refused


def cluster_name() -> str:
    """The name of the cluster that SLURM's commands speak to.

    Raises:
        SlurmError: there is no SLURM here, or its controller does not answer.
    """
    return _cluster_settings(environment.slurm_conf())[0]


def unfinished_jobs_by_id(ids: Iterable[str]) -> dict[str, JobReport]:
    """Those of these jobs of one's own that have not ended, by id."""
    reports = query_jobs(SubmittedJob(job, user=os.getuid()) for job in ids).values()
    return {report.id: report for report in reports if report.known == "queued" and report.id}


def find_job_by_script(script: Path) -> str | None:
    """Return the id of the job, or the array, that was made of a script; None: this person has none, ended or
    not, or SLURM refused it.

    Raises:
        SlurmError: SLURM can't be asked.
    """
    said = commands.run_command(
        "squeue", f"--user={os.getuid()}", "--all", "--states=all", "--noheader", "--format=%F|%T|%r|%o"
    )
    rows = (line.split("|", 3) for line in said.splitlines() if line.count("|") >= 3)
    made = (job for job, *state, path in rows if Path(path) == script and state != REFUSED_STATE_AND_REASON)
    return next(made, None)


@cache
def _cluster_settings(conf: str | None) -> tuple[str, bool]:
    """A cluster's name, and whether it shows the jobs of others to nobody; by SLURM's configuration file."""
    del conf  # by which the answer is kept
    private = (partition.slurm_setting("PrivateData") or "").lower().split(",")
    return partition.slurm_setting("ClusterName") or "", bool({"jobs", "all"} & set(private))


def _query_cluster(
    noted: Sequence[SubmittedJob], where: tuple[str, ...], hides: bool
) -> dict[SubmittedJob, JobReport]:
    """The same of jobs of one cluster.

    Args:
        where: words for SLURM's commands.
        hides: may it have jobs of others that it does not show?
    """
    rows = _controller_rows(sorted({_array_id(job.id) for job in noted if job.id}), where)
    scripts = dict[tuple[Path, int], str]()
    for user in {job.user for job in noted if job.id is None and job.script}:
        of_user = _squeue_rows(*([] if user is None else [f"--user={user}"]), *where)
        scripts |= {row.made_of(identity): identity for identity, row in of_user.items()}
        rows |= of_user
    ids = {job: job.id or scripts.get((job.script or Path(), job.number)) for job in noted}
    left = [identity for identity in ids.values() if identity and identity not in rows]
    ended = _accounting_rows(left, where) if left else {}
    found = dict[SubmittedJob, JobReport]()
    for job, identity in ids.items():
        row = rows.get(identity or "")
        if row is not None and not job.is_of(row):
            why = f"SLURM's job {identity} is another one, with the name {row.name!r}"
            found[job] = JobReport("unknown", identity, reason=why)
        elif row is not None:
            found[job] = row.report(identity, "ended" if row.state in ENDED_STATES else "queued")
        elif (end := ended.get(identity or "")) and end.state in ENDED_STATES and job.is_of(end):
            found[job] = end.report(identity, "ended")
        elif hides and os.getuid() not in (0, job.user):
            why = "SLURM does not show it here, and hides the jobs of others (PrivateData)"
            found[job] = JobReport("unknown", identity, reason=why)
        else:
            found[job] = JobReport("forgotten", identity)
    return found


def _controller_rows(arrays: Sequence[str], where: tuple[str, ...]) -> dict[str, _JobRow]:
    """What the controller has of these jobs, ended or not, by id."""
    found = dict[str, _JobRow]()
    for part in commands.split_job_ids(arrays):
        try:
            found |= _squeue_rows(f"--jobs={','.join(part)}", *where)
        except commands.SlurmError as error:
            if "Invalid job id" not in str(error):  # as it is said where there is none of them
                raise
    return found


def _squeue_rows(*words: str) -> dict[str, _JobRow]:
    # Hidden partitions, one line for each job of an array, and what has ended lately.
    said = commands.run_command("squeue", *words, "--all", "--array", "--states=all", SQUEUE_FORMAT)
    fields = [line.strip().split("|", 6) for line in said.splitlines() if line.count("|") >= 6]
    found = {each: _JobRow(*rest) for job, *rest in fields for each in expand_job_id(job)}
    if found.pop("JOBID", None) is None:  # the heading; a site's own squeue may ignore what it was asked
        raise commands.SlurmError(
            f"the squeue of this machine does not answer as SLURM's does: {said[:200]!r}"
        )
    return found


def _accounting_rows(ids: Collection[str], where: tuple[str, ...]) -> dict[str, _JobRow]:
    """The ends of these jobs, by id. Empty on a cluster without accounting, of which there are many."""
    found = dict[str, _JobRow]()
    try:
        for part in commands.split_job_ids(sorted({_array_id(job) for job in ids})):
            for job, end in commands.query_accounting("--allusers", *where, "-j", ",".join(part)):
                found |= dict.fromkeys(
                    expand_job_id(job), _JobRow(end.state, "", end.nodes, end.at, end.name)
                )
    except commands.SlurmError:
        return {}
    return found


def expand_job_id(job: str) -> Iterator[str]:
    """The ids that an id stands for: 12_[0-2,5%1] is 12_0, 12_1, 12_2 and 12_5."""
    if (match := ARRAY_ELEMENTS.fullmatch(job)) is None:
        yield job
        return
    for part in match[2].split(","):
        ends, _, step = part.partition(":")
        first, _, last = ends.partition("-")
        for number in range(int(first), int(last or first) + 1, int(step or 1)):
            yield f"{match[1]}_{number}"


def _array_id(job: str) -> str:
    return job.partition("_")[0]
