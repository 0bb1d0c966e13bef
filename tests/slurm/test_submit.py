"""The call of sbatch, and the reading of its answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm import commands, environment
from slurm.batch_script import BatchScript
from slurm.submit import submit_array
from slurm.task import WorkerTask
from tests.slurm.programs import Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module
SCRIPT = BatchScript(
    {"job-name": "a", "time": 5, "partition": "gpu", "gres": "gpu:2", "requeue": True}, [], [], ["true"]
)
AROUND = {
    "SLURM_CONF": "/etc/slurm-b/slurm.conf", "SLURM_CLUSTERS": "b", "SLURM_JOB_ID": "12", "SLURM_NTASKS": "4",
    "RANK": "3",
}  # fmt: skip


def submitted(folder: Path, tasks: int = 1) -> tuple[list[str], list[str]]:
    """Submit an array; return the ids of its jobs and the lines that were reported."""
    said = list[str]()
    ids, cluster = submit_array([WorkerTask("spec", "")] * tasks, folder / "jobs", SCRIPT, said.append)
    assert cluster in (None, "devcluster")
    return ids, said


@pytest.mark.parametrize(("given", "seen"), [(None, "/etc/slurm-b/slurm.conf"), ("/mine.conf", "/mine.conf")])
def test_a_job_of_our_own_is_hidden_from_sbatch_and_the_choice_of_a_cluster_is_not(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch, given: str | None, seen: str
) -> None:
    for name, value in AROUND.items():
        monkeypatch.setenv(name, value)
    programs.prints("sbatch", "7")
    with environment.temporary_slurm_conf_if_given(given):
        assert submitted(tmp_path) == (["7"], [])
    around = programs.environment("sbatch")
    assert around["SLURM_CONF"] == seen
    assert around["SLURM_CLUSTERS"] == "b"
    assert not {"SLURM_JOB_ID", "SLURM_NTASKS", "RANK"} & set(around)
    assert {name: os.environ[name] for name in AROUND} == AROUND


CHOSEN = "container= decides"
# What a person exported, and why it is set aside; empty: it counts.
EXPORTED = {
    "SBATCH_ACCOUNT=mine": "",
    "SBATCH_PARTITION=cpu": "--partition=gpu counts",
    "SBATCH_TIMELIMIT=9": "--time=5 counts",
    "SBATCH_GPUS_PER_NODE=8": "--gres=gpu:2 counts",
    "SBATCH_NO_REQUEUE=1": "--requeue counts",
    "SBATCH_WAIT=1": "sbatch is to return at once",
    "SBATCH_ARRAY_INX=0-3": "a job for each run",
    "SBATCH_CONTAINER=/bundle": CHOSEN,
}
# Of containers, names alone are told: values may be secret.
OF_CONTAINERS = {
    "PYXIS_CONTAINER_IMAGE": CHOSEN,
    "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image": CHOSEN,
    "APPTAINER_BIND": CHOSEN,
    "APPTAINERENV_OMP_NUM_THREADS": CHOSEN,
    "SINGULARITY_DOCKER_PASSWORD": CHOSEN,
    "APPTAINER_CACHEDIR": "",
    "ENROOT_CACHE_PATH": "",
}


def test_what_a_person_exported_counts_where_the_configuration_says_nothing(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.prints("sbatch", "7")
    for number, (exports, aside) in enumerate((EXPORTED | OF_CONTAINERS).items()):
        name, _, value = exports.partition("=")
        with monkeypatch.context() as patch:
            patch.setenv(name, value or "of the person")
            ids, said = submitted(tmp_path / str(number))
            assert ids == ["7"]
            assert (name in programs.environment("sbatch")) == (not aside), exports
            assert said == ([f"exported, and set aside: {exports} ({aside})"] if aside else [])
            if value:
                assert environment.exported_sbatch_options(SCRIPT.text_by_option) == (
                    [] if aside else [exports]
                )
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")  # as the configuration has it
    assert submitted(tmp_path / "same") == (["7"], [])


def test_the_id_is_found_among_what_a_sites_own_sbatch_prints(tmp_path: Path, programs: Programs) -> None:
    answers = [
        "12",
        "12;devcluster",
        "Welcome! This is your job 3 of 500\n12\nHave a nice day",
        "Submitted batch job 12",
        "job 7 of 500\nSubmitted batch job 12 on cluster devcluster",
    ]
    for number, answer in enumerate(answers):
        programs.prints("sbatch", answer)
        folder = tmp_path / str(number)
        assert submitted(folder, tasks=2) == (["12_0", "12_1"], []), answer
        assert "--parsable" in programs.words("sbatch")
        assert {path.name for path in (folder / "jobs").iterdir()} == {
            "12_0_submitted.pkl", "12_1_submitted.pkl", "12_submission.sh",
        }  # fmt: skip


def test_an_answer_that_names_no_job_is_looked_up_in_the_queue(tmp_path: Path, programs: Programs) -> None:
    unclear = {
        "500\n12": 0,
        "": 0,
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv": 1,
    }
    for number, (answer, code) in enumerate(unclear.items()):
        folder = tmp_path / str(number)
        programs.prints("sbatch", answer, code=code)
        queued = "11|RUNNING|None|/elsewhere/1.sh\n12|PENDING|None|$SCRIPT"
        programs.prints("squeue", queued, SCRIPT=f"$(ls {folder}/jobs/*.sh)")
        ids, said = submitted(folder)
        assert ids == ["12"]
        assert "SLURM has the job 12, of which sbatch said" in said[0]


def test_a_job_is_neither_refused_nor_queued_as_long_as_nobody_can_tell(
    tmp_path: Path, programs: Programs
) -> None:
    programs.prints("sbatch", "sbatch: error: Unable to contact slurm controller", code=1)
    programs.prints("squeue", "slurm_load_jobs error: Unable to contact slurm controller", code=1)
    with pytest.raises(
        commands.UncertainSubmissionError,
        match=r"not known whether SLURM has taken the job.*Unable to contact",
    ):
        submitted(tmp_path)


@pytest.mark.parametrize("kept", ["", "12|FAILED|BadConstraints|$SCRIPT"])
def test_a_refusal_is_no_doubt_also_where_slurm_keeps_the_job(
    tmp_path: Path, programs: Programs, kept: str
) -> None:
    programs.prints("sbatch", "sbatch: error: invalid partition specified: gpu", code=1)
    script = f"$(ls {tmp_path}/jobs/*.sh)"
    programs.prints("squeue", f"11|RUNNING|None|/elsewhere/1.sh\n{kept}", SCRIPT=script)
    with pytest.raises(ValueError, match=r"refused the job: invalid partition.*cluster\.partition"):
        submitted(tmp_path)
