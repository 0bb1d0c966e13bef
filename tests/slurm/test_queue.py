"""What SLURM says, passed on."""

from __future__ import annotations

import pytest

from slurm import queue
from tests.slurm.programs import Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module


def test_nodes_are_a_jobs_alone_where_its_version_of_slurm_says_so(programs: Programs) -> None:
    alone = ["OverSubscribe=NO", "OverSubscribe=NO Exclusive=NODE"]  # 22.05, 26.05
    others = [
        "OverSubscribe=OK", "OverSubscribe=YES", "OverSubscribe=NO Exclusive=NO",
        "OverSubscribe=NO Exclusive=USER", "",
    ]  # fmt: skip
    for fields in (*alone, *others):
        programs.prints("scontrol", f"JobId=7 JobName=a {fields} Contiguous=0 Requeue=1")
        assert queue.has_nodes_alone("7") is (fields in alone)


def test_a_job_is_requeued_once_the_controller_is_back(programs: Programs) -> None:
    down = "scontrol: error: Unable to contact slurm controller (connect failure)"
    programs.prints("scontrol", down, code=1, once=True)
    queue.requeue("7")
    assert programs.words("scontrol") == ["requeue", "7"]


def test_a_requeue_that_is_refused_is_not_tried_again(programs: Programs) -> None:
    programs.prints("scontrol", "Requested operation is presently disabled for job 7", code=1, once=True)
    with pytest.raises(queue.SlurmError, match="presently disabled"):
        queue.requeue("7")
