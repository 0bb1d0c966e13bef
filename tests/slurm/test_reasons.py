"""Meanings of SLURM's reasons for a person, and the advice that goes with them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from slurm.reasons import NOT_BY_ITSELF, UNTIL_RELEASED, explain_pending_reason, explain_sbatch_refusal


def words(text: str) -> Iterator[str]:
    """Assoc/QOS Grp -> AssocGrp, QOSGrp: every choice of each part."""
    for line in text.strip().splitlines():
        parts = [[each.strip("-") for each in part.split("/")] for part in line.split()]
        yield from map("".join, itertools.product(*parts))


# Every reason of SLURM 25.11, and two of 26.11, by what is to be told of it (src/common/job_state_reason.c).
RESOURCES = "BB/Billing/Energy/GRES/License/Unknown"
BUDGET = f"""
    Assoc/QOS Grp CPUMinutesLimit/NodeMinutes/WallLimit
    Assoc/QOS Grp {RESOURCES} Minutes
    AssocGrpMemMinutes/QOSGrpMemoryMinutes
"""
JOB = f"""
    Assoc/QOS Max {RESOURCES} PerJob/MinutesPerJob
    Assoc/QOS Max BB/Billing/Energy/GRES/Unknown PerNode
    AssocMaxMem/QOSMaxMemory PerJob/PerNode/MinutesPerJob
    Assoc/QOS Max CpuPerJobLimit/CpuPerNode/CpuMinutesPerJobLimit
    Assoc/QOS Max NodePerJobLimit/NodeMinutesPerJob/WallDurationPerJobLimit
    QOSMin {RESOURCES}/CpuNotSatisfied/Memory/Node
    Association/QOS TimeLimit
    Partition NodeLimit/TimeLimit/Down/Inactive/Config
    MaxMemPerLimit/BadConstraints/DeadLine/AccountingPolicy/DependencyNeverSatisfied/BurstBufferOperation
    Invalid Account/QOS
    AccountNotAllowed/QOSNotAllowed/ReservationDeleted/ReservationInvalid
"""
SHARED = f"""
    Assoc/QOS Grp {RESOURCES} -/RunMinutes
    Assoc/QOS Grp CpuLimit/CPURunMinutesLimit/JobsLimit/MemLimit/NodeLimit/NodeRunMinutes/SubmitJobsLimit
    AssocGrpMemRunMinutes/QOSGrpMemoryRunMinutes
    QOSMax {RESOURCES}/Memory PerUser
    QOSMax CpuPerUserLimit/JobsPerUserLimit/NodePerUserLimit/SubmitJobPerUserLimit
    Max {RESOURCES}/Cpu/Memory/Node PerAccount/RunMinsPerAccount/RunMinsPerUser
    Max Jobs/SubmitJobs PerAccount
    AssocMaxJobsLimit/AssocMaxSubmitJobLimit
    Association/QOS JobLimit/ResourceLimit
"""
HELD = "JobHeldUser/JobHeldAdmin/JobHoldMaxRequeue/JobHoldMaxNodeFailRequeue/JobHoldMaxPreemptRequeue"
PASSES = """
    None/Prolog/Priority/Dependency/Resources/BeginTime/Licenses/Reservation/ReqNodeNotAvail/FrontEndDown
    SchedDefer/NodeDown/SystemFailure/JobLaunchFailure/NonZeroExitCode/RaisedSignal/TimeLimit/InactiveLimit
    QOSUsageThreshold/Cleaning/JobArrayTaskLimit/BurstBufferResources/BurstBufferStageIn/FedJobLock
    OutOfMemory/Constraints/MaxPoweredUpNodes/MpiPortsBusy
"""
BY_OTHERS = "as jobs under the same limit end"
TOLD = {
    BUDGET: (NOT_BY_ITSELF, "cluster.account or cluster.qos"), JOB: (NOT_BY_ITSELF, "change "),
    SHARED: (BY_OTHERS,), HELD: (UNTIL_RELEASED, "scontrol release"), PASSES: (),
}  # fmt: skip
SIGNS = (NOT_BY_ITSELF, UNTIL_RELEASED, BY_OTHERS, "change ")


def test_each_reason_of_slurm_is_told_as_what_it_is() -> None:
    reasons = set[str]()
    for kind, signs in TOLD.items():
        for reason in words(kind):
            assert reason not in reasons
            reasons.add(reason)
            said = explain_pending_reason(reason)
            assert said.startswith(reason) or reason == "None"
            assert all(sign in said for sign in signs), said
            assert sum(sign in said for sign in SIGNS[:3]) == bool(signs), said
    assert len(reasons) == 219  # one of them, QOSMaxBBMinutesPerJob, SLURM calls Assoc...


# As SLURM 26.05 has them (libslurmfull); scontrol writes underscores for blanks.
TOPOLOGY = (
    "No suitable topology unit found for segment", "Insufficient resources in topology unit",
    "No_available_nodes_in_topology", "Exceeded maximum node limit during topology allocation",
)  # fmt: skip


def test_a_reason_that_names_the_topology_is_told_with_what_ends_it() -> None:
    for reason in TOPOLOGY:
        said = explain_pending_reason(reason)
        assert said.startswith(f"{reason}: it begins when enough nodes that lie together")
        assert "--segment, --switches and --nodelist out of cluster.sbatch" in said


def test_a_job_that_is_held_after_failures_is_told_of_the_limit() -> None:
    for reason, limit in {
        "JobHoldMaxRequeue": "MaxBatchRequeue",
        "JobHoldMaxNodeFailRequeue": "its nodes failed more often than MaxNodeFailRequeue of slurm.conf",
        "node_failure_requeue_limit_exceeded_requeued_held": "MaxNodeFailRequeue",
        "preemption_requeue_limit_exceeded_requeued_held": "MaxPreemptRequeue",
    }.items():
        said = explain_pending_reason(reason)
        assert limit in said
        assert UNTIL_RELEASED in said


def test_more_cores_than_a_partition_has_are_no_fault_of_its_name() -> None:
    assert "change cluster.cpus_per_worker, " in explain_pending_reason("PartitionConfig")
    assert "change cluster.partition" in explain_pending_reason("PartitionDown")


POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


REFUSALS = {
    "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed":
        "change cluster.partition",
    "Invalid account or account/partition combination specified": "change cluster.account",
    "sbatch: error: Batch job submission failed: Invalid feature specification": "cluster.constraint",
    "sbatch: error: Batch job submission failed: Invalid qos specification": "change cluster.qos",
    "sbatch: error: Batch job submission failed: Requested time limit is invalid": "cluster.time_min",
    "User's group not permitted to use this partition": "change cluster.partition",
    "sbatch: error: Requested topology configuration is not available": "the --segment, --switches",
    "sbatch: error: Invalid --segment specification": "change the --segment of cluster.sbatch",
    # A reason's word tells more than the sentence behind it, which is the same for all.
    f"sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: {POLICY}": "change cluster.time_min",
    f"sbatch: error: QOSMaxGRESPerJob\nsbatch: error: {POLICY}": "change cluster.workers_per_node",
    f"sbatch: error: QOSMaxMemoryPerJob\nsbatch: error: {POLICY}": "change cluster.mem_gb",
    f"sbatch: error: QOSGrpCPUMinutesLimit\nsbatch: error: {POLICY}": "whose budget is used up",
    f"sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: {POLICY}": "fewer at a time",
    f"sbatch: error: Batch job submission failed: {POLICY}": "change cluster.qos or cluster.account",
}  # fmt: skip


def test_a_refusal_is_passed_on_with_the_field_to_change() -> None:
    for said, advice in REFUSALS.items():
        sentence = explain_sbatch_refusal(said)
        assert advice in sentence
        assert sentence.count("change cluster.") <= 1
        assert re.sub(r"sbatch: |error: ", "", said.splitlines()[0]) in sentence


def test_what_follows_a_reason_changes_nothing() -> None:
    assert explain_pending_reason("ReqNodeNotAvail, UnavailableNodes:n[1-2]").startswith(
        "ReqNodeNotAvail, Unav"
    )
    assert UNTIL_RELEASED in explain_pending_reason("job requeued in held state")
    assert UNTIL_RELEASED in explain_pending_reason("launch_failed_requeued_held")
    assert explain_pending_reason("a reason that nobody knows") == "a reason that nobody knows"
