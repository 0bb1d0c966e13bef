"""Facts known of a job and passed on, by all that SLURM's commands may say on other people's clusters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm import commands, jobs
from slurm.jobs import JobOrigin, JobReport, SubmittedJob
from tests.slurm.programs import Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module
ME = 1000
SOMEBODY = 1001
FOLDER = Path("/results/sweeps/s/a0")
JOB = SubmittedJob("12_1", "s-a0", JobOrigin(FOLDER, 1), "here", ME)
THEIRS = JOB._replace(user=SOMEBODY)
NAMELESS = JOB._replace(id=None)
HERE = "ClusterName             = here\nPrivateData             = none"
PRIVATE = HERE.replace("none", "accounts,jobs,users")
HEAD = "JOBID|STATE|REASON|NODELIST|END_TIME|NAME|COMMAND\n"
ROWS = (
    HEAD
    + """12_0|RUNNING|None|n1|N/A|s-a0|/results/sweeps/s/a0/1.sh
12_1|{}|None|n1|N/A|s-a0|/results/sweeps/s/a0/1.sh"""
)
RUNNING = ROWS.format("RUNNING")
BRACKETS = f"""{HEAD}12_[0-3,7%2]|PENDING|Priority||N/A|s-a0|/results/sweeps/s/a0/1.sh
14_[1-9...]|PENDING|Priority||N/A|a|/elsewhere/1.sh"""
RENAMED = RUNNING.replace("|s-a0", "|another")
COPIED = RUNNING.replace("/results/", "/spool/")
ANOTHERS = RENAMED.replace("/results/", "/spool/")  # it has the id, and is another job
NONE = HEAD + "13|RUNNING|None|n1|N/A|other|/elsewhere/1.sh"


# A job, what squeue, sacct and scontrol print, and what is known of the job then.
SHOWN = [
    (JOB, RUNNING, "", HERE, "queued", "RUNNING"),
    (THEIRS, ROWS.format("PENDING"), "", PRIVATE, "queued", "PENDING"),
    (JOB, ROWS.format("NODE_FAIL"), "", HERE, "ended", "NODE_FAIL"),
    (JOB, NONE, "12_1|TIMEOUT|2026-01-01T00:00:00|n1|s-a0", HERE, "ended", "TIMEOUT"),
    (JOB, NONE, "12_[0-3,7%2]|CANCELLED by 7|Unknown|None assigned|s-a0", HERE, "ended", "CANCELLED"),
    (JOB, NONE, "12_1|COMPLETED|2020-01-01T00:00:00|n1|of-before", HERE, "forgotten", ""),
    (JOB, NONE, "12_1|RUNNING|Unknown|n1|s-a0", HERE, "forgotten", ""),  # never closed in the database
    (THEIRS, NONE, "", HERE, "forgotten", ""),
    (JOB, NONE, "", PRIVATE, "forgotten", ""),
    (THEIRS, NONE, "", PRIVATE, "unknown", ""),
    (JOB._replace(user=None), NONE, "", PRIVATE, "unknown", ""),
    (NAMELESS, BRACKETS, "", HERE, "queued", "PENDING"),
    (JOB, COPIED, "", HERE, "queued", "RUNNING"),
    (JOB, RENAMED, "", HERE, "queued", "RUNNING"),
    (JOB, ANOTHERS, "", HERE, "unknown", ""),
    (NAMELESS, NONE, "", HERE, "forgotten", ""),
    (NAMELESS._replace(user=SOMEBODY), NONE, "", PRIVATE, "unknown", ""),
    (JOB._replace(cluster="there"), NONE, "", HERE, "forgotten", ""),  # reached by its name
    (JOB._replace(cluster="there", user=SOMEBODY), NONE, "", HERE, "unknown", ""),
]  # fmt: skip


def test_what_slurm_does_not_show_is_over_only_where_it_would_show_it(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: ME)
    for row in SHOWN:
        job, squeue, sacct, config, known, state = row
        programs.prints("squeue", squeue)
        programs.prints("sacct", sacct)
        programs.prints("scontrol", config)
        jobs._cluster_settings.cache_clear()
        report = jobs.query_jobs([job])[job]
        assert (report.status, report.state) == (known, state), row
        if known in ("queued", "ended"):
            assert report.id == "12_1", row


def test_a_cluster_that_can_not_be_asked_from_here_leaves_its_jobs_unknown(programs: Programs) -> None:
    programs.prints("scontrol", HERE)
    programs.prints("squeue", "squeue: error: No cluster 'there' known by database.", code=1)
    job = JOB._replace(cluster="there")
    report = jobs.query_jobs([job])[job]
    assert report.status == "unknown"
    assert "on the cluster there, and SLURM here is here" in report.reason
    assert "--clusters=there" in programs.words("squeue")


def test_an_error_is_no_answer_except_that_there_is_no_such_job(programs: Programs) -> None:
    programs.prints("scontrol", HERE)
    programs.prints("sacct", "Slurm accounting storage is disabled", code=1)
    programs.prints("squeue", "slurm_load_jobs error: Invalid job id specified", code=1)
    assert jobs.query_jobs([JOB]) == {JOB: JobReport("forgotten", "12_1")}
    for error in (
        "slurm_load_jobs error: Unable to contact slurm controller",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "This cluster is in maintenance until Monday.",
    ):
        programs.prints("squeue", error, code=1)
        with pytest.raises(commands.SlurmError, match=error):
            jobs.query_jobs([JOB])
    programs.prints("squeue", "   id  user      state    (of 5 minutes ago)\n   13  somebody  running")
    with pytest.raises(commands.SlurmError, match="squeue of this machine does not answer as SLURM's does"):
        jobs.query_jobs([JOB])


def test_what_a_person_exported_hides_no_job(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.prints("squeue", RUNNING)
    programs.prints("scontrol", HERE)
    exported = {
        "SQUEUE_STATES", "SQUEUE_PARTITION", "SQUEUE_FORMAT", "SQUEUE_USERS", "SCANCEL_USER",
        "SACCT_FEDERATION", "SCONTROL_ALL", "SINFO_PARTITION", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN",
    }  # fmt: skip
    for name in (*exported, "LOGNAME", "USER"):
        monkeypatch.setenv(name, "x")
    assert jobs.query_jobs([JOB])[JOB].status == "queued"
    assert {"--jobs=12", "--all", "--array", "--states=all"} <= {*programs.words("squeue")}
    assert not {*programs.environment("squeue")} & exported


def test_what_goes_on_after_scancel_is_told_with_its_words(programs: Programs) -> None:
    mine, theirs = JobReport("queued", "11", "RUNNING"), JobReport("queued", "12", "RUNNING")
    programs.prints("scontrol", HERE)
    programs.prints("squeue", HEAD + "11|CANCELLED|None|n1|N/A|a|/a\n12|RUNNING|None|n1|N/A|a|/a")
    programs.prints(
        "scancel", "scancel: error: Kill job error on job id 12: Access/permission denied", code=1
    )
    refused = jobs.try_cancel_jobs([mine, theirs])
    assert [*refused] == [theirs]
    assert "permission denied" in refused[theirs]


def test_nodes_are_a_jobs_alone_where_its_version_of_slurm_says_so(programs: Programs) -> None:
    alone = ["OverSubscribe=NO", "OverSubscribe=NO Exclusive=NODE"]  # 22.05, 26.05
    others = [
        "OverSubscribe=OK", "OverSubscribe=YES", "OverSubscribe=NO Exclusive=NO",
        "OverSubscribe=NO Exclusive=USER", "",
    ]  # fmt: skip
    for fields in (*alone, *others):
        programs.prints("scontrol", f"JobId=7 JobName=a {fields} Contiguous=0 Requeue=1")
        assert commands.has_exclusive_nodes("7") is (fields in alone)


def test_a_job_is_requeued_once_the_controller_is_back(programs: Programs) -> None:
    down = "scontrol: error: Unable to contact slurm controller (connect failure)"
    programs.prints("scontrol", down, code=1, once=True)
    commands.requeue_job("7")
    assert programs.words("scontrol") == ["requeue", "7"]


def test_a_requeue_that_is_refused_is_not_tried_again(programs: Programs) -> None:
    programs.prints("scontrol", "Requested operation is presently disabled for job 7", code=1, once=True)
    with pytest.raises(commands.SlurmError, match="presently disabled"):
        commands.requeue_job("7")
